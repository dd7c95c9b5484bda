"""mbarriers: arrivals, transaction bytes, phases, waits; and fences (PTX ISA 9.7.13)."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Addr, Reg, Symbol
from tiletrace.sim.cluster_end import cluster_end
from tiletrace.sim.control import symbol_row
from tiletrace.sim.faults import Violation
from tiletrace.sim.machine import Machine
from tiletrace.sim.memory import RESERVED
from tiletrace.sim.order import global_order
from tiletrace.sim.program import Op
from tiletrace.sim.registers import Row
from tiletrace.sim.strands import Strand
from tiletrace.sim.tables import Act, effect

_MOST_TX = (1 << 20) - 1         # bytes, PTX ISA 9.7.13, mbarrier: ranges of the counts
_MOST_COUNT = (1 << 20) - 1


class Mbarrier:
  """One mbarrier object.

  Attributes:
    address: in its CTA. offset: in the cluster's shared memory.
    count: arrivals of a phase. pending: those that are missing in this one.
    tx: bytes expected minus bytes arrived.
    phase: phases completed.
    clock: what the arrivals of this phase release; `done` that of the phase before.
    sites: instructions that have arrived here, or brought bytes.
  """

  def __init__(self, m: Machine, offset: int, count: int, op: Op):
    self.machine, self.offset, self.count, self.op = m, offset, count, op
    self.address, self.cta = offset % m.shared.span, offset // m.shared.span
    self.pending, self.tx, self.phase = count, 0, 0
    self.clock: Any = None
    self.done: Any = None
    self.sites: dict[Op, None] = {}

  def __str__(self) -> str:
    return f"mbarrier {self.address:#x}" + (f" of CTA {self.cta} of the cluster" if self.machine.ctas > 1 else "")

  @property
  def state(self) -> str:
    come = f"{self.count - self.pending} of {self.count} arrivals"
    left = f", {self.tx} bytes outstanding" if self.tx else ""
    return f"{self}, phase {self.phase} (parity {self.phase & 1}): {come}{left}"

  @property
  def known_sites(self) -> str:
    """Where arrivals have come from so far: what would release a waiter."""
    if not self.sites:
      return "nothing has arrived at it so far"
    return "it was reached from PTX line " + ", ".join(
        f"{op.line}{'' if op.inst.loc is None else f' ({op.inst.loc.short()})'}" for op in self.sites)

  def release(self, clock: Any) -> None:
    """What arrives is known to those who wait for this phase."""
    races = self.machine.races
    if races is not None and clock is not None:
      self.clock = clock if self.clock is None else races.merge(self.clock, clock)

  def expect(self, tx: int) -> None:
    self.tx += tx
    self._in_range()

  def arrive(self, n: int) -> None:
    if n > self.pending:
      raise Violation("barrier count", f"{n} more arrival{'s' * (n > 1)} at {self.state}",
                      addresses=[self.address])
    self.pending -= n
    self._advance()

  def complete_tx(self, nbytes: int) -> None:
    self.tx -= nbytes
    self._in_range()
    self._advance()

  def _in_range(self) -> None:
    if abs(self.tx) > _MOST_TX:
      raise Violation("transaction bytes", f"{self} counts {self.tx} bytes, beyond ±{_MOST_TX}",
                      addresses=[self.address])

  def _advance(self) -> None:
    if self.pending == 0 and self.tx == 0:
      self.phase += 1
      self.pending, self.done, self.clock = self.count, self.clock, None
      self.machine.changed = True

  def passed(self, parity: int) -> bool:
    """Whether the phase of this parity is complete: the current one has the other parity."""
    return self.phase & 1 != parity


class Mbarriers:
  """All mbarriers of a cluster, by offset. `low`, `high` bound them: stores elsewhere need no look."""

  def __init__(self, m: Machine):
    self.machine = m
    self.at: dict[int, Mbarrier] = {}
    self.low, self.high = 1 << 62, -1
    m.on_start.append(self.reset)
    m.on_end.append(self.check)

  def reset(self) -> None:
    self.at.clear()
    self.low, self.high = 1 << 62, -1

  def find(self, offset: int) -> Mbarrier:
    found = self.at.get(offset)
    if found is None:
      raise Violation("mbarrier", f"there is no mbarrier at shared address {offset % self.machine.shared.span:#x}: not "
                      "initialised", addresses=[offset % self.machine.shared.span])
    return found

  def check_store(self, offsets: np.ndarray, nbytes: int) -> None:
    """Data must not overwrite an mbarrier."""
    if len(offsets) and int(offsets.min()) < self.high and int(offsets.max()) + nbytes > self.low:
      for offset in self.at:
        hit = (offsets < offset + 8) & (offsets + nbytes > offset)
        if hit.any():
          raise Violation("mbarrier", f"a store overwrites {self.at[offset]}", addresses=[self.at[offset].address])

  def check(self) -> None:
    for bar in self.at.values():
      if bar.tx:
        raise Violation("transaction bytes", f"at the end: {bar.state}", addresses=[bar.address])
      if bar.pending != bar.count:
        raise Violation("barrier count", f"at the end: {bar.state}", addresses=[bar.address])


def mbarriers(m: Machine) -> Mbarriers:
  return m.unit(Mbarriers)


def shared_addresses(m: Machine, x: Any, slot: Any) -> tuple[Row, int]:
  """An address operand in shared memory: (row of its base, bytes to add)."""
  assert isinstance(x, Addr)
  if isinstance(x.base, Symbol):
    return symbol_row(m, x.base, np.uint32), x.offset
  return m.registers.source(x.base, slot), x.offset


def window(row: Row, offset: int, threads: np.ndarray, at: Any) -> np.ndarray:
  """int64 addresses in the cluster's window, [n]: the CTA's rank above bit 23."""
  value = row[at].astype(np.int64) + offset
  return value if len(value) == len(threads) else np.broadcast_to(value, threads.shape)


def local(m: Machine, row: Row, offset: int, threads: np.ndarray, at: Any) -> np.ndarray:
  """int64 shared::cta addresses within each thread's own CTA, [n].

  Raises:
    Violation: an address of another CTA.
  """
  addresses = window(row, offset, threads, at)
  if m.ctas == 1:
    return addresses
  far = addresses >> 24 != m.rank[at]
  if far.any():
    raise Violation("out of bounds", f"shared::cta address {int(addresses[far][0]):#x} lies in another CTA",
                    threads=threads[far], addresses=addresses[far])
  return addresses & 0xFF_FFFF


def clustered(m: Machine, addresses: np.ndarray, threads: np.ndarray) -> np.ndarray:
  """Addresses in the cluster's window -> offsets in its shared memory.

  Raises:
    Violation: there is no such CTA, or it has ended.
  """
  ranks = addresses >> 24
  if (ranks >= m.ctas).any():
    raise Violation("out of bounds", f"shared::cluster address {int(addresses.max()):#x} names CTA {int(ranks.max())} "
                    f"of a cluster of {m.ctas}", threads=threads[ranks >= m.ctas])
  ended = ~np.asarray(m.alive.reshape(m.ctas, -1).any(1))[ranks]
  if ended.any():
    raise Violation("out of bounds", f"CTA {int(ranks[ended][0])} of the cluster has ended, its shared memory is gone",
                    threads=threads[ended] if len(threads) == len(ended) else threads, addresses=addresses[ended])
  cluster_end(m).reach(ranks, threads)
  return ranks * m.shared.span + (addresses & 0xFF_FFFF)


def _each(m: Machine, op: Op, threads: np.ndarray, at: Any, remote: bool = False
          ) -> Iterator[tuple[Mbarrier, np.ndarray]]:
  """The barriers that an instruction names, each with its threads."""
  slot = next(s for s in op.inst.form.slots if s.name == "bar")
  x = op.inst.operands[op.inst.form.slots.index(slot)]
  row, offset = shared_addresses(m, x, slot)
  if remote:
    offsets = clustered(m, window(row, offset, threads, at), threads)
    m.shared.check(offsets % m.shared.span, 8, 8, threads)
  else:
    addresses = local(m, row, offset, threads, at)
    m.shared.check(addresses, 8, 8, threads)
    offsets = addresses + m.shared_start[at]
  bars = mbarriers(m)
  for value in dict.fromkeys(offsets.tolist()):
    mine = threads if len(threads) == 1 else threads[offsets == value]
    bar = bars.find(value)
    if m.races is not None:
      m.races.mbarrier_use(mine, value, op)
    bar.sites[op] = None
    yield bar, mine


def value_of(m: Machine, op: Op, name: str) -> Row:
  """An operand by the name of its slot."""
  slot = next(s for s in op.inst.form.slots if s.name == name)
  return m.registers.source(op.inst.operands[op.inst.form.slots.index(slot)], slot)


@effect(isa.MBARRIER_INIT)
def _init(m: Machine, op: Op) -> Act:
  bars, slots = mbarriers(m), op.inst.form.slots
  row, offset = shared_addresses(m, op.inst.operands[0], slots[0])
  count = m.registers.source(op.inst.operands[1], slots[1])

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    addresses = local(m, row, offset, threads, at)
    m.shared.check(addresses, 8, 8, threads)
    counts = np.broadcast_to(count[at], threads.shape)
    for t, address, n in zip(threads.tolist(), addresses.tolist(), counts.tolist()):
      if not 1 <= n <= _MOST_COUNT:
        raise Violation("barrier count", f"mbarrier.init with {n} arrivals", threads=[t])
      where = address + int(m.shared_start[t])
      if where in bars.at:
        raise Violation("mbarrier", f"{bars.at[where]} is initialised again while it is one", threads=[t])
      bars.at[where] = Mbarrier(m, where, n, op)
      bars.low, bars.high = min(bars.low, where), max(bars.high, where + 8)
      m.shared.unmark(where, where + 8)
      if m.races is not None:
        m.races.mbarrier_init(t, where, op)
  return act


@effect(isa.MBARRIER_INVAL)
def _inval(m: Machine, op: Op) -> Act:
  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for bar, _ in _each(m, op, threads, at):
      if bar.tx or bar.pending != bar.count:
        raise Violation("barrier count", f"mbarrier.inval of {bar.state}", threads=threads)
      del mbarriers(m).at[bar.offset]
  return act


# One arrival, with whatever scope; those in shared::cluster may be at another CTA's barrier.
_ARRIVALS = [row for row in isa.ROWS.values()
             if row.template.startswith("mbarrier.arrive.") and row.operands == "_, [bar:b32]"]


@effect(*_ARRIVALS)
def _arrive(m: Machine, op: Op) -> Act:
  remote = "shared::cluster" in op.inst.form.head

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for bar, mine in _each(m, op, threads, at, remote):
      if m.races is not None:
        bar.release(m.races.release(mine))
      bar.arrive(len(mine))
  return act


@effect(isa.MBARRIER_ARRIVE_COUNT, isa.MBARRIER_ARRIVE_REMOTE_COUNT)
def _arrive_count(m: Machine, op: Op) -> Act:
  remote, count = op.inst.row is isa.MBARRIER_ARRIVE_REMOTE_COUNT, value_of(m, op, "count")

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for bar, mine in _each(m, op, threads, at, remote):
      if m.races is not None:
        bar.release(m.races.release(mine))
      bar.arrive(int(np.broadcast_to(count[mine], mine.shape).sum()))
  return act


@effect(isa.MBARRIER_ARRIVE_EXPECT_TX, isa.MBARRIER_ARRIVE_EXPECT_TX_REMOTE, isa.MBARRIER_EXPECT_TX)
def _expect(m: Machine, op: Op) -> Act:
  remote, tx = op.inst.row is isa.MBARRIER_ARRIVE_EXPECT_TX_REMOTE, value_of(m, op, "tx")
  arrives = op.inst.row is not isa.MBARRIER_EXPECT_TX

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for bar, mine in _each(m, op, threads, at, remote):
      for n in np.broadcast_to(tx[mine], mine.shape).tolist():
        if arrives and m.races is not None:
          bar.release(m.races.release(mine))
        bar.expect(n)
        if arrives:
          bar.arrive(1)
  return act


class _Wait:
  """Threads wait for a phase of one of several mbarriers to complete."""

  def __init__(self, waits: list[tuple[Mbarrier, int]]):
    self.waits = waits

  def ready(self) -> bool:
    return any(bar.passed(parity) for bar, parity in self.waits)

  def describe(self) -> str:
    return " or ".join(f"the end of the phase of parity {parity} of {bar.state}; {bar.known_sites}"
                       for bar, parity in self.waits)


@effect(isa.MBARRIER_TRY_WAIT, isa.MBARRIER_TEST_WAIT)
def _wait(m: Machine, op: Op) -> Act:
  p, slot = op.inst.operands[0], op.inst.form.slots[0]
  parity, testing = value_of(m, op, "parity"), op.inst.row is isa.MBARRIER_TEST_WAIT
  assert isinstance(p, Reg)
  bars = mbarriers(m)
  row, offset = shared_addresses(m, op.inst.operands[1], op.inst.form.slots[1])

  def act(s: Strand, threads: np.ndarray, at: Any) -> bool | None:
    addresses = local(m, row, offset, threads, at)
    m.shared.check(addresses, 8, 8, threads)
    offsets, parities = addresses + m.shared_start[at], np.broadcast_to(parity[at], threads.shape)
    waits: dict[tuple[int, int], np.ndarray] = {}
    for key in dict.fromkeys(zip(offsets.tolist(), parities.tolist())):
      waits[key] = (offsets == key[0]) & (parities == key[1])
    done = np.zeros(len(threads), bool)
    gives_up = not testing and not s.retried and m.adversary.fails()
    open_: list[tuple[Mbarrier, int]] = []
    for (where, par), mine in waits.items():
      if par > 1:
        raise Violation("mbarrier", f"a wait for the phase of parity {par}", threads=threads[mine])
      bar = bars.find(where)
      if m.races is not None:
        m.races.mbarrier_use(threads[mine], where, op)
      if not bar.passed(par):
        open_.append((bar, par))
        continue
      if gives_up:
        continue
      done[mine] = True
      if m.races is not None and bar.done is not None:
        m.races.acquire(threads[mine], bar.done)
    if not done.any() and open_ and not testing and not gives_up:
      return m.block(s, _Wait(open_))
    s.retried = gives_up
    m.registers.assign(p, slot, done, at)
    if not done.all() and open_ and not testing and not gives_up:
      return _part(m, s, threads, done, open_)
    return None
  return act


def _part(m: Machine, s: Strand, threads: np.ndarray, done: np.ndarray, open_: list[tuple[Mbarrier, int]]
          ) -> bool | None:
  """Warps none of whose lanes are done wait; the others go on with what they got."""
  warps = threads // 32
  waiting = ~np.isin(warps, warps[done])
  if not waiting.any() or len(threads) != len(s.threads):
    return None
  m.block(Strand(s.pc, threads[waiting], s.frames), _Wait(open_))
  m.ready.append(Strand(s.pc + 1, threads[~waiting], s.frames))
  return True


# ---- fences


@effect(isa.FENCE_PROXY_ASYNC)
def _proxy_fence(m: Machine, op: Op) -> Act:
  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    if m.races is not None:
      m.races.proxy_fence(threads, op.inst.mods["space"].partition("::")[0])
  return act


@effect(isa.FENCE_MBARRIER_INIT)
def _mbarrier_fence(m: Machine, op: Op) -> Act:
  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    if m.races is not None:
      m.races.mbarrier_fence(threads)
  return act


@effect(isa.FENCE)
def _fence(m: Machine, op: Op) -> Act:
  order = global_order(m)
  return lambda s, threads, at: order.fence(threads, op.inst.mods["scope"])


@effect(isa.FENCE_PROXY_TENSORMAP, isa.FENCE_PROXY_TENSORMAP_RELEASE)
def _tensormap_fence(m: Machine, op: Op) -> Act:
  """Tensor maps are parameters here and never change."""
  return lambda s, threads, at: None


assert RESERVED % 8 == 0
