"""prefetch: one instruction for each run of bytes, by as many threads."""
from __future__ import annotations

from tiletrace.core.graph import Eqn
from tiletrace.core.ops.prefetch import prefetch_p
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.global_access import GlobalAccess
from tiletrace.lowering.layouts.fragment import blocked
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.target import WARPS


@emit_rules.register(prefetch_p)
def _prefetch(ctx: EmitContext, eqn: Eqn) -> None:
  if eqn.params["dispatch"] == "none":
    return
  starts = eqn.refs[0]                 # of the runs
  shape, bits, warps = starts.view.static_shape, 8 * starts.type.dtype.itemsize, WARPS * ctx.scope.count
  layout = blocked((1,) * len(shape) if ctx.scope.elected else shape, bits, warps, vec=1)
  for d, n in enumerate(shape if ctx.scope.elected else ()):       # all of them in one thread
    layout = layout.repeat("reg", n, d)
  access = GlobalAccess(ctx, starts, eqn.params["guard"], layout, storing=True)
  for reg in range(access.count):
    address, pred = access.at(reg)
    ctx.b(isa.BULK_PREFETCH, address, eqn.params["nbytes"], pred=pred)
