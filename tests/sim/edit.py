"""Finding and changing instructions of a module, by their rows and by what defines their registers.

Whatever is asked for and isn't there raises `NoSuchPlace`: an injection never passes over a module in silence.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.sim.subjects import entry_of
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Inst, Instr
from tiletrace.lowering.ptx.module import Module
from tiletrace.lowering.ptx.registers import Addr, Label, Reg


class NoSuchPlace(LookupError):
  """The module has nothing that the injection changes."""


class Edit:
  """The body of a module's entry, under change. Places are instructions (compared by identity), not indices."""

  def __init__(self, module: Module):
    self.entry = entry_of(module)
    self.builder = self.entry.builder()

  # ---- finding

  def part(self, name: str) -> list[Inst]:
    """Instructions of "all", of the "prologue", of the "producer" or of the "consumer"."""
    body = self.entry.body
    if name == "all":
      return [i for i in body if isinstance(i, Inst)]
    ends = [i for i, x in enumerate(body) if isinstance(x, Label) and x.name.startswith("$role_end")]
    starts = [i for i, x in enumerate(body) if isinstance(x, Inst) and x.row is isa.BAR_SYNC_ALL]
    if len(ends) != 2 or not starts:
      raise NoSuchPlace(f"{self.entry.name} has no producer and consumers")
    start, end = {"prologue": (0, starts[0] + 1), "producer": (starts[0] + 1, ends[0]), "consumer": ends}[name]
    return [i for i in body[start:end] if isinstance(i, Inst)]

  def find(self, *rows: Instr, part: str = "all", after: Inst | None = None, before: Inst | None = None,
           where: Callable[[Inst], bool] = lambda i: True) -> list[Inst]:
    """All instructions of these rows, in order; at least one."""
    insts = self.part(part)
    first = insts.index(after) + 1 if after is not None else 0
    last = insts.index(before) if before is not None else len(insts)
    found = [i for i in insts[first:last] if i.row in rows and where(i)]
    if not found:
      raise NoSuchPlace(f"{self.entry.name} has no {' or '.join(r.opcode for r in rows)} there")
    return found

  def definition(self, reg: Any, before: Inst) -> Inst:
    """The last instruction above `before` that writes a register."""
    insts = self.part("all")
    for i in reversed(insts[:insts.index(before)]):
      if reg in i.writes():
        return i
    raise NoSuchPlace(f"nothing writes {reg} before {before}")

  def initial(self, reg: Any, part: str) -> Inst:
    """The first instruction of a part that writes a register."""
    for i in self.part(part):
      if reg in i.writes():
        return i
    raise NoSuchPlace(f"nothing writes {reg} in the {part}")

  @staticmethod
  def get(inst: Inst, name: str) -> Any:
    """An operand, by its name in the row."""
    for slot, x in zip(inst.form.slots, inst.operands):
      if slot.name == name:
        return x
    raise NoSuchPlace(f"{inst} has no operand {name}")

  # ---- changing

  def drop(self, *insts: Inst) -> None:
    for inst in insts:
      self.entry.body.remove(inst)

  def change(self, inst: Inst, *, guard: tuple[Reg | None, bool] | None = None, **operands: Any) -> Inst:
    """Other operands, by name, or another guard (register, negated)."""
    known = {s.name for s in inst.form.slots}
    if not operands.keys() <= known:
      raise NoSuchPlace(f"{inst} has no operands {operands.keys() - known}")
    values = [operands.get(s.name, x) for s, x in zip(inst.form.slots, inst.operands)]
    pred, negate = (inst.pred, inst.negate) if guard is None else guard
    new = Inst(inst.form, inst.form.check(values), pred, negate, inst.loc)
    self.entry.body[self.entry.body.index(inst)] = new
    return new

  def replace(self, inst: Inst, row: Instr, *operands: Any, **mods: str) -> Inst:
    """Another instruction with the same guard."""
    form = row.form(**mods)
    new = Inst(form, form.check(operands), inst.pred, inst.negate, inst.loc)
    self.entry.body[self.entry.body.index(inst)] = new
    return new

  def insert(self, before: Inst, row: Instr, *operands: Any, **mods: str) -> Inst:
    form = row.form(**mods)
    new = Inst(form, form.check(operands), None, False, before.loc)
    self.entry.body.insert(self.entry.body.index(before), new)
    return new

  def repeat(self, inst: Inst) -> None:
    new = Inst(inst.form, inst.operands, inst.pred, inst.negate, inst.loc)
    self.entry.body.insert(self.entry.body.index(inst), new)

  def move(self, insts: Sequence[Inst], *, before: Inst) -> None:
    self.drop(*insts)
    at = self.entry.body.index(before)
    self.entry.body[at:at] = insts

  def shifted(self, address: Addr, nbytes: int) -> Addr:
    return Addr(address.base, address.offset + nbytes)
