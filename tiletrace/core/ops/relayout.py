"""relayout: a tile value, or a slice of it, spread differently over the threads. Inserted by layout inference only."""
from __future__ import annotations

from tiletrace.core.effects import Effect
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.operands import tile_types
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.types import TileType, Type

relayout_p = Primitive("relayout", level=0)  # params: how ("registers", "shuffle" or "shared"), cut


@type_rules.register(relayout_p)
def _type(eqn: Eqn) -> tuple[Type, ...]:
  """`cut` is None or (start, limit, strides), as of slice."""
  (x,), cut = tile_types(eqn.values), eqn.params["cut"]
  shape = x.shape if cut is None else tuple(len(range(*s)) for s in zip(*cut, strict=True))
  return (TileType(shape, x.dtype),)


@effect_rules.register(relayout_p)
def _effects(eqn: Eqn) -> tuple[Effect, ...]:
  return ()
