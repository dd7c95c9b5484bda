"""Bank wavefronts and sectors against counting, and the figures that every textbook has."""
from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tiletrace.sim.banks import global_sectors, shared_wavefronts
from tiletrace.sim.tensor_map import swizzle_addresses

LANES = np.arange(32)


def counted(addresses: list[int], nbytes: int, active: list[bool]) -> int:
  """Wavefronts of one warp, counted word by word."""
  group, total = min(32, 128 // nbytes), 0
  for start in range(0, len(addresses), group):
    banks = collections.defaultdict(set)
    for lane in range(start, start + group):
      if active[lane]:
        for word in range(addresses[lane] // 4, (addresses[lane] + nbytes - 1) // 4 + 1):
          banks[word % 32].add(word)
    total += max(map(len, banks.values()), default=0)
  return total


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16])
@given(seed=st.integers(0, 1000), span=st.sampled_from([64, 512, 4096, 65536]), some=st.booleans())
def test_wavefronts_are_the_distinct_words_of_the_fullest_bank(nbytes, seed, span, some):
  rng = np.random.default_rng(seed)
  addresses = rng.integers(0, span // nbytes, (3, 32)) * nbytes
  active = rng.integers(0, 3, (3, 32)) > 0 if some else np.ones((3, 32), bool)
  want = [counted(a.tolist(), nbytes, m.tolist()) for a, m in zip(addresses, active)]
  assert shared_wavefronts(addresses, nbytes, active).tolist() == want
  if not some:
    assert shared_wavefronts(addresses, nbytes).tolist() == want


@pytest.mark.parametrize(("addresses", "nbytes", "want"), [
    (4 * LANES, 4, 1), (0 * LANES, 4, 1), (8 * LANES, 4, 2), (128 * LANES, 4, 32), (132 * LANES, 4, 1),
    (2 * LANES, 2, 1), (8 * LANES, 8, 2), (16 * LANES, 16, 4), (128 * LANES, 16, 32)])
def test_known_patterns(addresses, nbytes, want):
  assert shared_wavefronts(addresses[None], nbytes).tolist() == [want]


@pytest.mark.parametrize(("addresses", "nbytes", "want"), [
    (0 * LANES, 16, 2), (0 * LANES, 8, 1), (16 * (LANES // 2), 16, 2), (16 * (LANES // 4 * 2 + LANES % 2), 16, 2),
    (8 * (LANES // 2), 8, 1), (128 * (LANES // 2), 16, 16), (16 * (LANES % 16), 16, 4), (16 * (LANES // 8), 16, 2),
    (16 * (LANES ^ LANES // 16), 16, 4), (0 * LANES, 4, 1)])
def test_loads_of_pairs_of_lanes_at_one_place_take_half_the_phases(addresses, nbytes, want):
  assert shared_wavefronts(addresses[None], nbytes, loads=True).tolist() == [want]


def test_lanes_that_do_not_load_are_in_no_pair():
  some = LANES[None] % 2 == 0
  assert shared_wavefronts(16 * LANES[None], 16, some, loads=True).tolist() == [4]
  odd = np.where(LANES == 7, 4096, 0)[None]
  assert shared_wavefronts(odd, 16, loads=True).tolist() == [5]
  assert shared_wavefronts(odd, 16, LANES[None] != 7, loads=True).tolist() == [2]


def test_the_128_byte_swizzle_frees_matrix_rows_of_conflicts():
  rows = 128 * np.arange(8)[None]
  assert shared_wavefronts(rows, 16).tolist() == [8]
  assert shared_wavefronts(swizzle_addresses(rows, 128), 16).tolist() == [1]
  assert shared_wavefronts(swizzle_addresses(rows, 64), 16).tolist() == [2]


def test_nobody_active_costs_nothing():
  nobody = np.zeros((1, 32), bool)
  assert shared_wavefronts(4 * LANES[None], 4, nobody).tolist() == [0]
  assert global_sectors(4 * LANES[None], 4, nobody).tolist() == [0]


def test_sectors_are_32_bytes():
  assert global_sectors(np.stack([4 * LANES, 32 * LANES, 0 * LANES, 4 * LANES + 16]), 4).tolist() == [4, 32, 1, 5]
  assert global_sectors(16 * LANES[None] + 0x7F00_0000_0000, 16).tolist() == [16]
  assert global_sectors(32 * LANES[None], 4, (LANES < 3)[None]).tolist() == [3]
