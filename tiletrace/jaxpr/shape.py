"""Shapes: jax's primitives that rearrange, cut and join values."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.graph import Literal
from tiletrace.core.ops import elementwise as ops, shape as shapes
from tiletrace.core.ops.take import take
from tiletrace.core.tile import Tile
from tiletrace.jaxpr.rules import Refused, as_tile, cast, full, op, rule, static_integer


@rule("broadcast_in_dim")
def _broadcast(x: Any, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any) -> Any:
  return shapes.broadcast_in_dim(x, tuple(shape), tuple(broadcast_dimensions))


@rule("reshape")
def _reshape(x: Any, *, new_sizes: tuple[int, ...], dimensions: tuple[int, ...] | None = None, **_: Any) -> Any:
  if dimensions is not None and tuple(dimensions) != tuple(sorted(dimensions)):
    x = op(shapes.transpose_p, x, permutation=tuple(dimensions))
  return x if tuple(new_sizes) == x.type.shape else op(shapes.reshape_p, x, shape=tuple(new_sizes))


@rule("squeeze")
def _squeeze(x: Any, *, dimensions: tuple[int, ...]) -> Any:
  return op(shapes.reshape_p, x, shape=tuple(n for d, n in enumerate(x.type.shape) if d not in dimensions))


@rule("transpose")
def _transpose(x: Any, *, permutation: tuple[int, ...]) -> Any:
  return op(shapes.transpose_p, x, permutation=tuple(permutation))


@rule("slice")
def _slice(x: Any, *, start_indices: Sequence[int], limit_indices: Sequence[int], strides: Any) -> Any:
  return _cut(x, start_indices, limit_indices, strides)


def _cut(x: Tile, start: Sequence[int], limit: Sequence[int], strides: Sequence[int] | None = None) -> Tile:
  start, limit, strides = (tuple(map(int, v)) for v in (start, limit, strides or (1,) * x.ndim))
  if (start, limit, strides) == ((0,) * x.ndim, x.shape, (1,) * x.ndim):
    return x
  return op(shapes.slice_p, x, start=start, limit=limit, strides=strides)


def along(x: Tile, axis: int, start: int, limit: int, step: int = 1) -> Tile:
  """x[start:limit:step] of one dimension."""
  ones = [1] * x.ndim
  ones[axis] = step
  return _cut(x, [start if d == axis else 0 for d in range(x.ndim)],
              [limit if d == axis else n for d, n in enumerate(x.shape)], ones)


@rule("rev")
def _rev(x: Any, *, dimensions: Sequence[int]) -> Any:
  x = as_tile(x)
  gone = [d for d in dimensions if x.shape[d] > 1]
  return _cut(x, [n - 1 if d in gone else 0 for d, n in enumerate(x.shape)],
              [-1 if d in gone else n for d, n in enumerate(x.shape)],
              [-1 if d in gone else 1 for d in range(x.ndim)])


@rule("concatenate", arrays=True)
def _concatenate(*xs: Any, dimension: int) -> Any:
  return joined([x for x in xs if np.shape(x)[dimension]] or list(xs[:1]), dimension)


def joined(xs: Sequence[Any], axis: int) -> Tile:
  tiles = list(map(as_tile, xs))
  return tiles[0] if len(tiles) == 1 else op(shapes.concatenate_p, *tiles, dimension=axis)


def _with_axis(x: Any, axis: int) -> Tile:
  """x with a new dimension of one."""
  tile = as_tile(x)
  return op(shapes.reshape_p, tile, shape=(*tile.shape[:axis], 1, *tile.shape[axis:]))


def stacked(xs: Sequence[Any], axis: int) -> Tile:
  return joined([_with_axis(x, axis) for x in xs], axis)


@rule("stack", arrays=True)
def _stack(*xs: Any, axis: int) -> Any:
  return stacked(xs, axis)


@rule("unstack")
def _unstack(x: Any, *, axis: int) -> list[Any]:
  shape = (*x.shape[:axis], *x.shape[axis + 1:])
  return [op(shapes.reshape_p, along(x, axis, k, k + 1), shape=shape) for k in range(x.shape[axis])]


@rule("split")
def _split(x: Any, *, sizes: Sequence[int], axis: int) -> list[Any]:
  ends = list(itertools.accumulate(map(int, sizes)))
  return [along(x, axis, end - int(n), end) for n, end in zip(sizes, ends)]


@rule("tile")
def _tile(x: Any, *, reps: Sequence[int]) -> Any:
  x = as_tile(x)
  for axis, n in enumerate(map(int, reps)):
    x = joined([x] * n, axis) if n else along(x, axis, 0, 0)
  return x


@rule("pad")
def _pad(x: Any, value: Any, *, padding_config: Sequence[tuple[int, int, int]]) -> Any:
  """Around and between the elements; negative padding cuts off."""
  x = as_tile(x)
  for axis, (low, high, between) in enumerate(tuple(map(int, c)) for c in padding_config):
    n = x.shape[axis]
    if between and n > 1:
      gap = full(value, (*x.shape[:axis + 1], between, *x.shape[axis + 1:]))
      wide = op(shapes.reshape_p, joined([_with_axis(x, axis + 1), gap], axis + 1),
                shape=(*x.shape[:axis], n * (between + 1), *x.shape[axis + 1:]))
      n += (n - 1) * between
      x = along(wide, axis, 0, n)
    x = along(x, axis, min(n, max(0, -low)), max(min(n, max(0, -low)), n - max(0, -high)))
    edges = [full(value, tuple(m if d == axis else k for d, k in enumerate(x.shape))) if m > 0 else None
             for m in (low, high)]
    x = joined([part for part in (edges[0], x, edges[1]) if part is not None and part.shape[axis]] or [x], axis)
  return x


def _starts(x: Tile, sizes: Sequence[int], starts: Sequence[Any]) -> list[Any]:
  """Where a part begins, so that it lies inside: ints where that is known, tiles else."""
  out: list[Any] = []
  for axis, (n, size, at) in enumerate(zip(x.shape, sizes, starts, strict=True)):
    known = 0 if size == n else static_integer(at)
    if known is None and size != 1:
      raise Refused(f"takes {size} of {n} elements along dimension {axis} from a place that is not known while tracing",
                    "read that part of the reference: ref[tt.ds(start, size)]; of one element a dynamic place is known "
                    "to tt.take")
    out.append(ops.clip(cast(at, dtypes.i32), 0, n - 1) if known is None else min(max(known, 0), n - size))
  return out


@rule("dynamic_slice")
def _dynamic_slice(x: Any, *starts: Any, slice_sizes: Sequence[int]) -> Any:
  x = as_tile(x)
  for axis, (at, size) in enumerate(zip(_starts(x, slice_sizes, starts), slice_sizes)):
    x = _with_axis(take(x, at, axis), axis) if isinstance(at, Tile) else along(x, axis, at, at + size)
  return x


@rule("dynamic_update_slice")
def _dynamic_update_slice(x: Any, update: Any, *starts: Any) -> Any:
  """The update is brought to its place, and chosen there."""
  x, update = as_tile(x), as_tile(update)
  sizes, inside = update.shape, None
  for axis, (at, size) in enumerate(zip(_starts(x, sizes, starts), sizes)):
    n = x.shape[axis]
    if size == n:
      continue
    if isinstance(at, int):
      config = [(at, n - size - at, 0) if d == axis else (0, 0, 0) for d in range(x.ndim)]
      update = _pad(update, cast(Literal(0, dtypes.i32), x.dtype), padding_config=config)
    else:
      update = shapes.spread(update, tuple(n if d == axis else m for d, m in enumerate(update.shape)))
    index = shapes.iota(x.shape, axis)
    here = index == at if isinstance(at, Tile) else (index >= at) & (index < at + size)
    inside = here if inside is None else inside & here
  return update if inside is None else ops.where(inside, update, x)


@rule("iota")
def _iota(*, dtype: Any, shape: tuple[int, ...], dimension: int, **_: Any) -> Any:
  return cast(op(shapes.iota_p, shape=tuple(shape), dimension=dimension), dtypes.canonical(dtype))


