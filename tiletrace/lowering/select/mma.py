"""gemm: wgmma with both operands in shared memory, or A in registers."""
from __future__ import annotations

import math

from tiletrace.core.graph import Eqn
from tiletrace.core.ops import mma as ops
from tiletrace.core.types import Space
from tiletrace.lowering.select.context import SelectContext, select_rules
from tiletrace.lowering.variants import Choice, Variant, choose
from tiletrace.lowering.wgmma_plan import WgmmaPlan, best_partition


def has_a_partition(eqn: Eqn, ctx: SelectContext) -> str | None:
  plan = best_partition(eqn, ctx.warpgroups(eqn))
  return plan if isinstance(plan, str) else None


def accumulator_fits(eqn: Eqn, ctx: SelectContext) -> str | None:
  """A thread has 255 registers; an accumulator of 256 leaves none (ptxas C7511)."""
  plan = best_partition(eqn, ctx.warpgroups(eqn))
  if isinstance(plan, WgmmaPlan) and plan.total_registers > 208:
    return (f"the accumulator takes {plan.total_registers} registers of each thread, of 255: "
            f"split it over more than {math.prod(plan.grid)} warpgroups")
  return None


def a_is_shared(eqn: Eqn, ctx: SelectContext) -> str | None:
  if eqn.params["a_in"] == "ref" and eqn.refs[0].type.space is Space.SHARED:
    return None
  return "A is in registers"


GEMM = (
  Variant("wgmma_ss", (has_a_partition, accumulator_fits, a_is_shared)),
  Variant("wgmma_rs", (has_a_partition, accumulator_fits)),
)


@select_rules.register(ops.gemm_p, ops.gemm_async_p)
def select_gemm(eqn: Eqn, ctx: SelectContext) -> tuple[Eqn, Choice]:
  forced = eqn.params.get("dispatch") or ctx.options.forced("gemm")
  choice = choose("gemm", GEMM, eqn, ctx, forced=forced)
  return eqn.replace(params={**eqn.params, "dispatch": choice.variant}), choice
