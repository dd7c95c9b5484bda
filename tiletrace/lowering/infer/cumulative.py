"""Cumulative operations: one layout for operand and result, any in which the axis comes apart into digits."""
from __future__ import annotations

from collections.abc import Iterator

from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import cumulative as ops
from tiletrace.lowering.infer.constraints import Constraint, InferContext, Relates, layout_rules
from tiletrace.lowering.layouts.cumulation import digits
from tiletrace.lowering.layouts.relation import Layout


@layout_rules.register(*ops.CUMULATIVE)
def _cumulative(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  (x,), (out,) = eqn.values, eqn.outvars
  assert isinstance(x, Var)

  def same(layout: Layout) -> Layout | None:
    return layout if digits(layout, eqn.params["axis"]) is not None else None

  yield Relates(x, out, eqn, same, same)


@layout_rules.register(ops.cumulative_partial_p, ops.cumulative_before_p, ops.cumulative_join_p)
def _partial(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  """Made by the scheduler, with their layouts."""
  yield from ()
