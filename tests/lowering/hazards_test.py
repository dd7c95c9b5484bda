"""Which global arrays need an order between threads, and the syncs that give it."""
from __future__ import annotations

import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, count, lower, matmul, struct, variants


def _syncs(kernel, *, shape=(256,), **call):
  return count(lower(kernel, [struct(*shape)], struct(*shape), **call), "bar.sync")


def test_elements_that_another_thread_wrote_are_read_after_a_sync():
  def kernel(x, y):
    y[...] = x[...]
    y[0] = y[5] * 2

  # before the load of y[5]; before the store to y[0], which thread 0 makes alone
  assert _syncs(kernel) == 2


def test_constant_blocks_that_do_not_meet_need_no_sync():
  def kernel(x, y):
    y[tt.ds(0, 128)] = x[tt.ds(0, 128)]
    y[tt.ds(128, 128)] = x[tt.ds(128, 128)] * 2

  assert _syncs(kernel) == 0


def test_a_block_for_each_iteration_needs_no_sync_and_a_sliding_window_does():
  def blocks(x, y):
    for k in tt.range(2):
      y[tt.block(k, 128)] = x[tt.block(k, 128)]

  def windows(x, y):
    for k in tt.range(2):
      y[tt.ds(k, 128)] = x[tt.ds(k, 128)]

  assert _syncs(blocks) == 0
  assert _syncs(windows) == 1


def test_arrays_that_are_read_only_or_written_once_need_no_sync():
  def kernel(x, y):
    y[...] = x[...] + x[3]

  assert _syncs(kernel) == 0


@pytest.mark.parametrize("again", [True, False])
def test_a_store_that_is_read_again_is_not_made_by_tma(again):
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), "float32")
    tt.copy(a, a_s)
    tt.copy(b, b_s)
    tt.gemm(a_s, b_s, acc, accumulate=False)
    c[...] = acc[...].astype(c.dtype)
    if again:
      c[0, 0] = c[1, 1] * 2

  lowered = lower(kernel, [struct(64, 64, dtype=BF16)] * 2, struct(64, 64, dtype=BF16))
  first = next(c for c in lowered.choices if c.op == "store")
  assert first.variant == ("direct" if again else "tma")
  assert not again or "accesses the same elements elsewhere" in dict(first.declined)["tma"]


def test_copies_of_what_the_kernel_writes_are_not_made_ahead_by_a_producer():
  def kernel(h, h_out):
    s = tt.alloc_shared((64, 64), h.dtype)
    for k in tt.pipelined(4, num_stages=2):
      tt.copy(h.at[tt.block(k, 64), :], s)
      h_out[tt.block((k + 1) % 4, 64), :] = s[...] * 2

  h = struct(256, 64)
  lowered = lower(kernel, [h], h, input_output_aliases={0: 0})
  assert "no producer warpgroup: h" in lowered.report()
  assert "is written by this kernel" in lowered.report()
  assert count(lowered, "cp.async.bulk") == 0


def test_the_gemm_needs_no_sync_of_all_threads():
  assert count(matmul(), "bar.sync\\s+0") == 1                  # after the barriers' initialisation


@pytest.mark.parametrize(("otherwise", "looped", "syncs"), [(True, False, 0), (False, False, 1), (True, True, 1)])
def test_two_branches_of_which_a_program_takes_one_need_no_sync_between_them(otherwise, looped, syncs):
  def either(x, y):
    with tt.when(x[0] > 0) as positive:
      y[...] = x[...]
    with positive.otherwise() if otherwise else tt.when(x[1] > 0):
      y[0] = x[5]

  def kernel(x, y):
    if looped:
      for _ in tt.range(2):
        either(x, y)
    else:
      either(x, y)

  assert _syncs(kernel) >= syncs if syncs else _syncs(kernel) == 0


def test_a_tile_and_zeros_in_its_place_may_be_stored_by_tma():
  def kernel(a, b, n, c):
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), "float32")
    with tt.when(n[0] > 0) as some:
      tt.copy(a, a_s)
      tt.copy(b, b_s)
      tt.gemm(a_s, b_s, acc, accumulate=False)
      c[...] = acc[...].astype(c.dtype)
    with some.otherwise():
      c[...] = tt.zeros((64, 64), c.dtype)

  square = struct(64, 64, dtype=BF16)
  lowered = lower(kernel, [square, square, struct(1, dtype="int32")], square)
  assert variants(lowered, "store")[0] == "tma"
