"""Cases: loads, stores, views, masks, shared memory, odd shapes."""
from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

import tiletrace as tt
from tests.gpu.corpus import Case, case, f64, normal, on_a_gpu, out
from tests.gpu.corpus_elementwise import DTYPES


def double_kernel(x, y, *, block):
  r = tt.block(tt.program_id(0), block)
  y[r] = x[r] + x[r]


@case(n=(1, 7, 33, 100, 1000, 4096))
def vectors(rng, n):
  x = normal(rng, n)
  call = tt.tile_call(functools.partial(double_kernel, block=256), out(((n,), np.float32)), grid=tt.cdiv(n, 256))
  return Case(call, (x,), (x + x,), "exact")


@case(block=(1, 2, 3, 24, 100, 1000))
def block_sizes_without_divisibility(rng, block):
  x = rng.integers(-9, 9, 1111, dtype=np.int32)
  call = tt.tile_call(functools.partial(double_kernel, block=block), out(((1111,), np.int32)),
                      grid=tt.cdiv(1111, block))
  return Case(call, (x,), (x + x,), "exact")


def identity_kernel(x, y, *, bm, bn):
  at = tt.block(tt.program_id(0), bm), tt.block(tt.program_id(1), bn)
  y[at] = x[at]


def fetched_kernel(x, y, *, bm, bn):
  at = tt.block(tt.program_id(0), bm), tt.block(tt.program_id(1), bn)
  tt.prefetch(x.at[at])
  s = tt.alloc_shared((bm, bn), x.dtype)
  for _ in tt.pipelined(2, num_stages=2):
    tt.copy(x.at[at], s)
    y[at] = s[...]


@case(blocks=((16, 128), (16, 64), (9, 128), (16, 48)))
def prefetches(rng, blocks):
  """Whole rows, parts of them, rows that lie outside, and columns, of which nothing is fetched."""
  bm, bn = blocks
  x = normal(rng, 40, 128)
  call = tt.tile_call(functools.partial(fetched_kernel, bm=bm, bn=bn), out((x.shape, x.dtype)),
                      grid=(tt.cdiv(40, bm), tt.cdiv(128, bn)), options=tt.CompileOptions(overlap_launch=True))
  return Case(call, (x,), (x,), "exact")


@case(dtype=("f32", "bf16", "f16", "i32", "bool"))
def tails(rng, dtype):
  x = normal(rng, 33, 100) > 0 if dtype == "bool" else (normal(rng, 33, 100) * 99).astype(DTYPES[dtype])
  call = tt.tile_call(functools.partial(identity_kernel, bm=16, bn=64), out((x.shape, x.dtype)), grid=(3, 2))
  return Case(call, (x,), (x,), "exact")


@case(shape=((9, 777), (1000, 3), (1, 1), (7, 131), (130, 264)))
def rows_of_16_bits(rng, shape):
  """Rows that are 2-byte aligned only, and rows that TMA and vectors can take."""
  x = normal(rng, *shape, dtype=ml_dtypes.bfloat16)
  call = tt.tile_call(functools.partial(identity_kernel, bm=8, bn=128), out((x.shape, x.dtype)),
                      grid=(tt.cdiv(shape[0], 8), tt.cdiv(shape[1], 128)), warpgroups=2)
  return Case(call, (x,), (x,), "exact")


@case(blocks=((3, 5), (7, 24), (33, 100), (1, 3), (12, 96)))
def odd_tiles(rng, blocks):
  """Fragments are padded to powers of two: what is outside the view must not be written."""
  bm, bn = blocks
  m, n = on_a_gpu((40, 210), (8, 30)) if bm == 1 else (40, 210)
  x = normal(rng, m, n, dtype=ml_dtypes.bfloat16)
  call = tt.tile_call(functools.partial(identity_kernel, bm=bm, bn=bn), out((x.shape, x.dtype)),
                      grid=(tt.cdiv(m, bm), tt.cdiv(n, bn)))
  return Case(call, (x,), (x,), "exact")


def inner_kernel(x, d, y):
  i = tt.program_id(0)
  y[tt.ds(i * 10 + 1, 7), tt.ds(5, 11)] = d[...] * 1.5


@case
def stores_touch_their_view_only(rng):
  x, d = normal(rng, 35, 20), normal(rng, 7, 11)
  call = tt.tile_call(inner_kernel, out(((35, 20), np.float32)), grid=4, input_output_aliases={0: 0})
  want = x.copy()
  for i in range(4):
    part = want[i * 10 + 1:i * 10 + 8, 5:16]
    part[...] = (d * np.float32(1.5))[:len(part)]
  return Case(call, (x, d), (want,), "exact")


def ragged_kernel(x, bounds, y, z):
  rows, kept = x.at[tt.ds(bounds[0], bounds[1]), :], z.at[tt.ds(bounds[0], bounds[1]), :]
  i = tt.block(tt.program_id(0), 4)
  y[i, :] = tt.load(rows.at[i, :], fill_value=-1.0)
  kept[i, :] = rows[i, :]


@case(bounds=((3, 9), (0, 0), (15, 8), (5, 4), (-2, 6)))
def views_end_where_they_say(rng, bounds):
  x, old = normal(rng, 20, 24), normal(rng, 20, 24)
  start, size = bounds

  def kernel(old, x, bounds, kept, y):
    ragged_kernel(x, bounds, y, kept)

  call = tt.tile_call(kernel, out(((20, 24), np.float32), ((12, 24), np.float32)), grid=3, input_output_aliases={0: 0})
  y, z = np.full((12, 24), -1, np.float32), old.copy()
  for r in range(12):
    if r < size and 0 <= start + r < 20:
      y[r], z[start + r] = x[start + r], x[start + r]
  return Case(call, (old, x, np.asarray(bounds, np.int32)), (z, y), "exact")


def starts_kernel(old, x, s, z, y):
  y[...] = tt.load(x.at[tt.ds(s[...], 4)], fill_value=-1.0)
  z[tt.ds(s[...], 4)] = 1.0


@case(start=(-9, -3, 0, 5, 6, 12, 2**31 - 5))
def starts_anywhere(rng, start):
  old, x = normal(rng, 7), normal(rng, 7)
  call = tt.tile_call(starts_kernel, out(((7,), np.float32), ((4,), np.float32)), grid=1, input_output_aliases={0: 0})
  index = start + np.arange(4, dtype=np.int64)
  inside = (index >= 0) & (index < 7)
  y = np.where(inside, x[np.clip(index, 0, 6)], np.float32(-1))
  return Case(call, (old, x, np.int32(start)), (np.where(np.isin(np.arange(7), index), np.float32(1), old), y), "exact")


def strided_kernel(old, x, s, z, y):
  y[...] = x[tt.ds(s[...], 4, stride=3), :]
  z[tt.ds(s[...], 4, stride=3), :] = x[tt.ds(s[...], 4, stride=3), :]


@case(start=(-3, 0, 2, 11))
def strides(rng, start):
  old, x = normal(rng, 10, 16, dtype=np.float16), normal(rng, 10, 16, dtype=np.float16)
  call = tt.tile_call(strided_kernel, out(((10, 16), np.float16), ((4, 16), np.float16)), grid=1,
                      input_output_aliases={0: 0})
  index = start + 3 * np.arange(4)
  inside = (index >= 0) & (index < 10)
  y = np.where(inside[:, None], x[np.clip(index, 0, 9)], np.float16(0))
  z = np.where(np.isin(np.arange(10), index)[:, None], x, old)
  return Case(call, (old, x, np.int32(start)), (z, y), "exact")


def element_kernel(old, x, i, z, y):
  y[...] = x[i[...], :]
  z[i[...], :] = 1.0


@case(i=(-1, 0, 2, 3))
def an_integer_index_out_of_range(rng, i):
  old, x = normal(rng, 3, 40), normal(rng, 3, 40)
  call = tt.tile_call(element_kernel, out(((3, 40), np.float32), ((40,), np.float32)), grid=1,
                      input_output_aliases={0: 0})
  z = old.copy()
  if 0 <= i < 3:
    z[i] = 1
  return Case(call, (old, x, np.int32(i)), (z, x[i] if 0 <= i < 3 else np.zeros(40, np.float32)), "exact")


def ranks_kernel(x, y):
  b, h = tt.program_id(0), tt.program_id(1)
  y[b, :, h, tt.ds(0, 8)] = x[b, h, 1, :, :] * 2


@case
def many_dimensions(rng):
  x = normal(rng, 2, 3, 2, 5, 8)
  call = tt.tile_call(ranks_kernel, out(((2, 5, 3, 8), np.float32)), grid=(2, 3))
  return Case(call, (x,), (x[:, :, 1].transpose(0, 2, 1, 3) * np.float32(2),), "exact")


@case(dtype=("f32", "bf16", "i32"))
def masks(rng, dtype):
  old, x = ((normal(rng, *s) * 9).astype(DTYPES[dtype]) for s in ((2, 40), (40,)))

  def kernel(old, x, z, y):
    i = tt.program_id(0)
    keep = tt.arange(40) % 3 == i
    y[i, :] = tt.load(x, mask=keep, fill_value=9)
    tt.store(z.at[i, :], x[...], mask=keep)

  call = tt.tile_call(kernel, out(((2, 40), x.dtype), ((2, 40), x.dtype)), grid=2, input_output_aliases={0: 0})
  keep = np.arange(40) % 3 == np.arange(2)[:, None]
  return Case(call, (old, x), (np.where(keep, x, old), np.where(keep, x, x.dtype.type(9))), "exact")


def scalar_mask_kernel(old, x, n, z):
  i = tt.program_id(0)
  r = tt.block(i, 16)
  tt.store(z.at[r], tt.load(x.at[r], mask=i != n[...]), mask=i < 3)


@case
def scalar_masks(rng):
  old, x = normal(rng, 60), normal(rng, 60)
  call = tt.tile_call(scalar_mask_kernel, out(((60,), np.float32)), grid=4, input_output_aliases={0: 0})
  want = x.copy()
  want[16:32], want[48:] = 0, old[48:]
  return Case(call, (old, x, np.int32(1)), (want,), "exact")


def minus_inf_kernel(x, y, z):
  y[...] = tt.load(x.at[tt.ds(0, 50), :], fill_value=-np.inf)
  z[...] = tt.load(x.at[tt.ds(-2, 50), :], fill_value=2.5)


@case(dtype=("f32", "bf16", "f16"))
def fill_values(rng, dtype):
  x = normal(rng, 45, 24, dtype=DTYPES[dtype])
  call = tt.tile_call(minus_inf_kernel, out(((50, 24), x.dtype), ((50, 24), x.dtype)), grid=1)
  y, z = np.full((50, 24), -np.inf, x.dtype), np.full((50, 24), 2.5, x.dtype)
  y[:45], z[2:47] = x, x
  return Case(call, (x,), (y, z), "exact")


def transposed_views_kernel(x, y, z):
  i = tt.program_id(0)
  block = x.at[1, tt.block(i, 16), :].T                         # [24, 16]
  y.T[:, tt.block(i, 16)] = block[...]
  z[:, tt.block(i, 16)] = block[...]


@case
def transposed_views(rng):
  x = normal(rng, 2, 40, 24)
  call = tt.tile_call(transposed_views_kernel, out(((40, 24), np.float32), ((24, 40), np.float32)), grid=3)
  return Case(call, (x,), (x[1], x[1].T), "exact")


def round_trip_kernel(x, y, z):
  r = tt.block(tt.program_id(0), 32)
  s = tt.alloc_shared((32, 64), x.dtype)
  s[...] = x[r, :]
  y[r, :] = s[...]
  z[:, r] = s.T[...]


@case(dtype=("f32", "bf16", "i32", "bool"))
def through_shared_memory(rng, dtype):
  x = normal(rng, 70, 64) > 0 if dtype == "bool" else (normal(rng, 70, 64) * 9).astype(DTYPES[dtype])
  call = tt.tile_call(round_trip_kernel, out(((70, 64), x.dtype), ((64, 70), x.dtype)), grid=3)
  return Case(call, (x,), (x, x.T), "exact")


@case(warpgroups=(2, 3, 5))
def through_shared_memory_by_many(rng, warpgroups):
  """Fragments of three and five warpgroups are padded; each element is read by another thread."""
  x = normal(rng, 70, 64)
  call = tt.tile_call(round_trip_kernel, out(((70, 64), np.float32), ((64, 70), np.float32)), grid=3,
                      warpgroups=warpgroups)
  return Case(call, (x,), (x, x.T), "exact")


def rotate_kernel(x, y):
  """Every iteration writes a shared buffer that other threads read: two syncs an iteration."""
  s = tt.alloc_shared((16, 8), x.dtype)
  acc = tt.alloc_fragment((8, 16), x.dtype)
  acc[...] = 0
  for k in tt.range(x.shape[0]):
    s[...] = x[k, :, :]
    acc[...] += s.T[...] * 2
  y[...] = acc[...]


@case
def shared_memory_in_a_loop(rng):
  x = rng.integers(-99, 99, (20, 16, 8), dtype=np.int32)
  call = tt.tile_call(rotate_kernel, out(((8, 16), np.int32)), grid=1)
  return Case(call, (x,), (x.sum(0, dtype=np.int32).T * 2,), "exact")


def parts_kernel(x, y):
  s = tt.alloc_shared((2, 16, 64), x.dtype)
  s[0, :, :] = x[:16, :]
  s[1, :8, :] = x[16:24, :]
  s[1, 8:, :] = x[24:, :] * 3
  y[...] = s[1, :, :] + s[0, :, :]


@case
def parts_of_shared_buffers(rng):
  x = normal(rng, 32, 64)
  call = tt.tile_call(parts_kernel, out(((16, 64), np.float32)), grid=1)
  second = np.concatenate([f64(x)[16:24], f64(x)[24:] * 3])
  return Case(call, (x,), (second + f64(x)[:16],), "elementwise")


def odd_shared_kernel(x, y):
  s = tt.alloc_shared((7, 33), x.dtype)
  t = tt.alloc_shared((7, 33), x.dtype)
  s[...] = x[...]
  t[...] = s[...] + s[...]
  y[...] = t[...]


@case(dtype=("f32", "bf16"))
def odd_shared_buffers(rng, dtype):
  """Padding of a fragment must not be stored past the end of the buffer."""
  x = normal(rng, 7, 33, dtype=DTYPES[dtype])
  call = tt.tile_call(odd_shared_kernel, out(((7, 33), x.dtype)), grid=1)
  return Case(call, (x,), (x + x,), "exact")


def copies_kernel(x, y, z):
  i = tt.program_id(0)
  s = tt.alloc_shared((32, 64), x.dtype)
  f = tt.alloc_fragment((32, 64), x.dtype)
  tt.copy(x.at[tt.block(i, 32), :], s)
  tt.copy(s, f)
  tt.copy(f, y.at[tt.block(i, 32), :])
  tt.copy(s, z.at[tt.block(i, 32), :])


@case(dtype=("f32", "bf16", "i32"))
def copies_between_spaces(rng, dtype):
  x = (normal(rng, 70, 64) * 9).astype(DTYPES[dtype])
  call = tt.tile_call(copies_kernel, out(((70, 64), x.dtype), ((70, 64), x.dtype)), grid=3)
  return Case(call, (x,), (x, x), "exact")


def pipelined_copy_kernel(x, y, *, num_stages):
  i = tt.program_id(0)
  s = tt.alloc_shared((16, 128), x.dtype)
  acc = tt.alloc_fragment((16, 128), np.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(x.shape[1], 128), num_stages=num_stages):
    tt.copy(x.at[tt.block(i, 16), tt.block(k, 128)], s)
    acc[...] += s[...].astype(np.float32)
  y[tt.block(i, 16), :] = acc[...]


@case(columns=(640, 1000, 777))
def pipelined_copies_without_a_gemm(rng, columns):
  x = normal(rng, 40, columns, dtype=ml_dtypes.bfloat16)
  call = tt.tile_call(functools.partial(pipelined_copy_kernel, num_stages=3), out(((40, 128), np.float32)), grid=3)
  padded = np.zeros((40, -(-columns // 128) * 128))
  padded[:, :columns] = f64(x)
  return Case(call, (x,), (padded.reshape(40, -1, 128).sum(1),), "reduce")


def add_into_kernel(h, d, h_out, y):
  r = tt.block(tt.program_id(0), 4)
  h_out[r, :] = h[r, :] + d[r, :]
  y[r, :] = h[r, :] * 2                                         # the new h


@case
def an_alias_is_one_reference(rng):
  h, d = normal(rng, 10, 48), normal(rng, 10, 48)
  call = tt.tile_call(add_into_kernel, out(((10, 48), np.float32), ((10, 48), np.float32)), grid=3,
                      input_output_aliases={0: 0})
  return Case(call, (h, d), (h + d, (h + d) * 2), "exact")


def local_masks_kernel(x, y):
  s = tt.alloc_shared((96,), x.dtype)
  f = tt.alloc_fragment((96,), x.dtype)
  s[...], f[...] = x[...], x[...]
  third = tt.arange(96) % 3 == 0
  tt.store(s, x[...] * 2, mask=third)
  tt.store(f, x[...] * 4, mask=~third)
  y[0, :] = tt.load(s, mask=~third, fill_value=7)
  y[1, :] = tt.load(f, mask=third)
  y[2, :] = s[...] + f[...]


@case(dtype=("f32", "bf16", "i32"))
def masks_of_shared_memory_and_fragments(rng, dtype):
  x = np.round(normal(rng, 96) * 9).astype(DTYPES[dtype])
  third, two, four = np.arange(96) % 3 == 0, x.dtype.type(2), x.dtype.type(4)
  s, f = np.where(third, x * two, x), np.where(third, x, x * four)
  want = np.stack([np.where(third, x.dtype.type(7), s), np.where(third, f, x.dtype.type(0)), s + f])
  call = tt.tile_call(local_masks_kernel, out(((3, 96), x.dtype)), grid=1)
  return Case(call, (x,), (want,), "exact")


@case(dtype=("f32", "bf16"))
def parts_of_fragments(rng, dtype):
  x = np.ones((), DTYPES[dtype])
  def kernel(x, y):
    f = tt.alloc_fragment((32, 64), x.dtype)
    f[...] = 1
    for i in range(2):                                          # 16 rows are whole registers of each thread
      f[i * 16:i * 16 + 16, :] = f[i * 16:i * 16 + 16, :] + i * x[...]
    y[...] = f[...]

  call = tt.tile_call(kernel, out(((32, 64), x.dtype)), grid=1)
  return Case(call, (x,), (np.broadcast_to(1 + np.arange(32)[:, None] // 16, (32, 64)).astype(x.dtype),), "exact")


def read_after_write_kernel(x, y):
  """What one thread stored is read by another."""
  y[...] = x[...]
  for k in tt.range(3):
    y[tt.ds(1 + k, 99)] = y[tt.ds(k, 99)] * 2
  y[5] = y[4] + y[6]


@case
def global_memory_is_read_after_it_was_written(rng):
  x = rng.integers(-9, 9, 200, dtype=np.int32)
  want = x.copy()
  for k in range(3):
    want[1 + k:100 + k] = want[k:99 + k] * 2
  want[5] = want[4] + want[6]
  return Case(tt.tile_call(read_after_write_kernel, out(((200,), np.int32)), grid=1), (x,), (want,), "exact")


def rounded_kernel(x, y):
  y[...] = x[...].astype(y.dtype)


@case(shape=((64, 64), (128, 128), (64, 192)))
def casts_of_tiles_that_could_be_staged(rng, shape):
  x = normal(rng, *shape)
  call = tt.tile_call(rounded_kernel, out((shape, ml_dtypes.bfloat16)), grid=1, warpgroups=2)
  return Case(call, (x,), (x.astype(ml_dtypes.bfloat16),), "exact")


def shared_copies_kernel(x, y):
  s, t = tt.alloc_shared((9, 40), x.dtype), tt.alloc_shared((9, 40), x.dtype)
  tt.copy(x.at[tt.block(tt.program_id(0), 9), tt.ds(0, 40)], s)
  tt.copy(s, t)
  tt.copy(t, y.at[tt.block(tt.program_id(0), 9), tt.ds(0, 40)])


@case(columns=(40, 39, 36))
def copies_of_odd_blocks(rng, columns):
  """cp.async, vectors and scalars; rows past the edge and columns past the edge."""
  x = normal(rng, 20, columns)
  call = tt.tile_call(shared_copies_kernel, out((x.shape, x.dtype)), grid=3)
  return Case(call, (x,), (x,), "exact")


@case(dtype=("f32", "bf16", "bool"))
def copies_with_a_fill_value(rng, dtype):
  x = normal(rng, 20, 40) > 0 if dtype == "bool" else normal(rng, 20, 40, dtype=DTYPES[dtype])

  def kernel(x, y):
    s = tt.alloc_shared((32, 64), x.dtype)
    tt.copy(x.at[tt.ds(-3, 32), tt.ds(5, 64)], s, fill_value=True if dtype == "bool" else -1)
    y[...] = s[...]

  want = np.full((32, 64), True if dtype == "bool" else -1, x.dtype)
  want[3:23, :35] = x[:, 5:]
  return Case(tt.tile_call(kernel, out(((32, 64), x.dtype)), grid=1), (x,), (want,), "exact")


def in_place_kernel(h, w, h_out):
  """The residual is copied, and written back where it came from."""
  i = tt.block(tt.program_id(0), 16)
  s = tt.alloc_shared((16, 64), h.dtype)
  tt.copy(h.at[i, :], s)
  h_out[i, :] = s[...] * w[None, :]


@case
def copies_of_what_is_written_back(rng):
  h, w = normal(rng, 50, 64), normal(rng, 64)
  call = tt.tile_call(in_place_kernel, out(((50, 64), np.float32)), grid=4, input_output_aliases={0: 0},
                      persistent=True)
  return Case(call, (h, w), (h * w,), "exact")


def slow_readers_kernel(x, y, *, num_stages):
  """Threads read each slot of a ring after work of different length: none may be refilled early."""
  s = tt.alloc_shared((64, 64), x.dtype)
  acc = tt.alloc_fragment((64, 64), np.float32)
  acc[...] = 0
  for k in tt.pipelined(x.shape[0] // 64, num_stages=num_stages):
    tt.copy(x.at[tt.block(k, 64), :], s)
    acc[...] = acc[...] * 0.5 + s.T[...].astype(np.float32)
  y[...] = acc[...]


@case(num_stages=(1, 2, 4))
def rings_that_threads_read(rng, num_stages):
  x = normal(rng, 64 * 40, 64, dtype=ml_dtypes.bfloat16)
  want = np.zeros((64, 64))
  for k in range(40):
    want = want * 0.5 + f64(x)[64 * k:64 * k + 64].T
  call = tt.tile_call(functools.partial(slow_readers_kernel, num_stages=num_stages), out(((64, 64), np.float32)),
                      grid=1, warpgroups=2)
  return Case(call, (x,), (want,), "elementwise")


def small_slots_kernel(x, y):
  s = tt.alloc_shared((5, 24), x.dtype)
  for k in tt.pipelined(x.shape[0] // 5, num_stages=3):
    tt.copy(x.at[tt.block(k, 5), :], s)
    y[tt.block(k, 5), :] = s[...] * 2


@case(dtype=("f32", "f16"))
def rings_of_small_slots(rng, dtype):
  """480 and 240 bytes a slot: each must start where TMA may write."""
  x = normal(rng, 35, 24, dtype=DTYPES[dtype])
  call = tt.tile_call(small_slots_kernel, out((x.shape, x.dtype)), grid=1)
  return Case(call, (x,), (x * x.dtype.type(2),), "exact")


def windows_kernel(x, y, z):
  s = tt.alloc_shared((64, 64), x.dtype)
  s[...] = x[...]
  for k in tt.range(60):
    y[k, :, :] = s[tt.ds(k, 4), :]                              # a start that no swizzle's period divides
    z[k, :, :] = s[:, tt.ds(k, 4)]                              # and one that is not aligned


@case(dtype=("f32", "bf16", "bool"))
def windows_of_shared_memory(rng, dtype):
  x = normal(rng, 64, 64) > 0 if dtype == "bool" else normal(rng, 64, 64, dtype=DTYPES[dtype])
  call = tt.tile_call(windows_kernel, out(((60, 4, 64), x.dtype), ((60, 64, 4), x.dtype)), grid=1)
  return Case(call, (x,), (np.stack([x[k:k + 4] for k in range(60)]), np.stack([x[:, k:k + 4] for k in range(60)])),
              "exact")


def every_other_kernel(x, y, z):
  s = tt.alloc_shared((64, 64), x.dtype)
  s[...] = x[...]
  s[tt.ds(1, 16, stride=4), :] = x[:16, :]
  y[...] = s[tt.ds(0, 32, stride=2), 3:43]
  z[...] = s[5:11, tt.ds(1, 21, stride=3)]


@case(dtype=("f32", "bf16"))
def strides_of_shared_memory(rng, dtype):
  x = normal(rng, 64, 64, dtype=DTYPES[dtype])
  s = x.copy()
  s[1:64:4] = x[:16]
  call = tt.tile_call(every_other_kernel, out(((32, 40), x.dtype), ((6, 21), x.dtype)), grid=1)
  return Case(call, (x,), (s[::2, 3:43], s[5:11, 1:64:3]), "exact")


def turned_kernel(x, y, z):
  i = tt.block(tt.program_id(0), 32)
  s = tt.alloc_shared((64, 32), x.dtype)
  tt.copy(x.at[i, :].T, s)
  y[:, i] = s[...]
  tt.copy(s.T, z.at[i, :])


@case(dtype=("f32", "bf16", "i32"))
def copies_of_transposed_views(rng, dtype):
  x = (normal(rng, 70, 64) * 9).astype(DTYPES[dtype])
  call = tt.tile_call(turned_kernel, out(((64, 70), x.dtype), (x.shape, x.dtype)), grid=3)
  return Case(call, (x,), (x.T, x), "exact")


def reshapes_kernel(x, y, z):
  y[...] = tt.reshape(x[...], (32, 128))
  z[...] = tt.reshape(x[...], (4, 16, 64)) * 2


@case
def reshapes(rng):
  x = normal(rng, 64, 64)
  call = tt.tile_call(reshapes_kernel, out(((32, 128), np.float32), ((4, 16, 64), np.float32)), grid=1)
  return Case(call, (x,), (x.reshape(32, 128), x.reshape(4, 16, 64) * np.float32(2)), "exact")
