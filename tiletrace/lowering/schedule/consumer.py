"""The consumers' program: copies become waits, gemms become groups, slots are released when their readers are done."""
from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Set

from tiletrace.core.graph import Atom, Block, Eqn, Literal, RefOperand, Var, prefixed, walk, with_refs
from tiletrace.core.ops import control, elementwise, mma
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.schedule.asynchrony import gemms_in, sink_casts, stays_in_flight
from tiletrace.lowering.schedule.builder import Builder, RingState
from tiletrace.lowering.schedule.flight import Flight, Group, Held, needed_at
from tiletrace.lowering.schedule.rings import Segment
from tiletrace.lowering.schedule.slots import RingResources, touched_by_threads


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Live:
  """A slot that has been waited for: views of the buffers are redirected to it.

  `by_threads`: threads read or change it themselves, so that all of them must have done so before one releases it for
  its warp, or its warpgroup (the groups of wgmma belong to the warpgroup as a whole).
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
    fits: whether a thread's registers hold these operands of gemms beside everything else.
    sharing: what may lie in the same registers (asynchrony.py).
  """

  def __init__(self, rings: list[RingResources], states: dict[RingResources, RingState], arrivals: int, facts: Facts,
               fits: Callable[[list[Var]], bool], sharing: Mapping[Var, Set[Var]]):
    self.rings, self.states, self.arrivals, self.facts, self.fits = rings, states, arrivals, facts, fits
    self.sharing = sharing
    self._of: dict[Var, RingResources] = {v: r for r in rings for v in r.ring.buffers}
    self._pushes = {c for r in rings for s in r.ring.segments for c in s.copies}
    self._starts: dict[Eqn, list[tuple[RingResources, Segment]]] = {}
    for r in rings:
      for s in r.ring.segments:
        self._starts.setdefault(s.first_use, []).append((r, s))
    self.live: dict[Var, _Live] = {}
    self.notes: list[str] = []

  # ---- straight lines

  def block(self, block: Block, *, settled: bool = False, at_end: Callable[[Group], None] | None = None) -> Block:
    """A block that leaves no group pending.

    Args:
      settled: a wait for all groups stands before it.
      at_end: hears of each group that is waited for at the block's end.
    """
    flight = Flight(self.arrivals, settled=settled)
    rewritten = self._line(block, flight)
    self._report_early(block, flight, repeats=False)
    if at_end is not None:
      for g in flight.groups:
        at_end(g)
    return _appended(rewritten, flight.finish)

  def _report_early(self, block: Block, flight: Flight, *, repeats: bool) -> None:
    """Waits for one gemm that are waits for another, too: they complete in the order of their issue."""
    for eqn, gemm, group in flight.early:
      needed = needed_at(block, eqn, group, repeats=repeats)
      if needed is not None:
        self._note(eqn, f"the wait for the gemm at {gemm.loc.short()} also waits for the one at "
                        f"{group.gemm.loc.short()}, which {needed.loc.short()} is the first to need")

  def _note(self, eqn: Eqn, lost: str) -> None:
    """Once, where a loop of Python's has recorded a line several times."""
    note = f"{eqn.loc.short()}  lost overlap: {lost}"
    if note not in self.notes:
      self.notes.append(note)

  def _line(self, block: Block, flight: Flight) -> Block:
    """A block that leaves in flight what is in flight at its end."""
    out: list[Eqn] = []
    opened: list[_Live] = []
    opened_at: set[Segment] = set()
    block, defining = sink_casts(block)
    for eqn in block.eqns:
      if eqn in self._pushes:
        continue
      b = Builder(eqn.loc)
      starts = self._starts.get(eqn, ())
      flight.before(b, defining.get(eqn, eqn), [r for r, _ in starts], self._ahead(eqn, block, opened_at))
      opened_at |= {s for _, s in starts}
      for resources, segment in starts:
        opened.append(self._acquire(b, resources, segment, block))
      out += b.eqns
      out += self._equation(eqn, flight, block)
      done = [l for l in opened if l.segment.last_use is eqn]
      opened = [l for l in opened if l not in done]
      out += self._release_after(eqn, done, flight)
      if eqn.primitive is mma.gemm_p:
        b = Builder(eqn.loc)
        flight.issued(b)
        out += b.eqns
    return dataclasses.replace(block, eqns=tuple(out))

  def _ahead(self, eqn: Eqn, block: Block, opened: Set[Segment]) -> Counter[RingResources]:
    """How often the producer pushes into each ring, in the order of the copies, up to what an equation or its blocks
    wait for; without what is open, or has been."""
    within = [s for e in (eqn, *(i for b in eqn.blocks for i in walk(b))) for _, s in self._starts.get(e, ())]
    if not within:
      return Counter()
    at = {e: i for i, e in enumerate(block.eqns)}
    last = max(at.get(s.copies[-1], at[eqn]) for s in within)
    found = Counter(r for r in self.rings for s in r.ring.segments
                    if s not in opened and at.get(s.copies[-1], last + 1) <= last)
    for s in within:                 # in a block inside: any number of pushes
      if s.copies[-1] not in at:
        found.update({r: r.ring.slots + 1 for r in self.rings if s in r.ring.segments})
    return found

  def _acquire(self, b: Builder, resources: RingResources, segment: Segment, block: Block) -> _Live:
    state = self.states[resources]
    slot: Atom = state.slot(b)
    b.wait(resources.full, slot, state.phase(b))
    first, last = (block.eqns.index(e) for e in (segment.first_use, segment.last_use))
    live = _Live(resources, state, slot, segment, any(
        touched_by_threads(e, resources.ring) for e in block.eqns[first:last + 1]))
    for v in resources.ring.buffers:
      self.live[v] = live
    return live

  def _equation(self, eqn: Eqn, flight: Flight, block: Block) -> list[Eqn]:
    """The rewritten equation; a gemm puts its group in flight."""
    if eqn.primitive is mma.gemm_p:
      flight.groups.append(Group.of(eqn, self.sharing))
      return [self._redirect(eqn).replace(primitive=mma.gemm_async_p)]
    if eqn.primitive is control.for_loop_p:
      if stays_in_flight(eqn, self._pushes) and self._can_release_late(eqn):
        return self._pipelined_gemm_loop(eqn)
      return self._loop(eqn, flight.settled)

    def at_end(group: Group) -> None:
      if flight.repeated is not None or needed_at(block, eqn, group, repeats=False, skip=True) is not None:
        self._note(eqn, f"the gemm at {group.gemm.loc.short()} is waited for at the end of its branch")

    branch = eqn.primitive in (control.cond_p, control.switch_p)
    blocks = tuple(self.block(b, settled=flight.settled, at_end=at_end if branch else None) for b in eqn.blocks)
    eqn = self._redirect(eqn)
    return [eqn.replace(blocks=blocks) if blocks else eqn]      # one that stays the same is known by identity

  def _loop(self, loop: Eqn, settled: bool) -> list[Eqn]:
    """A loop whose groups are in flight over the back edge, where something overlaps with them there."""
    body, said = loop.blocks[0], len(self.notes)
    repeated, accumulators = (body.invars[0], loop.values[0]), {g.refs[-1].root for g in gemms_in(body)}
    alone = stays_in_flight(loop, self._pushes)               # else the producer is to run ahead meanwhile
    flight = Flight(self.arrivals, (), repeated, accumulators, settled, early_releases=not alone)
    block = self._line(body, flight)
    left = flight.left()
    if left and self._may_go_round(loop, left):
      notes = self.notes[said:]
      del self.notes[said:]
      round_ = Flight(self.arrivals, left, repeated, accumulators, settled, 0 if alone else 1)
      again = self._line(body, round_)
      if alone:
        again = _appended(again, round_.finish_old)
      if round_.lost is None and not round_.old and _alike(round_.left(), left):
        self._report_early(body, round_, repeats=True)
        return [*self._before(loop, round_), loop.replace(blocks=(again,)), *self._after(loop, left)]
      self.notes[said:] = notes
      for g in left if round_.lost else ():
        self._note(loop, f"the gemm at {g.gemm.loc.short()} is waited for at the end of each iteration: {round_.lost}")
    if alone:
      flight = Flight(self.arrivals, (), repeated, accumulators, settled)
      block = self._line(body, flight)
    self._report_early(body, flight, repeats=True)
    return [*self._before(loop, flight), loop.replace(blocks=(_appended(block, flight.finish),))]

  def _before(self, loop: Eqn, flight: Flight) -> list[Eqn]:
    b = Builder(loop.loc)
    if flight.unsettled:
      b.wait_groups(0)
    return b.eqns

  def _may_go_round(self, loop: Eqn, left: list[Group]) -> bool:
    """No ring is used in a block inside, so that the slots are counted; what the loop carries is no operand; and the
    loop goes up."""
    body, step = loop.blocks[0], loop.values[2]
    if isinstance(step, Literal) and step.value < 0:
      return False
    inside = any(e in self._starts for eqn in body.eqns for b in eqn.blocks for e in walk(b))
    carried = {*body.invars, *body.outs}
    if inside or any(g.pending.a_value in carried for g in left):
      return False
    held = list(dict.fromkeys(g.pending.a_value for g in left if g.pending.a_value is not None))
    if held and not self.fits(held):
      self._note(loop, f"the gemm at {left[-1].gemm.loc.short()} is waited for at the end of each iteration: its "
                 "operand takes registers that the next one needs (smaller tiles, or fewer warpgroups)")
      return False
    return True

  def _after(self, loop: Eqn, left: list[Group]) -> list[Eqn]:
    """Completes what the last iteration left in flight."""
    b = Builder(loop.loc)
    b.wait_groups(0)
    held = [h for g in left for h in g.held]
    if held and not self.facts.certainly_runs(loop):
      inner = b.inner()
      Flight(self.arrivals).release_old(inner, held)
      b.when(b.op(elementwise.lt_p, *loop.values[:2]), inner.block())
    elif held:
      Flight(self.arrivals).release_old(b, held)
    return b.eqns

  def _can_release_late(self, loop: Eqn) -> bool:
    """Releasing one iteration late needs a second slot: with one, the producer would wait for what it holds up. Of a
    ring with several pushes an iteration slots are counted one by one (`_loop`)."""
    rings = [r for e in loop.blocks[0].eqns for r, _ in self._starts.get(e, ())]
    if len(set(rings)) < len(rings):
      return False
    single = [r.ring.name for r in rings if r.ring.slots == 1]
    if single:
      self.notes.append(f"{loop.loc.short()}  each gemm waits for itself: ring {single[0]} has one slot (num_stages=1)")
    return not single

  def _release_after(self, eqn: Eqn, done: list[_Live], flight: Flight) -> list[Eqn]:
    """Slots whose last use was `eqn`: released now, or when the newest group that reads them is complete."""
    b = Builder(eqn.loc)
    _finish_reading(b, done)
    for live in done:
      buffers = set(live.resources.ring.buffers)
      reader = next((g for g in reversed(flight.groups) if buffers & g.pending.shared), None)
      if reader is not None:
        reader.held.append(Held(live.resources, live.state, live.slot, flight.pushes[live.resources]))
      else:
        live.resources.release(b, live.slot, self.arrivals)
      live.state.advance(b)
      flight.pushes[live.resources] += 1
    return b.eqns

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
    """Each iteration waits for the groups of the one before, and releases their slots one iteration late; slots that no
    gemm reads when they have been used."""
    body, lo = loop.blocks[0], loop.values[0]
    index = body.invars[0]
    out: list[Eqn] = []
    opened: list[_Live] = []
    apart: list[_Live] = []
    gemms = sum(e.primitive is mma.gemm_p for e in body.eqns)
    seen = 0
    for eqn in body.eqns:
      if eqn in self._pushes:
        continue
      b = Builder(eqn.loc)
      for resources, segment in self._starts.get(eqn, ()):
        live = self._acquire(b, resources, segment, body)
        (opened if _multiplied(body, live) else apart).append(live)
      out += b.eqns
      rewritten = self._redirect(eqn)
      if eqn.primitive is mma.gemm_p:
        seen += 1
        out.append(rewritten.replace(primitive=mma.gemm_async_p))
        if seen == gemms:
          b = Builder(eqn.loc)
          b.wait_groups(gemms)
          self._release_previous(b, opened, b.op(elementwise.gt_p, index, lo) if opened else None)
          for live in opened:
            live.state.advance(b)
          out += b.eqns
      else:
        blocks = tuple(map(self.block, rewritten.blocks))
        out.append(rewritten.replace(blocks=blocks) if blocks else rewritten)
      out += self._release_after(eqn, [live for live in apart if live.segment.last_use is eqn], Flight(self.arrivals))
    after = Builder(loop.loc)
    after.wait_groups(0)
    if opened and not self.facts.certainly_runs(loop):
      ran = after.op(elementwise.lt_p, *loop.values[:2])
      self._release_previous(after, opened, ran)
    elif opened:
      self._release_previous(after, opened, None)
    return [loop.replace(blocks=(dataclasses.replace(body, eqns=tuple(out)),)), *after.eqns]

  def _release_previous(self, b: Builder, opened: list[_Live], condition: Atom | None) -> None:
    _finish_reading(b, opened)
    inner = b.inner() if condition is not None else b
    for live in opened:
      slot = live.state.slot(inner)
      slots = live.state.slots
      before = inner.select(inner.op(elementwise.eq_p, slot, 0), slots - 1, inner.sub(slot, 1))
      live.resources.release(inner, before, self.arrivals)
    if condition is not None:
      b.when(condition, inner.block())


def _multiplied(block: Block, live: _Live) -> bool:
  """Whether a gemm reads a slot."""
  first, last = (block.eqns.index(e) for e in (live.segment.first_use, live.segment.last_use))
  held = dataclasses.replace(block, eqns=block.eqns[first:last + 1])
  return any({r.root for r in g.refs} & set(live.resources.ring.buffers) for g in gemms_in(held))


def _appended(block: Block, finish: Callable[[Builder], None]) -> Block:
  if not block.eqns:
    return block
  b = Builder(block.eqns[-1].loc)
  finish(b)
  return dataclasses.replace(block, eqns=(*block.eqns, *b.eqns))


def _alike(left: list[Group], right: list[Group]) -> bool:
  def key(groups: list[Group]) -> list:
    return [(g.gemm, [(h.resources, h.at) for h in g.held]) for g in groups]
  return key(left) == key(right)


def _finish_reading(b: Builder, slots: list[_Live]) -> None:
  """Every thread has read the slots, also as TMA sees it, which refills them: without the fence the arrival overtakes
  loads that are on their way (seen on an H200), and a sync does not wait for them."""
  read = [live for live in slots if live.by_threads]
  if read:
    b.fence()
  if any(not live.resources.by_warps for live in read):
    b.sync("warpgroup")
