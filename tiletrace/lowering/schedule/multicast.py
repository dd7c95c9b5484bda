"""Which copies the CTAs of a cluster share: those whose view is the same in all of them along an axis."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from tiletrace.core.graph import Atom, Block, Eqn, TileGraph, Var
from tiletrace.core.ops import control, grid
from tiletrace.core.rules import effects
from tiletrace.core.types import RefType, Space
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import recognise_swizzle
from tiletrace.lowering.layouts.tma import ALIGNMENT
from tiletrace.lowering.schedule.rings import Ring, is_tma
from tiletrace.lowering.tma_plan import TmaPlan, share, tma_plan

Axes = frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
  """`axes`: copy -> axes of the grid along which a cluster shares it. `refusals`: why other copies are not shared."""
  axes: dict[Eqn, tuple[int, ...]]
  refusals: tuple[str, ...]


def shared_copies(graph: TileGraph, rings: Iterable[Ring], layouts: dict[Var, Layout], facts: Facts,
                  written: set[Var]) -> Shared:
  """The copies of the rings that a cluster can share.

  The CTAs of a cluster must push the same slots in step: what decides whether and how often a copy runs must be the
  same in all of them.

  Args:
    written: arrays that the kernel writes.
  """
  cluster = graph.options.cluster or ()
  wide = frozenset(a for a, n in enumerate(cluster) if n > 1)
  if not wide:
    return Shared({}, ())
  uses = _Uses(graph, written)
  axes: dict[Eqn, tuple[int, ...]] = {}
  refusals = []
  for ring in rings:
    copies = [c for s in ring.segments for c in s.copies]
    reason = ("threads copy into it" if not all(map(is_tma, copies)) else
              "how often it is filled may differ between the CTAs" if any(uses.control[c] & wide for c in copies) else
              None)
    if reason is not None:
      refusals.append(f"ring {ring.name} is not multicast: {reason}")
      continue
    for copy in copies:
      along = tuple(sorted(wide - uses.of(copy.refs[0].dyn)))
      ways = math.prod(cluster[a] for a in along)
      if ways > 1 and _divides(copy, ways, layouts, facts):
        axes[copy] = along
      elif ways > 1:
        refusals.append(f"the copy at {copy.loc.short()} is not multicast: it does not come apart into {ways} boxes")
  return Shared(axes, tuple(refusals))


def _divides(copy: Eqn, ways: int, layouts: dict[Var, Layout], facts: Facts) -> bool:
  outside, inside = copy.refs
  plan = tma_plan(outside, inside, layouts[inside.root], facts)
  assert isinstance(plan, TmaPlan), plan
  itemsize = inside.type.dtype.itemsize
  found = recognise_swizzle(layouts[inside.root], itemsize * 8)
  assert found is not None
  return share(plan, ways, itemsize=itemsize, alignment=ALIGNMENT[found[0]]) is not None


class _Uses:
  """On which axes of the grid scalars depend, and whether an equation runs.

  Attributes:
    control: equation -> axes that decide whether, and how often, it runs.
  """

  def __init__(self, graph: TileGraph, written: set[Var]):
    self._every = frozenset(range(len(graph.options.grid)))
    self._written = written
    self._of: dict[Var, Axes] = {}
    self.control: dict[Eqn, Axes] = {}
    self._block(graph.body, frozenset())

  def of(self, atoms: Iterable[Atom]) -> Axes:
    return frozenset().union(*(self._of.get(a, self._every) for a in atoms if isinstance(a, Var)))

  def _block(self, block: Block, around: Axes) -> None:
    for eqn in block.eqns:
      self.control[eqn] = around
      if eqn.blocks:
        self._inside(eqn, around)
      else:
        found = self._value(eqn)
        self._of.update((v, found) for v in eqn.outvars)

  def _inside(self, eqn: Eqn, around: Axes) -> None:
    """What a loop carries and what a branch returns may depend on anything."""
    counted = eqn.primitive is control.for_loop_p
    operands = eqn.values[:3] if counted else eqn.values[:1]
    inner = around | (self._every if eqn.primitive is control.while_loop_p else self.of(operands))
    for block in eqn.blocks:
      if counted:
        self._of[block.invars[0]] = self.of(operands)
      self._block(block, inner)

  def _value(self, eqn: Eqn) -> Axes:
    if eqn.primitive is grid.program_id_p:
      return frozenset({eqn.params["axis"]})
    if eqn.primitive.name == "load":
      ref = eqn.refs[0]
      constant = isinstance(ref.root.type, RefType) and ref.root.type.space is Space.GLOBAL
      return self.of(ref.dyn) if constant and ref.root not in self._written else self._every
    return self._every if effects(eqn) else self.of(eqn.invars)
