"""sin, cos, tan and their inverses in f32, right for every finite argument.

Polynomials are minimax fits in relative error on the interval that stands beside each; their errors are below 2**-26.
"""
from __future__ import annotations

import math

from tiletrace.lowering.emit.floats import (
  add,
  bits,
  compare,
  div,
  fma,
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

# pi / 2 as three f32, each the rest of those before it, rounded
_HALF_PI = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15)
_CODY_WAITE_LIMIT = 105615.0        # n stays below 2**17: n times the first part is exact beside x
# 2 / pi in words of 32 bits, a zero before them
_TWO_OVER_PI = (0, 0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041)
# (sin(r) / r - 1) / r^2 and (cos(r) - 1 + r^2 / 2) / r^4 for |r| <= 0.8
_SIN = (2.71660442e-06, -0.000198391507, 0.00833332879, -0.166666666)
_COS = (2.44181275e-05, -0.00138871847, 0.041666643)
# (asin(x) / x - 1) / x^2 for |x| <= 0.5, (atan(x) / x - 1) / x^2 for |x| <= 1
_ASIN = (0.0421661605, 0.0241796069, 0.045470356, 0.0749529782, 0.166667525)
_ATAN = (-0.00179361657, 0.0109145842, -0.0311778088, 0.0579575603, -0.0840344867, 0.109521853, -0.142642416,
         0.199985483, -0.333332991)


def _quadrant(b: Builder, x: Reg) -> tuple[Reg, Reg]:
  """(r, n): x - n pi / 2, at most pi / 4 and a little, and n, of which the two lowest bits count."""
  n = b.new(isa.CVT, mul(b, x, 2 / math.pi), rnd="rni", to="s32", source="f32")
  count, r = b.new(isa.CVT, n, rnd="rn", to="f32", source="s32"), x
  for part in _HALF_PI:
    r = fma(b, count, -part, r)
  far = b.label("reduced")
  b(isa.BRA, far, pred=compare(b, "gt", magnitude(b, x), _CODY_WAITE_LIMIT), negate=True)
  exact, quadrant = _payne_hanek(b, x)
  b(isa.MOV, r, exact, type="f32")
  b(isa.MOV, n, quadrant, type="b32")
  b.place(far)
  return r, n


def _payne_hanek(b: Builder, x: Reg) -> tuple[Reg, Reg]:
  """The same for |x| of at least 2**16, infinite or NaN, by the bits of 2 / pi that count beside its exponent.

  With |x| = m 2**(e - 31), m of 32 bits, those above weight 2**(33 - e) only add multiples of four. Of the product of
  m with the 96 bits from there on, 64 bits from weight two downwards are kept; no f32 is so close to a multiple
  of pi / 2 that fewer than 24 of them are left (Payne and Hanek, 1983).
  """
  word = bits(b, x)
  exponent = b.new(isa.BFE, word, 23, 8, type="u32")
  first = b.new(isa.SUB, exponent, 128, type="s32")                  # e - 1: where the 96 bits begin
  skipped = b.new(isa.SHR, first, 5, type="u32")
  m = b.new(isa.OR, b.new(isa.SHL, word, 8, type="b32"), -(1 << 31), type="b32")
  at = [b.new(isa.SETP, skipped, k, cmp="eq", type="u32") for k in range(3)]
  words = [_chosen(b, at, _TWO_OVER_PI[k:k + 4]) for k in range(4)]
  high, middle, low = (b.new(isa.SHF, words[k + 1], words[k], first, dir="l", mode="wrap") for k in range(3))
  carry = b.new(isa.PACK, (b.new(isa.MUL_HI, m, low, type="u32"), b.new(isa.MOV, 0, type="b32")), type="b64")
  below, above = b.new(isa.UNPACK, b.new(isa.MAD_WIDE, m, middle, carry, type="u32"), type="b64")
  top = b.new(isa.MAD_LO, m, high, above, type="u32")                # two bits of the quadrant, then the fraction
  n = b.new(isa.SHR, b.new(isa.ADD, top, 1 << 29, type="u32"), 30, type="u32")
  fraction = b.new(isa.SHL, b.new(isa.PACK, (below, top), type="b64"), 2, type="b64")
  r = b.new(isa.CVT, fraction, rnd="rn", to="f64", source="s64")     # of 2**64 to a quadrant, to the nearest one
  r = b.new(isa.CVT, b.new(isa.MUL, r, math.pi / 2 * 2.0**-64, type="f64"), rnd="rn", to="f32", source="f64")
  negative = compare(b, "lt", x, 0.0)
  n = b.new(isa.SELP, b.new(isa.NEG, n, type="s32"), n, negative, type="b32")
  return fma(b, x, 0.0, select(b, negative, neg(b, r), r)), n        # NaN of an infinite x


def _chosen(b: Builder, at: list[Reg], words: tuple[int, ...]) -> Reg:
  """words[k] where at[k], the last where none is."""
  *first, last = words
  out = b.new(isa.MOV, last, type="u32")
  for k, word in enumerate(first):
    out = b.new(isa.SELP, word, out, at[k], type="u32")
  return out


def _both(b: Builder, r: Reg) -> tuple[Reg, Reg]:
  """(sin, cos) of a reduced argument."""
  square = mul(b, r, r)
  s = fma(b, mul(b, square, r), horner(b, square, _SIN), r)
  c = fma(b, mul(b, square, square), horner(b, square, _COS), fma(b, square, -0.5, 1.0))
  return s, c


def _bit(b: Builder, n: Reg, bit: int) -> Reg:
  return b.new(isa.SETP, b.new(isa.AND, n, bit, type="b32"), 0, cmp="ne", type="s32")


def _turned(b: Builder, r: Reg, n: Reg) -> Reg:
  """sin(r + n pi / 2)."""
  s, c = _both(b, r)
  out = select(b, _bit(b, n, 1), c, s)
  return select(b, _bit(b, n, 2), neg(b, out), out)


def sin(b: Builder, x: Reg) -> Reg:
  return _turned(b, *_quadrant(b, x))


def cos(b: Builder, x: Reg) -> Reg:
  r, n = _quadrant(b, x)
  return _turned(b, r, b.new(isa.ADD, n, 1, type="s32"))


def tan(b: Builder, x: Reg) -> Reg:
  """sin / cos, or -cos / sin after an odd number of quadrants."""
  r, n = _quadrant(b, x)
  s, c = _both(b, r)
  odd = _bit(b, n, 1)
  return div(b, select(b, odd, neg(b, c), s), select(b, odd, s, c))


def _asin_parts(b: Builder, x: Reg) -> tuple[Reg, Reg, Reg]:
  """(|x| > 0.5, |x|, asin of |x| or, where it is above 0.5, of sqrt((1 - |x|) / 2))."""
  size = magnitude(b, x)
  far = compare(b, "gt", size, 0.5)
  half = fma(b, size, -0.5, 0.5)
  z = select(b, far, b.new(isa.SQRT_RN, half, type="f32"), size)
  square = select(b, far, half, mul(b, size, size))
  return far, size, fma(b, mul(b, z, square), horner(b, square, _ASIN), z)


def asin(b: Builder, x: Reg) -> Reg:
  """Above 0.5, pi / 2 - 2 asin(sqrt((1 - |x|) / 2))."""
  far, _, part = _asin_parts(b, x)
  return with_sign(b, x, select(b, far, fma(b, part, -2.0, math.pi / 2), part))


def acos(b: Builder, x: Reg) -> Reg:
  """pi / 2 - asin(x); 2 asin(sqrt((1 - x) / 2)) above 0.5, and pi less that of -x below -0.5."""
  far, _, part = _asin_parts(b, x)
  double = add(b, part, part)
  below = compare(b, "lt", x, 0.0)
  outer = select(b, below, sub(b, math.pi, double), double)
  # pi / 2 in two parts: its rounding error would show where asin is small
  inner = sub(b, _HALF_PI[0], sub(b, with_sign(b, x, part), _HALF_PI[1]))
  return select(b, far, outer, inner)


def atan(b: Builder, x: Reg) -> Reg:
  """Above 1, pi / 2 - atan(1 / |x|)."""
  size = magnitude(b, x)
  far = compare(b, "gt", size, 1.0)
  part = _atan_small(b, select(b, far, b.new(isa.RCP_RN, size, type="f32"), size))
  return with_sign(b, x, select(b, far, sub(b, math.pi / 2, part), part))


def _atan_small(b: Builder, x: Reg) -> Reg:
  """atan of 0 ... 1."""
  square = mul(b, x, x)
  return fma(b, mul(b, x, square), horner(b, square, _ATAN), x)


def atan2(b: Builder, y: Reg, x: Reg) -> Reg:
  """The angle of (x, y), with IEEE 754's values for zeros and infinities."""
  across, up = magnitude(b, x), magnitude(b, y)
  large = b.new(isa.MAX, across, up, type="f32", nan="NaN")
  ratio = div(b, b.new(isa.MIN, across, up, type="f32", nan="NaN"), large)
  ratio = select(b, compare(b, "eq", across, up), 1.0, ratio)        # inf / inf
  ratio = select(b, compare(b, "eq", large, 0.0), 0.0, ratio)
  angle = _atan_small(b, ratio)
  angle = select(b, compare(b, "gt", up, across), sub(b, math.pi / 2, angle), angle)
  left = b.new(isa.SETP, bits(b, x), 0, cmp="lt", type="s32")        # -0, too
  return with_sign(b, y, select(b, left, sub(b, math.pi, angle), angle))
