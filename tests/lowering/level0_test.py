"""Level 1 sits on level 0: the schedule of the GEMM, written by hand, gives the same PTX, byte for byte."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt

BF16 = jnp.bfloat16


def matmul_relu(a, b, c, *, bm, bn, bk, num_stages):
  i, j = tt.program_id(0), tt.program_id(1)
  a_s = tt.alloc_shared((bm, bk), a.dtype)
  b_s = tt.alloc_shared((bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], bk), num_stages=num_stages):
    tt.copy(a.at[tt.block(i, bm), tt.block(k, bk)], a_s)
    tt.copy(b.at[tt.block(k, bk), tt.block(j, bn)], b_s)
    tt.gemm(a_s, b_s, acc)
  c[tt.block(i, bm), tt.block(j, bn)] = tt.maximum(acc[...], 0).astype(c.dtype)


def level0_kernel(a, b, c, *, bm, bn, bk, num_stages, group, chunks):
  """What the scheduler writes: `lower(...).as_text("schedule")` in tt functions."""
  tiles = tt.cdiv(a.shape[0], bm), tt.cdiv(b.shape[1], bn)
  trips = tt.cdiv(a.shape[1], bk)
  a_s = tt.alloc_shared((num_stages, bm, bk), a.dtype)
  b_s = tt.alloc_shared((num_stages, bk, bn), b.dtype)
  full, empty = tt.alloc_barrier(num_stages, arrivals=1), tt.alloc_barrier(num_stages, arrivals=2)
  staging = tt.alloc_shared((chunks, bm, 64), c.dtype, layout=tt.swizzle(128))

  with tt.warpgroup(0, regs=24), tt.elect():
    ring = tt.PipelineState(num_stages, phase=1)
    for tile in tt.range(tt.cta_id(), tiles[0] * tiles[1], tt.num_ctas()):
      i, j = tt.raster(tile, tiles=tiles, group=group)
      for k in tt.range(trips):
        rows, depth, columns = tt.block(i, bm), tt.block(k, bk), tt.block(j, bn)
        slot = ring.slot
        empty[slot].wait(ring.phase)
        full[slot].arrive_expect_tx(a_s.at[0].nbytes + b_s.at[0].nbytes)
        tt.copy_async(a.at[rows, depth], a_s.at[slot], barrier=full[slot], dispatch="tma")
        tt.copy_async(b.at[depth, columns], b_s.at[slot], barrier=full[slot], dispatch="tma")
        ring.advance()

  with tt.warpgroup(range(1, 3), regs=240):
    acc = tt.alloc_fragment((bm, bn), jnp.float32)
    ring = tt.PipelineState(num_stages)
    leaving = tt.alloc_fragment((bm, bn), c.dtype)
    row, column, pending = (tt.alloc_fragment((), jnp.int32) for _ in range(3))
    pending[...] = 0
    parts = range(0, bn, 64 * chunks)

    def issue(accumulate):
      slot = ring.slot
      full[slot].wait(ring.phase)
      tt.gemm_async(a_s.at[slot], b_s.at[slot], acc, accumulate=accumulate)

    def release_previous():
      slot = ring.slot
      empty[tt.where(slot == 0, num_stages - 1, slot - 1)].arrive()

    def store_columns(firsts):
      with tt.when(pending[...] > 0):
        y, top, left = leaving[...], row[...], column[...]
        for first in firsts:
          with tt.elect(each="warpgroup"):
            tt.wait_group(0, kind="bulk", read=True)
          tt.sync(each="warpgroup")
          for n in range(chunks):
            staging[n] = y[:, first + 64 * n:first + 64 * (n + 1)]
          tt.fence()
          tt.sync(each="warpgroup")
          mine = tt.warpgroup_id() * 64
          with tt.elect(each="warpgroup"):
            for n in range(chunks):
              place = tt.ds(top + mine, 64), tt.ds(left + (first + 64 * n), 64)
              tt.copy_async(staging.at[n, tt.ds(mine, 64), :], c.at[place])
            tt.commit_group(kind="bulk")

    for tile in tt.range(tt.cta_id(), tiles[0] * tiles[1], tt.num_ctas()):
      here = [x * n for x, n in zip(tt.raster(tile, tiles=tiles, group=group), (bm, bn), strict=True)]
      for k in range(2 * len(parts)):
        issue(accumulate=k > 0)
        if k % 2:                                            # with two k-blocks in flight
          store_columns(parts[k // 2:k // 2 + 1])
        tt.wgmma_wait(1)
        if k > 0:
          release_previous()
        ring.advance()
      for _ in tt.range(2 * len(parts), trips):
        issue(accumulate=True)
        tt.wgmma_wait(1)
        release_previous()
        ring.advance()
      tt.wgmma_wait(0)
      release_previous()
      leaving[...] = tt.maximum(acc[...], 0).astype(c.dtype)
      row[...], column[...] = here
      pending[...] = 1
    store_columns(parts)
    with tt.elect(each="warpgroup"):
      tt.wait_group(0, kind="bulk", read=True)


def _lower(kernel, m, n, k, **call):
  a, b, c = (jax.ShapeDtypeStruct(s, BF16) for s in ((m, k), (k, n), (m, n)))
  grid = (tt.cdiv(m, 128), tt.cdiv(n, 256))
  return tt.tile_call(kernel, c, grid=grid, raster=8, persistent=True, name="gemm", **call).lower(a, b)


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 4096, 4096), (1024, 768, 320)])
def test_the_schedule_of_the_gemm_written_by_hand_gives_byte_identical_ptx(m, n, k):
  blocks = {"bm": 128, "bn": 256, "bk": 64, "num_stages": 4}
  level1 = _lower(functools.partial(matmul_relu, **blocks), m, n, k, warpgroups=2)
  level0 = _lower(functools.partial(level0_kernel, **blocks, group=8, chunks=2), m, n, k, warpgroups=3)

  assert level0.as_text("ptx") == level1.as_text("ptx")
  assert "wgmma" in level1.as_text("ptx")


def copied_in_a_role_kernel(x, y):
  s = tt.alloc_shared(x.shape, x.dtype)
  with tt.warpgroup(0):
    tt.copy(x, s)
    tt.sync()
    y[...] = s[...]


def copied_before_the_roles_kernel(x, y):
  s = tt.alloc_shared(x.shape, x.dtype)
  tt.copy(x, s)
  tt.sync()
  with tt.warpgroup(1):
    y[...] = s[...]


@pytest.mark.parametrize("kernel", [copied_in_a_role_kernel, copied_before_the_roles_kernel], ids=lambda k: k.__name__)
@pytest.mark.parametrize("shape", [(64, 64), (7, 33)], ids=str)
def test_a_plain_copy_is_made_by_the_threads_that_it_stands_with(kernel, shape):
  x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  lowered = tt.tile_call(kernel, jax.ShapeDtypeStruct(shape, np.float32), grid=1, warpgroups=2).lower(x)
  (got,) = lowered.simulate(x)
  np.testing.assert_array_equal(got, x)
