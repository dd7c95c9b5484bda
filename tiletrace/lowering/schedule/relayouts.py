"""Relayouts between warps, and those that no plan of shuffles makes: a store to shared memory, a sync, a load."""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import Block, Eqn, RefOperand, Var
from tiletrace.core.operands import tile_types
from tiletrace.core.ops.relayout import relayout_p
from tiletrace.core.types import Space, TileType, View, ViewDim
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.relayout import word_plan
from tiletrace.lowering.layouts.shared import SWIZZLES, shared_layout
from tiletrace.lowering.schedule.builder import Builder, whole


class RelayoutLowering:
  """Replaces every relayout that crosses warps, or has no plan of shuffles.

  Args:
    syncs: whether to write the syncs too; else they are placed later, with those of all shared memory.

  Attributes:
    scratch: the buffers that it allocates. notes: its report.
  """

  def __init__(self, layouts: dict[Var, Layout], *, syncs: bool = False):
    self.layouts, self.syncs = layouts, syncs
    self.scratch: list[Eqn] = []
    self.notes: list[str] = []

  def block(self, block: Block) -> Block:
    eqns: list[Eqn] = []
    for eqn in block.eqns:
      if eqn.primitive is relayout_p:
        within = eqn.params["how"] in ("same", "registers") or self._has_plan(eqn)
        self.notes.append(f"{eqn.loc.short()}  relayout of {eqn.outvars[0].type} by {eqn.params['how']}"
                          + (", made through shared memory" if eqn.params["how"] == "shuffle" and not within else ""))
        eqns += [eqn] if within else self._through_shared(eqn)
      else:
        eqns.append(eqn.replace(blocks=tuple(map(self.block, eqn.blocks))) if eqn.blocks else eqn)
    return dataclasses.replace(block, eqns=tuple(eqns))

  def _has_plan(self, eqn: Eqn) -> bool:
    """Halves of words that do not move together have none."""
    source, out = eqn.values[0], eqn.outvars[0]
    assert isinstance(source, Var)
    return eqn.params["how"] == "shuffle" and word_plan(
      self.layouts[source], self.layouts[out], source.dtype.itemsize) is not None

  def _through_shared(self, eqn: Eqn) -> list[Eqn]:
    (value,), (out,), cut = tile_types(eqn.values), eqn.outvars, eqn.params["cut"]
    alloc = Builder(eqn.loc)
    buffer = alloc.alloc(Space.SHARED, value.shape, value.dtype, "relayout")
    self.layouts[buffer] = _scratch_layout(value, swizzled=cut is None)
    self.scratch += alloc.eqns
    b = Builder(eqn.loc)
    if self.syncs:
      b.sync()
    b.store(whole(buffer), eqn.values[0], dispatch="direct")
    if self.syncs:
      b.sync()
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
