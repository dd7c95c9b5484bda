"""What layout inference knows: constraints between the tile values, fragments and shared buffers of a graph.

Constraints are data with their equation attached, so that a conflict can name both ends.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeGuard

from tiletrace.core.errors import LayoutError
from tiletrace.core.graph import Eqn, TileGraph, Var
from tiletrace.core.rules import RuleTable
from tiletrace.core.types import RefType, Space, TileType
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.layouts.notation import Notation
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.target import Target

Transfer = Callable[[Layout], Layout | None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fixed:
  """`var` must have `layout`; `why` is shown in conflicts."""
  var: Var
  layout: Layout
  eqn: Eqn
  why: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Relates:
  """The layout of `out` follows from that of `operand` and (where `backward` is given) the other way round.

  An operand with another layout is converted before the equation, so `backward` must give the very layout that the
  equation reads.
  """
  operand: Var
  out: Var
  eqn: Eqn
  forward: Transfer
  backward: Transfer


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prefers:
  """Without other wishes `var` has `layout` (coalesced access); `weight` orders the wishes, largest first."""
  var: Var
  layout: Layout
  eqn: Eqn
  weight: int


Constraint = Fixed | Relates | Prefers


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class InferContext:
  """What rules may read.

  Attributes:
    warpgroups: how many warpgroups own the values of an equation.
    reduced: shapes of tiles that are reduced somewhere, and the axes.
  """
  graph: TileGraph
  target: Target
  facts: Facts
  warpgroups: Callable[[Eqn], int]
  reduced: dict[tuple[int, ...], tuple[int, ...]]


layout_rules: RuleTable[Callable[[Eqn, InferContext], Iterable[Constraint]]] = RuleTable("layout")


def same(x: Layout) -> Layout:
  return x


def equal(operand: Var, out: Var, eqn: Eqn) -> Relates:
  return Relates(operand, out, eqn, same, same)


def is_distributed(a: object) -> TypeGuard[Var]:
  """A tile value or fragment of rank 1 or more: spread over threads, so it needs a layout."""
  if not isinstance(a, Var):
    return False
  if isinstance(a.type, TileType):
    return bool(a.type.shape)
  return isinstance(a.type, RefType) and a.type.space is Space.FRAGMENT and bool(a.type.shape)


def written_layout(eqn: Eqn) -> Layout:
  """The layout that the author of an allocation wrote, as a relation over the buffer's shape.

  Raises:
    LayoutError: it is no layout, or none of this shape and space, with the axis or dimension and the reason.
  """
  asked, var = eqn.params["layout"], eqn.outvars[0]
  assert isinstance(var.type, RefType)
  if not isinstance(asked, Layout | Notation):
    raise LayoutError(f"layout= of {var.hint or 'this buffer'} is {asked!r}, which is no layout", loc=eqn.loc,
                      hint="tt.swizzle(128) for shared memory, or S[...] and R[...] of tiletrace.layout")
  try:
    layout = asked.layout(var.type.shape) if isinstance(asked, Notation) else asked
  except LayoutError as e:
    raise LayoutError(f"layout= of {var.hint or 'this buffer'}: {e.message}", loc=eqn.loc, hint=e.hint) from None
  allowed = {"off"} if var.type.space is Space.SHARED else {"reg", "lane", "warp"}
  if layout.valid != var.type.shape or not set(layout.axes) <= allowed:
    raise LayoutError(f"layout= of {var.hint or 'this buffer'} covers {list(layout.valid)} over "
                      f"{', '.join(layout.axes)}; a {var.type.space} buffer of {list(var.type.shape)} lies "
                      f"over {', '.join(sorted(allowed))}",
                      loc=eqn.loc, hint="give the buffer's shape and the axes of its space")
  return layout
