"""jax.vmap of a tile_call: one more grid axis, the same kernel, unbatched operands as they are."""
from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import Case
from tests.lowering import simulated
from tests.tolerances import assert_close
from tests.transforms.kernels import add_in_place, matmul, matmul_call, normal, scale_rows
from tiletrace.core.batch import batch
from tiletrace.core.errors import LoweringError, ResourceError
from tiletrace.core.verify import verify
from tiletrace.stages import Traced

BF16 = jnp.bfloat16


@pytest.mark.parametrize(("x_axis", "s_axis", "out_axis"), [
    axes for axes in itertools.product((None, 0, 1, 2), (None, 0, 1), (0, 1, 2)) if axes[:2] != (None, None)])
def test_every_in_axes_gives_the_rows_scaled(x_axis, s_axis, out_axis):
  x, s = normal(0, 6, 5), normal(1, 6)
  x = x if x_axis is None else np.moveaxis(normal(0, 3, 6, 5), 0, x_axis)
  s = s if s_axis is None else np.moveaxis(normal(1, 3, 6), 0, s_axis)
  got = jax.jit(jax.vmap(scale_rows, in_axes=(x_axis, s_axis), out_axes=out_axis))(x, s)
  xs = np.broadcast_to(x, (3, 6, 5)) if x_axis is None else np.moveaxis(x, x_axis, 0)
  ss = np.broadcast_to(s, (3, 6)) if s_axis is None else np.moveaxis(s, s_axis, 0)
  np.testing.assert_array_equal(np.moveaxis(got, out_axis, 0), xs * ss[..., None])


def test_nested_vmap_is_one_call_on_the_arrays_as_they_are():
  x, s = normal(0, 3, 6, 5), normal(1, 2, 6)
  f = jax.vmap(jax.vmap(scale_rows, in_axes=(0, None)), in_axes=(None, 0))
  equations = jax.make_jaxpr(f)(x, s).jaxpr.eqns
  flat = [e for e in _equations(equations) if e.primitive.name not in ("custom_vjp_call", "jit", "pjit")]
  assert [e.primitive.name for e in flat] == ["tile_call"]
  assert [v.aval.shape for v in flat[0].invars] == [(3, 6, 5), (2, 6)]  # neither was copied
  np.testing.assert_array_equal(f(x, s), x[None] * s[:, None, :, None])


def _equations(equations):
  for e in equations:
    yield e
    for p in e.params.values():
      inner = getattr(p, "jaxpr", p)
      yield from _equations(getattr(inner, "eqns", ()))


def test_vmap_over_70000_examples_folds_the_grid_into_x():
  x, s = normal(0, 70_000, 3, 2), normal(1, 3)
  np.testing.assert_array_equal(jax.jit(jax.vmap(scale_rows, in_axes=(0, None)))(x, s), x * s[:, None])
  call = tt.tile_call(_double_kernel, jax.ShapeDtypeStruct((3, 2), np.float32), grid=(1,))
  program = call.trace(x[0]).program.batch(70_000, (True,))
  assert Traced(program).lower().compile().image.grid == (70_000, 1, 1)


def _double_kernel(x, y):
  y[...] = x[...] * 2


def test_vmap_over_nothing_gives_nothing():
  assert jax.vmap(scale_rows)(np.zeros((0, 6, 5), np.float32), np.zeros((0, 6), np.float32)).shape == (0, 6, 5)


def test_program_ids_and_the_grid_s_extents_do_not_change():
  def kernel(x, y):
    i, j = tt.program_id(0), tt.program_id(1)
    assert (tt.num_programs(0), tt.num_programs(1)) == (2, 3)
    y[i, j] = x[i, j] + i * 10 + j

  call = tt.tile_call(kernel, jax.ShapeDtypeStruct((2, 3), np.int32), grid=(2, 3))
  x = np.random.default_rng(2).integers(0, 9, (4, 2, 3)).astype(np.int32)
  np.testing.assert_array_equal(jax.vmap(call)(x), x + np.asarray([[0, 1, 2], [10, 11, 12]]))


@pytest.mark.parametrize("options", [dict(), dict(raster=2), dict(raster=2, persistent=True)], ids=str)
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_matmul_under_vmap_is_the_batched_matmul(options, in_axes):
  a = normal(0, *((3,) if in_axes[0] == 0 else ()), 100, 72, dtype=BF16)
  b = normal(1, *((3,) if in_axes[1] == 0 else ()), 72, 136, dtype=BF16)
  got = jax.jit(jax.vmap(lambda a, b: matmul(a, b, **options), in_axes=in_axes))(a, b)
  assert_close(np.asarray(got), np.matmul(a.astype(np.float64), b.astype(np.float64)), "gemm", "vmap(matmul)")


def test_batched_operands_are_read_by_tma_with_one_more_dimension():
  shapes = [jax.ShapeDtypeStruct(s, BF16) for s in ((256, 128), (128, 192))]
  program = matmul_call(256, 192, raster=2, persistent=True).trace(*shapes).program.batch(5, (True, False))
  compiled = Traced(program).lower().compile()
  assert [(m.operand, m.dims[::-1], m.box[::-1]) for m in compiled.image.tensor_maps] == [
      (0, (5, 256, 128), (1, 64, 32)), (1, (128, 192), (32, 64)), (2, (5, 256, 192), (1, 64, 64))]
  assert compiled.image.grid == (5 * 4 * 3, 1, 1)


@pytest.mark.parametrize("which", [(True, False), (False, True), (True, True)], ids=str)
def test_ptx_of_a_batched_kernel_computes_every_example(which):
  """The PTX itself, run on the CPU: addresses, bounds, and program ids in grouped order."""
  def kernel(x, s, y):
    i, j = tt.program_id(0), tt.program_id(1)
    rows, columns = tt.block(i, 4), tt.block(j, 16)
    y[rows, columns] = x[rows, columns] * s[rows, None]

  call = tt.tile_call(kernel, jax.ShapeDtypeStruct((11, 37), np.float32), grid=(3, 3), raster=2)
  arrays = [normal(k, *((5,) if b else ()), *shape) for k, (shape, b) in enumerate(zip(((11, 37), (11,)), which))]
  program = call.trace(*(jax.ShapeDtypeStruct(s, np.float32) for s in ((11, 37), (11,)))).program.batch(5, which)
  x, s = arrays
  want = x * s[..., None]
  got, = simulated.run(Traced(program).lower(), Case(call, (x, s), (want,), "exact"))
  np.testing.assert_array_equal(got, want)


def test_dimensions_beyond_the_rank_of_a_tensor_map_are_merged():
  """Five vmaps of a matrix would be seven dimensions: the outer ones become one, and copies stay TMA."""
  shapes = [jax.ShapeDtypeStruct(s, BF16) for s in ((256, 128), (128, 192))]
  program = matmul_call(256, 192).trace(*shapes).program
  for n in (2, 3, 4, 5, 6):
    program = program.batch(n, (True, n != 4))
    verify(program.graph)
  assert program.graph.options.grid == (6, 5, 4, 3, 2, 4, 3)
  wanted = [(6 * 5 * 4, 3, 2, 256, 128), (6 * 5, 3, 2, 128, 192), (6 * 5 * 4, 3, 2, 256, 192)]
  assert [s for s, _ in (*program.in_avals, *program.out_avals)] == wanted
  assert [m.dims[::-1] for m in Traced(program).lower().compile().image.tensor_maps] == wanted


def test_deeply_nested_vmap_gives_every_product():
  a, b = normal(0, 2, 3, 2, 2, 20, 24, dtype=BF16), normal(1, 2, 2, 2, 24, 16, dtype=BF16)
  f = matmul
  for axes in ((0, 0), (0, 0), (0, None), (0, 0)):
    f = jax.vmap(f, in_axes=axes)
  want = np.matmul(a.astype(np.float64), b.astype(np.float64)[:, None])
  assert_close(np.asarray(jax.jit(f)(a, b)), want, "gemm", "nested vmap")


def test_pytrees_none_and_several_outputs_go_through_vmap():
  def kernel(tree, bias, y, z):
    assert bias is None
    y[...] = tree["a"][...] + tree["b"][...]
    z[...] = tree["a"][...] - tree["b"][...]

  shape = jax.ShapeDtypeStruct((4, 3), np.float32)
  tree = {"a": normal(0, 7, 4, 3), "b": normal(1, 4, 3)}
  y, z = jax.vmap(tt.tile_call(kernel, (shape, shape), grid=(1,)), in_axes=({"a": 0, "b": None}, None))(tree, None)
  np.testing.assert_array_equal(y, tree["a"] + tree["b"])
  np.testing.assert_array_equal(z, tree["a"] - tree["b"])


@pytest.mark.parametrize("in_axes", [(0, 0), (None, 0), (0, None)], ids=str)
def test_an_input_written_in_place_is_one_array_for_each_example(in_axes):
  h, d = normal(0, *((3,) if in_axes[0] == 0 else ()), 6, 5), normal(1, *((3,) if in_axes[1] == 0 else ()), 6, 5)
  new, double = jax.jit(jax.vmap(add_in_place, in_axes=in_axes))(h, d)
  np.testing.assert_array_equal(new, h + d)
  np.testing.assert_array_equal(double, 2 * (h + d))


def test_views_that_end_early_end_there_in_every_example():
  """A ragged view: its end is read from an unbatched operand, and its rows must not run into the next example's."""
  def kernel(x, n, y):
    y[...] = x.at[tt.ds(1, n[0]), :][tt.block(0, 4), :]

  call = tt.tile_call(kernel, jax.ShapeDtypeStruct((4, 3), np.float32), grid=(1,))
  x = normal(0, 5, 3, 3)
  want = np.concatenate([x[:, 1:], np.zeros((5, 2, 3), np.float32)], axis=1)
  np.testing.assert_array_equal(jax.vmap(call, in_axes=(0, None))(x, np.asarray([7], np.int32)), want)
  want[:, 1] = 0
  np.testing.assert_array_equal(jax.vmap(call, in_axes=(0, None))(x, np.asarray([1], np.int32)), want)


def test_batched_program_has_its_own_fingerprint_and_a_graph_that_verifies():
  program = matmul_call(64, 64).trace(*[jax.ShapeDtypeStruct((64, 64), BF16)] * 2).program
  batched = {program.batch(n, m).fingerprint for n in (2, 3) for m in ((True, False), (True, True))}
  assert len(batched | {program.fingerprint}) == 5
  assert program.batch(2, (True, False)) is program.batch(2, (True, False))
  assert verify(batch(program.graph, 2, (True, True, True), max_rank=5)).options.grid == (2, 1, 1)


def test_more_programs_than_a_launch_takes_are_refused():
  call = tt.tile_call(_double_kernel, jax.ShapeDtypeStruct((3, 2), np.float32), grid=(2**20,))
  with pytest.raises(ResourceError, match=re.escape("4096 examples of a grid of (1048576,) are")) as refused:
    jax.eval_shape(jax.vmap(call), jax.ShapeDtypeStruct((4096, 3, 2), np.float32))
  assert refused.value.loc is not None and refused.value.loc.line == _double_kernel.__code__.co_firstlineno


def roles_kernel(a, b, c, *, bm, bn, bk, num_stages):
  """Level 0, one tile of C for each program: a producer and two consumer warpgroups."""
  i, j = tt.program_id(0), tt.program_id(1)
  a_s = tt.alloc_shared((num_stages, bm, bk), a.dtype, layout=tt.swizzle(128))
  b_s = tt.alloc_shared((num_stages, bk, bn), b.dtype, layout=tt.swizzle(128))
  full = tt.alloc_barrier(num_stages, arrivals=1)
  empty = tt.alloc_barrier(num_stages, arrivals=2)
  trips = tt.cdiv(a.shape[1], bk)
  with tt.warpgroup(0, regs=24), tt.elect():
    for k in tt.range(trips):
      slot, phase = k % num_stages, (k // num_stages) & 1
      empty[slot].wait(phase ^ 1)
      full[slot].arrive_expect_tx(a_s.at[0].nbytes + b_s.at[0].nbytes)
      tt.copy_async(a.at[tt.block(i, bm), tt.block(k, bk)], a_s.at[slot], barrier=full[slot], dispatch="tma")
      tt.copy_async(b.at[tt.block(k, bk), tt.block(j, bn)], b_s.at[slot], barrier=full[slot], dispatch="tma")
  with tt.warpgroup(range(1, 3), regs=240):
    acc = tt.alloc_fragment((bm, bn), jnp.float32)
    acc[...] = 0
    for k in tt.range(trips):
      slot, phase = k % num_stages, (k // num_stages) & 1
      full[slot].wait(phase)
      tt.gemm_async(a_s.at[slot], b_s.at[slot], acc)
      tt.wgmma_wait(0)
      empty[slot].arrive()
    c[tt.block(i, bm), tt.block(j, bn)] = acc[...].astype(c.dtype)


def roles_call(m, n):
  return tt.tile_call(functools.partial(roles_kernel, bm=128, bn=128, bk=64, num_stages=3), warpgroups=3,
                      out_shape=jax.ShapeDtypeStruct((m, n), BF16), grid=(tt.cdiv(m, 128), tt.cdiv(n, 128)))


def test_roles_written_by_hand_are_batched_too():
  shapes = [jax.ShapeDtypeStruct(s, BF16) for s in ((256, 192), (192, 384))]
  program = roles_call(256, 384).trace(*shapes).program.batch(5, (True, False))
  image = Traced(program).lower().compile().image
  assert image.grid == (5 * 2 * 3, 1, 1)
  assert [m.dims[::-1] for m in image.tensor_maps[:2]] == [(5, 256, 192), (192, 384)]


def test_a_kernel_that_distributes_its_own_work_is_refused_at_its_line():
  def kernel(x, y):
    for t in tt.range(tt.cta_id(), 3, tt.num_ctas()):
      y[t] = x[t] * 2

  call = tt.tile_call(kernel, jax.ShapeDtypeStruct((3,), np.float32), grid=(3,))
  with pytest.raises(LoweringError, match="kernel cannot be batched: it distributes its work") as refused:
    jax.eval_shape(jax.vmap(call), jax.ShapeDtypeStruct((4, 3), np.float32))
  assert refused.value.loc is not None and refused.value.loc.line == kernel.__code__.co_firstlineno + 1


@pytest.mark.gpu
@pytest.mark.parametrize("options", [dict(), dict(raster=2, persistent=True)], ids=str)
@pytest.mark.parametrize("shape", [(3, 100, 72, 136), (5, 256, 128, 192)], ids=str)
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_matmul_under_vmap_on_the_gpu(options, shape, in_axes):
  n, rows, inner, columns = shape
  a = normal(0, *((n,) if in_axes[0] == 0 else ()), rows, inner, dtype=BF16)
  b = normal(1, *((n,) if in_axes[1] == 0 else ()), inner, columns, dtype=BF16)
  got = jax.jit(jax.vmap(lambda a, b: matmul(a, b, **options), in_axes=in_axes))(a, b)
  assert_close(np.asarray(got), np.matmul(a.astype(np.float64), b.astype(np.float64)), "gemm", "vmap(matmul)")


@pytest.mark.gpu
def test_hand_written_roles_and_deep_nesting_on_the_gpu():
  a, b = normal(0, 3, 256, 192, dtype=BF16), normal(1, 192, 384, dtype=BF16)
  got = jax.jit(jax.vmap(roles_call(256, 384), in_axes=(0, None)))(a, b)
  assert_close(np.asarray(got), np.matmul(a.astype(np.float64), b.astype(np.float64)), "gemm", "vmap(roles)")
  test_deeply_nested_vmap_gives_every_product()


@pytest.mark.gpu
def test_wide_and_nested_vmap_on_the_gpu():
  x, s = normal(0, 70_000, 3, 2), normal(1, 3)
  np.testing.assert_array_equal(jax.jit(jax.vmap(scale_rows, in_axes=(0, None)))(x, s), x * s[:, None])
  x, s = normal(0, 3, 6, 5), normal(1, 2, 6)
  f = jax.vmap(jax.vmap(scale_rows, in_axes=(0, None)), in_axes=(None, 0))
  np.testing.assert_array_equal(jax.jit(f)(x, s), x[None] * s[:, None, :, None])
  new, double = jax.jit(jax.vmap(add_in_place, in_axes=(None, 0)))(x[0], x)
  np.testing.assert_array_equal(new, x[0] + x)
  np.testing.assert_array_equal(double, 2 * (x[0] + x))
