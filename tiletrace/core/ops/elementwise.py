"""Elementwise operations with jnp's names and promotion; of Python numbers they are Python numbers."""
from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect
from tiletrace.core.errors import TileTypeError
from tiletrace.core.foreign import is_symbolic
from tiletrace.core.graph import Eqn, Literal, Primitive
from tiletrace.core.operands import (
  Operand,
  check,
  common_shape,
  is_static,
  literal,
  operand,
  promoted,
  python_number,
  tile_types,
)
from tiletrace.core.ops.shape import spread
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import METHODS, MeshIndex, Tile, bind_tile
from tiletrace.core.types import TileType

ARITHMETIC = (add_p, sub_p, mul_p, min_p, max_p) = tuple(map(Primitive, ("add", "sub", "mul", "min", "max")))
INTEGER = (floordiv_p, mod_p, shift_left_p, shift_right_p) = tuple(
  map(Primitive, ("floordiv", "mod", "shift_left", "shift_right")))
FLOAT = (
  div_p, pow_p, exp_p, exp2_p, log_p, log2_p, sqrt_p, rsqrt_p, tanh_p, logistic_p, erf_p, sin_p, cos_p, floor_p,
  ceil_p,
) = tuple(map(Primitive, (
  "div", "pow", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "logistic", "erf", "sin", "cos", "floor",
  "ceil")))
# The instruction of a GPU alone.
APPROXIMATE = (
  exp_approx_p, exp2_approx_p, log_approx_p, log2_approx_p, sqrt_approx_p, tanh_approx_p, logistic_approx_p,
  sin_approx_p, cos_approx_p,
) = tuple(map(Primitive, (
  "exp_approx", "exp2_approx", "log_approx", "log2_approx", "sqrt_approx", "tanh_approx", "logistic_approx",
  "sin_approx", "cos_approx")))
BITWISE = (and_p, or_p, xor_p, not_p) = tuple(map(Primitive, ("and", "or", "xor", "not")))
SIGNED = (neg_p, abs_p, sign_p) = tuple(map(Primitive, ("neg", "abs", "sign")))
COMPARISON = (eq_p, ne_p, lt_p, le_p, gt_p, ge_p) = tuple(map(Primitive, ("eq", "ne", "lt", "le", "gt", "ge")))
select_p = Primitive("select")
cast_p = Primitive("cast")
isnan_p = Primitive("isnan")
_ALL = (*ARITHMETIC, *INTEGER, *FLOAT, *APPROXIMATE, *BITWISE, *SIGNED, *COMPARISON, select_p, cast_p, isnan_p)


@effect_rules.register(*_ALL)
def _pure(eqn: Eqn) -> tuple[Effect, ...]:
  return ()


# --- type rules: operands have the result's shape or rank 0, and one dtype

def _same(eqn: Eqn, types: tuple[TileType, ...]) -> TileType:
  name = eqn.primitive.name
  shapes = {t.shape for t in types if t.shape}
  check(len(shapes) <= 1 and len({t.dtype for t in types}) == 1,
        f"{name}: operands {' and '.join(map(str, types))} differ")
  return TileType(shapes.pop() if shapes else (), types[0].dtype)


def _typed(allowed: Callable[[np.dtype], bool], kind: str) -> Callable[[Eqn], tuple[TileType, ...]]:
  def rule(eqn: Eqn) -> tuple[TileType, ...]:
    out = _same(eqn, tile_types(eqn.invars))
    check(allowed(out.dtype), f"{eqn.primitive.name} of {dtypes.short_name(out.dtype)}: it takes {kind}")
    return (out,)
  return rule


type_rules.register(*ARITHMETIC)(_typed(lambda d: d != dtypes.bool_, "numbers"))
type_rules.register(*SIGNED)(_typed(lambda d: d != dtypes.bool_, "numbers"))
type_rules.register(*INTEGER)(_typed(dtypes.is_integer, "integers"))
type_rules.register(*FLOAT, *APPROXIMATE)(_typed(dtypes.is_float, "floats"))
type_rules.register(*BITWISE)(_typed(lambda d: not dtypes.is_float(d), "integers and bools"))


@type_rules.register(*COMPARISON)
def _comparison_type(eqn: Eqn) -> tuple[TileType, ...]:
  out = _same(eqn, tile_types(eqn.invars))
  check(out.dtype != dtypes.bool_ or eqn.primitive in (eq_p, ne_p), f"{eqn.primitive.name} of bool: it takes numbers")
  return (TileType(out.shape, dtypes.bool_),)


@type_rules.register(select_p)
def _select_type(eqn: Eqn) -> tuple[TileType, ...]:
  pred, *cases = tile_types(eqn.invars)
  check(pred.dtype == dtypes.bool_, f"select: the condition is {pred}, not a bool")
  out = _same(eqn, tuple(cases))
  check(not pred.shape or pred.shape == out.shape or not out.shape, f"select: {pred} does not fit {out}")
  return (TileType(out.shape or pred.shape, out.dtype),)


@type_rules.register(cast_p)
def _cast_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,), dtype = tile_types(eqn.invars), eqn.params["dtype"]
  check(dtype != dtypes.bool_, "cast to bool is written as x != 0")
  return (TileType(x.shape, dtype),)


@type_rules.register(isnan_p)
def _isnan_type(eqn: Eqn) -> tuple[TileType, ...]:
  x, = tile_types(eqn.invars)
  check(dtypes.is_float(x.dtype), f"isnan of {x}: it takes floats")
  return (TileType(x.shape, dtypes.bool_),)


# --- wrappers

def _fit(x: Operand, dtype: np.dtype, shape: tuple[int, ...], what: str) -> Tile | Literal:
  """`x` as an operand of `dtype` that has `shape` or rank 0."""
  if not isinstance(x, Tile):
    return literal(x, dtype, what)
  x = astype(x, dtype)
  return x if not x.shape else spread(x, shape)


def _apply(primitive: Primitive, what: str, args: tuple[Operand, ...], dtype: np.dtype) -> Tile:
  shape = common_shape(what, [a.shape for a in args if isinstance(a, Tile)])
  return bind_tile(primitive, [_fit(a, dtype, shape, what) for a in args])


def operands(what: str, names: str, *args: Any) -> tuple[Operand, ...]:
  """Arguments, by their names, as operands."""
  return tuple(operand(a, f"{what}: {n}") for n, a in zip(names.split(), args))


def binary(primitive: Primitive, what: str, python: Callable[..., Any], x: Any, y: Any, *,
            bools: Primitive | None = None) -> Any:
  """A binary operation in the operands' common dtype; `bools` is its form for bools, else they become i32."""
  a, b = operands(what, "x y", x, y)
  if is_static(a) and is_static(b):
    return python(python_number(a), python_number(b))
  dtype = promoted(what, a, b)
  if dtype == dtypes.bool_:
    if bools is not None:
      primitive = bools
    elif primitive not in (eq_p, ne_p, *BITWISE):
      dtype = dtypes.i32
  return _apply(primitive, what, (a, b), dtype)


def of_floats(primitive: Primitive, what: str, python: Callable[..., Any], *args: Any) -> Any:
  """An operation on floats: integers become f32."""
  values = operands(what, "x" if len(args) == 1 else "x y", *args)
  if all(map(is_static, values)):
    return python(*map(python_number, values))
  dtype = promoted(what, *values)
  return _apply(primitive, what, values, dtype if dtypes.is_float(dtype) else dtypes.f32)


def _shifted(out: Any, x: Any, y: Any, sign: int = 1) -> Any:
  """An index of tt.parallel plus a scalar is still one: it remembers the sum of its offsets."""
  if isinstance(x, MeshIndex) and not isinstance(y, MeshIndex) and not (isinstance(y, Tile) and y.ndim):
    return MeshIndex(out, x.axis, x.mesh, x.offset + sign * y) if out.dtype == dtypes.i32 else out
  return out


def add(x: Any, y: Any) -> Any:
  """x + y. Bools: or.

  >>> tt.add(2, 3)
  5
  """
  out = binary(add_p, "add", operator.add, x, y, bools=or_p)
  return _shifted(_shifted(out, x, y), y, x) if isinstance(out, Tile) else out


def subtract(x: Any, y: Any) -> Any:
  """x - y.

  >>> tt.subtract(2, 3)
  -1
  """
  out = binary(sub_p, "subtract", operator.sub, x, y)
  return _shifted(out, x, y, -1) if isinstance(out, Tile) else out


def multiply(x: Any, y: Any) -> Any:
  """x * y. Bools: and.

  >>> tt.multiply(2, 3)
  6
  """
  return binary(mul_p, "multiply", operator.mul, x, y, bools=and_p)


def divide(x: Any, y: Any) -> Any:
  """x / y; integers become f32.

  >>> tt.divide(3, 2)
  1.5
  """
  return of_floats(div_p, "divide", operator.truediv, x, y)


def floor_divide(x: Any, y: Any) -> Any:
  """x // y, rounded down, also of floats, where |x / y| < 2**24.

  >>> tt.floor_divide(-7, 2)
  -4
  """
  a, b = operands("floor_divide", "x y", x, y)
  if not (is_static(a) and is_static(b)) and dtypes.is_float(promoted("floor_divide", a, b)):
    return _floor_division("floor_divide", a, b)[0]
  return binary(floordiv_p, "floor_divide", operator.floordiv, a, b)


def mod(x: Any, y: Any) -> Any:
  """x % y with the sign of y, also of floats, where |x / y| < 2**24.

  >>> tt.mod(-7, 3)
  2
  """
  a, b = operands("mod", "x y", x, y)
  if not (is_static(a) and is_static(b)) and dtypes.is_float(promoted("mod", a, b)):
    return _floor_division("mod", a, b)[1]
  return binary(mod_p, "mod", operator.mod, a, b)


def _floor_division(what: str, x: Operand, y: Operand) -> tuple[Tile, Tile]:
  """(quotient, remainder) of floats, computed in f32. A quotient that was rounded to the integer beside its floor (or
  made by a reciprocal, as XLA does for constants) shows in the remainder, and is set right."""
  dtype = promoted(what, x, y)
  wide = dtype if dtype == dtypes.f64 else dtypes.f32
  x, y = (v.astype(wide) if isinstance(v, Tile) else v for v in (x, y))
  quotient = floor(divide(x, y))
  product = multiply(quotient, y)
  if isinstance(y, Tile):
    product = where(equal(quotient, 0), 0, product)          # of an infinite y
  remainder = subtract(x, product)
  above = less(multiply(remainder, sign(y) if isinstance(y, Tile) else math.copysign(1, y)), 0)
  below = greater_equal(abs_(remainder), abs_(y))
  quotient = where(above, quotient - 1, where(below, quotient + 1, quotient))
  remainder = where(above, remainder + y, where(below, remainder - y, remainder))
  return quotient.astype(dtype), remainder.astype(dtype)


def power(x: Any, y: Any) -> Any:
  """x ** y. A Python int y is repeated multiplication; other exponents need a float.

  >>> tt.power(2., 10)
  1024.0
  """
  a, b = operands("power", "x y", x, y)
  if isinstance(a, Tile) and isinstance(b, int) and not isinstance(b, bool) and (b >= 0 or dtypes.is_float(a.dtype)):
    return _integer_power(a, b)
  if not (is_static(a) and is_static(b)) and not dtypes.is_float(promoted("power", a, b)):
    raise TileTypeError("power of integers with an exponent that is not a Python int >= 0", loc=user_loc(),
                        hint="cast to a float: x.astype(jnp.float32) ** y")
  return of_floats(pow_p, "power", operator.pow, a, b)


def _integer_power(x: Tile, n: int) -> Tile:
  if n < 0:
    return divide(1, _integer_power(x, -n))
  out, square_ = None, x
  while n:
    if n & 1:
      out = square_ if out is None else multiply(out, square_)
    n >>= 1
    square_ = multiply(square_, square_) if n else square_
  return add(multiply(x, 0), 1) if out is None else out


def minimum(x: Any, y: Any) -> Any:
  """The smaller of x and y; NaN if either is.

  >>> tt.minimum(2, 3)
  2
  """
  return binary(min_p, "minimum", _nan_aware(builtins.min), x, y, bools=and_p)


def maximum(x: Any, y: Any) -> Any:
  """The larger of x and y; NaN if either is.

  >>> tt.maximum(2, 3)
  3
  """
  return binary(max_p, "maximum", _nan_aware(builtins.max), x, y, bools=or_p)


def _nan_aware(choose: Callable[..., Any]) -> Callable[[Any, Any], Any]:
  return lambda x, y: x if x != x else y if y != y else choose(x, y)


def clip(x: Any, min: Any = None, max: Any = None) -> Any:
  """x limited to [min, max].

  >>> tt.clip(5, 0, 3)
  3
  """
  x = x if min is None else maximum(x, min)
  return x if max is None else minimum(x, max)


def equal(x: Any, y: Any) -> Any:
  """x == y, bool.

  >>> tt.equal(2, 3)
  False
  """
  return binary(eq_p, "equal", operator.eq, x, y)


def not_equal(x: Any, y: Any) -> Any:
  """x != y, bool.

  >>> tt.not_equal(2, 3)
  True
  """
  return binary(ne_p, "not_equal", operator.ne, x, y)


def less(x: Any, y: Any) -> Any:
  """x < y, bool.

  >>> tt.less(2, 3)
  True
  """
  return binary(lt_p, "less", operator.lt, x, y)


def less_equal(x: Any, y: Any) -> Any:
  """x <= y, bool.

  >>> tt.less_equal(2, 3)
  True
  """
  return binary(le_p, "less_equal", operator.le, x, y)


def greater(x: Any, y: Any) -> Any:
  """x > y, bool.

  >>> tt.greater(2, 3)
  False
  """
  return binary(gt_p, "greater", operator.gt, x, y)


def greater_equal(x: Any, y: Any) -> Any:
  """x >= y, bool.

  >>> tt.greater_equal(2, 3)
  False
  """
  return binary(ge_p, "greater_equal", operator.ge, x, y)


def _signed(primitive: Primitive, what: str, python: Callable[..., Any], x: Any) -> Any:
  x = operand(x, f"{what}: x")
  if not isinstance(x, Tile):
    return python(python_number(x))
  return bind_tile(primitive, [astype(x, dtypes.i32) if x.dtype == dtypes.bool_ else x])


def negative(x: Any) -> Any:
  """-x.

  >>> tt.negative(2)
  -2
  """
  return _signed(neg_p, "negative", operator.neg, x)


def abs_(x: Any) -> Any:
  """The absolute value of x.

  >>> tt.abs(-2)
  2
  """
  return _signed(abs_p, "abs", builtins.abs, x)


def sign(x: Any) -> Any:
  """-1, 0 or 1 in the dtype of x.

  >>> tt.sign(-2.5)
  -1.0
  """
  return _signed(sign_p, "sign", lambda v: type(v)((v > 0) - (v < 0)), x)


def square(x: Any) -> Any:
  """x * x.

  >>> tt.square(3)
  9
  """
  return multiply(x, x)


def invert(x: Any) -> Any:
  """~x of an integer, not x of a bool.

  >>> tt.invert(6)
  -7
  """
  x = operand(x, "invert: x")
  if not isinstance(x, Tile):
    x = python_number(x)
    return not x if isinstance(x, bool) else ~x  # type: ignore[operator]
  return bind_tile(not_p, [x])


def logical_not(x: Any) -> Any:
  """Whether x is 0.

  >>> tt.logical_not(2)
  False
  """
  x = operand(x, "logical_not: x")
  return invert(astype(x, dtypes.bool_)) if isinstance(x, Tile) else not x


def floor(x: Any) -> Any:
  """The largest integer <= x, as a float.

  >>> tt.floor(-1.5)
  -2.0
  """
  return of_floats(floor_p, "floor", lambda v: float(math.floor(v)), x)


def ceil(x: Any) -> Any:
  """The smallest integer >= x, as a float.

  >>> tt.ceil(-1.5)
  -1.0
  """
  return of_floats(ceil_p, "ceil", lambda v: float(math.ceil(v)), x)


def isnan(x: Any) -> Any:
  """Whether x is NaN.

  >>> tt.isnan(float("nan"))
  True
  """
  x = operand(x, "isnan: x")
  if not isinstance(x, Tile):
    return x != x
  return bind_tile(isnan_p, [x if dtypes.is_float(x.dtype) else astype(x, dtypes.f32)])


def where(condition: Any, x: Any, y: Any) -> Any:
  """x where the condition holds, else y.

  >>> def kernel(x, y):
  ...   y[...] = tt.where(x[...] > 2, x[...], 0)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([[0., 0., 0.],
         [3., 4., 5.]], dtype=float32)
  """
  p, a, b = operands("where", "condition x y", condition, x, y)
  if not any(isinstance(v, Tile) for v in (p, a, b)):
    return python_number(a if python_number(p) else b)
  dtype = promoted("where", a, b)
  shape = common_shape("where", [v.shape for v in (p, a, b) if isinstance(v, Tile)])
  return bind_tile(select_p, [_fit(p, dtypes.bool_, shape, "where"), _fit(a, dtype, shape, "where"),
                              _fit(b, dtype, shape, "where")])


def cdiv(x: Any, y: Any) -> Any:
  """ceil(x / y) of integers, Python's or tiles.

  >>> tt.cdiv(1000, 128)
  8
  """
  for v in () if is_symbolic(x) or is_symbolic(y) else operands("cdiv", "x y", x, y):
    if isinstance(v, float) or (isinstance(v, (Tile, np.generic)) and not dtypes.is_integer(v.dtype)):
      raise TileTypeError("cdiv takes integers", loc=user_loc(), hint="tt.ceil(x / y) for floats")
  if isinstance(y, int) and y > 0:
    return (x + (y - 1)) // y
  return -(-x // y)


def align_to(x: Any, multiple: Any) -> Any:
  """x rounded up to a multiple.

  >>> tt.align_to(1000, 128)
  1024
  """
  return cdiv(x, multiple) * multiple


def astype(x: Tile, dtype: Any) -> Tile:
  """`x.astype(dtype)`: float to integer truncates towards zero; to bool is x != 0."""
  to = dtypes.canonical(dtype)
  if to == x.dtype:
    return x
  if to == dtypes.bool_:
    return not_equal(x, 0)
  return bind_tile(cast_p, [x], dtype=to)


METHODS.update(
  add=add, subtract=subtract, multiply=multiply, divide=divide, floor_divide=floor_divide, mod=mod, power=power,
  less=less, less_equal=less_equal, greater=greater, greater_equal=greater_equal, equal=equal, not_equal=not_equal,
  negative=negative, abs=abs_, invert=invert, astype=astype)
