"""Cases: the functions of tiletrace.kernels, at sizes that take each of their plans."""
from __future__ import annotations

import itertools
import math

import numpy as np

from tests.gpu.corpus import Case, case, f64, normal, on_a_gpu
from tests.gpu.corpus_elementwise import DTYPES
from tiletrace.kernels.flash_attention import AttentionRule, AttentionTiling, packed_attention_call
from tiletrace.kernels.grouped_matmul import choose_tiling, grouped_matmul_call, plan
from tiletrace.kernels.layer_norm import layer_norm_call
from tiletrace.kernels.rms_norm import rms_norm_call
from tiletrace.kernels.softmax import group_mask, grouped_softmax_call, softmax_backward_call, softmax_call

# Few rows; rows that share a warp, a CTA; odd widths; a row over many warps; rows read in parts.
SIZES = ((5, 320), (100, 1), (33, 7), (9, 777), (3, 4096), (2, 16384), (2, 24576), (1, 40001))
FULL = ((22011, 96), (6560, 320), (2101, 1000), (260, 8192), (130, 16384))    # enough to fill a GPU


def sized(shape):
  """On the simulator, fewer rows of those that fill a GPU."""
  return on_a_gpu(shape, (11, shape[1])) if shape in FULL else shape


def silu(x):
  return x / (1 + np.exp(-x))


def normed(h, gamma, eps=1e-6):
  return h / np.sqrt((h * h).mean(1, keepdims=True) + eps) * gamma


@case(shape=SIZES + FULL)
def rms_norm(rng, shape):
  shape = sized(shape)
  x, gamma = normal(rng, *shape, dtype=DTYPES["bf16"]), normal(rng, shape[1], dtype=DTYPES["bf16"])
  return Case(rms_norm_call(shape, x.dtype), (x, gamma, None, None), (normed(f64(x), f64(gamma)),), "elementwise")


@case(dtype=("bf16", "f16", "f32"))
def rms_norm_of_everything(rng, dtype):
  shape = 37, 640
  x, r, g = (normal(rng, *shape, dtype=DTYPES[dtype]) for _ in range(3))
  gamma = normal(rng, 640)
  call = rms_norm_call(shape, x.dtype, residual=True, gate=True, silu=True, eps=1e-3)
  h = f64(x) + f64(r)
  return Case(call, (x, gamma, r, g), (silu(normed(h, f64(gamma), 1e-3)) * silu(f64(g)), h), "elementwise")


@case(shape=((11, 7), (9, 777), (5, 8192), (1, 24576), *FULL[2:]))
def rms_norm_gate(rng, shape):
  shape = sized(shape)
  x, g = (normal(rng, *shape, dtype=DTYPES["bf16"]) for _ in range(2))
  return Case(rms_norm_call(shape, x.dtype, gate=True), (x, None, None, g), (normed(f64(x), 1) * silu(f64(g)),),
              "elementwise")


@case(shape=SIZES + FULL[1:4])
def layer_norm(rng, shape):
  shape = sized(shape)
  x, gamma, beta = normal(rng, *shape) * 2 + np.float32(7), normal(rng, shape[1]), normal(rng, shape[1])
  d = f64(x) - f64(x).mean(1, keepdims=True)
  want = d / np.sqrt((d * d).mean(1, keepdims=True) + 1e-3) * f64(gamma) + f64(beta)
  return Case(layer_norm_call(shape, x.dtype, eps=1e-3), (x, gamma, beta), (want,), "reduce")


def softmax_of(x, where=True):
  s = np.where(where, f64(x), -np.inf)
  top = s.max(1, keepdims=True)
  e = np.exp(s - np.where(np.isfinite(top), top, 0))
  return e / np.maximum(e.sum(1, keepdims=True), 1e-30)


@case(shape=SIZES + FULL)
def softmax_rows(rng, shape):
  shape = sized(shape)
  x = (normal(rng, *shape) * 3).astype(DTYPES["bf16"])
  return Case(softmax_call(shape, x.dtype), (x, None), (softmax_of(x),), "elementwise")


@case(shape=((5, 320), (33, 7), (9, 777), (4, 24576)))
def softmax_masked(rng, shape):
  """Rows that see little, nothing, and, in the widest, nothing of their first part."""
  x = normal(rng, *shape) * 3
  mask = rng.random(shape) < 0.3
  mask[1], mask[2, :math.ceil(0.8 * shape[1])] = False, False
  return Case(softmax_call(shape, x.dtype), (x, mask), (softmax_of(x, mask),), "elementwise")


@case(shape=((2, 3, 40, 33), (3, 2, 7, 777), (2, 2, 3, 24576)))
def softmax_grouped(rng, shape):
  """x[batch, head, query, key] with a mask for all heads, a mask of keys, one of queries."""
  x, (b, _, q, k) = normal(rng, *shape) * 3, shape
  own = {33: (b, 1, q, k), 777: (b, 1, 1, k), 24576: (1, 1, q, 1)}[k]
  groups = group_mask(shape, 3, own)
  mask = rng.random(groups.mask) < 0.4
  want = softmax_of(x.reshape(-1, k), np.broadcast_to(mask.reshape(own), shape).reshape(-1, k))
  return Case(grouped_softmax_call(groups, x.dtype), (x.reshape(groups.shape), mask), (want.reshape(groups.shape),),
              "elementwise")


@case(shape=((33, 7), (9, 777), (3, 4096), (2, 24576), *FULL[2:4]))
def softmax_backward(rng, shape):
  shape = sized(shape)
  y, dy = softmax_of(normal(rng, *shape)).astype(np.float32) * np.float32(shape[1]), normal(rng, *shape)
  want = f64(y) * (f64(dy) - (f64(y) * f64(dy)).sum(1, keepdims=True))
  return Case(softmax_backward_call(shape, y.dtype), (y, dy), (want,), "reduce")


@case(sizes=((128, 128), (70, 1, 129, 100), (0, 0, 150, 0, 50, 0), (30, 65), (0, 0, 0), (900,), (3,) * 70))
def grouped_matmul(rng, sizes):
  """40 rows of no group; 328 columns."""
  m, k, n = sum(sizes) + 40, 192, on_a_gpu(328, 200) if len(sizes) > 64 else 328
  x, w = normal(rng, m, k, dtype=DTYPES["bf16"]), normal(rng, len(sizes), k, n, dtype=DTYPES["bf16"])
  want, row = np.zeros((m, n)), 0
  for g, size in enumerate(sizes):
    want[row:row + size] = f64(x)[row:row + size] @ f64(w)[g]
    row += size
  return Case(grouped_matmul_call(m, w.shape, x.dtype), (x, w, np.asarray(sizes, np.int32)), (want,), "gemm")


@case(sizes=((128, 128), (70, 1, 129, 100), (0, 0, 150, 0, 50, 0), (0, 0, 0), (900,)))
def grouped_matmul_planned(rng, sizes):
  """Persistent programs by a plan: results leave by TMA, with the next tile's products in flight."""
  m, k, n = sum(sizes) + 40, 192, 328
  x, w = normal(rng, m, k, dtype=DTYPES["bf16"]), normal(rng, len(sizes), k, n, dtype=DTYPES["bf16"])
  want, row = np.zeros((m, n)), 0
  for g, size in enumerate(sizes):
    want[row:row + size] = f64(x)[row:row + size] @ f64(w)[g]
    row += size
  sizes = np.asarray(sizes, np.int32)
  tiles = np.asarray(plan(sizes, m, choose_tiling(m, n, len(sizes)).bm))
  return Case(grouped_matmul_call(m, w.shape, x.dtype, planned=True), (x, w, sizes, tiles), (want,), "gemm")


@case(starts=((0, 200), (0, 70, 70, 71, 190), (0, 130, 300)))
def packed_attention(rng, starts):
  """Rows that no sequence has are infinite: neither read nor written."""
  t, n, h = starts[-1] + 30, 2, 64
  q, k, v = (normal(rng, t, n, h, dtype=DTYPES["bf16"]) for _ in range(3))
  want = np.full((t, n, h), np.nan)
  for a, b in itertools.pairwise(starts):
    logits = np.einsum("qnh,knh->nqk", f64(q)[a:b], f64(k)[a:b]) / 8
    logits[:, np.triu(np.ones((b - a, b - a), bool), 1)] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True, initial=-1e30))
    want[a:b] = np.einsum("nqk,knh->qnh", p / p.sum(-1, keepdims=True), f64(v)[a:b])
  v[starts[-1]:] = np.inf
  longest = max(b - a for a, b in itertools.pairwise(starts))
  call = packed_attention_call(q.shape, k.shape, len(starts) - 1, longest, q.dtype, AttentionTiling(128, 64, 2, 2),
                               AttentionRule(0.125, None, 0, 0, None))
  starts = np.asarray(starts, np.int32)
  return Case(call, (q, k, v, starts, starts), (want,), "gemm")
