"""f32 functions that PTX has no instruction for, within a few ulp, from its approximate ones."""
from __future__ import annotations

import math

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.module import Builder
from tiletrace.lowering.ptx.registers import Reg

_LOG2E = math.log2(math.e)


def _fma(b: Builder, x: Reg, y: Reg | float, z: Reg | float) -> Reg:
  return b.new(isa.FMA, x, y, z, rnd="rn", type="f32")


def _horner(b: Builder, x: Reg, coefficients: tuple[float, ...]) -> Reg:
  """Highest power first."""
  acc = _fma(b, x, coefficients[0], coefficients[1])
  for c in coefficients[2:]:
    acc = _fma(b, acc, x, c)
  return acc


def exp(b: Builder, x: Reg) -> Reg:
  """2**(x log2 e), with the rounding error of the product put back: ex2.approx alone loses |x| * 2**-24."""
  high = b.new(isa.MUL, x, _LOG2E, type="f32")
  low = _fma(b, x, _LOG2E, b.new(isa.NEG, high, type="f32"))
  e = b.new(isa.EX2, high)
  corrected = _fma(b, e, b.new(isa.MUL, low, math.log(2), type="f32"), e)
  finite = b.new(isa.SETP, b.new(isa.ABS, high, type="f32"), 128.0, cmp="lt", type="f32")
  return b.new(isa.SELP, corrected, e, finite, type="f32")  # beyond, e is subnormal, 0, inf or nan already


def log2(b: Builder, x: Reg) -> Reg:
  """lg2.approx, but near 1, where its error of 2**-22 is large: 2 atanh(s) / ln 2 for s = (x - 1) / (x + 1)."""
  s = b.new(isa.DIV_RN, b.new(isa.SUB, x, 1.0, type="f32"), b.new(isa.ADD, x, 1.0, type="f32"), type="f32")
  series = _horner(b, b.new(isa.MUL, s, s, type="f32"), tuple(2 * _LOG2E / n for n in (9, 7, 5, 3, 1)))
  near = b.new(isa.SETP, b.new(isa.ABS, s, type="f32"), 0.2, cmp="lt", type="f32")
  return b.new(isa.SELP, b.new(isa.MUL, s, series, type="f32"), b.new(isa.LG2, x), near, type="f32")


def log(b: Builder, x: Reg) -> Reg:
  return b.new(isa.MUL, log2(b, x), math.log(2), type="f32")


def logistic(b: Builder, x: Reg) -> Reg:
  """1 / (1 + exp(-x)); rcp.approx is within one ulp."""
  e = exp(b, b.new(isa.NEG, x, type="f32"))
  return b.new(isa.RCP, b.new(isa.ADD, e, 1.0, type="f32"))


def tanh(b: Builder, x: Reg) -> Reg:
  """1 - 2 / (exp(2|x|) + 1) with x's sign; an odd Taylor polynomial where that cancels, |x| < 0.3."""
  size = b.new(isa.ABS, x, type="f32")
  e = exp(b, b.new(isa.ADD, size, size, type="f32"))
  large = _fma(b, b.new(isa.RCP_RN, b.new(isa.ADD, e, 1.0, type="f32"), type="f32"), -2.0, 1.0)
  square = b.new(isa.MUL, x, x, type="f32")
  # x - x^3/3 + 2x^5/15 - 17x^7/315 + 62x^9/2835 - 1382x^11/155925
  series = _horner(b, square, (-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3))
  small = _fma(b, b.new(isa.MUL, square, series, type="f32"), x, x)
  near = b.new(isa.SETP, size, 0.3, cmp="lt", type="f32")
  return b.new(isa.SELP, small, b.new(isa.COPYSIGN, x, large, type="f32"), near, type="f32")


def erf(b: Builder, x: Reg) -> Reg:
  """Abramowitz and Stegun 7.1.26 (error under 1.5e-7); the Maclaurin series 7.1.5 where |x| < 0.5."""
  size = b.new(isa.ABS, x, type="f32")
  t = b.new(isa.RCP_RN, _fma(b, size, 0.3275911, 1.0), type="f32")
  poly = b.new(isa.MUL, _horner(b, t, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)), t,
               type="f32")
  square = b.new(isa.MUL, x, x, type="f32")
  tail = b.new(isa.MUL, poly, exp(b, b.new(isa.NEG, square, type="f32")), type="f32")
  large = b.new(isa.SUB, 1.0, tail, type="f32")
  c = 2 / math.sqrt(math.pi)
  series = _horner(b, square, tuple(c * s for s in (-1 / 1320, 1 / 216, -1 / 42, 1 / 10, -1 / 3, 1.0)))
  small = b.new(isa.MUL, x, series, type="f32")
  near = b.new(isa.SETP, size, 0.5, cmp="lt", type="f32")
  return b.new(isa.SELP, small, b.new(isa.COPYSIGN, x, large, type="f32"), near, type="f32")
