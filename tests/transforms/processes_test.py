"""What leaves the process: exported programs, pickled kernels and programs, modules for CUDA made without a GPU."""
from __future__ import annotations

import os
import pathlib
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import tiletrace as tt
from tests.transforms.kernels import like, matmul_call, normal, scale_rows
from tiletrace.core.errors import LoweringError, TileTypeError
from tiletrace.ffi import library
from tiletrace.ffi.primitive import bind, export_checks
from tiletrace.stages import TileProgram, Traced

ROOT = pathlib.Path(__file__).parents[2]
X, S = normal(0, 6, 5), normal(1, 6)
BF16 = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)

built = pytest.mark.skipif(not library.PATH.exists(), reason=f"needs the CUDA launcher: {library.BUILD_COMMAND}")

RUN_ELSEWHERE = """
import pathlib, pickle, sys
import jax, numpy as np
from jax import export
import tiletrace
folder = pathlib.Path(sys.argv[1])
x, s = np.load(folder / "x.npy"), np.load(folder / "s.npy")
exported = export.deserialize((folder / "exported").read_bytes())
assert exported.platforms == ("cpu", "cuda"), exported.platforms
np.testing.assert_array_equal(exported.call(x, s), x * s[:, None])
gradient = jax.grad(lambda x: exported.call(x, s).sum())(x)
np.testing.assert_array_equal(gradient, np.broadcast_to(s[:, None], x.shape))
traced, program, call = pickle.loads((folder / "pickled").read_bytes())
assert program.fingerprint == sys.argv[2] and traced.program == program and call.trace(x, s).program == program
from tiletrace.ffi.primitive import bind
np.testing.assert_array_equal(jax.jit(lambda *a: bind(program, *a)[0])(x, s), x * s[:, None])
print(traced.lower().as_text("ptx"), end="")
"""


def call_scale_rows(x, s):
  return tt.tile_call(_scale, like(x), grid=(2,), vjp=_scale_bwd)(x, s)


def _scale(x, s, y):
  r = tt.block(tt.program_id(0), 4)
  y[r, :] = x[r, :] * s[r, None]


def _scale_bwd(inputs, outputs, dy):
  (x, s) = inputs
  return call_scale_rows(dy, s), jnp.sum(x * dy, axis=1)


@built
def test_an_exported_program_and_pickled_ones_run_in_a_new_process(tmp_path):
  exported = export.export(jax.jit(call_scale_rows), platforms=["cpu", "cuda"], disabled_checks=export_checks())(X, S)
  (tmp_path / "exported").write_bytes(exported.serialize(vjp_order=1))
  call = tt.tile_call(_scale, like(X), grid=(2,), vjp=_scale_bwd)
  traced = call.trace(X, S)
  (tmp_path / "pickled").write_bytes(pickle.dumps((traced, traced.program, call)))
  np.save(tmp_path / "x.npy", X)
  np.save(tmp_path / "s.npy", S)
  done = subprocess.run([sys.executable, "-W", "error", "-c", RUN_ELSEWHERE, str(tmp_path), traced.program.fingerprint],
                        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, text=True,
                        capture_output=True, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout == traced.lower().as_text("ptx")


@built
def test_export_carries_one_image_for_cuda_and_the_jax_ops_for_cpus():
  exported = export.export(jax.jit(jax.vmap(scale_rows)), platforms=["cpu", "cuda"], disabled_checks=export_checks())(
      X[None], S[None])
  assert exported.mlir_module().count("custom_call @tiletrace_launch_v1") == 1
  np.testing.assert_array_equal(exported.call(X[None], S[None]), (X * S[:, None])[None])
  with pytest.raises(ValueError, match="Cannot serialize code with custom calls"):
    export.export(jax.jit(scale_rows), platforms=["cuda"])(X, S)


def test_export_with_symbolic_shapes_is_refused_with_the_shape():
  n, = export.symbolic_shape("n")
  with pytest.raises(TileTypeError, match=r"_scale: a shape is symbolic: \(n, 5\), \(n,\)") as refused:
    export.export(jax.jit(call_scale_rows))(*(jax.ShapeDtypeStruct(s, np.float32) for s in ((n, 5), (n,))))
  assert refused.value.hint is not None and "concrete shapes" in refused.value.hint


@built
def test_a_kernel_of_dynamic_shapes_is_exported_with_symbolic_ones():
  n, = export.symbolic_shape("n")
  specs = [jax.ShapeDtypeStruct(s, np.float32) for s in ((n, 5), (n,))]

  def call(x, s):
    return tt.tile_call(_scale, like(x), grid=(tt.cdiv(x.shape[0], 4),), dynamic_shapes=("n, 5", "n", "n, 5"))(x, s)

  text = export.export(jax.jit(call), platforms=["cuda"], disabled_checks=export_checks())(*specs).mlir_module()
  assert text.count(f"custom_call @{library.TARGET_OF_ANY_SIZE}") == 1
  with pytest.raises(LoweringError, match=r"_scale has the symbolic sizes n=n, .* jax ops .*") as refused:
    export.export(jax.jit(call), platforms=["cpu"])(*specs)
  assert refused.value.hint is not None and 'platforms=["cuda"]' in refused.value.hint
  np.testing.assert_array_equal(call(X, S), X * S[:, None])


@pytest.mark.parametrize("shapes, message", [
    (("n, 5", "n", "n, 5"), "dimension 0 of s is m, but dimension 0 of x is n, .* the name n for both"),
    (("2*n, 5", "m", "2*n, 5"), "dimension 0 of x is n, no multiple of 2"),
    (("_, 5", "m", "n, 5"), "is the symbolic size n, dynamic_shapes has no name for it")])
def test_symbolic_shapes_that_may_break_a_promise_are_refused(shapes, message):
  m, n = export.symbolic_shape("m, n")
  call = tt.tile_call(_scale, jax.ShapeDtypeStruct((n, 5), np.float32), grid=(2,), dynamic_shapes=shapes)
  with pytest.raises(TileTypeError, match=message):
    export.export(jax.jit(call), platforms=["cuda"])(*(jax.ShapeDtypeStruct(s, np.float32) for s in ((n, 5), (m,))))


@built
def test_modules_for_cuda_come_from_a_machine_without_a_gpu():
  call = matmul_call(64, 64)
  text = jax.jit(call).trace(BF16, BF16).lower(lowering_platforms=("cuda",)).as_text()
  image = call.trace(BF16, BF16).program.image("sm_90a")
  assert f'fingerprint = "{image.fingerprint}"' in text and 'target = "sm_90a"' in text


def test_a_pickled_program_is_the_same_program_without_its_code_objects():
  traced = matmul_call(64, 64).trace(BF16, BF16)
  again = pickle.loads(pickle.dumps(traced))
  assert isinstance(again, Traced) and isinstance(again.program, TileProgram)
  assert again.program == traced.program and hash(again.program) == hash(traced.program)
  assert str(again) == str(traced)
  assert again.graph.body.eqns[0].primitive is traced.graph.body.eqns[0].primitive
  for mine, theirs in zip(traced.graph.body.eqns, again.graph.body.eqns, strict=True):
    assert str(mine.loc) == str(theirs.loc) and mine.loc.excerpt() == theirs.loc.excerpt()
    assert theirs.loc.code.co_code != mine.loc.code.co_code
  a, b = (normal(i, 64, 64, dtype=jnp.bfloat16) for i in (0, 1))
  np.testing.assert_array_equal(bind(again.program, a, b)[0], bind(traced.program, a, b)[0])
  assert again.lower().as_text() == traced.lower().as_text()


def test_a_batched_program_pickles():
  program = matmul_call(64, 64).trace(BF16, BF16).program.batch(3, (True, False))
  assert pickle.loads(pickle.dumps(program)) == program
