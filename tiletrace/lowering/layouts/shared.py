"""Shared-memory layouts: element offset -> tensor index, with the hardware swizzles.

A swizzle XORs bits of the byte address: with B = 1, 2, 3 for 32, 64, 128 bytes, bits [4, 4+B) ^= bits [7, 7+B)
(PTX ISA, "Swizzling modes" of the tensor copies and of the wgmma matrix descriptor). It is its own inverse.
"""
from __future__ import annotations

from collections.abc import Sequence

from tiletrace.lowering.layouts import f2
from tiletrace.lowering.layouts.normal import REPLICA, Outer
from tiletrace.lowering.layouts.relation import Layout, build

SWIZZLES = (128, 64, 32, 0)


def chunk_bits(dtype_bits: int) -> int:
  """log2 of the elements in 16 bytes, the unit that swizzles move."""
  return f2.log2(128 // dtype_bits)


def swizzled(layout: Layout, dtype_bits: int, swizzle_bytes: int) -> Layout:
  """The layout with its offsets swizzled (or, the map being an involution, unswizzled)."""
  if not swizzle_bytes:
    return layout
  columns = list(layout.columns("off"))
  first = chunk_bits(dtype_bits) + 3
  count = f2.log2(swizzle_bytes // 16)
  assert first + count <= len(columns), f"a {swizzle_bytes}-byte swizzle needs {8 * swizzle_bytes} bytes in the core"
  for i in range(first, first + count):
    columns[i] ^= columns[i - 3]
  return build(layout.shape, {**dict(layout.core), "off": columns}, layout.outers, valid=layout.valid,
               origin=dict(layout.origin))


def shared_layout(shape: Sequence[int], dtype_bits: int, swizzle_bytes: int, *, order: Sequence[int] | None = None,
                  stages: int = 1, block_bytes: int | None = None) -> Layout:
  """A tile of column blocks: `swizzle_bytes` along the contiguous dimension, then the rows, then further blocks.

  Extents are padded to a hull: whole blocks along the contiguous dimension, and rows in eights under a swizzle.

  Args:
    shape: extents of the tile.
    dtype_bits: width of an element.
    swizzle_bytes: 0, 32, 64 or 128.
    order: dimensions, contiguous first; by default the last dimension first (row-major).
    stages: slots of a ring; each holds its own tile, `extent("off")` elements apart.
    block_bytes: width of a column block without a swizzle; by default the whole extent. 16 gives wgmma's core matrices.

  Returns:
    A layout with axes `off` and, for more than one slot, `stage`.

  Example::

    s = shared_layout((64, 256), 16, 128)     # four blocks of 64 columns
    s.offset_of((1, 0)), s.offset_of((0, 64)) # (72, 4096): row 1 has its 16-byte chunks swapped, block 1 follows
  """
  shape = tuple(shape)
  assert swizzle_bytes in SWIZZLES, f"swizzle_bytes={swizzle_bytes} is not one of {SWIZZLES}"
  order = tuple(range(len(shape)))[::-1] if order is None else tuple(order)
  assert sorted(order) == list(range(len(shape))), f"order={order} does not permute {len(shape)} dimensions"
  hull = list(shape)
  steps: list[tuple[int, int, int]] = []           # (dim, extent, step), innermost first
  if order:
    width = (swizzle_bytes or block_bytes or 0) * 8 // dtype_bits or shape[order[0]]
    blocks = -(-shape[order[0]] // width)
    hull[order[0]] = width * blocks
    if swizzle_bytes:
      _pad_rows(hull, order[1:])
    steps = [(order[0], width, 1), *((d, hull[d], 1) for d in order[1:]), (order[0], blocks, width)]
  outers, stride = [], 1
  for dim, extent, step in steps:
    outers.append(Outer("off", stride, extent, dim, step))
    stride *= extent
  outers.append(Outer("stage", 1, stages, REPLICA, 0))
  return swizzled(build(hull, {}, outers, valid=shape), dtype_bits, swizzle_bytes)


def _pad_rows(hull: list[int], rows: Sequence[int]) -> None:
  """Pads so that the rows run in eights, the period of every swizzle."""
  need = 8
  for d in rows:
    if need > 1 and need % hull[d] == 0:
      need //= hull[d]
    elif need > 1:
      hull[d] = -(-hull[d] // need) * need
      need = 1
  assert need == 1 or rows, "a swizzle needs rows: 8 of them make its period"
  if need > 1:
    hull[rows[-1]] *= need


def recognise_swizzle(layout: Layout, dtype_bits: int) -> tuple[int, Layout] | None:
  """The hardware swizzle of a layout and the layout without it, or None where no mode leaves plain bits.

  Example: of `shared_layout((64, 64), 16, 64)` it is 64 and `shared_layout((64, 64), 16, 0, block_bytes=64)`.
  """
  bits = len(layout.columns("off"))
  for mode in SWIZZLES:
    if mode and chunk_bits(dtype_bits) + 3 + f2.log2(mode // 16) > bits:
      continue
    plain = swizzled(layout, dtype_bits, mode)
    if all(c and c & c - 1 == 0 for c in plain.columns("off")):
      return mode, plain
  return None
