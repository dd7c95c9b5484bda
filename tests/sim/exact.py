"""Rounding by its definition, in rational numbers: the reference for the simulator's floating-point units."""
from __future__ import annotations

import fractions
import math
from collections.abc import Callable

# precision, exponent of the smallest normal, largest number
FORMATS = {
    "f64": (53, -1022, (2 - 2.0**-52) * 2.0**1023),
    "f32": (24, -126, float((2 - 2.0**-23) * 2.0**127)),
    "f16": (11, -14, 65504.0),
    "bf16": (8, -126, (2 - 2.0**-7) * 2.0**127),
    "tf32": (11, -126, (2 - 2.0**-10) * 2.0**127),
    "e4m3": (4, -6, 448.0),
    "e5m2": (3, -14, 57344.0),
}


def round_exact(x: fractions.Fraction, name: str, mode: str) -> float:
  """x rounded to a format; beyond the largest number as IEEE 754 says. The sign of a zero is left to the caller."""
  precision, least, largest = FORMATS[name]
  if x == 0:
    return 0.0
  exponent = x.numerator.bit_length() - x.denominator.bit_length()
  exponent -= abs(x) < fractions.Fraction(2)**exponent
  step = fractions.Fraction(2)**(max(exponent, least) - precision + 1)
  scaled = x / step
  floor = math.floor(scaled)
  away = math.floor(abs(scaled) + fractions.Fraction(1, 2)) * (1 if x > 0 else -1)
  count = {"rm": floor, "rp": math.ceil(scaled), "rz": math.trunc(scaled), "rna": away, "rn": round(scaled)}[mode]
  value = count * step
  if abs(value) > largest:
    inward = {"rn": False, "rna": False, "rz": True, "rm": x > 0, "rp": x < 0}[mode]
    value = largest if inward else math.inf
  return math.copysign(float(value), 1 if x > 0 else -1)


def combine(f: Callable, name: str, mode: str, *args: float) -> float:
  """An operation on finite numbers, rounded once; with infinities or NaN as float64 has it."""
  if all(map(math.isfinite, args)):
    exact = f(*map(fractions.Fraction, args))
    if exact:
      return round_exact(exact, name, mode)
    return f(*args)
  try:
    return f(*args)
  except (ZeroDivisionError, OverflowError):
    return math.nan
