"""Results of atomic operations of which several threads hold a copy: the one thread that did it tells the others."""
from __future__ import annotations

from tiletrace.core.graph import Eqn, RefOperand, Var, with_refs
from tiletrace.core.ops import atomic as ops
from tiletrace.core.ops.roles import elect_p
from tiletrace.core.types import TileType, View, ViewDim
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.schedule.builder import Builder, whole
from tiletrace.lowering.schedule.exchange import Exchange
from tiletrace.lowering.tables import coordinates, replicated_bits


class AtomicLowering(Exchange):
  """Leaves results only where each element lies in one thread."""

  def replace(self, eqn: Eqn) -> list[Eqn] | None:
    if eqn.primitive is elect_p:
      return [eqn]                                   # one thread has all there is
    if eqn.primitive is not ops.atomic_p:
      return None
    return self._through_shared(eqn) if eqn.outvars and self._has_copies(eqn.outvars[0]) else [eqn]

  def _has_copies(self, out: Var) -> bool:
    if not out.shape:
      return True
    layout = self.layouts[out]
    return bool(replicated_bits(coordinates(layout, 32 * layout.extent("warp"))))

  def _through_shared(self, eqn: Eqn) -> list[Eqn]:
    (out,), (array,) = eqn.outvars, eqn.refs
    assert isinstance(out.type, TileType)
    shape = out.shape or (1,)
    buffer = self.buffer(eqn.loc, TileType(shape, out.dtype), "old", shared_layout(
      shape, max(8, out.dtype.itemsize * 8), 0))
    ref = whole(buffer) if out.shape else RefOperand(buffer, View((ViewDim(0, 1, squeezed=True),), ()), ())
    b = Builder(eqn.loc)
    self.sync(b)
    b.append(with_refs(eqn.replace(primitive=ops.atomic_to_shared_p, outvars=()), [array, ref]))
    self.sync(b)
    loaded = b.load(ref)
    last = b.eqns.pop()
    assert last.outvars == (loaded,)
    self.notes.append(f"{eqn.loc.short()}  atomic_{eqn.params['op']}: its result, which several threads need, goes "
                      "through shared memory")
    return [*b.eqns, last.replace(outvars=(out,))]
