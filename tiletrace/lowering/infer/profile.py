"""Profiling asks for no layout: its records are scalars."""
from __future__ import annotations

from collections.abc import Iterator

from tiletrace.core.graph import Eqn
from tiletrace.core.ops.profile import profile_mark_p, profile_record_p
from tiletrace.lowering.infer.constraints import Constraint, InferContext, layout_rules


@layout_rules.register(profile_mark_p, profile_record_p)
def _any(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  yield from ()
