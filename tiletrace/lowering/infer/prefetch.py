"""prefetch: there is no tile, and so no layout."""
from __future__ import annotations

from collections.abc import Iterator

from tiletrace.core.graph import Eqn
from tiletrace.core.ops.prefetch import prefetch_p
from tiletrace.lowering.infer.constraints import Constraint, InferContext, layout_rules


@layout_rules.register(prefetch_p)
def _nothing(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  yield from ()
