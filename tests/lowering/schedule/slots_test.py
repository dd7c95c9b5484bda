"""Slots of rings that consumers change, or that are pushed before a loop which pushes again."""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import lower, struct
from tests.tolerances import assert_close
from tiletrace.core.graph import walk

F32, BF16 = jnp.float32, jnp.bfloat16


def random(seed, *shape):
  return np.asarray(np.random.default_rng(seed).standard_normal(shape), BF16)


def clipped_kernel(a, b, n, c):
  """c = a[:, :n] @ b[:n], where b past n may be anything."""
  a_s = tt.alloc_shared((128, 64), a.dtype)
  b_s = tt.alloc_shared((64, 64), b.dtype)
  acc = tt.alloc_fragment((128, 64), F32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], 64), num_stages=3):
    tt.copy(a.at[:, tt.block(k, 64)], a_s)
    tt.copy(b.at[tt.block(k, 64), :], b_s)
    with tt.when((k + 1) * 64 > n[0]):
      left = n[0] - k * 64
      tt.store(a_s, 0, mask=(tt.arange(64) >= left)[None, :])
      tt.store(b_s, 0, mask=(tt.arange(64) >= left)[:, None])
    tt.gemm(a_s, b_s, acc)
  c[...] = acc[...]


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("n", [0, 100, 192, 448])
def test_consumers_may_change_what_a_copy_brought(n, warpgroups):
  a, b = random(0, 128, 448), random(1, 448, 64)
  a[:, n:], b[n:] = np.nan, np.nan
  types = [struct(128, 448, dtype=BF16), struct(448, 64, dtype=BF16), struct(1, dtype=jnp.int32)]
  lowered = lower(clipped_kernel, types, struct(128, 64), warpgroups=warpgroups)
  assert "ring a_s_b_s: 3 slots" in lowered.as_text("schedule")
  for seed in range(3):
    (got,) = lowered.simulate(a, b, np.asarray([n], np.int32), seed=seed)
    assert_close(got, a[:, :n].astype(np.float64) @ b[:n].astype(np.float64), "gemm")


def test_only_those_who_change_a_slot_sync_for_it():
  types = [struct(128, 448, dtype=BF16), struct(448, 64, dtype=BF16), struct(1, dtype=jnp.int32)]
  program = lower(clipped_kernel, types, struct(128, 64), warpgroups=2).lowering.program.graph
  (loop,) = [e for e in walk(program.body) if e.primitive.name == "for_loop" and any(
      i.primitive.name == "gemm_async" for i in e.blocks[0].eqns)]
  assert not [e for e in loop.blocks[0].eqns if e.primitive.name in ("sync", "fence")]
  (branch,) = [e for e in loop.blocks[0].eqns if e.primitive.name == "cond" and any(
      i.primitive.name == "store" for i in walk(e.blocks[0]))]
  assert [e.primitive.name for e in branch.blocks[0].eqns][-2:] == ["fence", "sync"]


def two_halves_kernel(a, b, c):
  """c = a @ b[:, :64] and a @ b[:, 64:], block by block, each rescaled by 0.5 before a block is added."""
  a_s = tt.alloc_shared((64, 64), a.dtype)
  halves = [(tt.alloc_shared((64, 64), b.dtype), tt.alloc_fragment((64, 64), F32)) for _ in range(2)]
  for _, acc in halves:
    acc[...] = 0
  tt.copy(a, a_s)
  for k in tt.pipelined(b.shape[0] // 64, num_stages=1):
    for i, (s, _) in enumerate(halves):
      tt.copy(b.at[tt.block(k, 64), tt.block(i, 64)], s)
    for _, acc in halves:
      acc[...] *= 0.5
    for s, acc in halves:
      tt.gemm(a_s, s, acc)
  for i, (_, acc) in enumerate(halves):
    c[:, tt.block(i, 64)] = acc[...]


def test_a_slot_is_released_while_later_gemms_are_in_flight():
  a, b = random(0, 64, 64), random(1, 256, 128)
  lowered = lower(two_halves_kernel, [struct(64, 64, dtype=BF16), struct(256, 128, dtype=BF16)], struct(64, 128))
  program = lowered.lowering.program.graph
  (loop,) = [e for e in walk(program.body) if e.primitive.name == "for_loop" and any(
      i.primitive.name == "gemm_async" for i in e.blocks[0].eqns)]
  order = [(e.primitive.name, e.params.get("n")) for e in loop.blocks[0].eqns if e.primitive.name in (
      "gemm_async", "wgmma_wait", "barrier_arrive")]
  assert order == [("gemm_async", None)] * 2 + [("wgmma_wait", 1), ("barrier_arrive", None), ("wgmma_wait", 0),
                                                ("barrier_arrive", None)]
  want = np.zeros((64, 128))
  for block in b.astype(np.float64).reshape(4, 64, 128):
    want = want * 0.5 + a.astype(np.float64) @ block
  for seed in range(3):
    (got,) = lowered.simulate(a, b, seed=seed)
    assert_close(got, want, "gemm")


def test_of_a_ring_with_one_slot_only_the_phase_is_counted():
  lowered = lower(two_halves_kernel, [struct(64, 64, dtype=BF16), struct(256, 128, dtype=BF16)], struct(64, 128))
  flips = [e for e in walk(lowered.lowering.program.graph.body) if e.primitive.name == "xor"]
  slots = [e for e in walk(lowered.lowering.program.graph.body) if e.primitive.name == "alloc" and e.outvars[
      0].hint == "slot"]
  assert len(flips) == 6 and not slots                     # three rings, of both roles


def paged_kernel(x, table, y, z, *, whole):
  """z = y @ the sum of pairs of pages of x, whose numbers are in the table; not `whole`: of first pages alone."""
  s = tt.alloc_shared((64, 64), BF16)
  y_s = tt.alloc_shared((64, 64), BF16)
  acc = tt.alloc_fragment((64, 64), F32)
  acc[...] = 0
  tt.copy(y, y_s)
  for k in tt.pipelined(table.shape[0] // 2, num_stages=3):
    for i in range(2 if whole else 1):
      tt.copy(x.at[table[2 * k + i], :, :], s.at[32 * i:32 * i + 32])
    tt.gemm(y_s if whole else y_s.at[:, :32], s if whole else s.at[:32], acc)
  z[...] = acc[...]


@pytest.mark.parametrize("whole", [True, False])
def test_rows_of_two_pages_are_one_push_and_those_of_one_page_none(whole):
  x, y, table = random(0, 9, 32, 64), random(1, 64, 64), np.asarray([3, 8, 1, -1, 0, 9, 2, 2], np.int32)
  types = [struct(9, 32, 64, dtype=BF16), struct(8, dtype=jnp.int32), struct(64, 64, dtype=BF16)]
  lowered = lower(paged_kernel, types, struct(64, 64), static={"whole": whole})
  assert ("ring s: 3 slots of 8192 bytes, filled by TMA" in lowered.as_text("schedule")) == whole
  pages = np.concatenate([x, np.zeros_like(x[:1])])[np.where(table < 0, 9, table)].astype(np.float64)
  total = pages.reshape(4, 64, 64).sum(0)
  want = y.astype(np.float64) @ total if whole else y[:, :32].astype(np.float64) @ total[:32]
  for seed in range(3):
    (got,) = lowered.simulate(x, table, y, seed=seed)
    assert_close(got, want, "gemm")


def test_a_store_where_no_copy_reaches_makes_one_slot():
  def kernel(x, y):
    s = tt.alloc_shared((64,), F32)
    s[...] = 1
    for k in tt.pipelined(4, num_stages=3):
      y[tt.block(k, 64)] = s[...]
      tt.copy(x.at[tt.block(k, 64)], s)
      y[tt.block(k, 64)] = s[...] + y[tt.block(k, 64)]

  lowered = lower(kernel, [struct(256)], struct(256))
  assert "is one slot, filled by the consumers" in lowered.as_text("schedule")


def peeled_kernel(x, y, n, z, *, stages):
  """z = y @ the sum over blocks of x: one push before the loop, one in it, one after it."""
  s = tt.alloc_shared((64, 64), BF16)
  y_s = tt.alloc_shared((64, 64), BF16)
  acc = tt.alloc_fragment((64, 64), F32)
  acc[...] = 0
  tt.copy(y, y_s)
  tt.copy(x.at[tt.block(0, 64), :], s)
  tt.gemm(y_s, s, acc)
  for k in tt.pipelined(1, n[0], num_stages=stages):
    tt.copy(x.at[tt.block(k, 64), :], s)
    tt.gemm(y_s, s, acc)
  tt.copy(x.at[tt.block(n[0], 64), :], s)
  tt.gemm(y_s, s, acc)
  z[...] = acc[...]


@pytest.mark.parametrize("trips", [1, 2, 3, 6])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_pushes_before_in_and_after_a_loop_are_one_queue(trips, stages):
  x, y = random(0, 64 * 8, 64), random(1, 64, 64)
  types = [struct(512, 64, dtype=BF16), struct(64, 64, dtype=BF16), struct(1, dtype=jnp.int32)]
  lowered = lower(peeled_kernel, types, struct(64, 64), static={"stages": stages})
  assert f"ring s: {stages} slots" in lowered.as_text("schedule")
  for seed in range(2):
    (got,) = lowered.simulate(x, y, np.asarray([trips], np.int32), seed=seed)
    total = x.astype(np.float64).reshape(8, 64, 64)[:trips + 1].sum(0)
    assert_close(got, y.astype(np.float64) @ total, "gemm")


def rescaled_kernel(a, b, f, c):
  """c = ((a @ b) * f0 + a @ b) * f1 + ..., f [steps, rows]."""
  a_s = tt.alloc_shared((128, 64), a.dtype)
  b_s = tt.alloc_shared((64, 64), b.dtype)
  acc = tt.alloc_fragment((128, 64), F32)
  acc[...] = 0
  tt.copy(a, a_s)
  for k in tt.pipelined(f.shape[0], num_stages=2):
    tt.copy(b, b_s)
    acc[...] *= f[k, :][:, None]
    tt.gemm(a_s, b_s, acc)
  c[...] = acc[...]


def test_warps_whose_factors_are_all_one_leave_the_accumulator_alone():
  a, b = random(0, 128, 64), random(1, 64, 64)
  f = np.random.default_rng(2).choice([1.0, 0.5], (5, 128)).astype(np.float32)
  f[1], f[2, :70], f[3, 16:] = 1, 1, 1
  lowered = lower(rescaled_kernel, [struct(128, 64, dtype=BF16), struct(64, 64, dtype=BF16), struct(5, 128)],
                  struct(128, 64), warpgroups=2)
  assert "warps whose factors are all one do not rescale" in lowered.as_text("schedule")
  assert lowered.as_text("ptx").count("vote.sync.any") == 1
  product, want = a.astype(np.float64) @ b.astype(np.float64), np.zeros((128, 64))
  for row in f:
    want = want * row[:, None] + product
  (got,) = lowered.simulate(a, b, f)
  assert_close(got, want, "gemm")


def rescaled_halves_kernel(a, b, f, c, *, between):
  """rescaled_kernel with two accumulators; `between`: the first is read before the second one is rescaled."""
  a_s = tt.alloc_shared((128, 64), a.dtype)
  b_s = [tt.alloc_shared((64, 64), b.dtype) for _ in range(2)]
  acc = [tt.alloc_fragment((128, 64), F32) for _ in range(2)]
  seen = tt.alloc_fragment((128,), F32)
  acc[0][...], acc[1][...], seen[...] = 0, 0, 0
  tt.copy(a, a_s)
  for k in tt.pipelined(f.shape[0], num_stages=2):
    for h in range(2):
      tt.copy(b.at[:, tt.block(h, 64)], b_s[h])
    factors = f[k, :][:, None]
    acc[0][...] *= factors
    if between:
      seen[...] += tt.max(acc[0][...], axis=1) * 0
    acc[1][...] *= factors
    for h in range(2):
      tt.gemm(a_s, b_s[h], acc[h])
  for h in range(2):
    c[:, tt.block(h, 64)] = acc[h][...] + seen[...][:, None]


@pytest.mark.parametrize(("between", "votes"), [(False, 1), (True, 2)])
def test_one_branch_rescales_all_accumulators_whose_factors_are_the_same(between, votes):
  a, b = random(0, 128, 64), random(1, 64, 128)
  f = np.random.default_rng(2).choice([1.0, 0.5], (5, 128)).astype(np.float32)
  f[1], f[2, :70] = 1, 1
  lowered = lower(rescaled_halves_kernel, [struct(128, 64, dtype=BF16), struct(64, 128, dtype=BF16), struct(5, 128)],
                  struct(128, 128), static={"between": between}, warpgroups=2)
  assert lowered.as_text("ptx").count("vote.sync.any") == votes
  product, want = a.astype(np.float64) @ b.astype(np.float64), np.zeros((128, 128))
  for row in f:
    want = want * row[:, None] + product
  assert_close(lowered.simulate(a, b, f)[0], want, "gemm")


def test_a_factor_that_is_not_a_number_reaches_every_element_of_its_row():
  a, b, f = random(0, 128, 64), random(1, 64, 64), np.ones((5, 128), np.float32)
  f[2, 77] = np.nan
  lowered = lower(rescaled_kernel, [struct(128, 64, dtype=BF16), struct(64, 64, dtype=BF16), struct(5, 128)],
                  struct(128, 64), warpgroups=2)
  (got,) = lowered.simulate(a, b, f)
  assert np.isnan(got[77]).all() and np.isfinite(np.delete(got, 77, axis=0)).all()
