"""Cases: loops whose copies TMA cannot take, made by the threads of a producer warpgroup."""
from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

import tiletrace as tt
from tests.gpu.corpus import Case, case, f64, normal, on_a_gpu, out
from tests.gpu.corpus_gemm import attention_like_kernel, matmul

BF16, F32 = ml_dtypes.bfloat16, np.float32


@case(shape=((200, 333, 777), (129, 257, 65), (1, 1, 1), (128, 129, 63), (257, 131, 400), (384, 77, 1025)))
def tails_of_2_bytes(rng, shape):
  m, n, k = shape
  return matmul(rng, on_a_gpu(m, m - 128) if m > 256 else m, n, k, bn=256, num_stages=4)


@case(shape=((520, 521, 333), (640, 513, 191), (300, 3, 640)))
def tails_of_2_bytes_persistent(rng, shape):
  """Slots and phases run on from tile to tile."""
  m, n, k = shape
  m, n = (m, n) if n < 128 else on_a_gpu((m, n), (m % 128 + 256, n % 128 + 256))
  return matmul(rng, m, n, k, persistent=True, raster=4, num_stages=4)


@case(form=("nn", "nt", "tn", "tt"))
def tails_in_every_form(rng, form):
  return matmul(rng, 203, on_a_gpu(301, 173), 455, form=form, num_stages=3)


@case(shape=((200, 264, 777), (200, 777, 264)))
def tails_beside_tma(rng, shape):
  """One operand by TMA, the other by threads: a phase has an arrival of each."""
  m, n, k = shape
  return matmul(rng, m, on_a_gpu(n, 265) if n > 265 else n, k, num_stages=3, persistent=True)


@case(depth=(0, 2, 64, 126, 130, 190, 194, 322, 962))
def tails_of_4_bytes(rng, depth):
  """cp.async arrives late: no iteration, fewer than slots, more."""
  return matmul(rng, 200, 330, depth, num_stages=4, persistent=True)


@case(stages=(1, 2, 3, 4, 6))
def tails_by_stages(rng, stages):
  return matmul(rng, 130, on_a_gpu(202, 138), 454, bn=64, num_stages=stages, persistent=True)


@case(stages=(1, 2, 3, 5))
def tails_of_2_bytes_by_stages(rng, stages):
  return matmul(rng, 130, on_a_gpu(203, 139), 453, bn=64, num_stages=stages, persistent=True)


@case(groups=((1, 64), (1, 128), (2, 128), (3, 192)))
def tails_by_warpgroups(rng, groups):
  warpgroups, bm = groups
  return matmul(rng, *on_a_gpu((2 * bm + 1, 137), (bm + 1, 73)), 195, bm=bm, bn=64, warpgroups=warpgroups, num_stages=3)


@case(dtype=(np.float16, BF16))
def tails_of_4_and_2_bytes(rng, dtype):
  """A by cp.async, B element by element, into one ring."""
  return matmul(rng, 200, 333, 454, dtype=dtype, to=F32, num_stages=4, persistent=True)


@case(widths=((64, 61), (62, 64), (62, 58), (61, 59)))
def two_rings_by_threads(rng, widths):
  """Filled by threads, in one loop."""
  d, dv = widths
  q, k = normal(rng, 200, d, dtype=BF16), normal(rng, 300, d, dtype=BF16)
  v = normal(rng, 300, dv, dtype=BF16)

  def kernel(q, k, v, o):
    attention_like_kernel(*(x.at[:, tt.ds(0, 64)] for x in (q, k, v, o)), bn=96, num_stages=3)

  call = tt.tile_call(kernel, out(((200, dv), BF16)), grid=2, warpgroups=2)
  s = np.maximum(f64(q) @ f64(k).T * 0.125, 0)
  return Case(call, (q, k, v), (f64(s.astype(BF16)) @ f64(v),), "gemm")


def window_kernel(x, bounds, y, *, fill, num_stages):
  """Blocks of rows of a view that ends where it says, past it `fill`."""
  i = tt.program_id(0)
  rows = x.at[tt.ds(bounds[0], bounds[1]), :]
  s = tt.alloc_shared((16, 64), x.dtype)
  acc = tt.alloc_fragment((16, 64), F32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(x.shape[1], 64), num_stages=num_stages):
    tt.copy(rows.at[tt.block(i, 16), tt.block(k, 64)], s, fill_value=fill)
    acc[...] += s[...].astype(F32)
  y[tt.block(i, 16), :] = acc[...]


@case(bounds=((3, 30), (0, 0), (17, 1), (-2, 20), (30, 40)))
def views_with_edges_in_a_ring(rng, bounds):
  x = normal(rng, 40, 200, dtype=BF16)
  call = tt.tile_call(functools.partial(window_kernel, fill=1.5, num_stages=3), out(((32, 64), F32)), grid=2)
  start, size = bounds
  padded = np.full((32, 256), 1.5)
  for r in range(32):
    if r < size and 0 <= start + r < 40:
      padded[r, :200] = f64(x)[start + r]
  return Case(call, (x, np.asarray(bounds, np.int32)), (padded.reshape(32, 4, 64).sum(1),), "reduce")


def every_third_kernel(x, y):
  i = tt.program_id(0)
  s = tt.alloc_shared((8, 32), x.dtype)
  acc = tt.alloc_fragment((8, 32), F32)
  acc[...] = 0
  for k in tt.pipelined(4, num_stages=2):
    tt.copy(x.at[tt.ds(i * 24, 8, stride=3), tt.block(k, 32)], s)
    acc[...] += s[...].astype(F32) * (k + 1).astype(F32)
  y[tt.block(i, 8), :] = acc[...]


@case(dtype=(np.float32, BF16, np.int32))
def strided_views_in_a_ring(rng, dtype):
  x = (normal(rng, 50, 120) * 9).astype(dtype)
  call = tt.tile_call(every_third_kernel, out(((17, 32), F32)), grid=3)
  padded = np.zeros((24, 128))
  padded[:17, :120] = f64(x)[::3]
  return Case(call, (x,), ((padded.reshape(24, 4, 32) * np.arange(1, 5)[:, None]).sum(1)[:17],), "reduce")
