"""Global memory that several threads of a program access in an order that matters."""
from __future__ import annotations

import itertools

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Block, Eqn, RefOperand, TileGraph, Var
from tiletrace.core.rules import effects
from tiletrace.core.types import Dyn, Space
from tiletrace.lowering.facts import Facts

_LOOPS = frozenset({"for_loop", "while_loop"})


def unordered(graph: TileGraph, facts: Facts) -> frozenset[Var]:
  """The global arrays where one thread's access may have to follow another thread's: written, and accessed again where
  the two views are not known to be apart. Programs of one grid are never ordered."""
  found: dict[Var, list[tuple[RefOperand, bool, bool]]] = {}  # (view, written, in a loop)

  def visit(block: Block, looped: bool) -> None:
    for eqn in block.eqns:
      for ref, written in _accesses(eqn):
        found.setdefault(ref.root, []).append((ref, written, looped))
      for inner in eqn.blocks:
        visit(inner, looped or eqn.primitive.name in _LOOPS)

  visit(graph.body, False)
  return frozenset(root for root, uses in found.items() if _ordered(uses, facts))


def _accesses(eqn: Eqn) -> list[tuple[RefOperand, bool]]:
  if eqn.blocks:
    return []
  return [(eqn.refs[e.operand], e.access is Access.WRITE) for e in effects(eqn)
          if isinstance(e, RefEffect) and eqn.refs[e.operand].type.space is Space.GLOBAL]


def _ordered(uses: list[tuple[RefOperand, bool, bool]], facts: Facts) -> bool:
  if any(written and looped and not _returns_to_its_blocks(ref, facts) for ref, written, looped in uses):
    return True
  return any((a[1] or b[1]) and not apart(a[0], b[0]) for a, b in itertools.combinations(uses, 2))


def _returns_to_its_blocks(ref: RefOperand, facts: Facts) -> bool:
  """Two iterations access the same block, each thread its own elements, or blocks that do not meet."""
  for dim in ref.view.dims:
    if isinstance(dim.start, Dyn):
      assert isinstance(dim.size, int)
      if facts[ref.dyn[dim.start.index]].divisor % (dim.size * dim.stride):
        return False
  return True


def apart(a: RefOperand, b: RefOperand) -> bool:
  """Whether two views of one array certainly have no element in common: their ranges along some dimension are
  constants that do not meet."""
  for x, y in zip(a.view.dims, b.view.dims, strict=True):
    if isinstance(x.start, int) and isinstance(y.start, int) and isinstance(x.size, int) and isinstance(y.size, int):
      if x.start + (x.size - 1) * x.stride < y.start or y.start + (y.size - 1) * y.stride < x.start:
        return True
  return False
