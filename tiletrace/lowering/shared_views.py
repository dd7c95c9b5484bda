"""Views of shared buffers: where a view's elements lie, as a layout plus a start that may be dynamic."""
from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np

from tiletrace.core.graph import Atom, Literal, RefOperand
from tiletrace.core.types import Dyn
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.layouts.normal import unpack
from tiletrace.lowering.layouts.relation import Layout, build


@dataclasses.dataclass(frozen=True, slots=True)
class SharedPlace:
  """The element x of a view lies at base + sum(value * stride) + layout.offset_of(x), in elements.

  Attributes:
    layout: the tile that the view cuts, dimensions in the view's order.
    shape: the view's shape; a part of `layout.shape` where the view is a block of the tile.
    base: static part of the start.
    dynamic: (scalar, elements that one step of it moves).
  """
  layout: Layout
  shape: tuple[int, ...]
  base: int
  dynamic: tuple[tuple[Atom, int], ...]

  @property
  def is_whole_tile(self) -> bool:
    return self.shape == self.layout.valid


def shared_place(ref: RefOperand, layout: Layout, facts: Facts) -> SharedPlace | str:
  """Resolves a view of a shared buffer, or says why its start is not an offset.

  A start along a swizzled dimension must be a multiple of the swizzle's period, provably so where it is dynamic.
  """
  dims = ref.view.dims
  squeezed = tuple(d for d, dim in enumerate(dims) if dim.squeezed)
  base, dynamic = 0, []
  for d, dim in enumerate(dims):
    if dim.stride != 1:
      return f"dimension {d} has a stride of {dim.stride}"
    start = ref.dyn[dim.start.index] if isinstance(dim.start, Dyn) else dim.start
    if isinstance(start, Literal):
      start = int(start.value)
    if (isinstance(start, int) and start == 0) or layout.shape[d] == 1:  # of one element, in range: 0
      continue
    size = dim.size if isinstance(dim.size, int) else 1
    granule = start if isinstance(start, int) else max(1, facts[start].divisor)
    stride = _step(layout, d, granule, size)
    if stride is None:
      return f"the start along dimension {d} is not provably a multiple of the swizzle's period"
    if isinstance(start, int):
      base += stride
    else:
      dynamic.append((start, stride // granule if stride % granule == 0 else None))
      if dynamic[-1][1] is None:
        return f"one step along dimension {d} is not a whole number of elements"
  tile = _drop(layout, squeezed) if squeezed else layout
  kept = [d for d in range(len(dims)) if d not in squeezed]
  order = [kept.index(p) for p in ref.view.perm]
  if order != sorted(order):
    tile = tile.permute(order)
  return SharedPlace(tile, ref.view.static_shape, base, tuple(dynamic))


@lru_cache(maxsize=1024)
def _step(layout: Layout, dim: int, granule: int, size: int) -> int | None:
  """Elements that a start of `granule` along `dim` moves every element of a block, None where it is not a shift."""
  xor, total = layout.inverse_tables("off")[dim]
  extent = len(xor)
  if granule >= extent:
    return None
  starts = np.arange(0, extent - size + 1, granule)
  x = np.arange(size)
  moved = starts[:, None] + x[None, :]
  # The XOR part of a start must not meet the bits that the block's own elements or the other dimensions touch.
  others = 0
  for d, (other, _) in enumerate(layout.inverse_tables("off")):
    if d != dim:
      others |= int(np.bitwise_or.reduce(other))
  own = int(np.bitwise_or.reduce(xor[:size]))
  split = (xor[moved] == xor[starts][:, None] ^ xor[x][None, :]).all() and not (
      int(np.bitwise_or.reduce(xor[starts])) & (others | own))
  summed = (total[moved] == total[starts][:, None] + total[x][None, :]).all()
  shift = xor[starts] + total[starts]
  linear = (shift == np.arange(len(starts)) * (shift[1] if len(shift) > 1 else 0)).all()
  if not (split and summed and linear):
    return None
  return int(shift[1]) if len(shift) > 1 else int(xor[granule] + total[granule])


@lru_cache(maxsize=256)
def _drop(layout: Layout, dims: tuple[int, ...]) -> Layout:
  """One slot of a buffer: the dimensions `dims` fixed at 0 and gone. They must lie above the others."""
  columns = list(layout.columns("off"))
  low = [c for c in columns if not any(unpack(c, layout.rank)[d] for d in dims)]
  assert columns[:len(low)] == low, f"a slot of {layout} is not contiguous"
  outers = [o for o in layout.outers if o.dim not in dims]
  slot = build(layout.shape, {"off": low}, outers, valid=layout.valid)
  return slot.project(dims)


def stack(tile: Layout, count: int) -> Layout:
  """`count` tiles one after another, along a new leading dimension."""
  return tile.expand_dims(0).repeat("off", count, 0, step=1)
