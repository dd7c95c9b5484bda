"""Which buffers share the barriers of a ring, and who releases its slots."""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import lower, notes, struct
from tests.tolerances import assert_close
from tiletrace.core.graph import walk

F32, BF16 = jnp.float32, jnp.bfloat16


def random(seed, *shape, dtype=F32):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def scaled_kernel(x, s, y, *, between):
  """y = the sum over blocks of x times their s; `between`: what stands between the two loads."""
  x_s = tt.alloc_shared((64, 64), x.dtype)
  s_s = tt.alloc_shared((64, 64), s.dtype)
  acc = tt.alloc_fragment((64, 64), F32)
  acc[...] = 0
  for k in tt.pipelined(x.shape[0] // 64, num_stages=3):
    tt.copy(x.at[tt.block(k, 64), :], x_s)
    tt.copy(s.at[tt.block(k, 64), :], s_s)
    v = tt.exp(x_s[...])
    if between == "loop":
      for _ in tt.range(2):
        acc[...] *= 0.5
    if between == "branch":
      with tt.when(k > 1):
        acc[...] *= 0.25
    acc[...] += v * s_s[...]
  y[...] = acc[...]


def scaled(x, s, between):
  want = np.zeros((64, 64))
  for k, (v, f) in enumerate(zip(np.exp(x.astype(np.float64)).reshape(-1, 64, 64), s.reshape(-1, 64, 64), strict=True)):
    want = want * (0.25 if between == "loop" or (between == "branch" and k > 1) else 1) + v * f
  return want


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize(("between", "rings"), [
  (None, ["ring x_s_s_s: 3 slots"]), ("loop", ["ring x_s: 3 slots", "ring s_s: 3 slots"]),
  ("branch", ["ring x_s: 3 slots", "ring s_s: 3 slots"])])
def test_what_threads_read_one_after_another_is_one_ring(between, rings, warpgroups):
  x, s = random(0, 320, 64), random(1, 320, 64)
  lowered = lower(scaled_kernel, [struct(320, 64)] * 2, struct(64, 64), static={"between": between},
                  warpgroups=warpgroups)
  assert [n in notes(lowered) for n in rings] == [True] * len(rings)
  arrivals = [e for e in walk(lowered.lowering.program.graph.body) if e.primitive.name == "barrier_arrive"]
  assert len(arrivals) == len(rings)
  assert {(e.params["count"], e.params["each"]) for e in arrivals} == {(4 * warpgroups, "warp")}
  for seed in range(3):
    assert_close(lowered.simulate(x, s, seed=seed)[0], scaled(x, s, between), "gemm")


def mixed_kernel(a, b, c, y, *, order):
  """y = sum of a b + c: by wgmma and by threads."""
  a_s = tt.alloc_shared((64, 64), a.dtype)
  b_s = tt.alloc_shared((64, 64), b.dtype)
  c_s = tt.alloc_shared((64, 64), c.dtype)
  acc, sums = tt.alloc_fragment((64, 64), F32), tt.alloc_fragment((64, 64), F32)
  acc[...], sums[...] = 0, 0
  for k in tt.pipelined(a.shape[0] // 64, num_stages=2):
    for x, s in ((a, a_s), (b, b_s), (c, c_s)) if order else ((c, c_s), (a, a_s), (b, b_s)):
      tt.copy(x.at[tt.block(k, 64), :], s)
    tt.gemm(a_s, b_s, acc)
    sums[...] += c_s[...]
  y[...] = acc[...] + sums[...]


@pytest.mark.parametrize("order", [False, True])
def test_what_wgmma_reads_has_a_ring_of_its_own_that_warpgroups_release(order):
  a, b, c = (random(i, 256, 64, dtype=BF16) for i in range(3))
  lowered = lower(mixed_kernel, [struct(256, 64, dtype=BF16)] * 3, struct(64, 64), static={"order": order})
  assert "ring a_s_b_s: 2 slots" in notes(lowered) and "ring c_s: 2 slots" in notes(lowered)
  counts = {e.params["count"]: e.params.get("each") for e in walk(lowered.lowering.program.graph.body)
            if e.primitive.name == "barrier_arrive"}
  assert counts == {1: None, 4: "warp"}
  x, z, w = (v.astype(np.float64).reshape(-1, 64, 64) for v in (a, b, c))
  for seed in range(3):
    assert_close(lowered.simulate(a, b, c, seed=seed)[0], (x @ z + w).sum(0), "gemm")


def both_kernel(a, b, y):
  """y = sum of a b times a's first column: wgmma and threads read the same slot."""
  a_s = tt.alloc_shared((64, 64), a.dtype)
  b_s = tt.alloc_shared((64, 64), b.dtype)
  acc, sums = tt.alloc_fragment((64, 64), F32), tt.alloc_fragment((64,), F32)
  acc[...], sums[...] = 0, 0
  for k in tt.pipelined(a.shape[0] // 64, num_stages=2):
    tt.copy(a.at[tt.block(k, 64), :], a_s)
    tt.copy(b.at[tt.block(k, 64), :], b_s)
    tt.gemm(a_s, b_s, acc)
    sums[...] += tt.sum(a_s[...].astype(F32), axis=1)
  y[...] = acc[...] + sums[...][:, None]


def test_a_slot_that_wgmma_and_threads_read_is_released_by_warps_when_both_are_done():
  a, b = random(0, 256, 64, dtype=BF16), random(1, 256, 64, dtype=BF16)
  lowered = lower(both_kernel, [struct(256, 64, dtype=BF16)] * 2, struct(64, 64))
  body = next(e for e in walk(lowered.lowering.program.graph.body) if e.primitive.name == "for_loop" and any(
      i.primitive.name == "gemm_async" for i in e.blocks[0].eqns)).blocks[0]
  order = [e.primitive.name for e in walk(body) if e.primitive.name in ("gemm_async", "load", "wgmma_wait", "fence",
                                                                        "barrier_arrive")]
  assert order.index("wgmma_wait") < order.index("barrier_arrive") and order.index("fence") < order.index(
      "barrier_arrive")
  arrivals = [e.params for e in walk(body) if e.primitive.name == "barrier_arrive" and e.params["count"] == 4]
  assert [p["each"] for p in arrivals] == ["warp"]
  x, z = (v.astype(np.float64).reshape(-1, 64, 64) for v in (a, b))
  for seed in range(3):
    assert_close(lowered.simulate(a, b, seed=seed)[0], (x @ z + x.sum(2, keepdims=True)).sum(0), "gemm")
