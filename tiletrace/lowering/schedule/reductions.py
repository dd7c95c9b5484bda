"""Reductions that cross warps: each warp stores what it has in shared memory, and all read all of it after a sync."""
from __future__ import annotations

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.graph import Atom, Eqn, Primitive, RefOperand, Var, prefixed
from tiletrace.core.ops import elementwise as ew, reduce as ops
from tiletrace.core.types import TileType, whole_view
from tiletrace.lowering.layouts.fragment import reduction, warp_partials
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.schedule.builder import Builder, whole
from tiletrace.lowering.schedule.exchange import Exchange

_COMBINE: dict[Primitive, Primitive] = {ops.reduce_sum_p: ew.add_p, ops.reduce_prod_p: ew.mul_p,
                                        ops.reduce_max_p: ew.max_p, ops.reduce_min_p: ew.min_p,
                                        ops.reduce_and_p: ew.and_p, ops.reduce_or_p: ew.or_p,
                                        ops.reduce_xor_p: ew.xor_p}
_COMBINE_BOOLS: dict[Primitive, Primitive] = {ops.reduce_max_p: ew.or_p, ops.reduce_min_p: ew.and_p}
_ACCUMULATING = (ops.reduce_sum_p, ops.reduce_prod_p)


def combining(reduction: Primitive, dtype: np.dtype) -> Primitive:
  """The elementwise op that joins two results of a reduction."""
  return (_COMBINE_BOOLS if dtype == dtypes.bool_ else _COMBINE)[reduction]


class ReductionLowering(Exchange):
  """Leaves only reductions within a warp."""

  def replace(self, eqn: Eqn) -> list[Eqn] | None:
    return self._reduce(eqn) if eqn.primitive in ops.REDUCTIONS else None

  def _reduce(self, eqn: Eqn) -> list[Eqn]:
    """16-bit floats are summed in f32, between warps too."""
    (x,), (out,) = eqn.values, eqn.outvars
    assert isinstance(x, Var)
    narrow = eqn.primitive in _ACCUMULATING and dtypes.is_float(x.dtype) and x.dtype.itemsize < 4
    b = Builder(eqn.loc)
    wide = self._cast(b, x, dtypes.f32) if narrow else x
    total = self._total(b, eqn, wide)
    if narrow:
      total = self._cast(b, total, x.dtype)
    last = b.eqns.pop()
    assert last.outvars == (total,)
    self.layouts.pop(total, None)
    return [*b.eqns, last.replace(outvars=(out,))]

  def _cast(self, b: Builder, x: Var, dtype) -> Var:
    (out,) = b.bind(ew.cast_p, (x,), {"dtype": dtype})
    if x in self.layouts:
      self.layouts[out] = self.layouts[x]
    return out

  def _total(self, b: Builder, eqn: Eqn, x: Var) -> Var:
    axes, layout = eqn.params["axes"], reduction(self.layouts[x], eqn.params["axes"]).layout
    partials = warp_partials(self.layouts[x], axes)
    if partials is None:
      (out,) = b.bind(eqn.primitive, (x,), eqn.params)
      return self._keep(out, layout)
    parts = partials.shape[0]
    (partial,) = b.bind(ops.reduce_partial_p, (x,), {"op": eqn.primitive.name, "axes": axes, "parts": parts})
    self.layouts[partial] = partials
    assert isinstance(partial.type, TileType)
    scratch = shared_layout(partial.shape, max(8, partial.dtype.itemsize * 8), 0)
    buffer = self.buffer(eqn.loc, partial.type, "partials", scratch)
    self.notes.append(f"{eqn.loc.short()}  {eqn.primitive}: {parts} warps share a result, exchanged in shared memory")
    self.sync(b)
    b.store(whole(buffer), partial, dispatch="direct")
    self.sync(b)
    loaded = [self._keep(b.load(_part(buffer, p)), layout) for p in range(parts)]
    combine = combining(eqn.primitive, x.dtype)
    while len(loaded) > 1:
      pairs = zip(loaded[::2], loaded[1::2])
      odd = loaded[len(loaded) & ~1:]
      loaded = [self._keep(b.op(combine, p, q), layout) for p, q in pairs] + odd
    return loaded[0]

  def _keep(self, out: Atom, layout: Layout) -> Var:
    assert isinstance(out, Var)
    if out.shape:
      self.layouts[out] = layout
    return out


def _part(buffer: Var, part: int) -> RefOperand:
  view, _ = prefixed(whole_view(buffer.shape[1:]), part)
  return RefOperand(buffer, view, ())
