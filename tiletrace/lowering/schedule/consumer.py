"""The consumers' program: copies become waits, gemms become groups, slots are released when their readers are done."""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import Atom, Block, Eqn, RefOperand, Var, prefixed, with_refs
from tiletrace.core.ops import control, elementwise, mma
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.schedule.asynchrony import (
  Pending,
  accesses,
  conflicts,
  pending_of,
  sink_casts,
  stays_in_flight,
)
from tiletrace.lowering.schedule.builder import Builder, RingState
from tiletrace.lowering.schedule.rings import Ring, Segment


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RingResources:
  """What a ring became: buffers with a leading slot dimension, and its two barrier arrays.

  `multicast`: copy -> axes of the grid along which the cluster's CTAs share it. A slot of a shared ring is free when
  the consumers of all CTAs have read theirs.
  """
  ring: Ring
  buffers: dict[Var, Var]
  full: Var
  empty: Var
  multicast: dict[Eqn, tuple[int, ...]] = dataclasses.field(default_factory=dict)

  def release(self, b: Builder, slot: Atom, arrivals: int) -> None:
    b.arrive(self.empty, slot, arrivals, cluster=bool(self.multicast))


@dataclasses.dataclass(slots=True, eq=False)
class _Group:
  """A wgmma group in flight and the rings whose slot it is the last reader of: (resources, state, slot)."""
  pending: Pending
  releases: list[tuple[RingResources, RingState, Atom]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Live:
  """A slot that has been waited for: views of the buffers are redirected to it.

  `by_threads`: threads read or change it themselves, so that all of a warpgroup must have done so before one of them
  releases it (the groups of wgmma belong to the warpgroup as a whole).
  """
  resources: RingResources
  state: RingState
  slot: Atom
  segment: Segment
  by_threads: bool


class Consumer:
  """Rewrites blocks of level-1 equations for the consuming warpgroups.

  Args:
    rings: resources of every ring. Empty: a kernel without a producer.
    states: this role's state of each ring.
    arrivals: how many warpgroups release a slot.
  """

  def __init__(self, rings: list[RingResources], states: dict[RingResources, RingState], arrivals: int, facts: Facts):
    self.rings, self.states, self.arrivals, self.facts = rings, states, arrivals, facts
    self._of: dict[Var, RingResources] = {v: r for r in rings for v in r.ring.buffers}
    self._pushes = {c for r in rings for s in r.ring.segments for c in s.copies}
    self._starts: dict[Eqn, list[tuple[RingResources, Segment]]] = {}
    for r in rings:
      for s in r.ring.segments:
        self._starts.setdefault(s.first_use, []).append((r, s))
    self.live: dict[Var, _Live] = {}
    self.notes: list[str] = []

  # ---- straight lines

  def block(self, block: Block) -> Block:
    """A block that leaves no group pending."""
    out: list[Eqn] = []
    groups: list[_Group] = []
    opened: list[_Live] = []
    block, defining = sink_casts(block)
    for eqn in block.eqns:
      if eqn in self._pushes:
        continue
      b = Builder(eqn.loc)
      for resources, segment in self._starts.get(eqn, ()):
        opened.append(self._acquire(b, resources, segment, block))
      conflicting = (i for i in reversed(range(len(groups))) if conflicts(defining.get(eqn, eqn), groups[i].pending))
      self._complete(b, groups, next(conflicting, -1))
      out += b.eqns
      group = self._equation(eqn, out)
      if group is not None:
        groups.append(group)
      done = [l for l in opened if l.segment.last_use is eqn]
      opened = [l for l in opened if l not in done]
      out += self._release_after(eqn, done, groups)
    b = Builder(block.eqns[-1].loc) if block.eqns else None
    if b is not None:
      self._complete(b, groups, len(groups) - 1)
      out += b.eqns
    return dataclasses.replace(block, eqns=tuple(out))

  def _acquire(self, b: Builder, resources: RingResources, segment: Segment, block: Block) -> _Live:
    state = self.states[resources]
    slot: Atom = state.slot(b)
    b.wait(resources.full, slot, state.phase(b))
    first, last = (block.eqns.index(e) for e in (segment.first_use, segment.last_use))
    live = _Live(resources, state, slot, segment, any(
        _touched_by_threads(e, resources.ring) for e in block.eqns[first:last + 1] if e not in self._pushes))
    for v in resources.ring.buffers:
      self.live[v] = live
    return live

  def _equation(self, eqn: Eqn, out: list[Eqn]) -> _Group | None:
    """Appends the rewritten equation; returns the group that it puts in flight."""
    if eqn.primitive is mma.gemm_p:
      out.append(self._redirect(eqn).replace(primitive=mma.gemm_async_p))
      return _Group(pending_of(eqn), [])
    if eqn.primitive.name == "for_loop" and stays_in_flight(eqn, self._pushes) and self._can_release_late(eqn):
      out += self._pipelined_gemm_loop(eqn)
      return None
    eqn = self._redirect(eqn)
    out.append(eqn.replace(blocks=tuple(map(self.block, eqn.blocks))) if eqn.blocks else eqn)
    return None

  def _can_release_late(self, loop: Eqn) -> bool:
    """Releasing one iteration late needs a second slot: with one, the producer would wait for what it holds up."""
    rings = [r for e in loop.blocks[0].eqns for r, _ in self._starts.get(e, ())]
    single = [r.ring.name for r in rings if r.ring.slots == 1]
    if single:
      self.notes.append(f"{loop.loc.short()}  each gemm waits for itself: ring {single[0]} has one slot (num_stages=1)")
    return not single

  def _release_after(self, eqn: Eqn, done: list[_Live], groups: list[_Group]) -> list[Eqn]:
    """Slots whose last use was `eqn`: released now, or when the newest group that reads them is complete."""
    b = Builder(eqn.loc)
    if any(live.by_threads for live in done):
      _finish_reading(b)
    for live in done:
      buffers = set(live.resources.ring.buffers)
      reader = next((g for g in reversed(groups) if buffers & g.pending.shared), None)
      if reader is not None:
        reader.releases.append((live.resources, live.state, live.slot))
      else:
        live.resources.release(b, live.slot, self.arrivals)
      live.state.advance(b)
    return b.eqns

  def _complete(self, b: Builder, groups: list[_Group], upto: int) -> None:
    """Waits until groups[0..upto] are complete; what a group was the last to read is released before the next one is
    waited for, so that its refill is on the way meanwhile."""
    for i, group in enumerate(groups[:upto + 1]):
      if group.releases or i == upto:
        b.bind(mma.wgmma_wait_p, (), {"n": len(groups) - 1 - i})
      for resources, _, slot in group.releases:
        resources.release(b, slot, self.arrivals)
    del groups[:upto + 1]

  def _redirect(self, eqn: Eqn) -> Eqn:
    """Views of ring buffers become views of the slot that is live."""
    if not any(r.root in self._of for r in eqn.refs):
      return eqn
    refs = []
    for ref in eqn.refs:
      live = self.live.get(ref.root)
      if live is None:
        refs.append(ref)
        continue
      view, dynamic = prefixed(ref.view, live.slot)
      refs.append(RefOperand(live.resources.buffers[ref.root], view, (*dynamic, *ref.dyn)))
    return with_refs(eqn, refs)

  # ---- the gemm loop, with a group in flight over the back edge

  def _pipelined_gemm_loop(self, loop: Eqn) -> list[Eqn]:
    """Each iteration waits for the groups of the one before, and releases its slots one iteration late."""
    body, lo = loop.blocks[0], loop.values[0]
    index = body.invars[0]
    out: list[Eqn] = []
    opened: list[_Live] = []
    gemms = sum(e.primitive is mma.gemm_p for e in body.eqns)
    seen = 0
    for eqn in body.eqns:
      if eqn in self._pushes:
        continue
      b = Builder(eqn.loc)
      for resources, segment in self._starts.get(eqn, ()):
        opened.append(self._acquire(b, resources, segment, body))
      out += b.eqns
      rewritten = self._redirect(eqn)
      if eqn.primitive is mma.gemm_p:
        seen += 1
        out.append(rewritten.replace(primitive=mma.gemm_async_p))
        if seen == gemms:
          b = Builder(eqn.loc)
          b.bind(mma.wgmma_wait_p, (), {"n": gemms})
          self._release_previous(b, opened, b.op(elementwise.gt_p, index, lo) if opened else None)
          for live in opened:
            live.state.advance(b)
          out += b.eqns
      else:
        blocks = tuple(map(self.block, rewritten.blocks))
        out.append(rewritten.replace(blocks=blocks) if blocks else rewritten)
    after = Builder(loop.loc)
    after.bind(mma.wgmma_wait_p, (), {"n": 0})
    trips = self._may_be_empty(loop)
    if opened and trips:
      ran = after.op(elementwise.lt_p, *loop.values[:2])
      self._release_previous(after, opened, ran)
    elif opened:
      self._release_previous(after, opened, None)
    return [loop.replace(blocks=(dataclasses.replace(body, eqns=tuple(out)),)), *after.eqns]

  def _release_previous(self, b: Builder, opened: list[_Live], condition: Atom | None) -> None:
    if any(live.by_threads for live in opened):
      _finish_reading(b)
    inner = b.inner() if condition is not None else b
    for live in opened:
      slot = live.state.slot(inner)
      slots = live.state.slots
      before = inner.select(inner.op(elementwise.eq_p, slot, 0), slots - 1, inner.sub(slot, 1))
      live.resources.release(inner, before, self.arrivals)
    if condition is not None:
      b.when(condition, inner.block())

  def _may_be_empty(self, loop: Eqn) -> bool:
    lo, hi = (self.facts[a] for a in loop.values[:2])
    return lo.hi >= hi.lo


def _finish_reading(b: Builder) -> None:
  """Every thread of the warpgroup has read the slot, also as TMA sees it, which refills it: without the fence the
  arrival overtakes loads that are on their way (seen on an H200), and the sync does not wait for them."""
  b.fence()
  b.sync("warpgroup")


def _touched_by_threads(eqn: Eqn, ring: Ring) -> bool:
  """Whether an equation, blocks included, reads the ring other than by wgmma, or changes what is in its slot; but for
  branches that change a slot last, which end with a fence and a sync of their own (syncs.py)."""
  buffers = set(ring.buffers)
  if eqn.blocks:
    return any(_touched_in(b, ring) and not (eqn.primitive is control.cond_p and _changed_last(b, buffers))
               for b in eqn.blocks)
  reads, writes = accesses(eqn)
  return eqn.primitive is not mma.gemm_p and bool((reads | writes) & buffers)


def _touched_in(block: Block, ring: Ring) -> bool:
  return any(_touched_by_threads(e, ring) for e in block.eqns)


def _changed_last(block: Block, buffers: set[Var]) -> bool:
  """The last of the block's own accesses to the buffers by threads is a write."""
  for eqn in reversed(block.eqns):
    reads, writes = accesses(eqn)
    if (reads | writes) & buffers:
      return not eqn.blocks and eqn.primitive is not mma.gemm_p and bool(writes & buffers)
  return False
