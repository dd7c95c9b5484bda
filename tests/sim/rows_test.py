"""Every row of the instruction table has semantics in the simulator, in every form that the ISA has."""
from __future__ import annotations

import numpy as np
import pytest

from tests.lowering.ptx.isa_test import forms, operand
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Inst
from tiletrace.lowering.ptx.module import Entry, Module, Param
from tiletrace.sim import numerics, semantics
from tiletrace.sim.adversary import Adversary
from tiletrace.sim.machine import Launch, Machine
from tiletrace.sim.memory import Global
from tiletrace.sim.program import Program, SimulatorInputError
from tiletrace.sim.tables import EFFECTS

FAMILIES = {family.__name__.rpartition(".")[2]: family for family in isa.FAMILIES}
NAMES = {row: name for name, row in isa.ROWS.items()}


def every_form(family: str, literal: bool) -> Module:
  """An entry with every form of a family's rows, after all registers were written."""
  module = Module("sm_90a")
  shared = module.dynamic_shared("smem", align=1024)
  entry = module.entry("every_form", [Param("x", "tensormap")], 128, min_ctas=1)
  b = entry.builder()
  for row in (r for r in isa.ROWS.values() if r in vars(FAMILIES[family]).values()):
    for form in forms(row):
      label = b.label("next")
      operands = [operand(b, form, slot, label, shared, literal) for slot in form.slots]
      entry.body.append(Inst(form, form.check(operands)))
      b.place(label)
  b(isa.RET)
  return written_first(module, entry)


def written_first(module: Module, entry: Entry) -> Module:
  """The lint wants registers to be written before they are read."""
  body, entry.body = entry.body, []
  b = entry.builder()
  for cls, registers in entry.registers.items():
    for reg in registers:
      if cls == "pred":
        b(isa.MOV_PRED, reg, 1)
      else:
        b(isa.MOV, reg, 0.0 if cls[0] == "f" else 0, type=cls)
  entry.body += body
  return module


def machine(module: Module) -> Machine:
  """Decodes the module and binds each instruction to what it does; nothing runs."""
  memory = Global({"x": np.zeros(16, np.uint8)})
  launch = Launch(Program(module), memory, {"x": 0}, (None,), (1, 1, 1), (1, 1, 1), 1024, Adversary(0), 1)
  return Machine(launch)


def test_every_row_has_semantics():
  assert not semantics.missing()
  assert set(EFFECTS) | set(numerics.UNITS) | {isa.BRA} == set(isa.ROWS.values())


def test_no_row_has_two():
  assert not [NAMES[row] for row in numerics.UNITS if row in EFFECTS]


@pytest.mark.parametrize(("family", "literal"), [(f, x) for f in FAMILIES for x in ("registers", "literals")
                                                if (f, x) != ("isa_mma", "literals")])      # it has few, and is long
def test_every_form_is_bound_to_what_it_does(family, literal):
  module = every_form(family, literal == "literals")
  m = machine(module)
  assert all(run is not None or act is not None or op.inst.row is isa.BRA
             for op, run, act in zip(m.ops, m.plain, m.acts, strict=True))


def test_an_instruction_without_semantics_is_refused_by_name(monkeypatch):
  monkeypatch.delitem(EFFECTS, isa.NANOSLEEP)
  module = Module("sm_90a")
  b = module.entry("sleepy", [Param("x", "u64")], 32).builder()
  b(isa.NANOSLEEP, 20)
  b(isa.RET)
  assert semantics.missing() == ["NANOSLEEP"]
  with pytest.raises(SimulatorInputError, match=r"no semantics for nanosleep\.u32"):
    machine(module)
