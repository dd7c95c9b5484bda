"""Views of shared buffers: where a view's elements lie, as a layout plus a start that may be dynamic."""
from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import numpy as np

from tiletrace.core.graph import Atom, Literal, RefOperand
from tiletrace.core.types import Dyn
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.layouts.normal import unpack
from tiletrace.lowering.layouts.relation import Layout, build
from tiletrace.lowering.layouts.shared import recognise_swizzle
from tiletrace.lowering.layouts.tma import ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True)
class SharedPlace:
  """The element x of a view lies at base + sum(value * step) + layout.offset_of(x * strides), in elements. Along a
  dimension with a negative stride, which is of plain rows, it lies as far before.

  Attributes:
    layout: the tile that the view cuts, dimensions in the view's order.
    shape: the view's shape; a part of `layout.shape` where the view is a block of the tile.
    base: static part of the start.
    dynamic: (scalar, elements that one step of it moves).
    strides: of the view, in its order.
  """
  layout: Layout
  shape: tuple[int, ...]
  base: int
  dynamic: tuple[tuple[Atom, int], ...]
  strides: tuple[int, ...]

  def alignment(self, itemsize: int, facts: Facts) -> int:
    """Bytes that certainly divide the view's start within the buffer; 0 where it starts with the buffer."""
    return math.gcd(self.base, *(step * facts[a].divisor for a, step in self.dynamic)) * itemsize

  @property
  def is_block(self) -> bool:
    """The view skips no elements."""
    return all(s == 1 for s in self.strides)


def shared_place(ref: RefOperand, layout: Layout, facts: Facts) -> SharedPlace | str:
  """Resolves a view of a shared buffer, or says why its start is not an offset.

  A start along a swizzled dimension must be a multiple of the swizzle's period, provably so where it is dynamic.
  """
  dims = ref.view.dims
  squeezed = tuple(d for d, dim in enumerate(dims) if dim.squeezed)
  base, dynamic = 0, []
  for d, dim in enumerate(dims):
    start = ref.dyn[dim.start.index] if isinstance(dim.start, Dyn) else dim.start
    if isinstance(start, Literal):
      start = int(start.value)
    if (isinstance(start, int) and start == 0) or layout.shape[d] == 1:  # of one element, in range: 0
      continue
    size = dim.size if isinstance(dim.size, int) else 1
    granule = start if isinstance(start, int) else max(1, facts[start].divisor)
    if not isinstance(start, int) and granule > ref.type.shape[d] - 1 - (size - 1) * dim.stride:
      continue                                     # the one multiple that is in range is 0
    step = _step(layout, d, granule, size, dim.stride) if dim.stride > 0 else _step(layout, d, granule, 1, 1)
    if step is None:
      return f"the start along dimension {d} is not provably a multiple of the swizzle's period"
    if isinstance(start, int):
      base += step
    elif step % granule:
      return f"one step along dimension {d} is not a whole number of elements"
    else:
      dynamic.append((start, step // granule))
  tile = _drop(layout, squeezed) if squeezed else layout
  kept = [d for d in range(len(dims)) if d not in squeezed]
  order = [kept.index(p) for p in ref.view.perm]
  if order != sorted(order):
    tile = tile.permute(order)
  return SharedPlace(tile, ref.view.static_shape, base, tuple(dynamic), tuple(dims[p].stride for p in ref.view.perm))


@lru_cache(maxsize=1024)
def _step(layout: Layout, dim: int, granule: int, size: int, stride: int) -> int | None:
  """Elements that a start of `granule` along `dim` moves every element of a block, None where it is not a shift."""
  xor, total = layout.inverse_tables("off")[dim]
  extent = len(xor)
  if granule >= extent:
    return None
  starts = np.arange(0, extent - (size - 1) * stride, granule)
  x = np.arange(size) * stride
  met = _met(layout)
  xor, total = xor & met, (xor & ~met) + total
  moved = starts[:, None] + x[None, :]
  # The XOR part of a start must not meet the bits that the block's own elements or the other dimensions touch.
  others = 0
  for d, (other, _) in enumerate(layout.inverse_tables("off")):
    if d != dim:
      others |= int(np.bitwise_or.reduce(other))
  own = int(np.bitwise_or.reduce(xor[x]))
  split = (xor[moved] == xor[starts][:, None] ^ xor[x][None, :]).all() and not (
      int(np.bitwise_or.reduce(xor[starts])) & (others | own))
  summed = (total[moved] == total[starts][:, None] + total[x][None, :]).all()
  shift = xor[starts] + total[starts]
  linear = (shift == np.arange(len(starts)) * (shift[1] if len(shift) > 1 else 0)).all()
  if not (split and summed and linear):
    return None
  return int(shift[1]) if len(shift) > 1 else int(xor[granule] + total[granule])


def _met(layout: Layout) -> int:
  """The bits of the offset in which two dimensions meet, as they do under a swizzle: all else of an offset is the sum
  of what each dimension gives."""
  met = seen = 0
  for xor, _ in layout.inverse_tables("off"):
    bits = int(np.bitwise_or.reduce(xor))
    met, seen = met | seen & bits, seen | bits
  return met


@lru_cache(maxsize=256)
def _drop(layout: Layout, dims: tuple[int, ...]) -> Layout:
  """The dimensions `dims` fixed at 0 and gone: a slot of a buffer where they lie above the others, else what skips the
  offsets of their elements (columns of 0: no other element lies there)."""
  columns = [0 if any(unpack(c, layout.rank)[d] for d in dims) else c for c in layout.columns("off")]
  while columns and not columns[-1]:
    columns.pop()
  outers = [o for o in layout.outers if o.dim not in dims]
  return build(layout.shape, {"off": columns}, outers, valid=layout.valid).project(dims)


def stack(tile: Layout, count: int, bits: int) -> Layout:
  """`count` tiles of `bits`-wide elements, along a new leading dimension, each where TMA may write it."""
  found = recognise_swizzle(tile, bits)
  align = ALIGNMENT[found[0] if found is not None else 0] * 8 // bits
  return tile.expand_dims(0).repeat("off", count, 0, step=1, stride=-(-tile.extent("off") // align) * align)
