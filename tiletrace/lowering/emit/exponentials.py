"""Exponentials, logarithms, hyperbolic functions and powers in f32, within a few ulp.

ex2.approx is within two ulp, lg2.approx only far from 1 (PTX ISA 9.7.3): logarithms come from polynomials. Those are
minimax fits in relative error on the interval that stands beside each; their errors are below 2**-26.
"""
from __future__ import annotations

import math

from tiletrace.lowering.emit.floats import (
  Float,
  add,
  bits,
  compare,
  div,
  fma,
  from_bits,
  horner,
  magnitude,
  mul,
  neg,
  select,
  sub,
  with_sign,
)
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.module import Builder
from tiletrace.lowering.ptx.registers import Reg

_LOG2E, _LN2 = math.log2(math.e), math.log(2)
_LOG2E_REST = 1.9259629911266175e-08                                          # of log2 e in f32
_LN2_PARTS = (0.6931471824645996, -1.9046542121259336e-09)                    # ln 2 as two f32
_EXPM1 = (0.000198459573, 0.00139416529, 0.00833339164, 0.0416663487, 0.166666664, 0.5)    # (e^r - 1 - r) / r^2
_EXP2 = (0.0001535126, 0.00134014786, 0.00961846296, 0.0555032614, 0.240226476, 0.693147206, 1.0)    # 2^r, |r| <= 0.5
_LOG1P = (-0.0449090905, 0.104482777, -0.131622237, 0.144820678, -0.166477686, 0.199906065, -0.250000545, 0.333334544,
          -0.5)                                                               # (log(1+f) - f) / f^2, -1/4 ... 1/2
_SINH = (2.81695104e-06, 0.000198361598, 0.00833335006, 0.166666665)          # (sinh(x) / x - 1) / x^2, x <= 1
_LOG2_F64 = (   # log2(1 + f) / f in f64, sqrt(1/2) <= 1 + f <= sqrt(2)
  -0.06975422515318927, 0.1325400381081456, -0.13463976497050162, 0.13027120351756663, -0.14249586571584336,
  0.1602168105086254, -0.18043698576816877, 0.2061071298078933, -0.24044642503762448, 0.2885387953218029,
  -0.3606737932639246, 0.4808983488078113, -0.7213475203270209, 1.4426950408865664)


def exp(b: Builder, x: Reg, halvings: int = 0) -> Reg:
  """2**(x log2 e - halvings), with the rounding errors of the product and of log2 e put back: ex2.approx alone loses
  |x| * 2**-24."""
  high = mul(b, x, _LOG2E)
  low = fma(b, x, _LOG2E_REST, fma(b, x, _LOG2E, neg(b, high)))
  e = b.new(isa.EX2, sub(b, high, float(halvings)) if halvings else high)
  corrected = fma(b, e, mul(b, low, _LN2), e)
  finite = compare(b, "lt", magnitude(b, high), 128.0 + halvings)
  return select(b, finite, corrected, e)  # beyond, e is subnormal, 0, inf or nan already


def expm1(b: Builder, x: Reg) -> Reg:
  """2**n p + (2**n - 1) with p = e**r - 1 and r = x - n ln 2, all of it halved until the end: 2**128 is no f32."""
  y = b.new(isa.MIN, b.new(isa.MAX, x, -30.0, type="f32", nan="NaN"), 100.0, type="f32", nan="NaN")
  n = b.new(isa.CVT, mul(b, y, _LOG2E), rnd="rni", to="s32", source="f32")
  n = b.new(isa.MIN, n, 128, type="s32")
  count = b.new(isa.CVT, n, rnd="rn", to="f32", source="s32")
  r = fma(b, count, -_LN2_PARTS[1], fma(b, count, -_LN2_PARTS[0], y))
  p = fma(b, mul(b, r, r), horner(b, r, _EXPM1), r)
  half = from_bits(b, b.new(isa.SHL, b.new(isa.ADD, n, 126, type="s32"), 23, type="b32"))
  out = fma(b, p, half, sub(b, half, 0.5))
  out = add(b, out, out)
  near = b.new(isa.SETP, n, 0, cmp="eq", type="s32")
  out = select(b, near, p, out)
  return select(b, compare(b, "eq", x, 0.0), x, out)


def sinh(b: Builder, x: Reg) -> Reg:
  """(e**|x| - e**-|x|) / 2, by halves of e**|x|, which overflows first; a polynomial below 1."""
  size = magnitude(b, x)
  half = exp(b, size, halvings=1)
  large = fma(b, b.new(isa.RCP_RN, half, type="f32"), -0.25, half)
  square = mul(b, x, x)
  small = fma(b, mul(b, size, square), horner(b, square, _SINH), size)
  return with_sign(b, x, select(b, compare(b, "lt", size, 1.0), small, large))


def cosh(b: Builder, x: Reg) -> Reg:
  """(e**|x| + e**-|x|) / 2."""
  half = exp(b, magnitude(b, x), halvings=1)
  return fma(b, b.new(isa.RCP_RN, half, type="f32"), 0.25, half)


def tanh(b: Builder, x: Reg) -> Reg:
  """1 - 2 / (exp(2|x|) + 1) with x's sign; an odd Taylor polynomial where that cancels, |x| < 0.3."""
  size = magnitude(b, x)
  e = exp(b, add(b, size, size))
  large = fma(b, b.new(isa.RCP_RN, add(b, e, 1.0), type="f32"), -2.0, 1.0)
  square = mul(b, x, x)
  # x - x^3/3 + 2x^5/15 - 17x^7/315 + 62x^9/2835 - 1382x^11/155925
  series = horner(b, square, (-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3))
  small = fma(b, mul(b, square, series), x, x)
  return with_sign(b, x, select(b, compare(b, "lt", size, 0.3), small, large))


def logistic(b: Builder, x: Reg) -> Reg:
  """1 / (1 + exp(-x)); rcp.approx is within one ulp."""
  e = exp(b, neg(b, x))
  return b.new(isa.RCP, add(b, e, 1.0))


def logistic_approx(b: Builder, x: Reg) -> Reg:
  """The same of ex2.approx and rcp.approx without subnormal numbers: five instructions."""
  e = b.new(isa.EX2, mul(b, x, -_LOG2E), ftz="ftz")
  return b.new(isa.RCP, add(b, e, 1.0), ftz="ftz")


# --- logarithms

def _exponent(b: Builder, x: Reg) -> tuple[Reg, Reg]:
  """(e << 23, e as f32) with x / 2**e in 3/4 ... 3/2, of a normal positive x."""
  field = b.new(isa.AND, b.new(isa.SUB, bits(b, x), 0x3F400000, type="s32"), -(1 << 23), type="b32")
  e = b.new(isa.CVT, b.new(isa.SHR, field, 23, type="s32"), rnd="rn", to="f32", source="s32")
  return field, e


def _log1p_near(b: Builder, f: Reg) -> Reg:
  """log(1 + f) for f of -1/4 ... 1/2."""
  return fma(b, mul(b, f, f), horner(b, f, _LOG1P), f)


def _parts(b: Builder, x: Reg) -> tuple[Reg, Reg, Reg]:
  """(e, log(m), x or 0 scaled) with x = 2**e m and m in 3/4 ... 3/2; subnormal x are scaled first."""
  tiny = compare(b, "lt", x, 2.0**-126)
  scaled = select(b, tiny, mul(b, x, 2.0**23), x)
  field, e = _exponent(b, scaled)
  e = select(b, tiny, add(b, e, -23.0), e)
  m = from_bits(b, b.new(isa.SUB, bits(b, scaled), field, type="s32"))
  return e, _log1p_near(b, sub(b, m, 1.0)), scaled


def _beyond(b: Builder, x: Reg, value: Reg, zero: Float = 0.0) -> Reg:
  """`value`, but the logarithm's limits where `x` is `zero`, less than that, infinite or NaN."""
  value = select(b, compare(b, "lt", magnitude(b, x), math.inf), value, add(b, x, x))
  value = select(b, compare(b, "lt", x, zero), math.nan, value)
  return select(b, compare(b, "eq", x, zero), -math.inf, value)


def log(b: Builder, x: Reg) -> Reg:
  e, near, _ = _parts(b, x)
  return _beyond(b, x, fma(b, e, _LN2_PARTS[0], fma(b, e, _LN2_PARTS[1], near)))


def _scaled_log(b: Builder, x: Reg, unit: float) -> Reg:
  """log(x) * unit, the product by two parts of `unit`; the exponent's share is rounded once, with the sum."""
  e, near, _ = _parts(b, x)
  part = fma(b, near, unit, mul(b, e, _LN2 * unit - _round(_LN2 * unit)))
  return _beyond(b, x, fma(b, e, _round(_LN2 * unit), part))


def _round(x: float) -> float:
  """x with 16 bits: times an exponent of 8 bits it is exact in f32."""
  mantissa, exponent = math.frexp(x)
  return math.ldexp(round(mantissa * 2**16), exponent - 16)


def log2(b: Builder, x: Reg) -> Reg:
  return _scaled_log(b, x, _LOG2E)


def log10(b: Builder, x: Reg) -> Reg:
  return _scaled_log(b, x, math.log10(math.e))


def log1p(b: Builder, x: Reg) -> Reg:
  """With 1 + x = 2**e (1 + f), f is x 2**-e + (2**-e - 1): x keeps its bits where it is small. Of a huge x a quarter,
  for which 2**-e is normal."""
  huge = compare(b, "gt", x, 2.0**60)
  part = select(b, huge, mul(b, x, 0.25), x)
  field, e = _exponent(b, add(b, part, 1.0))
  e = select(b, huge, add(b, e, 2.0), e)
  scale = from_bits(b, b.new(isa.SUB, 0x3F800000, field, type="s32"))
  f = fma(b, part, scale, sub(b, scale, 1.0))
  out = fma(b, e, _LN2_PARTS[0], fma(b, e, _LN2_PARTS[1], _log1p_near(b, f)))
  return _beyond(b, x, select(b, compare(b, "eq", x, 0.0), x, out), zero=-1.0)


def asinh(b: Builder, x: Reg) -> Reg:
  """log1p(a + a^2 / (1 + sqrt(a^2 + 1))) with a = |x|; log(a) + ln 2 where a^2 is no f32."""
  size = magnitude(b, x)
  far = compare(b, "gt", size, 2.0**60)
  square = mul(b, size, size)
  root = b.new(isa.SQRT_RN, add(b, square, 1.0), type="f32")
  near = add(b, size, div(b, square, add(b, root, 1.0)))
  out = log1p(b, select(b, far, size, near))
  return with_sign(b, x, select(b, far, add(b, out, _LN2), out))


def acosh(b: Builder, x: Reg) -> Reg:
  """log1p(t + sqrt(2 t + t^2)) with t = x - 1; log(x) + ln 2 where t^2 is no f32."""
  far = compare(b, "gt", x, 2.0**60)
  t = sub(b, x, 1.0)
  near = add(b, t, b.new(isa.SQRT_RN, fma(b, t, t, add(b, t, t)), type="f32"))
  out = log1p(b, select(b, far, x, near))
  return select(b, compare(b, "lt", x, 1.0), math.nan, select(b, far, add(b, out, _LN2), out))


def atanh(b: Builder, x: Reg) -> Reg:
  """log1p(2 |x| / (1 - |x|)) / 2."""
  size = magnitude(b, x)
  return with_sign(b, x, mul(b, log1p(b, div(b, add(b, size, size), sub(b, 1.0, size))), 0.5))


# --- powers

def _log2_f64(b: Builder, x: Reg) -> Reg:
  """log2 of |x| in f64; of 0 and of infinity what it is."""
  size = magnitude(b, x)
  low, high = b.new(isa.UNPACK, b.new(isa.CVT, size, to="f64", source="f32"), type="b64")
  e = b.new(isa.SHR, b.new(isa.SUB, high, 0x3FE6A09E, type="s32"), 20, type="s32")         # of x / sqrt(1/2)
  high = b.new(isa.SUB, high, b.new(isa.SHL, e, 20, type="b32"), type="s32")
  m = b.reg("f64")
  b(isa.PACK, m, (low, high), type="b64")
  f = b.new(isa.ADD, m, -1.0, type="f64")
  acc: Reg | float = _LOG2_F64[0]
  for c in _LOG2_F64[1:]:
    acc = b.new(isa.ADD, b.new(isa.MUL, f, acc, type="f64"), c, type="f64")
  out = b.new(isa.ADD, b.new(isa.MUL, f, acc, type="f64"), b.new(isa.CVT, e, rnd="rn", to="f64", source="s32"),
              type="f64")
  for value, limit in ((0.0, -math.inf), (math.inf, math.inf)):
    out = b.new(isa.SELP, limit, out, compare(b, "eq", size, value), type="f64")
  return out


def _exp2_f64(b: Builder, t: Reg) -> Reg:
  """2**t of f64 as f32, by two steps of scaling: the first is exact."""
  t = b.new(isa.MIN, b.new(isa.MAX, t, -200.0, type="f64"), 200.0, type="f64")
  n = b.new(isa.CVT, t, rnd="rni", to="s32", source="f64")
  rest = b.new(isa.SUB, t, b.new(isa.CVT, n, rnd="rn", to="f64", source="s32"), type="f64")
  out = horner(b, b.new(isa.CVT, rest, rnd="rn", to="f32", source="f64"), _EXP2)
  first = b.new(isa.SHR, n, 1, type="s32")
  for step in (first, b.new(isa.SUB, n, first, type="s32")):
    out = mul(b, out, from_bits(b, b.new(isa.SHL, b.new(isa.ADD, step, 127, type="s32"), 23, type="b32")))
  return out


def power(b: Builder, x: Reg, y: Reg) -> Reg:
  """2**(y log2 |x|), the exponent in f64, with the sign and the special values of IEEE 754's pow."""
  log = _log2_f64(b, x)
  t = b.new(isa.MUL, b.new(isa.CVT, y, to="f64", source="f32"), log, type="f64")
  one = compare(b, "eq", magnitude(b, x), 1.0)
  out = _exp2_f64(b, b.new(isa.SELP, 0.0, t, one, type="f64"))       # infinity times log2(1)
  whole = compare(b, "eq", b.new(isa.CVT, y, rnd="rzi", to="f32", source="f32"), y)
  half = mul(b, y, 0.5)
  odd = b.new(isa.AND, whole, compare(b, "ne", b.new(isa.CVT, half, rnd="rzi", to="f32", source="f32"), half),
              type="pred")
  negative = b.new(isa.SETP, bits(b, x), 0, cmp="lt", type="s32")
  out = select(b, b.new(isa.AND, negative, odd, type="pred"), neg(b, out), out)
  below = b.new(isa.AND, compare(b, "lt", x, 0.0), compare(b, "gt", x, -math.inf), type="pred")
  out = select(b, b.new(isa.AND, below, b.new(isa.NOT, whole, type="pred"), type="pred"), math.nan, out)
  number = b.new(isa.SETP, x, y, cmp="num", type="f32")
  out = select(b, number, out, math.nan)
  certain = b.new(isa.OR, compare(b, "eq", x, 1.0), compare(b, "eq", y, 0.0), type="pred")
  return select(b, certain, 1.0, out)
