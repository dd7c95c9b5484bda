"""Cumulative sums, products, maxima and minima. Sums and products of 16-bit floats accumulate in f32; nothing widens to
64 bits."""
from __future__ import annotations

import operator
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect
from tiletrace.core.errors import TileIndexError, TileTypeError
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.operands import check, tile_types
from tiletrace.core.ops.reduce import reduce_max_p, reduce_min_p, reduce_prod_p, reduce_sum_p
from tiletrace.core.ops.shape import reshape, tile_argument
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import METHODS, Tile, bind_tile
from tiletrace.core.types import TileType

# Params of all: axis, reverse; at level 0 also op, the name of the one at level 1.
cumsum_p, cumprod_p = Primitive("cumsum"), Primitive("cumprod")
cummax_p, cummin_p = Primitive("cummax"), Primitive("cummin")
# One that crosses warps, as the scheduler writes it, said of sums: the sums within every `block` elements along the
# axis and each block's total; of the totals, the sum of those before each; that added to every element of its block.
cumulative_partial_p = Primitive("cumulative_partial", level=0)
cumulative_before_p = Primitive("cumulative_before", level=0)
cumulative_join_p = Primitive("cumulative_join", level=0)

# What accumulates: the reduction that has the same operation and identity.
CUMULATIVE = {cumsum_p: reduce_sum_p, cumprod_p: reduce_prod_p, cummax_p: reduce_max_p, cummin_p: reduce_min_p}


def reduction_of(eqn: Eqn) -> Primitive:
  """The reduction with the operation that an equation, of either level, accumulates with."""
  return next(r for p, r in CUMULATIVE.items() if p.name == eqn.params.get("op", eqn.primitive.name))


def blocks(type: TileType, axis: int, block: int) -> tuple[int, ...]:
  """The shape of the totals of `block` elements along `axis`."""
  return (*type.shape[:axis], -(-type.shape[axis] // block), *type.shape[axis + 1:])


@type_rules.register(*CUMULATIVE, cumulative_before_p)
def _cumulative_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,), axis = tile_types(eqn.invars), eqn.params["axis"]
  check(0 <= axis < len(x.shape), f"{eqn.primitive}: axis {axis} of {x}")
  check(x.dtype != dtypes.bool_, f"{eqn.primitive} of {x}")
  check(reduction_of(eqn) in (reduce_max_p, reduce_min_p) or not (dtypes.is_float(x.dtype) and x.dtype.itemsize < 4),
        f"{eqn.primitive} accumulates in 32 bits, not in {x}")
  return (x,)


@type_rules.register(cumulative_partial_p)
def _partial_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,) = tile_types(eqn.invars)
  return (x, TileType(blocks(x, eqn.params["axis"], eqn.params["block"]), x.dtype))


@type_rules.register(cumulative_join_p)
def _join_type(eqn: Eqn) -> tuple[TileType, ...]:
  x, before = tile_types(eqn.invars)
  shape = blocks(x, eqn.params["axis"], eqn.params["block"])
  check(before == TileType(shape, x.dtype), f"cumulative_join: {before} is not of the blocks of {x}")
  return (x,)


@effect_rules.register(*CUMULATIVE, cumulative_partial_p, cumulative_before_p, cumulative_join_p)
def _pure(eqn: Eqn) -> tuple[Effect, ...]:
  return ()


def _cumulative(primitive: Primitive, x: Any, axis: Any, reverse: bool, dtype: Any) -> Tile:
  what, value = primitive.name, tile_argument(x, f"{primitive.name}: x")
  if axis is None:
    value, axis = reshape(value, (-1,)), 0
  if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
    raise TileTypeError(f"{what}: axis {axis!r}", loc=user_loc(), hint="one int, or None for x flattened")
  axis = operator.index(axis)
  if not -value.ndim <= axis < value.ndim:
    raise TileIndexError(f"{what}: axis {axis} of {value.type}", loc=user_loc())
  accumulates = primitive in (cumsum_p, cumprod_p)
  to = dtypes.canonical(dtype) if dtype is not None else value.dtype
  if dtype is None and to == dtypes.bool_ and accumulates:
    to = dtypes.i32
  if to == dtypes.bool_ and accumulates:
    raise TileTypeError(f"{what}: {what.removeprefix('cum')}s are no bools", loc=user_loc(),
                        hint="dtype=jnp.int32 counts")
  wide = dtypes.f32 if accumulates and dtypes.is_float(to) and to.itemsize < 4 else to
  value = value.astype(dtypes.i32 if wide == dtypes.bool_ else wide)
  if value.size:
    value = bind_tile(primitive, [value], axis=axis % value.ndim, reverse=bool(reverse))
  return value.astype(to)


def cumsum(x: Any, axis: int | None = None, *, reverse: bool = False, dtype: Any = None) -> Tile:
  """Sums of the elements up to and with each, along `axis`; of x flattened by default.

  Args:
    x: a tile.
    axis: along which; None flattens x first.
    reverse: from the last element backwards, as `jax.lax.cumsum`.
    dtype: of the result; by default that of x, i32 for bool. 16-bit floats accumulate in f32.
  Raises:
    TileIndexError: x has no such axis.

  Example:
    >>> def kernel(x, y):
    ...   y[...] = tt.cumsum(x[...], axis=1)
    >>> x = jnp.arange(6.).reshape(2, 3)
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
    Array([[ 0.,  1.,  3.],
           [ 3.,  7., 12.]], dtype=float32)
  """
  return _cumulative(cumsum_p, x, axis, reverse, dtype)


def cumprod(x: Any, axis: int | None = None, *, reverse: bool = False, dtype: Any = None) -> Tile:
  """Products of the elements up to and with each; the arguments are those of `cumsum`.

  >>> def kernel(x, y):
  ...   y[...] = tt.cumprod(x[...], axis=1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([[ 0.,  0.,  0.],
         [ 3., 12., 60.]], dtype=float32)
  """
  return _cumulative(cumprod_p, x, axis, reverse, dtype)


def cummax(x: Any, axis: int | None = None, *, reverse: bool = False) -> Tile:
  """The largest of the elements up to and with each, in the dtype of x; NaN from the first NaN on. See `cumsum`.

  >>> def kernel(x, y):
  ...   y[...] = tt.cummax(x[...])
  >>> x = jnp.array([1., 3., 2.])
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([1., 3., 3.], dtype=float32)
  """
  return _cumulative(cummax_p, x, axis, reverse, None)


def cummin(x: Any, axis: int | None = None, *, reverse: bool = False) -> Tile:
  """The smallest of the elements up to and with each, in the dtype of x; NaN from the first NaN on. See `cumsum`.

  >>> def kernel(x, y):
  ...   y[...] = tt.cummin(x[...])
  >>> x = jnp.array([3., 1., 2.])
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([3., 1., 1.], dtype=float32)
  """
  return _cumulative(cummin_p, x, axis, reverse, None)


METHODS.update(cumsum=cumsum, cumprod=cumprod)
