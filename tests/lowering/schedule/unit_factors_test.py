"""Rescaled accumulators: what may stand between the load, the product and the store, and what goes around them."""
from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, struct

rng = np.random.default_rng(0)
A = rng.integers(-1, 2, (128, 64)).astype(BF16)                # small integers: every sum is exact
B = rng.integers(-1, 2, (64, 128)).astype(BF16)
FACTORS = rng.choice([1.0, -1.0, 2.0], (5, 128)).astype(np.float32)
FACTORS[1], FACTORS[2, :70] = 1, 1


def forms_kernel(a, b, f, c, *, form):
  a_s = tt.alloc_shared((128, 64), a.dtype)
  b_s = [tt.alloc_shared((64, 64), b.dtype) for _ in range(2)]
  acc = [tt.alloc_fragment((128, 64), F32) for _ in range(2)]
  acc[0][...], acc[1][...] = 0, 0
  tt.copy(a, a_s)
  for k in tt.pipelined(5, num_stages=2):
    for h in range(2):
      tt.copy(b.at[:, tt.block(h, 64)], b_s[h])
    factor = f[k, :][:, None]
    scaled = acc[0][...] * factor
    if form == "gemm between":
      tt.gemm(a_s, b_s[0], acc[0])
    elif form == "store between":
      acc[0][...] = 0
    elif form == "two loads":
      again = acc[0][...] * factor
      acc[0][...] = again
    elif form == "swapped":
      acc[1][...] = acc[1][...] * factor
    elif form == "value between":
      acc[1][...] *= factor
      acc[1][...] *= factor * factor
    acc[0][...] = scaled
    for h in range(2):
      tt.gemm(a_s, b_s[h], acc[h])
  for h in range(2):
    c[:, tt.block(h, 64)] = acc[h][...]


def forms(form):
  product = A.astype(np.float64) @ B.astype(np.float64)
  one, other = np.zeros((128, 64)), np.zeros((128, 64))
  for f in FACTORS[..., None].astype(np.float64):
    one = one * f + product[:, :64]
    other = other * {"swapped": f, "value between": f**3}.get(form, 1) + product[:, 64:]
  return np.concatenate([one, other], 1)


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("form", ["gemm between", "store between", "two loads", "swapped", "value between"])
def test_what_stands_between_the_load_and_the_store_is_heeded(form, warpgroups):
  call = tt.tile_call(functools.partial(forms_kernel, form=form), struct(128, 128), grid=1, warpgroups=warpgroups)
  lowered = call.lower(A, B, FACTORS)
  assert np.array_equal(lowered.simulate(A, B, FACTORS)[0], forms(form))
  assert ("vote.sync.any" in lowered.as_text("ptx")) == (form not in ("gemm between", "store between"))


def carried_kernel(a, b, f, c, d, *, what):
  a_s, b_s = tt.alloc_shared((128, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
  acc = tt.alloc_fragment((128, 64), F32)
  acc[...] = 0
  tt.copy(a, a_s)
  tt.copy(b.at[:, 0:64], b_s)

  def body(k, carry):
    before = acc[...]
    scaled = before * f[k, :][:, None]
    acc[...] = scaled
    tt.gemm(a_s, b_s, acc)
    return scaled if what == "product" else before

  d[...] = tt.fori_loop(0, 5, body, tt.zeros((128, 64), F32))
  c[...] = acc[...]


@pytest.mark.parametrize("what", ["product", "load"])
def test_what_a_loop_carries_on_is_not_moved_into_the_branch(what):
  call = tt.tile_call(functools.partial(carried_kernel, what=what), (struct(128, 64),) * 2, grid=1, warpgroups=2)
  acc = last = np.zeros((128, 64))
  for f in FACTORS[..., None].astype(np.float64):
    last = acc * f if what == "product" else acc
    acc = acc * f + A.astype(np.float64) @ B[:, :64].astype(np.float64)
  got = call.lower(A, B, FACTORS).simulate(A, B, FACTORS)
  assert np.array_equal(got[0], acc) and np.array_equal(got[1], last)


def changed_kernel(a, b, f, c):
  """A slot is changed right before the branch that warps take apart."""
  a_s, b_s = tt.alloc_shared((128, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
  acc = tt.alloc_fragment((128, 64), F32)
  acc[...] = 0
  tt.copy(a, a_s)
  for k in tt.pipelined(f.shape[0], num_stages=2):
    tt.copy(b.at[k], b_s)
    b_s[...] = b_s[...] * 2
    acc[...] *= f[k, :][:, None]
    tt.gemm(a_s, b_s, acc)
  c[...] = acc[...]


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_a_branch_that_some_warps_take_holds_no_sync_of_all(warpgroups):
  b = rng.integers(-1, 2, (5, 64, 64)).astype(BF16)
  f = FACTORS.copy()
  f[3:, 20:] = 1
  lowered = tt.tile_call(changed_kernel, struct(128, 64), grid=1, warpgroups=warpgroups).lower(A, b, f)
  want = np.zeros((128, 64))
  for k in range(5):
    want = want * f[k][:, None] + A.astype(np.float64) @ (2 * b[k].astype(np.float64))
  for seed in range(3):
    assert np.array_equal(lowered.simulate(A, b, f, seed=seed)[0], want)
  text = lowered.as_text("schedule")
  branch = text[text.index("warp_any"):]
  assert "sync[" not in branch[:branch.index("}")]
  assert jnp.isfinite(want).all()
