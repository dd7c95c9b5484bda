"""f32 and f64 arithmetic (PTX ISA 9.7.3), on arrays of registers.

Everything that the ISA rounds is rounded exactly once. An `.approx` instruction gives the correctly rounded value,
which lies within the ISA's bound: relative 2**-23 (rcp, sqrt), 2**-22.9 (rsqrt), 2**-22 (ex2, lg2; lg2 absolute near
1), 2 ulp (div), 2**-11 (tanh), absolute 2**-20.5 (sin and cos within 2 pi).

Callers silence numpy's floating-point warnings (`np.errstate(all="ignore")`): one guard around a run is cheaper than
one around each operation.
"""
from __future__ import annotations

import fractions
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Instr, Mods
from tiletrace.sim.rounding import NAN32, TINY32, canonical, flush, round_f32, to_odd, two_sum
from tiletrace.sim.storage import Unit

_F32, _F64 = np.float32, np.float64
_TIE_MASK, _TIE = np.uint64(0x1FFF_FFFF), np.uint64(0x1000_0000)     # a float64 halfway between two normal f32

Operation = Callable[..., Any]


def finished(f: Operation, ftz: str) -> Unit:
  """`f` with canonical NaN results and, for .ftz, subnormal inputs and results flushed."""
  if ftz:
    return lambda *args: flush(canonical(f(*[flush(x) for x in args])))
  return lambda *args: canonical(f(*args))


# ---- add, sub, mul, fma

def _exact_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  return two_sum(a.astype(_F64), b.astype(_F64))


def _exact_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  product = np.multiply(a, b, dtype=_F64)
  return product, np.zeros_like(product)


def exact_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """a * b + c of f32 as a pair of float64: a product of 24-bit numbers fits one."""
  return two_sum(np.multiply(a, b, dtype=_F64), c.astype(_F64))


def _directed(exact: Operation, mode: str, negated: tuple[int, ...]) -> Operation:
  """`exact` rounded to f32 in a direction. Downwards is upwards of the negation: so a zero sum has IEEE 754's sign."""
  if mode == "rm":
    return lambda *args: -round_f32(to_odd(*exact(*[-x if i in negated else x for i, x in enumerate(args)])), "rp")
  return lambda *args: round_f32(to_odd(*exact(*args)), mode)


def fma_rn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  """a * b + c of f32 with a single rounding to nearest.

  A float64 sum rounds to the right f32 unless it came out halfway between two, or the result is subnormal: then the
  part that float64 dropped decides.
  """
  total = np.multiply(a, b, dtype=_F64) + c
  r = total.astype(_F32)
  doubtful = (total.view(np.uint64) & _TIE_MASK == _TIE) | (np.abs(r) <= TINY32)
  if np.count_nonzero(doubtful):
    return round_f32(to_odd(*exact_fma(a, b, c)), "rn")
  return r


def _by_fractions(f: Operation, mode: str) -> Unit:
  """A float64 operation lane by lane in rational numbers: for what float64 hardware does not offer."""
  def lane(*args: float) -> float:
    nearest = f(*args)
    if not all(map(math.isfinite, args)):
      return nearest
    exact = f(*map(fractions.Fraction, args))
    if exact == 0:
      return -0.0 if mode == "rm" and nearest == 0 and not _positive_zero_sum(f, args) else nearest
    try:
      r = exact.numerator / exact.denominator      # Python divides integers with one rounding to nearest, ties to even
    except OverflowError:
      r = math.inf if exact > 0 else -math.inf
    if mode == "rn" or (math.isfinite(r) and fractions.Fraction(r) == exact):
      return r
    above = r > 0 if math.isinf(r) else fractions.Fraction(r) > exact
    down = mode == "rm" or (mode == "rz" and exact > 0)
    if above == down:
      return math.nextafter(r, -math.inf if down else math.inf)
    return r
  return np.vectorize(lane, otypes=[_F64])


def _positive_zero_sum(f: Operation, args: tuple[float, ...]) -> bool:
  """Whether a zero result stays as float64 has it: rounding down, only a sum of unlike zeros becomes negative."""
  if f is _multiply:
    return True
  terms = (args[0] * args[1], args[2]) if len(args) == 3 else (args[0], -args[1] if f is _subtract else args[1])
  return math.copysign(1, terms[0]) == math.copysign(1, terms[1]) and terms[0] == 0 == terms[1]


def _add(a: Any, b: Any) -> Any:
  return a + b


def _subtract(a: Any, b: Any) -> Any:
  return a - b


def _multiply(a: Any, b: Any) -> Any:
  return a * b


def _fused(a: Any, b: Any, c: Any) -> Any:
  return a * b + c


# row -> (numpy's operation, the exact pair, which operands a negation of the result negates)
_ROUNDED: dict[Instr, tuple[Operation, Operation, tuple[int, ...]]] = {
    isa.ADD: (_add, _exact_sum, (0, 1)),
    isa.SUB: (_subtract, lambda a, b: _exact_sum(a, -b), (0, 1)),
    isa.MUL: (_multiply, _exact_product, (0,)),
    isa.FMA: (_fused, exact_fma, (0, 2)),
}


def rounded(row: Instr, mods: Mods) -> Unit:
  """add, sub, mul and fma of f32 and f64 in every rounding mode."""
  plain, exact, negated = _ROUNDED[row]
  mode = mods["rnd"] or "rn"
  if mods["type"] == "f64":
    return plain if mode == "rn" and row is not isa.FMA else _by_fractions(plain, mode)
  if mode != "rn":
    return finished(_directed(exact, mode, negated), mods["ftz"])
  return finished(fma_rn if row is isa.FMA else plain, mods["ftz"])


# ---- min, max, signs

def _signed_zeros(a: np.ndarray, b: np.ndarray, r: np.ndarray, smaller: bool) -> np.ndarray:
  """-0 is below +0: of two zeros the minimum has either's sign, the maximum both's."""
  negative = np.signbit(a) | np.signbit(b) if smaller else np.signbit(a) & np.signbit(b)
  return np.where((a == 0) & (b == 0), np.where(negative, -np.zeros_like(r), np.zeros_like(r)), r)


def extremum(row: Instr, nan: str) -> Operation:
  """min or max of floats: a number beats NaN, with .NaN the other way round."""
  smaller = row is isa.MIN
  f: Operation = {(True, ""): np.fmin, (False, ""): np.fmax, (True, "NaN"): np.minimum,
                  (False, "NaN"): np.maximum}[smaller, nan]

  def unit(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    r = f(a, b)
    return r if np.count_nonzero(r) == r.size else _signed_zeros(a, b, r, smaller)
  return unit


def min_max(row: Instr, mods: Mods) -> Unit:
  """min and max of f32 and f64."""
  f = extremum(row, mods["nan"])
  return f if mods["type"] == "f64" else finished(f, mods["ftz"])


def sign_change(row: Instr, mods: Mods) -> Unit:
  """abs and neg of f32 and f64: only the sign bit moves."""
  f = np.abs if row is isa.ABS else np.negative
  return (lambda a: flush(f(a))) if mods["ftz"] else f


def _test(mods: Mods) -> Unit:
  """testp: zeros count as normal (PTX ISA 9.7.3, testp)."""
  tiny = TINY32 if mods["type"] == "f32" else np.finfo(_F64).tiny
  tests: dict[str, Unit] = {
      "finite": np.isfinite, "infinite": np.isinf, "number": lambda a: a == a, "notanumber": np.isnan,
      "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= tiny) | (a == 0)),
      "subnormal": lambda a: (np.abs(a) < tiny) & (a != 0),
  }
  return tests[mods["op"]]


# ---- quotients, roots, functions

def _in_float64(f: Operation) -> Operation:
  return lambda a: f(a.astype(_F64)).astype(_F32)


def _divide_approx(mods: Mods) -> Unit:
  """div.approx has a window of divisors, above 2**126, where it gives 0, or NaN for an infinite dividend."""
  if mods["mode"] == "full":
    return finished(np.divide, mods["ftz"])

  def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    quotient = a / b
    huge = (np.abs(b) > _F32(2.0**126)) & np.isfinite(b)
    return np.where(huge, np.where(np.isfinite(a), np.copysign(_F32(0), quotient), NAN32), quotient)
  return finished(divide, mods["ftz"])


def _ieee(f: Operation) -> Callable[[Mods], Unit]:
  return lambda m: f if m["type"] == "f64" else finished(f, m["ftz"])


def approximate(f: Operation) -> Callable[[Mods], Unit]:
  """An f32 function of one number: computed in float64, rounded once."""
  return lambda m: finished(_in_float64(f), m.get("ftz", ""))


UNITS: dict[Instr, Callable[[Mods], Unit]] = {
    isa.COPYSIGN: lambda m: lambda a, b: np.copysign(b, a),
    isa.TESTP: _test,
    isa.DIV_APPROX: _divide_approx,
    isa.DIV_RN: _ieee(np.divide),
    isa.RCP_RN: _ieee(lambda a: 1 / a),
    isa.SQRT_RN: _ieee(np.sqrt),
    isa.RCP: approximate(lambda a: 1 / a),
    isa.SQRT: approximate(np.sqrt),
    isa.RSQRT: approximate(lambda a: 1 / np.sqrt(a)),
    isa.EX2: approximate(np.exp2),
    isa.LG2: approximate(np.log2),
    isa.SIN: approximate(np.sin),
    isa.COS: approximate(np.cos),
}
