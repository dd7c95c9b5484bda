"""The error functions and the cube root in f32, within a few ulp. Polynomials are minimax fits, errors below 2**-26."""
from __future__ import annotations

from tiletrace.lowering.emit.exponentials import exp
from tiletrace.lowering.emit.floats import (
  add,
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

_ERF_NEAR = (7.85359641e-05, -0.000801010664, 0.00518831668, -0.0268538052, 0.112835849, -0.376126258, 1.12837917)
#                                                                               erf(x) / x in powers of x^2, x <= 1
_ERF_FAR = (3.00493435e-05, -0.000622369346, 0.0059962083, -0.0361836809, 0.156129011, 0.913804267, 1.62950732,
            -0.000244111383)                                                  # -log2(erfc(x)), 0.9 <= x <= 4
_ERFC = (-0.000267177978, -0.000775114321, 0.00200335394, 0.00256655889, -0.0237985399, 0.0682957505, -0.119270795,
         0.129646434, -0.0475624097, -0.13562114, 1.25300806)   # (1 + 2x) exp(x^2) erfc(x) in (x - 3) / (x + 3)


def erf(b: Builder, x: Reg) -> Reg:
  """1 - 2**-p(|x|) with x's sign, or x p(x^2) where that cancels, |x| < 1."""
  size = magnitude(b, x)
  far = b.new(isa.MIN, size, 4.0, type="f32", nan="NaN")        # erf(4) is 1
  large = sub(b, 1.0, b.new(isa.EX2, neg(b, horner(b, far, _ERF_FAR))))
  small = mul(b, x, horner(b, mul(b, x, x), _ERF_NEAR))
  return select(b, compare(b, "lt", size, 1.0), small, with_sign(b, x, large))


def erfc(b: Builder, x: Reg) -> Reg:
  """exp(-x^2) p((|x| - 3) / (|x| + 3)) / (1 + 2 |x|), the rounding error of x^2 put back; 2 less that where x < 0."""
  size = b.new(isa.MIN, magnitude(b, x), 12.0, type="f32", nan="NaN")         # erfc(10.1) is 0
  u = div(b, add(b, size, -3.0), add(b, size, 3.0))
  square = mul(b, size, size)
  rest = fma(b, size, size, neg(b, square))
  tail = exp(b, neg(b, square))
  scale = div(b, horner(b, u, _ERFC), fma(b, size, 2.0, 1.0))
  scale = fma(b, scale, neg(b, rest), scale)
  tail = mul(b, tail, scale)
  return select(b, compare(b, "lt", x, 0.0), sub(b, 2.0, tail), tail)


def cbrt(b: Builder, x: Reg) -> Reg:
  """One step of Newton's from 2**(log2(|x|) / 3)."""
  size = magnitude(b, x)
  root = b.new(isa.EX2, mul(b, b.new(isa.LG2, size), 1 / 3))
  other = div(b, size, mul(b, root, root))
  root = fma(b, sub(b, other, root), 1 / 3, root)
  whole = compare(b, "eq", add(b, size, size), size)             # 0 and infinity
  return select(b, whole, x, with_sign(b, x, root))
