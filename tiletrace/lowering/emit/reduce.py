"""Reductions: refused by layout inference (infer/reduce.py), so none arrives here."""
from __future__ import annotations

from tiletrace.core.graph import Eqn
from tiletrace.core.ops import reduce as ops
from tiletrace.lowering.emit.context import EmitContext, emit_rules

_REDUCTIONS = tuple(p for name, p in sorted(vars(ops).items()) if name.startswith("reduce_") and name.endswith("_p"))


@emit_rules.register(*_REDUCTIONS)
def _unreachable(ctx: EmitContext, eqn: Eqn) -> None:
  raise AssertionError(f"{eqn.primitive} passed layout inference")
