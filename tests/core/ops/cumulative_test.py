from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.xla.kernels import run_compiled as run
from tests.tolerances import assert_close
from tests.tracing import Out, array, trace, trace_values
from tiletrace.core import dtypes
from tiletrace.core.errors import TileIndexError, TileTypeError

DTYPES = [np.float32, jnp.bfloat16, np.float16, np.int32, np.uint32, np.int8, np.bool_]
EXTENTS = (1, 7, 33, 96, 100, 229, 1000, 2880)


def sums(x: np.ndarray, *args, **kwargs) -> np.ndarray:
  """tt.cumsum of an array, as jax operations."""
  want = jax.eval_shape(lambda x: jnp.cumsum(x, kwargs.get("axis", *args), dtype=kwargs.get("dtype")), x)

  def kernel(x, y):
    y[...] = tt.cumsum(x[...], *args, **kwargs)

  out = Out(array(np.dtype(want.dtype), *want.shape))
  return np.asarray(run(trace(kernel, grid=(1,), x=array(x.dtype, *x.shape), y=out), jnp.asarray(x))[0])


@pytest.mark.parametrize("n", EXTENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_sums_are_jnps_for_every_dtype_and_extent(dtype, n):
  rng = np.random.default_rng(n)
  x = rng.integers(0, 2, (3, n)).astype(dtype) if dtype is np.bool_ else rng.normal(1, 9, (3, n)).astype(dtype)
  got, exact = sums(x, axis=1), np.dtype(dtype).kind in "biu"
  assert got.dtype == jnp.cumsum(x, 1).dtype
  want = np.asarray(jnp.cumsum(x, 1)) if exact else x.astype(np.float64).cumsum(1)
  assert_close(got, want, "exact" if exact else "reduce")


@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1, -3], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_any_axis_from_either_end(axis, reverse):
  x = np.random.default_rng(0).integers(-9, 9, (3, 4, 5)).astype(np.int32)
  flat = x.reshape(-1) if axis is None else x
  want = jax.lax.cumsum(jnp.asarray(flat), (axis or 0) % flat.ndim, reverse=reverse)
  np.testing.assert_array_equal(sums(x, axis, reverse=reverse), want)


def test_dtypes_are_those_of_sums():
  for dtype, want in ((dtypes.u8, dtypes.u8), (dtypes.bool_, dtypes.i32), (dtypes.f16, dtypes.f16)):
    assert trace_values(lambda v: v.cumsum(0), (dtype, (8,))).dtype == want
  assert trace_values(lambda v: v.cumsum(0, dtype=jnp.float32), (dtypes.bf16, (8,))).dtype == dtypes.f32
  assert trace_values(lambda v: tt.cumsum(v[0]), (dtypes.i32, (8,))).shape == (1,)


def test_16_bit_floats_accumulate_in_f32():
  x = np.full(1000, 2**-9, jnp.bfloat16)
  x[0] = 1                                        # 16 bits hold no sum of 1 and 2**-9
  assert sums(x, 0)[-1] == jnp.bfloat16(1 + 999 / 512)


def test_no_elements_have_no_sums():
  got = trace_values(lambda v: tt.cumsum(v[:, 2:2], 1), (dtypes.f32, (3, 4)))
  assert (got.shape, got.dtype) == ((3, 0), dtypes.f32)
  assert trace_values(lambda v: tt.cumsum(v[:, 2:2]), (dtypes.f32, (3, 4))).shape == (0,)


def test_infinity_and_nan_stay_behind_the_elements_before_them():
  x = np.asarray([[1, np.inf, 2, -np.inf, 3], [1, 2, np.nan, 3, 4]], np.float32)
  want = [[1, np.inf, np.inf, np.nan, np.nan], [1, 3, np.nan, np.nan, np.nan]]
  np.testing.assert_array_equal(sums(x, 1), np.asarray(want, np.float32))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["cumprod", "cummax", "cummin"])
@pytest.mark.parametrize("dtype", [*DTYPES[:-1], np.int16, np.uint16], ids=lambda d: np.dtype(d).name)
def test_the_others_are_those_of_jax_and_keep_the_dtype(dtype, name, reverse):
  rng = np.random.default_rng(5)
  x = (rng.integers(-2, 3, (3, 40)) if np.dtype(dtype).kind != "u" else rng.integers(0, 3, (3, 40))).astype(dtype)
  axes = (0, 1, None)

  def kernel(x, *ys):
    for axis, y in zip(axes, ys):
      y[...] = getattr(tt, name)(x[...], axis, reverse=reverse)

  wants = jax.jit(lambda x: [getattr(jax.lax, name)(x.reshape(-1) if axis is None else x, axis or 0, reverse=reverse)
                             for axis in axes])(x)
  outs = {f"y{k}": Out(array(np.dtype(dtype), *want.shape)) for k, want in enumerate(wants)}
  gots = run(trace(kernel, grid=(1,), x=array(x.dtype, *x.shape), **outs), x)
  for got, want in zip(gots, wants, strict=True):
    assert_close(np.asarray(got), np.asarray(want), "exact")


def test_maxima_of_bools_are_bools_and_products_count():
  assert trace_values(lambda v: tt.cummax(v, 0), (dtypes.bool_, (8,))).dtype == dtypes.bool_
  assert trace_values(lambda v: v.cumprod(0), (dtypes.bool_, (8,))).dtype == dtypes.i32
  with pytest.raises(TileTypeError, match="cumprod: prods are no bools"):
    trace_values(lambda v: tt.cumprod(v, 0, dtype=np.bool_), (dtypes.bool_, (3,)))


@pytest.mark.parametrize("name", ["cumprod", "cummax", "cummin"])
def test_another_axis_of_the_others_is_refused_by_their_name(name):
  def kernel(x):
    getattr(tt, name)(x[...], 2)

  with pytest.raises(TileIndexError, match=rf"{name}: axis 2 of f32\[2,3\]") as refused:
    trace(kernel, x=array(dtypes.f32, 2, 3))
  assert "getattr(tt, name)(x[...], 2)" in str(refused.value) and "^" in str(refused.value)


@pytest.mark.parametrize(("axis", "kind", "message"), [
  (2, TileIndexError, r"cumsum: axis 2 of f32\[2,3\]"), (-3, TileIndexError, r"cumsum: axis -3 of f32\[2,3\]"),
  ((0, 1), TileTypeError, r"cumsum: axis \(0, 1\)"), (1.0, TileTypeError, r"cumsum: axis 1\.0"),
  (True, TileTypeError, "cumsum: axis True")], ids=str)
def test_another_axis_is_refused_at_the_call(axis, kind, message):
  def kernel(x):
    tt.cumsum(x[...], axis)

  with pytest.raises(kind, match=message) as refused:
    trace(kernel, x=array(dtypes.f32, 2, 3))
  assert "tt.cumsum(x[...], axis)" in str(refused.value) and "^" in str(refused.value)


def test_sums_that_are_bools_are_refused():
  with pytest.raises(TileTypeError, match="cumsum: sums are no bools"):
    trace_values(lambda v: tt.cumsum(v, 0, dtype=np.bool_), (dtypes.bool_, (3,)))
