"""Matrix products of the xla backend against float64."""
from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.xla.kernels import call, traced
from tests.tolerances import assert_close
from tiletrace.lowering.xla.run import run

rng = np.random.default_rng(11)


def normal(*shape: int, dtype: object = jnp.bfloat16) -> np.ndarray:
  return rng.standard_normal(shape).astype(dtype)


def matmul_kernel(a, b, c, *, bm, bn, bk, ta=False, tb=False):
  i, j = tt.program_id(0), tt.program_id(1)
  a, b = (a.T if ta else a), (b.T if tb else b)                 # views
  a_s = tt.alloc_shared((bm, bk), a.dtype)
  b_s = tt.alloc_shared((bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), np.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], bk), num_stages=3):
    tt.copy(a.at[tt.block(i, bm), tt.block(k, bk)], a_s)
    tt.copy(b.at[tt.block(k, bk), tt.block(j, bn)], b_s)
    tt.gemm(a_s, b_s, acc)
  c[tt.block(i, bm), tt.block(j, bn)] = tt.maximum(acc[...], 0).astype(c.dtype)


def reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return a.astype(np.float64) @ b.astype(np.float64)


@pytest.mark.parametrize(("m", "n", "k"), [(256, 256, 128), (1000, 776, 336), (13, 8, 24), (1, 1, 1), (129, 257, 65)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_matmul_relu_is_right_for_any_shape(m, n, k, dtype):
  a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
  c, = call(matmul_kernel, a, b, out=((m, n), dtype), grid=(tt.cdiv(m, 128), tt.cdiv(n, 256)), bm=128, bn=256, bk=64)
  assert_close(c, np.maximum(reference(a, b), 0), "gemm")


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
def test_transposed_operands_are_views(ta, tb):
  m, n, k = 100, 72, 40
  a, b = normal(m, k), normal(k, n)
  c, = call(matmul_kernel, a.T.copy() if ta else a, b.T.copy() if tb else b, out=((m, n), np.float32), grid=(2, 2),
            bm=64, bn=64, bk=32, ta=ta, tb=tb)
  assert_close(c, np.maximum(reference(a, b), 0), "gemm")


def test_no_contraction_gives_zero():
  c, = call(matmul_kernel, normal(40, 0), normal(0, 30), out=((40, 30), np.float32), grid=(2, 1), bm=32, bn=32, bk=16)
  np.testing.assert_array_equal(c, np.zeros((40, 30), np.float32))


@pytest.mark.parametrize("accumulate", [False, True, "even"])
def test_accumulate_is_a_number_or_a_scalar(accumulate):
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((16, 16), a.dtype), tt.alloc_shared((16, 16), b.dtype)
    acc = tt.alloc_fragment((16, 16), np.float32)
    if accumulate is True:
      acc[...] = 1.0
    for k in tt.range(3):
      tt.copy(a.at[:, tt.block(k, 16)], a_s)
      tt.copy(b.at[tt.block(k, 16), :], b_s)
      tt.gemm(a_s, b_s, acc, accumulate=k % 2 == 1 if accumulate == "even" else accumulate)
    c[...] = acc[...]

  a, b = normal(16, 48), normal(48, 16)
  c, = call(kernel, a, b, out=((16, 16), np.float32), grid=(1,))
  part = [reference(a[:, s], b[s]) for s in (slice(0, 16), slice(16, 32), slice(32, 48))]
  assert_close(c, 1 + sum(part) if accumulate is True else part[2], "gemm")


def test_the_a_operand_may_be_a_value():
  def kernel(a, b, c):
    b_s = tt.alloc_shared((16, 24), b.dtype)
    acc = tt.alloc_fragment((32, 24), np.float32)
    tt.copy(b, b_s)
    tt.gemm(a[...] * 2, b_s, acc, accumulate=False)
    tt.gemm(a[...], b_s, acc)
    c[...] = acc[...]

  a, b = normal(32, 16), normal(16, 24)
  c, = call(kernel, a, b, out=((32, 24), np.float32), grid=(1,))
  assert_close(c, 3 * reference(a, b), "gemm")


def flash_kernel(q, k, v, o, lse, *, bm, bn, scale):
  """Causal attention with the rotated loop: block j - 1 of P V is issued beside block j of Q K^T."""
  h, i = tt.program_id(0), tt.program_id(1)
  (sq, d), sk = q.shape[1:], k.shape[1]
  q_s, k_s, v_s = (tt.alloc_shared((n, d), q.dtype) for n in (bm, bn, bn))
  s, p = tt.alloc_fragment((bm, bn), np.float32), tt.alloc_fragment((bm, bn), q.dtype)
  acc = tt.alloc_fragment((bm, d), np.float32)
  m, l = tt.alloc_fragment((bm,), np.float32), tt.alloc_fragment((bm,), np.float32)
  acc[...], m[...], l[...] = 0, -np.inf, 0
  rows = i * bm + tt.arange(bm) + (sk - sq)

  def scores(j):
    tt.copy(k.at[h, tt.block(j, bn), :], k_s)
    tt.gemm(q_s, k_s.T, s, accumulate=False)

  def values(j):
    tt.copy(v.at[h, tt.block(j, bn), :], v_s)
    tt.gemm(p, v_s, acc)

  def softmax(j):
    cols = j * bn + tt.arange(bn)
    seen = (cols < sk)[None, :] & (cols[None, :] <= rows[:, None])
    x = tt.where(seen, s[...] * scale, -np.inf)
    m_new = tt.maximum(m[...], tt.max(x, axis=1))
    base = tt.where(m_new == -np.inf, 0, m_new)
    alpha = tt.exp(m[...] - base)
    e = tt.exp(x - base[:, None])
    l[...] = l[...] * alpha + tt.sum(e, axis=1)
    m[...] = m_new
    acc[...] *= alpha[:, None]
    p[...] = e.astype(p.dtype)

  last = tt.minimum(tt.cdiv(sk, bn), tt.cdiv((i + 1) * bm + (sk - sq), bn))
  tt.copy(q.at[h, tt.block(i, bm), :], q_s)
  scores(0)
  softmax(0)
  for j in tt.pipelined(1, last, num_stages=2):
    scores(j)
    values(j - 1)
    softmax(j)
  values(last - 1)
  total = tt.where(l[...] == 0, 1, l[...])
  o[h, tt.block(i, bm), :] = (acc[...] / total[:, None]).astype(o.dtype)
  lse[h, tt.block(i, bm)] = m[...] + tt.log(l[...])


@pytest.mark.parametrize(("sq", "sk"), [(64, 64), (45, 77), (33, 20), (1, 50)])
def test_flash_attention_agrees_with_softmax(sq, sk):
  h, d = 2, 16
  q, k, v = normal(h, sq, d), normal(h, sk, d), normal(h, sk, d)
  o, lse = call(flash_kernel, q, k, v, out=[((h, sq, d), q.dtype), ((h, sq), np.float32)], grid=(h, tt.cdiv(sq, 32)),
                bm=32, bn=16, scale=0.25)
  seen = np.arange(sk)[None, :] <= np.arange(sq)[:, None] + sk - sq
  s = np.where(seen, np.einsum("hqd,hkd->hqk", q.astype(np.float64), k.astype(np.float64)) * 0.25, -np.inf)
  with np.errstate(divide="ignore", invalid="ignore"):
    w = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("hqk,hkd->hqd", np.nan_to_num(w / w.sum(-1, keepdims=True)), v.astype(np.float64))
    want_lse = np.where(seen.any(-1), np.log(w.sum(-1)) + s.max(-1), -np.inf)
  np.testing.assert_allclose(o.astype(np.float64), want, atol=2e-2)  # P is rounded to bf16
  np.testing.assert_allclose(lse, want_lse, atol=1e-4)


def test_a_large_matmul_traces_fast_and_is_not_unrolled():
  n = 4096
  a = jax.ShapeDtypeStruct((n, n), jnp.bfloat16)
  graph = traced(matmul_kernel, [a, a], [a], (n // 128, n // 256), bm=128, bn=256, bk=64)
  start = time.perf_counter()
  jaxpr = jax.make_jaxpr(lambda a, b: run(graph, a, b))(a, a)
  assert time.perf_counter() - start < 1
  assert str(jaxpr).count("dot_general") == 1
