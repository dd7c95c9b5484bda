"""What predicates read, and the questions that several families ask of a global access."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, RefOperand, TileGraph, Var
from tiletrace.core.rules import RuleTable
from tiletrace.core.types import Dyn, Size, Space, ViewDim
from tiletrace.lowering.facts import Facts, extent_fact
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.options import CompileOptions
from tiletrace.lowering.strides import Offsets, divisor, offsets, row_major_strides
from tiletrace.lowering.tables import coordinates
from tiletrace.lowering.target import Target
from tiletrace.lowering.variants import Choice

WARPGROUP = 128


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SelectContext:
  """What predicates read.

  Attributes:
    warpgroups: how many own the equation's values.
    explicit: the author wrote the roles.
    unordered: global arrays whose accesses threads must order (hazards.py).
  """
  graph: TileGraph
  layouts: dict[Var, Layout]
  facts: Facts
  target: Target
  options: CompileOptions
  warpgroups: Callable[[Eqn], int]
  explicit: bool
  unordered: frozenset[Var]

  def threads(self, eqn: Eqn) -> int:
    return WARPGROUP * self.warpgroups(eqn)


# (eqn, ctx) -> (the equation with its choices as parameters, the record of the choice or None)
select_rules: RuleTable[Callable[[Eqn, SelectContext], tuple[Eqn, Choice | None]]] = RuleTable(
    "select", levels=frozenset())


def guard_dims(ref: RefOperand, facts: Facts) -> tuple[int, ...]:
  """Root dimensions along which the view is not provably inside the array and the views around it."""
  out = []
  for d, (dim, extent) in enumerate(zip(ref.view.dims, ref.type.shape, strict=True)):
    start = facts[ref.dyn[dim.start.index] if isinstance(dim.start, Dyn) else dim.start]
    assert not isinstance(dim.size, Dyn), ref
    beyond = isinstance(dim.size, int) and start.hi + (dim.size - 1) * dim.stride >= extent_fact(extent).lo
    if start.lo < 0 or beyond or not all(_is_within(ref, dim, edge, facts) for edge in dim.edges):
      out.append(d)                                 # a Size is the root's own
  return tuple(out)


def _is_within(ref: RefOperand, dim: ViewDim, edge: tuple[Any, Any], facts: Facts) -> bool:
  """Whether the view is provably inside of one that it cuts."""
  start, lo, hi = (ref.dyn[p.index] if isinstance(p, Dyn) else p for p in (dim.start, *edge))
  if any(isinstance(x, Size) for x in (start, lo, hi, dim.size)):
    return False
  last = (dim.size - 1) * dim.stride  # type: ignore[operator]
  return facts.difference(start, lo).lo >= 0 and facts.difference(hi, start).lo > last


def check_in_range(eqn: Eqn, ctx: SelectContext) -> None:
  """Shared memory has no edges: a view of it must provably lie inside.

  Raises:
    LoweringError: it may not, with what is known of its start.
  """
  for ref in eqn.refs:
    for d in guard_dims(ref, ctx.facts) if ref.type.space is Space.SHARED else ():
      dim = ref.view.dims[d]
      assert isinstance(dim.start, Dyn), "constant views are checked where they are made"
      start, name = ctx.facts[ref.dyn[dim.start.index]], ref.root.hint or "the buffer"
      known = "is any number" if start.lo < -(2**30) or start.hi > 2**30 else f"runs from {start.lo} to {start.hi}"
      last = ref.type.shape[d] - 1 - (dim.size - 1) * dim.stride  # type: ignore[operator]
      cut = ", and inside of the part of it that this part is cut from" if dim.edges else ""
      hint = "cut the buffer once, by one index that is bounded" if cut else (
        f"bound it: i % {last + 1}, or a loop index")
      raise LoweringError(f"{eqn.primitive}: the index of {name} {ref.type} along dimension {d} is not provably from 0 "
                          f"to {last}{cut}: it {known}", loc=eqn.loc, hint=hint)


def access_width(ref: RefOperand, layout: Layout, threads: int, guard: tuple[int, ...], facts: Facts) -> int:
  """Elements of the widest access (16 bytes at most): consecutive in every thread, provably aligned, and wholly
  inside or outside the array."""
  item, at = ref.type.dtype.itemsize, offsets(ref, coordinates(layout, threads))
  width = 1
  while width * 2 * item <= 16 and _fits(ref, at, width * 2, guard, facts):
    width *= 2
  return width


def _fits(ref: RefOperand, at: Offsets, width: int, guard: tuple[int, ...], facts: Facts) -> bool:
  groups = at.groups(width)
  if groups is None or (at.delta[groups[:, 0]] % width).any() or (at.base % width).any():
    return False
  strides = row_major_strides(ref.type.shape)
  inner = len(strides) - 1
  for d, (dim, stride) in enumerate(zip(ref.view.dims, strides, strict=True)):
    start = facts[ref.dyn[dim.start.index] if isinstance(dim.start, Dyn) else dim.start]
    rows = 1 if isinstance(stride, Size) and not dim.squeezed else start.divisor      # of which any may be meant
    if rows * divisor(stride) % width:
      return False
    extent = divisor(ref.type.shape[d])
    if d == inner and (extent % width or dim.edges or (isinstance(dim.size, int) and dim.size % width)) and (
        d in guard or dim.edges or dim.size % width):  # type: ignore[operator]
      return False
  return True
