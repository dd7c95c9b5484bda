"""What a producer computes of a kernel: its copies, the control flow around them, and the scalars that these need.

Those of the scalars that take tiles, or references that the kernel writes, are computed by the consumers and sent to
the producer (mail.py). What a loop carries and a branch returns comes along where it is needed, position by position.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Atom, Block, Eqn, TileGraph, Var, walk
from tiletrace.core.ops import control
from tiletrace.core.ops.profile import profile_record_p
from tiletrace.core.rules import effects
from tiletrace.core.types import RefType, Space, TileType

_LOOPS = (control.for_loop_p, control.while_loop_p)


def written_arrays(graph: TileGraph) -> set[Var]:
  return {e.refs[x.operand].root for e in walk(graph.body) if not e.blocks for x in effects(e)
          if isinstance(x, RefEffect) and x.access is Access.WRITE}


class Slice:
  """The slice of a graph for some of its copies.

  Attributes:
    refusal: why there is none, or None.
    sent: scalars that the consumers compute and the producer needs.
    block: the equations of the producer, with the graph's variables; where a variable of `sent` is bound stands the
      consumers' equation.
  """

  def __init__(self, graph: TileGraph, copies: Iterable[Eqn]):
    self._copies, self._written = set(copies), written_arrays(graph)         # and what is recorded beside them
    self._by: dict[Var, tuple[Eqn, int | None]] = {}        # what binds a variable; the position, where that is carried
    self._around: dict[Eqn, tuple[Eqn, ...]] = {}
    self._kept: dict[Eqn, set[int]] = {}                    # control flow, and the positions that are needed
    self._needed: dict[Var, None] = {}                      # in no order but the same every time
    self._users: dict[Var, set[Eqn]] = {}
    self._queue: list[Var] = []
    self.sent: dict[Var, Eqn] = {}
    self.refusal: str | None = None
    self._find(graph.body, ())
    for copy in self._copies:
      self._need((a for ref in copy.refs for a in ref.dyn), copy)
      for eqn in self._around[copy]:
        self._keep(eqn)
    self._drain()
    self._keep_spans(graph)
    self._send_fewer()
    self.block = self._slice(graph.body) if self.refusal is None else Block()

  # ---- what is needed

  def _drain(self) -> None:
    while self._queue and self.refusal is None:
      self._demand(self._queue.pop())

  def _keep_spans(self, graph: TileGraph) -> None:
    """Records of profiling where the producer comes by."""
    for eqn in walk(graph.body):
      if eqn.primitive is profile_record_p and all(outer in self._kept for outer in self._around[eqn]):
        self._copies.add(eqn)
        self._need(eqn.values, eqn)
    self._drain()

  def _find(self, block: Block, around: tuple[Eqn, ...]) -> None:
    for eqn in block.eqns:
      self._around[eqn] = around
      self._by.update((v, (eqn, i if eqn.blocks else None)) for i, v in enumerate(eqn.outvars))
      skipped = int(eqn.primitive is control.for_loop_p)      # the index
      for inner in eqn.blocks:
        self._by.update((v, (eqn, i if i >= 0 else None)) for i, v in enumerate(inner.invars, -skipped))
        self._find(inner, (*around, eqn))

  def _need(self, atoms: Iterable[Atom], user: Eqn) -> None:
    for a in atoms:
      if isinstance(a, Var) and a in self._by and not isinstance(a.type, RefType):
        self._users.setdefault(a, set()).add(user)
        if a not in self._needed:
          self._needed[a] = None
          self._queue.append(a)

  def _keep(self, eqn: Eqn) -> None:
    """What decides whether, and how often, the inside of an equation runs; and so for the equations around it."""
    if eqn in self._kept:
      return
    self._kept[eqn] = set()
    self._need(_deciding(eqn), eqn)
    if eqn.primitive is control.while_loop_p:
      self._need(eqn.blocks[0].outs, eqn)
    for outer in self._around[eqn]:
      self._keep(outer)

  def _demand(self, var: Var) -> None:
    eqn, position = self._by[var]
    assert isinstance(var.type, TileType) and not var.shape, var
    if eqn.blocks:
      self._keep(eqn)
      if position is not None:
        self._kept[eqn].add(position)
        self._need(_carried(eqn, position), eqn)
    elif self._is_own(eqn):
      for outer in self._around[eqn]:
        self._keep(outer)
      self._need(eqn.invars, eqn)
    elif self._in_loop(eqn):
      self._refuse(var, eqn)                  # it would wait for the consumers in each iteration, and not run ahead
    else:
      for outer in self._around[eqn]:
        self._keep(outer)
      self.sent[var] = eqn

  def _in_loop(self, eqn: Eqn) -> bool:
    return any(e.primitive in _LOOPS for e in self._around[eqn])

  def _send_fewer(self) -> None:
    """Instead of a scalar that the producer would use once, for another one, that other one is sent: the sum instead of
    the parts of it that warps have left in shared memory, and the address instead of what it is made of."""
    joined = True
    while joined:
      joined = False
      for var in tuple(self._needed):
        eqn, _ = self._by[var]
        if var in self.sent or var not in self._needed or eqn.blocks or self._in_loop(eqn):
          continue
        if any(isinstance(a, Var) and a in self.sent and self._users[a] == {eqn} for a in eqn.invars):
          self.sent[var], joined = eqn, True
          self._no_longer(eqn)

  def _no_longer(self, user: Eqn) -> None:
    """The producer does not compute `user`, nor what it needs for that alone."""
    for a in user.invars:
      users = self._users.get(a, set()) if isinstance(a, Var) else set()
      if isinstance(a, Var) and user in users:
        users.discard(user)
        eqn, _ = self._by[a]
        if not users and not eqn.blocks:
          del self._needed[a]
          if self.sent.pop(a, None) is None:
            self._no_longer(eqn)

  def _is_own(self, eqn: Eqn) -> bool:
    """The producer computes the equation itself: of scalars, and of arrays that the kernel only reads."""
    if eqn.primitive.name == "load":
      return eqn.refs[0].type.space is Space.GLOBAL and eqn.refs[0].root not in self._written
    return not effects(eqn) and all(not a.shape for a in eqn.invars)

  def _refuse(self, var: Var, eqn: Eqn) -> None:
    self.refusal = (f"what the copies need at {eqn.loc.short()} ({var.hint or var.type}) is computed by the consumers, "
                    "in a loop")

  # ---- the equations

  def _slice(self, block: Block) -> Block:
    out = []
    for eqn in block.eqns:
      if eqn in self._kept:
        out.append(self._control(eqn))
      elif eqn in self._copies or any(v in self._needed for v in eqn.outvars):
        out.append(eqn)
    return dataclasses.replace(block, eqns=tuple(out))

  def _control(self, eqn: Eqn) -> Eqn:
    """With what is needed of the results, and of what is carried."""
    positions = sorted(self._kept[eqn])
    first = {control.for_loop_p: 3, control.while_loop_p: 0}.get(eqn.primitive)
    invars = eqn.invars if first is None else (*eqn.invars[:first], *_at(eqn.invars[first:], positions))
    blocks = []
    for n, block in enumerate(map(self._slice, eqn.blocks)):
      head = int(eqn.primitive is control.for_loop_p)
      condition = eqn.primitive is control.while_loop_p and n == 0
      blocks.append(Block((*block.invars[:head], *_at(block.invars[head:], positions)) if block.invars else (),
                          block.eqns, block.outs if condition else _at(block.outs, positions)))
    return eqn.replace(invars=invars, outvars=_at(eqn.outvars, positions), blocks=tuple(blocks))


def _at(items: Sequence, positions: Sequence[int]) -> tuple:
  return tuple(items[i] for i in positions)


def _deciding(eqn: Eqn) -> tuple[Atom, ...]:
  return {control.for_loop_p: eqn.values[:3], control.while_loop_p: ()}.get(eqn.primitive, eqn.values[:1])


def _carried(eqn: Eqn, position: int) -> list[Atom]:
  """What the value at a position, carried or returned, is made of."""
  if eqn.primitive is control.for_loop_p:
    return [eqn.values[3 + position], eqn.blocks[0].outs[position]]
  if eqn.primitive is control.while_loop_p:
    return [eqn.values[position], eqn.blocks[1].outs[position]]
  return [b.outs[position] for b in eqn.blocks]
