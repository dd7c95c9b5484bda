"""Rings that the threads of a full producer warpgroup fill, alone or beside TMA: copies that TMA cannot take.

A push: all threads wait until the slot is free, one of them starts TMA's share, all copy the rest. What threads wrote
becomes visible to wgmma by a proxy fence of every writer; after a sync of the warpgroup its first thread arrives. So a
phase of `full` is completed by one arrival for TMA, with its bytes (0 where another push of the ring has some), and one
for the threads.

Copies by cp.async arrive `lag` iterations late, so that several slots are in flight. The consumers release a slot one
iteration after they read it, and the producer waits for the slot that was pushed `slots` iterations before: with
lag <= slots - 2 what the consumers need for that release has arrived.
"""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import Atom, Block, Eqn, Literal, RefOperand
from tiletrace.core.ops import elementwise, memory
from tiletrace.core.types import Dyn
from tiletrace.lowering.schedule.builder import Builder, RingState, eviction
from tiletrace.lowering.schedule.rings import Ring
from tiletrace.lowering.schedule.slots import RingResources
from tiletrace.lowering.select.memory import ThreadCopy


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FillLoop:
  """A loop that pushes each of its rings once an iteration.

  Attributes:
    index, lo, hi: the producer's variables; the step is 1.
    groups: cp.async groups committed in an iteration.
    lag: iterations from a push to its arrival.
  """
  index: Atom
  lo: Atom
  hi: Atom
  groups: int
  lag: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Push:
  """One push: the slot, TMA's copies and the threads', with operands in the producer's variables."""
  resources: RingResources
  state: RingState
  slot: Atom
  phase: Atom
  by_tma: tuple[tuple[Eqn, RefOperand, RefOperand], ...]
  by_threads: tuple[tuple[Eqn, RefOperand, RefOperand, ThreadCopy], ...]


def is_async(copy: Eqn) -> bool:
  return copy.params["dispatch"] == "cp_async"


def lag_of(rings: list[Ring]) -> int:
  """Iterations by which the arrivals of a loop that pushes these rings may be late."""
  return max(0, min(r.slots for r in rings) - 2)


def fill(b: Builder, push: Push, loop: FillLoop | None) -> None:
  """Waits for the slot of a push, copies, and arrives.

  Threads that wait must not fall two phases behind each other, where parities are equal again: the sync of a push sees
  to that, and where there is none only the elected thread waits.

  Args:
    loop: where cp.async may arrive late; None: at once.
  """
  full, ring = push.resources.full, push.resources.ring
  if ring.by_threads:
    b.wait(push.resources.empty, push.slot, push.phase)
  if ring.by_tma:
    one = b.inner()
    if not ring.by_threads:
      one.wait(push.resources.empty, push.slot, push.phase)
    one.arrive_expect_tx(full, push.slot, sum(dst.type.dtype.itemsize * _size(dst) for _, _, dst in push.by_tma))
    for copy, src, dst in push.by_tma:
      issue = Builder(copy.loc)
      issue.copy_async(src, dst, (full, push.slot), **eviction(copy))
      one.eqns += issue.eqns
    b.elect(one.block())
  if not ring.by_threads:
    return
  _copy(b, push.by_threads)
  lag = 0
  if any(is_async(copy) for copy, *_ in push.by_threads):
    b.bind(memory.commit_group_p, (), {"kind": "cp_async"})
    lag = loop.lag if loop is not None else 0
    pending = loop.groups * lag if loop is not None else 0
    b.bind(memory.wait_group_p, (), {"kind": "cp_async", "n": pending, "read": False})
  b.fence()
  b.sync("warpgroup")
  if lag == 0:
    b.arrive(full, push.slot, 1)
    return
  assert loop is not None
  _arrive_if(b, b.op(elementwise.ge_p, loop.index, _plus(b, loop.lo, lag)), push.resources, push.state, lag)


def drain(b: Builder, loop: FillLoop, late: list[tuple[RingResources, RingState]]) -> None:
  """After a loop: the arrivals that are still owed, oldest first."""
  if loop.lag == 0 or not late:
    return
  b.bind(memory.wait_group_p, (), {"kind": "cp_async", "n": 0, "read": False})
  b.fence()
  b.sync("warpgroup")
  for ago in range(loop.lag, 0, -1):
    ran = b.op(elementwise.ge_p, loop.hi, _plus(b, loop.lo, ago))
    for resources, state in late:
      _arrive_if(b, ran, resources, state, ago)


def _arrive_if(b: Builder, condition: Atom, resources: RingResources, state: RingState, ago: int) -> None:
  """Arrives for the slot `ago` pushes before the state's."""
  inner = b.inner()
  slot = state.slot(inner)
  wrapped = inner.add(slot, state.slots - ago)
  before = inner.select(inner.op(elementwise.lt_p, slot, ago), wrapped, inner.sub(slot, ago))
  inner.arrive(resources.full, before, 1)
  b.when(condition, inner.block())


def _copy(b: Builder, copies: tuple[tuple[Eqn, RefOperand, RefOperand, ThreadCopy], ...]) -> None:
  """Tiles that lie inside their arrays, most of them, need no bounds checks. All copies of a push stand in one branch,
  so that the loads of one need not wait for the stores of the one before."""
  checked = [_with_operands(*c, c[3].guard) for c in copies]
  terms = [_inside(b, src, plan.guard) for _, src, _, plan in copies]
  found = [t for ts in terms if ts is not None for t in ts]
  if not found or any(ts is None for ts in terms):
    b.eqns += checked
    return
  inside = found[0]
  for t in found[1:]:
    inside = b.op(elementwise.and_p, inside, t)
  b.when(inside, Block((), tuple(_with_operands(*c, ()) for c in copies), ()), Block((), tuple(checked), ()))


def _with_operands(copy: Eqn, src: RefOperand, dst: RefOperand, plan: ThreadCopy, guard: tuple[int, ...]) -> Eqn:
  primitive = memory.copy_async_p if is_async(copy) else memory.copy_p
  return Eqn(primitive, (src.root, *src.dyn, dst.root, *dst.dyn), (), {
      "views": (src.view, dst.view), "fill_value": copy.params["fill_value"], "dispatch": copy.params["dispatch"],
      **plan.params, "guard": guard, **eviction(copy)}, copy.loc)


def _inside(b: Builder, src: RefOperand, guard: tuple[int, ...]) -> list[Atom] | None:
  """The conditions under which the view lies inside the array; None where they are not as simple."""
  found: list[Atom] = []
  for d in guard:
    dim, extent = src.view.dims[d], src.type.shape[d]
    assert isinstance(dim.size, int)
    span = (dim.size - 1) * dim.stride + 1
    if dim.edges or (isinstance(extent, int) and extent < span) or not isinstance(dim.start, Dyn):
      return None
    start = src.dyn[dim.start.index]
    last = extent - span if isinstance(extent, int) else b.sub(extent, span)   # the largest start that is inside
    found += [b.op(elementwise.ge_p, start, 0), b.op(elementwise.le_p, start, last)]
  return found


def _plus(b: Builder, x: Atom, n: int) -> Atom | int:
  return int(x.value) + n if isinstance(x, Literal) else b.add(x, n)  # type: ignore[arg-type]


def _size(ref: RefOperand) -> int:
  size = 1
  for n in ref.view.static_shape:
    size *= n
  return size
