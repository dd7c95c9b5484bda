from __future__ import annotations

import itertools
import math
import operator
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.tracing import bf16, f32, i32, trace, trace_values
from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError
from tiletrace.core.ops.elementwise import cast_p
from tiletrace.core.tile import Tile

NUMERIC = [dtypes.f32, dtypes.bf16, dtypes.f16, dtypes.i32, dtypes.u8, dtypes.bool_]
ARITHMETIC = [operator.add, operator.mul, operator.truediv]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
rng = random.Random(3)


def jnp_type(fn, *types):
  out = jax.eval_shape(fn, *(jax.ShapeDtypeStruct(s, d) for d, s in types))
  return np.dtype(out.dtype), out.shape


def check_like_jnp(fn, *types, jnp_fn=None):
  out = trace_values(fn, *types)
  assert (out.dtype, out.shape) == jnp_type(jnp_fn or fn, *types)


@pytest.mark.parametrize("op", ARITHMETIC + COMPARISONS, ids=lambda f: f.__name__)
def test_binary_operators_have_jnps_dtype_for_every_pair(op):
  for a, b in itertools.product(NUMERIC, repeat=2):
    check_like_jnp(op, (a, (3, 5)), (b, (3, 5)))


@pytest.mark.parametrize("op", [operator.floordiv, operator.mod, operator.sub], ids=lambda f: f.__name__)
def test_floor_division_and_subtraction_have_jnps_dtype_for_numbers(op):
  for a, b in itertools.product(NUMERIC[:-1], repeat=2):
    check_like_jnp(op, (a, (3, 5)), (b, (3, 5)))


@pytest.mark.parametrize("op", [operator.and_, operator.or_, operator.xor], ids=lambda f: f.__name__)
def test_bitwise_operators_take_integers_and_bools(op):
  for a, b in itertools.product([dtypes.i32, dtypes.u8, dtypes.bool_], repeat=2):
    check_like_jnp(op, (a, (4,)), (b, (4,)))
  with pytest.raises(TileTypeError, match="it takes integers and bools"):
    trace_values(op, (dtypes.f32, (4,)), (dtypes.i32, (4,)))


@pytest.mark.parametrize("number", [2, -3, 0.5, True], ids=str)
def test_python_numbers_on_either_side_are_weak(number):
  for dtype in NUMERIC:
    if dtype == dtypes.u8 and number == -3:
      continue
    check_like_jnp(lambda x: x + number, (dtype, (4,)))
    check_like_jnp(lambda x: number * x, (dtype, (4,)))


def test_a_numpy_scalar_on_the_left_is_strong_and_narrowed():
  assert trace_values(lambda x: np.float32(2) * x, (dtypes.bf16, (4,))).dtype == dtypes.f32
  assert trace_values(lambda x: np.float64(2) * x, (dtypes.bf16, (4,))).dtype == dtypes.f32
  assert trace_values(lambda x: np.int64(2) + x, (dtypes.i32, (4,))).dtype == dtypes.i32
  assert trace_values(lambda x: x + np.array(2, np.int8), (dtypes.i32, (4,))).dtype == dtypes.i32


def test_a_numpy_array_is_refused_by_name():
  with pytest.raises(TileTypeError, match=r"add: y is a numpy array of shape \[4\]"):
    trace_values(lambda x: x + np.arange(4), (dtypes.i32, (4,)))


@pytest.mark.parametrize("name", ["exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos", "floor", "ceil", "abs",
                                  "sign", "square", "isnan", "negative", "invert"])
def test_unary_functions_have_jnps_name_and_dtype(name):
  for dtype in NUMERIC:
    if (dtype == dtypes.bool_ and name in ("sign", "negative", "floor", "ceil", "abs", "square", "isnan")) or (
        name == "invert" and dtypes.is_float(dtype)):
      continue
    out = trace_values(getattr(tt, name), (dtype, (3, 4)))
    expected, shape = jnp_type(getattr(jnp, name), (dtype, (3, 4)))
    if name in ("floor", "ceil") and dtypes.is_integer(dtype):
      expected = dtypes.f32  # a float, where jnp keeps the integer
    if dtypes.is_float(expected) and not dtypes.is_float(dtype):
      expected = dtypes.f32  # integers become f32, of whatever width
    assert (out.dtype, out.shape) == (expected, shape), (name, dtype)


@pytest.mark.parametrize("name", ["rsqrt", "sigmoid", "logistic", "silu", "erf"])
def test_the_nn_functions_are_floats(name):
  for dtype in NUMERIC:
    out = trace_values(getattr(tt, name), (dtype, (3, 4)))
    assert out.dtype == (dtype if dtypes.is_float(dtype) else dtypes.f32)


def test_minimum_maximum_where_and_clip_promote_as_jnp():
  for a, b in itertools.product(NUMERIC, repeat=2):
    check_like_jnp(tt.minimum, (a, (6,)), (b, (6,)), jnp_fn=jnp.minimum)
    check_like_jnp(tt.maximum, (a, (6,)), (b, ()), jnp_fn=jnp.maximum)
    check_like_jnp(tt.where, (dtypes.bool_, (6,)), (a, (6,)), (b, (6,)), jnp_fn=jnp.where)
  check_like_jnp(lambda x: tt.clip(x, -1, 1), (dtypes.bf16, (6,)), jnp_fn=lambda x: jnp.clip(x, -1, 1))


def test_of_python_numbers_everything_is_a_python_number():
  for _ in range(200):
    x, y = rng.randrange(1, 1000), rng.randrange(1, 100)
    assert tt.cdiv(x, y) == math.ceil(x / y)
    assert tt.align_to(x, y) % y == 0 and 0 <= tt.align_to(x, y) - x < y
    assert (tt.minimum(x, y), tt.maximum(x, y)) == (min(x, y), max(x, y))
    assert type(tt.cdiv(x, y)) is int
  assert tt.exp2(3) == 8.0
  assert tt.where(True, 1, 2) == 1
  assert math.isnan(tt.maximum(1.0, math.nan)) and math.isnan(tt.minimum(math.nan, 1.0))
  assert tt.rsqrt(4) == 0.5
  assert abs(tt.sigmoid(-800.0)) < 1e-300


def test_operands_are_promoted_and_broadcast_before_the_equation():
  def kernel(x, s):
    x[...] + s[0] + 1

  eqns = trace(kernel, x=bf16(4, 8), s=f32(2)).body.eqns
  names = [e.primitive.name for e in eqns]
  assert names == ["load", "load", "cast", "add", "add"]
  assert eqns[2].primitive is cast_p
  first, second = eqns[3:]
  assert [a.type.shape for a in first.invars] == [(4, 8), ()]
  assert {a.type.dtype for a in first.invars} == {dtypes.f32}
  assert second.invars[1].type.shape == () and second.invars[1].value == 1.0


def test_integer_powers_are_multiplications():
  def kernel(x):
    x[...] ** 5

  assert [e.primitive.name for e in trace(kernel, x=i32(4)).body.eqns] == ["load", "mul", "mul", "mul"]
  with pytest.raises(TileTypeError, match="power of integers"):
    trace_values(lambda x: x ** -1, (dtypes.i32, (4,)))
  assert trace_values(lambda x: x ** -1, (dtypes.f32, (4,))).dtype == dtypes.f32
  assert trace_values(lambda x: 2.0 ** x, (dtypes.f32, (4,))).dtype == dtypes.f32


def test_casts_to_bool_are_comparisons():
  out = trace_values(lambda x: x.astype(bool), (dtypes.f32, (4,)))
  assert isinstance(out, Tile) and out.dtype == dtypes.bool_


def test_a_literal_that_does_not_fit_is_refused():
  with pytest.raises(TileTypeError, match=r"add: 300 does not fit in u8"):
    trace_values(lambda x: x + 300, (dtypes.u8, (4,)))
  with pytest.raises(TileTypeError, match=r"add: 4294967296 does not fit in i32"):
    trace_values(lambda x: x + 2**32, (dtypes.i32, (4,)))


def test_nothing_is_64_bits_wide_under_x64():
  with jax.enable_x64(True):
    assert trace_values(lambda x: x * 0.5, (dtypes.i32, (4,))).dtype == dtypes.f32
    assert trace_values(lambda x: x / 2, (dtypes.i32, (4,))).dtype == dtypes.f32
    assert trace_values(lambda x: tt.sum(x > 0), (dtypes.i32, (4,))).dtype == dtypes.i32
