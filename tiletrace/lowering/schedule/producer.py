"""The producer's program: the slice of the kernel that computes addresses, trip counts and predicates of its copies."""
from __future__ import annotations

import dataclasses

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Atom, Block, Eqn, Literal, RefOperand, TileGraph, Var, prefixed, walk
from tiletrace.core.rules import effects
from tiletrace.core.types import RefType, Space
from tiletrace.lowering.schedule.builder import Builder, RingState
from tiletrace.lowering.schedule.consumer import RingResources
from tiletrace.lowering.schedule.fill import FillLoop, Push, drain, fill, is_async, lag_of
from tiletrace.lowering.schedule.rings import Ring, is_tma
from tiletrace.lowering.select.memory import ThreadCopy


def slice_refusal(graph: TileGraph, rings: list[Ring]) -> str | None:
  """Why the copies' addresses cannot be computed by a producer, or None."""
  copies = dict.fromkeys(c for r in rings for s in r.segments for c in s.copies)
  written = written_arrays(graph)
  for copy in copies:
    if copy.refs[0].root in written:
      return f"{copy.refs[0].root.hint or 'what is copied'} at {copy.loc.short()} is written by this kernel"
  sliced = _slice(graph.body, set(copies), written)
  bound = set(graph.invars) | {v for b in _blocks(sliced) for v in b.invars}
  bound |= {v for e in walk(sliced) for v in e.outvars} | {v for r in rings for v in r.buffers}
  for eqn in walk(sliced):
    for a in eqn.invars:
      if isinstance(a, Var) and a not in bound:
        return f"what the copies need at {eqn.loc.short()} ({a.hint or a.type}) is computed by the consumers"
  for eqn in walk(sliced):
    if eqn.primitive.name == "while_loop" or (eqn.blocks and eqn.outvars):
      return f"the loop at {eqn.loc.short()} carries values besides its copies"
  return None


def written_arrays(graph: TileGraph) -> set[Var]:
  return {e.refs[x.operand].root for e in walk(graph.body) if not e.blocks for x in effects(e)
          if isinstance(x, RefEffect) and x.access is Access.WRITE}


def _blocks(block: Block) -> list[Block]:
  out = [block]
  for eqn in block.eqns:
    for inner in eqn.blocks:
      out += _blocks(inner)
  return out


def _slice(block: Block, copies: set[Eqn], written: set[Var]) -> Block:
  """The copies, the control flow around them, and every pure computation of a scalar (what is not used is dead code,
  removed afterwards)."""
  kept = []
  for eqn in block.eqns:
    if eqn in copies:
      kept.append(eqn)
    elif eqn.blocks:
      if any(e in copies for b in eqn.blocks for e in walk(b)):
        kept.append(eqn.replace(blocks=tuple(_slice(b, copies, written) for b in eqn.blocks)))
    elif _is_scalar(eqn, written):
      kept.append(eqn)
  return dataclasses.replace(block, eqns=tuple(kept), outs=())


def _is_scalar(eqn: Eqn, written: set[Var]) -> bool:
  if len(eqn.outvars) != 1:
    return False
  type_ = eqn.outvars[0].type
  if getattr(type_, "shape", None) != () or isinstance(type_, RefType):
    return False
  if eqn.primitive.name == "load":
    return eqn.refs[0].type.space is Space.GLOBAL and eqn.refs[0].root not in written
  return not effects(eqn)


class Producer:
  """Writes the producer's block for the rings, with fresh variables.

  Args:
    plans: how a warpgroup makes each copy that TMA does not. Without any, the block is for one thread.
  """

  def __init__(self, rings: list[RingResources], states: dict[RingResources, RingState], plans: dict[Eqn, ThreadCopy]):
    self.states, self.plans = states, plans
    self._of = {c: (r, s) for r in rings for s in r.ring.segments for c in s.copies}

  def block(self, graph: TileGraph) -> Block:
    """The whole kernel's slice, before it is placed on the grid."""
    written = written_arrays(graph)
    return self._block(dataclasses.replace(_slice(graph.body, set(self._of), written), invars=()), {})

  def _block(self, block: Block, env: dict[Var, Atom], loop: Eqn | None = None) -> Block:
    """A block; `loop`: it is the body of this loop, whose operands are the producer's already."""
    invars = tuple(self._fresh(v, env) for v in block.invars)
    around = self._fill_loop(block, invars, loop) if loop is not None else None
    out: list[Eqn] = []
    for eqn in block.eqns:
      if eqn in self._of:
        resources, segment = self._of[eqn]
        if eqn is segment.copies[-1]:
          out += self._push(resources, segment.copies, env, around)
        continue
      moved = eqn.replace(invars=tuple(env.get(a, a) if isinstance(a, Var) else a for a in eqn.invars))
      inner = moved if eqn.primitive.name == "for_loop" else None
      blocks = tuple(self._block(b, env, inner) for b in eqn.blocks)
      out.append(moved.replace(blocks=blocks, outvars=tuple(self._fresh(v, env) for v in eqn.outvars)))
      if inner is not None:
        out += self._drain(eqn.blocks[0], blocks[0], moved)
    return Block(invars, tuple(out), ())

  # ---- arrivals that come late

  def _fill_loop(self, body: Block, invars: tuple[Var, ...], loop: Eqn) -> FillLoop | None:
    """What cp.async in the loop needs to arrive late; None where the loop does not push each ring once an iteration."""
    lo, hi, step = loop.values[:3]
    pushes = self._pushes(body)
    rings = [r for r, _ in pushes]
    nested = any(e in self._of for eqn in body.eqns for b in eqn.blocks for e in walk(b))
    if not pushes or nested or len(set(rings)) < len(rings) or not isinstance(step, Literal) or step.value != 1:
      return None
    groups = sum(any(map(is_async, copies)) for _, copies in pushes)
    return FillLoop(invars[0], lo, hi, groups, lag_of([r.ring for r in rings]))

  def _pushes(self, body: Block) -> list[tuple[RingResources, tuple[Eqn, ...]]]:
    found = (self._of[e] for e in body.eqns if e in self._of)
    return list(dict.fromkeys((r, s.copies) for r, s in found))

  def _drain(self, body: Block, written: Block, loop: Eqn) -> list[Eqn]:
    around = self._fill_loop(body, written.invars, loop)
    if around is None:
      return []
    late = [(r, self.states[r]) for r, copies in self._pushes(body) if any(map(is_async, copies))]
    b = Builder(loop.loc)
    drain(b, around, late)
    return b.eqns

  def _fresh(self, v: Var, env: dict[Var, Atom]) -> Var:
    new = Var(v.type, v.hint)
    env[v] = new
    return new

  def _push(self, resources: RingResources, copies: tuple[Eqn, ...], env: dict[Var, Atom],
            loop: FillLoop | None) -> list[Eqn]:
    """acquire the slot, expect all bytes of the push, start every copy, go on."""
    b = Builder(copies[0].loc)
    state = self.states[resources]
    slot, phase = state.slot(b), state.phase(b)
    moved = []
    for copy in copies:
      src, dst = copy.refs
      src = RefOperand(src.root, src.view, tuple(env.get(a, a) if isinstance(a, Var) else a for a in src.dyn))
      view, dynamic = prefixed(dst.view, slot)
      moved.append((copy, src, RefOperand(resources.buffers[dst.root], view, dynamic)))
    if self.plans:
      by_tma = tuple(m for m in moved if is_tma(m[0]))
      by_threads = tuple((*m, self.plans[m[0]]) for m in moved if not is_tma(m[0]))
      fill(b, Push(resources, state, slot, phase, by_tma, by_threads), loop)
    else:
      b.wait(resources.empty, slot, phase)
      b.arrive_expect_tx(resources.full, slot, resources.ring.nbytes)
      for copy, src, dst in moved:
        inner = Builder(copy.loc)
        inner.copy_async(src, dst, (resources.full, slot), multicast=resources.multicast.get(copy, ()))
        b.eqns += inner.eqns
    state.advance(b)
    return b.eqns
