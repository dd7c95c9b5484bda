"""Rings that are pushed in another order than they are used in: who waits for whom. And when slots are released."""
from __future__ import annotations

import functools
import re

import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, struct

rng = np.random.default_rng(0)
A = rng.integers(-1, 2, (64, 64)).astype(BF16)


def attention_kernel(a, b, c, *, stages, first, rescaled):
  a_s, k_s, v_s = (tt.alloc_shared((64, 64), a.dtype) for _ in range(3))
  scores, acc = (tt.alloc_fragment((64, 64), F32) for _ in range(2))
  acc[...] = 0
  tt.copy(a, a_s)
  for k in tt.pipelined(4, num_stages=stages):
    for which in first:
      tt.copy(b.at["kv".index(which), k], k_s if which == "k" else v_s)
    tt.gemm(a_s, k_s.T, scores, accumulate=False)
    weights = tt.clip(scores[...], -2, 2).astype(a.dtype)
    if rescaled:
      acc[...] = acc[...] * 0.5
    tt.gemm(weights, v_s, acc)
  c[...] = acc[...]


@pytest.mark.parametrize("rescaled", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("first", ["kv", "vk"])
def test_values_that_are_copied_before_keys_do_not_hold_the_producer_up_for_ever(first, stages, rescaled):
  """With one slot the group of an iteration before would hold what the producer fills before the keys."""
  b = rng.integers(-1, 2, (2, 4, 64, 64)).astype(BF16)
  kernel = functools.partial(attention_kernel, stages=stages, first=first, rescaled=rescaled)
  lowered = tt.tile_call(kernel, struct(64, 64), grid=1).lower(A, b)
  want, left, right = np.zeros((64, 64)), A.astype(np.float64), b.astype(np.float64)
  for k in range(4):
    want = want * (0.5 if rescaled else 1) + np.clip(left @ right[0, k].T, -2, 2) @ right[1, k]
  for seed in range(2):
    assert np.array_equal(lowered.simulate(A, b, seed=seed)[0], want)


def between_kernel(a, b, c, *, form, stages):
  """A second push of x stands before the push of y, which is used first."""
  a_s, x_s, y_s = (tt.alloc_shared((64, 64), a.dtype) for _ in range(3))
  acc = [tt.alloc_fragment((64, 64), F32) for _ in range(2)]
  sums = tt.alloc_fragment((64,), F32)
  acc[0][...], acc[1][...], sums[...] = 0, 0, 0
  tt.copy(a, a_s)
  for k in tt.range(2) if form == "inner loop" else tt.pipelined(2, num_stages=stages):
    tt.copy(b.at[0, k], x_s)
    tt.gemm(a_s, x_s, acc[0])
    tt.copy(b.at[1, k], x_s)
    for j in tt.range(2) if form == "inner loop" else [k]:
      tt.copy(b.at[2, j], y_s)
      if form == "gemm":
        tt.gemm(a_s, y_s, acc[1])
      else:
        sums[...] += tt.sum(y_s[...].astype(F32), axis=1)
    tt.gemm(a_s, x_s, acc[0])
  c[0], c[1] = acc[0][...], acc[1][...] + sums[...][:, None]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("form", ["gemm", "threads", "inner loop"])
def test_a_push_behind_one_that_waits_for_a_group_in_flight_is_waited_for_after_its_release(form, stages):
  b = rng.integers(-1, 2, (3, 2, 64, 64)).astype(BF16)
  kernel = functools.partial(between_kernel, form=form, stages=stages)
  lowered = tt.tile_call(kernel, struct(2, 64, 64), grid=1).lower(A, b)
  left, right = A.astype(np.float64), b.astype(np.float64)
  got = lowered.simulate(A, b)[0]
  assert np.array_equal(got[0], (left @ right[:2]).sum((0, 1)))
  sums = right[2].sum((0, 2))[:, None] * (2 if form == "inner loop" else 1)
  assert np.array_equal(got[1], (left @ right[2]).sum(0) if form == "gemm" else np.broadcast_to(sums, (64, 64)))


def unrolled_kernel(a, b, c, *, stages, parts, rings):
  a_s, b_s = tt.alloc_shared((64, 64), a.dtype), [tt.alloc_shared((64, 64), b.dtype) for _ in range(rings)]
  acc = tt.alloc_fragment((64, 64), F32)
  acc[...] = 0
  tt.copy(a, a_s)
  for k in tt.pipelined(4, num_stages=stages):
    for p in range(parts):
      tt.copy(b.at[tt.block(k * parts + p, 64), :], b_s[p % rings])
      tt.gemm(a_s, b_s[p % rings], acc)
  c[...] = acc[...]


@pytest.mark.parametrize(("stages", "parts", "rings", "order"), [
  (6, 3, 1, "GGGw3rrr"), (4, 4, 2, "GGGGw4rrrr"), (2, 4, 4, "GGGGw4rrrr"), (1, 4, 4, "GGGw2rGw2rw1rw0r")])
def test_an_iterations_products_stay_in_flight_where_slots_allow_it_and_else_leave_them_one_by_one(
    stages, parts, rings, order):
  b = rng.integers(-1, 2, (4 * parts * 64, 64)).astype(BF16)
  kernel = functools.partial(unrolled_kernel, stages=stages, parts=parts, rings=rings)
  lowered = tt.tile_call(kernel, struct(64, 64), grid=1).lower(A, b)
  text = lowered.as_text("schedule").split("warpgroup[")[-1]
  loop = text[text.index("for_loop"):]
  loop = loop[:loop.index("\n    }")]
  found = re.findall(r"(gemm_async)|(barrier_arrive)|wgmma_wait\[n=(\d)\]", loop)
  assert "".join("G" if g else "r" if r else f"w{n}" for g, r, n in found) == order
  want = A.astype(np.float64) @ b.astype(np.float64).reshape(-1, 64, 64).sum(0)
  assert np.array_equal(lowered.simulate(A, b)[0], want)


def last_written_kernel(a, b, c, d, *, stages):
  """In a branch the slot is written last, and a sync of another kind follows: TMA must see what was written."""
  a_s, b_s = tt.alloc_shared((128, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
  acc, top = tt.alloc_fragment((128, 64), F32), tt.alloc_fragment((64,), F32)
  acc[...], top[...] = 0, 0
  tt.copy(a, a_s)
  for k in tt.pipelined(5, num_stages=stages):
    tt.copy(b.at[k], b_s)
    tt.gemm(a_s, b_s, acc)
    with tt.when(k != 2):
      b_s[...] = tt.zeros((64, 64), b.dtype)
      top[...] += tt.max(acc[...], axis=0)
  c[...], d[...] = acc[...], top[...]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_slot_that_a_branch_wrote_is_fenced_before_it_is_filled_again(stages):
  a, b = (rng.integers(-1, 2, s).astype(BF16) for s in ((128, 64), (5, 64, 64)))
  call = tt.tile_call(functools.partial(last_written_kernel, stages=stages), (struct(128, 64), struct(64)), grid=1,
                      warpgroups=2)
  lowered = call.lower(a, b)
  text = lowered.as_text("schedule")
  branch = text[text.rindex("cond "):]
  assert "fence[kind=proxy_async_shared]" in branch[:branch.index("}")]
  acc, top = np.zeros((128, 64)), np.zeros(64)
  for k in range(5):
    acc = acc + a.astype(np.float64) @ b[k].astype(np.float64)
    top = top + (acc.max(0) if k != 2 else 0)
  for seed in range(3):
    got = lowered.simulate(a, b, seed=seed)
    assert np.array_equal(got[0], acc) and np.array_equal(got[1], top)
