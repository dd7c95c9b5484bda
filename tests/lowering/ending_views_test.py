"""Views that end before their array by TMA: what lies past the end is read as zeros and not stored."""
from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import tiletrace as tt
from tests.kernels.arrays import normal
from tests.lowering.kernels import BF16, declined, lower, struct, variants
from tests.tolerances import assert_close

ROWS, TILE = 300, 64


def product_kernel(x, w, firsts, ends, y, *, bm=TILE):
  """Rows firsts[i] to ends[i] of x @ w, of bm rows at most."""
  i, j = tt.program_id(0), tt.program_id(1)
  first, end, cols = tt.maximum(firsts[i], 0), ends[i], tt.block(j, 64)
  x_s, w_s = tt.alloc_shared((bm, 64), x.dtype), tt.alloc_shared((64, 64), w.dtype)
  acc = tt.alloc_fragment((bm, 64), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(x.shape[1], 64), num_stages=2):
    tt.copy(x.at[tt.ds(0, end), :].at[tt.ds(first, bm), tt.block(k, 64)], x_s)
    tt.copy(w.at[tt.block(k, 64), cols], w_s)
    tt.gemm(x_s, w_s, acc)
  y.at[tt.ds(0, end), :][tt.ds(first, bm), cols] = acc[...].astype(y.dtype)


def product(firsts, ends, **call) -> tuple:
  """The lowered kernel, its operands, and where it stores what."""
  x, w = (np.asarray(normal(i, *s, dtype=BF16)) for i, s in enumerate(((ROWS, 136), (136, 128))))
  operands = x, w, np.asarray(firsts, np.int32), np.asarray(ends, np.int32)
  lowered = tt.tile_call(product_kernel, jax.ShapeDtypeStruct((ROWS, 128), BF16), grid=(len(firsts), 2), **call).lower(
      *operands)
  want = np.full((ROWS, 128), np.nan)
  for first, end in zip(firsts, ends):
    rows = slice(first, max(first, min(end, first + TILE, ROWS)))
    want[rows] = x[rows].astype(np.float64) @ w.astype(np.float64)
  return lowered, operands, want


def assert_stored(got: np.ndarray, want: np.ndarray) -> None:
  """What is NaN in `want` keeps the poison that outputs begin with."""
  assert (np.isnan(got) == np.isnan(want)).all()
  assert_close(np.where(np.isnan(got), 0, got).astype(got.dtype), np.nan_to_num(want), "gemm")


@given(st.lists(st.integers(0, TILE), min_size=2, max_size=4), st.lists(st.integers(0, 30), min_size=4, max_size=4),
       st.integers(0, 2**31 - 400))
@settings(max_examples=15, deadline=None)
def test_any_end_clips_loads_and_stores(sizes, gaps, beyond):
  firsts = list(np.cumsum([g + s for g, s in zip(gaps, [0, *sizes])]))[:len(sizes)]
  ends = [f + s for f, s in zip(firsts, sizes)]
  lowered, operands, want = product([*firsts, ROWS - 10], [*ends, ROWS + beyond])       # the array ends, too
  got = np.asarray(lowered.simulate(*operands)[0])

  assert variants(lowered, "copy") == ["tma", "tma"] and variants(lowered, "store") == ["tma"]
  assert_stored(got, want)


def test_ctas_of_a_cluster_that_share_such_rows_each_clip_their_part():
  lowered, operands, want = product([0, 100, 250], [40, 164, 300], cluster=(1, 2))
  got = np.asarray(lowered.simulate(*operands)[0])

  assert "multicast" in lowered.as_text("schedule")
  assert_stored(got, want)


def test_the_tensor_map_has_a_dimension_of_the_box_before_the_one_that_ends():
  lowered, _, _ = product([0, 64], [64, 128])
  maps = {(m.dims, m.strides, m.box, m.offset) for m in lowered.lowering.emitted.tensor_maps}

  assert ((136, 64, ROWS + 1), (272, 272), (64, 64, 1), -64 * 272) in maps
  assert {len(re.findall(r"%?\w+", x)) for x in re.findall(r"tensor\.3d[^{]*{([^}]*)}", lowered.as_text("ptx"))} == {3}


def copied(view, *, shape=(200, 64), tile=(64, 64), dispatch=None, dtype=BF16, **call):
  def kernel(x, n, y):
    s = tt.alloc_shared(tile, x.dtype)
    for k in tt.pipelined(2, num_stages=2):
      tt.copy(view(x, n[0], k), s, dispatch=dispatch)
      y[k] = s[...]

  return lower(kernel, [struct(*shape, dtype=dtype), struct(1, dtype=np.int32)], struct(2, *tile, dtype=dtype), **call)


@pytest.mark.parametrize(("view", "shape", "reason"), [
  (lambda x, n, k: x.at[:, tt.ds(0, n)].at[tt.block(k, 64), tt.ds(0, 64)], (200, 128),
   "the view ends before the array along its contiguous dimension, where a tensor map cannot clip"),
  (lambda x, n, k: x.at[tt.ds(0, n), tt.ds(0, n), :].at[k, tt.block(k, 64), :], (200, 200, 64),
   "the view ends before the array along 2 dimensions, a tensor map can clip one"),
  (lambda x, n, k: x.at[0, 0, 0, tt.ds(0, n), :].at[tt.block(k, 64), :], (1, 1, 1, 200, 64),
   "the view ends before the array, and a tensor map that clips it would have 6 dimensions"),
  (lambda x, n, k: x.at[tt.ds(n, 80), :].at[tt.block(k, 64), :], (200, 64),
   "the view, which ends before the array, does not provably start inside it"),
  (lambda x, n, k: x.at[tt.ds(tt.clip(n, 1, 99), 80), :].at[tt.ds(k - 1, 64), :], (200, 64),
   "the view does not provably start inside of the one that it is cut from"),
], ids=["contiguous", "two", "five", "array", "view"])
def test_what_a_tensor_map_cannot_clip_is_copied_by_threads(view, shape, reason):
  assert declined(copied(view, shape=shape), "copy")["tma"] == reason


@pytest.mark.parametrize("view", [
  lambda x, n, k: x.at[tt.ds(tt.clip(n, 0, 199), 80), :].at[tt.block(k, 64), :],
  lambda x, n, k: x.at[tt.ds(0, n + 80), :].at[tt.ds(tt.maximum(n + k * 64, 0), 64), :]])
def test_a_bound_of_the_first_row_is_enough_for_tma(view):
  lowered = copied(view)
  x = np.asarray(normal(3, 200, 64, dtype=BF16))
  want = np.where(np.arange(128)[:, None] < 80, x[7:135], 0).reshape(2, 64, 64)

  assert variants(lowered, "copy") == ["tma"]
  np.testing.assert_array_equal(lowered.simulate(x, np.asarray([7], np.int32))[0], want)


def test_a_dimension_that_a_call_decides_is_not_clipped():
  def kernel(x, n, y):
    s = tt.alloc_shared((64, 64), x.dtype)
    for k in tt.pipelined(2, num_stages=2):
      tt.copy(x.at[tt.ds(0, n[0]), :].at[tt.block(k, 64), :], s)
      y[k] = s[...]

  lowered = tt.tile_call(kernel, struct(2, 64, 64, dtype=BF16), grid=1, dynamic_shapes=("m, 64", None, None)).lower(
      struct(200, 64, dtype=BF16), struct(1, dtype=np.int32))
  assert declined(lowered, "copy")["tma"] == (
      "the view ends before the array, which the call decides: a tensor map cannot clip there")


@pytest.mark.parametrize("n", [0, 1, 63, 64, 100, 200, 1000])
def test_rows_by_tma_are_those_that_threads_copy(n):
  x = np.asarray(normal(3, 200, 64, dtype=BF16))
  view = functools.partial(lambda x, n, k: x.at[tt.ds(0, n), :].at[tt.block(k, 64), :])
  want = np.where(np.arange(128)[:, None] < n, x[:128], 0).reshape(2, 64, 64)
  for dispatch in ("tma", "cp_async", "vector"):
    lowered = copied(view, dispatch=dispatch)
    assert variants(lowered, "copy") == [dispatch]
    np.testing.assert_array_equal(lowered.simulate(x, np.asarray([n], np.int32))[0], want)


def test_ends_that_are_constants_are_clipped_too():
  x = np.asarray(normal(3, 200, 64, dtype=BF16))
  lowered = copied(lambda x, n, k: x.at[10:110, :].at[tt.block(k, 64), :])
  want = np.where(np.arange(128)[:, None] < 100, x[10:138], 0).reshape(2, 64, 64)

  assert variants(lowered, "copy") == ["tma"]
  np.testing.assert_array_equal(lowered.simulate(x, np.asarray([0], np.int32))[0], want)
