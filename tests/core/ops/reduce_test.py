from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.tracing import Out, array, trace, trace_values
from tiletrace.core import dtypes
from tiletrace.core.errors import TileIndexError
from tiletrace.lowering.xla.run import run

rng = np.random.default_rng(6)


@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), (1,), ()], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", ["sum", "max", "min", "prod", "mean", "any", "all"])
def test_reductions_are_jnps(name, axis, keepdims):
  x = rng.uniform(0.5, 1.5, (2, 3, 4)).astype(np.float32) * (rng.random((2, 3, 4)) > 0.2)
  want = np.asarray(getattr(jnp, name)(x, axis=axis, keepdims=keepdims))

  def kernel(x, y):
    y[...] = getattr(tt, name)(x[...], axis, keepdims=keepdims)

  graph = trace(kernel, grid=(1,), x=array(dtypes.f32, 2, 3, 4), y=Out(array(want.dtype, *want.shape)))
  np.testing.assert_allclose(np.asarray(run(graph, x)[0]), want, rtol=1e-6)


def test_sums_keep_the_dtype_and_accumulate_16_bit_floats_in_f32():
  def kernel(x):
    tt.sum(x[...], axis=1)

  eqns = trace(kernel, x=array(dtypes.bf16, 4, 8)).body.eqns
  assert [e.primitive.name for e in eqns] == ["load", "cast", "reduce_sum", "cast"]
  assert [e.outvars[0].type.dtype for e in eqns] == [dtypes.bf16, dtypes.f32, dtypes.f32, dtypes.bf16]
  for dtype, want in ((dtypes.u8, dtypes.u8), (dtypes.i32, dtypes.i32), (dtypes.bool_, dtypes.i32)):
    assert trace_values(lambda v: v.sum(), (dtype, (8,))).dtype == want
  assert trace_values(lambda v: v.sum(dtype="float32"), (dtypes.bf16, (8,))).dtype == dtypes.f32
  assert trace_values(lambda v: v.mean(), (dtypes.i32, (8,))).dtype == dtypes.f32
  assert trace_values(lambda v: v.mean(), (dtypes.bf16, (8,))).dtype == dtypes.bf16


@pytest.mark.parametrize("axis", [2, -3, (0, 0), (0, -2)], ids=str)
def test_an_axis_out_of_range_or_twice_is_refused(axis):
  with pytest.raises(TileIndexError, match=r"max: axis .* of f32"):
    trace_values(lambda v: tt.max(v, axis), (dtypes.f32, (2, 3)))
