"""Syncs between what threads do to shared memory, and the wgmmas of other warpgroups that read it."""
from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, struct
from tests.tolerances import assert_close
from tiletrace.core.graph import Var
from tiletrace.core.types import RefType, Space
from tiletrace.lowering.schedule.syncs import _State

rng = np.random.default_rng(5)


def product_kernel(a, b, c, *, loop):
  a_s, b_s = tt.alloc_shared((128, 64), a.dtype), tt.alloc_shared((64, 32), b.dtype)
  acc = tt.alloc_fragment((128, 32), jnp.float32)
  acc[...] = 0
  for k in loop(3):
    a_s[...] = a[:, tt.block(k, 64)]
    left = a_s[...] * 2
    b_s[...] = b[tt.block(k, 64), :] * 2
    tt.gemm(left, b_s, acc)
  c[...] = acc[...]


@pytest.mark.parametrize("loop", [tt.range, range])
def test_a_sync_stands_between_a_wait_for_wgmma_and_the_next_write(loop):
  """The sync before the wait, between a_s and `left`, does not say that the other warpgroup has read b_s."""
  a, b = (rng.standard_normal(s).astype(BF16) for s in ((128, 192), (192, 32)))
  call = tt.tile_call(functools.partial(product_kernel, loop=loop), struct(128, 32), grid=1, warpgroups=2)
  lowered = call.lower(a, b)
  lines = lowered.as_text("schedule").splitlines()
  write = max(i for i, line in enumerate(lines) if "e[...] <-" in line)
  wait, sync = (max(i for i, line in enumerate(lines[:write]) if word in line) for word in ("wgmma_wait", "sync["))
  assert wait < sync
  assert_close(lowered.simulate(a, b)[0], 4 * a.astype(np.float64) @ b.astype(np.float64), "gemm")


def test_a_slot_that_is_full_again_is_nobody_elses_any_more():
  barrier, slot, other = (Var(RefType((8, 8), BF16, Space.SHARED)) for _ in range(3))
  state = _State({slot, other}, {slot}, {slot, other}, frozenset(), {barrier: {slot}})
  state.copy().refilled(other)
  assert state.written == {slot, other}
  state.refilled(barrier)
  assert (state.written, state.read, state.unfenced) == ({other}, set(), {other})


def written_between_kernel(x, y, out, *, stages):
  """out[i] = x[i] y; the slot that x[i] was in is zeroed before it is filled again."""
  x_s, y_s = tt.alloc_shared((64, 64), x.dtype), tt.alloc_shared((64, 64), y.dtype)
  acc = tt.alloc_fragment((64, 64), jnp.float32)
  tt.copy(y, y_s)
  for i in tt.pipelined(4, num_stages=stages):
    tt.copy(x.at[i], x_s)
    tt.gemm(x_s, y_s, acc, accumulate=False)
    out[i] = acc[...]
    x_s[...] = 0


@pytest.mark.parametrize(("stages", "fences"), [(1, 1), (2, 2)])
def test_what_threads_did_to_a_slot_before_it_was_filled_needs_no_fence_where_it_is_read(stages, fences):
  """Of several slots another one may be full."""
  x, y = (rng.standard_normal(s).astype(BF16) for s in ((4, 64, 64), (64, 64)))
  call = tt.tile_call(functools.partial(written_between_kernel, stages=stages), struct(4, 64, 64), grid=1, warpgroups=2)
  lowered = call.lower(x, y)
  loop = lowered.as_text("schedule").split("warpgroup[")[2]
  assert loop.count("fence[kind=proxy_async_shared]") == fences
  for seed in range(3):
    assert_close(lowered.simulate(x, y, seed=seed)[0], x.astype(np.float64) @ y.astype(np.float64), "gemm")


def test_a_wait_for_older_groups_says_nothing_of_the_newest():
  state = _State(set(), set(), set(), frozenset())
  x, y, z = (Var(RefType((8, 8), BF16, Space.SHARED)) for _ in range(3))
  state.flying = [{x}, {y}]
  other = state.copy()
  other.flying = [{z}]
  state.join(other)
  assert state.flying == [{x}, {y, z}]
  state.wait(1)
  assert state.read == {x} and state.flying == [{y, z}]
  state.wait(0)
  assert state.read == {x, y, z} and not state.flying
