"""wgmma's operands, fragments and products against the layouts of the compiler, the ISA's figures and float64."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.lowering.layouts.descriptor_test import K_STEP, operand
from tests.sim.arrays import registers
from tiletrace.lowering.layouts.catalog import wgmma_a_fragment, wgmma_accumulator
from tiletrace.lowering.layouts.descriptor import wgmma_descriptor
from tiletrace.lowering.layouts.shared import SWIZZLES
from tiletrace.sim import fragments, wgmma

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn,
          "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8}
N = (8, 24, 64, 96, 176, 256)


def bits_of(type_: str) -> int:
  return 8 * fragments.ITEMSIZE[type_]


def cases():
  for bits in (8, 16, 32):
    for swizzle in SWIZZLES:
      yield from ((bits, "A", "k", m, swizzle) for m in (64, 192))
      yield from ((bits, "B", "k", n, swizzle) for n in N)
  for swizzle in SWIZZLES:
    yield from ((16, "A", "mn", m, swizzle) for m in (64, 128))
    yield from ((16, "B", "mn", n, swizzle) for n in N if n % max(swizzle // 2, 8) == 0)


@pytest.mark.parametrize(("bits", "role", "major", "extent", "swizzle"), list(cases()))
def test_descriptors_read_every_element_where_its_layout_stores_it(bits, role, major, extent, swizzle):
  step = K_STEP[bits]
  layout = operand(role, major, extent, step * 4, bits, swizzle)
  desc = wgmma_descriptor(layout, bits, role=role)
  mn, k = np.ogrid[:desc.tile, :step]
  for base in (0, 5 * 1024):
    for mn0 in range(0, extent, desc.tile):
      for k0 in range(0, 4 * step, step):
        encoded = desc.encode(base + desc.tile_offset(mn0, k0))
        index = (mn0 + mn, k0 + k) if role == "A" else (k0 + k, mn0 + mn)
        want = base + layout.coordinates("off", index) * bits // 8
        got = wgmma.operand_addresses(encoded, desc.tile, step, bits // 8, major)
        assert np.array_equal(got, np.broadcast_to(want, got.shape))
        assert np.array_equal(wgmma.operand_cells(encoded, desc.tile, step, bits // 8, major),
                              np.unique(got // 16) * 16)


def test_a_descriptor_is_taken_apart_by_its_bits():
  bits = 0x0123 | 0x0456 << 16 | 0x0789 << 32 | 5 << 49 | 2 << 62
  assert wgmma.decode(bits) == wgmma.Fields(0x1230, 0x4560, 0x7890, 5, 64)
  assert wgmma.refusal(bits) is None
  assert "reserved" in str(wgmma.refusal(bits | 1 << 15)) and "reserved" in str(wgmma.refusal(bits | 1 << 60))


def test_exchanged_strides_and_other_swizzles_read_elsewhere():
  layout = operand("B", "mn", 256, 64, 16, 128)
  desc = wgmma_descriptor(layout, 16, role="B")
  right = desc.encode(0)
  lbo, sbo = right >> 16 & 0x3FFF, right >> 32 & 0x3FFF
  swapped = right & ~(0x3FFF << 16 | 0x3FFF << 32) | sbo << 16 | lbo << 32
  other = right & (1 << 62) - 1 | 2 << 62
  want = wgmma.operand_addresses(right, 256, 16, 2, "mn")
  for wrong in (swapped, other, right | 1 << 49, right + (1 << 32)):
    assert not np.array_equal(wgmma.operand_addresses(wrong, 256, 16, 2, "mn"), want)


@pytest.mark.parametrize(("swizzle", "code"), [(128, 1), (64, 2), (32, 3)])
def test_the_base_offset_turns_a_pattern_that_starts_off_its_period(swizzle, code):
  """A tile at 128 * p, p rows into the period, stored as if its own start were the pattern's start."""
  for p in (1, 3):
    desc = (128 * p) >> 4 | (8 * swizzle >> 4) << 32 | p << 49 | code << 62
    moved = wgmma.operand_addresses(desc, 64, 16, 2, "k")
    aligned = wgmma.operand_addresses((8 * swizzle >> 4) << 32 | code << 62, 64, 16, 2, "k")
    assert np.array_equal(moved, aligned + 128 * p)


@pytest.mark.parametrize("type_", DTYPES)
@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_operands_are_read_from_memory(type_, swizzle):
  bits = bits_of(type_)
  layout = operand("B", "k", 48, K_STEP[bits] * 4, bits, swizzle)
  values = np.random.default_rng(1).integers(0, 8, (K_STEP[bits] * 4, 48)).astype(DTYPES[type_])
  memory = np.full(2048 + layout.extent("off") * bits // 8, 0xA5, np.uint8)
  memory[2048:].view(values.dtype)[layout.coordinates("off", np.ogrid[:values.shape[0], :48])] = values
  desc = wgmma_descriptor(layout, bits, role="B")
  for i in range(4):
    got = wgmma.read_operand(memory, desc.encode(2048 + desc.k_offset(i)), 48, type_, "k")
    want = values[i * K_STEP[bits]:(i + 1) * K_STEP[bits]].T
    assert got.dtype == np.float64 and np.array_equal(got, want.astype(np.float64))


@pytest.mark.parametrize("n", N)
def test_accumulators_lie_as_the_catalog_says(n):
  rows, columns = fragments.accumulator_positions(n)
  layout = wgmma_accumulator(64, n, 1, "m")
  coordinates = [layout.coordinates(axis, (rows, columns)) for axis in ("reg", "lane", "warp")]
  r, t = np.broadcast_arrays(*np.ogrid[:n // 2, :128])
  assert [np.array_equal(x, want) for x, want in zip(coordinates, (r, t % 32, t // 32))] == [True] * 3

  matrix = np.random.default_rng(n).standard_normal((64, n))
  assert np.array_equal(fragments.scatter_accumulator(matrix), matrix[rows, columns])
  assert np.array_equal(fragments.gather_accumulator(matrix[rows, columns]), matrix)


@pytest.mark.parametrize("type_", ["f32", "f16", "s32"])
def test_accumulators_are_read_and_written_back(type_):
  n = 40
  shape = (n // 4 if type_ == "f16" else n // 2, 128)
  matrix = np.random.default_rng(3).integers(-2000, 2000, (64, n)).astype(np.float64)
  held = fragments.write_accumulator(matrix, type_)
  assert held.shape == shape and held.dtype == (np.float32 if type_ == "f32" else np.uint32)
  assert np.array_equal(fragments.read_accumulator(held, type_), matrix)


def test_a_pair_of_f16_accumulators_has_the_lower_column_low():
  rows, columns = fragments.accumulator_positions(16)
  matrix = (rows * 0 + columns).astype(np.float64)
  held = fragments.write_accumulator(fragments.gather_accumulator(matrix), "f16").view(np.float16).reshape(4, 128, 2)
  assert np.array_equal(held[..., 0], columns[0::2]) and np.array_equal(held[..., 1], columns[1::2])


@pytest.mark.parametrize("type_", DTYPES)
def test_a_fragments_lie_as_the_catalog_says(type_):
  size = fragments.ITEMSIZE[type_]
  k, e = 32 // size, 4 // size
  rows, columns = fragments.a_positions(size)
  values = np.random.default_rng(1).integers(0, 8, (64, k)).astype(DTYPES[type_])
  held = np.ascontiguousarray(values[rows, columns].transpose(0, 2, 1)).view(np.uint32)[..., 0]
  assert held.shape == (4, 128)
  assert np.array_equal(fragments.gather_a(held, type_), values.astype(np.float64))

  layout = wgmma_a_fragment(64, k, 8 * size)
  register = layout.coordinates("reg", (rows, columns))
  r, i, t = np.broadcast_arrays(*np.ogrid[:4, :e, :128])
  assert np.array_equal(register, e * r + i)
  assert np.array_equal(layout.coordinates("lane", (rows, columns)), t % 32)
  assert np.array_equal(layout.coordinates("warp", (rows, columns)), t // 32)


def test_a_product_of_integers_is_exact_and_wraps():
  rng = np.random.default_rng(2)
  a, b = rng.integers(-128, 128, (64, 32)), rng.integers(-128, 128, (24, 32))
  acc = rng.integers(-2**31, 2**31, (64, 24))
  got = wgmma.multiply(acc.astype(np.float64), a.astype(np.float64), b.astype(np.float64))
  held = fragments.write_accumulator(got, "s32")
  assert np.array_equal(fragments.gather_accumulator(held.view(np.int32)), (acc + a @ b.T).astype(np.int32))


def test_a_product_of_floats_is_rounded_once():
  rng = np.random.default_rng(2)
  a, b, acc = (rng.standard_normal(s) for s in ((64, 16), (40, 16), (64, 40)))
  a, b = (x.astype(ml_dtypes.bfloat16).astype(np.float64) for x in (a, b))
  acc = acc.astype(np.float32).astype(np.float64)
  exact = acc + (a.astype(np.longdouble) @ b.T.astype(np.longdouble))
  for negate, acc_given, want in [(False, acc, exact), (False, None, exact - acc), (True, acc, 2 * acc - exact)]:
    got = fragments.write_accumulator(wgmma.multiply(acc_given, a, b, negate=negate), "f32")
    np.testing.assert_allclose(fragments.gather_accumulator(got), want.astype(np.float64), rtol=2.0**-24 * 1.001)


def test_tf32_ignores_the_low_bits():
  bits = registers("b32", 100, 1, special=False) & np.uint32(0x7F7F_FFFF)
  assert np.array_equal(fragments.NUMBERS["tf32"](bits), (bits & np.uint32(0xFFFF_E000)).view(np.float32))
