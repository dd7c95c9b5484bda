"""Elementwise ops: operands and result have one layout."""
from __future__ import annotations

from collections.abc import Iterator

from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import elementwise, transcendental
from tiletrace.core.rules import type_rules
from tiletrace.lowering.infer.constraints import Constraint, InferContext, equal, is_distributed, layout_rules


def pointwise(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  (out,) = eqn.outvars
  for a in eqn.values:
    if is_distributed(a):
      assert isinstance(a, Var)
      yield equal(a, out, eqn)


for _ops in (elementwise, transcendental):
  layout_rules.register(*(p for name, p in vars(_ops).items() if name.endswith("_p") and p in type_rules))(pointwise)
