"""eviction_policy= reaches every kind of access to global memory, and is refused where L2 has no part."""
from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.kernels.arrays import normal
from tests.lowering.kernels import BF16, assemble, lower, struct, variants
from tests.tolerances import assert_close
from tiletrace.core.errors import TileTypeError


def gemm(dispatch, target):
  def kernel(a, b, c):
    i, j = tt.program_id(0), tt.program_id(1)
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), jnp.float32)
    acc[...] = 0
    for k in tt.pipelined(tt.cdiv(a.shape[1], 64), num_stages=2):
      tt.copy(a.at[tt.block(i, 64), tt.block(k, 64)], a_s, dispatch=dispatch, eviction_policy="evict_first")
      tt.copy(b.at[tt.block(k, 64), tt.block(j, 64)], b_s, dispatch=dispatch, eviction_policy="evict_last")
      tt.gemm(a_s, b_s, acc)
    tt.store(c.at[tt.block(i, 64), tt.block(j, 64)], acc[...].astype(c.dtype), eviction_policy="evict_first")

  a, b = (np.asarray(normal(i, *s, dtype=BF16)) for i, s in enumerate(((128, 120), (120, 128))))
  options = tt.CompileOptions(target=target)
  return tt.tile_call(kernel, jax.ShapeDtypeStruct((128, 128), BF16), grid=(2, 2), options=options).lower(a, b), a, b


@pytest.mark.parametrize(("dispatch", "target", "opcodes"), [
  (None, "sm_90a", {"cp.async.bulk.tensor"}), ("cp_async", "sm_90a", {"cp.async.cg", "cp.async.bulk.tensor"}),
  ("vector", "sm_90a", {"ld.global", "cp.async.bulk.tensor"}), (None, "sm_80", {"cp.async.cg", "st.global"})])
def test_each_access_takes_the_policy_that_it_asks_for(dispatch, target, opcodes):
  lowered, a, b = gemm(dispatch, target)
  ptx = lowered.as_text("ptx")
  made = dict(re.findall(r"createpolicy.fractional.L2::(\w+).b64 (%rd\d+), 0f3F800000", ptx))
  hinted = re.findall(r"^\s*(?:@\S+ )?([\w.:]+L2::cache_hint\S*).*, (%rd\d+);$", ptx, re.MULTILINE)

  assert set(made) == {"evict_first", "evict_last"} and {p for _, p in hinted} == set(made.values())
  assert {next(o for o in opcodes if x.startswith(o)) for x, _ in hinted} == opcodes
  assert not re.findall(r"(?:ld|st)\.global(?!\.L2::cache_hint)|cp\.async\.c[ag]\.shared\.global (?!L2)", ptx)
  assemble(lowered)
  assert_close(lowered.simulate(a, b)[0], a.astype(np.float64) @ b.astype(np.float64), "gemm")


def test_a_multicast_copy_takes_one_too():
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), jnp.float32)
    acc[...] = 0
    for k in tt.pipelined(2, num_stages=2):
      tt.copy(a.at[tt.block(tt.program_id(0), 64), tt.block(k, 64)], a_s)
      tt.copy(b.at[tt.block(k, 64), :], b_s, eviction_policy="evict_last")
      tt.gemm(a_s, b_s, acc)
    c[tt.block(tt.program_id(0), 64), :] = acc[...].astype(c.dtype)

  lowered = lower(kernel, [struct(128, 128, dtype=BF16), struct(128, 64, dtype=BF16)], struct(128, 64, dtype=BF16),
                  grid=(2,), cluster=(2,))
  assert len(re.findall(r"multicast::cluster.L2::cache_hint", lowered.as_text("ptx"))) == 1
  assemble(lowered)


def test_values_are_loaded_and_stored_with_a_policy():
  def kernel(x, y):
    tt.store(y, tt.load(x, eviction_policy="evict_first") + 1, mask=tt.arange(1000) < 999, eviction_policy="evict_last")

  lowered = lower(kernel, [struct(1000)], struct(1000))
  x = np.asarray(normal(0, 1000))
  ptx = lowered.as_text("ptx")
  assert re.search(r"ld\.global\.nc\.L2::cache_hint", ptx) and re.search(r"st\.global\.L2::cache_hint", ptx)
  assert "y[...] <- " in lowered.as_text("trace") and "evict_last mask=" in lowered.as_text("trace")
  np.testing.assert_array_equal(lowered.simulate(x)[0][:999], x[:999] + np.float32(1))


def test_kernels_that_ask_for_nothing_have_no_policy():
  lowered = lower(lambda x, y: tt.store(y, x[...]), [struct(64)], struct(64), name="plain")
  assert "policy" not in lowered.as_text("ptx") and variants(lowered, "store") == ["direct"]


def to_shared(x, y, **how):
  s = tt.alloc_shared((64,), x.dtype)
  tt.copy(x, s, **how)
  y[...] = s[...]


def from_shared(x, y):
  s = tt.alloc_shared((64,), x.dtype)
  s[...] = x[...]
  y[...] = tt.load(s, eviction_policy="evict_last")


def gathered(x, y):
  y[...] = tt.load(x.at[tt.arange(64)], eviction_policy="evict_first")


@pytest.mark.parametrize(("kernel", "message"), [
  (lambda x, y: to_shared(x, y, eviction_policy="first"), "copy: eviction_policy is 'first'"),
  (from_shared, "load: eviction_policy='evict_last', but no block of global memory is read or written"),
  (gathered, "load: eviction_policy='evict_first', but no block of global memory is read or written"),
], ids=["word", "shared", "indices"])
def test_what_has_no_policy_is_refused_at_the_users_line(kernel, message):
  with pytest.raises(TileTypeError) as e:
    lower(kernel, [struct(64)], struct(64), name="refused")
  assert str(e.value).startswith(message) and "eviction_test.py" in str(e.value) and "^" in str(e.value)
