"""Cumulative sums that cross warps: the totals of what each warp sums go through shared memory to all."""
from __future__ import annotations

from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import cumsum as ops
from tiletrace.core.types import TileType
from tiletrace.lowering.layouts.cumulation import cumulation
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.schedule.builder import Builder, whole
from tiletrace.lowering.schedule.exchange import Exchange


class CumsumLowering(Exchange):
  """Leaves only cumulative sums within a warp."""

  def replace(self, eqn: Eqn) -> list[Eqn] | None:
    return self._cumsum(eqn) if eqn.primitive is ops.cumsum_p else None

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
    assert isinstance(value.type, TileType)
    buffer = self.buffer(b.loc, value.type, hint, shared_layout(value.shape, value.dtype.itemsize * 8, 0))
    b.store(whole(buffer), value, dispatch="direct")
    self.sync(b)
    loaded = b.load(whole(buffer))
    self.layouts[loaded] = layout
    return loaded
