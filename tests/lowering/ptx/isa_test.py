"""Every row of the instruction table, assembled by ptxas at the row's own arch floor."""
from __future__ import annotations

import itertools
from collections.abc import Iterator

from tiletrace.lowering.ptx import Inst, Label, Module, Symbol, isa
from tiletrace.lowering.ptx.instr import Form, Instr, Slot
from tiletrace.lowering.ptx.module import Builder, Param
from tiletrace.lowering.ptx.registers import OperandLike

MAX_FORMS = 400


def forms(row: Instr) -> list[Form]:
  """Every legal combination; of a huge product, an even sample that still holds each choice of each modifier."""
  names = list(row.mods)
  every = [dict(zip(names, values)) for values in itertools.product(*row.mods.values())]
  legal = [m for m in every if row.is_legal(m)]
  chosen = legal[::max(1, len(legal) // MAX_FORMS)]
  for name in names:
    for value in row.mods[name]:
      chosen += [m for m in legal if m[name] == value][:1]
  return list(dict.fromkeys(row.form(**m) for m in chosen))


def operand(b: Builder, form: Form, slot: Slot, label: Label, smem: Symbol, param: Symbol) -> OperandLike:
  if slot.kind == "int":
    return slot.values[0]
  if slot.kind == "label":
    return label
  if slot.kind == "addr":
    return b.addr(param if form.row is isa.LD_PARAM else smem if slot.classes[0] == "b32" else b.reg("b64"), 16)
  if slot.kind == "symbol":
    return smem
  if slot.kind == "sreg":
    return {"u32": "tid.x", "u64": "clock64"}[form.mods["type"]]
  return b.regs(slot.classes[0], slot.count) if slot.count else b.reg(slot.classes[0])


def modules() -> Iterator[tuple[str, Module, int]]:
  by_arch: dict[str, list[Form]] = {}
  for row in isa.ROWS.values():
    for form in forms(row):
      by_arch.setdefault(form.arch, []).append(form)
  for arch, members in by_arch.items():
    m = Module(target=arch)
    smem = m.dynamic_shared("smem", align=1024)
    e = m.entry("all_forms", [Param("x", "tensormap")], 128, min_ctas=1 if arch == "sm_90a" else None)
    b = e.builder()
    for form in members:
      label = b.label("next")
      operands = [operand(b, form, s, label, smem, e.param("x")) for s in form.slots]
      e.body.append(Inst(form, form.check(operands)))
      b.place(label)
    b(isa.RET)
    yield arch, m, len(members)
