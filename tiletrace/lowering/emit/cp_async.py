"""Copies that the threads of the scope make themselves: cp.async, and loads and stores through registers."""
from __future__ import annotations

from tiletrace.core.graph import Eqn
from tiletrace.core.types import Space
from tiletrace.lowering.emit.context import EmitContext
from tiletrace.lowering.emit.global_access import GlobalAccess
from tiletrace.lowering.emit.memory import collect, scatter
from tiletrace.lowering.emit.shared_access import SharedAccess
from tiletrace.lowering.ptx import isa


def emit_cp_async(ctx: EmitContext, eqn: Eqn) -> None:
  """cp.async of 4, 8 or 16 bytes; past an edge the source size is 0, and the hardware writes zeros."""
  src, dst = eqn.refs
  b, layout, vec = ctx.b, eqn.params["layout"], eqn.params["vec"]
  access = GlobalAccess(ctx, src, eqn.params["guard"], layout, storing=True)
  size, groups = access.groups(vec)
  side = SharedAccess(ctx, dst, layout)
  where = side.addresses([g[0] for g in groups])
  for group, target in zip(groups, where, strict=True):
    address, inside = access.at(group[0], bounds_only=True)
    in_view = access.in_view(group[0])
    if inside is None:
      row = isa.CP_ASYNC_CG if size == 16 else isa.CP_ASYNC
      b(row, target, address, size, pred=in_view)
    else:
      row = isa.CP_ASYNC_CG_ZFILL if size == 16 else isa.CP_ASYNC_ZFILL
      b(row, target, address, size, b.new(isa.SELP, size, 0, inside, type="u32"), pred=in_view)


def emit_copy_through_registers(ctx: EmitContext, eqn: Eqn) -> None:
  """global -> shared, shared -> global or shared -> shared, element by element of the copy's layout."""
  src, dst = eqn.refs
  layout, dtype = eqn.params["layout"], src.type.dtype
  if src.type.space is Space.GLOBAL:
    outside, inside = GlobalAccess(ctx, src, eqn.params["guard"], layout), SharedAccess(ctx, dst, layout)
    size, groups = outside.groups(eqn.params["vec"])
    fill = eqn.params["fill_value"] if outside.may_overhang else None
    value = collect(ctx, dtype, outside.count, groups, size, lambda i, regs, kind: _global_load(
        ctx, outside, groups[i][0], regs, kind), eqn, fill)
    scatter(ctx, value, inside.groups, inside.size, inside.store)
    return
  inside = SharedAccess(ctx, src, layout)
  value = collect(ctx, dtype, inside.count, inside.groups, inside.size, inside.load, eqn, inside.fill)
  if dst.type.space is Space.SHARED:
    target = SharedAccess(ctx, dst, layout)
    scatter(ctx, value, target.groups, target.size, target.store)
    return
  outside = GlobalAccess(ctx, dst, eqn.params["guard"], layout, storing=True)
  size, groups = outside.groups(eqn.params["vec"])
  scatter(ctx, value, groups, size, lambda i, regs, kind: _global_store(ctx, outside, groups[i][0], regs, kind))


def _global_load(ctx: EmitContext, access: GlobalAccess, reg: int, regs, kind) -> None:
  address, pred = access.at(reg)
  ctx.b(isa.LD_GLOBAL, regs, address, pred=pred, **kind)


def _global_store(ctx: EmitContext, access: GlobalAccess, reg: int, regs, kind) -> None:
  address, pred = access.at(reg)
  ctx.b(isa.ST_GLOBAL, address, regs, pred=pred, **kind)
