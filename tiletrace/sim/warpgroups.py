"""wgmma: groups of asynchronous products, the registers that they own until they are waited for (PTX ISA 9.7.15)."""
from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.sim import fragments, wgmma
from tiletrace.sim.control import rendezvous
from tiletrace.sim.faults import Violation
from tiletrace.sim.machine import WARPGROUP, WGMMA_ROWS, Machine
from tiletrace.sim.program import Op
from tiletrace.sim.strands import Strand, ascending
from tiletrace.sim.tables import Act, effect

Accumulator = tuple[Reg, ...]
_ROWS = 64      # of a wgmma


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
  """What the modifiers and literals of a wgmma say: sizes, types, and which way the operands lie ("k" or "mn")."""
  n: int
  k: int
  d: str
  a: str
  b: str
  a_major: str
  b_major: str
  negate: bool

  @classmethod
  def of(cls, op: Op) -> Shape:
    mods, named = op.inst.mods, _operands(op)
    found = re.fullmatch(r"m64n(\d+)k(\d+)", mods["shape"])
    assert found, op
    majors = ["mn" if named.get(name) == 1 else "k" for name in ("trans_a", "trans_b")]
    negate = named.get("scale_a", 1) * named.get("scale_b", 1) == -1
    return cls(int(found[1]), int(found[2]), mods["d"], mods["a"], mods["b"], majors[0], majors[1], negate)


def _operands(op: Op) -> dict[str, Any]:
  return {slot.name: x for slot, x in zip(op.inst.form.slots, op.inst.operands)}


@dataclasses.dataclass(slots=True, eq=False)
class Product:
  """One wgmma in flight.

  Attributes:
    a, b: the operands' numbers [64, k] and [n, k] once they were read; descriptors until then.
    scale_d: whether the accumulator is added.
  """
  op: Op
  shape: Shape
  accumulator: Accumulator
  registers: tuple[Reg, ...]
  a: np.ndarray | int
  b: np.ndarray | int
  scale_d: bool
  agent: Any


class Warpgroup:
  """The wgmma state of one warpgroup.

  Attributes:
    open: products since the last commit. groups: committed ones, oldest first.
    values: accumulators of products in flight, as matrices [64, n].
    fenced: whether it has executed wgmma.fence. dirty: registers written since, that some wgmma uses.
  """

  def __init__(self, m: Machine, number: int):
    self.machine, self.number = m, number
    self.open: list[Product] = []
    self.groups: list[list[Product]] = []
    self.values: dict[Accumulator, np.ndarray] = {}
    self.fenced = False
    self.dirty: set[Reg] = set()
    self.checked: set[tuple[Op, str, int]] = set()      # operands whose swizzle was looked at
    self.at = slice(number * WARPGROUP, (number + 1) * WARPGROUP)
    self.start = int(m.shared_start[self.at.start])

  def in_flight(self) -> list[Product]:
    return [p for group in (*self.groups, self.open) for p in group]

  def issue(self, product: Product) -> None:
    if self.machine.adversary.early():
      self._read(product)
    self.open.append(product)
    self._own(product)

  def _own(self, product: Product) -> None:
    owned = self.machine.busy.setdefault(self.number, {})
    text = f"the wgmma of PTX line {product.op.line} is in flight"
    for reg in product.registers:
      owned[reg] = text
    self.machine.busy_anywhere.update(product.registers)

  def wait(self, n: int) -> None:
    """All groups but the newest n are done."""
    m, done = self.machine, self.groups[:max(0, len(self.groups) - n)]
    if not done:
      return
    self.groups = self.groups[len(done):]
    for product in (p for group in done for p in group):
      self._compute(product)
      if m.races is not None:
        m.races.acquire(np.arange(self.at.start, self.at.stop), m.races.complete(product.agent))
    flying = self.in_flight()
    still = {p.accumulator for p in flying}
    for accumulator in [a for a in self.values if a not in still]:
      type_ = next(p for group in done for p in group if p.accumulator == accumulator).shape.d
      registers = fragments.write_accumulator(self.values.pop(accumulator), type_)
      for reg, row in zip(accumulator, registers):
        m.registers.row(reg)[self.at] = row
    m.busy[self.number] = {}
    for product in flying:
      self._own(product)
    m.busy_anywhere = {reg for owned in m.busy.values() for reg in owned}

  def _read(self, product: Product) -> None:
    """Reads what lies in shared memory."""
    m, shape = self.machine, product.shape
    memory = m.shared.bytes[self.start:self.start + m.shared.span]
    if isinstance(product.a, int):
      product.a = wgmma.read_operand(memory, product.a, _ROWS, shape.a, shape.a_major)
    if isinstance(product.b, int):
      product.b = wgmma.read_operand(memory, product.b, shape.n, shape.b, shape.b_major)

  def _compute(self, product: Product) -> None:
    self._read(product)
    assert isinstance(product.a, np.ndarray) and isinstance(product.b, np.ndarray)
    acc = self.values.get(product.accumulator)
    if acc is None and product.scale_d:
      acc = fragments.read_accumulator(self._rows(product.accumulator), product.shape.d)
    value = wgmma.multiply(acc if product.scale_d else None, product.a, product.b, negate=product.shape.negate)
    if product.shape.d == "f32":
      value = value.astype(np.float32)
    elif product.shape.d == "f16":
      value = value.astype(np.float16).astype(np.float64)
    self.values[product.accumulator] = value

  def _rows(self, registers: tuple[Reg, ...]) -> np.ndarray:
    return np.stack([self.machine.registers.row(r)[self.at] for r in registers])


class Warpgroups:
  """All warpgroups of a cluster."""

  def __init__(self, m: Machine):
    self.machine = m
    m.on_start.append(self.reset)
    m.on_exit.append(self.leave)
    self.used = {reg for op in m.ops if op.inst.row in WGMMA_ROWS for reg in _wgmma_registers(op)}
    m.watch({op.index: frozenset(op.inst.writes()) & self.used for op in m.ops if op.inst.row not in WGMMA_ROWS},
            self.written)
    self.reset()

  def reset(self) -> None:
    self.all = [Warpgroup(self.machine, i) for i in range(-(-self.machine.threads // WARPGROUP))]

  def written(self, registers: frozenset[Reg], threads: np.ndarray) -> None:
    """Registers that a wgmma uses were written by other instructions."""
    for number in ascending(threads // WARPGROUP).tolist():
      self.all[number].dirty |= registers

  def leave(self, threads: np.ndarray) -> None:
    for number in ascending(threads // WARPGROUP).tolist():
      flying = self.all[number].in_flight()
      if flying:
        raise Violation("asynchronous at exit", "a wgmma that nobody waited for", threads=threads, other=flying[0].op)


def _wgmma_registers(op: Op) -> tuple[Reg, ...]:
  """The accumulator's registers, then A's where it lies in registers."""
  named = _operands(op)
  return (*named["acc"], *named.get("a", ()))


def warpgroups(m: Machine) -> Warpgroups:
  return m.unit(Warpgroups)


def _uniform(row: Any, at: slice, what: str) -> int:
  values = row[at]
  if len(values) > 1 and (values != values[0]).any():
    raise Violation("not uniform", f"{what} differs between the threads of a warpgroup",
                    threads=at.start + np.flatnonzero(values != values[0]))
  return int(values[0])


@effect(*sorted(WGMMA_ROWS, key=str))
def _mma_async(m: Machine, op: Op) -> Act:
  units, shape, named = warpgroups(m), Shape.of(op), _operands(op)
  slots = {s.name: s for s in op.inst.form.slots}
  rows = {name: m.registers.source(named[name], slots[name]) for name in ("a_desc", "b_desc", "scale_d")
          if name in named}
  registers = _wgmma_registers(op)
  accumulator = tuple(named["acc"])

  def act(s: Strand, threads: np.ndarray, at: Any) -> bool | None:
    m.demand_converged(s, threads, "wgmma")
    if not rendezvous(m, s, threads):
      return True
    for number in range(int(threads[0]) // WARPGROUP, int(threads[-1]) // WARPGROUP + 1):
      group = units.all[number]
      if group.at.start not in threads:
        continue
      _check_registers(group, op, accumulator, registers)
      scale_d = bool(_uniform(rows["scale_d"], group.at, "scale-d"))
      if scale_d and accumulator not in group.values:
        _demand_written(m, accumulator, group)
      agent = m.races.issue(np.arange(group.at.start, group.at.stop), "wgmma") if m.races is not None else None
      b = _shared_operand(m, op, group, agent, rows["b_desc"], "B", shape.n, shape.b, shape.b_major)
      if "a_desc" in rows:
        a: Any = _shared_operand(m, op, group, agent, rows["a_desc"], "A", _ROWS, shape.a, shape.a_major)
      else:
        a = fragments.gather_a(group._rows(tuple(named["a"])).view(np.uint32), shape.a)
      group.issue(Product(op, shape, accumulator, registers, a, b, scale_d, agent))
    if m.counters is not None:
      m.counters.wgmma(op, shape, len(threads) // WARPGROUP)
    return None
  return act


def _check_registers(group: Warpgroup, op: Op, accumulator: Accumulator, registers: tuple[Reg, ...]) -> None:
  """Only an accumulator may be shared with products in flight; other registers were fenced."""
  where = np.arange(group.at.start, group.at.stop)
  dirty = group.dirty & set(registers)
  if dirty or not group.fenced:
    what = f"{min(dirty, key=lambda r: r.index)} was written" if dirty else "it is the first wgmma"
    raise Violation("missing wgmma fence", f"{what}, and no wgmma.fence came between", threads=where)
  for product in group.in_flight():
    if product.accumulator == accumulator:
      inputs = set(registers) - set(accumulator)
      bad = inputs & set(product.accumulator)
    else:
      bad = set(registers) & set(product.accumulator) | set(accumulator) & set(product.registers)
    if bad:
      reg = min(bad, key=lambda r: r.index)
      raise Violation("register in flight", f"{reg} belongs to the wgmma of PTX line {product.op.line}, which is in "
                      "flight", threads=where)


def _demand_written(m: Machine, accumulator: Accumulator, group: Warpgroup) -> None:
  for reg in accumulator:
    written = m.registers.written.get(reg)
    if written is not None and not written[group.at].all():
      raise Violation("uninitialised register", f"{reg} of the accumulator has no value",
                      threads=group.at.start + np.flatnonzero(~written[group.at]))


def _shared_operand(m: Machine, op: Op, group: Warpgroup, agent: Any, row: Any, what: str, rows: int, type_: str,
                    major: str) -> int:
  """The descriptor of an operand, after checks of what it names."""
  desc = _uniform(row, group.at, f"the descriptor of {what}")
  refused = wgmma.refusal(desc)
  if refused is not None:
    raise Violation("descriptor", refused)
  size = fragments.ITEMSIZE[type_]
  cells = wgmma.operand_cells(desc, rows, 32 // size, size, major)
  m.shared.check(cells, 16, 16, ())
  offsets = cells + group.start if group.start else cells
  m.shared.check_valid(offsets, 16, ())
  if m.races is not None:
    m.races.agent_read(agent, offsets, 16, op)
  _check_swizzle(m, group, op, desc, what, offsets)
  return desc


def _check_swizzle(m: Machine, group: Warpgroup, op: Op, desc: int, what: str, offsets: np.ndarray) -> None:
  """The descriptor's swizzle is the one that TMA wrote with; no base offset where a pattern begins (ISA 9.7.15.5)."""
  if (op, what, desc) in group.checked:
    return
  group.checked.add((op, what, desc))
  fields, where = wgmma.decode(desc), np.arange(group.at.start, group.at.stop)
  if fields.swizzle and fields.base_offset and fields.start % (8 * fields.swizzle) < 128:
    raise Violation("descriptor", f"{what} starts at {fields.start:#x}, where a pattern of {fields.swizzle} bytes "
                    f"begins, and has the base offset {fields.base_offset}", threads=where)
  if m.races is None or not m.swizzles:
    return
  for writer in m.races.writers(offsets, 16):
    if m.swizzles.get(writer, fields.swizzle) != fields.swizzle:
      raise Violation("descriptor", f"{what} is read with a swizzle of {fields.swizzle} bytes, TMA wrote it with "
                      f"{m.swizzles[writer]}", threads=where, addresses=offsets[:1], other=writer)


def _for_warpgroups(m: Machine, op: Op, what: Any) -> Act:
  units = warpgroups(m)

  def act(s: Strand, threads: np.ndarray, at: Any) -> bool | None:
    m.demand_converged(s, threads, op.inst.form.head)
    if not rendezvous(m, s, threads):
      return True
    for number in ascending(threads // WARPGROUP).tolist():
      what(units.all[number])
    return None
  return act


@effect(isa.WGMMA_FENCE)
def _fence(m: Machine, op: Op) -> Act:
  def fence(group: Warpgroup) -> None:
    group.fenced = True
    group.dirty.clear()
  return _for_warpgroups(m, op, fence)


@effect(isa.WGMMA_COMMIT)
def _commit(m: Machine, op: Op) -> Act:
  def commit(group: Warpgroup) -> None:
    group.groups.append(group.open)
    group.open = []
  return _for_warpgroups(m, op, commit)


@effect(isa.WGMMA_WAIT)
def _wait(m: Machine, op: Op) -> Act:
  n = op.inst.operands[0]
  assert isinstance(n, int)
  return _for_warpgroups(m, op, lambda group: group.wait(n))
