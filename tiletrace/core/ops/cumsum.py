"""Cumulative sums with jnp's name; 16-bit floats accumulate in f32, and nothing widens to 64 bits."""
from __future__ import annotations

import operator
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect
from tiletrace.core.errors import TileIndexError, TileTypeError
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.operands import check, tile_types
from tiletrace.core.ops.shape import reshape, tile_argument
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import METHODS, Tile, bind_tile
from tiletrace.core.types import TileType

# Params of all: axis, reverse.
cumsum_p = Primitive("cumsum")
# A cumulative sum that crosses warps, as the scheduler writes it: the sums within every `block` elements along the axis
# and each block's total; of the totals, the sum of those before each; that added to every element of its block.
cumsum_partial_p = Primitive("cumsum_partial", level=0)
cumsum_before_p = Primitive("cumsum_before", level=0)
cumsum_join_p = Primitive("cumsum_join", level=0)


def blocks(type: TileType, axis: int, block: int) -> tuple[int, ...]:
  """The shape of the totals of `block` elements along `axis`."""
  return (*type.shape[:axis], -(-type.shape[axis] // block), *type.shape[axis + 1:])


@type_rules.register(cumsum_p, cumsum_before_p)
def _cumsum_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,), axis = tile_types(eqn.invars), eqn.params["axis"]
  check(0 <= axis < len(x.shape), f"cumsum: axis {axis} of {x}")
  check(x.dtype != dtypes.bool_ and not (dtypes.is_float(x.dtype) and x.dtype.itemsize < 4),
        f"cumsum accumulates in 32 bits, not in {x}")
  return (x,)


@type_rules.register(cumsum_partial_p)
def _partial_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,) = tile_types(eqn.invars)
  return (x, TileType(blocks(x, eqn.params["axis"], eqn.params["block"]), x.dtype))


@type_rules.register(cumsum_join_p)
def _join_type(eqn: Eqn) -> tuple[TileType, ...]:
  x, before = tile_types(eqn.invars)
  shape = blocks(x, eqn.params["axis"], eqn.params["block"])
  check(before == TileType(shape, x.dtype), f"cumsum_join: {before} is not of the blocks of {x}")
  return (x,)


@effect_rules.register(cumsum_p, cumsum_partial_p, cumsum_before_p, cumsum_join_p)
def _pure(eqn: Eqn) -> tuple[Effect, ...]:
  return ()


def cumsum(x: Any, axis: int | None = None, *, reverse: bool = False, dtype: Any = None) -> Tile:
  """Sums of the elements up to and with each, along `axis`; of x flattened by default.

  Args:
    x: a tile.
    axis: along which; None flattens x first.
    reverse: sum from the last element backwards, as `jax.lax.cumsum`.
    dtype: of the result; by default that of x, i32 for bool. 16-bit floats accumulate in f32.
  Raises:
    TileIndexError: x has no such axis.

  Example: `tt.cumsum(v, axis=1)` of f32[4, 100] is f32[4, 100].
  """
  value = tile_argument(x, "cumsum: x")
  if axis is None:
    value, axis = reshape(value, (-1,)), 0
  if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
    raise TileTypeError(f"cumsum: axis {axis!r}", loc=user_loc(), hint="one int, or None for x flattened")
  axis = operator.index(axis)
  if not -value.ndim <= axis < value.ndim:
    raise TileIndexError(f"cumsum: axis {axis} of {value.type}", loc=user_loc())
  to = dtypes.canonical(dtype) if dtype is not None else dtypes.i32 if value.dtype == dtypes.bool_ else value.dtype
  if to == dtypes.bool_:
    raise TileTypeError("cumsum: sums are no bools", loc=user_loc(), hint="dtype=jnp.int32 counts")
  wide = dtypes.f32 if dtypes.is_float(to) and to.itemsize < 4 else to
  value = value.astype(wide)
  if value.size:
    value = bind_tile(cumsum_p, [value], axis=axis % value.ndim, reverse=bool(reverse))
  return value.astype(to)


METHODS.update(cumsum=cumsum)
