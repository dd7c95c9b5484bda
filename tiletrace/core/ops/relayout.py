"""relayout: a tile value, or a slice of it, spread differently over the threads, inserted by layout inference only; and
own_columns: what a warpgroup holds of a value, inserted by the scheduler only."""
from __future__ import annotations

from tiletrace.core.effects import Effect
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.operands import check, tile_types
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.types import TileType, Type

relayout_p = Primitive("relayout", level=0)  # params: how ("registers", "shuffle" or "shared"), cut

own_columns_p = Primitive("own_columns", level=0)  # params: parts, of the columns, one in each warpgroup


@type_rules.register(relayout_p)
def _type(eqn: Eqn) -> tuple[Type, ...]:
  """`cut` is None or (start, limit, strides), as of slice."""
  (x,), cut = tile_types(eqn.values), eqn.params["cut"]
  shape = x.shape if cut is None else tuple(len(range(*s)) for s in zip(*cut, strict=True))
  return (TileType(shape, x.dtype),)


@type_rules.register(own_columns_p)
def _part(eqn: Eqn) -> tuple[Type, ...]:
  (x,), parts = tile_types(eqn.values), eqn.params["parts"]
  check(len(x.shape) == 2 and x.shape[1] % parts == 0, f"own_columns: {x} in {parts} parts")
  return (TileType((x.shape[0], x.shape[1] // parts), x.dtype),)


@effect_rules.register(relayout_p, own_columns_p)
def _effects(eqn: Eqn) -> tuple[Effect, ...]:
  return ()
