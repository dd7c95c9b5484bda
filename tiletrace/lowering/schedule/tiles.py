"""The loop over programs that CTAs take when they are free (persistent="dynamic").

The first program of a CTA is its own number; each further one is the number of CTAs plus what the counter held
(lowering/tiles.py). One thread of the CTA asks, and the others learn through shared memory:

* With a producer, it asks when it has started the last copy of a program, not earlier: what a CTA has taken waits for
  what the CTA is at, so it takes late. The ring is full of copies at that time, and the answer is here before the
  consumers have used them. It goes into one of a few places with barriers `full` and `empty`, as many as a ring has
  slots: the producer is never ahead of the consumers by more.
* Without one, nothing hides the answer but the program itself: one thread asks at its start, and tells the others at
  its end. Of two places in turn, a sync between the store and the loads is enough: it also stands between the loads of
  a place and the next store to it.
"""
from __future__ import annotations

import dataclasses
from typing import Protocol

from tiletrace.core import dtypes
from tiletrace.core.graph import Atom, Block, RefOperand, TileGraph, Var, prefixed
from tiletrace.core.ops import atomic, control, elementwise, grid
from tiletrace.core.ops.assume import assume_p
from tiletrace.core.types import Extent, Space, whole_view
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.schedule.builder import Builder, RingState, i32, whole
from tiletrace.lowering.tiles import counter_of

_TURNS = 2


class Taking(Protocol):
  """How the threads of a role learn which program comes next."""

  def before(self, b: Builder) -> None:
    """What stands before the loop."""
    ...

  def start(self, b: Builder) -> None:
    """What stands at the start of a program."""
    ...

  def next(self, b: Builder) -> Atom:
    """At the end of a program: the next one; that of no program, if there is none."""
    ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Handover:
  """From the thread that asks to the others of its CTA.

  Attributes:
    counter: in global memory.
    places: i32 in shared memory.
    full, empty: barriers of the places; None without a producer.
    consumers: their warpgroups.
  """
  counter: Var
  places: Var
  full: Var | None
  empty: Var | None
  consumers: int

  @classmethod
  def make(cls, head: Builder, graph: TileGraph, layouts: dict[Var, Layout], slots: int | None = None) -> Handover:
    """`slots`: of the deepest ring that a producer fills; None: there is no producer."""
    places, consumers = max(_TURNS, slots or 0), graph.options.warpgroups
    buffer = head.alloc(Space.SHARED, (places,), dtypes.i32, "next_program")
    layouts[buffer] = shared_layout((places,), 32, 0)
    if slots is None:
      return cls(counter_of(graph), buffer, None, None, consumers)
    full, empty = head.alloc_barrier(places, 1, "program_told"), head.alloc_barrier(places, consumers, "program_read")
    return cls(counter_of(graph), buffer, full, empty, consumers)

  @property
  def slots(self) -> int:
    return self.places.shape[0]

  def place(self, slot: Atom) -> RefOperand:
    view, dynamic = prefixed(whole_view(()), slot)
    return RefOperand(self.places, view, dynamic)

  def ask(self, b: Builder) -> Atom:
    """What the counter held, in the one thread that runs this."""
    params = {"views": (prefixed(whole_view(()), 0)[0],), "op": "add", "sem": "relaxed", "scope": "gpu", "dims": (),
              "returns": True, "guard": (), "vec": 1}
    return b.bind(atomic.atomic_p, (self.counter, i32(1)), params)[0]

  @staticmethod
  def program(b: Builder, asked: Atom) -> Atom:
    return b.add(asked, b.bind(grid.num_ctas_p, (), {})[0])


class Producing:
  """The producer: one thread of it, or where it copies itself a whole warpgroup, of which one thread asks."""

  def __init__(self, handover: Handover, *, by_warpgroup: bool):
    self.handover, self.by_warpgroup = handover, by_warpgroup

  def before(self, b: Builder) -> None:
    self.state = RingState.make(b, self.handover.slots, phase=1)

  def start(self, b: Builder) -> None:
    pass

  def next(self, b: Builder) -> Atom:
    h = self.handover
    assert h.full is not None and h.empty is not None
    slot, phase = self.state.slot(b), self.state.phase(b)
    one = b.inner() if self.by_warpgroup else b
    program = h.program(one, h.ask(one))
    one.wait(h.empty, slot, phase)
    one.store(h.place(slot), program, dispatch="direct")
    if self.by_warpgroup:
      b.elect(one.block())
      b.sync("warpgroup")
      program = b.load(h.place(slot))
    b.arrive(h.full, slot, 1)
    self.state.advance(b)
    return program


class Consuming:
  """The consumers: every thread reads, then each warpgroup says so."""

  def __init__(self, handover: Handover):
    self.handover = handover

  def before(self, b: Builder) -> None:
    self.state = RingState.make(b, self.handover.slots)

  def start(self, b: Builder) -> None:
    pass

  def next(self, b: Builder) -> Atom:
    h = self.handover
    assert h.full is not None and h.empty is not None
    slot = self.state.slot(b)
    b.wait(h.full, slot, self.state.phase(b))
    program = b.load(h.place(slot))
    b.sync("warpgroup")
    b.arrive(h.empty, slot, h.consumers)
    self.state.advance(b)
    return program


class Alone:
  """All threads of a kernel without a producer."""

  def __init__(self, handover: Handover):
    self.handover = handover

  def before(self, b: Builder) -> None:
    self.asked, self.turn = (b.alloc(Space.FRAGMENT, (), dtypes.i32, name) for name in ("asked", "turn"))
    b.store(whole(self.asked), 0)
    b.store(whole(self.turn), 0)

  def start(self, b: Builder) -> None:
    one = b.inner()
    one.store(whole(self.asked), self.handover.ask(one))
    b.elect(one.block())

  def next(self, b: Builder) -> Atom:
    h, one = self.handover, b.inner()
    turn = b.load(whole(self.turn))
    one.store(h.place(turn), h.program(one, one.load(whole(self.asked))), dispatch="direct")
    b.elect(one.block())
    b.sync()
    program = b.load(h.place(turn))
    b.store(whole(self.turn), b.op(elementwise.xor_p, turn, 1))
    return program


def tile_loop(b: Builder, first: Atom, total: Atom | Extent, taking: Taking, tile: Var, work: Block) -> None:
  """Runs `work` while there are programs.

  Args:
    first: the CTA's first program.
    total: how many there are.
    tile: what `work` calls its program's number.
  """
  taking.before(b)
  end = b.operand(total)
  condition, inner, candidate = b.inner(), b.inner(), Var(tile.type, "tile")
  more = _is_program(condition, candidate, end)
  inner.bind(assume_p, (_is_program(inner, tile, end),), {})
  taking.start(inner)
  inner.eqns += work.eqns
  found = taking.next(inner)
  b.bind(control.while_loop_p, (first,), {},
         (Block((candidate,), tuple(condition.eqns), (more,)), Block((tile,), tuple(inner.eqns), (found,))))


def _is_program(b: Builder, tile: Atom, end: Atom) -> Atom:
  """A number behind the last one may have become negative, where there are almost 2^31."""
  return b.op(elementwise.and_p, b.op(elementwise.ge_p, tile, 0), b.op(elementwise.lt_p, tile, end))
