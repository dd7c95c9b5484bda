"""Cases: matrix products in every form."""
from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np

import tiletrace as tt
from tests.gpu.corpus import Case, case, f64, normal, on_a_gpu, out

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32


def matmul_kernel(a, b, c, *, bm, bn, bk, num_stages, trans_a, trans_b, policy):
  """C = A @ B where A is stored [K, M] if trans_a, and B is stored [N, K] if trans_b."""
  i, j = tt.program_id(0), tt.program_id(1)
  a_s = tt.alloc_shared((bk, bm) if trans_a else (bm, bk), a.dtype)
  b_s = tt.alloc_shared((bn, bk) if trans_b else (bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), F32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[0 if trans_a else 1], bk), num_stages=num_stages):
    rows, inner, cols = tt.block(i, bm), tt.block(k, bk), tt.block(j, bn)
    tt.copy(a.at[inner, rows] if trans_a else a.at[rows, inner], a_s)
    tt.copy(b.at[cols, inner] if trans_b else b.at[inner, cols], b_s)
    tt.gemm(a_s.T if trans_a else a_s, b_s.T if trans_b else b_s, acc, policy=policy)
  c[tt.block(i, bm), tt.block(j, bn)] = tt.maximum(acc[...], 0).astype(c.dtype)


def matmul(rng, m, n, k, *, bm=128, bn=128, bk=64, num_stages=3, form="nn", dtype=BF16, to=None, policy=None,
           **options) -> Case:
  a, b = normal(rng, m, k, dtype=dtype), normal(rng, k, n, dtype=dtype)
  kernel = functools.partial(matmul_kernel, bm=bm, bn=bn, bk=bk, num_stages=num_stages, trans_a=form[0] == "t",
                             trans_b=form[1] == "t", policy=policy)
  options = dict(warpgroups=2) | options
  call = tt.tile_call(kernel, out(((m, n), to or dtype)), grid=(tt.cdiv(m, bm), tt.cdiv(n, bn)), **options)
  stored = (np.ascontiguousarray(a.T) if form[0] == "t" else a, np.ascontiguousarray(b.T) if form[1] == "t" else b)
  return Case(call, stored, (np.maximum(f64(a) @ f64(b), 0),), "gemm")


@case(form=("nn", "nt", "tn", "tt"))
def matmul_forms(rng, form):
  return matmul(rng, 200, 264, 136, form=form)


@case(form=("nn", "nt", "tn", "tt"))
def matmul_forms_f16_f32(rng, form):
  return matmul(rng, 136, 72, 200, bn=64, bk=32, form=form, dtype=F16, to=F32)


@case(form=("nn", "tt"))
def matmul_persistent(rng, form):
  return matmul(rng, 600, 776, 336, form=form, bn=128, persistent=True, raster=4)


@case(shape=((13, 8, 24), (700, 904, 136), (128, 256, 0)))
def matmul_that_takes_its_tiles(rng, shape):
  shape = on_a_gpu(shape, (316, 328, 136)) if shape == (700, 904, 136) else shape
  return matmul(rng, *shape, bm=64, bn=64, warpgroups=1, persistent="dynamic", raster=4)


@case
def matmul_by_threads_that_takes_its_tiles(rng):
  return matmul(rng, *on_a_gpu((650, 645), (138, 261)), 70, bm=64, bn=64, warpgroups=1, to=F32, persistent="dynamic")


@case(shape=((13, 8, 24), (1000, 776, 336), (128, 256, 0), (1, 8, 8), (300, 512, 64)))
def matmul_tails(rng, shape):
  shape = on_a_gpu(shape, (1000, 264, 336)) if shape[0] == 1000 else shape
  return matmul(rng, *shape, bn=256, num_stages=4, persistent=True, raster=8)


@case(bn=(8, 24, 40, 96, 176, 256))
def matmul_widths(rng, bn):
  return matmul(rng, 128, 2 * bn, 128, bn=bn)


@case(bn=(24, 96, 176))
def matmul_widths_transposed(rng, bn):
  return matmul(rng, 128, 2 * bn, 128, bn=bn, form="tt", to=F32)


@case(groups=((1, 64), (1, 128), (2, 128), (2, 256), (3, 192), (4, 256)))
def matmul_warpgroups(rng, groups):
  warpgroups, bm = groups
  return matmul(rng, 2 * bm, 136, 192, bm=bm, bn=64, warpgroups=warpgroups)


@case(policy=("FULL_ROW", "FULL_COL", "SQUARE"))
def matmul_policies(rng, policy):
  return matmul(rng, 256, 256, 128, policy=getattr(tt, policy))


@case(stages=(1, 2, 5))
def matmul_stages(rng, stages):
  return matmul(rng, 128, 128, 520, num_stages=stages)


@case(bk=(16, 32, 128))
def matmul_depths(rng, bk):
  return matmul(rng, 128, 128, 264, bk=bk, num_stages=2)


@case(shape=((40, 777, 64), (33, 40, 77), (100, 333, 777)))
def matmul_rows_tma_cannot_take(rng, shape):
  return matmul(rng, *shape)


@case(shape=((40, 777, 64), (100, 333, 777)))
def matmul_rows_tma_cannot_take_persistent(rng, shape):
  return matmul(rng, *shape, bn=64, persistent=True, form="nt")


def register_a_kernel(a, b, c, *, bk):
  """A is scaled in registers on its way."""
  i = tt.program_id(0)
  a_s = tt.alloc_shared((128, bk), a.dtype)
  b_s = tt.alloc_shared((bk, 64), b.dtype)
  acc = tt.alloc_fragment((128, 64), F32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], bk), num_stages=2):
    tt.copy(a.at[tt.block(i, 128), tt.block(k, bk)], a_s)
    tt.copy(b.at[tt.block(k, bk), :], b_s)
    tt.gemm(a_s[...] * 2, b_s, acc)
  c[tt.block(i, 128), :] = acc[...]


@case(warpgroups=(1, 2))
def a_operand_in_registers(rng, warpgroups):
  a, b = normal(rng, 200, 192, dtype=BF16), normal(rng, 192, 64, dtype=BF16)
  call = tt.tile_call(functools.partial(register_a_kernel, bk=64), out(((200, 64), F32)), grid=2, warpgroups=warpgroups)
  return Case(call, (a, b), (2 * f64(a) @ f64(b),), "gemm")


def straight_kernel(a, b, c):
  a_s = tt.alloc_shared((64, 64), a.dtype)
  b_s = tt.alloc_shared((64, 96), b.dtype)
  acc = tt.alloc_fragment((64, 96), F32)
  tt.copy(a.at[...], a_s)
  tt.copy(b.at[...], b_s)
  tt.gemm(a_s, b_s, acc, accumulate=False)
  c[...] = acc[...]


@case
def gemm_without_a_loop(rng):
  a, b = normal(rng, 64, 64, dtype=BF16), normal(rng, 64, 96, dtype=BF16)
  return Case(tt.tile_call(straight_kernel, out(((64, 96), F32)), grid=1), (a, b), (f64(a) @ f64(b),), "gemm")


def generic_kernel(a, b, c):
  """Operands written by threads, not by copies: the async proxy needs a fence."""
  a_s = tt.alloc_shared((64, 64), a.dtype)
  b_s = tt.alloc_shared((64, 32), b.dtype)
  acc = tt.alloc_fragment((64, 32), F32)
  acc[...] = 0
  for k in tt.range(3):
    a_s[...] = a[:, tt.block(k, 64)] * 2
    b_s[...] = b[tt.block(k, 64), :] + 1
    tt.gemm(a_s, b_s, acc)
  c[...] = acc[...]


@case
def operands_written_by_threads(rng):
  a = rng.integers(-4, 4, (64, 192)).astype(BF16)
  b = rng.integers(-4, 4, (192, 32)).astype(BF16)
  call = tt.tile_call(generic_kernel, out(((64, 32), F32)), grid=1)
  return Case(call, (a, b), (2 * f64(a) @ (f64(b) + 1),), "gemm")


def two_gemms_kernel(a, b, d, c):
  """C = (A B1 + A B2) and A B1 read between them."""
  a_s = tt.alloc_shared((64, 64), a.dtype)
  b_s = tt.alloc_shared((64, 64), b.dtype)
  d_s = tt.alloc_shared((64, 64), d.dtype)
  acc = tt.alloc_fragment((64, 64), F32)
  s = tt.alloc_fragment((64, 64), F32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], 64), num_stages=2):
    tt.copy(a.at[:, tt.block(k, 64)], a_s)
    tt.copy(b.at[tt.block(k, 64), :], b_s)
    tt.copy(d.at[tt.block(k, 64), :], d_s)
    tt.gemm(a_s, b_s, s, accumulate=False)
    acc[...] = acc[...] * 0.5 + tt.maximum(s[...], 0)
    tt.gemm(a_s, d_s, acc)
  c[...] = acc[...]


@case
def two_gemms_in_a_loop(rng):
  a, b, d = (normal(rng, *s, dtype=BF16) for s in ((64, 200), (200, 64), (200, 64)))
  call = tt.tile_call(two_gemms_kernel, out(((64, 64), F32)), grid=1)
  acc = np.zeros((64, 64))
  for k in range(0, 200, 64):
    x = f64(a)[:, k:k + 64]
    acc = acc * 0.5 + np.maximum(x @ f64(b)[k:k + 64], 0) + x @ f64(d)[k:k + 64]
  return Case(call, (a, b, d), (acc,), "gemm")


def attention_like_kernel(q, k, v, o, *, bn, bm=128, num_stages=2, policy=None):
  """O = relu(Q K^T) V: the first product is the second one's operand in registers."""
  i = tt.program_id(0)
  q_s = tt.alloc_shared((bm, 64), q.dtype)
  k_s = tt.alloc_shared((bn, 64), k.dtype)
  v_s = tt.alloc_shared((bn, 64), v.dtype)
  s = tt.alloc_fragment((bm, bn), F32)
  acc = tt.alloc_fragment((bm, 64), F32)
  acc[...] = 0
  tt.copy(q.at[tt.block(i, bm), :], q_s)
  for j in tt.pipelined(tt.cdiv(k.shape[0], bn), num_stages=num_stages):
    tt.copy(k.at[tt.block(j, bn), :], k_s)
    tt.copy(v.at[tt.block(j, bn), :], v_s)
    tt.gemm(q_s, k_s.T, s, accumulate=False, policy=policy)
    p = tt.maximum(s[...] * 0.125, 0).astype(v.dtype)
    tt.gemm(p, v_s, acc, policy=policy)
  o[tt.block(i, bm), :] = acc[...].astype(o.dtype)


@case(split=((1, "FULL_ROW"), (2, "FULL_ROW"), (4, "FULL_ROW"), (2, "FULL_COL"), (4, "FULL_COL"), (4, "SQUARE")))
def a_product_of_a_product(rng, split):
  """Rows, columns, or both shared out among one, two or four warpgroups."""
  warpgroups, policy = split
  bm = {"FULL_ROW": max(128, 64 * warpgroups), "FULL_COL": 64, "SQUARE": 128}[policy]
  q, k, v = (normal(rng, n, 64, dtype=BF16) for n in (200, 300, 300))
  call = tt.tile_call(functools.partial(attention_like_kernel, bm=bm, bn=96, policy=getattr(tt, policy)),
                      out(((200, 64), BF16)), grid=tt.cdiv(200, bm), warpgroups=warpgroups)
  s = np.maximum(f64(q) @ f64(k).T * 0.125, 0)
  return Case(call, (q, k, v), (f64(s.astype(BF16)) @ f64(v),), "gemm")


def batched_kernel(a, b, bias, c):
  g, i = tt.program_id(0), tt.program_id(1)
  a_s = tt.alloc_shared((64, 64), a.dtype)
  b_s = tt.alloc_shared((64, 72), b.dtype)
  acc = tt.alloc_fragment((64, 72), F32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[2], 64), num_stages=3):
    tt.copy(a.at[g, tt.block(i, 64), tt.block(k, 64)], a_s)
    tt.copy(b.at[g, tt.block(k, 64), :], b_s)
    tt.gemm(a_s, b_s, acc)
  y = acc[...] + bias[None, :].astype(F32)
  c[g, tt.block(i, 64), :] = (y * tt.sigmoid(y)).astype(c.dtype)


@case
def batches_with_an_epilogue(rng):
  a, b, bias = normal(rng, 3, 100, 160, dtype=F16), normal(rng, 3, 160, 72, dtype=F16), normal(rng, 72, dtype=F16)
  call = tt.tile_call(batched_kernel, out(((3, 100, 72), F16)), grid=(3, 2))
  y = f64(a) @ f64(b) + f64(bias)
  return Case(call, (a, b, bias), (y / (1 + np.exp(-y)),), "gemm")


def ragged_kernel(x, w, bounds, y):
  """The rows of one group: the tile overhangs the group, not the array."""
  i = tt.program_id(0)
  start, size = bounds[0], bounds[1]
  x_g, y_g = x.at[tt.ds(start, size), :], y.at[tt.ds(start, size), :]
  x_s = tt.alloc_shared((64, 64), x.dtype)
  w_s = tt.alloc_shared((64, 64), w.dtype)
  acc = tt.alloc_fragment((64, 64), F32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(x.shape[1], 64), num_stages=2):
    tt.copy(x_g.at[tt.block(i, 64), tt.block(k, 64)], x_s)
    tt.copy(w.at[tt.block(k, 64), :], w_s)
    tt.gemm(x_s, w_s, acc)
  y_g[tt.block(i, 64), :] = acc[...].astype(y.dtype)


@case(bounds=((30, 70), (0, 1), (100, 28)))
def ragged_groups(rng, bounds):
  x, w, old = (normal(rng, *s, dtype=BF16) for s in ((128, 128), (128, 64), (128, 64)))

  def kernel(old, x, w, bounds, y):
    ragged_kernel(x, w, bounds, y)

  call = tt.tile_call(kernel, out(((128, 64), BF16)), grid=2, input_output_aliases={0: 0})
  start, size = bounds
  want = f64(old)
  want[start:start + size] = f64(x)[start:start + size] @ f64(w)
  return Case(call, (old, x, w, np.asarray(bounds, np.int32)), (want,), "gemm")


def scores_kernel(q, k, y):
  """Products whose accumulator is used by an elementwise chain with row and column indices (a causal mask)."""
  i, j = tt.program_id(0), tt.program_id(1)
  q_s = tt.alloc_shared((64, 64), q.dtype)
  k_s = tt.alloc_shared((64, 64), k.dtype)
  s = tt.alloc_fragment((64, 64), F32)
  tt.copy(q.at[tt.block(i, 64), :], q_s)
  tt.copy(k.at[tt.block(j, 64), :], k_s)
  tt.gemm(q_s, k_s.T, s, accumulate=False)
  rows, cols = i * 64 + tt.arange(64), j * 64 + tt.arange(64)
  seen = cols[None, :] <= rows[:, None]
  y[tt.block(i, 64), tt.block(j, 64)] = tt.where(seen, s[...] * (1 / math.sqrt(64)), -100.0)


@case
def masked_scores(rng):
  q, k = normal(rng, 130, 64, dtype=BF16), normal(rng, 130, 64, dtype=BF16)
  call = tt.tile_call(scores_kernel, out(((130, 130), F32)), grid=(3, 3))
  rows, cols = np.ogrid[:130, :130]
  want = np.where(cols <= rows, f64(q) @ f64(k).T / 8, -100.0)
  return Case(call, (q, k), (want,), "gemm")
