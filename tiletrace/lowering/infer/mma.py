"""gemm: an anchor. wgmma fixes the accumulator and an A operand in registers."""
from __future__ import annotations

from collections.abc import Iterator

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import mma as ops
from tiletrace.lowering import mma_plan
from tiletrace.lowering.infer.constraints import Constraint, Fixed, InferContext, layout_rules
from tiletrace.lowering.layouts.catalog import wgmma_a_fragment
from tiletrace.lowering.mma_plan import plan_of
from tiletrace.lowering.wgmma_plan import WgmmaPlan, accumulator_layout, best_partition, register_operand, shape_of


@layout_rules.register(ops.gemm_p, ops.gemm_async_p)
def _gemm(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  plan = best_partition(eqn, ctx.warpgroups(eqn))
  if not isinstance(plan, WgmmaPlan):
    raise LoweringError(f"no partition of this gemm for wgmma: {plan}", loc=eqn.loc)
  yield Fixed(eqn.refs[-1].root, accumulator_layout(eqn, plan), eqn, "the accumulator of this gemm (wgmma)")
  a = register_operand(eqn)
  if a is not None:
    m, _, k = shape_of(eqn)
    bits = eqn.refs[-2].type.dtype.itemsize * 8
    layout = wgmma_a_fragment(m, k, bits, plan.grid[0])
    if plan.grid[1] > 1:
      layout = layout.repeat("warp", plan.grid[1], -1)
    yield Fixed(a, layout, eqn, "the A operand of this gemm in registers (wgmma)")


@layout_rules.register(ops.mma_sync_p)
def _mma_sync(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  plan = plan_of(eqn, ctx.warpgroups(eqn))
  _, a, b = eqn.values
  assert isinstance(a, Var) and isinstance(b, Var)
  yield Fixed(eqn.refs[0].root, mma_plan.accumulator_layout(plan), eqn, "the accumulator of this gemm (mma.sync)")
  yield Fixed(a, mma_plan.a_layout(plan), eqn, "the A operand of this gemm (mma.sync)")
  yield Fixed(b, mma_plan.b_layout(plan), eqn, "the B operand of this gemm (mma.sync)")


@layout_rules.register(ops.wgmma_wait_p)
def _wait(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  yield from ()
