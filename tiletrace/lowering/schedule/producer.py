"""The producer's program: the slice of the kernel that computes addresses, trip counts and predicates of its copies."""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import Atom, Block, Eqn, Literal, RefOperand, TileGraph, Var, prefixed, walk
from tiletrace.lowering.schedule.builder import Builder, RingState, eviction
from tiletrace.lowering.schedule.fill import FillLoop, Push, drain, fill, is_async, lag_of
from tiletrace.lowering.schedule.mail import Mailbox, Phase
from tiletrace.lowering.schedule.rings import Ring, is_tma
from tiletrace.lowering.schedule.slice import Slice, written_arrays
from tiletrace.lowering.schedule.slots import RingResources
from tiletrace.lowering.select.memory import ThreadCopy


def ring_slice(graph: TileGraph, rings: list[Ring]) -> Slice:
  """What the producer of the rings computes, or why there can be none."""
  return Slice(graph, (c for r in rings for s in r.segments for c in s.copies))


def copied_from_written(graph: TileGraph, rings: list[Ring]) -> str | None:
  """Why the copies cannot run ahead of the consumers: one reads what they write."""
  written = written_arrays(graph)
  for copy in (c for r in rings for s in r.segments for c in s.copies):
    if copy.refs[0].root in written:
      return f"{copy.refs[0].root.hint or 'what is copied'} at {copy.loc.short()} is written by this kernel"
  return None


class Producer:
  """Writes the producer's block for the rings, with fresh variables.

  Args:
    plans: how a warpgroup makes each copy that TMA does not. Without any, the block is for one thread.
    mail: the scalars that the consumers send, and the producer's phases.
  """

  def __init__(self, rings: list[RingResources], states: dict[RingResources, RingState], plans: dict[Eqn, ThreadCopy],
               mail: dict[Var, tuple[Mailbox, Phase]]):
    self.states, self.plans, self.mail = states, plans, mail
    self._of = {c: (r, s) for r in rings for s in r.ring.segments for c in s.copies}

  def block(self, sliced: Slice) -> Block:
    """The whole kernel's slice, before it is placed on the grid."""
    return self._block(dataclasses.replace(sliced.block, invars=()), {})

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
      if not eqn.blocks and eqn.outvars and eqn.outvars[0] in self.mail:
        out += self._receive(eqn, env)
        continue
      moved = eqn.replace(invars=tuple(env.get(a, a) if isinstance(a, Var) else a for a in eqn.invars))
      inner = moved if eqn.primitive.name == "for_loop" else None
      blocks = tuple(self._block(b, env, inner) for b in eqn.blocks)
      out.append(moved.replace(blocks=blocks, outvars=tuple(self._fresh(v, env) for v in eqn.outvars)))
      if inner is not None:
        out += self._drain(eqn.blocks[0], blocks[0], moved)
    return Block(invars, tuple(out), tuple(env.get(a, a) if isinstance(a, Var) else a for a in block.outs))

  def _receive(self, eqn: Eqn, env: dict[Var, Atom]) -> list[Eqn]:
    box, phase = self.mail[eqn.outvars[0]]
    b = Builder(eqn.loc)
    env[eqn.outvars[0]] = box.receive(b, phase, by_warpgroup=bool(self.plans))
    return b.eqns

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
      src = _renamed(src, env)
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
        inner.copy_async(src, dst, (resources.full, slot), multicast=resources.multicast.get(copy, ()),
                         **eviction(copy))
        b.eqns += inner.eqns
    state.advance(b)
    return b.eqns


def _renamed(ref: RefOperand, env: dict[Var, Atom]) -> RefOperand:
  return RefOperand(ref.root, ref.view, tuple(env.get(a, a) if isinstance(a, Var) else a for a in ref.dyn))
