"""flash_attention against float32 jnp, as jax ops and in the simulator; what it refuses; how it is scheduled."""
from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.kernels.arrays import compiled, normal
from tiletrace.kernels import attention_reference, flash_attention, flash_attention_packed
from tiletrace.kernels.flash_attention import (
  AttentionRule,
  AttentionTiling,
  attention_call,
  choose_attention_tiling,
  packed_attention_call,
)

BF16 = jnp.bfloat16


def soft_cap(x):
  return 5 * jnp.tanh(x / 5)


def random(shape, keys=None, kv_heads=None, dtype=BF16):
  b, t, n, h = shape
  kv = (b, keys or t, kv_heads or n, h)
  return tuple(normal(i, *s, dtype=dtype) for i, s in enumerate((shape, kv, kv)))


def reference(*operands, **options):
  return compiled(attention_reference, *operands, **options)


def close(got, want, dtype=BF16):
  """Of values: half an ulp of the result, and P rounded to 16 bits; of residuals, f32."""
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
    assert np.array_equal(np.isfinite(g), np.isfinite(w))
    ok = np.isfinite(w)
    np.testing.assert_allclose(g[ok], w[ok], atol=2**-7 if dtype == BF16 else 2**-10, rtol=2**-7)


CASES = {
    "full": ((1, 200, 2, 128), 333, 1, {}),
    "causal": ((2, 130, 2, 64), None, None, {"is_causal": True}),
    "causal, the last query sees the last key": ((1, 150, 1, 128), 300, 1, {
        "is_causal": True, "query_offset": 150, "return_residual": True}),
    "a window": ((1, 260, 1, 128), None, None, {"local_window_size": (40, 20)}),
    "a causal window": ((1, 260, 1, 96), None, None, {"is_causal": True, "local_window_size": (50, None)}),
    "h = 192": ((1, 100, 1, 192), 200, 1, {"return_residual": True}),
    "h = 256": ((1, 100, 1, 256), 250, 1, {"is_causal": True}),
    "a soft cap": ((1, 64, 1, 64), 130, 1, {"score": soft_cap}),
    "queries that see nothing": ((1, 200, 1, 64), 100, 1, {
        "is_causal": True, "query_offset": -100, "return_residual": True}),
    "a scale, one query": ((2, 1, 4, 64), 70, 2, {"scale": 0.3}),
    "no scale": ((1, 70, 1, 64), 70, 1, {"scale": 0.0, "is_causal": True}),
    "a negative scale": ((1, 70, 1, 64), 70, 1, {"scale": -0.2, "is_causal": True, "return_residual": True}),
    "no keys": ((1, 5, 2, 64), 0, 2, {"return_residual": True}),
}


@functools.cache
def wanted(case):
  """Operands, and what both backends give."""
  shape, keys, heads, options = CASES[case]
  operands = random(shape, keys, heads)
  return operands, reference(*operands, **options)


@pytest.mark.parametrize("backend", ["xla", "sim"])
@pytest.mark.parametrize("case", CASES)
def test_flash_attention_is_softmax_of_q_k_times_v(case, backend, monkeypatch):
  monkeypatch.setenv("TT_BACKEND", backend)
  operands, want = wanted(case)
  close(compiled(flash_attention, *operands, **CASES[case][-1]), want)


@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_keys_past_an_examples_length_are_not_used_whatever_they_are(backend, monkeypatch):
  monkeypatch.setenv("TT_BACKEND", backend)
  q, k, v = random((3, 70, 2, 64), 200, 1)
  lengths = jnp.asarray([200, 0, 133], jnp.int32)
  past = (np.arange(200) >= np.asarray(lengths)[:, None])[..., None, None]
  k, v = (jnp.asarray(np.where(past, np.asarray(np.nan, BF16), x)) for x in (k, v))
  options = {"key_value_seq_lengths": lengths, "return_residual": True}
  out, residual = compiled(flash_attention, q, k, v, **options)
  close((out, residual), reference(q, jnp.asarray(np.where(past, np.asarray(0, BF16), k)), v, **options))
  assert (out[1] == 0).all() and (residual[1] == -jnp.inf).all()


@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_packed_sequences_do_not_see_each_other(backend, monkeypatch):
  monkeypatch.setenv("TT_BACKEND", backend)
  (q, k, v), rng = random((1, 190, 2, 64), 230, 1), np.random.default_rng(0)
  q_starts, k_starts = jnp.asarray([0, 70, 70, 71, 190], jnp.int32), jnp.asarray([0, 100, 103, 103, 230], jnp.int32)
  v = v.at[0, 100 + rng.integers(3)].set(jnp.inf)
  out, residual = flash_attention_packed(q[0], k[0], v[0], q_starts, k_starts, max_query_length=120, is_causal=True,
                                         return_residual=True)
  for i in range(4):
    (a, b), (c, d) = (x[i:i + 2].tolist() for x in (q_starts, k_starts))
    if a < b:
      want = reference(q[:, a:b], k[:, c:d], v[:, c:d], is_causal=True, return_residual=True)
      close((out[None, a:b], residual[None, a:b]), want)


@pytest.mark.parametrize("persistent", [True, "dynamic"])
def test_packed_sequences_of_persistent_programs(persistent):
  """Some programs have no queries: nothing is copied for them."""
  q, k, v = random((1, 330, 2, 64), 330, 1)
  starts = np.asarray([0, 10, 10, 260, 330], np.int32)
  tiling, rule = AttentionTiling(64, 64, 1, 2, persistent), AttentionRule(0.125, None, 0, 0, None)
  call = packed_attention_call((330, 2, 64), (330, 1, 64), 4, 250, BF16, tiling, rule, residual=True)
  lowered = call.lower(q[0], k[0], v[0], starts, starts)

  assert lowered.compile().memory_analysis()["spill_stores"] == 0
  for sms in (1, 3):
    out, residual = lowered.simulate(q[0], k[0], v[0], starts, starts, num_sms=sms)
    for a, b in itertools.pairwise(starts):
      want = reference(*(x[:, a:b] for x in (q, k, v)), is_causal=True, return_residual=True)
      close((out[None, a:b], residual[None, a:b]), want)


def test_examples_of_different_lengths_are_taken_when_a_cta_is_free():
  q, k, v = random((4, 130, 2, 64))
  lengths = np.asarray([130, 1, 70, 0], np.int32)
  tiling = AttentionTiling(128, 64, 2, 2, persistent="dynamic")
  call = attention_call(q.shape, k.shape, BF16, tiling, AttentionRule(0.125, None, None, 0, None))
  lowered = call.lower(q, k, v, lengths)

  assert "takes its next program when it is free" in str(lowered.report())
  assert lowered.compile().memory_analysis()["spill_stores"] == 0
  out = lowered.simulate(q, k, v, lengths, num_sms=2)[0]
  close(out, reference(q, k, v, key_value_seq_lengths=jnp.asarray(lengths)))


@pytest.mark.parametrize("dtype", [jnp.float16, BF16])
def test_derivatives_are_those_of_the_reference(dtype):
  q, k, v = random((1, 40, 2, 64), 50, 1, dtype)
  options = {"is_causal": True, "query_offset": 10, "return_residual": True}

  def loss(f, *xs):
    out, residual = f(*xs, **options)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(residual**2)

  got, want = (jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2)))(q, k, v)
               for f in (flash_attention, attention_reference))
  for g, w in zip(got, want, strict=True):
    np.testing.assert_allclose(g.astype(jnp.float32), w.astype(jnp.float32), rtol=0.05, atol=0.05)


def test_the_reference_is_jax_nns():
  q, k, v = random((2, 60, 4, 64), 60, 2)
  for options in ({"is_causal": True}, {"local_window_size": (9, 4)}, {"key_value_seq_lengths": jnp.asarray([60, 31])}):
    want = compiled(jax.nn.dot_product_attention, q, k, v, **options)
    close(reference(q, k, v, **options), want)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", [None, soft_cap])
def test_every_tiling_assembles_without_spills_and_overlaps(head_dim, causal, score):
  """Two groups are in flight, then the older one is waited for; ptxas serialises nothing (that would be an error)."""
  q, k, v = (jax.ShapeDtypeStruct((1, 2000, 2, head_dim), BF16),) * 3
  tiling = choose_attention_tiling(head_dim, 2000, causal=causal, plain=score is None)
  rule = AttentionRule(0.1, right=0 if causal else None, score=score)
  compiled = attention_call(q.shape, q.shape, BF16, tiling, rule, residual=True).trace(q, k, v, None).lower().compile()
  assert compiled.memory_analysis()["spill_stores"] == 0
  waits = re.findall(r"wgmma.wait_group.sync.aligned (\d)", compiled.lowered.as_text("ptx"))
  assert waits.count("1") == 1 and set(waits) == {"0", "1"}
  report = str(compiled.report())
  assert "accumulates its own part" in report and "warps whose factors are all one" in report


def test_causal_programs_are_balanced():
  q = jax.ShapeDtypeStruct((4, 4096, 16, 128), BF16)
  tiling = choose_attention_tiling(128, 4096, causal=True)
  call = attention_call(q.shape, q.shape, BF16, tiling, AttentionRule(0.1, right=0))
  assert "the CTA that is free first" in str(call.trace(q, q, q, None).lower().report())
  assert call.options.grid == (4, 1, 32, 16)


def test_heads_go_together_while_their_keys_stay_in_l2():
  def grid(t, n, kv, h, causal):
    q, k = (2, t, n, h), (2, t, kv, h)
    tiling = choose_attention_tiling(h, t, causal=causal)
    return attention_call(q, k, BF16, tiling, AttentionRule(0.1, right=0 if causal else None)).options.grid

  assert grid(16384, 16, 16, 128, True) == (2, 4, 86, 4)
  assert grid(16384, 16, 4, 128, True) == (2, 1, 86, 16)
  assert grid(16384, 16, 16, 128, False) == (2, 16, 86, 1)


@pytest.mark.parametrize(("change", "message"), [
    (lambda q, k, v: (q[0], k, v), r"query has the shape \(40, 2, 64\)"),
    (lambda q, k, v: (q, k.astype(jnp.float32), v), "key is float32, query bfloat16"),
    (lambda q, k, v: (q, k, v[:, :10]), r"value \[1, 10, 2, 64\]"),
    (lambda q, k, v: (q[..., :40], k[..., :40], v[..., :40]), "the head dimension is 40"),
    (lambda q, k, v: (q[:, :, :1], k, v), "n is a multiple of k"),
])
def test_operands_that_do_not_fit_are_refused(change, message):
  with pytest.raises(tt.TileTypeError, match=message) as e:
    flash_attention(*change(*random((1, 40, 2, 64))))
  assert "flash_attention_test.py" in str(e.value)


@pytest.mark.parametrize(("options", "message"), [
    ({"local_window_size": (-1, 3)}, r"local_window_size=\(-1, 3\)"),
    ({"key_value_seq_lengths": jnp.asarray([3, 4], jnp.int32)}, "one length for each example"),
])
def test_options_that_do_not_fit_are_refused(options, message):
  with pytest.raises(tt.TileTypeError, match=message):
    flash_attention(*random((1, 40, 2, 64)), **options)


def test_packed_operands_that_do_not_fit_are_refused():
  q, k, v = (x[0] for x in random((1, 40, 2, 64)))
  starts = jnp.asarray([0, 40], jnp.int32)
  with pytest.raises(tt.TileTypeError, match="key_starts is int32"):
    flash_attention_packed(q, k, v, starts, starts[:1], max_query_length=40)
  with pytest.raises(tt.TileTypeError, match="max_query_length=0"):
    flash_attention_packed(q, k, v, starts, starts, max_query_length=0)


def test_a_tile_that_fits_no_schedule_is_refused_with_the_sum():
  q = jax.ShapeDtypeStruct((1, 500, 1, 256), BF16)
  with pytest.raises(tt.TileTraceError, match="k_s"):
    attention_call(q.shape, q.shape, BF16, AttentionTiling(128, 128, 2, 4), AttentionRule(0.1)).lower(q, q, q, None)
