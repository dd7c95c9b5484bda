"""The arithmetic units: what each row of isa_integer and isa_float computes, as functions of arrays.

  add = numerics.unit(isa.ADD.form(type="f32"))
  add(np.float32([1, 2]), np.float32([3]))        # array([4., 5.], dtype=float32)

A unit takes the source operands in print order, vectors flattened (`mov.b32 d, {lo, hi}`: two arrays), each in the
storage of its slot's natural class (`storage`), and integer literals of kind "int" (lop3's table) as numbers. Arrays
have shape [n] or [1]: a literal or a uniform register is an array of one. It gives one array, or for several
destination registers a tuple in print order. Results have the broadcast shape; they may be an argument itself (mov).
Registers narrower or wider than their type are the caller's (`storage.resize`). Call them under
`np.errstate(all="ignore")`.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Form, Instr, Mods
from tiletrace.sim import bits, comparisons, conversions, floats, halves, integers
from tiletrace.sim.storage import Unit


def _by_type(row: Instr, integer: Callable[[str], Unit] | None, wide: Callable[[Instr, Mods], Unit],
             half: Callable[[Instr, Mods], Unit]) -> Callable[[Mods], Unit]:
  def make(mods: Mods) -> Unit:
    type_ = mods["type"]
    if type_ in ("f32", "f64"):
      return wide(row, mods)
    if type_ in halves.TYPES:
      return half(row, mods)
    assert integer is not None, row
    return integer(type_)
  return make


UNITS: dict[Instr, Callable[[Mods], Unit]] = {
    **{row: _by_type(row, integers.ARITHMETIC.get(row), floats.rounded, halves.rounded)
       for row in (isa.ADD, isa.SUB, isa.MUL, isa.FMA)},
    **{row: _by_type(row, integers.ARITHMETIC[row], floats.min_max, halves.min_max) for row in (isa.MIN, isa.MAX)},
    **{row: _by_type(row, integers.ARITHMETIC[row], floats.sign_change, halves.sign_change)
       for row in (isa.ABS, isa.NEG)},
    isa.TANH: lambda m: (floats.approximate(np.tanh)(m) if m["type"] == "f32" else halves.function(np.tanh, m)),
    **integers.UNITS, **bits.UNITS, **floats.UNITS, **halves.UNITS, **comparisons.UNITS, **conversions.UNITS,
}


@functools.cache
def unit(form: Form) -> Unit | None:
  """The unit of an instruction's form, or None where its row computes nothing from registers alone."""
  make = UNITS.get(form.row)
  return None if make is None else make(form.mods)
