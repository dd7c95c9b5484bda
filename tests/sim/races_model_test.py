"""The race detector against the definition: sets of events that happened before, and every pair of accesses compared.

The detector keeps the last write and the reads since; up to the first finding that says as much as the full history.
"""
from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings, strategies as st

from tiletrace.sim import races
from tiletrace.sim.races import NOTHING, Clock, RaceDetector
from tiletrace.sim.shadow import Shadow

THREADS, CELLS, BARRIERS = 4, 3, 2
UNORDERED = {races.RACE, races.OVERWRITTEN_WHILE_READ, races.NOT_WAITED_FOR}


@dataclasses.dataclass
class Access:
  event: int
  cell: int
  writes: bool
  generic: bool


class Model:
  """Happened-before as sets of event numbers; `seen` is the part that the asynchronous proxy sees."""

  def __init__(self):
    self.known: list[set[int]] = [set() for _ in range(THREADS)]
    self.seen: list[set[int]] = [set() for _ in range(THREADS)]
    self.phases: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in range(BARRIERS)]
    self.accesses: list[Access] = []
    self.agents: list[tuple[int, set[int], set[int]]] = []
    self.events = 0

  def event(self) -> int:
    self.events += 1
    return self.events

  def access(self, cell: int, writes: bool, known: set[int], seen: set[int] | None, event: int) -> str | None:
    """The kind of fault against any earlier access: "unordered", "unfenced" or None."""
    faults = set()
    for a in self.accesses:
      if a.cell != cell or not (a.writes or writes):
        continue
      if a.event not in known:
        faults.add("unordered")
      elif seen is not None and a.generic and a.event not in seen:
        faults.add("unfenced")
    self.accesses.append(Access(event, cell, writes, seen is None))
    return "unordered" if "unordered" in faults else next(iter(faults), None)

  def by_thread(self, t: int, cell: int, writes: bool) -> str | None:
    event = self.event()
    fault = self.access(cell, writes, self.known[t], None, event)
    self.known[t].add(event)
    return fault

  def by_agent(self, t: int, cell: int, writes: bool) -> str | None:
    event = self.event()
    self.agents.append((event, set(self.known[t]), set(self.seen[t])))
    return self.access(cell, writes, self.known[t] | {event}, self.seen[t], event)


def step(model: Model, det: RaceDetector, state: dict, op: tuple) -> str | None:
  name, t, x = op
  threads = np.asarray([t])
  address = np.asarray([x % CELLS * 16])
  if name in ("read", "write"):
    getattr(det, name)(threads, address, 16, name)
    return model.by_thread(t, x % CELLS, name == "write")
  if name in ("tma load", "tma store"):
    agent = det.issue(threads, name)
    (det.agent_write if name == "tma load" else det.agent_read)(agent, address, 16, name)
    state["agents"].append(agent)
    return model.by_agent(t, x % CELLS, name == "tma load")
  if name == "wait" and model.agents:
    which = x % len(model.agents)
    det.acquire(threads, det.complete(state["agents"][which]))
    model.known[t].add(model.agents[which][0])
  elif name == "fence":
    det.proxy_fence(threads)
    model.seen[t] |= model.known[t]
  elif name == "barrier":
    some = sorted({t, x % THREADS, (t + 1) % THREADS})
    det.barrier(np.asarray(some))
    for sets in (model.known, model.seen):
      union = set().union(*(sets[i] for i in some))
      for i in some:
        sets[i] |= union
  elif name == "arrive":
    b = x % BARRIERS
    state["phases"][b] = det.merge(state["phases"][b], det.release(threads))
    model.phases[b] = (model.phases[b][0] | model.known[t], model.phases[b][1] | model.seen[t])
  elif name == "acquire":
    b = x % BARRIERS
    det.acquire(threads, state["phases"][b])
    model.known[t] |= model.phases[b][0]
    model.seen[t] |= model.phases[b][1]
  return None


NAMES = ("read", "write", "tma load", "tma store", "wait", "fence", "barrier", "arrive", "acquire")
OPS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, THREADS - 1), st.integers(0, 11)), min_size=2,
               max_size=40)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(OPS)
def test_the_first_finding_is_the_first_conflict_by_definition(ops):
  model, det = Model(), RaceDetector(THREADS, [Shadow(0, CELLS * 16)])
  phases: list[Clock] = [NOTHING] * BARRIERS
  state = {"agents": [], "phases": phases}
  for op in ops:
    fault = step(model, det, state, op)
    kinds = {f.kind for f in det.findings}
    if fault is None:
      assert not kinds, op
    elif fault == "unfenced":
      assert kinds == {races.MISSING_PROXY_FENCE}, op
    else:
      assert kinds & UNORDERED, op
    if fault is not None:
      return
