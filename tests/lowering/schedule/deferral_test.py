"""A deferred epilogue leaves in parts, behind the next tile's k-blocks, however few these are."""
from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.tolerances import assert_close
from tiletrace.kernels.matmul import matmul_kernel


def gemm(m, n, k, *, bm=128, bn=256, warpgroups=2, num_stages=4):
  """The lowered kernel, and its operands."""
  kernel = functools.partial(matmul_kernel, form="nn", activation=None, bm=bm, bn=bn, bk=64, num_stages=num_stages)
  a, b = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(((m, k), (k, n))))
  call = tt.tile_call(kernel, jax.ShapeDtypeStruct((m, n), jnp.bfloat16), grid=(tt.cdiv(m, bm), tt.cdiv(n, bn)),
                      warpgroups=warpgroups, persistent=True, raster=2)
  return call.lower(a, b, None), a, b


def test_two_k_blocks_lie_between_the_parts():
  text = gemm(4096, 4096, 4096)[0].as_text("schedule")
  tile = text[text.index("gemm_async"):text.rindex("gemm_async")]

  assert re.findall(r"gemm_async|num_stages=1 unroll|h\[\d, :, :\] <-", tile) == [
      "gemm_async", "gemm_async", "h[0, :, :] <-", "h[1, :, :] <-", "gemm_async", "gemm_async", "h[0, :, :] <-",
      "h[1, :, :] <-", "num_stages=1 unroll"]
  assert "the epilogue is deferred" in text


@pytest.mark.parametrize("k_blocks", [2, 3, 4, 5])
def test_few_k_blocks_are_enough(k_blocks):
  lowered, a, b = gemm(256, 512, 64 * k_blocks)

  assert "the epilogue is deferred" in lowered.as_text("schedule")
  want = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64)
  assert_close(lowered.simulate(a, b, num_sms=1)[0], want, "gemm")


def test_a_chunk_of_staging_takes_three_parts():
  lowered, a, b = gemm(384, 384, 320, bm=192, bn=192, warpgroups=3, num_stages=3)

  want = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64)
  assert_close(lowered.simulate(a, b, num_sms=2)[0], want, "gemm")


def test_fragments_that_leave_no_registers_for_it_keep_the_epilogue_where_it_is():
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((128, 64), a.dtype), tt.alloc_shared((64, 128), b.dtype)
    acc, bias = tt.alloc_fragment((128, 128), jnp.float32), tt.alloc_fragment((128, 64), jnp.float32)
    acc[...], bias[...] = 0, a[:, :64].astype(jnp.float32)
    for k in tt.pipelined(4, num_stages=3):
      tt.copy(a.at[:, tt.block(k, 64)], a_s)
      tt.copy(b.at[tt.block(k, 64), :], b_s)
      tt.gemm(a_s, b_s, acc)
    c[...] = (acc[...] + tt.sum(bias[...], axis=1)[:, None]).astype(c.dtype)

  a, b, c = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((128, 256), (256, 128), (128, 128)))
  lowered = tt.tile_call(kernel, c, grid=1, persistent=True).lower(a, b)
  assert "not deferred: all fragments and the tile that leaves would take 256 registers" in lowered.as_text("schedule")


def test_tiles_without_a_gemm_leave_the_one_that_waits_waiting():
  """Of the programs every second one, and the last one, only store zeros."""
  def kernel(a, b, c):
    i, j = tt.program_id(0), tt.program_id(1)
    rows, cols = tt.block(i, 128), tt.block(j, 128)
    with tt.when((i + j) % 2 == 0) as owned:
      a_s, b_s = tt.alloc_shared((128, 64), a.dtype), tt.alloc_shared((64, 128), b.dtype)
      acc = tt.alloc_fragment((128, 128), jnp.float32)
      acc[...] = 0
      for k in tt.pipelined(3, num_stages=3):
        tt.copy(a.at[rows, tt.block(k, 64)], a_s)
        tt.copy(b.at[tt.block(k, 64), cols], b_s)
        tt.gemm(a_s, b_s, acc)
      c[rows, cols] = acc[...].astype(c.dtype)
    with owned.otherwise():
      c[rows, cols] = tt.zeros((128, 128), c.dtype)

  a, b = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(((384, 192), (192, 512))))
  lowered = tt.tile_call(kernel, jax.ShapeDtypeStruct((384, 512), jnp.bfloat16), grid=(3, 4), warpgroups=2,
                         persistent=True).lower(a, b)
  owned = (np.arange(384)[:, None] // 128 + np.arange(512) // 128) % 2 == 0
  want = np.where(owned, np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64), 0)

  assert "the epilogue is deferred" in lowered.as_text("schedule")
  for num_sms in (1, 2, 5):
    assert_close(lowered.simulate(a, b, num_sms=num_sms)[0], want, "gemm")
