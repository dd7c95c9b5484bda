"""Pipelined loops without a producer: the threads that compute fill the ring themselves, num_stages - 1 iterations
ahead.

The targets before sm_90 have no TMA, and nothing would be gained by threads that only copy. So before a loop of S
stages stand the copies of its first S - 1 iterations, a cp.async group each, and in iteration k

    wait_group(S - 2)     what this thread copied for k has arrived
    sync                  what all copied for k has; all are done with k - 1
    the copies for k + S - 1, into the slot of k - 1, and their group
    the rest of the iteration, on slot k % S

with one sync in all. Every thread commits a group in each iteration, so that the count is right in the last ones,
too. Copies that cp.async cannot make go through registers at the same places. A copy into the buffer elsewhere, as of a
first block before the loop, takes slot 0 and is waited for.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Set

from tiletrace.core.graph import Atom, Block, Eqn, Literal, RefOperand, TileGraph, Var, prefixed, walk, with_refs
from tiletrace.core.ops import control, elementwise, memory
from tiletrace.core.rules import effects
from tiletrace.core.types import Space, TileType
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.schedule.builder import Builder, i32
from tiletrace.lowering.schedule.rings import Ring, changed_buffers, uses_outside_segments
from tiletrace.lowering.schedule.slice import written_arrays


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ahead:
  """What a loop copies ahead.

  Attributes:
    loop: the pipelined loop; its step is 1.
    copies: of its body, in order.
    needed: the scalars of the body that their views need, in order.
    again: the slots may still be read where the loop begins.
  """
  loop: Eqn
  copies: tuple[Eqn, ...]
  needed: tuple[Eqn, ...]
  again: bool

  @property
  def stages(self) -> int:
    return self.loop.params["num_stages"]

  @property
  def buffers(self) -> tuple[Var, ...]:
    return tuple(dict.fromkeys(c.refs[1].root for c in self.copies))


def find_ahead(graph: TileGraph, rings: list[Ring]) -> tuple[list[Ahead], list[str]]:
  """The loops that can copy ahead, and why the other rings' buffers are one slot each.

  A buffer is copied ahead in all pipelined loops that fill it, or in none.
  """
  sites = {c: c.refs[1].root for r in rings for s in r.segments for c in s.copies}
  refused = _refusals(graph, rings, sites)
  found = [a for a in _loops(graph, sites, refused) if a.copies]
  notes = [f"{v.hint or 'buffer'} is one slot: {why}" for v, why in refused.items()]
  return found, notes


def _refusals(graph: TileGraph, rings: list[Ring], sites: dict[Eqn, Var]) -> dict[Var, str]:
  """The buffers that no loop can fill ahead, with reasons."""
  refused: dict[Var, str] = {}
  outside, changed = uses_outside_segments(graph, rings), changed_buffers(graph.body)
  written, inside = written_arrays(graph), _filled_in_loops(graph, sites)
  ahead = {sites[c] for c in inside}
  within = {e for loop in set(inside.values()) for e in walk(loop.blocks[0])}
  for copy, buffer in sites.items():
    if buffer in outside:
      refused.setdefault(buffer, f"it is used at {outside[buffer].loc.short()}, where no copy in the same block "
                                 "reaches")
    elif buffer in changed:
      refused.setdefault(buffer, "the kernel changes what is in it")
    elif copy.refs[0].root in written:
      refused.setdefault(buffer, f"what is copied at {copy.loc.short()} is written by this kernel")
    elif copy not in inside and (copy in within or buffer not in ahead):
      refused.setdefault(buffer, f"the copy at {copy.loc.short()} does not stand directly in a pipelined loop of "
                                 "step 1")
    elif copy in inside:
      missing = _needed(inside[copy], copy, written)
      if isinstance(missing, str):
        refused.setdefault(buffer, missing)
  return refused


def _filled_in_loops(graph: TileGraph, sites: dict[Eqn, Var]) -> dict[Eqn, Eqn]:
  """The loop around each copy that is the only one of its buffer in the body of a pipelined loop."""
  found: dict[Eqn, Eqn] = {}
  for loop in walk(graph.body):
    if _is_pipelined(loop):
      copies = [e for e in walk(loop.blocks[0]) if e in sites]
      direct = set(loop.blocks[0].eqns)
      for c in copies:
        if c in direct and sum(sites[x] is sites[c] for x in copies) == 1:
          found[c] = loop
  return found


def _is_pipelined(eqn: Eqn) -> bool:
  if eqn.primitive is not control.for_loop_p or eqn.params["num_stages"] < 2:
    return False
  step = eqn.values[2]
  return isinstance(step, Literal) and step.value == 1


def _needed(loop: Eqn, copy: Eqn, written: Set[Var]) -> tuple[Eqn, ...] | str:
  """The equations of the body that a copy's views need, in order; or why another iteration cannot compute them."""
  (body,) = loop.blocks
  by = {v: e for e in body.eqns for v in e.outvars}
  carried = set(body.invars[1:])
  needed: set[Eqn] = set()
  todo: list[Atom] = [a for ref in copy.refs for a in ref.dyn]
  while todo:
    a = todo.pop()
    if a in carried:
      return f"where the copy at {copy.loc.short()} starts is carried from iteration to iteration"
    eqn = by.get(a) if isinstance(a, Var) else None
    if eqn is None or eqn in needed:
      continue
    if not _can_repeat(eqn, written):
      return f"where the copy at {copy.loc.short()} starts is computed at {eqn.loc.short()} from more than scalars"
    needed.add(eqn)
    todo += [x for x in eqn.invars if isinstance(x, Var)]
  return tuple(e for e in body.eqns if e in needed)


def _can_repeat(eqn: Eqn, written: Set[Var]) -> bool:
  """Scalars, and elements of arrays that the kernel only reads."""
  if eqn.blocks:
    return False
  if eqn.primitive is memory.load_p:
    ref = eqn.refs[0]
    return ref.type.space is Space.GLOBAL and ref.root not in written and not eqn.outvars[0].shape
  return not effects(eqn) and all(isinstance(a.type, TileType) and not a.shape for a in (*eqn.invars, *eqn.outvars))


def _loops(graph: TileGraph, sites: dict[Eqn, Var], refused: dict[Var, str]) -> Iterator[Ahead]:
  written = written_arrays(graph)
  filled: set[Var] = set()

  def visit(block: Block, repeated: bool) -> Iterator[Ahead]:
    for eqn in block.eqns:
      if eqn in sites:
        filled.add(sites[eqn])
      if _is_pipelined(eqn):
        copies = tuple(e for e in eqn.blocks[0].eqns if e in sites and sites[e] not in refused)
        found = [_needed(eqn, c, written) for c in copies]
        needed = {e for n in found if not isinstance(n, str) for e in n}
        buffers = {sites[c] for c in copies}
        again = repeated or bool(buffers & filled)
        yield Ahead(eqn, copies, tuple(e for e in eqn.blocks[0].eqns if e in needed), again)
        filled.update(buffers)
      loops = eqn.primitive in (control.for_loop_p, control.while_loop_p)
      for inner in eqn.blocks:
        yield from visit(inner, repeated or loops)

  yield from visit(graph.body, bool(graph.options.persistent))


class Multistage:
  """Rewrites the loops.

  Args:
    slots: the buffers with a leading slot dimension that the loops' buffers became.
    stages: at most so many of each loop.
  """

  def __init__(self, ahead: list[Ahead], slots: dict[Var, Var], stages: int, facts: Facts):
    self._of, self._slots, self._stages, self._facts = {a.loop: a for a in ahead}, slots, stages, facts

  def block(self, block: Block) -> Block:
    """The block; what stands in none of the loops accesses slot 0."""
    return self._block(block, {})

  def _block(self, block: Block, live: dict[Var, Atom | int]) -> Block:
    """`live`: the slot of each buffer, where that is not 0."""
    eqns: list[Eqn] = []
    for eqn in block.eqns:
      if eqn in self._of:
        eqns += self._loop(self._of[eqn], live)
      else:
        blocks = tuple(self._block(b, live) for b in eqn.blocks)
        eqns.append(self._redirected(eqn.replace(blocks=blocks) if blocks else eqn, live))
    return dataclasses.replace(block, eqns=tuple(eqns))

  def _loop(self, ahead: Ahead, live: dict[Var, Atom | int]) -> list[Eqn]:
    loop, stages = ahead.loop, min(ahead.stages, self._stages)
    lo, hi = loop.values[:2]
    before = Builder(loop.loc)
    if ahead.again:
      before.sync()
    for s in range(stages - 1):
      self._fill(before, ahead, _plus(before, lo, s), hi, s)
    (body,) = loop.blocks
    slot, b = Var(control.INDEX, "slot"), Builder(loop.loc)
    b.bind(memory.wait_group_p, (), {"kind": "cp_async", "n": stages - 2, "read": False})
    b.sync()
    last = b.select(b.op(elementwise.eq_p, slot, 0), stages - 1, b.sub(slot, 1))
    self._fill(b, ahead, b.add(body.invars[0], stages - 1), hi, last)
    copies = set(ahead.copies)
    rest = dataclasses.replace(body, eqns=tuple(e for e in body.eqns if e not in copies))
    b.eqns += self._block(rest, {**live, **dict.fromkeys(ahead.buffers, slot)}).eqns
    wrapped = b.op(elementwise.eq_p, slot, stages - 1)
    after = b.select(wrapped, 0, b.add(slot, 1))
    inner = Block((*body.invars, slot), tuple(b.eqns), (*body.outs, after))
    done = Var(slot.type)
    return [*before.eqns, loop.replace(invars=(*loop.invars, i32(0)), outvars=(*loop.outvars, done), blocks=(inner,))]

  def _fill(self, b: Builder, ahead: Ahead, index: Atom, hi: Atom, slot: Atom | int) -> None:
    """The copies of iteration `index`, if there is one, and their group."""
    inner = b.inner()
    env: dict[Var, Atom] = {ahead.loop.blocks[0].invars[0]: index}
    for eqn in ahead.needed:
      outs = tuple(Var(v.type, v.hint) for v in eqn.outvars)
      inner.append(eqn.replace(invars=_in(env, eqn.invars), outvars=outs))
      env.update(zip(eqn.outvars, outs, strict=True))
    for copy in ahead.copies:
      src, dst = copy.refs
      view, dynamic = prefixed(dst.view, slot)
      to = RefOperand(self._slots[dst.root], view, dynamic)
      moved = with_refs(copy, (RefOperand(src.root, src.view, _in(env, src.dyn)), to), ahead=True)
      inner.append(moved.replace(primitive=memory.copy_async_p) if copy.params["dispatch"] == "cp_async" else moved)
    if self._exists(index, hi):
      b.eqns += inner.eqns
    else:
      b.when(b.op(elementwise.lt_p, index, hi), inner.block())
    b.bind(memory.commit_group_p, (), {"kind": "cp_async"})

  def _exists(self, index: Atom, hi: Atom) -> bool:
    if not isinstance(index, Literal):
      return False
    assert isinstance(index.value, int)
    return index.value < self._facts[hi].lo

  def _redirected(self, eqn: Eqn, live: dict[Var, Atom | int]) -> Eqn:
    """The slot's views instead of the buffers'."""
    if not any(r.root in self._slots for r in eqn.refs):
      return eqn
    refs = []
    for ref in eqn.refs:
      view, dynamic = prefixed(ref.view, live.get(ref.root, 0)) if ref.root in self._slots else (ref.view, ())
      refs.append(RefOperand(self._slots.get(ref.root, ref.root), view, (*dynamic, *ref.dyn)))
    return with_refs(eqn, refs)


def fitting_stages(ahead: list[Ahead], fits: Callable[[int], bool]) -> int:
  """The most stages of all loops with which `fits` holds; 1 where nothing but one slot each does."""
  return next((n for n in range(max((a.stages for a in ahead), default=1), 1, -1) if fits(n)), 1)


def _in(env: dict[Var, Atom], atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
  return tuple(env.get(a, a) if isinstance(a, Var) else a for a in atoms)


def _plus(b: Builder, x: Atom, n: int) -> Atom:
  if isinstance(x, Literal):
    assert isinstance(x.value, int)
    return i32(x.value + n)
  return b.add(x, n) if n else x
