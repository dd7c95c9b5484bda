"""Integer arithmetic (PTX ISA 9.7.1), on arrays of registers in unsigned storage.

What does not depend on the sign (add, sub, mul.lo, mad.lo) is numpy's own operation, which wraps around.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Instr, Mods
from tiletrace.sim.storage import NUMBERS, Unit, parts, width


def in_own_numbers(f: Callable[..., np.ndarray], type_: str) -> Unit:
  """`f` on the type's numbers, from and to unsigned storage."""
  own = NUMBERS[type_]
  if type_[0] != "s":
    return f
  stored = f"u{width(type_) // 8}"
  return lambda *args: f(*[x.view(own) for x in args]).view(stored)


def _mad_lo(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  return a * b + c


def multiply_wide(type_: str) -> Unit:
  """The product in twice the bits: [n] u32 -> [n] u64."""
  own, size = NUMBERS[type_], width(type_) // 4
  if type_[0] == "u":
    return lambda a, b: np.multiply(a, b, dtype=f"u{size}")
  return lambda a, b: np.multiply(a.view(own), b.view(own), dtype=f"i{size}").view(f"u{size}")


def _mad_wide(type_: str) -> Unit:
  product = multiply_wide(type_)
  return lambda a, b, c: product(a, b) + c


def _high_u64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Upper 64 bits of a 128-bit product, from four products of halves."""
  low, half = np.uint64(0xFFFF_FFFF), np.uint64(32)
  a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
  middle = a1 * b0 + (a0 * b0 >> half)
  other = a0 * b1 + (middle & low)
  return a1 * b1 + (middle >> half) + (other >> half)


def _high_s64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Reading a negative a as unsigned adds 2**64 b to the product."""
  zero = np.uint64(0)
  return _high_u64(a, b) - np.where(a.view(np.int64) < 0, b, zero) - np.where(b.view(np.int64) < 0, a, zero)


def multiply_high(type_: str) -> Unit:
  """The upper half of the product."""
  if width(type_) == 64:
    return _high_u64 if type_ == "u64" else _high_s64
  product, bits = multiply_wide(type_), width(type_)
  return lambda a, b: (product(a, b) >> bits).astype(f"u{bits // 8}")


def _mad_high(type_: str) -> Unit:
  high = multiply_high(type_)
  return lambda a, b, c: high(a, b) + c


def _saturated(f: Callable[..., np.ndarray]) -> Unit:
  info = np.iinfo(np.int32)

  def unit(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    exact = f(a.view(np.int32), b.view(np.int32), dtype=np.int64)
    return np.clip(exact, info.min, info.max).astype(np.int32).view(np.uint32)
  return unit


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Division by zero is unspecified (PTX ISA, div); all ones is what the code that ptxas makes leaves there."""
  zero = b == 0
  return np.where(zero, ~np.zeros_like(a), a // np.where(zero, np.ones_like(b), b))


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """As `_quotient`: all ones for a zero divisor."""
  zero = b == 0
  return np.where(zero, ~np.zeros_like(a), a % np.where(zero, np.ones_like(b), b))


def _divide(type_: str, remainder: bool) -> Unit:
  """Towards zero, by magnitudes: the most negative number has one, too. A remainder has the dividend's sign."""
  unsigned = _remainder if remainder else _quotient
  if type_[0] == "u":
    return unsigned
  own = NUMBERS[type_]

  def unit(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a_negative, b_negative = a.view(own) < 0, b.view(own) < 0
    magnitude = unsigned(np.where(a_negative, -a, a), np.where(b_negative, -b, b))
    negative = a_negative if remainder else a_negative ^ b_negative
    return np.where(negative & (b != 0), -magnitude, magnitude)
  return unit


def _dot4(mods: Mods) -> Unit:
  a_type, b_type = ("u1" if mods[x] == "u32" else "i1" for x in "ab")
  return lambda a, b, c: ((parts(a, a_type).astype(np.int32) * parts(b, b_type)).sum(-1, dtype=np.int32)
                          .view(np.uint32) + c)


# Rows of isa_float that take integers, too: opcode -> type -> unit.
ARITHMETIC: dict[Instr, Callable[[str], Unit]] = {
    isa.ADD: lambda type_: np.add,
    isa.SUB: lambda type_: np.subtract,
    isa.MIN: lambda type_: in_own_numbers(np.minimum, type_),
    isa.MAX: lambda type_: in_own_numbers(np.maximum, type_),
    isa.ABS: lambda type_: in_own_numbers(np.abs, type_),
    isa.NEG: lambda type_: np.negative,
}

UNITS: dict[Instr, Callable[[Mods], Unit]] = {
    isa.MUL_LO: lambda m: np.multiply,
    isa.MUL_HI: lambda m: multiply_high(m["type"]),
    isa.MUL_WIDE: lambda m: multiply_wide(m["type"]),
    isa.MAD_LO: lambda m: _mad_lo,
    isa.MAD_HI: lambda m: _mad_high(m["type"]),
    isa.MAD_WIDE: lambda m: _mad_wide(m["type"]),
    isa.ADD_SAT: lambda m: _saturated(np.add),
    isa.SUB_SAT: lambda m: _saturated(np.subtract),
    isa.DIV: lambda m: _divide(m["type"], remainder=False),
    isa.REM: lambda m: _divide(m["type"], remainder=True),
    isa.DP4A: _dot4,
}
