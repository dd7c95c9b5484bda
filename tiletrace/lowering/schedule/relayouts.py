"""Relayouts between warps, and those that no plan of shuffles makes: a store to shared memory, a sync, a load."""
from __future__ import annotations

from tiletrace.core.graph import Atom, Eqn, RefOperand, Var
from tiletrace.core.operands import tile_types
from tiletrace.core.ops.relayout import relayout_p
from tiletrace.core.ops.shape import concatenate_p
from tiletrace.core.types import TileType, View, ViewDim
from tiletrace.lowering.infer.shape import cut_registers, parts
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.relayout import word_plan
from tiletrace.lowering.layouts.shared import SWIZZLES, shared_layout
from tiletrace.lowering.schedule.builder import Builder, whole
from tiletrace.lowering.schedule.exchange import Exchange
from tiletrace.lowering.words import per_word


class RelayoutLowering(Exchange):
  """Replaces every relayout that crosses warps, or has no plan of shuffles, and joins parts whose threads are not the
  result's."""

  def replace(self, eqn: Eqn) -> list[Eqn] | None:
    if eqn.primitive is concatenate_p and not all(self._is_part(x, eqn, box) for x, box in zip(eqn.values, parts(eqn))):
      return self._joined(eqn)
    if eqn.primitive is not relayout_p:
      return None
    within = eqn.params["how"] in ("same", "registers") or self._has_plan(eqn)
    self.notes.append(f"{eqn.loc.short()}  relayout of {eqn.outvars[0].type} by {eqn.params['how']}"
                      + (", made through shared memory" if eqn.params["how"] == "shuffle" and not within else ""))
    return [eqn] if within else self._through_shared(eqn)

  def _is_part(self, x: Atom, eqn: Eqn, box: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    return x not in self.layouts or self.layouts[x] == cut_registers(self.layouts[eqn.outvars[0]], *box)

  def _joined(self, eqn: Eqn) -> list[Eqn]:
    (out,), b = eqn.outvars, Builder(eqn.loc)
    self.notes.append(f"{eqn.loc.short()}  concatenate of {out.type}, made through shared memory")
    assert isinstance(out.type, TileType)
    buffer = self.buffer(eqn.loc, out.type, "concatenate", _scratch_layout(out.type, swizzled=False))
    self.sync(b)
    for x, (start, limit) in zip(eqn.values, parts(eqn)):
      b.store(RefOperand(buffer, _box((start, limit, (1,) * len(start))), ()), x, dispatch="direct")
    self.sync(b)
    loaded = b.load(whole(buffer))
    load = b.eqns.pop()
    assert load.outvars == (loaded,)
    return [*b.eqns, load.replace(outvars=(out,))]

  def _has_plan(self, eqn: Eqn) -> bool:
    """Halves of words that do not move together have none."""
    source, out = eqn.values[0], eqn.outvars[0]
    assert isinstance(source, Var)
    return eqn.params["how"] == "shuffle" and word_plan(
      self.layouts[source], self.layouts[out], per_word(source.dtype)) is not None

  def _through_shared(self, eqn: Eqn) -> list[Eqn]:
    (value,), (out,), cut = tile_types(eqn.values), eqn.outvars, eqn.params["cut"]
    buffer = self.buffer(eqn.loc, value, "relayout", _scratch_layout(value, swizzled=cut is None))
    b = Builder(eqn.loc)
    self.sync(b)
    b.store(whole(buffer), eqn.values[0], dispatch="direct")
    self.sync(b)
    loaded = b.load(whole(buffer) if cut is None else RefOperand(buffer, _box(cut), ()))
    load = b.eqns.pop()
    assert load.outvars == (loaded,)
    return [*b.eqns, load.replace(outvars=(out,))]


def _box(cut: tuple[tuple[int, ...], ...]) -> View:
  dims = tuple(ViewDim(lo, len(range(lo, hi, step)), step) for lo, hi, step in zip(*cut, strict=True))
  return View(dims, tuple(range(len(dims))))


def _scratch_layout(value: TileType, *, swizzled: bool) -> Layout:
  """A slice may start where no swizzle's period does."""
  shape, bits = value.shape, max(8, value.dtype.itemsize * 8)
  row = shape[-1] * bits // 8
  rows = 1
  for n in shape[:-1]:
    rows *= n
  swizzle = next((s for s in SWIZZLES if swizzled and s and row % s == 0 and rows % 8 == 0 and len(shape) == 2), 0)
  return shared_layout(shape, bits, swizzle)
