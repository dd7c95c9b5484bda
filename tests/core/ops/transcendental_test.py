from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tiletrace as tt
from tests.tracing import trace_values
from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError

FLOATS, INTEGERS = (dtypes.f32, dtypes.bf16, dtypes.f16), (dtypes.i32, dtypes.u32, dtypes.i8, dtypes.u8, dtypes.i16)
UNARY = ("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "expm1", "log1p", "log10", "cbrt",
         "round", "trunc", "reciprocal")
rng = np.random.default_rng(4)


def jnp_type(fn, *types):
  out = jax.eval_shape(fn, *(jax.ShapeDtypeStruct(s, d) for d, s in types))
  return np.dtype(out.dtype), out.shape


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_floats_keep_the_dtype_and_integers_become_f32(name):
  for dtype in (*FLOATS, *INTEGERS, dtypes.bool_):
    out = trace_values(getattr(tt, name), (dtype, (3, 4)))
    assert (out.dtype, out.shape) == (dtype if dtypes.is_float(dtype) else dtypes.f32, (3, 4))
  assert jnp_type(getattr(jnp, name), (dtypes.bf16, (3, 4))) == (dtypes.bf16, (3, 4))


@pytest.mark.parametrize("name", ["atan2", "hypot", "fmod", "logaddexp", "copysign"])
def test_functions_of_two_promote_as_jnp(name):
  python, reference = getattr(tt, name), getattr(jnp, {"atan2": "arctan2"}.get(name, name))
  for a, b in itertools.product(FLOATS, repeat=2):
    out = trace_values(python, (a, (3, 1)), (b, (1, 4)))
    assert (out.dtype, out.shape) == jnp_type(reference, (a, (3, 1)), (b, (1, 4)))


@pytest.mark.parametrize("name", ["isinf", "isfinite", "signbit"])
def test_tests_give_bools(name):
  for dtype in (*FLOATS, dtypes.i32):
    assert trace_values(getattr(tt, name), (dtype, (7,))).type == trace_values(
      lambda x: x == x, (dtype, (7,))).type
  for x in (0.0, -0.0, -2.5, math.inf, -math.inf, math.nan):
    assert getattr(tt, name)(x) == bool(getattr(np, name)(x))


def test_of_python_numbers_everything_is_a_python_number():
  for name in set(UNARY) - {"acosh"}:
    x = float(rng.uniform(0.1, 0.9))
    got = getattr(tt, name)(x)
    assert type(got) is float and math.isclose(got, float(getattr(np, name)(x)))         # numpy 2 has the short names
  assert tt.acosh(2.0) == math.acosh(2) and tt.atan2(1, -1) == math.atan2(1, -1)
  assert tt.fmod(-7, 3) == -1 and tt.hypot(3, 4) == 5 and tt.copysign(2.0, -0.0) == -2
  assert math.isclose(tt.logaddexp(1.0, 2.0), float(np.logaddexp(1.0, 2.0)))
  assert math.isclose(tt.erfc(3.0), math.erfc(3))


@pytest.mark.parametrize("name", ["population_count", "clz"])
def test_functions_of_bits_take_integers_and_keep_their_dtype(name):
  for dtype in INTEGERS:
    out = trace_values(getattr(tt, name), (dtype, (6,)))
    assert (out.dtype, out.shape) == jnp_type(getattr(lax, name), (dtype, (6,)))
  with pytest.raises(TileTypeError, match=f"{name} of f32: it takes integers"):
    trace_values(getattr(tt, name), (dtypes.f32, (6,)))
  with pytest.raises(TileTypeError, match=f"{name}: 5 has no width"):
    trace_values(lambda x: getattr(tt, name)(5), (dtypes.i32, (6,)))


def test_bits_become_a_dtype_of_the_same_size_or_parts_or_come_of_them():
  for a, b in itertools.product((*FLOATS, *INTEGERS), repeat=2):
    shape = (6, 5) if a.itemsize >= b.itemsize else (6, b.itemsize // a.itemsize)
    out = trace_values(lambda x, b=b: tt.bitcast_convert_type(x, b), (a, shape))
    assert (out.dtype, out.shape) == jnp_type(lambda x, b=b: lax.bitcast_convert_type(x, b), (a, shape))
    if a.itemsize < b.itemsize:
      for wrong in ((6, 5), shape[1:]):
        with pytest.raises(TileTypeError, match="differ in size") as e:
          trace_values(lambda x, b=b: tt.bitcast_convert_type(x, b), (a, wrong))
        assert "transcendental_test.py" in str(e.value) and "^" in str(e.value)
  with pytest.raises(TileTypeError, match="a bool has no bits") as e:
    trace_values(lambda x: tt.bitcast_convert_type(x > 0, jnp.int8), (dtypes.f32, (6,)))
  assert "tt.bitcast_convert_type(x > 0, jnp.int8)" in str(e.value)


def test_a_reference_or_an_array_is_refused_by_name():
  with pytest.raises(TileTypeError, match=r"atan2: x is a numpy array of shape \[4\]"):
    trace_values(lambda y: tt.atan2(y, np.arange(4)), (dtypes.f32, (4,)))
