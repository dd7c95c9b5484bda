"""The counter that programs are taken from: in modules for CUDA, in the image, nowhere that the user sees; and what is
refused."""
from __future__ import annotations

import linecache
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import tiletrace as tt
from tests.lowering.kernels import struct
from tiletrace.ffi import library
from tiletrace.ffi.image import KernelImage
from tiletrace.ffi.primitive import export_checks

P = jax.sharding.PartitionSpec
built = pytest.mark.skipif(not library.PATH.exists(), reason=f"needs the CUDA launcher: {library.BUILD_COMMAND}")


def double_kernel(x, y):
  r = tt.block(tt.program_id(0), 128)
  y[r] = 2 * x[r]


def double(x, persistent="dynamic", **options):
  return tt.tile_call(double_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(tt.cdiv(x.shape[0], 128),),
                      persistent=persistent, **options)(x)


def for_cuda(fn, *args) -> str:
  return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@built
def test_a_call_for_cuda_has_the_counter_as_one_more_array_that_it_writes_in_place():
  text = for_cuda(double, struct(1000))
  call, = re.findall(r"custom_call @tiletrace_launch_v1\((%\w+), (%\w+)\).*-> (.*)", text)
  zero = re.search(rf"{call[1]} = stablehlo.broadcast_in_dim (%\w+), .*tensor<1xi32>", text)

  assert "output_tuple_indices = [1], operand_index = 1" in text
  assert "(tensor<1000xf32>, tensor<1xi32>)" in call[2] or "tuple<tensor<1000xf32>, tensor<1xi32>>" in call[2]
  assert zero is not None and re.search(rf"{zero[1]} = stablehlo.constant dense<0> : tensor<i32>", text)
  assert "persistent = true" in text
  assert re.search(r"func.func public @main\(%arg0: tensor<1000xf32>\) -> \(tensor<1000xf32>", text)
  for persistent in (True, False):
    assert "xi32>, tensor<1000xf32>" not in for_cuda(lambda x, p=persistent: double(x, p), struct(1000))
    assert "operand_index" not in for_cuda(lambda x, p=persistent: double(x, p), struct(1000))


@built
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("debug", [True, False])
def test_modules_for_cuda_of_shard_map_vmap_and_scan(check_vma, debug):
  mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])
  options = tt.CompileOptions(debug=debug)

  def f(x):
    return jax.lax.scan(lambda c, _: (jax.vmap(lambda x: double(x, options=options))(c), None), x, None, length=2)[0]

  mapped = jax.shard_map(f, mesh=mesh, in_specs=P("d", None), out_specs=P("d", None), check_vma=check_vma)
  assert for_cuda(mapped, struct(4, 256)).count("custom_call @tiletrace_launch_v1") == 1


@built
def test_symbolic_shapes_are_exported():
  n, = export.symbolic_shape("n")
  f = jax.jit(lambda x: double(x, dynamic_shapes=("n", "n")))
  exported = export.export(f, platforms=["cuda"], disabled_checks=export_checks())(
      jax.ShapeDtypeStruct((n,), jnp.float32))
  text = exported.mlir_module()
  assert text.count(f"custom_call @{library.TARGET_OF_ANY_SIZE}") == 1 and "operand_index = 1" in text


def test_the_image_says_which_operand_the_counter_is():
  def two(x, y, a, b):
    a[...], b[...] = x[...] + y[...], x[...] - y[...]

  x = struct(64)
  images = [tt.tile_call(two, (x, x), grid=2, persistent=p).trace(x, x).program.image("sm_90a")
            for p in ("dynamic", True)]
  assert [(i.counter, i.persistent) for i in images] == [(2, True), (None, True)]
  assert images[0].params == tuple(("operand", i) for i in range(5))
  assert KernelImage.from_bytes(images[0].to_bytes()) == images[0]


def test_programs_of_other_persistence_are_other_programs():
  traced = [tt.tile_call(double_kernel, struct(1000), grid=8, persistent=p).trace(struct(1000)).program
            for p in (False, True, "dynamic")]
  assert len({t.fingerprint for t in traced}) == 3
  assert all(t.in_avals == t.out_avals == (((1000,), np.dtype(np.float32)),) for t in traced)


def test_jax_ops_have_no_tiles_to_take():
  x = np.arange(1000, dtype=np.float32)
  np.testing.assert_array_equal(jax.jit(lambda x: double(x, backend="xla"))(x), 2 * x)
  assert "i32" not in str(jax.make_jaxpr(double)(x))
  np.testing.assert_array_equal(
      jax.grad(lambda x: double(x, vjp="xla").sum())(x), np.full(1000, 2, np.float32))


# --- refusals

def caret(error: tt.TileTraceError) -> str:
  loc = error.loc
  assert loc is not None and loc.span is not None
  return linecache.getline(loc.filename, loc.line)[loc.span.column:loc.span.end_column]


@pytest.mark.parametrize("value", ["static", 1, None, ("dynamic",), np.asarray(["dynamic"])], ids=repr)
def test_other_words_are_refused(value):
  with pytest.raises(tt.TileTypeError, match=r'tile_call\(double_kernel\): persistent=.* must be True, False or '
                                             r'"dynamic"') as refused:
    tt.tile_call(double_kernel, struct(1000), grid=8, persistent=value)
  assert caret(refused.value) == "tt.tile_call(double_kernel, struct(1000), grid=8, persistent=value)"


def test_clusters_are_refused_those_of_one_cta_are_none():
  with pytest.raises(tt.TileTypeError, match=r'persistent="dynamic" with cluster=\(2,\): a CTA takes') as refused:
    tt.tile_call(double_kernel, struct(1000), grid=8, persistent="dynamic", cluster=(2,))
  assert refused.value.hint == "persistent=True, or drop cluster="
  assert caret(refused.value) == 'tt.tile_call(double_kernel, struct(1000), grid=8, persistent="dynamic", cluster=(2,))'
  x = np.arange(1000, dtype=np.float32)
  np.testing.assert_array_equal(double(x, cluster=(1,), backend="sim"), 2 * x)


def test_roles_of_the_author_s_own_are_refused():
  def kernel(x, y):
    with tt.warpgroup(0):
      for t in tt.range(tt.cta_id(), 8, tt.num_ctas()):
        y[tt.block(t, 128)] = 2 * x[tt.block(t, 128)]

  x = np.arange(1000, dtype=np.float32)
  call = tt.tile_call(kernel, struct(1000), grid=8, persistent="dynamic")
  with pytest.raises(tt.LoweringError, match='kernel has roles of its own, and persistent="dynamic"') as refused:
    call.trace(x)
  assert caret(refused.value) == "tt.warpgroup(0)"
  assert refused.value.hint is not None and refused.value.hint.startswith("persistent=True, and write the loop")
  np.testing.assert_array_equal(
      tt.tile_call(kernel, struct(1000), grid=8, persistent=True, backend="sim")(x), 2 * x)


@built
def test_debugging_of_symbolic_sizes_is_still_refused():
  n, = export.symbolic_shape("n")

  def kernel(x, y):
    tt.debug_print("{}", tt.program_id(0))
    double_kernel(x, y)

  def call(x):
    return tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(tt.cdiv(x.shape[0], 128),),
                        persistent="dynamic", dynamic_shapes=("n", "n"), options=tt.CompileOptions(debug=True))(x)

  with pytest.raises(tt.LoweringError, match="is debugged or profiled, and has symbolic sizes"):
    export.export(jax.jit(call), platforms=["cuda"], disabled_checks=export_checks())(
        jax.ShapeDtypeStruct((n,), jnp.float32))
