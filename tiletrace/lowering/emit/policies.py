"""Cache policies: how long L2 keeps what an access reads or writes (PTX ISA 9.7.9, createpolicy)."""
from __future__ import annotations

from typing import Any

from tiletrace.core.graph import Eqn
from tiletrace.lowering.emit.context import EmitContext
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Instr

_HINTED = {
  isa.LD_GLOBAL: isa.LD_GLOBAL_HINT, isa.ST_GLOBAL: isa.ST_GLOBAL_HINT, isa.TMA_LOAD: isa.TMA_LOAD_HINT,
  isa.TMA_LOAD_MULTICAST: isa.TMA_LOAD_MULTICAST_HINT, isa.TMA_STORE: isa.TMA_STORE_HINT,
  isa.CP_ASYNC: isa.CP_ASYNC_HINT, isa.CP_ASYNC_ZFILL: isa.CP_ASYNC_ZFILL_HINT,
  isa.CP_ASYNC_CG: isa.CP_ASYNC_CG_HINT, isa.CP_ASYNC_CG_ZFILL: isa.CP_ASYNC_CG_ZFILL_HINT,
}


def access(ctx: EmitContext, eqn: Eqn, row: Instr, *operands: Any, **modifiers: Any) -> None:
  """An access of global memory by `row`, or with the policy that the equation asks for by the row that takes one."""
  policy = eqn.params.get("eviction_policy")
  if policy is None:
    ctx.b(row, *operands, **modifiers)
  else:
    ctx.b(_HINTED[row], *operands, ctx.policy(policy), **modifiers)
