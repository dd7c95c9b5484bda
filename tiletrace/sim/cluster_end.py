"""A CTA's shared memory ends with it: what others of its cluster do there must be ordered before.

A cluster's barrier before the end is the usual way. Found in the order of events, however the CTAs happened to end.
"""
from __future__ import annotations

import numpy as np

from tiletrace.sim.faults import Violation
from tiletrace.sim.machine import Machine


class ClusterEnd:
  """Which threads have reached into other CTAs' shared memory.

  Attributes:
    last: int32 [CTAs, threads]: each thread's epoch when it last reached into that CTA; 0: never.
  """

  def __init__(self, m: Machine):
    self.machine = m
    self.last = np.zeros((m.ctas, m.threads), np.int32)
    m.on_start.append(lambda: self.last.fill(0))
    m.on_end.append(self.check)

  def reach(self, ranks: np.ndarray, threads: np.ndarray) -> None:
    """Thread threads[i] accesses shared memory of CTA ranks[i]."""
    m = self.machine
    if m.races is not None:
      away = ranks != m.rank[threads]
      self.last[ranks[away], threads[away]] = m.races.now(threads[away])

  def check(self) -> None:
    m = self.machine
    if m.races is None or m.ctas == 1:
      return
    for rank in range(m.ctas):
      mine = np.flatnonzero(m.rank == rank)
      late = np.flatnonzero(self.last[rank] > m.races.knowledge(mine)[:m.threads])
      late = np.union1d(late, m.races.unfinished(rank * m.shared.span, (rank + 1) * m.shared.span, mine))
      if len(late):
        raise Violation("out of bounds", f"CTA {rank} of the cluster may end, and its shared memory with it, before "
                        "others have accessed it for the last time", threads=late.tolist())


def cluster_end(m: Machine) -> ClusterEnd:
  return m.unit(ClusterEnd)
