"""Elementwise jax primitives."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.graph import Primitive
from tiletrace.core.ops import elementwise as ops, transcendental as more
from tiletrace.core.tile import Tile
from tiletrace.jaxpr.rules import Refused, as_tile, cast, elementwise, formula, jax_rules, rule


def _direct(name: str, primitive: Primitive) -> None:
  jax_rules[name] = lambda operands, eqn: [elementwise(primitive, *operands)]


for _name, _primitive in {
    "add": ops.add_p, "add_any": ops.add_p, "sub": ops.sub_p, "mul": ops.mul_p,
    "and": ops.and_p, "or": ops.or_p, "xor": ops.xor_p, "not": ops.not_p, "neg": ops.neg_p, "abs": ops.abs_p,
    "sign": ops.sign_p, "floor": ops.floor_p, "ceil": ops.ceil_p, "exp": ops.exp_p, "exp2": ops.exp2_p,
    "log": ops.log_p, "log2": ops.log2_p, "tanh": ops.tanh_p, "logistic": ops.logistic_p, "sqrt": ops.sqrt_p,
    "rsqrt": ops.rsqrt_p, "erf": ops.erf_p, "sin": ops.sin_p, "cos": ops.cos_p, "eq": ops.eq_p, "ne": ops.ne_p,
    "shift_left": ops.shift_left_p, "tan": more.tan_p, "asin": more.asin_p, "acos": more.acos_p,
    "atan": more.atan_p, "atan2": more.atan2_p, "sinh": more.sinh_p, "cosh": more.cosh_p, "asinh": more.asinh_p,
    "acosh": more.acosh_p, "atanh": more.atanh_p, "expm1": more.expm1_p, "log1p": more.log1p_p, "cbrt": more.cbrt_p,
    "erfc": more.erfc_p, "population_count": more.population_count_p, "clz": more.clz_p}.items():
  _direct(_name, _primitive)


def _ordering(name: str, primitive: Primitive, bools: Callable[[Tile, Tile], Tile]) -> None:
  """Bools are ordered too: False below True."""
  @rule(name)
  def ordered(x: Any, y: Any) -> Any:
    return bools(as_tile(x), as_tile(y)) if x.type.dtype == dtypes.bool_ else elementwise(primitive, x, y)


for _name, _primitive, _bools in (
    ("max", ops.max_p, lambda x, y: x | y), ("min", ops.min_p, lambda x, y: x & y),
    ("lt", ops.lt_p, lambda x, y: ~x & y), ("le", ops.le_p, lambda x, y: ~x | y),
    ("gt", ops.gt_p, lambda x, y: x & ~y), ("ge", ops.ge_p, lambda x, y: x | ~y)):
  _ordering(_name, _primitive, _bools)


@rule("stop_gradient", "copy", "copy_p")
def _identity(x: Any, **_: Any) -> Any:
  return x


@rule("optimization_barrier", arrays=True)
def _barrier(*xs: Any) -> list[Any]:
  return list(xs)


@rule("reduce_precision")
def _reduce_precision(x: Any, *, exponent_bits: int, mantissa_bits: int) -> Any:
  """Rounded to bf16's precision, or left alone where the dtype has no more."""
  dtype = x.type.dtype
  if dtypes.is_float(dtype) and dtype != dtypes.f64:
    own = ml_dtypes.finfo(dtype)
    if exponent_bits >= own.nexp and mantissa_bits >= own.nmant:
      return x
    if dtype == dtypes.f32 and (exponent_bits, mantissa_bits) == (8, 7):
      return as_tile(x).astype(dtypes.bf16).astype(dtypes.f32)
  raise Refused(f"to {exponent_bits} bits of exponent and {mantissa_bits} of mantissa has no tile operation",
                "x.astype(jnp.bfloat16) rounds to a dtype")


@rule("convert_element_type")
def _convert(x: Any, *, new_dtype: Any, **_: Any) -> Any:
  dtype = dtypes.canonical(new_dtype)
  return x.astype(dtype) if isinstance(x, Tile) else cast(x, dtype)


@rule("pow")
def _pow(x: Any, y: Any) -> Any:
  return elementwise(ops.pow_p, x, cast(y, x.type.dtype))


@formula("square")
def _square(x: Tile) -> Tile:
  return x * x


@formula("integer_pow")
def _integer_pow(x: Tile, *, y: int) -> Tile:
  return x ** y


@formula("div")
def _div(x: Tile, y: Tile) -> Tile:
  """Of integers towards zero."""
  if dtypes.is_float(x.dtype):
    return x / y
  return x // y if x.dtype.kind == "u" else ops.sign(x) * ops.sign(y) * (abs(x) // abs(y))


@formula("rem")
def _rem(x: Tile, y: Tile) -> Tile:
  """x - trunc(x / y) y: it has x's sign."""
  if not dtypes.is_float(x.dtype):
    return x - _div(x, y) * y
  return ops.where(x < 0, -1.0, 1.0) * ops.mod(abs(x), abs(y))


@formula("is_finite")
def _is_finite(x: Tile) -> Tile:
  return more.isfinite(x)


@rule("bitcast_convert_type")
def _bitcast(x: Any, *, new_dtype: Any) -> Any:
  return more.bitcast_convert_type(as_tile(x), new_dtype)


@formula("round")
def _round(x: Tile, *, rounding_method: Any) -> Tile:
  """0: halves away from zero; 1: halves to even."""
  if int(rounding_method) == 1:
    return more.round_(x)
  size = abs(x)
  below = ops.floor(size)
  whole = ops.where(size - below >= 0.5, below + 1.0, below)
  return ops.where(x < 0, -whole, whole)


@rule("clamp")
def _clamp(low: Any, x: Any, high: Any) -> Any:
  return elementwise(ops.min_p, elementwise(ops.max_p, x, low), high)


@rule("select_n")
def _select_n(which: Any, *cases: Any) -> Any:
  """cases[which]; a bool picks the second case when it is true."""
  if which.type.dtype == dtypes.bool_ and len(cases) == 2:
    return elementwise(ops.select_p, which, *reversed(cases))
  index, out = as_tile(cast(which, dtypes.i32)), cases[0]
  for k, case in enumerate(cases[1:], 1):
    out = elementwise(ops.select_p, ops.equal(index, k), case, out)
  return out


# --- bits

def _reinterpreted(x: Any, kind: str) -> tuple[Tile, np.dtype]:
  tile = as_tile(x)
  return tile, np.dtype(f"{kind}{tile.dtype.itemsize}")


def _as(x: Tile, dtype: np.dtype) -> Tile:
  return x if x.dtype == dtype else more.bitcast_convert_type(x, dtype)


@rule("shift_right_logical")
def _shift_right_logical(x: Any, y: Any) -> Any:
  tile, unsigned = _reinterpreted(x, "u")
  return _as(elementwise(ops.shift_right_p, _as(tile, unsigned), _as(as_tile(y), unsigned)), tile.dtype)


@rule("shift_right_arithmetic")
def _shift_right_arithmetic(x: Any, y: Any) -> Any:
  tile, signed = _reinterpreted(x, "i")
  if tile.dtype == signed:
    return elementwise(ops.shift_right_p, x, y)
  return _as(elementwise(ops.shift_right_p, _as(tile, signed), _as(as_tile(y), signed)), tile.dtype)


@rule("mulhi")
def _mulhi(x: Any, y: Any) -> Any:
  """The upper half of the product."""
  a, b = as_tile(x), as_tile(y)
  if a.dtype.itemsize == 4:
    return elementwise(more.mul_hi_p, a, b)
  if a.dtype.itemsize > 4:
    raise Refused(f"of {a.type} has no tile operation", "tt.mul_hi multiplies 32-bit integers")
  wide = dtypes.u32 if a.dtype.kind == "u" else dtypes.i32
  return ((a.astype(wide) * b.astype(wide)) >> a.dtype.itemsize * 8).astype(a.dtype)


@rule("nextafter")
def _nextafter(x: Any, y: Any) -> Any:
  """The bits of the magnitude, one more or less; from zero to the least number with y's sign."""
  a, b = as_tile(x), as_tile(y)
  integer = np.dtype(f"i{a.dtype.itemsize}")
  if a.dtype.itemsize not in (2, 4):
    raise Refused(f"of {a.type} has no tile operation", "cast to f32")
  bits, least = more.bitcast_convert_type(a, integer), np.iinfo(integer).min
  outwards = (b > a) == (a > 0)
  moved = more.bitcast_convert_type(ops.where(outwards, bits + 1, bits - 1), a.dtype)
  tiny = more.bitcast_convert_type((more.bitcast_convert_type(b, integer) & least) | 1, a.dtype)
  moved = ops.where(a == 0, tiny, moved)
  return ops.where(ops.isnan(a) | ops.isnan(b), a + b, ops.where(a == b, b, moved))
