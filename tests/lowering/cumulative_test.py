"""Cumulative operations in compiled kernels: their numbers (PTX run on the CPU), instructions, what is refused."""
from __future__ import annotations

import functools

import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import Case
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F32, I32, assemble, count, lower, struct
from tests.lowering.reduce_test import facts
from tiletrace.core.errors import LoweringError
from tiletrace.layout import R, S, lane, reg, warp
from tiletrace.lowering.layouts.catalog import wgmma_accumulator
from tiletrace.lowering.layouts.fragment import blocked

rng = np.random.default_rng(8)


def sums_kernel(x, y, *, axis, reverse, layout):
  v = tt.alloc_fragment(x.shape, x.dtype, layout=layout)
  v[...] = x[...]
  y[...] = tt.cumsum(v[...], axis, reverse=reverse)


def sums(shape: tuple[int, ...], axis: int, *, layout=None, reverse: bool = False, **call) -> tt.TileCall:
  return tt.tile_call(functools.partial(sums_kernel, axis=axis, reverse=reverse, layout=layout),
                      struct(*shape, dtype=I32), grid=1, **call)


def check(call: tt.TileCall, x: np.ndarray, want: np.ndarray):
  lowered = call.lower(x)
  (got,) = simulated.run(lowered, Case(call, (x,), (), "exact"))
  np.testing.assert_array_equal(got, want)
  return lowered


WRITTEN = {
  "accumulator": (wgmma_accumulator(64, 96), 4), "accumulator of two warpgroups": (wgmma_accumulator(128, 64), 8),
  "accumulator, columns shared out": (wgmma_accumulator(64, 64, 2, "n"), 8),
  "three warps along the axis": (blocked((96, 8), 32, 12, order=(0, 1)), 12),
  "warps below lanes": (S[(4, 32, 2):(1@warp, 1@lane, 1@reg)].layout((128, 2)), 4),
  "lanes above registers above warps": (S[(8, 2, 4, 4):(4@lane, 1@reg, 1@warp, 1@lane)].layout((256,)), 4),
  "copies in warps": ((S[(32, 4):(1@lane, 1@reg)] + R[4:1@warp]).layout((32, 4)), 4),
  "registers last": (S[(4, 32, 8):(8@reg, 1@lane, 1@reg)].layout((4, 256)), 4),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_sums_are_right_in_any_layout(name, reverse):
  layout, warps = WRITTEN[name]
  x = rng.integers(-99, 99, layout.valid).astype(I32)
  for axis in range(x.ndim):
    backwards = np.flip(np.flip(x, axis).cumsum(axis), axis)
    call = sums(x.shape, axis, layout=layout, reverse=reverse, warpgroups=warps // 4)
    check(call, x, backwards if reverse else x.cumsum(axis))


DTYPES = {np.dtype(d).name: d for d in (np.float32, BF16, np.float16, np.int32, np.uint32, np.int8, np.uint16)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 1000), (300, 5)], ids=str)
def test_products_maxima_and_minima_are_right_from_either_end(shape, dtype):
  """Rows of several warps, and columns."""
  names = ("cumprod", "cummax", "cummin")

  def kernel(x, *ys):
    for k, name in enumerate(names):
      for reverse in (False, True):
        ys[2 * k + reverse][...] = getattr(tt, name)(x[...], int(shape[0] > shape[1]) ^ 1, reverse=reverse)

  axis = int(shape[0] < shape[1])
  x = rng.integers(-3 if np.dtype(DTYPES[dtype]).kind != "u" else 0, 4, shape).astype(DTYPES[dtype])
  if np.dtype(DTYPES[dtype]).kind not in "iu":                   # products that are exact in f32, or overflow
    x = np.where(rng.random(shape) < 0.5, 1, -1).astype(DTYPES[dtype])
    x[0, 3] = np.nan
  with np.errstate(over="ignore", invalid="ignore"):
    each = {"cumprod": lambda v: np.multiply.accumulate(v, axis, dtype=v.dtype),
            "cummax": lambda v: np.maximum.accumulate(v, axis), "cummin": lambda v: np.minimum.accumulate(v, axis)}
    x, given = x if x.dtype.kind in "iu" else x.astype(np.float64), x
    want = [np.flip(each[n](np.flip(x, axis)), axis) if r else each[n](x) for n in names for r in (False, True)]
  call = tt.tile_call(kernel, (struct(*shape, dtype=given.dtype),) * 6, grid=1)
  lowered = call.lower(given)
  assemble(lowered)
  for got, w in zip(simulated.run(lowered, Case(call, (given,), (), "exact")), want, strict=True):
    np.testing.assert_array_equal(got.astype(w.dtype), w)


def test_a_row_within_a_warp_needs_a_shuffle_for_each_bit_of_the_lane_and_no_shared_memory():
  lowered = sums((4, 128), 1).lower(struct(4, 128, dtype=I32))
  assert facts(lowered) == {"shuffles": 5, "syncs": 0, "stores": 0, "loads": 0}


def test_a_row_of_four_warps_exchanges_the_totals_of_its_blocks_and_what_stands_before_them():
  lowered = sums((1, 8192), 1).lower(struct(1, 8192, dtype=I32))
  assert facts(lowered) == {"shuffles": 5 * 16 + 5 * 2, "syncs": 2, "stores": 16 + 2, "loads": 16}
  assert count(lowered, "ldmatrix") == 1                         # the totals: two words of each lane
  assert "cumsum: those of 64 blocks of 128 elements are accumulated by one warp" in lowered.as_text("schedule")
  assert assemble(lowered).image


def test_what_lies_in_one_thread_is_summed_there():
  lowered = sums((4, 32, 8), 2, layout=S[(4, 32, 8):(1@warp, 1@lane, 1@reg)]).lower(struct(4, 32, 8, dtype=I32))
  assert facts(lowered) == {"shuffles": 0, "syncs": 0, "stores": 0, "loads": 0}
  assert lowered.as_text("ptx").count("add.s32") == 7


def test_an_exchange_in_a_loop_is_ordered_with_that_of_the_next_iteration():
  def kernel(x, y, *, n):
    carry = tt.alloc_fragment((1, 1), I32)
    carry[...] = 0
    for k in tt.range(tt.cdiv(x.shape[1], n)):
      cols = tt.block(k, n)
      v = x[:, cols]
      y[:, cols] = tt.cumsum(v, 1) + carry[...]
      carry[...] += tt.sum(v, axis=1, keepdims=True)

  x = rng.integers(-99, 99, (1, 5000)).astype(I32)
  call = tt.tile_call(functools.partial(kernel, n=1024), struct(*x.shape, dtype=I32), grid=1)
  check(call, x, x.cumsum(1))


def test_a_role_of_the_author_syncs_itself():
  def kernel(x, y):
    with tt.warpgroup(range(2)):
      y[...] = tt.cumsum(x[...], axis=1)

  x = rng.integers(-99, 99, (1, 1000)).astype(I32)
  lowered = check(tt.tile_call(kernel, struct(1, 1000, dtype=I32), grid=1, warpgroups=2), x, x.cumsum(1))
  assert facts(lowered)["syncs"] == 2


def test_one_thread_cannot_sum_cumulatively():
  def kernel(x, y):
    s = tt.alloc_shared((4, 256), F32)
    with tt.warpgroup(0), tt.elect():
      y[...] = tt.cumsum(s[...], 1)

  with pytest.raises(LoweringError) as e:
    lower(kernel, [struct(4, 256)], struct(4, 256))
  assert "cumsum of f32[4,256] takes all threads of a warpgroup" in str(e.value)
  assert "y[...] = tt.cumsum(s[...], 1)" in str(e.value)
