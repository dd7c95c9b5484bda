"""Debugging asks for no layout: a value is recorded in any."""
from __future__ import annotations

from collections.abc import Iterator

from tiletrace.core.graph import Eqn
from tiletrace.core.ops import debug
from tiletrace.lowering.infer.constraints import Constraint, InferContext, layout_rules


@layout_rules.register(debug.debug_print_p, debug.debug_check_p, debug.debug_record_p)
def _any(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  yield from ()
