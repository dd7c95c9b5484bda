"""Shapes of values: broadcast, iota, reshape, transpose, static slices, concatenation, and indexing of a value."""
from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect
from tiletrace.core.errors import TileIndexError, TileTypeError
from tiletrace.core.graph import Eqn, Literal, Primitive
from tiletrace.core.operands import Operand, check, common_shape, literal, operand, promoted, tile_types
from tiletrace.core.ref import ds, static_slice
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import METHODS, Tile, bind_tile
from tiletrace.core.types import TileType

broadcast_in_dim_p = Primitive("broadcast_in_dim")
iota_p = Primitive("iota")
reshape_p = Primitive("reshape")
transpose_p = Primitive("transpose")
slice_p = Primitive("slice")
concatenate_p = Primitive("concatenate")


@effect_rules.register(broadcast_in_dim_p, iota_p, reshape_p, transpose_p, slice_p, concatenate_p)
def _pure(eqn: Eqn) -> tuple[Effect, ...]:
  return ()


# --- type rules

@type_rules.register(broadcast_in_dim_p)
def _broadcast_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,), shape, dims = tile_types(eqn.invars), eqn.params["shape"], eqn.params["broadcast_dimensions"]
  check(len(dims) == len(x.shape) and sorted(set(dims)) == list(dims)
        and all(0 <= d < len(shape) and n in (1, shape[d]) for d, n in zip(dims, x.shape)),
        f"broadcast_in_dim: {x} does not broadcast to {list(shape)} along {dims}")
  return (TileType(shape, x.dtype),)


@type_rules.register(iota_p)
def _iota_type(eqn: Eqn) -> tuple[TileType, ...]:
  shape = eqn.params["shape"]
  check(0 <= eqn.params["dimension"] < len(shape), f"iota: no dimension {eqn.params['dimension']} in {list(shape)}")
  return (TileType(shape, dtypes.i32),)


@type_rules.register(reshape_p)
def _reshape_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,), shape = tile_types(eqn.invars), eqn.params["shape"]
  check(math.prod(shape) == x.size, f"reshape: {x} has {x.size} elements, {list(shape)} has {math.prod(shape)}")
  return (TileType(shape, x.dtype),)


@type_rules.register(transpose_p)
def _transpose_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,), perm = tile_types(eqn.invars), eqn.params["permutation"]
  check(sorted(perm) == list(range(len(x.shape))), f"transpose: axes {perm} are no permutation for {x}")
  return (TileType(tuple(x.shape[p] for p in perm), x.dtype),)


@type_rules.register(slice_p)
def _slice_type(eqn: Eqn) -> tuple[TileType, ...]:
  (x,), (start, limit, strides) = tile_types(eqn.invars), (eqn.params[k] for k in ("start", "limit", "strides"))
  check(len(start) == len(limit) == len(strides) == len(x.shape)
        and all(0 <= a <= b <= n if s > 0 else s < 0 and n > a >= b >= -1
                for a, b, s, n in zip(start, limit, strides, x.shape)),
        f"slice: {start}:{limit}:{strides} is out of range for {x}")
  return (TileType(tuple(len(range(a, b, s)) for a, b, s in zip(start, limit, strides)), x.dtype),)


@type_rules.register(concatenate_p)
def _concatenate_type(eqn: Eqn) -> tuple[TileType, ...]:
  types, dim = tile_types(eqn.invars), eqn.params["dimension"]
  first = types[0]
  check(0 <= dim < len(first.shape), f"concatenate: no axis {dim} in {first}")
  rest = [(t.shape[:dim], t.shape[dim + 1:], t.dtype) for t in types]
  check(len(set(rest)) == 1, f"concatenate: {' and '.join(map(str, types))} differ outside axis {dim}")
  size = sum(t.shape[dim] for t in types)
  return (TileType((*first.shape[:dim], size, *first.shape[dim + 1:]), first.dtype),)


# --- wrappers

def static_size_tuple(shape: Any, what: str) -> tuple[int, ...]:
  """A shape of Python ints; a bare int is one dimension."""
  items = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
  for n in items:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
      text = ", ".join(str(i.type) if isinstance(i, Tile) else repr(i) for i in items)
      raise TileTypeError(f"{what}: shape ({text}) must be of Python ints >= 0", loc=user_loc(),
                          hint="tiles have static shapes")
  return tuple(map(operator.index, items))


def broadcast_in_dim(x: Tile | Literal, shape: tuple[int, ...], dims: tuple[int, ...]) -> Tile:
  return bind_tile(broadcast_in_dim_p, (x,), shape=shape, broadcast_dimensions=dims)


def spread(x: Tile, shape: tuple[int, ...]) -> Tile:
  """`x` of equal rank, or rank 0, broadcast to `shape`."""
  return x if x.shape == shape else broadcast_in_dim(x, shape, tuple(range(x.ndim)))


def tile(x: Operand, dtype: np.dtype, what: str) -> Tile:
  """A number as a rank-0 tile."""
  return x if isinstance(x, Tile) else broadcast_in_dim(literal(x, dtype, what), (), ())


def broadcast_to(x: Any, shape: Any) -> Tile:
  """`x`, of equal rank or rank 0, repeated to `shape`. `jnp.broadcast_to` without rank promotion.

  >>> def kernel(x, y):
  ...   y[...] = tt.broadcast_to(x[:, None], (2, 3))
  >>> x = jnp.array([1., 2.])
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2, 3), x.dtype), grid=1)(x)
  Array([[1., 1., 1.],
         [2., 2., 2.]], dtype=float32)
  """
  x, shape = operand(x, "broadcast_to: x"), static_size_tuple(shape, "broadcast_to")
  value = tile(x, promoted("broadcast_to", x), "broadcast_to: x")
  if common_shape("broadcast_to", [value.shape, shape]) != shape:
    raise TileTypeError(f"broadcast_to: {value.type} does not broadcast to {list(shape)}", loc=user_loc())
  return spread(value, shape)


def full(shape: Any, fill_value: Any, dtype: Any = None) -> Tile:
  """A tile of `shape` filled with `fill_value`; the dtype of a Python number is f32, i32 or bool.

  >>> def kernel(x, y):
  ...   y[...] = tt.full((2,), 7.)
  >>> x = jnp.zeros(2)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([7., 7.], dtype=float32)
  """
  shape, x = static_size_tuple(shape, "full"), operand(fill_value, "full: fill_value")
  dtype = promoted("full", x) if dtype is None else dtypes.canonical(dtype)
  if isinstance(x, Tile):
    if x.ndim:
      raise TileTypeError(f"full: fill_value must be a scalar, got {x.type}", loc=user_loc())
    return broadcast_in_dim(x.astype(dtype), shape, ())
  return broadcast_in_dim(literal(x, dtype, "full: fill_value"), shape, ())


def zeros(shape: Any, dtype: Any = dtypes.f32) -> Tile:
  """A tile of zeros.

  >>> def kernel(x, y):
  ...   y[...] = tt.zeros((2,))
  >>> x = jnp.ones(2)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([0., 0.], dtype=float32)
  """
  return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = dtypes.f32) -> Tile:
  """A tile of ones.

  >>> def kernel(x, y):
  ...   y[...] = tt.ones((2,))
  >>> x = jnp.zeros(2)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([1., 1.], dtype=float32)
  """
  return full(shape, 1, dtype)


def iota(shape: Any, dimension: int) -> Tile:
  """i32 tile of `shape` whose element is its index along `dimension`."""
  shape = static_size_tuple(shape, "iota")
  return bind_tile(iota_p, (), shape=shape, dimension=dimension)


def arange(start: Any, stop: Any = None, step: int = 1) -> Tile:
  """i32[n]: the integers from `start` to `stop`, all static. `start + tt.arange(n)` has a dynamic start.

  >>> def kernel(x, y):
  ...   y[...] = x[...] + tt.arange(3)
  >>> x = jnp.array([10, 20, 30])
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([10, 21, 32], dtype=int32)
  """
  for x in (start, stop, step):
    if isinstance(x, Tile):
      raise TileTypeError("arange: the bounds must be Python ints", loc=user_loc(),
                          hint="start + tt.arange(n) has a dynamic start")
  if stop is None:
    start, stop = 0, start
  (start, stop, step) = (operator.index(x) for x in (start, stop, step))
  out = iota((len(range(start, stop, step)),), 0)
  out = out if step == 1 else out * step
  return out if start == 0 else out + start


def reshape(x: Any, shape: Any) -> Tile:
  """`x` with another shape of as many elements; one dimension may be -1.

  >>> def kernel(x, y):
  ...   y[...] = tt.reshape(x[...], (3, 2))
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((3, 2), x.dtype), grid=1)(x)
  Array([[0., 1.],
         [2., 3.],
         [4., 5.]], dtype=float32)
  """
  value = tile_argument(x, "reshape: x")
  sizes = list(shape) if isinstance(shape, (tuple, list)) else [shape]
  if sizes.count(-1) == 1:
    known = math.prod(n for n in sizes if n != -1)
    sizes[sizes.index(-1)] = value.size // known if known else 0
  sizes = static_size_tuple(sizes, "reshape")
  return value if sizes == value.shape else bind_tile(reshape_p, (value,), shape=sizes)


def transpose(x: Any, axes: Sequence[int] | None = None) -> Tile:
  """`x` with its dimensions permuted; reversed by default.

  >>> def kernel(x, y):
  ...   y[...] = tt.transpose(x[...])
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((3, 2), x.dtype), grid=1)(x)
  Array([[0., 3.],
         [1., 4.],
         [2., 5.]], dtype=float32)
  """
  value = tile_argument(x, "transpose: x")
  perm = tuple(range(value.ndim))[::-1] if axes is None else tuple(a % value.ndim if value.ndim else a for a in axes)
  if perm == tuple(range(value.ndim)):
    return value
  return bind_tile(transpose_p, (value,), permutation=perm)


def expand_dims(x: Any, axis: int) -> Tile:
  """`x` with a dimension of size 1 before `axis`.

  >>> def kernel(x, y):
  ...   y[...] = x[...] * tt.expand_dims(tt.sum(x[...], axis=1), 1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
  Array([[ 0.,  3.,  6.],
         [36., 48., 60.]], dtype=float32)
  """
  value = tile_argument(x, "expand_dims: x")
  axis = operator.index(axis) % (value.ndim + 1)
  return value[(slice(None),) * axis + (None,)]


def concatenate(arrays: Sequence[Any], axis: int = 0) -> Tile:
  """Tiles joined along `axis`, promoted to their common dtype.

  >>> def kernel(x, y):
  ...   y[...] = tt.concatenate([x[...], x[...]], axis=0)
  >>> x = jnp.array([1., 2.])
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((4,), x.dtype), grid=1)(x)
  Array([1., 2., 1., 2.], dtype=float32)
  """
  tiles = [tile_argument(x, f"concatenate: arrays[{k}]") for k, x in enumerate(arrays)]
  check(bool(tiles), "concatenate: no arrays")
  dtype = promoted("concatenate", *tiles)
  axis = axis + tiles[0].ndim if axis < 0 else axis
  return bind_tile(concatenate_p, [t.astype(dtype) for t in tiles], dimension=axis)


def tile_argument(x: Any, what: str) -> Tile:
  """An argument that must be a tile."""
  value = operand(x, what)
  if not isinstance(value, Tile):
    raise TileTypeError(f"{what} is the number {x}, not a tile", loc=user_loc(), hint="tt.full(shape, x)")
  return value


# --- indexing of a value

def getitem(x: Tile, index: Any) -> Tile:
  """`x[index]` with None, Python ints, static slices and `...`."""
  items = list(index) if isinstance(index, tuple) else [index]
  given = sum(i is not None and i is not Ellipsis for i in items)
  if sum(i is Ellipsis for i in items) > 1:
    raise TileIndexError("an index can have one `...` only", loc=user_loc())
  if given > x.ndim:
    raise TileIndexError(f"a tile {x.type} has {x.ndim} dimensions, got {given} indices", loc=user_loc())
  fill = [slice(None)] * (x.ndim - given)
  at = next((k for k, i in enumerate(items) if i is Ellipsis), None)
  items = items + fill if at is None else items[:at] + fill + items[at + 1:]
  start, limit, strides, shape = [], [], [], []
  kept: list[int] = []  # for each dimension after slicing and squeezing: its place in the result
  sizes = iter(x.shape)
  for item in items:
    if item is None:
      shape.append(1)
      continue
    n = next(sizes)
    a, size, step = _cut(item, n, x)
    start.append(a)
    limit.append(a + (size - 1) * step + 1 if size else a)
    strides.append(step)
    if isinstance(item, slice):
      kept.append(len(shape))
      shape.append(size)
  out = x
  if (tuple(start), tuple(limit), tuple(strides)) != ((0,) * x.ndim, x.shape, (1,) * x.ndim):
    out = bind_tile(slice_p, (x,), start=tuple(start), limit=tuple(limit), strides=tuple(strides))
  squeezed = tuple(shape[k] for k in kept)
  if out.shape != squeezed:
    out = bind_tile(reshape_p, (out,), shape=squeezed)
  if tuple(shape) != squeezed:
    out = broadcast_in_dim(out, tuple(shape), tuple(kept))
  return out


def _cut(item: Any, n: int, x: Tile) -> tuple[int, int, int]:
  if isinstance(item, slice):
    return static_slice(item, n, "index of a tile value")
  if isinstance(item, (Tile, ds)):
    raise TileIndexError("a tile value cannot be indexed by an abstract value", loc=user_loc(),
                         hint="index the reference it was loaded from, or tt.take(x, i, axis=0)")
  if isinstance(item, (bool, np.bool_)) or not hasattr(item, "__index__"):
    raise TileIndexError(f"unsupported index {item!r} of a tile value {x.type}", loc=user_loc(),
                         hint="None, Python ints, static slices and `...`")
  i = operator.index(item)
  if not -n <= i < n:
    raise TileIndexError(f"index {i} is out of range for size {n} of a tile value {x.type}", loc=user_loc())
  return i % n, 1, 1


METHODS.update(reshape=reshape, transpose=transpose, getitem=getitem)
