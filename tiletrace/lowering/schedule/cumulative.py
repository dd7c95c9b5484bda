"""Cumulative operations that cross warps: the totals of what each warp sums go through shared memory to all."""
from __future__ import annotations

from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import cumulative as ops
from tiletrace.core.types import TileType
from tiletrace.lowering.layouts.cumulation import cumulation
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.schedule.builder import Builder, whole
from tiletrace.lowering.schedule.exchange import Exchange


class CumulativeLowering(Exchange):
  """Leaves only cumulative operations within a warp."""

  def replace(self, eqn: Eqn) -> list[Eqn] | None:
    return self._cumulative(eqn) if eqn.primitive in ops.CUMULATIVE else None

  def _cumulative(self, eqn: Eqn) -> list[Eqn]:
    """Two exchanges: each has a buffer of its own, so that the sync of one separates the uses of the other's."""
    (x,), axis = eqn.values, eqn.params["axis"]
    assert isinstance(x, Var)
    plan = cumulation(self.layouts[x], axis)
    if plan.totals is None or plan.gathered is None:
      return [eqn]
    b, op = Builder(eqn.loc), {**eqn.params, "op": eqn.primitive.name}
    params = {**op, "block": plan.block}
    local, totals = b.bind(ops.cumulative_partial_p, (x,), params)
    self.layouts |= {local: self.layouts[x], totals: plan.totals}
    self.notes.append(f"{eqn.loc.short()}  {eqn.primitive}: those of {totals.shape[axis]} blocks of {plan.block} "
                      "elements are accumulated by one warp, through shared memory")
    gathered = self._exchange(b, totals, plan.gathered, "totals")
    (sums,) = b.bind(ops.cumulative_before_p, (gathered,), op)
    self.layouts[sums] = plan.gathered
    before = self._exchange(b, sums, plan.totals, "before")
    b.append(eqn.replace(primitive=ops.cumulative_join_p, invars=(local, before), params=params))
    return b.eqns

  def _exchange(self, b: Builder, value: Var, layout: Layout, hint: str) -> Var:
    assert isinstance(value.type, TileType)
    buffer = self.buffer(b.loc, value.type, hint, shared_layout(value.shape, value.dtype.itemsize * 8, 0))
    b.store(whole(buffer), value, dispatch="direct")
    self.sync(b)
    loaded = b.load(whole(buffer))
    self.layouts[loaded] = layout
    return loaded
