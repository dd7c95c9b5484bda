"""cp.async: copies by threads, their groups, and mbarriers that they arrive at (PTX ISA 9.7.9, asynchronous copy)."""
from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.sim.access import global_addresses
from tiletrace.sim.faults import Violation, ranges
from tiletrace.sim.machine import Machine
from tiletrace.sim.mbarriers import Mbarrier, _each, local, mbarriers, shared_addresses
from tiletrace.sim.program import Op
from tiletrace.sim.strands import Strand
from tiletrace.sim.tables import Act, effect

_RING = 128       # groups of a thread whose marks are kept; wait_group takes up to 63


@dataclasses.dataclass(slots=True, eq=False)
class Copy:
  """One cp.async of several threads that has not been done.

  Attributes:
    group: of each thread, the number of its group.
    source, target: offsets [n] in global and shared memory. kept: bytes read; the rest of `size` becomes zero.
    awaited: an mbarrier will tell that it is done.
  """
  op: Op
  threads: np.ndarray
  group: np.ndarray
  source: np.ndarray
  target: np.ndarray
  kept: np.ndarray
  size: int
  awaited: bool = False

  def perform(self, m: Machine, which: np.ndarray) -> None:
    source, target, kept = self.source[which], self.target[which], self.kept[which]
    if (kept == self.size).all():
      m.shared.store(target, self.size, m.memory.load(source, self.size))
      return
    k = np.arange(self.size)
    inside = k < kept[:, None]
    at = np.where(inside, source[:, None] + k, 0)
    data = np.where(inside, m.memory.bytes[at], 0).astype(np.uint8)
    m.shared.bytes[target[:, None] + k] = data

  def only(self, which: np.ndarray) -> Copy:
    return Copy(self.op, self.threads[which], self.group[which], self.source[which], self.target[which],
                self.kept[which], self.size, self.awaited)


class Copies:
  """The cp.async state of all threads.

  Attributes:
    committed: groups closed by each thread.
    marks: the race detector's mark of each thread's group, in a ring.
  """

  def __init__(self, m: Machine):
    self.machine = m
    m.on_start.append(self.reset)
    m.on_exit.append(self.leave)
    self.reset()

  def reset(self) -> None:
    n = self.machine.threads
    self.pending: list[Copy] = []
    self.committed = np.zeros(n, int)
    self.marks = np.zeros((n, _RING), np.int32)

  def complete(self, threads: np.ndarray, below: np.ndarray) -> None:
    """Does what these threads have pending in groups below `below` [n]."""
    limit = np.full(self.machine.threads, -1)
    limit[threads] = below
    left = []
    for copy in self.pending:
      due = copy.group < limit[copy.threads]
      if due.any():
        copy.perform(self.machine, due)
        if due.all():
          continue
        copy = copy.only(~due)
      left.append(copy)
    self.pending = left

  def leave(self, threads: np.ndarray) -> None:
    for copy in self.pending:
      if copy.awaited:
        continue
      left = np.intersect1d(copy.threads, threads)
      if len(left):
        raise Violation("asynchronous at exit", "cp.async that nobody waited for", threads=left, other=copy.op)


def _copies(m: Machine) -> Copies:
  return m.unit(Copies)


@effect(isa.CP_ASYNC, isa.CP_ASYNC_ZFILL, isa.CP_ASYNC_CG, isa.CP_ASYNC_CG_ZFILL, isa.CP_ASYNC_HINT,
        isa.CP_ASYNC_ZFILL_HINT, isa.CP_ASYNC_CG_HINT, isa.CP_ASYNC_CG_ZFILL_HINT)
def _cp_async(m: Machine, op: Op) -> Act:
  copies, bars, slots, operands = _copies(m), mbarriers(m), op.inst.form.slots, op.inst.operands
  row, offset = shared_addresses(m, operands[0], slots[0])
  source, size = global_addresses(m, op, "src"), operands[2]
  assert isinstance(size, int)
  some = m.registers.source(operands[3], slots[3]) if len(slots) > 3 and slots[3].name == "src_size" else None

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    target = local(m, row, offset, threads, at)
    m.shared.check(target, size, size, threads)
    target = target + m.shared_start[at]
    bars.check_store(target, size)
    addresses = source(threads, at)
    kept = np.full(len(threads), size) if some is None else np.broadcast_to(some[at], threads.shape).astype(int)
    if (kept > size).any():
      raise Violation("out of bounds", f"cp.async of {size} bytes reads {int(kept.max())}",
                      threads=threads[kept > size])
    offsets = np.zeros(len(threads), np.int64)
    lengths = [size] if some is None else np.unique(kept).tolist()
    for n in lengths:
      if n:
        mine = kept == n if len(lengths) > 1 else slice(None)
        offsets[mine] = m.memory.offsets(addresses[mine], n, 1, threads[mine])
        if (addresses[mine] & (size - 1)).any():
          raise Violation("misaligned", f"cp.async of {size} bytes from a global address that is no multiple of it",
                          threads=threads[mine], addresses=addresses[mine])
        if m.races is not None:
          m.races.read(threads[mine], addresses[mine], n, op)
    if m.races is not None:
      m.races.copy_async(threads, target, size, op)
    m.shared.mark(target, size)
    copy = Copy(op, threads, copies.committed[threads], offsets, target, kept, size)
    if m.adversary.early():
      copy.perform(m, np.ones(len(threads), bool))
    else:
      copies.pending.append(copy)
    if m.counters is not None:
      m.counters.cp_async(op, threads, addresses, target, size)
  return act


@effect(isa.CP_ASYNC_COMMIT)
def _commit(m: Machine, op: Op) -> Act:
  copies = _copies(m)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    if m.races is not None:
      copies.marks[threads, copies.committed[threads] % _RING] = m.races.copy_mark(threads)
    copies.committed[threads] += 1
  return act


@effect(isa.CP_ASYNC_WAIT_GROUP)
def _wait_group(m: Machine, op: Op) -> Act:
  copies, n = _copies(m), op.inst.operands[0]
  assert isinstance(n, int)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    below = copies.committed[threads] - n
    copies.complete(threads, below)
    some = below > 0
    if m.races is not None and some.any():
      m.races.copy_wait(threads[some], copies.marks[threads[some], (below[some] - 1) % _RING])
  return act


@effect(isa.CP_ASYNC_WAIT_ALL)
def _wait_all(m: Machine, op: Op) -> Act:
  copies = _copies(m)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    copies.complete(threads, copies.committed[threads] + 1)
    if m.races is not None:
      m.races.copy_wait(threads, m.races.copy_mark(threads))
  return act


class _Arrival:
  """cp.async.mbarrier.arrive: when the threads' copies so far are done, they arrive."""

  def __init__(self, m: Machine, op: Op, bar: Mbarrier, threads: np.ndarray, clock: Any):
    self.machine, self.op, self.bar, self.threads, self.clock = m, op, bar, threads, clock
    self.eager = m.adversary.eager()
    copies = _copies(m)
    self.due = [c for c in copies.pending if np.isin(c.threads, threads).any()]
    for copy in self.due:
      copy.awaited = True

  def complete(self) -> None:
    copies = _copies(self.machine)
    for copy in self.due:
      if copy in copies.pending:                 # whole copies: a strand issues and arrives together
        copy.perform(self.machine, np.ones(len(copy.threads), bool))
        copies.pending.remove(copy)
    self.bar.release(self.clock)
    self.bar.arrive(len(self.threads))

  def describe(self) -> str:
    return f"cp.async of threads {ranges(self.threads.tolist())}, which will arrive at {self.bar}"


@effect(isa.CP_ASYNC_MBARRIER_ARRIVE)
def _mbarrier_arrive(m: Machine, op: Op) -> Act:
  noinc = op.inst.mods["noinc"]
  _copies(m)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for bar, mine in _each(m, op, threads, at):
      clock = m.races.copy_clock(mine, m.races.copy_mark(mine)) if m.races is not None else None
      if not noinc:
        bar.pending += len(mine)
      m.events.append(_Arrival(m, op, bar, mine, clock))
  return act
