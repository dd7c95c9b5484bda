"""Reductions: the result's layout is the operand's with the dimensions projected out."""
from __future__ import annotations

from collections.abc import Iterator

from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import reduce as ops
from tiletrace.lowering.infer.constraints import Constraint, InferContext, Relates, is_distributed, layout_rules
from tiletrace.lowering.layouts.fragment import reduction


@layout_rules.register(*ops.REDUCTIONS)
def _reduce(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  """Nothing is asked of the operand: a result that is wanted elsewhere is smaller, and is converted itself."""
  (x,), (out,) = eqn.values, eqn.outvars
  assert isinstance(x, Var)
  if is_distributed(out):
    yield Relates(x, out, eqn, lambda layout: reduction(layout, eqn.params["axes"]).layout, lambda layout: None)


@layout_rules.register(ops.reduce_partial_p, ops.reduce_thread_p, ops.warp_any_p)
def _partial(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  """Made by the scheduler, with its layout."""
  yield from ()
