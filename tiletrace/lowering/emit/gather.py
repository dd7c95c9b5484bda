"""Loads, stores and copies at tiles of indices; what lies outside reads as the fill value and is not stored."""
from __future__ import annotations

from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import gather as ops
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.indexed_access import IndexedAccess
from tiletrace.lowering.emit.memory import collect, mask_of, scatter
from tiletrace.lowering.emit.shared_access import SharedAccess
from tiletrace.lowering.ptx import isa


def _access(ctx: EmitContext, eqn: Eqn, value: Var, first: int, *, storing: bool) -> IndexedAccess:
  indices, _ = ops.split_values(eqn, first)
  return IndexedAccess(ctx, eqn.refs[0], eqn.params["dims"], [ctx.read(i) for i in indices], eqn.params["guard"],
                       ctx.layouts[value], storing=storing)


@emit_rules.register(ops.gather_p)
def _gather(ctx: EmitContext, eqn: Eqn) -> None:
  (out,) = eqn.outvars
  access = _access(ctx, eqn, out, 0, storing=False)
  vec_bytes, groups = access.groups(eqn.params["vec"])
  masks = [ctx.read(m) for m in ops.split_values(eqn, 0)[1]]
  hints = access.cache_hints(vec_bytes)

  def load(i: int, regs, kind) -> None:
    address, pred = access.at(groups[i][0])
    for m in masks:
      pred = access.both(pred, mask_of(m, groups[i]))
    ctx.b(isa.LD_GLOBAL, regs, address, pred=pred, **hints, **kind)

  ctx.bind(out, collect(ctx, out.dtype, access.count, groups, vec_bytes, load, eqn, eqn.params["fill_value"]))


@emit_rules.register(ops.scatter_p)
def _scatter(ctx: EmitContext, eqn: Eqn) -> None:
  value = eqn.values[0]
  assert isinstance(value, Var)
  access = _access(ctx, eqn, value, 1, storing=True)
  vec_bytes, groups = access.groups(eqn.params["vec"])
  masks = [ctx.read(m) for m in ops.split_values(eqn, 1)[1]]

  def store(i: int, regs, kind) -> None:
    address, pred = access.at(groups[i][0])
    for m in masks:
      pred = access.both(pred, mask_of(m, groups[i]))
    ctx.b(isa.ST_GLOBAL, address, regs, pred=pred, **kind)

  scatter(ctx, ctx.read(value), groups, vec_bytes, store)


@emit_rules.register(ops.gather_copy_p)
def _copy(ctx: EmitContext, eqn: Eqn) -> None:
  """cp.async, which fills with zeros and is waited for at once; or through registers."""
  index = eqn.values[0]
  assert isinstance(index, Var)
  cp_async = eqn.params["dispatch"] == "cp_async"
  access = _access(ctx, eqn, index, 0, storing=cp_async)
  size, groups = access.groups(eqn.params["vec"])
  side = SharedAccess(ctx, eqn.refs[1], ctx.layouts[index])
  if not cp_async:
    def load(i: int, regs, kind) -> None:
      address, pred = access.at(groups[i][0])
      ctx.b(isa.LD_GLOBAL, regs, address, pred=pred, **kind)

    value = collect(ctx, eqn.refs[0].type.dtype, access.count, groups, size, load, eqn, eqn.params["fill_value"])
    scatter(ctx, value, side.groups, side.size, side.store)
    return
  b, row = ctx.b, isa.CP_ASYNC_CG_ZFILL if size == 16 else isa.CP_ASYNC_ZFILL
  for group, target in zip(groups, side.addresses([g[0] for g in groups]), strict=True):
    address, inside = access.at(group[0], bounds_only=True)
    assert inside is not None
    b(row, target, address, size, b.new(isa.SELP, size, 0, inside, type="u32"), pred=access.in_view(group[0]))
  b(isa.CP_ASYNC_COMMIT)
  b(isa.CP_ASYNC_WAIT_GROUP, 0)
