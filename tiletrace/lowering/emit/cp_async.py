"""Copies that the threads of the scope make themselves: cp.async, and loads and stores through registers."""
from __future__ import annotations

from tiletrace.core.graph import Eqn, RefOperand
from tiletrace.core.types import Space
from tiletrace.lowering.emit import addressing
from tiletrace.lowering.emit.context import EmitContext
from tiletrace.lowering.emit.global_access import GlobalAccess
from tiletrace.lowering.emit.memory import collect, place_of, scatter, shared_start
from tiletrace.lowering.emit.values import Elements
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.tables import shared_bytes, widest_groups


class _SharedSide:
  """Byte addresses in shared memory of each register of a copy's layout."""

  def __init__(self, ctx: EmitContext, ref: RefOperand, layout: Layout):
    place = place_of(ctx, ref)
    self.item = ref.type.dtype.itemsize
    self.table = shared_bytes(place, layout, ctx.scope.threads, self.item)
    self.ctx, (self.base, self.offset) = ctx, shared_start(ctx, ref, place)

  def addresses(self, registers: list[int]) -> list[tuple[Reg, int]]:
    return list(addressing.shared_addresses(self.ctx, self.table[:, registers], self.base, self.offset).addresses)


def emit_cp_async(ctx: EmitContext, eqn: Eqn) -> None:
  """cp.async of 4, 8 or 16 bytes; past an edge the source size is 0, and the hardware writes zeros."""
  src, dst = eqn.refs
  b, layout, vec = ctx.b, eqn.params["layout"], eqn.params["vec"]
  side = _SharedSide(ctx, dst, layout)
  access = GlobalAccess(ctx, src, eqn.params["guard"], layout, storing=True)
  size, groups = access.groups(vec)
  where = side.addresses([g[0] for g in groups])
  for group, at in zip(groups, where, strict=True):
    address, inside = access.at(group[0], bounds_only=True)
    in_view = access.in_view(group[0])
    target = b.addr(*at)
    if inside is None:
      row = isa.CP_ASYNC_CG if size == 16 else isa.CP_ASYNC
      b(row, target, address, size, pred=in_view)
    else:
      row = isa.CP_ASYNC_CG_ZFILL if size == 16 else isa.CP_ASYNC_ZFILL
      b(row, target, address, size, b.new(isa.SELP, size, 0, inside, type="u32"), pred=in_view)


def emit_copy_through_registers(ctx: EmitContext, eqn: Eqn) -> None:
  """global -> shared, shared -> global or shared -> shared, element by element of the copy's layout."""
  src, dst = eqn.refs
  if Space.GLOBAL not in (src.type.space, dst.type.space):
    _shared_to_shared(ctx, eqn)
    return
  loading = src.type.space is Space.GLOBAL
  outside, inside = (src, dst) if loading else (dst, src)
  layout = eqn.params["layout"]
  side = _SharedSide(ctx, inside, layout)
  access = GlobalAccess(ctx, outside, eqn.params["guard"], layout, storing=True)
  size, groups = access.groups(eqn.params["vec"])
  shared_size, shared_groups = widest_groups(side.table, side.item)
  if loading:
    fill = eqn.params["fill_value"] if access.may_overhang else None
    value = collect(ctx, src.type.dtype, access.count, groups, size, lambda i, regs, kind: _global_load(
        ctx, access, groups[i][0], regs, kind), eqn, fill)
    _write_shared(ctx, side, access, value, shared_groups, shared_size)
    return
  where = side.addresses([g[0] for g in shared_groups])
  value = collect(ctx, src.type.dtype, access.count, shared_groups, shared_size, lambda i, regs, kind: ctx.b(
      isa.LD_SHARED, regs, ctx.b.addr(*where[i]), pred=access.in_view(shared_groups[i][0]), **kind), eqn, 0)
  scatter(ctx, value, groups, size, lambda i, regs, kind: _global_store(ctx, access, groups[i][0], regs, kind))


def _global_load(ctx: EmitContext, access: GlobalAccess, reg: int, regs, kind) -> None:  # noqa: ANN001
  address, pred = access.at(reg)
  ctx.b(isa.LD_GLOBAL, regs, address, pred=pred, **kind)


def _global_store(ctx: EmitContext, access: GlobalAccess, reg: int, regs, kind) -> None:  # noqa: ANN001
  address, pred = access.at(reg)
  ctx.b(isa.ST_GLOBAL, address, regs, pred=pred, **kind)


def _write_shared(ctx: EmitContext, side: _SharedSide, access: GlobalAccess, value: Elements,
                  groups: list[list[int]], size: int) -> None:
  where = side.addresses([g[0] for g in groups])
  scatter(ctx, value, groups, size, lambda i, regs, kind: ctx.b(
      isa.ST_SHARED, ctx.b.addr(*where[i]), regs, pred=access.in_view(groups[i][0]), **kind))


def _shared_to_shared(ctx: EmitContext, eqn: Eqn) -> None:
  src, dst = eqn.refs
  layout = eqn.params["layout"]
  assert layout.valid == layout.shape, "the selection pads no copy inside shared memory"
  source, target = _SharedSide(ctx, src, layout), _SharedSide(ctx, dst, layout)
  size, groups = widest_groups(source.table, source.item)
  where = source.addresses([g[0] for g in groups])
  value = collect(ctx, src.type.dtype, source.table.shape[1], groups, size, lambda i, regs, kind: ctx.b(
      isa.LD_SHARED, regs, ctx.b.addr(*where[i]), **kind), eqn)
  size, groups = widest_groups(target.table, target.item)
  to = target.addresses([g[0] for g in groups])
  scatter(ctx, value, groups, size, lambda i, regs, kind: ctx.b(isa.ST_SHARED, ctx.b.addr(*to[i]), regs, **kind))
