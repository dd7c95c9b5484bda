"""Cases: loops, branches, tt.parallel, programs."""
from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

import tiletrace as tt
from tests.gpu.corpus import Case, case, f64, normal, on_a_gpu, out

BF16 = ml_dtypes.bfloat16


def fori_kernel(x, n, y, last):
  total, top = tt.fori_loop(0, n[...], lambda i, c: (c[0] + x[i, :], tt.maximum(c[1], i)), (tt.zeros((96,)), -1))
  y[...] = total
  last[...] = top


@case(n=(0, 1, 11))
def carried_tiles(rng, n):
  x = normal(rng, 20, 96)
  call = tt.tile_call(fori_kernel, out(((96,), np.float32), ((), np.int32)), grid=1)
  return Case(call, (x, np.int32(n)), (f64(x)[:n].sum(0), np.asarray(n - 1, np.int32)), ("reduce", "exact"))


def swap_kernel(x, y):
  a, b = tt.fori_loop(0, 5, lambda i, c: (c[1], c[0] + i), (x[0, :], x[1, :]))
  y[0, :], y[1, :] = a, b


@case
def a_carry_may_swap(rng):
  x = rng.integers(-9, 9, (2, 50), dtype=np.int32)
  a, b = x
  for i in range(5):
    a, b = b, a + i
  return Case(tt.tile_call(swap_kernel, out(((2, 50), np.int32)), grid=1), (x,), (np.stack([a, b]),), "exact")


def search_kernel(x, limit, y):
  """The first index whose running sum passes the limit."""
  def more(c):
    return (c[1] <= limit[...]) & (c[0] < x.shape[0])

  y[...] = tt.while_loop(more, lambda c: (c[0] + 1, c[1] + x[c[0]]), (0, 0.0))[0]


@case(limit=(-1, 10, 10**6))
def while_loops(rng, limit):
  x = rng.uniform(0.5, 1, 64).astype(np.float32)
  sums = np.concatenate([[0], np.cumsum(x)])
  want = next((i for i, s in enumerate(sums) if s > limit), 64)
  call = tt.tile_call(search_kernel, out(((), np.int32)), grid=1)
  return Case(call, (x, np.float32(limit)), (np.asarray(want, np.int32),), "exact")


def cond_kernel(x, y):
  i = tt.program_id(0)
  v = x[i, :]
  a, b = tt.cond(i % 2 == 0, lambda: (v * 2, i), lambda: (-v, i + 10))
  y[i, :] = a + b.astype(np.float32)


@case
def branches_with_results(rng):
  x = normal(rng, 5, 130)
  odd = np.arange(5)[:, None] % 2 == 1
  want = np.where(odd, -f64(x), f64(x) * 2) + np.arange(5)[:, None] + 10 * odd
  return Case(tt.tile_call(cond_kernel, out(((5, 130), np.float32)), grid=5), (x,), (want,), "elementwise")


def switch_kernel(x, which, y):
  i = tt.program_id(0)
  v = x[i, :]
  y[i, :] = tt.switch(which[i], (lambda: v, lambda: v * v, lambda: tt.abs(v) + 1))


@case
def switches_clamp(rng):
  x, which = normal(rng, 6, 40), np.asarray([-5, 0, 1, 2, 3, 99], np.int32)
  v = f64(x)
  want = np.stack([[v[i], v[i] ** 2, abs(v[i]) + 1][min(max(w, 0), 2)] for i, w in enumerate(which)])
  return Case(tt.tile_call(switch_kernel, out(((6, 40), np.float32)), grid=6), (x, which), (want,), "elementwise")


def when_kernel(x, y):
  i = tt.program_id(0)
  acc = tt.alloc_fragment((64,), np.float32)
  acc[...] = x[i, :]
  with tt.when(i > 0) as w:
    acc[...] += x[i - 1, :]
    with tt.when(i == 3):
      acc[...] *= 2
  with w.otherwise():
    acc[...] = acc[...] - 1
  y[i, :] = acc[...]


@case
def nested_branches(rng):
  x = normal(rng, 5, 64)
  v = f64(x)
  want = np.stack([v[0] - 1] + [(v[i] + v[i - 1]) * (2 if i == 3 else 1) for i in range(1, 5)])
  return Case(tt.tile_call(when_kernel, out(((5, 64), np.float32)), grid=5), (x,), (want,), "elementwise")


def uniform_shared_branch_kernel(x, y):
  """A branch that fills a shared buffer, and one that reads it."""
  i = tt.program_id(0)
  s = tt.alloc_shared((16, 32), x.dtype)
  s[...] = x[i, :, :]
  with tt.when(i % 2 == 1):
    s[...] = s[...] + 1
  y[i, :, :] = s.T[...]


@case
def shared_memory_in_a_branch(rng):
  x = rng.integers(-9, 9, (4, 16, 32), dtype=np.int32)
  call = tt.tile_call(uniform_shared_branch_kernel, out(((4, 32, 16), np.int32)), grid=4)
  return Case(call, (x,), ((x + np.arange(4, dtype=np.int32)[:, None, None] % 2).transpose(0, 2, 1),), "exact")


def nested_loops_kernel(x, y, *, lo, hi, step):
  total = tt.alloc_fragment((), np.int32)
  acc = tt.alloc_fragment((40,), np.int32)
  total[...] = 0
  acc[...] = 0
  for i in tt.range(lo, hi, step):
    for j in tt.range(i, i + 3):
      total[...] += i * 10 + j
      acc[...] += x[j, :]
  y[...] = acc[...] + total[...]


@case(bounds=((0, 10, 3), (9, 0, -4), (5, 5, 1), (6, 2, 1)))
def nested_loops(rng, bounds):
  x = rng.integers(-99, 99, (16, 40), dtype=np.int32)
  lo, hi, step = bounds
  acc, total = np.zeros(40, np.int32), 0
  for i in range(lo, hi, step):
    for j in range(i, i + 3):
      total, acc = total + i * 10 + j, acc + x[j]
  call = tt.tile_call(functools.partial(nested_loops_kernel, lo=lo, hi=hi, step=step), out(((40,), np.int32)), grid=1)
  return Case(call, (x,), (acc + np.int32(total),), "exact")


def snapshot_kernel(x, y, z):
  """A snapshot that outlives a later write keeps its value."""
  acc = tt.alloc_fragment((100,), np.float32)
  acc[...] = x[0, :]
  old = acc[...]
  acc[...] = old + x[1, :]
  y[...] = old
  z[...] = acc[...]


@case
def snapshots_outlive_writes(rng):
  x = normal(rng, 2, 100)
  call = tt.tile_call(snapshot_kernel, out(((100,), np.float32), ((100,), np.float32)), grid=1)
  return Case(call, (x,), (x[0], x[0] + x[1]), "exact")


def parallel_kernel(x, b, y, z):
  i0 = tt.program_id(0) * 16
  for i, j in tt.parallel(16, 24):
    y[i0 + i, j] = x[i0 + i, j] + b[j]
    z[j, i0 + i] = x[i0 + i, j]


@case
def parallel_indices(rng):
  x, b = normal(rng, 40, 24), normal(rng, 24)
  call = tt.tile_call(parallel_kernel, out(((40, 24), np.float32), ((24, 40), np.float32)), grid=3)
  return Case(call, (x, b), (x + b, x.T), "exact")


def programs_kernel(y):
  i, j, k = (tt.program_id(a) for a in range(3))
  y[i, j, k] = i * 10000 + j * 100 + k + tt.num_programs(0) * 10**6


@case(options=(("persistent", True), ("persistent", False), ("warpgroups", 3)))
def program_ids(rng, options):
  call = tt.tile_call(programs_kernel, out(((3, 70, 4), np.int32)), grid=(3, 70, 4), **dict([options]))
  i, j, k = np.ogrid[:3, :70, :4]
  return Case(call, (), ((i * 10000 + j * 100 + k + 3 * 10**6).astype(np.int32),), "exact")


def raster_kernel(y):
  i, j = tt.program_id(0), tt.program_id(1)
  y[i, j] = i * 1000 + j


@case(shape=((7, 5), (32, 9), (3, 1), (133, 3)))
def rasters(rng, shape):
  call = tt.tile_call(raster_kernel, out((shape, np.int32)), grid=shape, raster=4, persistent=True)
  i, j = np.ogrid[:shape[0], :shape[1]]
  return Case(call, (), ((i * 1000 + j).astype(np.int32),), "exact")


def persistent_rows_kernel(x, y):
  r = tt.block(tt.program_id(0), 2)
  s = tt.alloc_shared((2, 64), x.dtype)
  s[...] = x[r, :]
  acc = tt.alloc_fragment((2, 64), x.dtype)
  acc[...] = 1
  for k in tt.range(tt.program_id(0) % 3):
    acc[...] += s[...] * k
  y[r, :] = acc[...]


@case
def persistent_elementwise(rng):
  x = rng.integers(-9, 9, (700, 64), dtype=np.int32)
  call = tt.tile_call(persistent_rows_kernel, out(((700, 64), np.int32)), grid=350, persistent=True, warpgroups=2)
  trips = (np.arange(700) // 2 % 3)[:, None]
  return Case(call, (x,), ((1 + x * (trips * (trips - 1) // 2)).astype(np.int32),), "exact")


def blocks_by_data_kernel(a, b, limits, c):
  """A @ B over blocks [start, stop) of k: the start is a scalar that is loaded, the stop the element of a tile."""
  i = tt.program_id(0)
  a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 128), b.dtype)
  acc = tt.alloc_fragment((64, 128), np.float32)
  acc[...] = 0
  for k in tt.pipelined(limits[0, i], tt.take(limits[1, :], i), num_stages=3):
    tt.copy(a.at[tt.block(i, 64), tt.block(k, 64)], a_s)
    tt.copy(b.at[tt.block(k, 64), :], b_s)
    tt.gemm(a_s, b_s, acc)
  c[tt.block(i, 64), :] = acc[...]


@case(options=(("persistent", True), ("persistent", "dynamic"), ("persistent", False), ("warpgroups", 2)))
def trip_counts_by_data(rng, options):
  key, value = options
  most = 150 if key == "persistent" else 12
  rows = min(most, on_a_gpu(150, 16))
  a, b = (normal(rng, *s, dtype=BF16) for s in ((64 * rows, 512), (512, 128)))
  limits = np.sort(rng.integers(0, 9, (2, most), dtype=np.int32), axis=0)[:, rng.permutation(most)]
  wide, b64 = f64(a), f64(b)
  want = np.concatenate([wide[64 * i:64 * i + 64, 64 * lo:64 * hi] @ b64[64 * lo:64 * hi]
                         for i, (lo, hi) in enumerate(limits.T[:rows])])
  call = tt.tile_call(blocks_by_data_kernel, out(((64 * rows, 128), np.float32)), grid=rows, **{key: value})
  return Case(call, (a, b, limits), (want,), "gemm")


def while_around_kernel(x, y, steps):
  """Halves the stride until it is 0, with a ring around each pass; a branch says which half of x."""
  s = tt.alloc_shared((32, 64), x.dtype)
  total = tt.alloc_fragment((32, 64), np.float32)
  total[...] = 0

  def body(c):
    stride, n = c
    for k in tt.pipelined(0, 8, num_stages=2):
      at = tt.cond(stride % 2 == 0, lambda k: k, lambda k: k + 8, k)
      tt.copy(x.at[tt.block(at, 32), :], s)
      total[...] += s[...] * stride.astype(np.float32)
    return stride // 2, n + 1

  steps[...] = tt.while_loop(lambda c: c[0] > 0, body, (tt.program_id(0) + 6, 0))[1]
  y[...] = total[...]


@case
def rings_in_a_while_loop(rng):
  x = rng.integers(-9, 9, (512, 64)).astype(np.float32)
  halves = x.reshape(2, 8, 32, 64).sum(1)
  want = sum(halves[s % 2] * s for s in (6, 3, 1))
  call = tt.tile_call(while_around_kernel, out(((32, 64), np.float32), ((), np.int32)), grid=1)
  return Case(call, (x,), (want.astype(np.float32), np.asarray(3, np.int32)), "exact")


def take_kernel(x, at, rows, columns):
  i = tt.program_id(0)
  rows[i, :] = tt.take(x[...], at[i])
  columns[i, :] = tt.take(x[...], at[i], axis=1)


@case(dtype=("float32", "int32", "bfloat16"))
def takes(rng, dtype):
  x = (normal(rng, 48, 72) * 100).astype(BF16 if dtype == "bfloat16" else dtype)
  at = np.asarray([0, 17, 47, 60, -3], np.int32)                            # clamped
  call = tt.tile_call(take_kernel, out(((5, 72), x.dtype), ((5, 48), x.dtype)), grid=5, warpgroups=2)
  return Case(call, (x, at), (x[at.clip(0, 47)], x[:, at.clip(0, 71)].T), "exact")


def ragged_sums_kernel(x, n, y):
  """The sum of the first n[i] rows."""
  i = tt.program_id(0)
  total = tt.alloc_fragment((x.shape[1],), np.float32)
  total[...] = 0
  for k in tt.range(n[i]):
    total[...] += x[k, :]
  y[i, :] = total[...]


@case(programs=(1, 300))
def ragged_sums_that_take_their_programs(rng, programs):
  programs = min(programs, on_a_gpu(300, 20))
  x, n = normal(rng, 40, 96), rng.integers(0, 41, programs, dtype=np.int32)
  sums = np.concatenate([np.zeros((1, 96)), np.cumsum(f64(x), axis=0)])
  call = tt.tile_call(ragged_sums_kernel, out(((programs, 96), np.float32)), grid=programs, persistent="dynamic")
  return Case(call, (x, n), (sums[n],), "reduce")
