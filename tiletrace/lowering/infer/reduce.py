"""Reductions have no GPU lowering yet: refused where layouts are chosen, before anything else happens to them."""
from __future__ import annotations

from collections.abc import Iterator

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn
from tiletrace.core.ops import reduce as ops
from tiletrace.lowering.infer.constraints import Constraint, InferContext, layout_rules

_REDUCTIONS = tuple(p for name, p in sorted(vars(ops).items()) if name.startswith("reduce_") and name.endswith("_p"))


@layout_rules.register(*_REDUCTIONS)
def _refuse(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  raise LoweringError(f"{eqn.primitive} runs on the xla backend only, for now", loc=eqn.loc,
                      hint='tile_call(..., backend="xla"), or reduce with jax.numpy outside the kernel')
  yield
