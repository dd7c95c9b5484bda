"""Runs the barriers of a level-0 program on the CPU, in a random order: who waits, who arrives, what is in each slot.

Warpgroups are coroutines. Values of tiles are not computed; scalars, loops, branches and barriers are. Asynchronous
copies land as late as the random order lets them: TMA at any time after its issue, cp.async at the wait for its group.
"""
from __future__ import annotations

import dataclasses
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

from tiletrace.core.graph import Block, Eqn, Literal, RefOperand, TileGraph, Var
from tiletrace.core.types import BarrierType, Dyn, Space

_SCALAR: dict[str, Callable[..., Any]] = {
  "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
  "min": min, "max": max, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
  "ge": operator.ge, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
  "select": lambda p, x, y: x if p else y,
}


@dataclasses.dataclass
class Mbarrier:
  arrivals: int
  pending: int
  tx: int = 0
  completed: int = 0

  def settle(self) -> None:
    if self.pending == 0 and self.tx == 0:
      self.completed, self.pending = self.completed + 1, self.arrivals

  def arrive(self, count: int) -> None:
    assert count <= self.pending, "more arrivals than a phase has"
    self.pending -= count
    self.settle()


@dataclasses.dataclass
class Slot:
  """What a slot holds: `landed` and `visible` (to wgmma), the warpgroups that have read it, reads that still run."""
  tag: Any = None
  landed: bool = True
  visible: bool = True
  readers: set[int] = dataclasses.field(default_factory=set)
  running: int = 0


@dataclasses.dataclass
class Thread:
  """One warpgroup's state: its variables, its scalar fragments, groups in flight."""
  index: int
  role: Eqn
  env: dict[Var, Any] = dataclasses.field(default_factory=dict)
  open_group: list[Slot] = dataclasses.field(default_factory=list)
  groups: list[list[Slot]] = dataclasses.field(default_factory=list)
  written: list[Slot] = dataclasses.field(default_factory=list)
  gemms: list[list[Slot]] = dataclasses.field(default_factory=list)
  elected: bool = False


class Protocol:
  """One CTA of a program. `pushed` and `read` are the tags of each buffer, in order; reads of the first consumer.

  Args:
    number: every scalar that the kernel loads from global memory.
  """

  def __init__(self, graph: TileGraph, seed: int, number: int = 0):
    self.random, self.number = random.Random(seed), number
    self.barriers: dict[Var, list[Mbarrier]] = {}
    self.slots: dict[Var, list[Slot]] = {}
    self.flights: list[tuple[Slot, Mbarrier, int]] = []
    self.pushed: dict[Var, list[Any]] = {}
    self.read: dict[Var, list[Any]] = {}
    self.most_in_flight = 0
    self.roles = [e for e in graph.body.eqns if e.primitive.name == "warpgroup"]
    self.all = set(range(self.roles[1].params["count"]))
    for eqn in graph.body.eqns:
      if eqn.primitive.name == "alloc_barrier":
        kind = eqn.outvars[0].type
        assert isinstance(kind, BarrierType)
        self.barriers[eqn.outvars[0]] = [Mbarrier(kind.arrivals, kind.arrivals) for _ in range(kind.count)]

  def run(self) -> None:
    """To the end of all roles.

    Raises:
      AssertionError: a deadlock, a slot overwritten before it was read, or read before it was full.
    """
    live = [self._block(r.blocks[0], Thread(i, r)) for r in self.roles for i in range(r.params["count"])]
    blocked: set[int] = set()
    steps = list(range(len(live)))
    while steps:
      choices = [i for i in steps if i not in blocked]
      if self.flights and (not choices or self.random.random() < 0.2):
        self._land(self.flights.pop(self.random.randrange(len(self.flights))))
        blocked.clear()
        continue
      assert choices, "deadlock: every role waits"
      i = self.random.choice(choices)
      try:
        waits = next(live[i])
      except StopIteration:
        steps.remove(i)
        continue
      if waits:
        blocked.add(i)
      else:
        blocked.clear()
    assert not self.flights

  def _land(self, flight: tuple[Slot, Mbarrier, int]) -> None:
    slot, barrier, nbytes = flight
    slot.landed = slot.visible = True
    barrier.tx -= nbytes
    barrier.settle()

  # ---- equations

  def _block(self, block: Block, t: Thread) -> Iterator[bool]:
    """Yields True where it waits, False where something happened that others may see."""
    for eqn in block.eqns:
      name = eqn.primitive.name
      if name == "for_loop":
        lo, hi, step = (self._value(a, t) for a in eqn.values[:3])
        for i in range(lo, hi, step):
          t.env[eqn.blocks[0].invars[0]] = i
          yield from self._block(eqn.blocks[0], t)
      elif name == "cond":
        taken = 0 if self._value(eqn.values[0], t) else 1
        if taken < len(eqn.blocks):
          yield from self._block(eqn.blocks[taken], t)
      elif name == "elect":
        if t.index == 0 or eqn.params["each"] == "warpgroup":
          before, t.elected = t.elected, eqn.params["each"] == "scope"
          yield from self._block(eqn.blocks[0], t)
          t.elected = before
      elif name == "barrier_wait":
        bar, phase = self._barrier(eqn, t), self._value(eqn.values[2], t)
        while bar.completed % 2 == phase:
          yield True
        yield False
      else:
        self._step(eqn, t)
        if name.startswith("barrier"):
          yield False

  def _step(self, eqn: Eqn, t: Thread) -> None:
    name = eqn.primitive.name
    if name == "barrier_arrive":
      assert all(s.landed and s.visible for s in t.written if s not in self._pending(t)), "arrives before the fence"
      t.written = [s for s in t.written if s in self._pending(t)]
      self._barrier(eqn, t).arrive(eqn.params["count"] if t.elected else eqn.params["count"] // t.role.params["count"])
    elif name == "barrier_arrive_expect_tx":
      bar = self._barrier(eqn, t)
      bar.tx += eqn.params["nbytes"]
      bar.arrive(1)
    elif name in ("copy", "copy_async") and t.role is self.roles[0]:
      self._copy(eqn, t)
    elif name == "commit_group" and eqn.params["kind"] == "cp_async":
      t.groups.append(t.open_group)
      t.open_group = []
      self.most_in_flight = max(self.most_in_flight, len(t.groups))
    elif name == "wait_group" and eqn.params["kind"] == "cp_async":
      while len(t.groups) > eqn.params["n"]:
        for slot in t.groups.pop(0):
          slot.landed = True
    elif name == "fence":
      for slot in t.written:
        slot.visible = slot.landed
    elif name == "gemm_async":
      t.gemms.append([self._read(ref, t) for ref in eqn.refs if ref.root in self.slots])
      for slot in t.gemms[-1]:
        slot.running += 1
    elif name == "wgmma_wait":
      while len(t.gemms) > eqn.params["n"]:
        for slot in t.gemms.pop(0):
          slot.running -= 1
    elif name == "load" and eqn.refs[0].root in self.slots:
      self._read(eqn.refs[0], t)
    elif name in ("load", "store") and not eqn.refs[0].view.perm and eqn.refs[0].type.space is Space.FRAGMENT:
      self._scalar_fragment(eqn, t)
    elif name in ("cta_id", "num_ctas"):
      t.env[eqn.outvars[0]] = int(name == "num_ctas")
    elif name == "warpgroup_id":
      t.env[eqn.outvars[0]] = t.index
    elif name == "load" and eqn.outvars[0].shape == ():
      t.env[eqn.outvars[0]] = self.number
    elif name in _SCALAR and eqn.outvars[0].shape == ():
      t.env[eqn.outvars[0]] = _SCALAR[name](*(self._value(a, t) for a in eqn.values))

  def _scalar_fragment(self, eqn: Eqn, t: Thread) -> None:
    root = eqn.refs[0].root
    if eqn.primitive.name == "load":
      t.env[eqn.outvars[0]] = t.env[root]
    else:
      t.env[root] = self._value(eqn.values[0], t)

  def _value(self, a: Any, t: Thread) -> Any:
    return a.value if isinstance(a, Literal) else t.env[a]

  def _barrier(self, eqn: Eqn, t: Thread) -> Mbarrier:
    return self.barriers[eqn.values[0]][self._value(eqn.values[1], t)]  # type: ignore[index]

  # ---- slots

  @staticmethod
  def _pending(t: Thread) -> list[Slot]:
    return [s for g in (*t.groups, t.open_group) for s in g]

  def _at(self, ref: RefOperand, t: Thread) -> Slot:
    start = ref.view.dims[0].start
    slots = self.slots.setdefault(ref.root, [Slot(readers=self.all) for _ in range(ref.type.shape[0])])
    return slots[self._value(ref.dyn[start.index], t) if isinstance(start, Dyn) else start]

  def _copy(self, eqn: Eqn, t: Thread) -> None:
    src, dst = eqn.refs
    slot = self._at(dst, t)
    assert slot.readers == self.all and not slot.running, "a slot is overwritten before all have read it"
    slot.tag = tuple(self._value(a, t) for a in src.dyn)
    slot.landed = slot.visible = False
    slot.readers = set()
    self.pushed.setdefault(dst.root, []).append(slot.tag)
    if eqn.primitive.name == "copy":
      slot.landed = True
      t.written.append(slot)
    elif eqn.params["dispatch"] == "cp_async":
      t.open_group.append(slot)
      t.written.append(slot)
    else:
      nbytes = dst.type.dtype.itemsize
      for n in dst.view.static_shape:
        nbytes *= n
      self.flights.append((slot, self._barrier(eqn, t), nbytes))

  def _read(self, ref: RefOperand, t: Thread) -> Slot:
    slot = self._at(ref, t)
    assert slot.landed and slot.visible, "a slot is read before it is full"
    if t.index == 0 and 0 not in slot.readers:
      self.read.setdefault(ref.root, []).append(slot.tag)
    slot.readers.add(t.index)
    return slot
