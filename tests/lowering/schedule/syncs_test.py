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
