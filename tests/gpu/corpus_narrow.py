"""Cases: elements of 8 and 16 bits in memory and registers, and the products that tensor cores make of them."""
from __future__ import annotations

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import tiletrace as tt
from tests.gpu.corpus import Case, case, f64, on_a_gpu, out
from tests.gpu.corpus_gemm import matmul
from tiletrace.kernels.scaled_matmul import scaled_matmul_call

F32 = np.float32
F8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
INTEGERS = {"i8": np.int8, "u8": np.uint8, "i16": np.int16, "u16": np.uint16}
DTYPES = F8 | INTEGERS | {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def numbers(rng: np.random.Generator, *shape: int, dtype: str) -> np.ndarray:
  t = np.dtype(DTYPES[dtype])
  if t.kind in "iu":
    return rng.integers(np.iinfo(t).min, np.iinfo(t).max, shape, t, endpoint=True)
  return rng.standard_normal(shape).astype(np.float32).astype(t)


# ---- values


def casts_kernel(x, y):
  y[...] = x[...].astype(y.dtype)


@case(pair=[(a, b) for a in (*F8, "i8", "u8") for b in ("f32", "bf16", "i8", "e4m3", "e5m2") if a != b])
def narrow_casts(rng, pair):
  """Tiles whose rows are no multiples of a word's elements."""
  x = numbers(rng, 32, 83, dtype=pair[0])
  to = DTYPES[pair[1]]
  call = tt.tile_call(casts_kernel, out(((32, 83), to)), grid=1)
  return Case(call, (x,), (np.asarray(jnp.asarray(x).astype(to)),), "exact")


@case(to=("e4m3", "e5m2", "i8", "u8", "i16", "u16"))
def casts_of_what_is_too_large(rng, to):
  """As jax.numpy's: NaN (e4m3), infinity (e5m2), the nearest (integers)."""
  x = (rng.standard_normal((16, 64)) * 10.0 ** rng.integers(-6, 7, (16, 64))).astype(np.float32)
  x[0, :12] = [464, 464.1, -465, 61439, 61440, -61441, np.inf, -np.inf, np.nan, 448, 57344, -0.0]
  call = tt.tile_call(casts_kernel, out(((16, 64), DTYPES[to])), grid=1)
  return Case(call, (x,), (np.asarray(jnp.asarray(x).astype(DTYPES[to])),), "exact")


def moves_kernel(x, y, z, w):
  """Through shared memory and a fragment; a part, a row that is broadcast, a transpose."""
  s = tt.alloc_shared(x.shape, x.dtype)
  f = tt.alloc_fragment(x.shape, x.dtype)
  tt.copy(x, s)
  f[...] = s[...]
  y[...] = f[...]
  z[...] = s[...].T
  w[...] = tt.broadcast_to(s[3, :][None, :], x.shape)
  w[:5, :] = s[:5, :]


@case(dtype=("e4m3", "i8", "u8", "i16"))
def moves(rng, dtype):
  x = numbers(rng, 32, 48, dtype=dtype)
  call = tt.tile_call(moves_kernel, out((x.shape, x.dtype), (x.shape[::-1], x.dtype), (x.shape, x.dtype)), grid=1)
  w = np.broadcast_to(x[3], x.shape).copy()
  w[:5] = x[:5]
  return Case(call, (x,), (x, x.T.copy(), w), "exact")


def reduced_kernel(x, y, total, largest, running):
  a, b = x[...], y[...]
  total[...] = tt.sum(a, axis=1)
  largest[...] = tt.max(b, axis=1)
  running[...] = tt.cumsum(a, axis=1)


@case(dtype=("i8", "u8", "i16", "u16"))
def integers_are_reduced(rng, dtype):
  x, y = (numbers(rng, 16, 96, dtype=dtype) for _ in range(2))
  wide = np.uint32 if dtype[0] == "u" else np.int32
  call = tt.tile_call(reduced_kernel, out(((16,), wide), ((16,), x.dtype), (x.shape, x.dtype)), grid=1)
  want = x.sum(1, dtype=wide), y.max(1), np.cumsum(x, 1, dtype=x.dtype)
  return Case(call, (x, y), want, "exact")


def arithmetic_kernel(x, y, o):
  a, b = x[...], y[...]
  for k, v in enumerate((a + b, a - b, a * b, tt.maximum(a, b), tt.minimum(a, b), a & b, a ^ b, tt.where(a < b, a, b))):
    o[k, :] = v


@case(dtype=("i8", "u8", "i16", "u16"))
def integers_wrap_around(rng, dtype):
  x, y = (numbers(rng, 301, dtype=dtype) for _ in range(2))
  call = tt.tile_call(arithmetic_kernel, out(((8, 301), x.dtype)), grid=1)
  want = np.stack((x + y, x - y, x * y, np.maximum(x, y), np.minimum(x, y), x & y, x ^ y, np.where(x < y, x, y)))
  return Case(call, (x, y), (want,), "exact")


# ---- products


def product_kernel(a, b, c, *, bm, bn, bk, acc, registers, policy):
  """C = A @ B.T: b is [N, K]."""
  i, j = tt.program_id(0), tt.program_id(1)
  a_s, b_s = tt.alloc_shared((bm, bk), a.dtype), tt.alloc_shared((bn, bk), b.dtype)
  sums = tt.alloc_fragment((bm, bn), acc)
  sums[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], bk), num_stages=3):
    tt.copy(a.at[tt.block(i, bm), tt.block(k, bk)], a_s)
    tt.copy(b.at[tt.block(j, bn), tt.block(k, bk)], b_s)
    tt.gemm(a_s[...] if registers else a_s, b_s.T, sums, policy=policy,
            precision="tf32" if a.dtype == np.float32 else None)
  c[tt.block(i, bm), tt.block(j, bn)] = sums[...].astype(c.dtype)


def as_seen(x: np.ndarray) -> np.ndarray:
  """An operand as the tensor core sees it: f32 without the low 13 bits."""
  return (x.view(np.uint32) & np.uint32(0xFFFF_E000)).view(F32) if x.dtype == F32 else x


def product(rng, a, b, *, acc, kind, m=200, n=72, k=272, bm=128, bn=64, bk=None, registers=False, policy=None,
            warpgroups=2, to=None) -> Case:
  x, w = numbers(rng, m, k, dtype=a), numbers(rng, n, k, dtype=b)
  bk = bk or 128 // x.dtype.itemsize
  kernel = functools.partial(product_kernel, bm=bm, bn=bn, bk=bk, acc=acc, registers=registers, policy=policy)
  call = tt.tile_call(kernel, out(((m, n), to or acc)), grid=(tt.cdiv(m, bm), tt.cdiv(n, bn)), warpgroups=warpgroups)
  want = f64(as_seen(x)) @ f64(as_seen(w)).T
  return Case(call, (x, w), (want.astype(np.int32) if acc == np.int32 else want,), kind)


@case(pair=(("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2"), ("e5m2", "e4m3")))
def float8_products(rng, pair):
  return product(rng, *pair, acc=np.float32, kind="f8_gemm")


@case(pair=(("e4m3", "e4m3"), ("e5m2", "e4m3")))
def float8_products_of_registers(rng, pair):
  return product(rng, *pair, acc=np.float32, kind="f8_gemm", registers=True)


@case(pair=(("i8", "i8"), ("u8", "u8"), ("i8", "u8"), ("u8", "i8")))
def integer_products(rng, pair):
  return product(rng, *pair, acc=np.int32, kind="exact")


@case(bn=(24, 48, 8))
def integer_products_of_registers(rng, bn):
  return product(rng, "i8", "u8", acc=np.int32, kind="exact", registers=True, bn=bn)


@case(registers=(False, True))
def half_sums(rng, registers):
  return product(rng, "f16", "f16", acc=np.float16, kind="f16_gemm", registers=registers)


@case(registers=(False, True))
def tf32_products(rng, registers):
  return product(rng, "f32", "f32", acc=np.float32, kind="gemm", registers=registers)


@case(bk=(32, 64, 256))
def float8_depths(rng, bk):
  return product(rng, "e4m3", "e4m3", acc=np.float32, kind="f8_gemm", bk=bk, bn=40, to=ml_dtypes.bfloat16)


@case(split=((2, 2, 4), (1, 2, 2), (4, 1, 4), (2, 3, 6)))
def warpgroups_split_both_ways(rng, split):
  rows, columns, warpgroups = split
  return product(rng, "bf16", "bf16", acc=np.float32, kind="gemm", bm=64 * rows, bn=24 * columns,
                 policy=(rows, columns), warpgroups=warpgroups)


@case(split=((2, 2, 4), (1, 2, 2)))
def warpgroups_split_both_ways_with_registers(rng, split):
  rows, columns, warpgroups = split
  return product(rng, "e4m3", "e4m3", acc=np.float32, kind="f8_gemm", bm=128 * rows, bn=16 * columns,
                 policy=(rows, columns), warpgroups=warpgroups, registers=True)


# ---- parts of shared buffers as operands


def parts_kernel(a, b, c, *, form, size, step, dynamic):
  """Each iteration multiplies parts of A and B that are `step` further along k, and of the second half of m and n."""
  a_s = tt.alloc_shared(a.shape, a.dtype)
  b_s = tt.alloc_shared(b.shape, b.dtype)
  acc = tt.alloc_fragment((64, 40), F32)
  acc[...] = 0
  tt.copy(a, a_s)
  tt.copy(b, b_s)
  left, right = a_s.T if form[0] == "t" else a_s, b_s.T if form[1] == "t" else b_s
  for k in (tt.range if dynamic else range)(left.shape[1] // step):
    inner = tt.ds(step * k, size)
    tt.gemm(left.at[64:, inner], right.at[inner, 24:64], acc)
  c[...] = acc[...]


def parts(rng, form, dtype, *, size, step, dynamic) -> Case:
  a, b = numbers(rng, 128, 128, dtype=dtype), numbers(rng, 128, 64, dtype=dtype)
  kernel = functools.partial(parts_kernel, form=form, size=size, step=step, dynamic=dynamic)
  stored = (np.ascontiguousarray(a.T) if form[0] == "t" else a, np.ascontiguousarray(b.T) if form[1] == "t" else b)
  want = np.zeros((64, 40))
  for k in range(0, 128, step):
    want += f64(a)[64:, k:k + size] @ f64(b)[k:k + size, 24:64]
  call = tt.tile_call(kernel, out(((64, 40), F32)), grid=1)
  return Case(call, stored, (want,), kind="gemm" if dtype == "bf16" else "f8_gemm")


@case(form=("nn", "nt", "tn", "tt"))
def parts_at_static_starts(rng, form):
  return parts(rng, form, "bf16", size=16, step=32, dynamic=False)


@case(form=("nt", "tt"))
def parts_at_dynamic_starts(rng, form):
  return parts(rng, form, "bf16", size=64, step=64, dynamic=True)


@case(step=(32, 64))
def parts_of_8_bits(rng, step):
  return parts(rng, "nt", "e4m3", size=32, step=step, dynamic=True)


def columns_kernel(a, b, c):
  """The columns of B that a warpgroup takes are half of a swizzle's span."""
  a_s = tt.alloc_shared((64, 64), a.dtype)
  b_s = tt.alloc_shared((64, 128), b.dtype)
  acc = tt.alloc_fragment((64, 128), F32)
  tt.copy(a, a_s)
  tt.copy(b, b_s)
  tt.gemm(a_s, b_s, acc, accumulate=False, policy=tt.FULL_COL)
  c[...] = acc[...]


@case(warpgroups=(2, 4))
def columns_within_a_span(rng, warpgroups):
  a, b = numbers(rng, 64, 64, dtype="bf16"), numbers(rng, 64, 128, dtype="bf16")
  call = tt.tile_call(columns_kernel, out(((64, 128), F32)), grid=1, warpgroups=warpgroups)
  return Case(call, (a, b), (f64(a) @ f64(b),), "gemm")


# ---- with scales


def scaled(rng, scaling, m, n, k, *, fast=False, to=ml_dtypes.bfloat16) -> Case:
  x, w = numbers(rng, m, k, dtype="e4m3"), numbers(rng, n, k, dtype="e5m2")
  blocks = -(-k // 128)
  shapes = {"tensor": ((), ()), "row": ((m,), (n,)), "block": ((blocks, m), (-(-n // 128), blocks))}[scaling]
  of_x, of_w = (np.exp(rng.standard_normal(s)).astype(np.float32) for s in shapes)
  call = scaled_matmul_call((m, n), to, k=k, scaling=scaling, fast=fast)
  by_x, by_w = f64(of_x), f64(of_w)
  if scaling == "row":
    by_x, by_w = by_x[:, None], by_w[:, None]
  elif scaling == "block":
    by_x, by_w = np.repeat(by_x.T, 128, 1)[:, :k], np.repeat(np.repeat(by_w, 128, 0)[:n], 128, 1)[:, :k]
  return Case(call, (x, w, of_x, of_w), ((f64(x) * by_x) @ (f64(w) * by_w).T,), "f8_gemm")


@case(scaling=("tensor", "row", "block"))
def scaled_products(rng, scaling):
  return scaled(rng, scaling, 200, 136, 400)


@case(scaling=("tensor", "row"))
def scaled_products_summed_in_the_tensor_core(rng, scaling):
  return scaled(rng, scaling, 200, 264, 272, fast=True, to=np.float32)


@case(shape=((64, 256, 384), (7, 40, 77), (130, 9, 16)))
def scaled_products_of_blocks(rng, shape):
  return scaled(rng, "block", *shape, to=np.float32)


# ---- shapes that wgmma has not


@case(bm=(16, 32, 48, 96, 1))
def few_rows(rng, bm):
  return product(rng, "bf16", "bf16", acc=F32, kind="gemm", m=on_a_gpu(31, 5) if bm == 1 else bm + 30, bm=bm)


@case(pair=(("f16", "f16"), ("e4m3", "e5m2"), ("i8", "u8"), ("f32", "f32")))
def few_rows_of_other_dtypes(rng, pair):
  acc, kind = {"f16": (np.float16, "f16_gemm"), "e4m3": (F32, "f8_gemm"), "i8": (np.int32, "exact"),
               "f32": (F32, "gemm")}[pair[0]]
  return product(rng, *pair, acc=acc, kind=kind, bm=32, bn=40, warpgroups=1)


@case(blocks=((64, 64, 24), (64, 20, 64), (32, 12, 40), (16, 64, 8)))
def odd_blocks(rng, blocks):
  bm, bn, bk = blocks
  return product(rng, "bf16", "bf16", acc=F32, kind="gemm", bm=bm, bn=bn, bk=bk, m=70, n=50, k=100)


@case(warpgroups=(1, 2, 3))
def few_rows_with_registers(rng, warpgroups):
  return product(rng, "bf16", "bf16", acc=F32, kind="gemm", bm=32, bn=72, registers=True, warpgroups=warpgroups)


@case(form=("nn", "tn", "tt"))
def few_rows_of_every_form(rng, form):
  return matmul(rng, *on_a_gpu((70, 136), (38, 56)), 200, bm=32, bn=40, form=form)


def gathered_kernel(a, b, c):
  """B is [K, N] as it is stored, which wgmma cannot read of 8-bit and f32 operands."""
  a_s = tt.alloc_shared((64, 64), a.dtype)
  b_s = tt.alloc_shared((64, 32), b.dtype)
  acc = tt.alloc_fragment((64, 32), np.int32 if a.dtype == np.int8 else F32)
  acc[...] = 0
  for k in tt.pipelined(a.shape[1] // 64, num_stages=2):
    tt.copy(a.at[:, tt.block(k, 64)], a_s)
    tt.copy(b.at[tt.block(k, 64), :], b_s)
    tt.gemm(a_s, b_s, acc, dispatch="mma_sync", precision="tf32" if a.dtype == F32 else None)
  c[...] = acc[...]


@case(dtype=("e4m3", "i8", "f32"))
def operands_gathered_element_by_element(rng, dtype):
  a, b = numbers(rng, 64, 192, dtype=dtype), numbers(rng, 192, 32, dtype=dtype)
  kind, acc = {"e4m3": ("f8_gemm", F32), "i8": ("exact", np.int32), "f32": ("gemm", F32)}[dtype]
  left, right = (f64(as_seen(x)) for x in (a, b))
  call = tt.tile_call(gathered_kernel, out(((64, 32), acc)), grid=1)
  return Case(call, (a, b), ((left @ right).astype(acc if dtype == "i8" else np.float64),), kind)
