"""relayout and own_columns: inserted with all layouts decided, so they add no constraint."""
from __future__ import annotations

from collections.abc import Iterator

from tiletrace.core.graph import Eqn
from tiletrace.core.ops.relayout import own_columns_p, relayout_p
from tiletrace.lowering.infer.constraints import Constraint, InferContext, layout_rules


@layout_rules.register(relayout_p, own_columns_p)
def _nothing(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  yield from ()
