"""Global memory that several threads of a program access in an order that matters."""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Atom, Block, Eqn, RefOperand, TileGraph, Var, walk
from tiletrace.core.ops.atomic import atomic_p
from tiletrace.core.ops.control import cond_p
from tiletrace.core.ops.elementwise import not_p
from tiletrace.core.rules import effects
from tiletrace.core.types import Dyn, Space
from tiletrace.lowering.facts import Facts

_LOOPS = frozenset({"for_loop", "while_loop"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
  """An access of a global array.

  Attributes:
    looped: it stands in a loop.
    moves: two iterations may access an element in different threads: it is at tiles of indices.
    commutes: the name of an atomic operation without a result, None of anything else.
    branches: the branches that it stands in, outside of loops: what each one asks, and how it was answered.
  """
  ref: RefOperand
  written: bool
  looped: bool
  moves: bool
  commutes: str | None
  branches: tuple[tuple[Atom | Eqn, int], ...]


def unordered(graph: TileGraph, facts: Facts) -> frozenset[Var]:
  """The global arrays where one thread's access may have to follow another thread's: written, and accessed again where
  the two views are not known to be apart, nor in two branches of which a program takes one. Programs of one grid are
  never ordered, nor are atomic operations of one kind whose results nobody needs."""
  found: dict[Var, list[_Use]] = {}
  negated: dict[Atom, Atom] = {e.outvars[0]: e.values[0] for e in walk(graph.body) if e.primitive is not_p}

  def visit(block: Block, looped: bool, branches: tuple[tuple[Atom | Eqn, int], ...]) -> None:
    for eqn in block.eqns:
      for use in _uses(eqn, looped, branches):
        found.setdefault(use.ref.root, []).append(use)
      inside = looped or eqn.primitive.name in _LOOPS
      for i, inner in enumerate(eqn.blocks):
        visit(inner, inside, branches if inside else (*branches, _answer(eqn, i, negated)))

  visit(graph.body, False, ())
  return frozenset(root for root, uses in found.items() if _ordered(uses, facts))


def _answer(eqn: Eqn, block: int, negated: Mapping[Atom, Atom]) -> tuple[Atom | Eqn, int]:
  """tt.when's otherwise() is a branch of its own, on the negated condition."""
  if eqn.primitive is not cond_p:
    return eqn, block
  asked = eqn.values[0]
  while asked in negated:
    asked, block = negated[asked], 1 - block
  return asked, block


def _uses(eqn: Eqn, looped: bool, branches: tuple[tuple[Atom | Eqn, int], ...]) -> list[_Use]:
  if eqn.blocks:
    return []
  commutes = eqn.params["op"] if eqn.primitive is atomic_p and not eqn.outvars else eqn.params.get("reduce")
  return [_Use(eqn.refs[e.operand], e.access is Access.WRITE, looped, bool(eqn.params.get("dims")), commutes,
               branches)
          for e in effects(eqn) if isinstance(e, RefEffect) and eqn.refs[e.operand].type.space is Space.GLOBAL]


def _ordered(uses: list[_Use], facts: Facts) -> bool:
  if len({u.commutes for u in uses}) == 1 and uses[0].commutes not in (None, "exchange", "cas"):
    return False
  if any(u.written and u.looped and (u.moves or not _returns_to_its_blocks(u.ref, facts)) for u in uses):
    return True
  return any((a.written or b.written) and not apart(a.ref, b.ref) and not _exclusive(a, b)
             for a, b in itertools.combinations(uses, 2))


def _exclusive(a: _Use, b: _Use) -> bool:
  """One run of a program does not make both."""
  taken = dict(a.branches)
  return any(taken.get(asked, i) != i for asked, i in b.branches)


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
