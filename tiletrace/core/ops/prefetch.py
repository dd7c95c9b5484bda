"""prefetch: what a copy by TMA will read is fetched into the L2 cache. Inserted by the scheduler only."""
from __future__ import annotations

from tiletrace.core.effects import Effect, OrderEffect, read
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.operands import check
from tiletrace.core.printer import Printer, print_rules
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.types import Space

prefetch_p = Primitive("prefetch", level=0)  # references: source, and where the copy will put it


@type_rules.register(prefetch_p)
def _type(eqn: Eqn) -> tuple[()]:
  src, dst = eqn.refs
  check(src.type.space is Space.GLOBAL and dst.type.space is Space.SHARED and src.shape == dst.shape,
        f"prefetch: {list(src.shape)} in {src.type.space} memory to {list(dst.shape)} in {dst.type.space}")
  return ()


@effect_rules.register(prefetch_p)
def _effects(eqn: Eqn) -> tuple[Effect, ...]:
  """Of the destination only the layout matters."""
  return (read(0), OrderEffect("prefetch"))


@print_rules.register(prefetch_p)
def _print(eqn: Eqn, p: Printer) -> str:
  return f"prefetch {p.ref(eqn.refs[0])} for {p.ref(eqn.refs[1])}"
