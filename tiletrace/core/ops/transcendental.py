"""The rest of jnp's functions of floats, powers, rounding, and functions of the bits of a number.

Of Python numbers they are Python numbers.
"""
from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect
from tiletrace.core.errors import TileTypeError
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.operands import (
  check,
  common_shape,
  is_static,
  literal,
  operand,
  promoted,
  python_number,
  tile_types,
)
from tiletrace.core.ops.bitwise import logical_or
from tiletrace.core.ops.elementwise import (
  abs_,
  add,
  divide,
  equal,
  less,
  maximum,
  minimum,
  mod,
  multiply,
  negative,
  subtract,
  where,
)
from tiletrace.core.ops.floats import exp, sqrt
from tiletrace.core.ops.shape import spread
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile, bind_tile
from tiletrace.core.types import TileType

FLOAT = (
  tan_p, asin_p, acos_p, atan_p, sinh_p, cosh_p, asinh_p, acosh_p, atanh_p, expm1_p, log1p_p, log10_p, cbrt_p, erfc_p,
  round_p, trunc_p, atan2_p,
) = tuple(map(Primitive, (
  "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "expm1", "log1p", "log10", "cbrt", "erfc",
  "round", "trunc", "atan2")))
INTEGER = (population_count_p, clz_p, mul_hi_p) = tuple(map(Primitive, ("population_count", "clz", "mul_hi")))
bitcast_p = Primitive("bitcast")        # params: dtype


@effect_rules.register(*FLOAT, *INTEGER, bitcast_p)
def _pure(eqn: Eqn) -> tuple[Effect, ...]:
  return ()


@type_rules.register(*FLOAT, *INTEGER)
def _same_type(eqn: Eqn) -> tuple[TileType, ...]:
  types = tile_types(eqn.invars)
  allowed, kind = (dtypes.is_integer, "integers") if eqn.primitive in INTEGER else (dtypes.is_float, "floats")
  shapes = {t.shape for t in types if t.shape}
  check(len(shapes) <= 1 and len({t.dtype for t in types}) == 1,
        f"{eqn.primitive}: operands {' and '.join(map(str, types))} differ")
  check(allowed(types[0].dtype), f"{eqn.primitive} of {dtypes.short_name(types[0].dtype)}: it takes {kind}")
  return (TileType(shapes.pop() if shapes else (), types[0].dtype),)


@type_rules.register(bitcast_p)
def _bitcast_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,), to = tile_types(eqn.invars), eqn.params["dtype"]
  check(dtypes.bool_ not in (x.dtype, to), "bitcast_convert_type: a bool has no bits to look at",
        hint="x.astype(jnp.int32) is 0 or 1")
  size, wanted = x.dtype.itemsize, to.itemsize
  if size == wanted:
    return (TileType(x.shape, to),)
  check(max(size, wanted) <= 4, f"bitcast_convert_type: {x} and {dtypes.short_name(to)} differ in size",
        hint="parts of 64 bits are not supported")
  check(bool(x.shape), f"bitcast_convert_type: the scalar {x} and {dtypes.short_name(to)} differ in size",
        hint="x[None] is a tile, whose last dimension becomes or was the parts")
  if size > wanted:
    return (TileType((*x.shape, size // wanted), to),)
  parts = wanted // size
  check(len(x.shape) > 1 and x.shape[-1] == parts,
        f"bitcast_convert_type: {x} and {dtypes.short_name(to)} differ in size",
        hint=f"the last of two or more dimensions holds the {parts} parts of each element, the low bits first")
  return (TileType(x.shape[:-1], to),)


def _floats(primitive: Primitive, what: str, python: Callable[..., Any], *args: Any) -> Any:
  """An operation on floats: integers become f32."""
  names = ("x",) if len(args) == 1 else ("y", "x")
  values = [operand(a, f"{what}: {n}") for a, n in zip(args, names)]
  if all(map(is_static, values)):
    return python(*map(python_number, values))
  dtype = promoted(what, *values)
  dtype = dtype if dtypes.is_float(dtype) else dtypes.f32
  shape = common_shape(what, [v.shape for v in values if isinstance(v, Tile)])
  tiles = [v.astype(dtype) if isinstance(v, Tile) else literal(v, dtype, what) for v in values]
  return bind_tile(primitive, [spread(v, shape) if isinstance(v, Tile) and v.shape else v for v in tiles])


def tan(x: Any) -> Any:
  """The tangent of x in radians.

  >>> tt.tan(0.)
  0.0
  """
  return _floats(tan_p, "tan", math.tan, x)


def asin(x: Any) -> Any:
  """The angle between -pi/2 and pi/2 whose sine x is; NaN where |x| > 1.

  >>> round(tt.asin(1.), 6)
  1.570796
  """
  return _floats(asin_p, "asin", math.asin, x)


def acos(x: Any) -> Any:
  """The angle between 0 and pi whose cosine x is; NaN where |x| > 1.

  >>> tt.acos(1.)
  0.0
  """
  return _floats(acos_p, "acos", math.acos, x)


def atan(x: Any) -> Any:
  """The angle between -pi/2 and pi/2 whose tangent x is.

  >>> round(tt.atan(1.), 6)
  0.785398
  """
  return _floats(atan_p, "atan", math.atan, x)


def atan2(y: Any, x: Any) -> Any:
  """The angle of the point (x, y), between -pi and pi, with IEEE 754's values for zeros and infinities.

  >>> round(tt.atan2(1., -1.), 6)
  2.356194
  """
  return _floats(atan2_p, "atan2", math.atan2, y, x)


def sinh(x: Any) -> Any:
  """The hyperbolic sine.

  >>> tt.sinh(0.)
  0.0
  """
  return _floats(sinh_p, "sinh", math.sinh, x)


def cosh(x: Any) -> Any:
  """The hyperbolic cosine.

  >>> tt.cosh(0.)
  1.0
  """
  return _floats(cosh_p, "cosh", math.cosh, x)


def asinh(x: Any) -> Any:
  """The inverse of sinh.

  >>> tt.asinh(0.)
  0.0
  """
  return _floats(asinh_p, "asinh", math.asinh, x)


def acosh(x: Any) -> Any:
  """The non-negative inverse of cosh; NaN where x < 1.

  >>> tt.acosh(1.)
  0.0
  """
  return _floats(acosh_p, "acosh", math.acosh, x)


def atanh(x: Any) -> Any:
  """The inverse of tanh; NaN where |x| > 1.

  >>> tt.atanh(0.)
  0.0
  """
  return _floats(atanh_p, "atanh", math.atanh, x)


def expm1(x: Any) -> Any:
  """e ** x - 1, also where x is small.

  >>> tt.expm1(0.)
  0.0
  """
  return _floats(expm1_p, "expm1", math.expm1, x)


def log1p(x: Any) -> Any:
  """log(1 + x), also where x is small.

  >>> tt.log1p(0.)
  0.0
  """
  return _floats(log1p_p, "log1p", math.log1p, x)


def log10(x: Any) -> Any:
  """The logarithm to base 10.

  >>> tt.log10(1000.)
  3.0
  """
  return _floats(log10_p, "log10", math.log10, x)


def cbrt(x: Any) -> Any:
  """The cube root, with the sign of x.

  >>> round(tt.cbrt(-27.), 6)
  -3.0
  """
  return _floats(cbrt_p, "cbrt", math.cbrt, x)


def erfc(x: Any) -> Any:
  """1 - erf(x), also where that is small.

  >>> tt.erfc(0.)
  1.0
  """
  return _floats(erfc_p, "erfc", math.erfc, x)


def round_(x: Any) -> Any:
  """The nearest integer, as a float; of two equally near the even one.

  >>> tt.round(2.5)
  2.0
  """
  return _floats(round_p, "round", lambda v: float(builtins.round(v)), x)


def trunc(x: Any) -> Any:
  """x without its fraction, as a float: rounded towards zero.

  >>> tt.trunc(-1.5)
  -1.0
  """
  return _floats(trunc_p, "trunc", lambda v: float(math.trunc(v)), x)


# --- made of others

def isinf(x: Any) -> Any:
  """Whether x is infinite.

  >>> tt.isinf(float("-inf"))
  True
  """
  return equal(_as_float("isinf", x, abs_), math.inf)


def isfinite(x: Any) -> Any:
  """Whether x is a number and not infinite.

  >>> tt.isfinite(1e30)
  True
  """
  return less(_as_float("isfinite", x, abs_), math.inf)


def _as_float(what: str, x: Any, then: Callable[[Any], Any] = lambda v: v) -> Any:
  x = operand(x, f"{what}: x")
  if not isinstance(x, Tile):
    return then(float(python_number(x)))
  return then(x if dtypes.is_float(x.dtype) else x.astype(dtypes.f32))


def reciprocal(x: Any) -> Any:
  """1 / x; of integers in f32.

  >>> tt.reciprocal(4.)
  0.25
  """
  return divide(1, x)


def _in_f32(formula: Callable[[Any, Any], Any], what: str, x: Any, y: Any) -> Any:
  """`formula` of floats, 16-bit ones in f32; the result has their common dtype."""
  values = [operand(v, f"{what}: {n}") for v, n in ((x, "x"), (y, "y"))]
  dtype = promoted(what, *values)
  dtype = dtype if dtypes.is_float(dtype) else dtypes.f32
  wide = dtypes.promote(dtype, dtypes.f32)
  return formula(*(v.astype(wide) if isinstance(v, Tile) else float(python_number(v)) for v in values)).astype(dtype)


def fmod(x: Any, y: Any) -> Any:
  """x - trunc(x / y) * y: the remainder with the sign of x, of floats where |x / y| < 2**24.

  >>> tt.fmod(-7., 3.)
  -1.0
  """
  if not isinstance(x, Tile) and not isinstance(y, Tile):
    return math.fmod(x, y)
  return _in_f32(lambda x, y: copysign(mod(abs_(x), abs_(y)), x), "fmod", x, y)


def hypot(x: Any, y: Any) -> Any:
  """sqrt(x**2 + y**2), also where the squares are too large or too small for the dtype.

  >>> tt.hypot(3., 4.)
  5.0
  """
  if not isinstance(x, Tile) and not isinstance(y, Tile):
    return math.hypot(x, y)

  def formula(x: Any, y: Any) -> Any:
    a, b = abs_(x), abs_(y)
    large = maximum(a, b)
    ratio = where(logical_or(equal(large, 0), equal(large, math.inf)), 0, divide(minimum(a, b), large))
    return multiply(large, sqrt(add(multiply(ratio, ratio), 1)))
  return _in_f32(formula, "hypot", x, y)


def logaddexp(x: Any, y: Any) -> Any:
  """log(exp(x) + exp(y)) without overflow.

  >>> round(tt.logaddexp(0., 0.), 6)
  0.693147
  """
  if not isinstance(x, Tile) and not isinstance(y, Tile):
    return max(x, y) + math.log1p(math.exp(-abs(x - y))) if x != y else x + math.log(2)

  def formula(x: Any, y: Any) -> Any:
    distance = where(equal(x, y), 0.0, abs_(subtract(x, y)))     # infinities of one sign
    return add(maximum(x, y), log1p(exp(multiply(distance, -1))))
  return _in_f32(formula, "logaddexp", x, y)


def signbit(x: Any) -> Any:
  """Whether x has a minus sign, -0 and NaN included.

  >>> tt.signbit(-0.)
  True
  """
  x = operand(x, "signbit: x")
  if not isinstance(x, Tile):
    return math.copysign(1, python_number(x)) < 0
  if not dtypes.is_float(x.dtype):
    return less(x, 0)
  return less(bitcast_convert_type(x.astype(dtypes.f32), dtypes.i32), 0)


def copysign(x: Any, y: Any) -> Any:
  """|x| with the sign of y.

  >>> tt.copysign(2., -0.)
  -2.0
  """
  if not isinstance(x, Tile) and not isinstance(y, Tile):
    return math.copysign(x, y)
  return _in_f32(lambda x, y: where(signbit(y), negative(abs_(x)), abs_(x)), "copysign", x, y)


# --- bits

def _integer(primitive: Primitive, what: str, x: Any) -> Any:
  x = operand(x, f"{what}: x")
  if not isinstance(x, Tile):
    raise TileTypeError(f"{what}: {x!r} has no width", loc=user_loc(), hint="it takes a tile of integers")
  return bind_tile(primitive, [x])


def population_count(x: Any) -> Any:
  """How many bits of an integer are 1, in its dtype; jax.lax's name.

  >>> def kernel(x, y):
  ...   y[...] = tt.population_count(x[...])
  >>> x = jnp.array([1, 255, -1])
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([ 1,  8, 32], dtype=int32)
  """
  return _integer(population_count_p, "population_count", x)


def clz(x: Any) -> Any:
  """How many zeros lead the bits of an integer, in its dtype; jax.lax's name.

  >>> def kernel(x, y):
  ...   y[...] = tt.clz(x[...])
  >>> x = jnp.array([1, 255, -1])
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([31, 24,  0], dtype=int32)
  """
  return _integer(clz_p, "clz", x)


def mul_hi(x: Any, y: Any) -> Tile:
  """The upper 32 bits of the product of two 32-bit integers of one dtype (PTX ISA 9.7.1, mul.hi).

  >>> def kernel(x, y):
  ...   y[...] = tt.mul_hi(x[...], 3)
  >>> x = jnp.array([1, 2**30, -1])
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([ 0,  0, -1], dtype=int32)
  """
  values = [operand(v, f"mul_hi: {n}") for v, n in ((x, "x"), (y, "y"))]
  dtype = promoted("mul_hi", *values)
  if dtype not in (dtypes.i32, dtypes.u32) or all(map(is_static, values)):
    raise TileTypeError(f"mul_hi of {dtypes.short_name(dtype)}", loc=user_loc(), hint="it takes tiles of i32 or u32")
  shape = common_shape("mul_hi", [v.shape for v in values if isinstance(v, Tile)])
  tiles = [v.astype(dtype) if isinstance(v, Tile) else literal(v, dtype, "mul_hi") for v in values]
  return bind_tile(mul_hi_p, [spread(v, shape) if isinstance(v, Tile) and v.shape else v for v in tiles])


def bitcast_convert_type(x: Any, dtype: Any) -> Tile:
  """The value of `dtype` that has the bits of x; jax.lax's name.

  Args:
    x: a tile of numbers.
    dtype: of the same size, or smaller: then the parts of an element, the low bits first, are a new last dimension; or
      larger: then x's last dimension are the parts.

  Example:
    >>> def kernel(x, y):
    ...   y[...] = tt.bitcast_convert_type(x[...], jnp.int32) >> 23
    >>> x = jnp.array([1., 2., 4.])
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((3,), jnp.int32), grid=1)(x)
    Array([127, 128, 129], dtype=int32)
  """
  to = dtypes.canonical(dtype)
  value = operand(x, "bitcast_convert_type: x")
  if not isinstance(value, Tile):
    raise TileTypeError(f"bitcast_convert_type: {x!r} has no width", loc=user_loc(), hint="it takes a tile")
  return value if to == value.dtype else bind_tile(bitcast_p, [value], dtype=to)
