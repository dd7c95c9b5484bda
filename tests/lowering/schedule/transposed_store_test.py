"""Products that are stored transposed: each warpgroup's columns leave through shared memory, by stmatrix and TMA."""
from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, assemble, count, declined, notes, struct, variants
from tests.tolerances import assert_close


def transposed_kernel(a, b, y, *, bm, bn, bk):
  """y = (a @ b)ᵀ"""
  i, j = tt.program_id(0), tt.program_id(1)
  a_s, b_s = tt.alloc_shared((bm, bk), a.dtype), tt.alloc_shared((bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], bk), num_stages=2):
    tt.copy(a.at[tt.block(i, bm), tt.block(k, bk)], a_s)
    tt.copy(b.at[tt.block(k, bk), tt.block(j, bn)], b_s)
    tt.gemm(a_s, b_s, acc)
  y[tt.block(j, bn), tt.block(i, bm)] = acc[...].astype(y.dtype).T


def transposed(m, n, k, bm, bn, warpgroups, **options):
  return tt.tile_call(functools.partial(transposed_kernel, bm=bm, bn=bn, bk=64), struct(n, m, dtype=BF16),
                      grid=(-(-m // bm), -(-n // bn)), warpgroups=warpgroups, **options)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("m", "n", "bm", "bn", "warpgroups"), [
  (128, 256, 128, 256, 2), (200, 136, 128, 64, 2), (72, 90, 64, 64, 1), (192, 80, 192, 80, 3), (64, 384, 64, 384, 2)])
def test_a_transposed_tile_leaves_by_tma(m, n, bm, bn, warpgroups, persistent):
  call = transposed(m, n, 128, bm, bn, warpgroups, persistent=persistent)
  rng = np.random.default_rng(0)
  a, b = (rng.standard_normal(s).astype(F32).astype(BF16) for s in ((m, 128), (128, n)))
  lowered = call.lower(a, b)
  assert variants(lowered, "store") == ["tma"]
  assert count(lowered, r"stmatrix.*\.trans") > 0 == count(lowered, "st.global")
  assemble(lowered)
  assert_close(lowered.simulate(a, b)[0], (a.astype(np.float64) @ b.astype(np.float64)).T, "gemm")


def test_it_leaves_some_rows_at_a_time_where_little_shared_memory_is_left():
  def kernel(a, b, y):
    held = tt.alloc_shared((1, 60_000), jnp.int16)
    held[...] = 0
    transposed_kernel(a, b, y, bm=128, bn=256, bk=64)

  rng = np.random.default_rng(0)
  a, b = (rng.standard_normal(s).astype(F32).astype(BF16) for s in ((128, 64), (64, 256)))
  call = tt.tile_call(kernel, struct(256, 128, dtype=BF16), grid=(1, 1), warpgroups=2)
  lowered = call.lower(a, b)
  assert "no shared memory is left" not in notes(lowered)
  assert count(lowered, "cp.async.bulk.tensor.2d.global") > 1
  assert_close(lowered.simulate(a, b)[0], (a.astype(np.float64) @ b.astype(np.float64)).T, "gemm")


def test_a_tile_whose_warpgroups_have_other_columns_is_stored_directly():
  lowered = transposed(256, 64, 64, 256, 64, 2).lower(struct(256, 64, dtype=BF16), struct(64, 64, dtype=BF16))
  assert variants(lowered, "store") == ["direct"]
  assert "the warpgroups do not own whole bands of rows" in declined(lowered, "store")["tma"]
