"""Registers that a wgmma in flight reads: nobody touches them before it is waited for."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16

rng = np.random.default_rng(3)


def operand_is_summed(a, b, c, p, b_s, acc):
  p[...] = a[:, :64]
  tt.gemm(p, b_s, acc)
  c[...] = tt.sum(p[...].astype(jnp.float32), axis=1)[:, None] + acc[...]


def value_is_summed(a, b, c, p, b_s, acc):
  left = a[:, :64] * 2
  tt.gemm(left, b_s, acc)
  total = tt.sum(left.astype(jnp.float32), axis=1)
  c[...] = total[:, None] + acc[...]


def fragment_changes_after_its_value_was_multiplied(a, b, c, p, b_s, acc):
  for k in tt.range(2):
    p[...] = a[:, tt.block(k, 64)]
    tt.gemm(p[...], b_s, acc)
    p[...] = p[...] * 2
  c[...] = acc[...] + p[...].astype(jnp.float32)


def value_is_carried(a, b, c, p, b_s, acc):
  def body(k, left):
    tt.gemm(left, b_s, acc)
    return left * 2

  last = tt.fori_loop(0, 3, body, a[:, :64])
  c[...] = acc[...] + last.astype(jnp.float32)


@pytest.mark.parametrize("statements", [operand_is_summed, value_is_summed, value_is_carried,
                                        fragment_changes_after_its_value_was_multiplied])
def test_what_reads_or_writes_the_registers_of_a_waits(statements):
  def kernel(a, b, c):
    b_s, p = tt.alloc_shared((64, 64), b.dtype), tt.alloc_fragment((64, 64), a.dtype)
    acc = tt.alloc_fragment((64, 64), jnp.float32)
    acc[...] = 0
    tt.copy(b, b_s)
    statements(a, b, c, p, b_s, acc)

  a, b = (rng.integers(-3, 4, s).astype(BF16) for s in ((64, 128), (64, 64)))
  call = [tt.tile_call(kernel, jax.ShapeDtypeStruct((64, 64), jnp.float32), grid=1, backend=x) for x in ("xla", "sim")]
  np.testing.assert_array_equal(call[0](a, b), call[1](a, b))


def test_two_gemms_of_one_a_are_in_flight_together():
  def kernel(a, b, c):
    b_s = tt.alloc_shared((64, 64), b.dtype)
    x, y = (tt.alloc_fragment((64, 64), jnp.float32) for _ in range(2))
    tt.copy(b, b_s)
    left = a[:, :64] * 2
    tt.gemm(left, b_s, x, accumulate=False)
    tt.gemm(left, b_s.T, y, accumulate=False)
    c[...] = x[...] + y[...]

  a, b = (jax.ShapeDtypeStruct(s, BF16) for s in ((64, 128), (64, 64)))
  text = tt.tile_call(kernel, jax.ShapeDtypeStruct((64, 64), jnp.float32), grid=1).lower(a, b).as_text("schedule")
  first, second = (i for i, line in enumerate(text.splitlines()) if "gemm_async" in line)
  assert not any("wgmma_wait" in line for line in text.splitlines()[first:second])


def test_what_reads_a_part_that_a_warpgroup_multiplies_first_waits_too():
  """Each warpgroup's own columns are the registers of the value that both multiply."""
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    s, acc = (tt.alloc_fragment((64, 64), jnp.float32) for _ in range(2))
    tt.copy(a.at[:, :64], a_s)
    tt.copy(b, b_s)
    tt.gemm(a_s, b_s, s, accumulate=False, policy=tt.FULL_COL)
    p = tt.clip(s[...], -8, 8).astype(a.dtype)
    tt.gemm(p, b_s, acc, accumulate=False, policy=tt.FULL_COL)
    total = tt.sum(p.astype(jnp.float32), axis=1)
    c[...] = acc[...] + total[:, None]

  a, b = (rng.integers(-3, 4, s).astype(BF16) for s in ((64, 128), (64, 64)))
  out = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  sim, xla = (tt.tile_call(kernel, out, grid=1, warpgroups=2, backend=x) for x in ("sim", "xla"))
  assert "own_columns" in sim.lower(a, b).as_text("schedule")
  np.testing.assert_array_equal(sim(a, b), xla(a, b))
