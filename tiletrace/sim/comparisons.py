"""Comparison and selection (PTX ISA 9.7.6, 9.7.7), on arrays of registers. Predicates are bool arrays."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Instr, Mods
from tiletrace.sim.halves import TYPES as HALVES, decode
from tiletrace.sim.rounding import TINY16, flush
from tiletrace.sim.storage import NUMBERS, Unit, joined, parts

Comparison = Callable[[Any, Any], Any]

_COMPARE: dict[str, Comparison] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}
# An ordered comparison is false for NaN, an unordered one true. numpy's are ordered, but for !=.
_COMPARE_FLOATS: dict[str, Comparison] = {
    **_COMPARE, "ne": lambda a, b: (a < b) | (a > b), "neu": np.not_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)), "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}
_COMBINE: dict[str, Comparison] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def compare(mods: Mods) -> Comparison:
  """The comparison that `cmp`, `ftz` and `type` name: two arrays of registers -> bool; packed halves -> [n, 2]."""
  type_, name = mods["type"], mods["cmp"]
  if type_ in HALVES:
    f, packed, element = _COMPARE_FLOATS[name], type_.endswith("x2"), type_.removesuffix("x2")

    def numbers(x: np.ndarray) -> np.ndarray:
      y = decode(parts(x, np.uint16) if packed else x, element)
      return flush(y, TINY16) if mods["ftz"] else y
    return lambda a, b: f(numbers(a), numbers(b))
  if type_[0] == "f":
    f = _COMPARE_FLOATS[name]
    return (lambda a, b: f(flush(a), flush(b))) if mods["ftz"] else f
  f = _COMPARE[name]
  if type_[0] == "s" and name not in ("eq", "ne"):
    own = NUMBERS[type_]
    return lambda a, b: f(a.view(own), b.view(own))
  return f


def _setp_bool(mods: Mods) -> Unit:
  f, combine = compare(mods), _COMBINE[mods["bool"]]
  return lambda a, b, c: combine(f(a, b), c)


def _setp_pair(mods: Mods) -> Unit:
  """Two predicates: of the low halves and of the high ones."""
  f = compare(mods)

  def unit(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    both = f(a, b)
    return both[..., 0], both[..., 1]
  return unit


def _set(mods: Mods) -> Unit:
  f, ones = compare(mods), np.uint32(0xFFFF_FFFF)
  if mods["to"] == "f32":
    return lambda a, b: f(a, b).astype(np.float32)
  return lambda a, b: f(a, b) * ones


def _set_pair(mods: Mods) -> Unit:
  f, one = compare(mods), np.uint16(0x3C00 if mods["to"] == "f16x2" else 0x3F80)
  return lambda a, b: joined(f(a, b) * one, np.uint32)


def _select(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  return np.where(c, a, b)


UNITS: dict[Instr, Callable[[Mods], Unit]] = {
    isa.SETP: compare,
    isa.SETP_BOOL: _setp_bool,
    isa.SETP_X2: _setp_pair,
    isa.SET: _set,
    isa.SET_X2: _set_pair,
    isa.SELP: lambda m: _select,
}
