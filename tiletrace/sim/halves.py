"""f16 and bf16 arithmetic, scalar and packed in pairs (PTX ISA 9.7.4).

A packed register is taken apart into [n, 2] numbers, the low half first; both kinds compute in float64 and are rounded
once.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Instr, Mods
from tiletrace.sim.floats import exact_fma, extremum
from tiletrace.sim.rounding import NAN16, TINY16, flush, round_f32, round_to, to_odd
from tiletrace.sim.storage import Unit, joined, parts

TYPES = ("f16", "f16x2", "bf16", "bf16x2")
_SIGN, _MAGNITUDE = {16: np.uint16(0x8000), 32: np.uint32(0x8000_8000)}, {16: np.uint16(0x7FFF),
                                                                         32: np.uint32(0x7FFF_7FFF)}


def decode(x: np.ndarray, type_: str) -> np.ndarray:
  """uint16 bits of f16 or bf16 -> the same numbers in f32, any shape."""
  if type_[0] == "f":
    return x.view(np.float16).astype(np.float32)
  return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_bits(x: np.ndarray) -> np.ndarray:
  """f32 -> uint32 whose upper half is the number rounded to bf16, to nearest even. The lower half is leftovers."""
  bits = x.view(np.uint32)
  return bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))


def encode(x: np.ndarray, type_: str, mode: str = "rn") -> np.ndarray:
  """f32 or float64 -> uint16 bits of f16 or bf16, rounded once; NaN is canonical.

  Args:
    x: any shape.
    type_: "f16" or "bf16".
    mode: as in `rounding`.
  """
  half = type_[0] == "f"
  if half and mode == "rn":
    bits = x.astype(np.float16).view(np.uint16)
  elif half:
    bits = round_to(x.astype(np.float64), "f16", mode).astype(np.float16).view(np.uint16)
  elif x.dtype == np.float32 and mode == "rn":
    bits = (bf16_bits(x) >> np.uint32(16)).astype(np.uint16)
  else:
    exact = round_f32(round_to(x.astype(np.float64), "bf16", mode), "rn")
    bits = (exact.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
  nan = x != x
  return np.where(nan, NAN16, bits) if np.count_nonzero(nan) else bits


def on_numbers(f: Callable[..., np.ndarray], type_: str, ftz: str = "", relu: str = "") -> Unit:
  """`f` on f32 numbers, from and to bits: arrays [n] of b16, or of b32 for a packed type."""
  element = type_.removesuffix("x2")

  def numbers(x: np.ndarray) -> np.ndarray:
    y = decode(x, element)
    return flush(y, TINY16) if ftz else y

  def bits(y: np.ndarray) -> np.ndarray:
    if relu:                  # -0, too
      y = np.where(y <= 0, y.dtype.type(0), y)
    out = encode(y, element)
    if ftz:
      out = np.where(out & 0x7C00 == 0, out & np.uint16(0x8000), out)
    return out

  if type_ == element:
    return lambda *args: bits(f(*map(numbers, args)))
  return lambda *args: joined(bits(f(*[numbers(parts(x, np.uint16)) for x in args])), np.uint32)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  return to_odd(*exact_fma(a, b, c))


# A sum in float64 may be rounded twice here: 53 bits are more than twice 11 and two (Figueroa, "When is double
# rounding innocuous?", 1995). Products fit.
_ROUNDED: dict[Instr, Callable[..., Any]] = {
    isa.ADD: lambda a, b: np.add(a, b, dtype=np.float64),
    isa.SUB: lambda a, b: np.subtract(a, b, dtype=np.float64),
    isa.MUL: lambda a, b: np.multiply(a, b, dtype=np.float64),
    isa.FMA: _fma,
}


def rounded(row: Instr, mods: Mods) -> Unit:
  """add, sub, mul, fma."""
  return on_numbers(_ROUNDED[row], mods["type"], mods["ftz"], mods.get("relu", ""))


def min_max(row: Instr, mods: Mods) -> Unit:
  return on_numbers(extremum(row, mods["nan"]), mods["type"], mods["ftz"])


def sign_change(row: Instr, mods: Mods) -> Unit:
  """abs and neg on the bits."""
  size = 32 if mods["type"].endswith("x2") else 16
  f, mask = (np.bitwise_and, _MAGNITUDE[size]) if row is isa.ABS else (np.bitwise_xor, _SIGN[size])
  if mods["ftz"]:
    same = on_numbers(lambda a: a, mods["type"], "ftz")
    return lambda a: f(same(a), mask)
  return lambda a: f(a, mask)


def function(f: Callable[..., np.ndarray], mods: Mods, ftz: str = "") -> Unit:
  """A function of one number, computed in float64."""
  return on_numbers(lambda a: f(a.astype(np.float64)), mods["type"], ftz)


UNITS: dict[Instr, Callable[[Mods], Unit]] = {
    isa.EX2_F16: lambda m: function(np.exp2, m),
    isa.EX2_BF16: lambda m: function(np.exp2, m),
}
