"""Programs, memory and bounds of the xla backend."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tiletrace as tt
from tests.lowering.xla.kernels import call, traced
from tests.tolerances import assert_close
from tiletrace.core.errors import LoweringError
from tiletrace.lowering.xla import run as backend

rng = np.random.default_rng(7)


@pytest.fixture(params=["in order", "side by side"], autouse=True)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
  """Every test runs with programs one after another, and, where they are independent, side by side."""
  if request.param == "in order":
    monkeypatch.setattr(backend, "_SIDE_BY_SIDE_BYTES", 0)


def normal(*shape: int, dtype: object = np.float32) -> np.ndarray:
  return rng.standard_normal(shape).astype(dtype)


def double_kernel(x, y, *, block):
  i, j = tt.program_id(0), tt.program_id(1)
  at = (tt.block(i, block[0]), tt.block(j, block[1]))
  y[at] = x[at] * 2


@pytest.mark.parametrize("shape", [(7, 5), (8, 8), (1, 1), (13, 130)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_blocks_over_the_edge_are_filled_and_dropped(shape, dtype):
  x = (normal(*shape) * 40).astype(np.uint8 if dtype == "uint8" else jnp.dtype(dtype))
  block = (4, 8)
  y, = call(double_kernel, x, out=(shape, x.dtype), grid=(tt.cdiv(shape[0], 4), tt.cdiv(shape[1], 8)), block=block)
  np.testing.assert_array_equal(y, x * x.dtype.type(2))


@pytest.mark.parametrize(("dtype", "poison"), [
  (np.float32, np.nan), (jnp.bfloat16, np.nan), (np.float16, np.nan), (np.int32, -2**31), (np.int8, -128),
  (np.uint8, 255), (np.uint32, 2**32 - 1), (np.bool_, False)])
def test_unwritten_elements_are_poison(dtype, poison):
  def kernel(x, y):
    y[tt.ds(2, 3)] = x[...]

  x = (normal(3) > 0).astype(dtype)
  y, = call(kernel, x, out=((9,), dtype), grid=(1,))
  want = np.full(9, poison, dtype)
  want[2:5] = x
  assert_close(y, want, "exact")


def test_unwritten_buffers_are_poison():
  def kernel(y):
    s = tt.alloc_shared((4,), np.float32)
    s[:2] = 1.0
    y[...] = s[...]

  y, = call(kernel, out=((4,), np.float32), grid=(1,))
  np.testing.assert_array_equal(y, [1, 1, np.nan, np.nan])


@pytest.mark.parametrize("start", [-9, -5, -4, -1, 0, 3, 6, 7, 12, 2**31 - 5])
def test_starts_may_lie_anywhere(start):
  def kernel(x, s, y, z):
    y[...] = tt.load(x.at[tt.ds(s[...], 4)], fill_value=-1.0)
    z[tt.ds(s[...], 4)] = 1.0

  x = normal(7)
  y, z = call(kernel, x, np.int32(start), out=[((4,), np.float32), ((7,), np.float32)], grid=(1,))
  index = np.arange(start, start + 4, dtype=np.int64)
  inside = (index >= 0) & (index < 7)
  np.testing.assert_array_equal(y, np.where(inside, x[np.clip(index, 0, 6)], -1))
  np.testing.assert_array_equal(z, np.where(np.isin(np.arange(7), index), 1, np.nan))


@pytest.mark.parametrize("start", [-3, 0, 1, 6, 11])
def test_strides_skip_elements_in_loads_and_stores(start):
  def kernel(x, s, y, z):
    y[...] = x[tt.ds(s[...], 4, stride=3)]
    z[tt.ds(s[...], 4, stride=3)] = x[tt.ds(s[...], 4, stride=3)]

  x = normal(10)
  y, z = call(kernel, x, np.int32(start), out=[((4,), np.float32), ((10,), np.float32)], grid=(1,))
  index = start + 3 * np.arange(4)
  inside = (index >= 0) & (index < 10)
  np.testing.assert_array_equal(y, np.where(inside, x[np.clip(index, 0, 9)], 0))
  np.testing.assert_array_equal(z, np.where(np.isin(np.arange(10), index), x, np.nan))


def test_an_integer_index_out_of_range_reads_the_fill_and_stores_nothing():
  def kernel(x, i, y, z):
    y[...] = x[i[...], :]
    z[i[...], :] = 1.0

  x = normal(3, 4)
  for i in (-1, 1, 3):
    y, z = call(kernel, x, np.int32(i), out=[((4,), np.float32), ((3, 4), np.float32)], grid=(1,))
    np.testing.assert_array_equal(y, x[i] if i == 1 else np.zeros(4))
    np.testing.assert_array_equal(~np.isnan(z).any(axis=1), np.arange(3) == i)


def test_views_end_where_they_say():
  def kernel(x, bounds, y, z):
    rows = x.at[tt.ds(bounds[0], bounds[1]), :]
    out = z.at[tt.ds(bounds[0], bounds[1]), :]
    i = tt.program_id(0)
    y[tt.block(i, 4), :] = tt.load(rows.at[tt.block(i, 4), :], fill_value=-1.0)
    out[tt.block(i, 4), :] = rows[tt.block(i, 4), :]

  x = normal(20, 3)
  for start, size in ((3, 9), (0, 0), (15, 8), (5, 4)):
    y, z = call(kernel, x, np.asarray([start, size], np.int32), out=[((12, 3), np.float32), ((20, 3), np.float32)],
                grid=(3,))
    stop = min(start + size, 20)
    want_y, want_z = np.full((12, 3), -1, np.float32), np.full((20, 3), np.nan, np.float32)
    want_y[:stop - start], want_z[start:stop] = x[start:stop], x[start:stop]
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(z, want_z)


def test_transposed_views_are_read_and_written():
  def kernel(x, y, z):
    i = tt.program_id(0)
    block = x.at[1, tt.block(i, 4), :].T                        # [5, 4]
    y.T[:, tt.block(i, 4)] = block[...]
    s = tt.alloc_shared((5, 4), np.float32)
    tt.copy(block, s)
    z[:, tt.block(i, 4)] = s.T.T[...]

  x = normal(2, 10, 5)
  y, z = call(kernel, x, out=[((10, 5), np.float32), ((5, 10), np.float32)], grid=(3,))
  np.testing.assert_array_equal(y, x[1])
  np.testing.assert_array_equal(z, x[1].T)


def test_masks_choose_elements():
  def kernel(x, y, z):
    keep = tt.arange(8) % 3 == tt.program_id(0)
    y[tt.program_id(0), :] = tt.load(x, mask=keep, fill_value=9.0)
    tt.store(z.at[tt.program_id(0), :], x[...], mask=keep)

  x = normal(8)
  y, z = call(kernel, x, out=[((2, 8), np.float32)] * 2, grid=(2,))
  keep = np.arange(8) % 3 == np.arange(2)[:, None]
  np.testing.assert_array_equal(y, np.where(keep, x, 9))
  np.testing.assert_array_equal(z, np.where(keep, x, np.nan))


def test_tt_parallel_reads_broadcasts_and_permutes():
  def kernel(x, b, y, z):
    i0 = tt.program_id(0) * 4
    for i, j in tt.parallel(4, 6):
      y[i0 + i, j] = x[i0 + i, j] + b[j]
      z[j, i0 + i] = x[i0 + i, j]

  x, b = normal(10, 6), normal(6)
  y, z = call(kernel, x, b, out=[((10, 6), np.float32), ((6, 10), np.float32)], grid=(3,))
  np.testing.assert_array_equal(y, x + b)
  np.testing.assert_array_equal(z, x.T)


def test_an_alias_is_one_reference():
  def kernel(h, d, h_out, y):
    r = tt.block(tt.program_id(0), 4)
    h_out[r, :] = h[r, :] + d[r, :]
    y[r, :] = h[r, :] * 2                                       # the new h

  h, d = normal(10, 3), normal(10, 3)
  new, y = call(kernel, h, d, out=[((10, 3), np.float32)] * 2, grid=(3,), aliases={0: 0})
  np.testing.assert_array_equal(new, h + d)
  np.testing.assert_array_equal(y, (h + d) * 2)


def test_an_alias_keeps_what_is_not_written():
  def kernel(h, h_out):
    h_out[tt.ds(tt.program_id(0) * 4 + 1, 2)] = 0.0

  h = normal(13)
  out, = call(kernel, h, out=((13,), np.float32), grid=(3,), aliases={0: 0})
  np.testing.assert_array_equal(out, np.where(np.isin(np.arange(13), [1, 2, 5, 6, 9, 10]), 0, h))


def test_programs_run_in_grid_order_where_they_depend():
  def kernel(x, y):
    i = tt.program_id(0)
    y[0] = tt.where(i == 0, 0.0, y[0]) * 0.5 + x[i]
    y[1 + i] = y[0]

  x = normal(9)
  y, = call(kernel, x, out=((10,), np.float32), grid=(9,))
  want = functools.reduce(lambda acc, v: [*acc, np.float32(acc[-1] * np.float32(0.5)) + v], x[1:], [x[0]])
  np.testing.assert_array_equal(y[1:], np.asarray(want, np.float32))


def test_the_last_grid_axis_varies_fastest():
  def kernel(y):
    i, j, k = (tt.program_id(a) for a in range(3))
    y[0] = i * 100 + j * 10 + k                                 # the last program wins
    y[1 + i * 6 + j * 3 + k] = i * 100 + j * 10 + k

  y, = call(kernel, out=((13,), np.int32), grid=(2, 2, 3))
  np.testing.assert_array_equal(y[1:], [100 * i + 10 * j + k for i in range(2) for j in range(2) for k in range(3)])
  assert y[0] == 112


def test_a_grid_without_programs_writes_nothing():
  y, = call(double_kernel, normal(4, 4), out=((4, 4), np.float32), grid=(0, 3), block=(4, 4))
  assert np.isnan(y).all()


def test_level_0_operations_are_refused_with_their_line():
  def kernel(x, y):
    with tt.elect():
      y[...] = x[...]

  x = normal(4)
  graph = traced(kernel, [x], [x], (1,))
  with pytest.raises(LoweringError, match="elect is explicit orchestration") as e:
    backend.run(graph, x)
  assert "with tt.elect():" in str(e.value)
  assert "never through xla" in str(e.value)


# --- transformations

def scale_kernel(x, s, y, *, rows):
  r = tt.block(tt.program_id(0), rows)
  n = s[...]
  acc = tt.alloc_fragment((rows, x.shape[1]), np.float32)
  acc[...] = 0
  for k in tt.range(3):
    acc[...] += x[r, :] * n * k
  y[r, :] = acc[...]


def scale(x: jax.Array, s: jax.Array) -> jax.Array:
  graph = traced(scale_kernel, [x, s], [x], (tt.cdiv(x.shape[0], 4),), rows=4)
  return backend.run(graph, x, s)[0]


def test_it_runs_under_vmap_and_scan():
  x, s = normal(5, 6, 3), normal(5)
  want = x * s[:, None, None] * 3
  assert_close(jax.jit(jax.vmap(scale))(x, s), want, "elementwise")
  assert_close(jax.jit(lambda x, s: jax.lax.scan(lambda c, a: (c, scale(*a)), 0, (x, s))[1])(x, s), want, "elementwise")


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_it_differentiates(dtype):
  def half_kernel(x, y):
    r = tt.block(tt.program_id(0), 4)
    s = tt.alloc_shared((8,), x.dtype)
    s[...] = x.dtype.type(0)
    s[:4] = x[r] * x[r]
    y[r] = s[:4]

  x = normal(10).astype(dtype)
  graph = traced(half_kernel, [x], [x], (3,))
  grad = jax.jit(jax.grad(lambda x: backend.run(graph, x)[0].astype(np.float32).sum()))(x)
  np.testing.assert_array_equal(grad, x + x)


def test_it_runs_under_shard_map():
  mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  x, s = normal(8, 3), np.float32(1.5)
  fn = jax.shard_map(scale, mesh=mesh, in_specs=(P("d", None), P()), out_specs=P("d", None))
  assert_close(jax.jit(fn)(x, s), x * s * 3, "elementwise")


def test_the_program_is_traced_once_for_a_large_grid():
  def kernel(x, y):
    r = tt.block(tt.program_id(0), 2)
    y[r] = tt.exp(x[r])

  x = jax.ShapeDtypeStruct((1 << 20,), np.float32)
  graph = traced(kernel, [x], [x], (1 << 19,))
  jaxpr = jax.make_jaxpr(lambda x: backend.run(graph, x))(x)
  assert str(jaxpr).count(" exp ") == 1
