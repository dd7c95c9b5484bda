"""Roles: whole warpgroups with a register budget, and single threads of them."""
from __future__ import annotations

from tiletrace.core.graph import Eqn
from tiletrace.core.ops import roles as ops
from tiletrace.lowering.emit.context import WARPGROUP, EmitContext, Scope, emit_rules
from tiletrace.lowering.ptx import isa


@emit_rules.register(ops.warpgroup_p)
def _warpgroup(ctx: EmitContext, eqn: Eqn) -> None:
  """A branch on the warpgroup, which is warp-uniform. Equal budgets need no setmaxnreg."""
  b, first, count, regs = ctx.b, eqn.params["first"], eqn.params["count"], eqn.params["regs"]
  end = b.label("role_end")
  wg = ctx.uniform(("wg_in_cta",), lambda: b.reg("b32"))
  if first > 0:
    b(isa.BRA, end, pred=b.new(isa.SETP, wg, first, cmp="lt", type="s32"))
  if first + count < ctx.whole.count:
    b(isa.BRA, end, pred=b.new(isa.SETP, wg, first + count, cmp="ge", type="s32"))
  if regs is not None:
    b(isa.SETMAXNREG, regs, dir="inc" if regs > ctx.entry_registers else "dec")
  with ctx.scoped(Scope(first, count)):
    ctx.enter_role(first)
    ctx.block(eqn.blocks[0])
  b.place(end)


@emit_rules.register(ops.elect_p)
def _elect(ctx: EmitContext, eqn: Eqn) -> None:
  """The first thread of the scope, or of each of its warpgroups: always the same one, so that its groups of
  asynchronous copies stay its own."""
  b, each = ctx.b, eqn.params["each"]
  end = b.label("elected")
  if each == "warpgroup" and ctx.scope.count > 1:
    b(isa.BRA, end, pred=ctx.leader(), negate=True)
  else:  # a comparison of tid.x with a constant tells ptxas that one thread is left: TMA needs no uniformity loop
    b(isa.BRA, end, pred=b.new(isa.SETP, ctx.tid(), ctx.scope.first * WARPGROUP, cmp="ne", type="s32"))
  with ctx.scoped(Scope(ctx.scope.first, ctx.scope.count, each)):
    ctx.block(eqn.blocks[0])
  b.place(end)
