"""Programs of the language, traced, verified, simplified and compared with numpy: the parts fit together."""
from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.xla.kernels import run_compiled
from tests.tracing import Out, array, trace
from tiletrace.core.dtypes import canonical
from tiletrace.core.simplify import simplify
from tiletrace.core.verify import verify

rng = np.random.default_rng(11)


def normal(*shape):
  return rng.standard_normal(shape).astype(jnp.bfloat16)


def compute(kernel, grid, inputs, outputs, **static):
  """The outputs, f64; `outputs`: name -> (dtype, shape)."""
  partial = functools.partial(kernel, **static)
  partial.__name__ = kernel.__name__
  arrays = {k: array(canonical(v.dtype), *v.shape) for k, v in inputs.items()}
  outs = {k: Out(array(canonical(d), *s)) for k, (d, s) in outputs.items()}
  graph = verify(trace(partial, grid=grid, warpgroups=2, **arrays, **outs))
  small = verify(simplify(graph))
  return [np.asarray(y).astype(np.float64) for y in run_compiled(small, *inputs.values())]


def close(got, want, tolerance=2e-2):
  assert np.isfinite(got).all()
  assert np.abs(got - want).max() < tolerance * np.abs(want).max()


def attention(q, k, v, o, lse, *, bm, bn, causal):
  """One head group; program order overlaps S(j) with P(j-1) V(j-1)."""
  b, h, i = tt.program_id(0), tt.program_id(1), tt.program_id(2)
  (_, sq, heads, d), (_, sk, kv_heads, _) = q.shape, k.shape
  hk = h // (heads // kv_heads)
  q_s, k_s, v_s = (tt.alloc_shared((n, d), q.dtype) for n in (bm, bn, bn))
  s, acc = tt.alloc_fragment((bm, bn), jnp.float32), tt.alloc_fragment((bm, d), jnp.float32)
  p = tt.alloc_fragment((bm, bn), q.dtype)
  m, l = tt.alloc_fragment((bm,), jnp.float32), tt.alloc_fragment((bm,), jnp.float32)
  acc[...], m[...], l[...] = 0, -jnp.inf, 0
  rows = i * bm + tt.arange(bm) + (sk - sq)

  def scores(j):
    tt.copy(k.at[b, tt.block(j, bn), hk, :], k_s)
    tt.gemm(q_s, k_s.T, s, accumulate=False)

  def values(j):
    tt.copy(v.at[b, tt.block(j, bn), hk, :], v_s)
    tt.gemm(p, v_s, acc)

  def softmax(j):
    cols = j * bn + tt.arange(bn)
    seen = (cols < sk)[None, :]
    if causal:
      seen = seen & (cols[None, :] <= rows[:, None])
    x = tt.where(seen, s[...] * (math.log2(math.e) / math.sqrt(d)), -jnp.inf)
    m_new = tt.maximum(m[...], tt.max(x, axis=1))
    shift = tt.where(m_new == -jnp.inf, 0, m_new)
    alpha, e = tt.exp2(m[...] - shift), tt.exp2(x - shift[:, None])
    l[...] = l[...] * alpha + tt.sum(e, axis=1)
    m[...] = m_new
    acc[...] *= alpha[:, None]
    p[...] = e.astype(p.dtype)

  last = tt.cdiv(sk, bn)
  if causal:
    last = tt.minimum(last, tt.cdiv((i + 1) * bm + (sk - sq), bn))
  tt.copy(q.at[b, tt.block(i, bm), h, :], q_s)
  scores(0)
  softmax(0)
  for j in tt.pipelined(1, last, num_stages=2):
    scores(j)
    values(j - 1)
    softmax(j)
  values(last - 1)
  o[b, tt.block(i, bm), h, :] = (acc[...] / l[:, None]).astype(o.dtype)
  lse[b, h, tt.block(i, bm)] = (m[...] + tt.log2(l[...])) * math.log(2)


@pytest.mark.parametrize(("sq", "sk", "causal"), [(33, 70, True), (20, 41, False)])
def test_attention_with_grouped_heads_and_tails(sq, sk, causal):
  b, h, hkv, d = 1, 2, 1, 16
  q, k, v = normal(b, sq, h, d), normal(b, sk, hkv, d), normal(b, sk, hkv, d)
  o, lse = compute(attention, (b, h, tt.cdiv(sq, 16)), dict(q=q, k=k, v=v),
                   dict(o=("bfloat16", q.shape), lse=("float32", (b, h, sq))), bm=16, bn=32, causal=causal)
  x = np.einsum("bqhd,bkgd->bhqk", q.astype(np.float64), k.astype(np.float64)) / math.sqrt(d)
  if causal:
    x = np.where(np.arange(sk)[None, :] <= np.arange(sq)[:, None] + sk - sq, x, -np.inf)
  e = np.exp(x - x.max(-1, keepdims=True))
  close(o, np.einsum("bhqk,bkgd->bqhd", e / e.sum(-1, keepdims=True), v.astype(np.float64)))
  close(lse, np.log(e.sum(-1)) + x.max(-1), 1e-5)


def ragged_scores(q, kv, lens, o, *, bn):
  """o[b] = q[b] kv[b, :lens[b]]^T kv[b, :lens[b], :8]: a view of abstract size, a value as gemm's operand."""
  b = tt.program_id(0)
  q_s, kv_s = tt.alloc_shared(q.shape[1:], q.dtype), tt.alloc_shared((bn, kv.shape[2]), kv.dtype)
  s = tt.alloc_fragment((q.shape[1], bn), jnp.float32)
  acc = tt.alloc_fragment((q.shape[1], 8), jnp.float32)
  acc[...] = 0
  keys = kv.at[b, tt.ds(0, lens[b]), :]
  tt.copy(q.at[b], q_s)
  for j in tt.pipelined(tt.cdiv(lens[b], bn), num_stages=2):
    tt.copy(keys.at[tt.block(j, bn), :], kv_s)
    tt.gemm(q_s, kv_s.T, s, accumulate=False, policy=tt.FULL_COL)
    tt.gemm(s[...].astype(kv.dtype), kv_s.at[:, :8], acc, policy=tt.FULL_COL)
  o[b] = acc[...]


def test_views_end_at_each_sequences_length():
  q, kv, lens = normal(3, 4, 16), normal(3, 40, 16), np.array([40, 17, 0], np.int32)
  o, = compute(ragged_scores, (3,), dict(q=q, kv=kv, lens=lens), dict(o=("float32", (3, 4, 8))), bn=16)
  qf, kvf = q.astype(np.float64), kv.astype(np.float64)
  for n, (a, k) in enumerate(zip(qf, kvf)):
    want = a @ k[:lens[n]].T @ k[:lens[n], :8]
    close(o[n], want) if lens[n] else np.testing.assert_array_equal(o[n], 0)


def dequant(x, w, scales, y, *, bk):
  """y = x @ (nibbles of w - 8) * scales; byte r of a block holds row r and row r + bk/2."""
  half = bk // 2
  x_s, d_s = tt.alloc_shared((16, bk), x.dtype), tt.alloc_shared((bk, 16), x.dtype)
  w_s = tt.alloc_shared((half, 16), w.dtype)
  acc = tt.alloc_fragment((16, 16), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(x.shape[1], bk), num_stages=2):
    tt.copy(x.at[:, tt.block(k, bk)], x_s)
    tt.copy(w.at[tt.block(k, half), :], w_s)
    s = scales[None, k, :].astype(jnp.float32)
    packed = w_s[...].astype(jnp.int32)
    d_s[:half, :] = (((packed & 15) - 8) * s).astype(x.dtype)
    d_s[half:, :] = (((packed >> 4) - 8) * s).astype(x.dtype)
    tt.gemm(x_s, d_s, acc)
  y[...] = acc[...].astype(y.dtype)


def test_integers_unpacked_scaled_and_multiplied():
  x, scales = normal(16, 48), normal(3, 16)
  q = rng.integers(0, 16, (3, 16, 16))                      # [block, row in block, column]
  w = (q[:, :8] | (q[:, 8:] << 4)).astype(np.uint8).reshape(24, 16)
  y, = compute(dequant, (1,), dict(x=x, w=w, scales=scales), dict(y=("float32", (16, 16))), bk=16)
  weights = ((q - 8) * scales.astype(np.float64)[:, None, :]).reshape(48, 16)
  close(y, x.astype(np.float64) @ weights)
