"""Cumulative sums that cross warps: the totals of what each warp sums go through shared memory to all."""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import Block, Eqn, Var
from tiletrace.core.ops import cumsum as ops
from tiletrace.core.types import Space
from tiletrace.lowering.layouts.cumulation import cumulation
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.schedule.builder import Builder, whole


class CumsumLowering:
  """Leaves only cumulative sums within a warp.

  Args:
    syncs: whether to put syncs into the exchanges; else they are placed from the order of effects.

  Attributes:
    scratch: the shared buffers that the exchanges need, as equations.
    notes: the report.
  """

  def __init__(self, layouts: dict[Var, Layout], *, syncs: bool = False):
    self.layouts, self._syncs = layouts, syncs
    self.scratch: list[Eqn] = []
    self.notes: list[str] = []

  def block(self, block: Block) -> Block:
    eqns: list[Eqn] = []
    for eqn in block.eqns:
      if eqn.primitive is ops.cumsum_p:
        eqns += self._cumsum(eqn)
      else:
        eqns.append(eqn.replace(blocks=tuple(map(self.block, eqn.blocks))) if eqn.blocks else eqn)
    return dataclasses.replace(block, eqns=tuple(eqns))

  def _cumsum(self, eqn: Eqn) -> list[Eqn]:
    """Two exchanges: each has a buffer of its own, so that the sync of one separates the uses of the other's."""
    (x,), axis = eqn.values, eqn.params["axis"]
    assert isinstance(x, Var)
    plan = cumulation(self.layouts[x], axis)
    if plan.totals is None or plan.gathered is None:
      return [eqn]
    b, params = Builder(eqn.loc), {**eqn.params, "block": plan.block}
    local, totals = b.bind(ops.cumsum_partial_p, (x,), params)
    self.layouts |= {local: self.layouts[x], totals: plan.totals}
    self.notes.append(f"{eqn.loc.short()}  cumsum: the sums of {totals.shape[axis]} blocks of {plan.block} elements "
                      "are summed by one warp, through shared memory")
    gathered = self._exchange(b, totals, plan.gathered, "totals")
    (sums,) = b.bind(ops.cumsum_before_p, (gathered,), eqn.params)
    self.layouts[sums] = plan.gathered
    before = self._exchange(b, sums, plan.totals, "before")
    b.append(eqn.replace(primitive=ops.cumsum_join_p, invars=(local, before), params=params))
    return b.eqns

  def _exchange(self, b: Builder, value: Var, layout: Layout, hint: str) -> Var:
    alloc = Builder(b.loc)
    buffer = alloc.alloc(Space.SHARED, value.shape, value.dtype, hint)
    self.layouts[buffer] = shared_layout(value.shape, value.dtype.itemsize * 8, 0)
    self.scratch += alloc.eqns
    b.store(whole(buffer), value, dispatch="direct")
    if self._syncs:
      b.sync()
    loaded = b.load(whole(buffer))
    self.layouts[loaded] = layout
    return loaded
