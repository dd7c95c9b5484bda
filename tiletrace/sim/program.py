"""An entry decoded once: branch targets, reconvergence points, registers that may be unwritten."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tiletrace.core.errors import TileTraceError
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Inst, PtxError
from tiletrace.lowering.ptx.lint import check
from tiletrace.lowering.ptx.module import Entry, Module
from tiletrace.lowering.ptx.registers import Label, Reg
from tiletrace.sim.faults import Place

LEAVES = (isa.RET, isa.EXIT, isa.TRAP)


class SimulatorInputError(TileTraceError):
  """What the simulator cannot run: a module that fails the lint, wrong arguments, an instruction without semantics."""
  code = "TT510"


@dataclasses.dataclass(slots=True, eq=False)
class Op:
  """An instruction with what the machine wants to know of it.

  Attributes:
    reads, writes: registers.
    uses: both.
    unsure: registers that it reads and that some path to it has not written.
    tracks: registers that it writes and that are `unsure` somewhere.
    joins: whether some branch reconverges here.
    target, join: of a branch: where it goes; where the two ways meet again (`len(ops)`: never).
  """
  index: int
  inst: Inst
  line: int
  reads: list[Reg]
  writes: list[Reg]
  uses: frozenset[Reg]
  unsure: tuple[Reg, ...] = ()
  tracks: tuple[Reg, ...] = ()
  joins: bool = False
  target: int = -1
  join: int = -1

  @property
  def place(self) -> Place:
    return Place(self.index, self.inst.text(), self.line, self.inst.loc)


class Program:
  """The decoded entry.

  Attributes:
    ops: in program order.
    tracked: registers for which the machine keeps who has written them.
  """

  def __init__(self, module: Module, entry: Entry | None = None):
    """Decodes `entry`, by default the module's only one.

    Raises:
      SimulatorInputError: the module does not pass the lint.
    """
    try:
      check(module)
    except PtxError as e:
      raise SimulatorInputError(f"the module does not pass the lint: {e}") from None
    if entry is None:
      (entry,) = module.entries
    self.module, self.entry = module, entry
    lines = _lines(module, entry)
    self.ops: list[Op] = []
    for i, (inst, line) in enumerate(zip(entry.instructions(), lines, strict=True)):
      reads, writes = inst.reads(), inst.writes()
      self.ops.append(Op(i, inst, line, reads, writes, frozenset((*reads, *writes))))
    self._branches()
    self._joins()
    self.tracked = self._unsure()

  def _branches(self) -> None:
    at, starts = 0, {}
    for item in self.entry.body:
      if isinstance(item, Label):
        starts[item] = at
      elif isinstance(item, Inst):
        at += 1
    for op in self.ops:
      if op.inst.row is isa.BRA:
        op.target = starts[op.inst.operands[0]]

  def successors(self, index: int) -> list[int]:
    """Instructions that may follow; `len(ops)` is the end."""
    op, end = self.ops[index], len(self.ops)
    guarded = op.inst.pred is not None
    if op.inst.row is isa.BRA:
      return [index + 1, op.target] if guarded else [op.target]
    if op.inst.row in LEAVES:
      return [end, index + 1] if guarded else [end]
    return [index + 1]

  def _blocks(self) -> list[int]:
    """First instructions of the basic blocks, in order."""
    starts = {0}
    for op in self.ops:
      if op.inst.row is isa.BRA:
        starts |= {op.target, op.index + 1}
      elif op.inst.row in LEAVES:
        starts.add(op.index + 1)
    return sorted(s for s in starts if s < len(self.ops))

  def _joins(self) -> None:
    """Immediate post-dominators of guarded branches."""
    starts, end = self._blocks(), len(self.ops)
    ends = dict(zip(starts, [*starts[1:], end]))
    follow = {s: self.successors(ends[s] - 1) for s in starts}
    parent = immediate_dominators(end, {**{s: [] for s in (*starts, end)}, **_reversed(follow)})
    for s in starts:
      op = self.ops[ends[s] - 1]
      if op.inst.row is isa.BRA and op.inst.pred is not None:
        op.join = parent.get(s, end)
        if op.join < end:
          self.ops[op.join].joins = True

  def _unsure(self) -> list[Reg]:
    """Marks reads of registers that some path leaves unwritten; a guarded write does not count as one."""
    bits = {reg: 1 << i for i, reg in enumerate(reg for regs in self.entry.registers.values() for reg in regs)}
    starts, end = self._blocks(), len(self.ops)
    ends = dict(zip(starts, [*starts[1:], end]))
    everything = (1 << len(bits)) - 1
    written = {s: 0 if s == 0 else everything for s in (*starts, end)}
    made = {s: _mask(bits, [r for op in self.ops[s:ends[s]] if op.inst.pred is None for r in op.writes])
            for s in starts}
    work = [0]
    seen = {0}
    while work:
      s = work.pop()
      leaving = written[s] | made[s]
      for t in self.successors(ends[s] - 1):
        if written[t] & leaving != written[t] or t not in seen:
          written[t] &= leaving
          seen.add(t)
          if t != end:
            work.append(t)
    tracked: dict[Reg, None] = {}
    for s in starts:
      known = written[s]
      for op in self.ops[s:ends[s]]:
        op.unsure = tuple(dict.fromkeys(r for r in _needed(op) if not bits[r] & known))
        tracked.update(dict.fromkeys(r for r in op.reads if not bits[r] & known))
        if op.inst.pred is None:
          known |= _mask(bits, op.writes)
    for op in self.ops:
      op.tracks = tuple(r for r in op.writes if r in tracked)
    return list(tracked)


def _mask(bits: dict[Reg, int], registers: Sequence[Reg]) -> int:
  out = 0
  for reg in registers:
    out |= bits[reg]
  return out


def _needed(op: Op) -> list[Reg]:
  """A wgmma whose scale-d may be false does not need its accumulator; its semantics look."""
  if any(s.name == "scale_d" for s in op.inst.form.slots):
    accumulator = set(op.writes)
    return [reg for reg in op.reads if reg not in accumulator]
  return op.reads


def _reversed(follow: dict[int, list[int]]) -> dict[int, list[int]]:
  out: dict[int, list[int]] = {}
  for s, after in follow.items():
    for t in after:
      out.setdefault(t, []).append(s)
  return out


def immediate_dominators(root: int, follow: dict[int, list[int]]) -> dict[int, int]:
  """Of a graph given by successors: each reachable node's closest dominator.

  The algorithm is Cooper, Harvey and Kennedy's, "A Simple, Fast Dominance Algorithm" (2001).

  >>> immediate_dominators(0, {0: [1, 2], 1: [3], 2: [3], 3: []})
  {1: 0, 2: 0, 3: 0}
  """
  order: list[int] = []
  stack: list[tuple[int, int]] = [(root, 0)]
  seen = {root}
  while stack:
    node, i = stack.pop()
    if i < len(follow[node]):
      stack.append((node, i + 1))
      child = follow[node][i]
      if child not in seen:
        seen.add(child)
        stack.append((child, 0))
    else:
      order.append(node)
  number = {node: i for i, node in enumerate(order)}
  before = _reversed({n: follow[n] for n in order})
  parent = {root: root}
  changed = True
  while changed:
    changed = False
    for node in reversed(order[:-1]):
      found = None
      for p in before[node]:
        if p in parent:
          found = p if found is None else _meet(p, found, parent, number)
      assert found is not None, node
      if parent.get(node) != found:
        parent[node], changed = found, True
  return {n: parent[n] for n in sorted(parent) if n != root}


def _meet(a: int, b: int, parent: dict[int, int], number: dict[int, int]) -> int:
  while a != b:
    while number[a] < number[b]:
      a = parent[a]
    while number[b] < number[a]:
      b = parent[b]
  return a


def _lines(module: Module, entry: Entry) -> list[int]:
  """The line in `module.render()` of each instruction of `entry`."""
  lines = module.lines()
  at = next(i for i, (text, _) in enumerate(lines) if text.startswith(f".visible .entry {entry.name}("))
  out = []
  for i in range(at, len(lines)):
    text = lines[i][0]
    if text == "}":
      break
    if text.startswith("  ") and text.endswith(";") and not text.startswith(("  .reg", "  .pragma", "  .loc")):
      out.append(i + 1)
  return out


Bound = Callable[..., Any]
