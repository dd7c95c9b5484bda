"""Each atom against the PTX ISA's own words, lane by lane, written here a second time as scalars."""
from __future__ import annotations

import pytest

from tiletrace.lowering.layouts import catalog
from tiletrace.lowering.layouts.relayout import classify

WGMMA_N = range(8, 257, 8)


def held(layout, **fixed):
  """All (reg, lane, warp) -> index of a fragment."""
  return {(r, l, w): layout.apply(reg=r, lane=l, warp=w)
          for r in range(layout.extent("reg")) for l in range(32) for w in range(layout.extent("warp"))}


def wgmma_d(n: int) -> dict[tuple[int, int, int], tuple[int, int]]:
  """Figure "WGMMA .m64nNk16 register fragment layout for accumulator matrix D": four registers an 8-column group."""
  out = {}
  for thread in range(128):
    warp, group, pair = thread // 32, thread % 32 >> 2, thread % 4
    for j in range(n // 8):
      row, column = 16 * warp + group, 8 * j + 2 * pair
      for i, index in enumerate([(row, column), (row, column + 1), (row + 8, column), (row + 8, column + 1)]):
        out[4 * j + i, thread % 32, warp] = index
  return out


@pytest.mark.parametrize("n", WGMMA_N)
def test_wgmma_accumulator_matches_the_ptx_isa(n):
  layout = catalog.wgmma_accumulator(64, n)

  assert held(layout) == wgmma_d(n)
  assert layout.is_injective() and layout.is_surjective()
  assert layout.extent("reg") == n // 2


@pytest.mark.parametrize(("m", "n", "warpgroups"), [
  (128, 256, 2), (192, 176, 3), (192, 24, 1), (384, 96, 3), (320, 40, 5), (128, 8, 1)])
def test_warpgroups_that_split_m_own_rows_one_after_the_other(m, n, warpgroups):
  layout = catalog.wgmma_accumulator(m, n, warpgroups)
  rows = m // warpgroups
  atom = wgmma_d(n)
  per_tile = n // 2

  for (reg, lane, warp), (i, j) in held(layout).items():
    tile, wg = reg // per_tile, warp // 4
    di, dj = atom[reg % per_tile, lane, warp % 4]
    assert (i, j) == (rows * wg + 64 * tile + di, dj)
  assert layout.is_injective() and layout.is_surjective()


@pytest.mark.parametrize(("m", "n", "warpgroups"), [(64, 512, 2), (128, 96, 3), (64, 528, 3)])
def test_warpgroups_that_split_n_own_columns_one_after_the_other(m, n, warpgroups):
  layout = catalog.wgmma_accumulator(m, n, warpgroups, split="n")
  width = n // warpgroups
  atom = wgmma_d(width)

  for (reg, lane, warp), index in held(layout).items():
    di, dj = atom[reg % (width // 2), lane, warp % 4]
    assert index == (64 * (reg // (width // 2)) + di, width * (warp // 4) + dj)
  assert layout.is_injective() and layout.is_surjective()


@pytest.mark.parametrize(("bits", "depth"), [(8, 32), (16, 16), (32, 8)])
@pytest.mark.parametrize("steps", [1, 3])
def test_wgmma_a_fragment_matches_the_ptx_isa(bits, depth, steps):
  layout = catalog.wgmma_a_fragment(128, depth * steps, bits, warpgroups=2)
  word = 32 // bits
  expected = {}
  for thread in range(256):
    warp, group, quad = thread // 32, thread % 32 >> 2, thread % 4
    for step in range(steps):
      for register in range(4):          # a0: row, a1: row + 8, a2 and a3: the same 16 bytes further along k
        for i in range(word):
          row = 16 * warp + group + (8 if register in (1, 3) else 0)
          k = depth * step + word * quad + i + (depth // 2 if register >= 2 else 0)
          expected[(4 * step + register) * word + i, thread % 32, warp] = (row, k)

  assert held(layout) == expected
  assert layout.is_injective() and layout.is_surjective()


def test_mma_m16n8k16_fragments_match_the_ptx_isa():
  a, b, c = catalog.mma_m16n8k16_a(), catalog.mma_m16n8k16_b(), catalog.mma_m16n8k16_c()
  for lane in range(32):
    group, in_group = lane >> 2, lane % 4
    for i in range(8):
      row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
      column = in_group * 2 + (i & 1) + (0 if i < 4 else 8)
      assert a.apply(reg=i, lane=lane) == (row, column)
    for i in range(4):
      k = in_group * 2 + (i & 1) + (0 if i < 2 else 8)
      assert b.apply(reg=i, lane=lane) == (k, group)
      assert c.apply(reg=i, lane=lane) == (group if i < 2 else group + 8, in_group * 2 + (i & 1))
  assert all(t.is_injective() and t.is_surjective() for t in (a, b, c))


@pytest.mark.parametrize("x", [1, 2, 4])
def test_matrix_fragments_match_the_ptx_isa(x):
  plain, trans = catalog.matrix_fragment(x), catalog.matrix_fragment(x, trans=True)
  rows = catalog.matrix_addresses(x)
  for lane in range(32):
    for matrix in range(x):
      for i in range(2):
        assert plain.apply(reg=2 * matrix + i, lane=lane) == (matrix, lane // 4, 2 * (lane % 4) + i)
        assert trans.apply(reg=2 * matrix + i, lane=lane) == (matrix, 2 * (lane % 4) + i, lane // 4)
    if lane < 8 * x:
      assert rows.apply(lane=lane) == (lane // 8, lane % 8)


@pytest.mark.parametrize("n", [16, 64, 96, 176, 256])
def test_a_packed_accumulator_is_an_a_fragment_of_16_bit_elements(n):
  assert classify(catalog.wgmma_accumulator(64, n), catalog.wgmma_a_fragment(64, n, 16)) == "same"


def test_an_accumulator_becomes_an_fp8_a_fragment_by_shuffles_only():
  assert classify(catalog.wgmma_accumulator(64, 96), catalog.wgmma_a_fragment(64, 96, 8)) == "shuffle"


def test_mma_sync_accumulators_pair_up_into_an_a_fragment():
  pair = catalog.mma_m16n8k16_c().repeat("reg", 2, 1)
  assert classify(pair, catalog.mma_m16n8k16_a()) == "same"


@pytest.mark.parametrize(("m", "n", "warpgroups", "split"), [
  (64, 264, 1, "m"), (64, 12, 1, "m"), (96, 64, 1, "m"), (128, 64, 3, "m"), (64, 100, 3, "n"), (64, 8, 2, "n")])
def test_illegal_accumulator_extents_are_refused(m, n, warpgroups, split):
  with pytest.raises(AssertionError, match="multiple"):
    catalog.wgmma_accumulator(m, n, warpgroups, split)
