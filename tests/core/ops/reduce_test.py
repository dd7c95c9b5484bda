from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.xla.kernels import run_compiled as run
from tests.tracing import Out, array, trace, trace_values
from tiletrace.core import dtypes
from tiletrace.core.errors import TileIndexError, TileTypeError
from tiletrace.core.ops.reduce import BITWISE, REDUCTIONS, identity

rng = np.random.default_rng(6)


@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), (1,)], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", ["sum", "max", "min", "prod", "mean", "any", "all"])
def test_reductions_are_jnps(name, axis, keepdims):
  x = rng.uniform(0.5, 1.5, (2, 3, 4)).astype(np.float32) * (rng.random((2, 3, 4)) > 0.2)
  want = np.asarray(getattr(jnp, name)(x, axis=axis, keepdims=keepdims))

  def kernel(x, y):
    y[...] = getattr(tt, name)(x[...], axis, keepdims=keepdims)

  graph = trace(kernel, grid=(1,), x=array(dtypes.f32, 2, 3, 4), y=Out(array(want.dtype, *want.shape)))
  np.testing.assert_allclose(np.asarray(run(graph, jnp.asarray(x))[0]), want, rtol=1e-6)


def test_sums_keep_the_dtype_and_accumulate_16_bit_floats_in_f32():
  def kernel(x):
    tt.sum(x[...], axis=1)

  eqns = trace(kernel, x=array(dtypes.bf16, 4, 8)).body.eqns
  assert [e.primitive.name for e in eqns] == ["load", "cast", "reduce_sum", "cast"]
  assert [e.outvars[0].dtype for e in eqns] == [dtypes.bf16, dtypes.f32, dtypes.f32, dtypes.bf16]
  for dtype, want in ((dtypes.u8, dtypes.u32), (dtypes.i8, dtypes.i32), (dtypes.i32, dtypes.i32),
                      (dtypes.f8e4m3, dtypes.f8e4m3), (dtypes.bool_, dtypes.i32)):
    assert trace_values(lambda v: v.sum(), (dtype, (8,))).dtype == want
  assert trace_values(lambda v: v.sum(dtype="float32"), (dtypes.bf16, (8,))).dtype == dtypes.f32
  assert trace_values(lambda v: v.mean(), (dtypes.i32, (8,))).dtype == dtypes.f32
  assert trace_values(lambda v: v.mean(), (dtypes.bf16, (8,))).dtype == dtypes.bf16


def test_a_scalar_is_its_own_reduction():
  for f in (tt.sum, tt.max, tt.prod, tt.argmin):
    assert trace_values(f, (dtypes.i32, ())).shape == ()


@pytest.mark.parametrize("axis", [2, -3, (0, 0), (0, -2)], ids=str)
def test_an_axis_out_of_range_or_twice_is_refused(axis):
  with pytest.raises(TileIndexError, match=r"max: axis .* of f32"):
    trace_values(lambda v: tt.max(v, axis), (dtypes.f32, (2, 3)))


@pytest.mark.parametrize("axis", [None, 0, -1], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_])
def test_indices_of_extrema_are_jnps(name, axis, keepdims, dtype):
  x = np.round(rng.normal(0, 1, (5, 9)))
  if dtype is np.float32:
    x[2, 4], x[2, 7] = np.nan, np.nan
  x = x.astype(dtype)
  want = np.asarray(getattr(jnp, name)(x, axis=axis, keepdims=keepdims))

  def kernel(x, y):
    y[...] = getattr(tt, name)(x[...], axis, keepdims=keepdims)

  graph = trace(kernel, grid=(1,), x=array(np.dtype(dtype), 5, 9), y=Out(array(dtypes.i32, *want.shape)))
  np.testing.assert_array_equal(np.asarray(run(graph, jnp.asarray(x))[0]), want)


def test_indices_take_one_axis():
  with pytest.raises(TileTypeError, match=r"argmax: axis \(0, 1\)"):
    trace_values(lambda v: tt.argmax(v, (0, 1)), (dtypes.f32, (2, 3)))  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", [1.0, "rows", (0, None)], ids=str)
def test_an_axis_that_is_no_int_is_refused(axis):
  with pytest.raises(TileTypeError, match="sum: axis"):
    trace_values(lambda v: tt.sum(v, axis), (dtypes.f32, (2, 3)))


def test_no_elements_have_a_sum_but_no_maximum():
  def kernel(x, y):
    v = x[...][:, 2:2]
    y[0], y[1], y[2], y[3] = tt.sum(v), tt.prod(v), tt.any(v).astype(np.float32), tt.all(v).astype(np.float32)

  x = rng.normal(0, 1, (3, 4)).astype(np.float32)
  graph = trace(kernel, grid=(1,), x=array(dtypes.f32, 3, 4), y=Out(array(dtypes.f32, 4)))
  np.testing.assert_array_equal(np.asarray(run(graph, jnp.asarray(x))[0]), [0, 1, 0, 1])
  for f in (tt.max, tt.min, tt.argmax):
    with pytest.raises(TileTypeError, match=r"of f32\[3,0\]: there is none of no elements"):
      trace_values(lambda v, f=f: f(v[:, 2:2], axis=1), (dtypes.f32, (3, 4)))


def test_an_axis_may_be_an_integer_of_numpy():
  assert trace_values(lambda v: tt.sum(v, np.int64(1)), (dtypes.f32, (2, 3))).shape == (2,)
  assert trace_values(lambda v: tt.argmax(v, np.int32(-2)), (dtypes.f32, (2, 3))).shape == (3,)


@pytest.mark.parametrize(("op", "dtype"), [
  (op, d) for d in (dtypes.f32, dtypes.bf16, dtypes.f8e4m3, dtypes.f8e5m2, dtypes.i8, dtypes.u32, dtypes.bool_)
  for op in REDUCTIONS if op not in BITWISE or dtypes.is_integer(d)], ids=str)
def test_what_changes_no_result_is_a_number_of_the_dtype(op, dtype):
  """-inf as a float8_e4m3fn would be NaN, and so would be the maximum of a padded tile."""
  nothing = np.asarray(identity(op, dtype)).astype(dtype)
  assert not np.isnan(nothing.astype(np.float32)) and nothing.astype(np.float64) == np.float64(identity(op, dtype))
