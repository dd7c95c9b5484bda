from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tiletrace.lowering.layouts.relation import Layout, build
from tiletrace.lowering.layouts.shared import SWIZZLES, recognise_swizzle, shared_layout, swizzled

SHAPES = [(64, 64), (64, 256), (128, 64), (176, 64), (192, 128), (8, 64), (96, 192), (24, 320)]


def stored(layout: Layout) -> np.ndarray:
  """Element offset of every index of the hull."""
  return layout.coordinates("off", np.ogrid[tuple(slice(0, s) for s in layout.shape)])


def reference(shape: tuple[int, ...], bits: int, swizzle: int) -> np.ndarray:
  """Offsets by the byte rule: column blocks of `swizzle` bytes, 16-byte chunk number ^= row % 8 masked to the mode."""
  i, j = np.ogrid[:shape[0], :shape[1]]
  width = swizzle * 8 // bits
  byte = ((j // width * shape[0] + i) * width + j % width) * bits // 8
  chunk = byte >> 4
  mask = swizzle // 16 - 1
  byte = (chunk ^ (byte >> 7 & mask)) << 4 | byte % 16
  return byte * 8 // bits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_shared_layout_is_the_documented_swizzle_of_column_blocks(shape, bits, swizzle):
  layout = shared_layout(shape, bits, swizzle)

  assert np.array_equal(stored(layout)[:shape[0], :shape[1]],
                        reference((shape[0], layout.shape[1]), bits, swizzle)[:, :shape[1]])


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_128_byte_swizzle_moves_chunks_by_the_row_modulo_eight(bits):
  layout, chunk = shared_layout((16, 1024 // bits), bits, 128), 128 // bits
  for row in range(16):
    for c in range(8):
      assert layout.offset_of((row, c * chunk)) == (row * 8 + (c ^ row % 8)) * chunk


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=3), st.sampled_from([8, 16, 32]), st.sampled_from(SWIZZLES),
       st.sampled_from([1, 3, 5]), st.randoms(use_true_random=False))
def test_every_index_has_one_offset_and_every_offset_one_index(shape, bits, swizzle, stages, rng):
  order = list(range(len(shape)))
  rng.shuffle(order)
  layout = shared_layout(shape, bits, swizzle, order=order, stages=stages)
  offsets = stored(layout)

  assert sorted(offsets.ravel()) == list(range(layout.extent("off")))
  assert layout.valid == tuple(shape)
  assert layout.kernel().size == stages == layout.extent("stage")
  for index in [tuple(rng.randrange(s) for s in layout.shape) for _ in range(8)]:
    assert layout.offset_of(index) == offsets[index]
    assert layout.apply(off=layout.offset_of(index), stage=stages - 1) == index


def test_rows_that_are_no_multiple_of_eight_are_padded_under_a_swizzle():
  layout = shared_layout((12, 64), 16, 128)

  assert (layout.shape, layout.valid) == ((16, 64), (12, 64))
  assert shared_layout((12, 64), 16, 0).shape == (12, 64)
  assert shared_layout((2, 64), 16, 128).shape == (8, 64)
  assert shared_layout((3, 4, 64), 16, 128).shape == (4, 4, 64)


def test_columns_that_do_not_fill_a_block_are_padded():
  assert shared_layout((64, 96), 16, 128).shape == (64, 128)
  assert shared_layout((64, 96), 16, 64).shape == (64, 96)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_every_layout_recovers_its_own_swizzle(shape, bits, swizzle):
  layout = shared_layout(shape, bits, swizzle, stages=3)
  found = recognise_swizzle(layout, bits)

  assert found == (swizzle, shared_layout(layout.shape, bits, 0, block_bytes=swizzle, stages=3).with_valid(shape))


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_a_swizzle_is_its_own_inverse(swizzle):
  layout = shared_layout((64, 128), 16, swizzle)
  assert swizzled(swizzled(layout, 16, 64), 16, 64) == layout


def test_a_layout_that_is_no_hardware_swizzle_is_not_recognised():
  columns = list(shared_layout((64, 64), 16, 0).columns("off"))
  columns[9] ^= columns[2]
  assert recognise_swizzle(build((64, 64), {"off": columns}), 16) is None


def test_slots_of_a_ring_follow_each_other():
  layout = shared_layout((176, 64), 16, 128, stages=5)

  assert layout.axes == ("off", "stage")
  assert layout.extent("off") == 176 * 64
  assert layout.apply(off=1234, stage=0) == layout.apply(off=1234, stage=4)


def test_a_swizzle_needs_rows():
  with pytest.raises(AssertionError, match="needs rows"):
    shared_layout((256,), 16, 128)
