"""Indexed: `ref.at[idx, :]`, a view taken at tiles of indices. tt.load gathers it, tt.store scatters to it."""
from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import TileIndexError, TileTypeError
from tiletrace.core.operands import common_shape
from tiletrace.core.ref import Dim, Ref, describe, expand, plain_name, plus, times, unpack, view_of
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile
from tiletrace.core.types import Space


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Indexed:
  """Elements of a view, some of whose dimensions are indexed by tiles.

  Attributes:
    ref: the view; it has the whole extent of the root along the indexed dimensions, and edges where it ends earlier.
    dims: which dimensions of `ref` are indexed: neighbours.
    indices: an i32 tile for each, of one rank, in the root's coordinates.
    index_shape: their broadcast shape; it stands in the place of the indexed dimensions.
  """
  ref: Ref
  dims: tuple[int, ...]
  indices: tuple[Tile, ...]
  index_shape: tuple[int, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    sizes = self.ref.shape
    return (*sizes[:self.dims[0]], *self.index_shape, *sizes[self.dims[-1] + 1:])

  @property
  def dtype(self) -> np.dtype:
    return self.ref.dtype

  def __repr__(self) -> str:
    return f"Indexed<{self.ref.space}>{{{dtypes.short_name(self.dtype)}{list(self.shape)}}}"

  def __getitem__(self, index: Any) -> NoReturn:
    raise TileTypeError(f"{plain_name(self.ref)} is indexed by tiles already", loc=user_loc(),
                        hint="load it: tt.load(ref.at[idx, :]), or ref[idx, :]")


def has_index_tiles(items: list[Any]) -> bool:
  return any(isinstance(i, Tile) and i.ndim for i in items)


def indexed(ref: Ref, index: Any) -> Indexed:
  """`ref.at[index]` where items of the index are tiles.

  Raises:
    TileIndexError: the tiles are no integers, do not stand side by side, or the reference is not global.
  """
  items = expand(ref, index)
  tiles = [i for i in items if isinstance(i, Tile) and i.ndim]
  name = plain_name(ref)
  for t in tiles:
    if not dtypes.is_integer(t.dtype):
      raise TileIndexError(f"index of {name} is a tile {t.type}, not of integers", loc=user_loc(),
                           hint="tt.where(mask, x, y) selects by a bool tile")
  if ref.space is not Space.GLOBAL:
    raise TileIndexError(f"index of {name} is a tile {tiles[0].type}: a gather from {ref.space} memory is not "
                         "supported", loc=user_loc(), hint="index the global array; for tiles write tt.block(i, size)")
  base = view_of(ref, tuple(slice(None) if isinstance(i, Tile) and i.ndim else i for i in items))
  kept = [i for i in items if not _removes(i)]
  dims = tuple(n for n, i in enumerate(kept) if isinstance(i, Tile))
  if dims != tuple(range(dims[0], dims[0] + len(dims))):
    raise TileIndexError(f"index of {name}: the index tiles do not stand side by side", loc=user_loc(),
                         hint="transpose the view, ref.T, or take a scalar or a block of the dimension between them")
  shape = common_shape(f"index of {name}", [t.shape for t in tiles])
  whole, starts = _whole_dims(base, dims)
  return Indexed(whole, dims, tuple(_in_root(t.astype(dtypes.i32), d) for t, d in zip(tiles, starts)), shape)


def _removes(item: Any) -> bool:
  """An integer, which removes its dimension."""
  return not item.ndim if isinstance(item, Tile) else hasattr(type(item), "__index__")


def _whole_dims(ref: Ref, dims: tuple[int, ...]) -> tuple[Ref, list[Dim]]:
  """The view with all of the root along `dims`, edges for what it was; and its dimensions as they were."""
  parts, was = unpack(ref), []
  for d in dims:
    p = ref.view.perm[d]
    dim, extent = parts[p], ref.type.shape[p]
    was.append(dim)
    is_root = (dim.start, dim.size, dim.stride) == (0, extent, 1) if not any(
      isinstance(x, Tile) for x in (dim.start, dim.size)) else False
    edges = dim.edges if is_root else (*dim.edges, (dim.start, plus(dim.start, times(dim.size, dim.stride))))
    parts[p] = Dim(0, extent, 1, False, edges)
  return ref.viewed(parts, ref.view.perm), was


def _in_root(index: Tile, dim: Dim) -> Tile:
  out = index if dim.stride == 1 else index * dim.stride
  return out if isinstance(dim.start, int) and dim.start == 0 else out + dim.start


def describe_indexed(x: Indexed) -> str:
  return f"{describe(x.ref)} at tiles of indices"
