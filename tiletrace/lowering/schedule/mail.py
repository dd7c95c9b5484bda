"""Scalars that the consumers compute and the producer needs: through shared memory, one mailbox for each.

One thread of the consumers stores the scalar and arrives at `full`; the producer waits for that, and loads. A kernel
that is persistent sends once a tile: the producer's arrival at `empty` says that it has read the last one.
"""
from __future__ import annotations

import dataclasses

from tiletrace.core import dtypes
from tiletrace.core.graph import Atom, Block, Eqn, RefOperand, Var, expand_block, prefixed
from tiletrace.core.ops import elementwise
from tiletrace.core.types import Space, whole_view
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.schedule.builder import Builder, whole


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mailbox:
  """Attributes:
    value: the consumers' variable.
    buffer: its place in shared memory.
    full, empty: barriers of one arrival; `empty` is None where the kernel sends once.
  """
  value: Var
  buffer: Var
  full: Var
  empty: Var | None

  @classmethod
  def make(cls, head: Builder, value: Var, layouts: dict[Var, Layout], *, repeats: bool) -> Mailbox:
    hint = value.hint or "scalar"
    buffer = head.alloc(Space.SHARED, (1,), value.dtype, hint)
    layouts[buffer] = shared_layout((1,), max(8, value.dtype.itemsize * 8), 0)
    full = head.alloc_barrier(1, 1, f"{hint}_sent")
    return cls(value, buffer, full, head.alloc_barrier(1, 1, f"{hint}_read") if repeats else None)

  @property
  def _place(self) -> RefOperand:
    return RefOperand(self.buffer, prefixed(whole_view(()), 0)[0], ())

  def send(self, b: Builder, phase: Phase) -> None:
    one = b.inner()
    if self.empty is not None:
      one.wait(self.empty, 0, phase.now(one))
    one.store(self._place, self.value, dispatch="direct")
    one.arrive(self.full, 0, 1)
    b.elect(one.block())
    phase.advance(b)

  def receive(self, b: Builder, phase: Phase, *, by_warpgroup: bool) -> Var:
    """The producer's copy of the scalar, in the one thread or, `by_warpgroup`, all threads of the producer."""
    b.wait(self.full, 0, phase.now(b))
    value = b.load(self._place)
    if self.empty is not None:
      if by_warpgroup:
        b.sync("warpgroup")
      b.arrive(self.empty, 0, 1)
    phase.advance(b)
    return value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Phase:
  """The phase of a mailbox in one role: a scalar fragment, or, where it is used once, the first phase."""
  first: int
  ref: Var | None

  @classmethod
  def make(cls, b: Builder, box: Mailbox, first: int) -> Phase:
    if box.empty is None:
      return cls(first, None)
    ref = b.alloc(Space.FRAGMENT, (), dtypes.i32, "phase")
    b.store(whole(ref), first)
    return cls(first, ref)

  def now(self, b: Builder) -> Atom | int:
    return self.first if self.ref is None else b.load(whole(self.ref))

  def advance(self, b: Builder) -> None:
    if self.ref is not None:
      b.store(whole(self.ref), b.op(elementwise.xor_p, b.load(whole(self.ref)), 1))


def send_all(block: Block, boxes: dict[Var, tuple[Mailbox, Phase]]) -> Block:
  """The consumers' block, which sends each scalar where it has been computed."""
  def sending(eqn: Eqn) -> list[Eqn]:
    b = Builder(eqn.loc)
    for box, phase in (boxes[var] for var in eqn.outvars if var in boxes):
      box.send(b, phase)
    return [eqn, *b.eqns]

  return expand_block(block, sending)
