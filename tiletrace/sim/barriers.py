"""Named barriers of a CTA and the barrier of a cluster (PTX ISA 9.7.13: bar, barrier.cluster)."""
from __future__ import annotations

from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.sim.faults import Violation, ranges
from tiletrace.sim.machine import Machine
from tiletrace.sim.program import Op
from tiletrace.sim.strands import WARP, Strand
from tiletrace.sim.tables import Act, effect


class NamedBarrier:
  """One of the sixteen barriers of a CTA.

  Attributes:
    expected: threads of the round that has begun; 0 between rounds.
    arrived, waiting: threads that came, and those of them that bar.sync.
    rounds: how often it completed.
  """

  def __init__(self, name: str):
    self.name, self.rounds, self.expected = name, 0, 0
    self.arrived: list[np.ndarray] = []
    self.waiting: list[np.ndarray] = []
    self.clock: Any = None

  def come(self, m: Machine, threads: np.ndarray, expected: int, sync: bool) -> bool:
    """Threads arrive; whether the round is complete.

    Raises:
      Violation: a number of threads that differs from the round's, or too many threads.
    """
    if expected % WARP or not 0 < expected <= m.cta_threads:
      raise Violation("barrier count", f"{self.name} for {expected} threads: a multiple of 32 up to {m.cta_threads} is "
                      "allowed", threads=threads)
    if self.expected and self.expected != expected:
      raise Violation("barrier count", f"{self.name} for {expected} threads, where threads "
                      f"{ranges(np.concatenate(self.arrived).tolist())} came for {self.expected}", threads=threads)
    self.expected = expected
    self.arrived.append(threads)
    if sync:
      self.waiting.append(threads)
    if m.races is not None and not sync:
      clock = m.races.release(threads)
      self.clock = clock if self.clock is None else m.races.merge(self.clock, clock)
    count = sum(map(len, self.arrived))
    if count > expected:
      raise Violation("barrier count", f"{self.name} counts {expected} threads and {count} came: "
                      f"{ranges(np.concatenate(self.arrived).tolist())}", threads=threads)
    if count < expected:
      return False
    if self.waiting and m.races is not None:
      waiting = np.sort(np.concatenate(self.waiting))
      m.races.barrier(waiting)
      if self.clock is not None:
        m.races.acquire(waiting, self.clock)
    self.expected, self.arrived, self.waiting, self.clock = 0, [], [], None
    self.rounds += 1
    m.changed = True
    return True


class _Wait:
  def __init__(self, barrier: NamedBarrier):
    self.barrier, self.round = barrier, barrier.rounds

  def ready(self) -> bool:
    return self.barrier.rounds > self.round

  def describe(self) -> str:
    b = self.barrier
    came = np.concatenate(b.arrived).tolist() if b.arrived else []
    return f"{b.name}: {len(came)} of {b.expected} threads have come ({ranges(came)})"


class _Barriers:
  def __init__(self, m: Machine):
    self.machine = m
    self.named: dict[tuple[int, int], NamedBarrier] = {}
    self.cluster, self.cluster_clock = NamedBarrier("the cluster's barrier"), None
    self.cluster_arrived = np.zeros(m.threads, bool)
    self.cluster_round = np.zeros(m.threads, int)         # in which each thread arrived
    m.on_start.append(self.reset)
    m.on_end.append(self.check)

  def reset(self) -> None:
    self.named.clear()
    self.cluster, self.cluster_clock = NamedBarrier("the cluster's barrier"), None
    self.cluster_arrived[...] = False

  def check(self) -> None:
    for barrier in self.named.values():
      if barrier.arrived:
        came = np.concatenate(barrier.arrived)
        raise Violation("barrier count", f"at the end {len(came)} of {barrier.expected} threads have come to "
                        f"{barrier.name}", threads=came)


def _of(m: Machine) -> _Barriers:
  return m.unit(_Barriers)


def _groups(m: Machine, threads: np.ndarray, ids: np.ndarray, counts: np.ndarray
            ) -> list[tuple[int, int, int, np.ndarray]]:
  """[(CTA, barrier, count, threads)]."""
  if len(ids) == 1 and len(counts) == 1 and m.ctas == 1:
    return [(0, int(ids[0]), int(counts[0]), threads)]
  ids, counts = np.broadcast_to(ids, threads.shape), np.broadcast_to(counts, threads.shape)
  keys = np.stack([m.rank[threads], ids, counts], 1).astype(np.int64)
  return [(int(key[0]), int(key[1]), int(key[2]), threads[(keys == key).all(1)]) for key in np.unique(keys, axis=0)]


@effect(isa.BAR_SYNC, isa.BAR_SYNC_ALL, isa.BAR_ARRIVE)
def _bar(m: Machine, op: Op) -> Act:
  barriers, slots, operands = _of(m), op.inst.form.slots, op.inst.operands
  number = m.registers.source(operands[0], slots[0])
  count = m.registers.source(operands[1], slots[1]) if len(slots) > 1 else None
  every = np.array([m.cta_threads])
  sync = op.inst.row is not isa.BAR_ARRIVE

  def act(s: Strand, threads: np.ndarray, at: Any) -> bool | None:
    m.demand_converged(s, threads, op.inst.form.head)
    stay, go = [], []
    for cta, n, expected, group in _groups(m, threads, number[at], every if count is None else count[at]):
      if not 0 <= n < 16:
        raise Violation("barrier count", f"there is no barrier {n}", threads=group)
      barrier = barriers.named.setdefault((cta, n), NamedBarrier(f"barrier {n}"))
      before = barrier.rounds
      if barrier.come(m, group, expected, sync) or not sync:
        go.append(group)
      else:
        stay.append((group, barrier))
      assert barrier.rounds - before <= 1
    if not stay:
      return None
    for group, barrier in stay:
      m.block(Strand(s.pc + 1, group, s.frames), _Wait(barrier))
    if go:
      m.ready.append(Strand(s.pc + 1, np.sort(np.concatenate(go)), s.frames))
    return True
  return act


@effect(isa.CLUSTER_ARRIVE)
def _cluster_arrive(m: Machine, op: Op) -> Act:
  barriers = _of(m)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    if op.inst.mods["aligned"]:
      m.demand_converged(s, threads, op.inst.form.head)
    if barriers.cluster_arrived[threads].any():
      raise Violation("barrier count", "a thread arrives twice at the cluster's barrier without a wait between",
                      threads=threads[barriers.cluster_arrived[threads]])
    barriers.cluster_arrived[threads] = True
    b = barriers.cluster
    barriers.cluster_round[threads] = b.rounds
    b.expected = m.threads
    b.arrived.append(threads)
    if m.races is not None and op.inst.mods["sem"] != "relaxed":
      clock = m.races.release(threads)
      b.clock = clock if b.clock is None else m.races.merge(b.clock, clock)
    if sum(map(len, b.arrived)) == m.threads:
      b.arrived, barriers.cluster_clock, b.clock = [], b.clock, None
      b.rounds += 1
      m.changed = True
  return act


@effect(isa.CLUSTER_WAIT)
def _cluster_wait(m: Machine, op: Op) -> Act:
  barriers = _of(m)

  def act(s: Strand, threads: np.ndarray, at: Any) -> bool | None:
    if op.inst.mods["aligned"]:
      m.demand_converged(s, threads, op.inst.form.head)
    b = barriers.cluster
    if not barriers.cluster_arrived[threads].all():
      raise Violation("barrier count", "a thread waits for the cluster's barrier without having arrived",
                      threads=threads[~barriers.cluster_arrived[threads]])
    if (barriers.cluster_round[threads] == b.rounds).any():
      return m.block(s, _Wait(b))
    if m.races is not None and barriers.cluster_clock is not None:
      m.races.acquire(threads, barriers.cluster_clock)
    barriers.cluster_arrived[threads] = False
    return None
  return act
