"""Boxes of cp.async.bulk.tensor, derived from a shared layout (PTX ISA, "Tensors", box and swizzle)."""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tiletrace.lowering.layouts.normal import unpack
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import recognise_swizzle

MAX_BOX = 256                                        # elements of a box along one dimension
ALIGNMENT = {128: 1024, 64: 512, 32: 256, 0: 128}    # bytes of a shared base, by swizzle: the pattern's period


@dataclass(frozen=True)
class Box:
  """One bulk tensor copy.

  Attributes:
    box_shape: extents per tensor dimension.
    offset: first tensor index.
    smem_offset: first element in the shared buffer.
  """
  box_shape: tuple[int, ...]
  offset: tuple[int, ...]
  smem_offset: int


def runs(layout: Layout) -> list[tuple[int, int, int, int]]:
  """An unswizzled layout along `off`: (dim, extent, step, stride), innermost first, neighbours joined. A stride that is
  more than what lies below it leaves a gap, as tiles of a stack do that start at multiples of 128 bytes."""
  parts = []
  for i, column in enumerate(layout.columns("off")):
    vector = unpack(column, layout.rank)
    dim = next(d for d, x in enumerate(vector) if x)
    parts.append((dim, 2, vector[dim], 1 << i))
  parts += [(o.dim, o.extent, o.step, o.stride) for o in layout.outers_of("off")]
  joined: list[tuple[int, int, int, int]] = []
  for dim, extent, step, stride in parts:
    along, count, first, apart = joined[-1] if joined else (-1, 0, 0, 0)
    if along == dim and count * first == step and count * apart == stride:
      joined[-1] = (dim, count * extent, first, apart)
    else:
      joined.append((dim, extent, step, stride))
  return joined


def tma_boxes(layout: Layout, dtype_bits: int, order: Sequence[int]) -> list[Box]:
  """The copies that fill (or drain) a shared tile; all have one shape.

  Args:
    layout: the shared layout; only its `valid` part is moved.
    dtype_bits: width of an element.
    order: dimensions of the tile as the global array strides them, contiguous first.

  Example: a (64, 256) bf16 tile in 128-byte columns, order (1, 0), is four boxes of 64 x 64.
  """
  boxes = _boxes(layout, dtype_bits, tuple(order))
  assert not isinstance(boxes, str), f"no tensor copy for {layout}: {boxes}"
  return list(boxes)


def tma_refusal(layout: Layout, dtype_bits: int, order: Sequence[int]) -> str | None:
  """Why `tma_boxes` has no answer, or None."""
  boxes = _boxes(layout, dtype_bits, tuple(order))
  return boxes if isinstance(boxes, str) else None


@lru_cache(maxsize=256)
def _boxes(layout: Layout, dtype_bits: int, order: tuple[int, ...]) -> tuple[Box, ...] | str:
  found = recognise_swizzle(layout, dtype_bits)
  if found is None:
    return "the shared layout is not one of the hardware's swizzles"
  swizzle, plain = found
  box, repeats = [1] * layout.rank, []
  position = 0
  for dim, extent, step, stride in runs(plain):
    place = order.index(dim)
    if repeats or place < position or step != box[dim] or stride != math.prod(box):      # a box has no gaps
      repeats.append((dim, extent, step))
      continue
    position = place
    inner = max(e for e in range(1, extent + 1) if extent % e == 0 and e * box[dim] <= MAX_BOX)
    box[dim] *= inner
    if inner < extent:
      repeats.append((dim, extent // inner, step * inner))
  inner_bytes = box[order[0]] * dtype_bits // 8 if order else 0
  if inner_bytes % 16 or not inner_bytes:
    return f"the box is {inner_bytes} bytes wide, not a multiple of 16"
  if swizzle and inner_bytes != swizzle:
    return f"the box is {inner_bytes} bytes wide, the {swizzle}-byte swizzle's rows are not"
  boxes = []
  for index in itertools.product(*(range(extent) for _, extent, _ in reversed(repeats))):
    offset = [0] * layout.rank
    for i, (dim, _, step) in zip(reversed(index), repeats):
      offset[dim] += i * step
    if all(o < v for o, v in zip(offset, layout.valid)):
      shape = tuple(min(b, v - o) for b, v, o in zip(box, layout.valid, offset))
      boxes.append(Box(shape, tuple(offset), plain.offset_of(offset)))
  astray = next((b for b in boxes if b.smem_offset * dtype_bits // 8 % ALIGNMENT[swizzle]), None)
  if astray is not None:
    return (f"a box would start {astray.smem_offset * dtype_bits // 8} bytes into the tile, not at a multiple of "
            f"{ALIGNMENT[swizzle]}")
  shapes = {b.box_shape for b in boxes}
  if len(shapes) > 1:
    return f"padding cuts the boxes to different shapes {sorted(shapes)}"
  outermost = max((order.index(d) for d in range(layout.rank) if box[d] > 1), default=0)
  for d in range(layout.rank):
    if boxes and boxes[0].box_shape[d] < box[d] and order.index(d) < outermost:
      return f"dimension {d} is padded from {layout.valid[d]} to {layout.shape[d]} inside a box"
  return tuple(boxes)
