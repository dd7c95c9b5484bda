"""Simplification: constants folded, equal scalar equations shared, views made static, dead code removed.

What an equation does to memory, its order and its source line stay.
"""
from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Callable
from typing import Any

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Atom, Block, Eqn, Literal, TileGraph, Var
from tiletrace.core.rules import RuleTable, effects
from tiletrace.core.types import Dyn, RefType, TileType, View, ViewDim

# What an equation's result is known to be: (eqn) -> an operand or literal of the result's type, or None.
fold_rules: RuleTable[Callable[[Eqn], Atom | None]] = RuleTable("fold", levels=frozenset())

_COMMUTATIVE = frozenset({"add", "mul", "min", "max", "and", "or", "xor", "eq", "ne"})
_PLACED = frozenset({"warpgroup_id"})  # its value depends on the role that it stands in


def simplify(graph: TileGraph) -> TileGraph:
  """An equivalent graph without what need not be computed. `graph` is not changed."""
  body = _Forward().block(graph.body, ChainMap())
  return graph.replace(body=_Backward().block(body))


class _Forward:
  """Substitutes, folds and shares, in program order."""

  def __init__(self) -> None:
    self._env: dict[Var, Atom] = {}

  def _atom(self, a: Atom) -> Atom:
    return self._env.get(a, a) if isinstance(a, Var) else a

  def block(self, block: Block, known: ChainMap[Any, Var]) -> Block:
    """`known` maps a scalar computation to its variable; entries of a block end with it."""
    eqns: list[Eqn] = []
    for eqn in block.eqns:
      self._eqn(eqn, known, eqns)
    return dataclasses.replace(block, eqns=tuple(eqns), outs=tuple(map(self._atom, block.outs)))

  def _eqn(self, eqn: Eqn, known: ChainMap[Any, Var], out: list[Eqn]) -> None:
    given, eqn = eqn, static_views(eqn.replace(invars=tuple(map(self._atom, eqn.invars))))
    if given.primitive.name == "for_loop" and _stands(given.values[2], eqn.values[2]):
      self._env.update(zip(eqn.outvars, eqn.values[3:]))
      return
    if eqn.primitive.name in _COMMUTATIVE and isinstance(eqn.invars[0], Literal):
      eqn = eqn.replace(invars=eqn.invars[::-1])
    if self._control(eqn, known, out):
      return
    rule = fold_rules.get(eqn.primitive)
    folded = rule(eqn) if rule is not None else None
    if folded is not None:
      assert folded.type == eqn.outvars[0].type, (eqn, folded)
      self._env[eqn.outvars[0]] = folded
      return
    if _is_scalar(eqn):
      key = (eqn.primitive, eqn.invars, tuple(sorted(eqn.params.items())))
      if key in known:
        self._env[eqn.outvars[0]] = known[key]
        return
      known[key] = eqn.outvars[0]
    out.append(eqn.replace(blocks=tuple(self.block(b, known.new_child()) for b in eqn.blocks)))

  def _control(self, eqn: Eqn, known: ChainMap[Any, Var], out: list[Eqn]) -> bool:
    """A branch whose condition is known is inlined, a loop without iterations is its initial values."""
    name = eqn.primitive.name
    if name == "cond" and isinstance(eqn.values[0], Literal):
      taken = 0 if eqn.values[0].value else 1
      if taken < len(eqn.blocks):
        block = eqn.blocks[taken]
        for inner in block.eqns:
          self._eqn(inner, known, out)
        self._env.update(zip(eqn.outvars, map(self._atom, block.outs)))
      return True
    if name == "for_loop" and all(isinstance(a, Literal) for a in eqn.values[:3]):
      lo, hi, step = (int(a.value) for a in eqn.values[:3] if isinstance(a, Literal))
      if not range(lo, hi, step):
        self._env.update(zip(eqn.outvars, eqn.values[3:]))
        return True
    return False


def _stands(given: Atom, step: Atom) -> bool:
  """A step that was computed, and is found not to be positive: no iterations, as where only the GPU finds that."""
  return isinstance(given, Var) and isinstance(step, Literal) and step.value <= 0


def _is_scalar(eqn: Eqn) -> bool:
  """Pure, with one scalar result: may be shared."""
  if len(eqn.outvars) != 1 or eqn.blocks or eqn.primitive.name in _PLACED:
    return False
  type = eqn.outvars[0].type
  return isinstance(type, TileType) and not type.shape and not effects(eqn)


class _Backward:
  """Removes what nothing needs, last equation first."""

  def __init__(self) -> None:
    self._used: set[Var] = set()

  def _use(self, atoms: tuple[Atom, ...]) -> None:
    self._used.update(a for a in atoms if isinstance(a, Var))

  def block(self, block: Block) -> Block:
    self._use(block.outs)
    eqns: list[Eqn] = []
    for eqn in reversed(block.eqns):
      before = set(self._used) if eqn.blocks else self._used
      needed = any(v in self._used for v in eqn.outvars)
      eqn = eqn.replace(blocks=tuple(map(self.block, eqn.blocks))) if eqn.blocks else eqn
      if needed or acts(eqn):
        self._use(eqn.invars)
        eqns.append(eqn)
      else:
        self._used = before
    return dataclasses.replace(block, eqns=tuple(reversed(eqns)))


def acts(eqn: Eqn) -> bool:
  """The equation does more than compute its results: it writes, orders, or holds something that does."""
  if eqn.blocks:
    return eqn.primitive.level == 0 or any(acts(e) for b in eqn.blocks for e in b.eqns)
  return any(not (isinstance(e, RefEffect) and e.access is Access.READ) for e in effects(eqn))


# --- views

def static_views(eqn: Eqn) -> Eqn:
  """The equation with literal dynamic operands of its views moved into the views, and equal operands joined."""
  if not eqn.params.get("views"):
    return eqn
  views, invars = [], []
  for r in eqn.refs:
    view, dyn = _static_view(r.view, r.dyn, r.type)
    views.append(view)
    invars += [r.root, *dyn]
  return eqn.replace(invars=(*invars, *eqn.values), params={**eqn.params, "views": tuple(views)})


def _static_view(view: View, operands: tuple[Atom, ...], root: RefType) -> tuple[View, list[Atom]]:
  dyn: list[Atom] = []

  def part(p: Any) -> Any:
    if not isinstance(p, Dyn):
      return p
    a = operands[p.index]
    if isinstance(a, Literal):
      return int(a.value)
    if a not in dyn:
      dyn.append(a)
    return Dyn(dyn.index(a))

  def dim(d: ViewDim, extent: int) -> ViewDim:
    start, size = part(d.start), part(d.size)
    kept: list[tuple[int | Dyn, int | Dyn]] = []
    for lo, hi in d.edges:
      lo, hi = _resolve(lo, operands), _resolve(hi, operands)
      if not _within(start, size, d.stride, lo, hi, extent):
        edge = (part(lo), part(hi))
        if edge not in kept:
          kept.append(edge)
    return ViewDim(start, size, d.stride, d.squeezed, tuple(kept))

  return View(tuple(dim(d, n) for d, n in zip(view.dims, root.shape)), view.perm), dyn


def _resolve(p: int | Dyn, operands: tuple[Atom, ...]) -> int | Dyn:
  a = operands[p.index] if isinstance(p, Dyn) else None
  return int(a.value) if isinstance(a, Literal) else p


def _within(start: int | Dyn, size: int | Dyn, stride: int, lo: int | Dyn, hi: int | Dyn, extent: int) -> bool:
  """The edge [lo, hi) cuts nothing off: it holds the whole root, or all elements of the view."""
  if not (isinstance(lo, int) and isinstance(hi, int)):
    return False
  if lo <= 0 and isinstance(extent, int) and hi >= extent:
    return True
  return (isinstance(start, int) and isinstance(size, int)
          and lo <= start and start + (size - 1) * stride < hi)
