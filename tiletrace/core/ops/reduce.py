"""Reductions with jnp's names; sums of 16-bit floats accumulate in f32, and nothing widens to 64 bits."""
from __future__ import annotations

import math
import operator
from typing import Any

import ml_dtypes
import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect
from tiletrace.core.errors import TileIndexError, TileTypeError
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.operands import check, tile_types
from tiletrace.core.ops.bitwise import logical_or
from tiletrace.core.ops.elementwise import equal, isnan, where
from tiletrace.core.ops.shape import full, iota, reshape, tile_argument
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import METHODS, Tile, bind_tile
from tiletrace.core.types import TileType

reduce_sum_p = Primitive("reduce_sum")
reduce_max_p = Primitive("reduce_max")
reduce_min_p = Primitive("reduce_min")
reduce_prod_p = Primitive("reduce_prod")
# Of the bits of integers.
BITWISE = (reduce_and_p, reduce_or_p, reduce_xor_p) = tuple(map(Primitive, ("reduce_and", "reduce_or", "reduce_xor")))
# What each warp has of a reduction: params op (the name of a reduction), axes, parts (warps that share a result). The
# result is [parts, *kept dimensions]; the scheduler writes it before the exchange through shared memory.
reduce_partial_p = Primitive("reduce_partial", level=0)
# The same of each thread, to be added up in a loop before anything crosses lanes.
reduce_thread_p = Primitive("reduce_thread", level=0)
# Whether any element that the warp's threads hold is true: one bool for each warp (PTX ISA, vote.sync).
warp_any_p = Primitive("warp_any", level=0)

REDUCTIONS = (reduce_sum_p, reduce_max_p, reduce_min_p, reduce_prod_p, *BITWISE)


@type_rules.register(*REDUCTIONS)
def _reduce_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,), axes = tile_types(eqn.invars), eqn.params["axes"]
  check(list(axes) == sorted(set(axes)) and all(0 <= a < len(x.shape) for a in axes),
        f"{eqn.primitive}: axes {axes} of {x}")
  check(x.dtype != dtypes.bool_ or eqn.primitive in (reduce_max_p, reduce_min_p), f"{eqn.primitive} of bool")
  check(dtypes.is_integer(x.dtype) or eqn.primitive not in BITWISE, f"{eqn.primitive} of {x}: it takes integers")
  return (TileType(tuple(n for a, n in enumerate(x.shape) if a not in axes), x.dtype),)


@type_rules.register(reduce_partial_p, reduce_thread_p)
def _partial_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,), axes = tile_types(eqn.invars), eqn.params["axes"]
  check(eqn.params["op"] in [p.name for p in REDUCTIONS], f"{eqn.params['op']} is no reduction")
  return (TileType((eqn.params["parts"], *(n for a, n in enumerate(x.shape) if a not in axes)), x.dtype),)


@type_rules.register(warp_any_p)
def _any_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,) = tile_types(eqn.invars)
  check(x.dtype == dtypes.bool_, f"{eqn.primitive} of {x}")
  return (TileType((), dtypes.bool_),)


@effect_rules.register(*REDUCTIONS, reduce_partial_p, reduce_thread_p, warp_any_p)
def _pure(eqn: Eqn) -> tuple[Effect, ...]:
  return ()


def identity(primitive: Primitive, dtype: np.dtype) -> bool | int | float:
  """What changes no result of a reduction; a number of the dtype: float8_e4m3fn has no infinities."""
  if primitive in (reduce_sum_p, reduce_prod_p):
    one = int(primitive is reduce_prod_p)
    return float(one) if dtypes.is_float(dtype) else one
  if primitive in BITWISE:
    return 0 if primitive is not reduce_and_p else -1 if dtype.kind == "i" else int(np.iinfo(dtype).max)
  if dtypes.is_float(dtype):
    most = float(ml_dtypes.finfo(dtype).max) if dtype == dtypes.f8e4m3 else math.inf
    return -most if primitive is reduce_max_p else most
  if dtype == dtypes.bool_:
    return primitive is reduce_min_p
  return int(np.iinfo(dtype).min if primitive is reduce_max_p else np.iinfo(dtype).max)


def _reduce(primitive: Primitive, what: str, x: Any, axis: Any, keepdims: bool) -> Tile:
  value = tile_argument(x, f"{what}: x")
  axes = _axes(what, value, axis)
  if any(value.shape[a] == 0 for a in axes):
    out = full(tuple(n for a, n in enumerate(value.shape) if a not in axes), _of_nothing(primitive, what, value),
               value.dtype)
  else:
    out = bind_tile(primitive, [value], axes=axes) if axes else value    # a scalar's own
  if not keepdims:
    return out
  return reshape(out, tuple(1 if a in axes else n for a, n in enumerate(value.shape)))


def _of_nothing(primitive: Primitive, what: str, x: Tile) -> bool | int:
  """The result over no elements, as jnp's."""
  if primitive in (reduce_sum_p, reduce_prod_p):
    return int(primitive is reduce_prod_p)
  if x.dtype != dtypes.bool_:
    raise TileTypeError(f"{what} of {x.type}: there is none of no elements", loc=user_loc(),
                        hint="give the reduced axes an extent of at least one")
  return primitive is reduce_min_p


def _axes(what: str, x: Tile, axis: Any) -> tuple[int, ...]:
  if axis is None:
    return tuple(range(x.ndim))
  if isinstance(axis, tuple) and not axis:
    raise TileTypeError(f"{what} over no axis of {x.type}", loc=user_loc(),
                        hint="axis=None reduces all dimensions, axis=k one; over none a tile is its own result")
  axes = axis if isinstance(axis, tuple) else (axis,)
  if not all(isinstance(a, int | np.integer) for a in axes):
    raise TileTypeError(f"{what}: axis {axis!r}", loc=user_loc(), hint="an int, a tuple of ints, or None for all")
  axes = tuple(map(operator.index, axes))
  if any(not -x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) != len(axes):
    raise TileIndexError(f"{what}: axis {axis} of {x.type}", loc=user_loc())
  return tuple(sorted(a % x.ndim for a in axes))


def _accumulated(primitive: Primitive, what: str, x: Any, axis: Any, keepdims: bool, dtype: Any) -> Tile:
  value = tile_argument(x, f"{what}: x")
  to = dtypes.canonical(dtype) if dtype is not None else _counting(value.dtype)
  wide = dtypes.f32 if dtypes.is_float(to) and to.itemsize < 4 else to
  return _reduce(primitive, what, value.astype(wide), axis, keepdims).astype(to)


def _counting(dtype: np.dtype) -> np.dtype:
  """What jnp sums in: 32 bits for bool and narrower integers."""
  if dtypes.is_float(dtype) or dtype.itemsize >= 4:
    return dtype
  return dtypes.u32 if dtype.kind == "u" else dtypes.i32


def sum_(x: Any, axis: Any = None, *, keepdims: bool = False, dtype: Any = None) -> Tile:
  """Sum over `axis` (all by default) in the dtype of x; bool and integers of 8 and 16 bits in 32 bits.

  >>> def kernel(x, y):
  ...   y[...] = tt.sum(x[...], axis=1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2,), jnp.float32), grid=1)(x)
  Array([ 3., 12.], dtype=float32)
  """
  return _accumulated(reduce_sum_p, "sum", x, axis, keepdims, dtype)


def prod(x: Any, axis: Any = None, *, keepdims: bool = False, dtype: Any = None) -> Tile:
  """Product over `axis` (all by default) in the dtype of x; bool and integers of 8 and 16 bits in 32 bits.

  >>> def kernel(x, y):
  ...   y[...] = tt.prod(x[...], axis=1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2,), jnp.float32), grid=1)(x)
  Array([ 0., 60.], dtype=float32)
  """
  return _accumulated(reduce_prod_p, "prod", x, axis, keepdims, dtype)


def max_(x: Any, axis: Any = None, *, keepdims: bool = False) -> Tile:
  """Maximum over `axis` (all by default); NaN if any element is.

  >>> def kernel(x, y):
  ...   y[...] = tt.max(x[...], axis=1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2,), jnp.float32), grid=1)(x)
  Array([2., 5.], dtype=float32)
  """
  return _reduce(reduce_max_p, "max", x, axis, keepdims)


def min_(x: Any, axis: Any = None, *, keepdims: bool = False) -> Tile:
  """Minimum over `axis` (all by default); NaN if any element is.

  >>> def kernel(x, y):
  ...   y[...] = tt.min(x[...], axis=1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2,), jnp.float32), grid=1)(x)
  Array([0., 3.], dtype=float32)
  """
  return _reduce(reduce_min_p, "min", x, axis, keepdims)


def any_(x: Any, axis: Any = None, *, keepdims: bool = False) -> Tile:
  """Whether any element over `axis` is not 0.

  >>> def kernel(x, y):
  ...   y[...] = tt.any(x[...] > 4, axis=1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2,), jnp.bool_), grid=1)(x)
  Array([False,  True], dtype=bool)
  """
  return _reduce(reduce_max_p, "any", tile_argument(x, "any: x").astype(np.bool_), axis, keepdims)


def all_(x: Any, axis: Any = None, *, keepdims: bool = False) -> Tile:
  """Whether every element over `axis` is not 0.

  >>> def kernel(x, y):
  ...   y[...] = tt.all(x[...] > 2, axis=1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2,), jnp.bool_), grid=1)(x)
  Array([False,  True], dtype=bool)
  """
  return _reduce(reduce_min_p, "all", tile_argument(x, "all: x").astype(np.bool_), axis, keepdims)


def mean(x: Any, axis: Any = None, *, keepdims: bool = False) -> Tile:
  """Mean over `axis` (all by default); of integers in f32.

  >>> def kernel(x, y):
  ...   y[...] = tt.mean(x[...], axis=1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2,), jnp.float32), grid=1)(x)
  Array([1., 4.], dtype=float32)
  """
  value = tile_argument(x, "mean: x")
  to = value.dtype if dtypes.is_float(value.dtype) else dtypes.f32
  n = math.prod(value.shape[a] for a in _axes("mean", value, axis))
  return (sum_(value, axis, keepdims=keepdims, dtype=to if to == dtypes.f64 else dtypes.f32) / n).astype(to)


def argmax(x: Any, axis: int | None = None, *, keepdims: bool = False) -> Tile:
  """i32 index of the first maximum along `axis`, or in x flattened; of the first NaN where there is one.

  >>> def kernel(x, y):
  ...   y[...] = tt.argmax(x[...], axis=1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2,), jnp.int32), grid=1)(x)
  Array([2, 2], dtype=int32)
  """
  return _index(reduce_max_p, "argmax", x, axis, keepdims)


def argmin(x: Any, axis: int | None = None, *, keepdims: bool = False) -> Tile:
  """i32 index of the first minimum along `axis`, or in x flattened; of the first NaN where there is one.

  >>> def kernel(x, y):
  ...   y[...] = tt.argmin(x[...], axis=1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2,), jnp.int32), grid=1)(x)
  Array([0, 0], dtype=int32)
  """
  return _index(reduce_min_p, "argmin", x, axis, keepdims)


def _index(primitive: Primitive, what: str, x: Any, axis: int | None, keepdims: bool) -> Tile:
  """The smallest index whose element is the extremum, or NaN."""
  value = tile_argument(x, f"{what}: x")
  if isinstance(axis, tuple):
    raise TileTypeError(f"{what}: axis {axis!r}", loc=user_loc(), hint="one int, or None for the index in x flattened")
  if value.dtype == dtypes.bool_:
    value = value.astype(dtypes.i32)
  axes = _axes(what, value, axis)
  hit = equal(value, _reduce(primitive, what, value, axis, True))
  if dtypes.is_float(value.dtype):
    hit = logical_or(hit, isnan(value))
  index, size = full(value.shape, 0, dtypes.i32), 1
  for a in reversed(axes):
    index, size = index + iota(value.shape, a) * size, size * value.shape[a]
  return _reduce(reduce_min_p, what, where(hit, index, size), axis, keepdims)


METHODS.update(sum=sum_, max=max_, min=min_, mean=mean, any=any_, all=all_)
