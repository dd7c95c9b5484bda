"""wgmma groups in flight along a straight line, and the slots of rings that they were the last to read.

A group of one iteration may be in flight when the next one starts. ptxas counts groups along a straight line only: such
a group is complete, for its registers, at `wait_group 0` alone (PTX ISA, wgmma.wait_group).
"""
from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence, Set

from tiletrace.core.graph import Atom, Block, Eqn, Var
from tiletrace.core.ops import elementwise, mma
from tiletrace.core.types import TileType
from tiletrace.lowering.schedule.asynchrony import Pending, accesses, conflicts, pending_of
from tiletrace.lowering.schedule.builder import Builder, RingState
from tiletrace.lowering.schedule.slots import RingResources


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Held:
  """A slot that is released when its group is complete.

  `slot` is None for one of the iteration before; it lies `pushes - at` slots behind the ring's state.
  """
  resources: RingResources
  state: RingState
  slot: Atom | None
  at: int


@dataclasses.dataclass(slots=True, eq=False)
class Group:
  gemm: Eqn
  pending: Pending
  held: list[Held]

  @classmethod
  def of(cls, gemm: Eqn, sharing: Mapping[Var, Set[Var]]) -> Group:
    return cls(gemm, pending_of(gemm, sharing), [])


def _from_registers(group: Group) -> bool:
  return group.gemm.params["dispatch"] == "wgmma_rs"


def takes_time(eqn: Eqn) -> bool:
  """Tiles, not scalars alone: worth to overlap with a gemm."""
  return eqn.primitive is mma.gemm_p or bool(eqn.blocks) or any(
      isinstance(v.type, TileType) and v.type.shape for v in eqn.outvars)


def needed_at(block: Block, after: Eqn, group: Group, *, repeats: bool, skip: bool = False) -> Eqn | None:
  """The equation that needs a group complete, where something that takes time stands between it and `after` (that
  included, but for `skip`)."""
  at = block.eqns.index(after) + skip
  later = (*block.eqns[at:], *(block.eqns[:at] if repeats else ()))
  between = False
  for eqn in later:
    if conflicts(eqn, group.pending):
      return eqn if between else None
    between |= takes_time(eqn)
  return None


class Flight:
  """The groups in flight at a point of a straight line, oldest first.

  Args:
    old: groups that the iteration before left in flight.
    repeated: (index, first index) of the loop; in its first iteration there is nothing of an iteration before.
    accumulators: those of the loop that the line is the body of.
    settled: a `wait_group 0` stands before the line.
    spare: slots of a ring that `old` leaves to the producer, besides the one that is used next.

  Attributes:
    pushes: how often the line has advanced each ring.
    lost: why `old` had better be waited for at the end of an iteration (empty: nothing overlaps), or None.
    early: (equation, the gemm that it waits for, a group that this waits for too, without need).
    settled: a `wait_group 0` stands in the line, or before it.
    unsettled: where none does, an accumulator is used that an iteration before has written, while another group is in
      flight. ptxas then puts a wait for all groups there (C7517): it sees no wait on the way into the loop.
  """

  def __init__(self, arrivals: int, old: Sequence[Group] = (), repeated: tuple[Var, Atom] | None = None,
               accumulators: Set[Var] = frozenset(), settled: bool = False, spare: int = 0,
               early_releases: bool = True):
    self.arrivals, self.old, self.repeated = arrivals, list(old), repeated
    self.accumulators, self.settled, self.unsettled, self.spare = accumulators, settled, False, spare
    self.early_releases = early_releases
    self.groups: list[Group] = []
    self.pushes: Counter[RingResources] = Counter()
    self.early: list[tuple[Eqn, Eqn, Group]] = []
    self.lost: str | None = None
    self._held = [h for g in self.old for h in g.held]       # what `old` has not released
    self._overlaps = False

  def before(self, b: Builder, eqn: Eqn, acquired: list[RingResources],
             ahead: Mapping[RingResources, int]) -> None:
    """The waits and releases before an equation that uses slots of the rings `acquired` for the first time; before it
    fills these, the producer pushes `ahead` times what is not used yet."""
    own = [conflicts(eqn, g.pending) or self._block(g.held, acquired, 0) or self._stops(g.held, ahead)
           for g in self.groups]
    old = [conflicts(eqn, g.pending) for g in self.old]
    full = self._block(self._held, acquired, self.spare) or self._stops(self._held, ahead)
    upto, from_before = max((i for i, needed in enumerate(own) if needed), default=-1), any(old) or full
    if from_before and upto < len(self.groups) - 1:
      self.lost = "what the same iteration has issued would be waited for with it"
    elif from_before and not any(old):
      self.lost = "its slot is needed for what is copied next (a larger num_stages)"
    elif from_before and not self._overlaps:
      self.lost = ""
    if from_before or upto >= 0:
      waited = [*zip(self.old, old), *zip(self.groups[:upto + 1], own)]
      by = [g.gemm for g, needed in waited if needed]
      self.early += [(eqn, by[-1], g) for g, needed in waited if by and not needed]
    self._complete(b, len(self.groups) - 1 if from_before else upto, all_old=from_before)
    if self.groups and not self.settled and eqn.primitive is not mma.gemm_p:
      self.unsettled |= bool(self.accumulators & set().union(*accesses(eqn)))
    self._overlaps |= takes_time(eqn)

  def issued(self, b: Builder) -> None:
    """After the issue of a group: slots that groups well before it were the last to read are released.

    Not at the end of the line: a gemm whose left operand is in registers is issued when the one before it is nearly
    done (an H200's profile: the warp stands at the instruction), so that all releases would come when the last one is
    under way.
    """
    behind = 1 if all(map(_from_registers, self.groups[-2:])) else 2
    upto = max((i for i, g in enumerate(self.groups[:-behind]) if g.held), default=-1)
    if not self.old and self.early_releases:
      self._complete(b, upto, all_old=False)

  def finish(self, b: Builder) -> None:
    """Waits for everything."""
    self._complete(b, len(self.groups) - 1, all_old=bool(self.old))

  def finish_old(self, b: Builder) -> None:
    """Waits for what is left of the iteration before. Only where nothing but wgmma touches the accumulators."""
    if self.old:
      self._wait(b, len(self.groups))
      self.old = []

  def _block(self, held: list[Held], acquired: list[RingResources], spare: int) -> bool:
    """The producer cannot fill the slot that comes next, and `spare` more, before one of these is released."""
    return any(h.resources in acquired and self._behind(h) + spare >= h.resources.ring.slots for h in held)

  def _stops(self, held: list[Held], ahead: Mapping[RingResources, int]) -> bool:
    """The producer makes pushes in their order: one that has to wait for these slots keeps those behind it back."""
    return any(self._behind(h) + ahead.get(h.resources, 0) > h.resources.ring.slots for h in held
               if ahead.get(h.resources, 0))

  def _behind(self, held: Held) -> int:
    return self.pushes[held.resources] - held.at

  def _complete(self, b: Builder, upto: int, *, all_old: bool) -> None:
    """Waits until groups[0..upto] are complete; what a group was the last to read is released before the next one is
    waited for, so that its refill is on the way meanwhile. Groups of the iteration before are older than these."""
    everything = bool(self.old) and (all_old or upto >= 0)
    if everything:                       # a wait for fewer groups is not taken for a wait for those before them (C7514)
      if upto < len(self.groups) - 1:
        self.lost = "what the same iteration has issued would be waited for with it"
      self._wait(b, 0)
    for i, group in enumerate(self.groups[:upto + 1]):
      if not everything and (group.held or i == upto):
        self._wait(b, len(self.groups) - 1 - i)
      for held in group.held:
        assert held.slot is not None
        held.resources.release(b, held.slot, self.arrivals)
    del self.groups[:upto + 1]

  def _wait(self, b: Builder, n: int) -> None:
    b.wait_groups(n)
    if self._held and self.repeated is not None:
      inner = b.inner()
      self.release_old(inner, self._held)
      b.when(b.op(elementwise.ne_p, *self.repeated), inner.block())
    self._held = []
    if n == 0:
      self.old, self.settled = [], True

  def release_old(self, b: Builder, held: list[Held]) -> None:
    for h in held:
      slot = h.state.slot(b)
      behind, slots = self._behind(h), h.resources.ring.slots
      if behind % slots:
        wrapped = b.op(elementwise.lt_p, slot, behind)
        slot = b.select(wrapped, b.add(slot, slots - behind), b.sub(slot, behind))
      h.resources.release(b, slot, self.arrivals)

  def left(self) -> list[Group]:
    """The groups in flight at the end, as the next iteration sees them."""
    return [Group(g.gemm, g.pending, [Held(h.resources, h.state, None, -self._behind(h)) for h in g.held])
            for g in self.groups]
