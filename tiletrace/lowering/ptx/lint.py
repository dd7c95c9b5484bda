"""Checks of a module that need no assembler: what ptxas would reject late, or accept although it is wrong.

Operand classes and modifiers are checked as each instruction is built; here is what takes the whole body.
"""
from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Inst, PtxError
from tiletrace.lowering.ptx.module import Entry, Module
from tiletrace.lowering.ptx.registers import Addr, Label, Reg, Symbol
from tiletrace.lowering.target import accepts

_IDENTIFIER = re.compile(r"[A-Za-z][\w$]*|[_$%][\w$]+")    # PTX ISA section 4.4
_LEAVES = (isa.RET, isa.EXIT, isa.TRAP)


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
  """One fault. `warning` ones are legal PTX.

  Attributes:
    kind: "undefined", "unused", "label", "name", "target", "end", "symbol", "unreachable" or "setmaxnreg".
    text: what is wrong, with the instruction.
    loc: the source location of the instruction, if it has one.
  """
  kind: str
  text: str
  loc: Any = None
  warning: bool = False

  def __str__(self) -> str:
    return f"{self.kind}: {self.text}{f' (from {self.loc})' if self.loc is not None else ''}"


def lint(module: Module) -> list[Finding]:
  """All findings, in program order per kind.

  * name: duplicate or ill-formed names of entries, parameters and shared variables.
  * label: placed twice or never, or used and not placed.
  * symbol: a variable that is not declared.
  * target: an instruction above the module's target.
  * undefined: a register that no path has written before it is read.
  * end: control runs off the end of the body.
  * setmaxnreg: without the directives that fix the registers at entry (ptxas C7508).
  * unused (warning): a register that is written and never read.
  * unreachable (warning): instructions that no path reaches.
  """
  out = list(_names(module))
  for entry in module.entries:
    out += _labels(entry)
    out += _symbols(module, entry)
    out += _targets(module, entry)
    if not any(f.kind == "label" for f in out):
      out += _flow(entry)
    out += _unused(entry)
  return out


def check(module: Module) -> None:
  """Raises on the first fault; warnings pass.

  Raises:
    PtxError: with every fault.
  """
  faults = [f for f in lint(module) if not f.warning]
  if faults:
    raise PtxError("\n".join(map(str, faults)))


def _names(module: Module) -> Iterator[Finding]:
  for scope, names in [("module", [e.name for e in module.entries] + [s.name for s in module.shared]),
                       *((e.name, [p.name for p in e.params]) for e in module.entries)]:
    for name, count in collections.Counter(names).items():
      if count > 1:
        yield Finding("name", f"{name} is declared {count} times in {scope}")
      if not _IDENTIFIER.fullmatch(name):
        yield Finding("name", f"{name!r} in {scope} is no PTX identifier")


def _labels(entry: Entry) -> Iterator[Finding]:
  placed = collections.Counter(item for item in entry.body if isinstance(item, Label))
  for label, count in placed.items():
    if count > 1:
      yield Finding("label", f"{label} is placed {count} times")
  for name, count in collections.Counter(label.name for label in placed).items():
    if count > 1:
      yield Finding("label", f"{count} labels are called {name}")
    if not _IDENTIFIER.fullmatch(name):
      yield Finding("label", f"{name!r} is no PTX identifier")
  for inst in entry.instructions():
    for x in inst.operands:
      if isinstance(x, Label) and x not in placed:
        yield Finding("label", f"{x} is not placed: {inst}", inst.loc)


def _symbols(module: Module, entry: Entry) -> Iterator[Finding]:
  known = {Symbol(p.name, "param") for p in entry.params} | {Symbol(s.name, "shared") for s in module.shared}
  known |= {Symbol(c.name, "global") for c in module.constants}
  for inst in entry.instructions():
    for x in inst.operands:
      symbol = x.base if isinstance(x, Addr) else x
      if isinstance(symbol, Symbol) and symbol not in known:
        yield Finding("symbol", f"{symbol.space} {symbol} is not declared: {inst}", inst.loc)


def _targets(module: Module, entry: Entry) -> Iterator[Finding]:
  for inst in entry.instructions():
    if not accepts(module.target, inst.form.arch):
      yield Finding("target", f"{inst.form} needs {inst.form.arch}, the module is for {module.target}", inst.loc)
    if inst.row is isa.SETMAXNREG and entry.max_registers is None and entry.min_ctas is None:
      yield Finding("setmaxnreg", f"{entry.name} needs min_ctas or max_registers, or ptxas ignores {inst}", inst.loc)


def _unused(entry: Entry) -> Iterator[Finding]:
  read = {reg for inst in entry.instructions() for reg in inst.reads()}
  for inst in entry.instructions():
    written = inst.writes()
    if written and not any(reg in read for reg in written):
      yield Finding("unused", f"nothing reads the result: {inst}", inst.loc, warning=True)


# ---- control flow


@dataclasses.dataclass(slots=True)
class _Block:
  """Straight-line code; registers as bits of an integer."""
  insts: list[Inst]
  successors: list[int]
  falls_off: bool = False
  entering: int | None = None      # registers that some path has written; None: not reached


def _flow(entry: Entry) -> Iterator[Finding]:
  bits: dict[Reg, int] = {reg: 1 << i for i, reg in
                          enumerate(reg for regs in entry.registers.values() for reg in regs)}
  blocks = _blocks(entry)
  work = [0]
  blocks[0].entering = 0
  while work:
    block = blocks[work.pop()]
    leaving = block.entering or 0
    for inst in block.insts:
      for reg in inst.writes():
        leaving |= bits.get(reg, 0)
    for i in block.successors:
      before = blocks[i].entering
      if before is None or leaving | before != before:
        blocks[i].entering = leaving | (before or 0)
        work.append(i)
  for block in blocks:
    yield from _block_findings(block, bits)


def _block_findings(block: _Block, bits: dict[Reg, int]) -> Iterator[Finding]:
  if block.entering is None:
    if block.insts:
      yield Finding("unreachable", f"no path reaches: {block.insts[0]}", block.insts[0].loc, warning=True)
    return
  written = block.entering
  for inst in block.insts:
    for reg in _needed(inst):
      if not bits.get(reg, 0) & written:
        whose = "is not written before" if reg in bits else "belongs to another entry"
        yield Finding("undefined", f"{reg} {whose}: {inst}", inst.loc)
    for reg in inst.writes():
      written |= bits.get(reg, 0)
  if block.falls_off:
    yield Finding("end", f"control runs off the end after: {block.insts[-1] if block.insts else 'a label'}")


def _needed(inst: Inst) -> list[Reg]:
  """What must have been written before. A wgmma whose scale-d may be false does not need its accumulator."""
  slots = [s.name for s in inst.form.slots]
  if "scale_d" in slots and inst.operands[slots.index("scale_d")] != 1:
    accumulator = set(inst.writes())
    return [reg for reg in inst.reads() if reg not in accumulator]
  return inst.reads()


def _blocks(entry: Entry) -> list[_Block]:
  """Cut at labels and after branches and exits; a guarded one falls through as well."""
  blocks, starts, targets = [_Block([], [])], {}, []
  for item in entry.body:
    if isinstance(item, Label):
      if blocks[-1].insts:
        blocks[-1].successors.append(len(blocks))
        blocks.append(_Block([], []))
      starts[item] = len(blocks) - 1
    elif isinstance(item, Inst):
      blocks[-1].insts.append(item)
      leaves = item.row in _LEAVES
      if item.row is isa.BRA:
        targets.append((len(blocks) - 1, item.operands[0]))
      if leaves or item.row is isa.BRA:
        if item.pred is not None:
          blocks[-1].successors.append(len(blocks))
        blocks.append(_Block([], []))
  blocks[-1].falls_off = True
  for source, label in targets:
    blocks[source].successors.append(starts[label])
  return blocks
