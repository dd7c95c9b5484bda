"""Types of traced values, and views of references: what flows along an edge of a TileGraph."""
from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tiletrace.core.dtypes import short_name


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
  """`factor` times the product of what the `names` stand for: a number that each call decides, 1 at least.

  The extents of arrays (tile_call's dynamic_shapes), their strides, and those of a dynamic grid.
  """
  names: tuple[str, ...]
  factor: int = 1

  def __mul__(self, other: Size | int) -> Size | int:
    if isinstance(other, Size):
      return Size(tuple(sorted((*self.names, *other.names))), self.factor * other.factor)
    return Size(self.names, self.factor * other) if other else 0

  __rmul__ = __mul__

  def __floordiv__(self, other: int) -> Size:
    assert self.factor % other == 0, (self, other)
    return Size(self.names, self.factor // other)

  def __str__(self) -> str:
    return "*".join([*([str(self.factor)] if self.factor != 1 else []), *self.names])

  @property
  def most(self) -> int:
    """The largest that a call may have: of one name what is checked, of a product of a grid's axes what is launched."""
    (name, *more) = self.names
    most = 2**31 - 1 if more else MAX_PROGRAMS if name.startswith(_GRID) else MAX_SIZE
    return most - most % self.factor

  def at(self, sizes: Mapping[str, Any]) -> Any:
    """The number, where the names stand for `sizes`."""
    return self.factor * math.prod(sizes[name] for name in self.names)


Extent = int | Size

_GRID = "grid["     # no author's name begins so
MAX_SIZE = 2**30        # of an extent that a call decides: sums of it and a tile's size stay in an i32
MAX_PROGRAMS = 2**22    # along an axis of a dynamic grid: so do products of a program id and a tile's size, up to 512


def extent_at(n: Extent, sizes: Mapping[str, Any]) -> Any:
  """An extent at a call."""
  return n.at(sizes) if isinstance(n, Size) else n


def grid_size(axis: int) -> Size:
  """The extent of a dynamic grid along `axis`."""
  return Size((f"{_GRID}{axis}]",))


class Space(enum.Enum):
  """Where a reference lives."""
  GLOBAL = "global"
  SHARED = "shared"
  FRAGMENT = "fragment"

  def __str__(self) -> str:
    return self.value


@dataclasses.dataclass(frozen=True, slots=True)
class TileType:
  """An immutable tile value. Rank 0 is a scalar, equal in every thread."""
  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  def __str__(self) -> str:
    return f"{short_name(self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class RefType:
  """A reference to memory (or registers: fragment). `nbytes` is the whole buffer's size.

  Only arrays in global memory have extents that are a Size; the annotation is that of all others.
  """
  shape: tuple[int, ...]
  dtype: np.dtype
  space: Space

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  def __str__(self) -> str:
    return f"Ref<{self.space}>{{{short_name(self.dtype)}[{','.join(map(str, self.shape))}]}}"


@dataclasses.dataclass(frozen=True, slots=True)
class BarrierType:
  """`count` mbarriers, each completing a phase after `arrivals` arrivals and all expected bytes."""
  count: int
  arrivals: int

  def __str__(self) -> str:
    return f"Barrier[{self.count}]{{arrivals={self.arrivals}}}"


Type = TileType | RefType | BarrierType


@dataclasses.dataclass(frozen=True, slots=True)
class Dyn:
  """The `index`-th dynamic operand (an i32 scalar) of a view."""
  index: int


@dataclasses.dataclass(frozen=True, slots=True)
class ViewDim:
  """One dimension of the *root* reference as a view sees it: elements start + stride * [0, size).

  `edges` are the half-open ranges [lo, hi), in root coordinates, that enclosing views end at, beyond the root's own
  [0, extent): elements outside any of them read as the fill value and are not stored. A size that is a Size is the
  root's own extent.
  """
  start: int | Dyn
  size: int | Dyn | Size
  stride: int = 1
  squeezed: bool = False
  edges: tuple[tuple[int | Dyn, int | Dyn], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class View:
  """A view of a root reference: one ViewDim for each root dimension, and the kept ones in the view's order.

  `perm[i]` is the root dimension behind the view's dimension i, so `.T` reverses it. Dynamic parts are `Dyn(k)`:
  the k-th of the operands that follow the root in the equation's `invars`.
  """
  dims: tuple[ViewDim, ...]
  perm: tuple[int, ...]

  @property
  def shape(self) -> tuple[int | Dyn | Size, ...]:
    return tuple(self.dims[p].size for p in self.perm)

  @property
  def static_shape(self) -> tuple[int, ...]:
    """The shape of a view whose sizes are all static (every view that is loaded, stored or copied)."""
    assert all(isinstance(n, int) for n in self.shape), self
    return self.shape  # type: ignore[return-value]

  @property
  def num_dyn(self) -> int:
    """How many dynamic operands follow the root."""
    found = [p.index for d in self.dims for p in (d.start, d.size, *(x for e in d.edges for x in e))
             if isinstance(p, Dyn)]
    return max(found, default=-1) + 1


def whole_view(shape: tuple[int, ...]) -> View:
  return View(tuple(ViewDim(0, n) for n in shape), tuple(range(len(shape))))
