from __future__ import annotations

import random

import pytest

from tiletrace.lowering.layouts.descriptor import (
  Descriptor,
  Fields,
  descriptor_refusal,
  prove_descriptor,
  wgmma_descriptor,
)
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import SWIZZLES, shared_layout

K_STEP = {8: 32, 16: 16, 32: 8}


def operand(role: str, major: str, mn: int, k: int, bits: int, swizzle: int, stages: int = 1) -> Layout:
  shape, (mn_dim, k_dim) = ((mn, k), (0, 1)) if role == "A" else ((k, mn), (1, 0))
  order = (k_dim, mn_dim) if major == "k" else (mn_dim, k_dim)
  return shared_layout(shape, bits, swizzle, order=order, stages=stages, block_bytes=16)


def hardware_byte(fields: Fields, major: str, mn: int, k: int, bits: int) -> int:
  """Where the hardware reads element (mn, k), told core matrix by core matrix (8 lines of 16 bytes), then swizzled."""
  per_line = 128 // bits
  line, along, block = (mn % 8, k, mn // 8) if major == "k" else (k % 8, mn, k // 8)
  core, inside = divmod(along, per_line)                      # which 16-byte piece of the contiguous dimension
  if fields.swizzle == 0:
    # K-major: SBO between 8-row groups, LBO between 16-byte pieces. MN-major: the two change places.
    between_groups, between_pieces = (fields.sbo, fields.lbo) if major == "k" else (fields.lbo, fields.sbo)
    return block * between_groups + core * between_pieces + 16 * line + inside * bits // 8
  pieces = fields.swizzle // 16
  repeat, piece = divmod(core, pieces)
  assert major == "mn" or repeat == 0, "a K-major step stays inside the swizzle's span"
  return block * fields.sbo + repeat * fields.lbo + line * fields.swizzle + 16 * piece + inside * bits // 8


def check(layout: Layout, bits: int, role: str, major: str, tile: int | None = None) -> Descriptor:
  desc = wgmma_descriptor(layout, bits, role=role, tile=tile)
  assert desc.major == major
  prove_descriptor(layout, bits, desc, role)
  rng = random.Random(layout.extent("off"))
  base = 1024 * rng.randrange(64)
  mn_extent, k_extent = layout.shape if role == "A" else layout.shape[::-1]
  for _ in range(40):
    mn0, k0 = rng.randrange(0, mn_extent, desc.tile), rng.randrange(0, k_extent, desc.step)
    mn, k = rng.randrange(desc.tile), rng.randrange(desc.step)
    fields = Descriptor.decode(desc.encode(base + desc.tile_offset(mn0, k0)))
    byte = fields.start + hardware_byte(fields, major, mn, k, bits)
    chunk_mask = max(fields.swizzle // 16 - 1, 0)
    byte ^= (byte >> 7 & chunk_mask) << 4
    index = (mn0 + mn, k0 + k) if role == "A" else (k0 + k, mn0 + mn)
    assert byte == base + layout.offset_of(index) * bits // 8
  return desc


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("m", [64, 128, 192, 320])
def test_k_major_a_descriptors_read_what_the_layout_stores(bits, swizzle, m):
  for k in (K_STEP[bits] * 4, K_STEP[bits] * 12):
    check(operand("A", "k", m, k, bits, swizzle, stages=3), bits, "A", "k")


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_k_major_b_descriptors_read_what_the_layout_stores_for_every_n(bits, swizzle):
  for n in range(8, 257, 8):
    check(operand("B", "k", n, K_STEP[bits] * 4, bits, swizzle, stages=5), bits, "B", "k")


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_mn_major_b_descriptors_read_what_the_layout_stores_for_every_n(swizzle):
  block = (swizzle or 16) // 2
  for n in (n for n in range(8, 257, 8) if n % block == 0):
    check(operand("B", "mn", n, 64, 16, swizzle, stages=5), 16, "B", "mn")


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("m", [64, 128, 192])
def test_mn_major_a_descriptors_read_what_the_layout_stores(swizzle, m):
  check(operand("A", "mn", m, 48, 16, swizzle), 16, "A", "mn")


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_a_176_row_tile_is_a_k_major_and_an_mn_major_b_operand_at_once(swizzle):
  tile = shared_layout((176, 128), 16, swizzle, stages=3, block_bytes=16)        # [kv, d]: K then V of attention
  check(tile.permute((1, 0)), 16, "B", "k", tile=176)                            # S = Q K^T: n = kv, k = d
  check(tile, 16, "B", "mn", tile=128)                                           # O = P V:   k = kv, n = d


def test_tiles_of_part_of_n_start_at_their_own_columns():
  desc = check(shared_layout((64, 384), 16, 128), 16, "B", "mn", tile=128)

  assert desc.mn_offsets == (0, 2 * 64 * 128, 4 * 64 * 128)


def test_the_gemm_of_128_byte_swizzles_has_its_known_numbers():
  a = wgmma_descriptor(shared_layout((128, 64), 16, 128), 16, role="A")
  b = wgmma_descriptor(shared_layout((64, 256), 16, 128), 16, role="B")

  assert (a.major, a.sbo, a.k_offsets, a.mn_offsets) == ("k", 1024, (0, 32, 64, 96), (0, 8192))
  assert a.encode(0) == 1 << 62 | 64 << 32 | 1 << 16
  assert (b.major, b.lbo, b.sbo, b.k_offset(3), b.transpose) == ("mn", 64 * 128, 1024, 6144, 1)
  assert b.encode(0x1_0000_4400) == 1 << 62 | 64 << 32 | (8192 >> 4) << 16 | 0x440


def test_a_k_step_leaves_a_narrow_swizzle_by_a_whole_column_block():
  desc = wgmma_descriptor(shared_layout((64, 64), 16, 32), 16, role="A")
  assert desc.k_offsets == (0, 2048, 4096, 6144)
  desc = wgmma_descriptor(shared_layout((64, 64), 16, 64), 16, role="A")
  assert desc.k_offsets == (0, 32, 4096, 4128)


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_encode_and_decode_are_inverse(swizzle):
  desc = Descriptor(swizzle, 16 * 1234, 16 * 777, "k", 64, 16, (0,), (0,))

  assert Descriptor.decode(desc.encode(16 * 4321)) == Fields(16 * 4321, 16 * 1234, 16 * 777, swizzle)


@pytest.mark.parametrize(("layout", "bits", "role", "reason"), [
  (shared_layout((64, 64), 32, 128), 32, "B", "32-bit operands are K-major only"),
  (shared_layout((64, 128), 8, 128, order=(0, 1)), 8, "A", "8-bit operands are K-major only"),
  (shared_layout((64, 64), 16, 0), 16, "A", "offsets along"),
  (shared_layout((64, 24), 16, 0, block_bytes=16), 16, "A", "not made of instruction tiles of"),
  (shared_layout((96, 64), 16, 128), 16, "A", "not made of instruction tiles of"),
  (shared_layout((2, 64, 64), 16, 128), 16, "A", "rank 3"),
  (shared_layout((64, 4), 16, 0), 16, "A", "16 consecutive bytes"),
])
def test_a_layout_without_a_descriptor_says_why(layout, bits, role, reason):
  assert reason in str(descriptor_refusal(layout, bits, role=role))
  with pytest.raises(AssertionError, match="no matrix descriptor"):
    wgmma_descriptor(layout, bits, role=role)


def test_a_wrong_descriptor_is_not_proved():
  layout = shared_layout((128, 64), 16, 128)
  desc = wgmma_descriptor(layout, 16, role="A")
  wrong = Descriptor(desc.swizzle, desc.lbo, 512, desc.major, desc.tile, desc.step, desc.mn_offsets, desc.k_offsets)

  with pytest.raises(AssertionError, match="is not what"):
    prove_descriptor(layout, 16, wrong, "A")
