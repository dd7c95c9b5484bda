"""The producer's program: the slice of the kernel that computes addresses, trip counts and predicates of its copies."""
from __future__ import annotations

import dataclasses

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Atom, Block, Eqn, RefOperand, TileGraph, Var, prefixed, walk
from tiletrace.core.rules import effects
from tiletrace.core.types import RefType, Space
from tiletrace.lowering.schedule.builder import Builder, RingState
from tiletrace.lowering.schedule.consumer import RingResources
from tiletrace.lowering.schedule.rings import Ring


def slice_refusal(graph: TileGraph, rings: list[Ring]) -> str | None:
  """Why the copies' addresses cannot be computed by a producer, or None."""
  copies = dict.fromkeys(c for r in rings for s in r.segments for c in s.copies)
  written = _written(graph)
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


def _written(graph: TileGraph) -> set[Var]:
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
  if len(eqn.outvars) != 1 or getattr(eqn.outvars[0].type, "shape", None) != () or isinstance(eqn.outvars[0].type, RefType):
    return False
  if eqn.primitive.name == "load":
    return eqn.refs[0].type.space is Space.GLOBAL and eqn.refs[0].root not in written
  return not effects(eqn)


class Producer:
  """Writes the producer's block for the rings, with fresh variables."""

  def __init__(self, rings: list[RingResources], states: dict[RingResources, RingState]):
    self.states = states
    self._of = {c: (r, s) for r in rings for s in r.ring.segments for c in s.copies}

  def block(self, graph: TileGraph) -> Block:
    """The whole kernel's slice, before it is placed on the grid."""
    written = _written(graph)
    return self._block(_slice(graph.body, set(self._of), written), {})

  def _block(self, block: Block, env: dict[Var, Atom]) -> Block:
    invars = tuple(self._fresh(v, env) for v in block.invars)
    out: list[Eqn] = []
    for eqn in block.eqns:
      if eqn in self._of:
        resources, segment = self._of[eqn]
        if eqn is segment.copies[-1]:
          out += self._push(resources, segment.copies, env)
        continue
      invars_ = tuple(env.get(a, a) if isinstance(a, Var) else a for a in eqn.invars)
      blocks = tuple(self._block(b, env) for b in eqn.blocks)
      outvars = tuple(self._fresh(v, env) for v in eqn.outvars)
      out.append(eqn.replace(invars=invars_, blocks=blocks, outvars=outvars))
    return Block(invars, tuple(out), ())

  def _fresh(self, v: Var, env: dict[Var, Atom]) -> Var:
    new = Var(v.type, v.hint)
    env[v] = new
    return new

  def _push(self, resources: RingResources, copies: tuple[Eqn, ...], env: dict[Var, Atom]) -> list[Eqn]:
    """acquire the slot, expect all bytes of the push, start every copy, go on."""
    b = Builder(copies[0].loc)
    state = self.states[resources]
    slot = state.slot(b)
    b.wait(resources.empty, slot, state.phase(b))
    b.arrive_expect_tx(resources.full, slot, resources.ring.nbytes)
    for copy in copies:
      inner = Builder(copy.loc)
      src, dst = copy.refs
      src = RefOperand(src.root, src.view, tuple(env.get(a, a) if isinstance(a, Var) else a for a in src.dyn))
      view, dynamic = prefixed(dst.view, slot)
      target = RefOperand(resources.buffers[dst.root], view, dynamic)
      inner.copy_async(src, target, (resources.full, slot))
      b.eqns += inner.eqns
    state.advance(b)
    return b.eqns
