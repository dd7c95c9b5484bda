"""Layout inference: anchors first, then wishes, each spread as far as exact transfer functions carry it.

What still disagrees becomes a `relayout` equation at the operand that disagrees: never an error where a conversion
exists, and never a silent one (the report lists them).
"""
from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable

import numpy as np

# The rules register themselves; this list of imports is the list of what can be laid out.
import tiletrace.lowering.infer.control
import tiletrace.lowering.infer.cumulative
import tiletrace.lowering.infer.debug
import tiletrace.lowering.infer.elementwise
import tiletrace.lowering.infer.gather
import tiletrace.lowering.infer.memory
import tiletrace.lowering.infer.mma
import tiletrace.lowering.infer.prefetch
import tiletrace.lowering.infer.profile
import tiletrace.lowering.infer.reduce
import tiletrace.lowering.infer.relayout
import tiletrace.lowering.infer.shape  # noqa: F401
from tiletrace.core.errors import LayoutError, LoweringError
from tiletrace.core.graph import Block, Eqn, TileGraph, Var, walk
from tiletrace.core.ops.cumulative import CUMULATIVE
from tiletrace.core.ops.reduce import REDUCTIONS
from tiletrace.core.ops.relayout import relayout_p
from tiletrace.core.ops.shape import broadcast_in_dim_p, concatenate_p, reshape_p, slice_p, transpose_p
from tiletrace.core.types import RefType, TileType
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.infer.constraints import (
  Constraint,
  Fixed,
  InferContext,
  Prefers,
  Relates,
  equal,
  is_distributed,
  layout_rules,
)
from tiletrace.lowering.infer.cut import improve
from tiletrace.lowering.infer.shape import default_layout
from tiletrace.lowering.infer.shared import shared_layouts
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.relayout import classify
from tiletrace.lowering.ownership import role_sizes
from tiletrace.lowering.target import Target

_BY_ELEMENT = (broadcast_in_dim_p, reshape_p, slice_p, transpose_p)      # what their emitters take registers by


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
  """A graph whose distributed values, fragments and shared buffers all have a layout."""
  graph: TileGraph
  layouts: dict[Var, Layout]


def infer_layouts(graph: TileGraph, target: Target) -> LaidOut:
  """Finds a layout for every tile value, fragment and shared buffer.

  Raises:
    LayoutError: two anchors want different layouts of one fragment (both places are named).
    LoweringError: a value of no elements is left: what only has to do with such is folded before.
  """
  _check_elements(graph)
  reduced = {e.values[0].shape: (e.params["axis"],) for e in walk(graph.body) if e.primitive in CUMULATIVE}
  reduced |= {e.values[0].shape: e.params["axes"] for e in walk(graph.body) if e.primitive in REDUCTIONS}
  ctx = InferContext(graph, target, Facts(graph), role_sizes(graph).__getitem__, reduced)
  constraints = {e: list(layout_rules[e.primitive](e, ctx)) for e in walk(graph.body)}
  solver = _Solver([c for cs in constraints.values() for c in cs])
  solver.run()
  for eqn in walk(graph.body):
    for var in (*eqn.outvars, *(v for b in eqn.blocks for v in b.invars)):
      if is_distributed(var) and var not in solver.layouts:
        solver.assign(var, default_layout(var, eqn, ctx))
        solver.propagate()
  solver.improve(_frequencies(graph, ctx.facts).__getitem__)
  layouts = {**solver.layouts, **shared_layouts(ctx)}
  body = _Converter(constraints, layouts).block(graph.body)
  return LaidOut(graph.replace(body=body), layouts)


def _check_elements(graph: TileGraph) -> None:
  for eqn in walk(graph.body):
    for var in (*eqn.outvars, *(v for b in eqn.blocks for v in b.invars), *eqn.values):
      if isinstance(var.type, TileType) and 0 in var.type.shape:
        raise LoweringError(f"{eqn.primitive} of {var.type}: a value of no elements has no registers", loc=eqn.loc,
                            hint="leave it out where it is empty: shapes are Python numbers, and Python's if decides")


class _Solver:
  """Layouts of variables, from anchors outwards."""

  def __init__(self, constraints: list[Constraint]):
    self.layouts: dict[Var, Layout] = {}
    self.labels: dict[Var, int] = {}  # the anchor, or wish, that a layout came from
    self.fixed_by: dict[Var, Fixed] = {}
    self._origins: list[tuple[Var, Layout]] = []
    self._queue: deque[Var] = deque()
    self._relations = [c for c in constraints if isinstance(c, Relates)]
    self._anchors = [c for c in constraints if isinstance(c, Fixed)]
    for c in self._anchors:  # what an op asks of a value is a use of it: a conversion may lie between the two
      if isinstance(c.var.type, TileType):
        use = Var(c.var.type, c.var.hint)
        self._relations.append(equal(c.var, use, c.eqn))
        self._anchors[self._anchors.index(c)] = dataclasses.replace(c, var=use)
    self._links: dict[Var, list[Relates]] = {}
    for c in self._relations:
      self._links.setdefault(c.operand, []).append(c)
      self._links.setdefault(c.out, []).append(c)
    self._wishes = sorted((c for c in constraints if isinstance(c, Prefers)), key=lambda c: -c.weight)

  def run(self) -> None:
    for c in self._anchors:
      first = self.fixed_by.setdefault(c.var, c)
      if first.layout != c.layout and isinstance(c.var.type, RefType):
        raise _contradiction(first, c)
      if c.var not in self.layouts:
        self.assign(c.var, first.layout)
    self.propagate()
    for c in self._wishes:
      if c.var not in self.layouts:
        self.assign(c.var, c.layout)
        self.propagate()

  def improve(self, frequency: Callable[[Eqn], int]) -> None:
    """Moves the conversions between anchors to where they, and what is computed more than once, cost least."""
    if all(self.labels.get(c.operand) == self.labels.get(c.out) for c in self._relations):
      return
    spreads = [self._spread(*origin) for origin in self._origins]
    pinned = {var for var, _ in self._origins[:len({c.var for c in self._anchors})]}
    pinned |= {v for v in self.layouts if isinstance(v.type, RefType)}
    times = {c.out: frequency(c.eqn) for c in self._relations}
    self.labels = improve(
        self.labels, spreads, self._relations,
        lambda link, have, want: frequency(link.eqn) * conversion_cost(link.operand, have, want),
        lambda var, layout: times.get(var, 1) * recomputed(var, layout), pinned)
    self.layouts = {v: spreads[label][v] for v, label in self.labels.items()}

  def _spread(self, var: Var, layout: Layout) -> dict[Var, Layout]:
    """The layouts of all variables that this anchor alone reaches."""
    reached, queue = {var: layout}, deque([var])
    while queue:
      v = queue.popleft()
      for link in self._links.get(v, ()):
        other, transfer = (link.out, link.forward) if link.operand is v else (link.operand, link.backward)
        found = transfer(reached[v]) if other not in reached else None
        if found is not None:
          reached[other] = found
          queue.append(other)
    return reached

  def assign(self, var: Var, layout: Layout) -> None:
    """A new origin."""
    self.labels[var] = len(self._origins)
    self._origins.append((var, layout))
    self.layouts[var] = layout
    self._queue.append(var)

  def propagate(self) -> None:
    while self._queue:
      var = self._queue.popleft()
      for link in self._links.get(var, ()):
        other, transfer = (link.out, link.forward) if link.operand is var else (link.operand, link.backward)
        if other in self.layouts:
          continue
        found = transfer(self.layouts[var])
        if found is not None:
          self.layouts[other], self.labels[other] = found, self.labels[var]
          self._queue.append(other)


# Per byte: registers are renamed; a shuffle comes with selects before and after; shared memory is written and read.
_CLASS_WEIGHT = {"same": 0, "registers": 1, "shuffle": 4, "shared": 8}
_SYNC_BYTES = 2048  # what two syncs are worth


def conversion_cost(var: Var, have: Layout, want: Layout) -> int:
  """Bytes by class, and the syncs of a conversion through shared memory."""
  how = classify(have, want)
  nbytes = math.prod(var.type.shape) * var.type.dtype.itemsize  # type: ignore[union-attr]
  return nbytes * _CLASS_WEIGHT[how] + (_SYNC_BYTES if how == "shared" else 0)


def recomputed(var: Var, layout: Layout) -> int:
  """Elements that threads hold beyond one copy of each: what replication computes again."""
  held = layout.extent("reg") * layout.extent("lane") * layout.extent("warp")
  return max(0, held - math.prod(var.type.shape))  # type: ignore[union-attr]


def _frequencies(graph: TileGraph, facts: Facts) -> dict[Eqn, int]:
  """How often each equation runs: the product of the trip counts around it, 16 where one is not known."""
  out: dict[Eqn, int] = {}

  def visit(block: Block, times: int) -> None:
    for eqn in block.eqns:
      out[eqn] = times
      trips = 1
      if eqn.primitive.name in ("for_loop", "while_loop"):
        trips = 16
      if eqn.primitive.name == "for_loop":
        lo, hi, step = (facts[a] for a in eqn.values[:3])
        if lo.lo == lo.hi and hi.lo == hi.hi and step.lo == step.hi != 0:
          trips = max(1, len(range(lo.lo, hi.lo, step.lo)))
      for b in eqn.blocks:
        visit(b, min(times * trips, 1 << 20))

  visit(graph.body, 1)
  return out


def _contradiction(first: Fixed, second: Fixed) -> LayoutError:
  both = "\n".join(f"    {c.layout}\n      as {c.why}" for c in (first, second))
  return LayoutError(f"{second.var.hint or 'a fragment'} must have two layouts:\n{both}", loc=second.eqn.loc,
                     also=("the first is wanted at", first.eqn.loc),
                     hint="use two fragments, or give both gemms the same policy= and shape")


class _Converter:
  """Inserts `relayout` where an equation's operand does not have the layout that the equation reads."""

  def __init__(self, constraints: dict[Eqn, list[Constraint]], layouts: dict[Var, Layout]):
    self.constraints, self.layouts = constraints, layouts

  def block(self, block: Block) -> Block:
    eqns: list[Eqn] = []
    for eqn in block.eqns:
      self._equation(eqn, eqns)
    return dataclasses.replace(block, eqns=tuple(eqns))

  def _equation(self, eqn: Eqn, out: list[Eqn]) -> None:
    wanted: dict[Var, Layout] = {}
    after: tuple[Var, Layout] | None = None
    for c in self.constraints[eqn]:
      if isinstance(c, Fixed) and self.layouts[c.var] != c.layout:
        wanted[c.var] = c.layout
      elif isinstance(c, Relates) and not self._agrees(c):
        if isinstance(c.operand.type, RefType) or c.backward(self.layouts[c.out]) is None:
          produced = c.forward(self.layouts[c.operand])
          if produced is None and eqn.primitive is slice_p:
            out.append(_cut_through_shared(eqn))
            return
          if produced is None and eqn.primitive is concatenate_p:
            out.append(eqn)                          # the scheduler joins the parts in shared memory
            return
          if produced is None:
            hint = "reshape the array outside of the kernel, or take extents that are powers of two" if (
                eqn.primitive is reshape_p) else "take other bounds, or go through shared memory"
            raise LayoutError(f"this {eqn.primitive} does not cut whole registers of every thread", loc=eqn.loc,
                              hint=f"the operand's layout is {self.layouts[c.operand]}; {hint}")
          after = (c.out, produced)
        elif c.operand in eqn.invars and not eqn.blocks:
          read = c.backward(self.layouts[c.out])
          assert read is not None, c
          wanted[c.operand] = read
        else:
          raise LayoutError(f"{eqn.primitive} carries a value in two layouts:\n    {self.layouts[c.operand]}\n    "
                            f"{self.layouts[c.out]}", loc=eqn.loc, hint="keep it in a fragment: ref[...] = value")
    for var, layout in wanted.items():
      eqn = eqn.replace(invars=tuple(self._relayout(var, layout, eqn, out) if a is var else a for a in eqn.invars))
    if eqn.blocks:
      eqn = eqn.replace(blocks=tuple(map(self.block, eqn.blocks)))
    if after is None:
      out.append(eqn)
      return
    var, produced = after
    loaded = Var(var.type, var.hint)
    self.layouts[loaded] = produced
    out.append(eqn.replace(outvars=tuple(loaded if v is var else v for v in eqn.outvars)))
    out.append(self._convert(loaded, var, eqn))

  def _agrees(self, c: Relates) -> bool:
    """Equal layouts; an equation that picks registers by their elements needs no more than to find them."""
    have, want = self.layouts[c.operand], c.backward(self.layouts[c.out])
    if want is None:
      return c.forward(have) == self.layouts[c.out]
    return have == want or (c.eqn.primitive in _BY_ELEMENT and holds(have, want))

  def _relayout(self, var: Var, layout: Layout, eqn: Eqn, out: list[Eqn]) -> Var:
    target = Var(var.type, var.hint)
    self.layouts[target] = layout
    out.append(self._convert(var, target, eqn))
    return target

  def _convert(self, source: Var, target: Var, eqn: Eqn) -> Eqn:
    have, want = self.layouts[source], self.layouts[target]
    how = "registers" if have != want and holds(have, want) else classify(have, want)
    return Eqn(relayout_p, (source,), (target,), {"how": how, "cut": None}, eqn.loc)


def _cut_through_shared(eqn: Eqn) -> Eqn:
  """A slice whose elements lie in other threads than its result."""
  start, limit, strides = (eqn.params[k] for k in ("start", "limit", "strides"))
  cut = (start, limit, strides or (1,) * len(start))
  return Eqn(relayout_p, eqn.invars, eqn.outvars, {"how": "shared", "cut": cut}, eqn.loc)


def holds(have: Layout, want: Layout) -> bool:
  """Whether each register in layout `want` is one register of `have`, the same in every thread."""
  axes = ("warp", "lane", "reg")
  a, b = have.table(axes), want.table(axes)
  if a.shape[0] % b.shape[0] and b.shape[0] % a.shape[0]:
    return False
  warps, lanes = max(a.shape[0], b.shape[0]), max(a.shape[1], b.shape[1])
  strides = np.cumprod([1, *have.shape[::-1]])[-2::-1] if have.shape else np.zeros(0, np.int64)

  def flat(t: np.ndarray) -> np.ndarray:
    t = np.broadcast_to(np.tile(t, (warps // t.shape[0], 1, 1, 1)), (warps, lanes, *t.shape[2:]))
    return (t * strides).sum(-1).reshape(warps * lanes, -1)

  mine, needed = flat(a), flat(b)
  at = {x: [r for r in range(mine.shape[1]) if mine[0, r] == x] for x in set(needed[0].tolist())}
  return all(any((mine[:, r] == needed[:, j]).all() for r in at[int(x)]) for j, x in enumerate(needed[0]))
