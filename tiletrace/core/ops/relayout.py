"""relayout: the same tile value, spread differently over the threads. Inserted by layout inference, never by users."""
from __future__ import annotations

from tiletrace.core.effects import Effect
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.types import Type

relayout_p = Primitive("relayout", level=0)  # params: how ("registers", "shuffle" or "shared")


@type_rules.register(relayout_p)
def _type(eqn: Eqn) -> tuple[Type, ...]:
  return (eqn.values[0].type,)


@effect_rules.register(relayout_p)
def _effects(eqn: Eqn) -> tuple[Effect, ...]:
  return ()
