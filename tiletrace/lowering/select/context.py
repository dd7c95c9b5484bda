"""What predicates read, and the questions that several families ask of a global access."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, RefOperand, TileGraph, Var
from tiletrace.core.rules import RuleTable
from tiletrace.core.types import Dyn, Space
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.options import CompileOptions
from tiletrace.lowering.tables import coordinates, split_sum
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
    assert isinstance(dim.size, int), ref
    last = start.hi + (dim.size - 1) * dim.stride
    if dim.edges or start.lo < 0 or last >= extent:
      out.append(d)
  return tuple(out)


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
      last = ref.type.shape[d] - dim.size  # type: ignore[operator]
      raise LoweringError(f"{eqn.primitive}: the index of {name} {ref.type} along dimension {d} is not provably from 0 "
                          f"to {last}: it {known}", loc=eqn.loc, hint=f"bound it: i % {last + 1}, or a loop index")


def access_width(ref: RefOperand, layout: Layout, threads: int, guard: tuple[int, ...], facts: Facts) -> int:
  """Elements of the widest access (16 bytes at most): consecutive in every thread, provably aligned, and wholly
  inside or outside the array."""
  item = ref.type.dtype.itemsize
  shape = ref.type.shape
  steps = [math.prod(shape[d + 1:]) for d in range(len(shape))]
  table = coordinates(layout, threads)
  kept = list(ref.view.perm)
  scale = np.asarray([ref.view.dims[p].stride * steps[p] for p in kept], np.int64)
  base, delta = split_sum((table.astype(np.int64) * scale).sum(-1) if kept else np.zeros(table.shape[:2], np.int64))
  width = 1
  while width * 2 * item <= 16 and _fits(ref, base, delta, width * 2, steps, guard, facts):
    width *= 2
  return width


def _fits(ref: RefOperand, base: np.ndarray, delta: np.ndarray, width: int, steps: list[int], guard: tuple[int, ...],
          facts: Facts) -> bool:
  if len(delta) % width:
    return False
  groups = np.sort(delta).reshape(-1, width)
  if (groups != groups[:, :1] + np.arange(width)).any() or (groups[:, 0] % width).any() or (base % width).any():
    return False
  inner = len(steps) - 1
  for d, dim in enumerate(ref.view.dims):
    start = facts[ref.dyn[dim.start.index] if isinstance(dim.start, Dyn) else dim.start]
    if start.divisor * steps[d] % width:
      return False
    if d == inner and (ref.type.shape[d] % width or dim.edges or (isinstance(dim.size, int) and dim.size % width)) and (
        d in guard or dim.edges or dim.size % width):  # type: ignore[operator]
      return False
  return True
