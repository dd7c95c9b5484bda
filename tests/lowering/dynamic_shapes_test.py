"""Dynamic shapes: one code for every size, as jax ops and in the simulator, against numpy."""
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tiletrace.core.errors import ResourceError, TileTypeError
from tiletrace.lowering.assemble import find_ptxas
from tiletrace.stages import Lowered

F32, BF16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)


def normal(seed: int, *shape: int, dtype: Any = F32) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def gemm_kernel(a, b, c, *, bm, bn, bk):
  i, j = tt.program_id(0), tt.program_id(1)
  a_s, b_s = tt.alloc_shared((bm, bk), a.dtype), tt.alloc_shared((bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], bk), num_stages=3):
    tt.copy(a.at[tt.block(i, bm), tt.block(k, bk)], a_s)
    tt.copy(b.at[tt.block(k, bk), tt.block(j, bn)], b_s)
    tt.gemm(a_s, b_s, acc)
  c[tt.block(i, bm), tt.block(j, bn)] = acc[...].astype(c.dtype)


ALIGNED = ("m, 8*k", "8*k, 8*n", "m, 8*n")


def gemm(a, b, shapes=ALIGNED, *, bm=64, bn=64, bk=64, cluster=None, **options):
  m, n = a.shape[0], b.shape[1]
  grid = (tt.cdiv(m, bm), tt.cdiv(n, bn))
  if cluster is not None:
    grid = tuple(tt.align_to(g, c) for g, c in zip(grid, cluster))
  return tt.tile_call(functools.partial(gemm_kernel, bm=bm, bn=bn, bk=bk), jax.ShapeDtypeStruct((m, n), a.dtype),
                      grid=grid, dynamic_shapes=shapes, cluster=cluster, **options)


def operands(m: int, k: int, n: int) -> tuple[jax.Array, jax.Array]:
  return normal(0, m, k, dtype=BF16), normal(1, k, n, dtype=BF16)


def product(a, b) -> np.ndarray:
  return np.asarray(a, np.float64) @ np.asarray(b, np.float64)


def check_product(got, a, b) -> None:
  np.testing.assert_allclose(np.asarray(got, np.float64), product(a, b), rtol=2**-8, atol=1e-2)


def variants(lowered: Lowered) -> list[str]:
  return [c.variant for c in lowered.choices]


# --- one code

@functools.cache
def gemm_of_any_m() -> Lowered:
  a, b = operands(256, 64, 64)
  return gemm(a, b, ("m, 64", "64, 64", "m, 64")).lower(a, b)


@pytest.mark.parametrize("m", [1, 100, 128, 1000])
def test_one_lowering_of_a_gemm_serves_every_number_of_rows(m):
  a, b = operands(m, 64, 64)
  (got,) = gemm_of_any_m().simulate(a, b, grid=(tt.cdiv(m, 64), 1), races=m < 1000)

  assert variants(gemm_of_any_m()) == ["tma", "tma", "wgmma_ss", "tma"]
  check_product(got, a, b)


def test_calls_of_several_sizes_have_one_cubin():
  find_ptxas()
  images = []
  for m in (1, 100, 128, 1000):
    a, b = operands(m, 72, 56)
    images.append(gemm(a, b).trace(a, b).program.image("sm_90a"))

  assert len({image.cubin for image in images}) == 1
  assert len({image.fingerprint for image in images}) == 1
  assert [image.grid for image in images] == [(1, 1, 1), (2, 1, 1), (2, 1, 1), (16, 1, 1)]
  assert [image.tensor_maps[0].dims for image in images] == [(72, 1), (72, 100), (72, 128), (72, 1000)]
  assert [image.tensor_maps[0].strides for image in images] == [(144,)] * 4
  assert all(kind != "size" for image in images for kind, _ in image.params)


@pytest.mark.parametrize("shape", [(1, 8, 8), (100, 72, 56), (130, 136, 72)])
@pytest.mark.parametrize("options", [
    {}, {"raster": 2}, {"persistent": True}, {"persistent": True, "raster": 2}, {"warpgroups": 2, "bm": 128},
    {"cluster": (2, 1)}, {"cluster": (1, 2), "persistent": True}], ids=str)
def test_gemms_of_any_size_multiply(options, shape):
  a, b = operands(*shape)
  check_product(gemm(a, b, backend="sim", **options)(a, b), a, b)


@pytest.mark.parametrize("shape", [(1, 1, 1), (100, 70, 50), (64, 65, 129)])
def test_without_promises_rows_are_copied_by_threads(shape):
  a, b = operands(*shape)
  call = gemm(a, b, ("m, k", "k, n", "m, n"), backend="sim")

  assert variants(call.lower(a, b))[:2] == ["scalar", "scalar"]
  check_product(call(a, b), a, b)


@pytest.mark.parametrize("shape", [(0, 64, 64), (5, 0, 8), (8, 16, 0), (3, 8, 16)])
@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_empty_arrays_are_sizes_too(shape, backend):
  a, b = operands(*shape)
  check_product(gemm(a, b, backend=backend)(a, b), a, b)


# --- kernels of other shapes

def scale_kernel(x, s, y, *, rows, columns):
  r, c = tt.block(tt.program_id(0), rows), tt.block(tt.program_id(1), columns)
  y[r, c] = x[r, c] * s[r][:, None]


def scale(x, s, shapes, rows=16, columns=64, **options):
  (m, n), kernel = x.shape, functools.partial(scale_kernel, rows=rows, columns=columns)
  return tt.tile_call(kernel, jax.ShapeDtypeStruct((m, n), x.dtype), grid=(tt.cdiv(m, rows), tt.cdiv(n, columns)),
                      dynamic_shapes=shapes, **options)


@pytest.mark.parametrize("shapes, width", [
    (("m, n", "m", "m, n"), ""), (("m, 2*n", "m", "m, 2*n"), ".v2"), (("m, 4*n", "m", "m, 4*n"), ".v4"),
    (("m, 128", "m", "m, 128"), ".v4"), ((None, "m", "_, 4*n"), None), (("...", "_", "m, n"), "")])
@pytest.mark.parametrize("m, n", [(33, 128), (4, 192)])
def test_promised_multiples_decide_the_width_of_accesses(m, n, shapes, width):
  x, s = normal(0, m, n), normal(1, m)
  if shapes[0] == "m, 128" and n != 128:
    with pytest.raises(TileTypeError, match="dimension 1 of x is 192, dynamic_shapes says 128"):
      scale(x, s, shapes)(x, s)
    return
  call = scale(x, s, shapes, backend="sim")
  if width is not None:
    assert f"st.global{width}.f32" in call.lower(x, s).as_text("ptx")
  np.testing.assert_array_equal(call(x, s), np.asarray(x) * np.asarray(s)[:, None])


def transpose_kernel(x, y):
  b, i, j = (tt.program_id(a) for a in range(3))
  y[b, tt.block(i, 16), tt.block(j, 32)] = x.at[b, tt.block(j, 32), tt.block(i, 16)].T[...]


@pytest.mark.parametrize("shape", [(2, 33, 17), (1, 64, 5)])
@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_strides_are_products_of_sizes(backend, shape):
  x, (b, m, n) = normal(0, *shape), shape
  call = tt.tile_call(transpose_kernel, jax.ShapeDtypeStruct((b, n, m), F32), grid=(b, tt.cdiv(n, 16), tt.cdiv(m, 32)),
                      dynamic_shapes=("b, m, n", "b, n, m"), backend=backend)

  np.testing.assert_array_equal(call(x), np.asarray(x).transpose(0, 2, 1))


def sizes_kernel(x, y):
  y[0], y[1], y[2], y[3] = x.shape[0], x.shape[1], tt.num_programs(0), tt.num_programs(1)


@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_a_kernel_reads_sizes_and_the_grid_s_extents(backend):
  for m, n in ((24, 7), (8, 1)):
    call = tt.tile_call(sizes_kernel, jax.ShapeDtypeStruct((4,), np.int32), grid=(1, 1),
                        dynamic_shapes=("8*m, n", "4"), backend=backend)
    np.testing.assert_array_equal(call(normal(0, m, n)), [m, n, 1, 1])


def gather_kernel(x, indices, y):
  r = tt.block(tt.program_id(0), 32)
  y[r, :] = x[indices[r], :]


@pytest.mark.parametrize("m, n", [(100, 40), (3, 9)])
def test_rows_of_an_array_of_any_length_are_gathered(m, n):
  x, indices = normal(0, m, 64), jnp.asarray(np.random.default_rng(1).integers(0, m, n), np.int32)
  call = tt.tile_call(gather_kernel, jax.ShapeDtypeStruct((n, 64), F32), grid=(tt.cdiv(n, 32),),
                      dynamic_shapes=("m, 64", "n", "n, 64"), backend="sim")

  np.testing.assert_array_equal(call(x, indices), np.asarray(x)[np.asarray(indices)])


def gather_columns_kernel(x, indices, y):
  c = tt.block(tt.program_id(0), 16)
  y[:, c] = x[tt.ds(0, 8), indices[c]]


@pytest.mark.parametrize("m, n, c", [(8, 100, 40), (3, 9, 9)])
def test_columns_of_rows_of_any_length_are_gathered(m, n, c):
  x, indices = normal(0, m, n), jnp.asarray(np.random.default_rng(1).integers(0, n, c), np.int32)
  call = tt.tile_call(gather_columns_kernel, jax.ShapeDtypeStruct((8, c), F32), grid=(tt.cdiv(c, 16),),
                      dynamic_shapes=("m, n", "c", "8, c"), backend="sim")

  want = np.zeros((8, c), np.float32)
  want[:m] = np.asarray(x)[:, np.asarray(indices)]
  np.testing.assert_array_equal(call(x, indices), want)


def halves_kernel(x, y, *, rows):
  """Copies in a loop over rows that only the call knows, through shared memory."""
  x_s = tt.alloc_shared((rows, 32), x.dtype)
  total = tt.alloc_fragment((rows, 32), jnp.float32)
  total[...] = 0
  for k in tt.pipelined(tt.cdiv(x.shape[0], rows), num_stages=2):
    tt.copy(x.at[tt.block(k, rows), tt.block(tt.program_id(0), 32)], x_s)
    total[...] += x_s[...]
  y[tt.block(tt.program_id(0), 32)] = tt.sum(total[...], axis=0)


@pytest.mark.parametrize("shapes, variant", [(("m, n", "n"), "cp_async"), (("m, 4*n", "4*n"), "tma")])
@pytest.mark.parametrize("m, n", [(70, 32), (1, 8), (64, 100)])
def test_a_loop_over_an_unknown_number_of_rows_is_pipelined(m, n, shapes, variant):
  x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (m, n)), F32)
  call = tt.tile_call(functools.partial(halves_kernel, rows=32), jax.ShapeDtypeStruct((n,), F32),
                      grid=(tt.cdiv(n, 32),), dynamic_shapes=shapes, backend="sim")

  assert variants(call.lower(x))[0] == variant
  np.testing.assert_array_equal(call(x), np.asarray(x).sum(0))


def increment_kernel(x, y):
  r = tt.block(tt.program_id(0), 128)
  y[r] = x[r] + 1


@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_an_array_of_any_size_is_written_in_place(backend):
  for n in (5, 300):
    x = normal(0, n)
    call = tt.tile_call(increment_kernel, jax.ShapeDtypeStruct((n,), F32), grid=(tt.cdiv(n, 128),),
                        dynamic_shapes=("n", "n"), input_output_aliases={0: 0}, backend=backend)
    np.testing.assert_array_equal(call(x), np.asarray(x) + np.float32(1))


@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_vmap_adds_a_dimension_that_is_static(backend):
  x, s = normal(0, 3, 33, 20), normal(1, 33)
  call = scale(x[0], s, ("m, n", "m", "m, n"), backend=backend)

  got = jax.jit(jax.vmap(call, in_axes=(0, None)))(x, s)
  np.testing.assert_array_equal(got, np.asarray(x) * np.asarray(s)[:, None])


@pytest.mark.parametrize("options", [{"raster": 2}, {"persistent": True, "raster": 2}], ids=str)
def test_a_batch_of_gemms_has_a_grid_of_static_and_dynamic_axes(options):
  a, b = normal(0, 2, 100, 72, dtype=BF16), normal(1, 72, 56, dtype=BF16)
  check_product(jax.vmap(gemm(a[0], b, backend="sim", **options), in_axes=(0, None))(a, b), a, b)


def test_gemms_for_older_gpus_multiply():
  a, b = operands(100, 72, 56)
  (got,) = gemm(a, b).lower(a, b, target="sm_80").simulate(a, b)
  check_product(got, a, b)


def test_a_derivative_is_that_of_the_call_s_sizes():
  x, s = normal(0, 33, 20), normal(1, 33)
  call = scale(x, s, ("m, n", "m", "m, n"), vjp="xla")

  got = jax.grad(lambda x: call(x, s).sum())(x)
  np.testing.assert_array_equal(got, np.broadcast_to(np.asarray(s)[:, None], x.shape))


def view_kernel(x, n, y):
  part = x.at[tt.ds(0, n[0]), :]
  y[...] = part[tt.block(tt.program_id(0), 16), tt.block(0, 8)]


def test_views_within_arrays_of_any_size_end_where_they_say():
  for m, n in ((20, 3), (9, 9)):
    x = normal(0, m, 8)
    call = tt.tile_call(view_kernel, jax.ShapeDtypeStruct((16, 8), F32), grid=(1,),
                        dynamic_shapes=("m, k", "1", "16, 8"), backend="sim")
    want = np.where(np.arange(16)[:, None] < n, np.pad(np.asarray(x), ((0, 16), (0, 0)))[:16], 0)
    np.testing.assert_array_equal(call(x, jnp.asarray([n], np.int32)), want)


def test_the_report_and_the_cost_are_those_of_the_call():
  a, b = operands(128, 64, 64)
  lowered = gemm(a, b, persistent=True).lower(a, b)

  assert '"grid": [\n    2,\n    1\n  ]' in lowered.report(json=True)
  find_ptxas()
  assert lowered.compile().cost_analysis()["flops"] == 2 * 128 * 64 * 64


# --- what is refused

@pytest.mark.parametrize("shapes, message", [
    (("m, 16*k", "16*k, 8*n", "m, 8*n"), r"dimension 1 of a is 72, no multiple of 16, which .* promises: 16\*k"),
    (("m, k", "m, n", "m, n"), "dimension 0 of b is 72, but dimension 0 of a is 100, .* the name m for both"),
    (("m, k", "k, n", "m, m"), "dimension 1 of c is 56, but dimension 0 of a is 100, .* the name m for both"),
    (("m, 64", "64, n", "m, n"), "dimension 1 of a is 72, dynamic_shapes says 64"),
    (("m", "k, n", "m, n"), r"a has the 2 dimensions \(100, 72\), dynamic_shapes says \(m\)"),
    (("m, k", "k, n"), "dynamic_shapes has 2 strings, the call 2 inputs and 1 outputs")])
def test_a_call_that_breaks_a_promise_is_refused_at_its_line(shapes, message):
  a, b = operands(100, 72, 56)
  call = gemm(a, b, shapes)
  with pytest.raises(TileTypeError, match=f"^gemm_kernel: {message}") as refused:
    call(a, b)
  assert "call(a, b)" in str(refused.value)


@pytest.mark.parametrize("shapes, message", [
    ("m, k", "dynamic_shapes='m, k' must be a tuple"),
    (("m + 1", None, None), r"dynamic_shapes\[0\]: dimension 'm \+ 1' is none of"),
    ((None, "..., ...", None), r"dynamic_shapes\[1\]: .* has more than one"),
    ((None, 3, None), r"dynamic_shapes\[1\]: 3 is no string")])
def test_dimensions_that_cannot_be_read_are_refused(shapes, message):
  a, b = operands(8, 8, 8)
  with pytest.raises(TileTypeError, match=message):
    gemm(a, b, shapes)


def test_a_tile_of_a_dynamic_size_is_refused_with_the_remedy():
  def kernel(x, y):
    y[...] = x[...]

  with pytest.raises(TileTypeError, match=r"load needs a static shape, x: Ref<global>\{f32\[n\]\}") as refused:
    tt.tile_call(kernel, jax.ShapeDtypeStruct((8,), F32), grid=1, dynamic_shapes=("n", "8"))(normal(0, 8))
  assert refused.value.hint is not None and "tt.block" in refused.value.hint


def test_an_if_on_a_dynamic_size_is_refused():
  def kernel(x, y):
    if x.shape[0] > 4:
      y[...] = x[tt.block(0, 8)]

  with pytest.raises(TileTypeError, match="the truth value"):
    tt.tile_call(kernel, jax.ShapeDtypeStruct((8,), F32), grid=1, dynamic_shapes=("n", "8"))(normal(0, 8))


def test_a_dynamic_grid_has_a_limit():
  with pytest.raises(ResourceError, match=r"grid\[0\] is 4194305, with dynamic_shapes an axis has at most 4194304"):
    tt.tile_call(increment_kernel, jax.ShapeDtypeStruct((8,), F32), grid=2**22 + 1, dynamic_shapes=("n", "n"))


def test_a_simulated_launch_of_other_sizes_needs_their_grid():
  a, b = operands(10, 64, 64)
  with pytest.raises(TileTypeError, match="was traced for other sizes"):
    gemm_of_any_m().simulate(a, b)
  with pytest.raises(TileTypeError, match="empty arrays"):
    gemm_of_any_m().simulate(a[:0], b, grid=(0, 1))
