"""Loads, stores and copies at tiles of indices: numbers in the simulator and as jax ops, instructions, refusals."""
from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import Case
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F16, F32, I32, assemble, count, lower, struct
from tests.tracing import Out, array, trace
from tiletrace.core import dtypes
from tiletrace.core.errors import TileIndexError, TileTypeError

rng = np.random.default_rng(12)
DTYPES = (F32, BF16, F16, I32, np.int8, np.uint16, np.bool_)


def random(*shape, dtype=F32):
  if np.dtype(dtype) == np.bool_:
    return rng.random(shape) < 0.5
  return (rng.standard_normal(shape) * 40).astype(dtype)


def check(call, inputs, *want, lowered=None):
  lowered = lowered or call.lower(*inputs)
  assemble(lowered)
  sides = simulated.run(lowered, Case(call, inputs, (), "exact")), jax.tree.leaves(jax.jit(call)(*inputs))
  for got in sides:
    for g, w in zip(got, want, strict=True):
      np.testing.assert_array_equal(np.asarray(g), w)
  return lowered


def rows_of(x, idx, fill=0):
  inside = ((idx >= 0) & (idx < len(x))).reshape(*idx.shape, *[1] * (x.ndim - 1))
  return np.where(inside, x[idx.clip(0, len(x) - 1)], np.asarray(fill).astype(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("columns", [64, 20, 7])
def test_rows_by_index_are_loaded_and_what_lies_outside_is_filled(dtype, columns):
  def kernel(x, idx, y, z):
    r = tt.block(tt.program_id(0), 16)
    y[r, :] = x[idx[r], :]
    z[r, :] = tt.load(x.at[idx[r], :], fill_value=1)

  x, idx = random(30, columns, dtype=dtype), rng.integers(-9, 40, 40).astype(I32)
  call = tt.tile_call(kernel, (struct(40, columns, dtype=dtype),) * 2, grid=3)
  check(call, (x, idx), rows_of(x, idx), rows_of(x, idx, 1))


def test_aligned_rows_are_loaded_16_bytes_at_a_time():
  def kernel(x, idx, y):
    y[...] = x[idx[...], :]

  lowered = lower(kernel, [struct(1000, 64), struct(32, dtype=I32)], struct(32, 64))
  assert count(lowered, r"ld.global.*v4.f32") == 4 and count(lowered, "mad.wide") <= 12
  lowered = lower(kernel, [struct(1000, 63), struct(32, dtype=I32)], struct(32, 63))
  assert count(lowered, "ld.global.*v4") == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("warpgroups", [1, 2])
def test_rows_by_index_are_stored_and_what_lies_outside_is_dropped(dtype, warpgroups):
  def kernel(x, idx, y):
    r = tt.block(tt.program_id(0), 16)
    y[tt.load(idx.at[r], fill_value=-1), :] = x[r, :]          # past the end of idx: nowhere

  x = random(40, 24, dtype=dtype)
  idx = np.concatenate([rng.permutation(32), [-1, 32, 99, -2**31, 2**31 - 1, 33, 50, -7]]).astype(I32)
  idx = rng.permutation(idx)
  want = np.zeros((32, 24), dtype)
  inside = (idx >= 0) & (idx < 32)
  want[idx[inside]] = x[inside]
  check(tt.tile_call(kernel, struct(32, 24, dtype=dtype), grid=3, warpgroups=warpgroups), (x, idx), want)


def test_views_have_their_own_edges():
  """Rows 3 .. 3 + n of the array, and every second column from 1 on."""
  def kernel(x, n, idx, y, z):
    part = x.at[tt.ds(3, n[...]), :]
    y[...] = tt.load(part.at[idx[...], :], fill_value=-1)
    z[...] = tt.load(x.at[1::2, :].at[idx[...], tt.ds(2, 4)], fill_value=-2)

  x, n, idx = random(20, 8), np.int32(9), np.array([0, 8, 9, -1, -3, 5, 16, 30], I32)
  call = tt.tile_call(kernel, (struct(8, 8), struct(8, 4)), grid=1)
  check(call, (x, n, idx), rows_of(x[3:12], idx, -1), rows_of(x[1::2], idx, -2)[:, 2:6])


def test_two_tiles_select_elements_and_scalars_remove_dimensions():
  def kernel(x, i, j, y, z, w):
    b = tt.program_id(0)
    rows, cols = i[...], j[...]
    y[...] = x[b, rows[:, None], cols[None, :]]
    z[...] = x[b, rows, cols]
    w[...] = tt.load(x.at[b, :, cols], mask=(tt.arange(5) > 1)[:, None] & (cols > 3)[None, :], fill_value=7)

  x = random(1, 5, 12)
  i, j = rng.integers(0, 5, 6).astype(I32), rng.integers(0, 12, 6).astype(I32)
  call = tt.tile_call(kernel, (struct(6, 6), struct(6), struct(5, 6)), grid=1)
  mask = (np.arange(5) > 1)[:, None] & (j > 3)
  check(call, (x, i, j), x[0][i[:, None], j], x[0][i, j], np.where(mask, x[0][:, j], 7))


def test_a_mask_guards_stores():
  def kernel(x, idx, y):
    y[...] = 0
    tt.store(y.at[idx[...], :], x[...], mask=(idx[...] % 2 == 0)[:, None])

  x, idx = random(16, 8), rng.permutation(16).astype(I32)
  want = np.zeros((16, 8), F32)
  want[idx[idx % 2 == 0]] = x[idx % 2 == 0]
  check(tt.tile_call(kernel, struct(16, 8), grid=1), (x, idx), want)


def copy_kernel(x, idx, y, *, columns, fill):
  s = tt.alloc_shared((16, columns), x.dtype)
  for k in tt.range(2):
    tt.copy(x.at[idx[tt.block(k, 16)], :], s, **({"fill_value": fill} if fill else {}))
    y[tt.block(k, 16), :] = s[...]


@pytest.mark.parametrize(("columns", "dtype", "fill", "variant"), [
  (64, F32, 0, "cp_async"), (64, BF16, 0, "cp_async"), (6, F32, 0, "cp_async"), (7, F32, 0, "cp_async"),
  (64, F32, 3, "vector"), (7, BF16, 0, "vector"), (33, np.int8, 0, "vector")])
def test_rows_by_index_are_copied_to_shared_memory(columns, dtype, fill, variant):
  x, idx = random(50, columns, dtype=dtype), rng.integers(-5, 60, 32).astype(I32)
  call = tt.tile_call(functools.partial(copy_kernel, columns=columns, fill=fill), struct(32, columns, dtype=dtype),
                      grid=1)
  lowered = check(call, (x, idx), rows_of(x, idx, fill))
  assert [c.variant for c in lowered.choices if c.op == "gather_copy"] == [variant]
  assert (count(lowered, "cp.async.c") > 0) == (variant == "cp_async")


def test_vmap_gathers_in_each_example():
  def kernel(x, idx, y):
    y[...] = x[idx[...], :]

  x, idx = random(3, 9, 8), rng.integers(0, 9, (3, 5)).astype(I32)
  got = jax.vmap(tt.tile_call(kernel, struct(5, 8), grid=1))(x, idx)
  np.testing.assert_array_equal(got, np.take_along_axis(x, idx[:, :, None], 1))


def test_scatters_of_two_iterations_are_ordered():
  """Another thread may store to the same row."""
  def kernel(idx, y):
    for k in tt.range(3):
      y[idx[tt.block(k, 32)], :] = tt.zeros((32, 8)) + k

  idx = np.concatenate([rng.permutation(40)[:32] for _ in range(3)]).astype(I32)
  want = np.zeros((40, 8), F32)
  for k in range(3):
    want[idx[32 * k:32 * k + 32]] = k
  written = np.isin(np.arange(40), idx)
  call = tt.tile_call(kernel, struct(40, 8), grid=1)
  lowered = call.lower(idx)
  (got,) = simulated.run(lowered, Case(call, (idx,), (), "exact"))
  np.testing.assert_array_equal(got[written], want[written])
  assert count(lowered, "bar.sync") > 0


def test_gathers_feed_a_gemm():
  def kernel(x, idx, w, y):
    a, b = tt.alloc_shared((64, 64), x.dtype), tt.alloc_shared((64, 64), w.dtype)
    acc = tt.alloc_fragment((64, 64), F32)
    tt.copy(x.at[idx[...], :], a)
    tt.copy(w, b)
    tt.gemm(a, b, acc, accumulate=False)
    y[...] = acc[...]

  x, w = (rng.integers(-4, 5, s).astype(BF16) for s in ((200, 64), (64, 64)))
  idx = rng.integers(0, 200, 64).astype(I32)
  want = x[idx].astype(F32) @ w.astype(F32)
  check(tt.tile_call(kernel, struct(64, 64), grid=1), (x, idx, w), want)


@pytest.mark.parametrize(("f", "kind", "message"), [
  (lambda x, i, y: x[i * 1.0, :], TileIndexError, r"index of x is a tile f32\[4\], not of integers"),
  (lambda x, i, y: x[i[:, None], i], TileIndexError, None),
  (lambda x, i, y: tt.alloc_shared((8, 8), F32)[i, :], TileIndexError, "a gather from shared memory is not supported"),
  (lambda x, i, y: x.__setitem__((i, slice(None)), 1.0), TileTypeError, "store to 'x', which is an input"),
  (lambda x, i, y: y.__setitem__((i, slice(None)), tt.zeros((4, 8), np.int32)), TileTypeError, "store of i32 into y"),
  (lambda x, i, y: x.at[i, :][0], TileTypeError, "x is indexed by tiles already"),
  (lambda x, i, y: tt.copy(x.at[i, :], y, dispatch="tma"), TileTypeError, "dispatch='tma' of rows by index"),
  (lambda x, i, y: tt.copy(x.at[i, :], tt.alloc_shared((8, 8), F32)), TileTypeError, "differ"),
])
def test_what_is_no_gather_is_refused_at_its_line(f, kind, message):
  def kernel(x, i, y):
    f(x, i[...], y)

  with pytest.raises((kind, TileTypeError), match=message) as e:
    trace(kernel, grid=(1,), x=array(dtypes.f32, 8, 8), i=array(dtypes.i32, 4), y=Out(array(dtypes.f32, 8, 8)))
  assert "gather_test.py" in str(e.value) and "^" in str(e.value)


def test_index_tiles_with_a_slice_between_them_are_refused():
  def kernel(x, i):
    x[i[...], :, i[...]]

  with pytest.raises(TileIndexError, match="the index tiles do not stand side by side") as e:
    trace(kernel, grid=(1,), x=array(dtypes.f32, 8, 8, 8), i=array(dtypes.i32, 4))
  assert "x[i[...], :, i[...]]" in str(e.value)
