from __future__ import annotations

import numpy as np
import pytest

from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import SWIZZLES, recognise_swizzle, shared_layout
from tiletrace.lowering.layouts.tma import ALIGNMENT, Box, tma_boxes, tma_refusal
from tiletrace.lowering.shared_views import stack


def copy_in(tile: np.ndarray, layout: Layout, boxes: list[Box], bits: int, order: tuple[int, ...]) -> np.ndarray:
  """What the tensor copies leave in shared memory, by the documented order and byte swizzle; -1 where nothing came.

  A box is dense in shared memory, the array's contiguous dimension innermost; the unit XORs 16-byte chunks by address.
  """
  found = recognise_swizzle(layout, bits)
  assert found is not None
  mask = max(found[0] // 16 - 1, 0)
  memory = np.full(layout.extent("off"), -1, np.int64)
  for box in boxes:
    part = tile[tuple(slice(o, o + b) for o, b in zip(box.offset, box.box_shape))]
    assert part.shape == box.box_shape
    flat = part.transpose(order[::-1]).ravel()
    byte = (box.smem_offset + np.arange(flat.size)) * bits // 8
    byte = (byte >> 4 ^ byte >> 7 & mask) << 4 | byte % 16
    within = np.arange(flat.size) * bits % 8
    memory[(byte * 8 + within) // bits] = flat
  return memory


def check(shape, bits, swizzle, order=None, tile_order=None, stages=1):
  layout = shared_layout(shape, bits, swizzle, order=tile_order, stages=stages, block_bytes=16 if not swizzle else None)
  order = order or tuple(range(len(shape)))[::-1]
  boxes = tma_boxes(layout, bits, order)
  tile = np.random.default_rng(bits).permutation(np.prod(shape)).reshape(shape)
  memory = copy_in(tile, layout, boxes, bits, order)

  index = np.ogrid[tuple(slice(0, s) for s in shape)]
  assert np.array_equal(memory[layout.coordinates("off", index)], tile)
  assert sum(int(np.prod(b.box_shape)) for b in boxes) == tile.size
  assert all(max(b.box_shape) <= 256 for b in boxes)
  assert len({b.box_shape for b in boxes}) == 1
  inner = boxes[0].box_shape[order[0]] * bits // 8
  assert inner % 16 == 0 and (not swizzle or inner == swizzle)
  assert all(b.smem_offset * bits // 8 % ALIGNMENT[swizzle] == 0 for b in boxes)
  return boxes


SHAPES = [(64, 256), (128, 64), (176, 64), (192, 128), (96, 192), (512, 64), (8, 64)]


@pytest.mark.parametrize(("shape", "bits", "swizzle"), [
  (shape, bits, swizzle) for shape in SHAPES for bits in (8, 16, 32) for swizzle in SWIZZLES
  if shape[1] * bits % (8 * (swizzle or 16)) == 0])
def test_boxes_fill_a_tile_as_its_layout_says(shape, bits, swizzle):
  check(shape, bits, swizzle, stages=3)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_boxes_fill_column_major_tiles(swizzle):
  check((64, 176), 16, swizzle, order=(0, 1), tile_order=(0, 1))


def test_boxes_of_three_dimensions():
  boxes = check((3, 16, 128), 16, 128)
  assert [b.box_shape for b in boxes] == [(3, 16, 64)] * 2


def test_64_columns_of_128_bytes_are_one_box_each():
  boxes = tma_boxes(shared_layout((64, 256), 16, 128), 16, (1, 0))

  assert boxes == [Box((64, 64), (0, 64 * i), 4096 * i) for i in range(4)]


def test_more_than_256_rows_are_split():
  assert [b.offset for b in tma_boxes(shared_layout((512, 64), 16, 128), 16, (1, 0))] == [(0, 0), (256, 0)]


def test_padded_rows_are_not_copied():
  layout = shared_layout((12, 64), 16, 128)

  assert layout.shape == (16, 64)
  assert tma_boxes(layout, 16, (1, 0)) == [Box((12, 64), (0, 0), 0)]


@pytest.mark.parametrize(("layout", "bits", "order", "reason"), [
  (shared_layout((64, 100), 16, 128), 16, (1, 0), "padd"),
  (shared_layout((64, 100), 16, 0), 16, (1, 0), "200 bytes wide, not a multiple of 16"),
  (shared_layout((64, 7), 8, 0), 8, (1, 0), "7 bytes wide"),
  (shared_layout((64, 64), 16, 128), 16, (0, 1), "bytes wide"),
  (shared_layout((64, 64), 16, 128).permute((1, 0)), 16, (1, 0), "bytes wide"),
  (shared_layout((8, 96), 8, 128), 8, (1, 0), "padded from 96 to 128"),
])
def test_a_tile_that_tensor_copies_cannot_fill_says_why(layout, bits, order, reason):
  assert reason in str(tma_refusal(layout, bits, order))
  with pytest.raises(AssertionError, match="no tensor copy"):
    tma_boxes(layout, bits, order)


def test_an_unrecognised_layout_says_so():
  layout = shared_layout((64, 64), 16, 128)
  assert "not one of the hardware's swizzles" in str(tma_refusal(layout, 32, (1, 0)))


@pytest.mark.parametrize(("rows", "columns"), [(3, 4), (8, 4), (5, 16), (8, 32)])
def test_a_box_does_not_span_the_gaps_between_tiles_of_a_stack(rows, columns):
  """Each tile of a stack starts at a multiple of 128 bytes; a box is dense."""
  layout = stack(shared_layout((rows, columns), 32, 0), 7, 32)
  boxes = tma_boxes(layout, 32, (2, 1, 0))
  tile = np.random.default_rng(rows).permutation(7 * rows * columns).reshape(7, rows, columns)
  memory = copy_in(tile, layout, boxes, 32, (2, 1, 0))
  assert np.array_equal(memory[layout.coordinates("off", np.ogrid[:7, :rows, :columns])], tile)
  assert len(boxes) == (1 if rows * columns * 4 % 128 == 0 else 7)
