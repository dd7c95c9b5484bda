"""Conversions between layouts: registers renamed, shuffles inside a warp, shared memory where neither does."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import Case
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F16, F32, I32, assemble, count, lower, notes, struct
from tiletrace.core.errors import LoweringError
from tiletrace.layout import S, lane, reg, warp
from tiletrace.lowering.layouts.catalog import wgmma_accumulator
from tiletrace.lowering.layouts.fragment import blocked
from tiletrace.lowering.layouts.normal import FIELD
from tiletrace.lowering.layouts.relation import Layout, build
from tiletrace.stages import Lowered

ROWS = S[(4, 16, 2, 32):(1@warp, 2@lane, 1@lane, 1@reg)].layout((64, 64))
COLUMNS = S[(4, 16, 32, 2):(1@warp, 1@reg, 1@lane, 16@reg)].layout((64, 64))


def mixed(layout: Layout, seed: int) -> Layout:
  """The same warps; the bits of registers and lanes in other places."""
  columns = [*layout.columns("reg"), *layout.columns("lane")]
  registers = len(layout.columns("reg"))
  random.Random(seed).shuffle(columns)
  return build(layout.shape, {"reg": columns[:registers], "lane": columns[registers:], "warp": layout.columns("warp")},
               layout.outers)


def converted(have: Layout, want: Layout, dtype: Any) -> tt.TileCall:
  shape = have.valid

  def kernel(x, y):
    a, b = tt.alloc_fragment(shape, dtype, layout=have), tt.alloc_fragment(shape, dtype, layout=want)
    a[...] = x[...]
    b[...] = a[...]
    y[...] = b[...]

  return tt.tile_call(kernel, struct(*shape, dtype=dtype), grid=1, warpgroups=have.extent("warp") // 4)


def check(have: Layout, want: Layout, dtype: Any) -> Lowered:
  x = np.random.default_rng(0).integers(0, 2 if dtype is np.bool_ else 2**15, have.valid).astype(dtype)
  call = converted(have, want, dtype)
  lowered = call.lower(x)
  (got,) = simulated.run(lowered, Case(call, (x,), (), "exact"))
  np.testing.assert_array_equal(got, x)
  return lowered


@pytest.mark.parametrize("dtype", [F32, I32, np.uint32, np.bool_, BF16, F16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("have", "want"), [
  (wgmma_accumulator(64, 64), ROWS), (ROWS, wgmma_accumulator(64, 64)),
  (wgmma_accumulator(128, 96, 2), mixed(wgmma_accumulator(128, 96, 2), 3)), (ROWS, COLUMNS)],
  ids=["accumulator to rows", "rows to accumulator", "two warpgroups and an odd factor", "rows to columns"])
def test_what_stays_in_a_warp_moves_by_shuffles(have, want, dtype):
  lowered = check(have, want, dtype)
  words = have.extent("reg") // (2 if np.dtype(dtype).itemsize == 2 else 1)
  apart = np.dtype(dtype).itemsize == 2 and want.columns("reg")[0] != have.columns("reg")[0]   # halves of a word
  assert ("made through shared memory" in notes(lowered)) == apart
  assert count(lowered, r"shfl\.sync\.idx") == 1 + (0 if apart else words)     # one makes the warpgroup's index uniform
  assert count(lowered, "st.shared") == 0 or apart
  assert assemble(lowered).image


@pytest.mark.parametrize("seed", range(12))
def test_any_bits_of_registers_and_lanes_change_places(seed):
  layout = wgmma_accumulator(64, 32)
  check(mixed(layout, seed), mixed(layout, seed + 100), F32)


def test_between_warps_it_goes_through_shared_memory_and_inside_of_a_thread_nowhere():
  crossing = check(wgmma_accumulator(64, 64), blocked((64, 64), 32, 4), F32)
  assert "by shared" in notes(crossing) and count(crossing, "st.shared") > 0
  turned = S[(4, 16, 2, 8, 4):(1@warp, 2@lane, 1@lane, 1@reg, 8@reg)].layout((64, 64))
  inside = check(ROWS, turned, F32)
  assert count(inside, r"shfl\.sync") == 1 and count(inside, "st.shared") == 0


def test_a_register_that_differs_from_thread_to_thread_is_no_renaming():
  """Every thread has what it needs, but odd lanes in another register than even ones."""
  row, columns = 1, [1 << FIELD + b for b in range(4)]
  have = build((2, 16), {"reg": columns[:1], "lane": [0, *columns[1:], row], "warp": [0, 0]})
  want = build((2, 16), {"lane": [*columns, row], "warp": [0, 0]})
  lowered = check(have, want, F32)
  assert "by shuffle" in notes(lowered) or "by shared" in notes(lowered)


def test_one_thread_cannot_shuffle():
  def kernel(x, y):
    with tt.warpgroup(0), tt.elect():
      a = tt.alloc_fragment((64, 64), F32, layout=ROWS)
      b = tt.alloc_fragment((64, 64), F32, layout=COLUMNS)
      a[...] = x[...]
      b[...] = a[...]
      y[...] = b[...]

  with pytest.raises(LoweringError) as e:
    lower(kernel, [struct(64, 64)], struct(64, 64))
  assert "takes all threads of a warp, tt.elect() leaves one" in str(e.value) and "a[...]" in str(e.value)
