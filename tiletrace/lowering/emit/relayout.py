"""Relayouts inside threads: other register names. Those that cross threads were lowered by the scheduler."""
from __future__ import annotations

from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops.relayout import relayout_p
from tiletrace.lowering.emit.addressing import register_map
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.values import take
from tiletrace.lowering.tables import coordinates


@emit_rules.register(relayout_p)
def _relayout(ctx: EmitContext, eqn: Eqn) -> None:
  (source,), (out,) = eqn.values, eqn.outvars
  assert isinstance(source, Var) and eqn.params["how"] in ("same", "registers"), eqn.params
  have, want = (coordinates(ctx.layouts[v], ctx.scope.threads) for v in (source, out))
  ctx.bind(out, take(ctx.b, ctx.read(source), register_map(have, want, source.shape)))
