"""The ids of the launch."""
from __future__ import annotations

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn
from tiletrace.core.ops import grid as ops
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.values import Elements
from tiletrace.lowering.ptx import isa


def _scalar(ctx: EmitContext, eqn: Eqn, value) -> None:
  ctx.bind(eqn.outvars[0], Elements(eqn.outvars[0].dtype, 1, (value,)))


@emit_rules.register(ops.program_id_p)
def _program_id(ctx: EmitContext, eqn: Eqn) -> None:
  raise LoweringError("program_id reached the emitter: the scheduler replaces it", loc=eqn.loc)


@emit_rules.register(ops.size_p)
def _size(ctx: EmitContext, eqn: Eqn) -> None:
  _scalar(ctx, eqn, ctx.extent(eqn.params["size"]))


@emit_rules.register(ops.cta_id_p)
def _cta_id(ctx: EmitContext, eqn: Eqn) -> None:
  _scalar(ctx, eqn, ctx.b.special("ctaid.x"))


@emit_rules.register(ops.num_ctas_p)
def _num_ctas(ctx: EmitContext, eqn: Eqn) -> None:
  _scalar(ctx, eqn, ctx.b.special("nctaid.x"))


@emit_rules.register(ops.lookup_p)
def _lookup(ctx: EmitContext, eqn: Eqn) -> None:
  index, b = ctx.scalar(eqn.values[0]), ctx.b
  start = b.new(isa.MOV_SYMBOL, ctx.table(eqn.params["values"]), type="u64")
  address = b.new(isa.MAD_WIDE, index, 4, start, type="s32")
  _scalar(ctx, eqn, b.new(isa.LD_GLOBAL, b.addr(address), nc="nc", type="s32"))


@emit_rules.register(ops.warpgroup_id_p)
def _warpgroup_id(ctx: EmitContext, eqn: Eqn) -> None:
  value = ctx.warpgroup()
  _scalar(ctx, eqn, ctx.b.new(isa.MOV, value, type="b32") if value != 0 else 0)
