"""Cases: reductions over any axes, extents and dtypes; softmax and norms made of them."""
from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import tiletrace as tt
from tests.gpu.corpus import Case, case, f64, normal, on_a_gpu, out
from tests.gpu.corpus_elementwise import DTYPES

EXTENTS = (1, 7, 33, 96, 100, 229, 1000, 2880, 4096, 8192)
OPS = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod, "mean": np.mean, "any": np.any, "all": np.all}


def rows_kernel(x, *ys, names, rows):
  r = tt.block(tt.program_id(0), rows)
  v = x[r, :]
  for y, name in zip(ys, names, strict=True):
    y[r] = getattr(tt, name)(v, axis=1)


def rows_case(x, names, kinds, *, rows, dtypes=None, **options) -> Case:
  """Every row of x[m, n] reduced by each of the functions."""
  m = len(x)
  dtypes = dtypes or [x.dtype] * len(names)
  call = tt.tile_call(functools.partial(rows_kernel, names=names, rows=rows), out(*(((m,), d) for d in dtypes)),
                      grid=tt.cdiv(m, rows), **options)
  wide = x if x.dtype.kind in "ibu" else f64(x)
  want = [OPS[name](wide, 1) for name in names]
  want = [w.astype(d) if k == "exact" else w for w, d, k in zip(want, dtypes, kinds, strict=True)]
  return Case(call, (x,), tuple(want), kinds)


FLOAT = ("sum", "max", "min", "mean"), ("reduce", "exact", "exact", "reduce")


@case(n=EXTENTS)
def one_row(rng, n):
  return rows_case(normal(rng, 5, n) + np.float32(0.5), *FLOAT, rows=1)


@case(n=EXTENTS[:-2])
def several_rows(rng, n):
  return rows_case(normal(rng, 13, n) + np.float32(0.5), *FLOAT, rows=4)


@case(n=(7, 96, 229, 512))
def many_rows(rng, n):
  return rows_case(normal(rng, 70, n, dtype=ml_dtypes.bfloat16), *FLOAT, rows=32)


@case(shape=((1, 4096), (2, 1000), (3, 384), (16, 130), (5, 33)))
def rows_by_several_warpgroups(rng, shape):
  rows, n = shape
  return rows_case(normal(rng, 3 * rows + 1, n), *FLOAT, rows=rows, warpgroups=3)


@case(n=(229, 600))
def rows_of_a_persistent_kernel(rng, n):
  """The exchange of one program must be over before that of the next one begins."""
  return rows_case(normal(rng, on_a_gpu(700, 21), n), *FLOAT, rows=1, persistent=True)


@case(dtype=("bf16", "f16", "f32"))
def floats(rng, dtype):
  x = (normal(rng, 20, 600) + 0.25).astype(DTYPES[dtype])
  return rows_case(x, *FLOAT, rows=2, warpgroups=2)


@case(dtype=("int32", "uint32"))
def integers_of_all_bits(rng, dtype):
  x = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (9, 777)).astype(dtype)
  return rows_case(x, ("sum", "max", "min", "prod"), ("exact",) * 4, rows=2)


@case(n=(1, 40, 229, 600))
def booleans(rng, n):
  x = rng.random((12, n)) < np.linspace(0, 1, 12)[:, None]
  return rows_case(x, ("any", "all", "sum"), ("exact",) * 3, rows=3, dtypes=[bool, bool, np.int32])


@case(n=(33, 600))
def products(rng, n):
  x = np.exp(normal(rng, 8, n) / 20)
  return rows_case(x, ("prod",), ("reduce",), rows=1)


@case(n=(33, 100, 2000))
def nan_and_infinity(rng, n):
  """Rows with NaN first, last, beside infinity; infinities of both signs; none."""
  x = normal(rng, 8, n)
  x[0, 0], x[1, -1], x[2, n // 2], x[2, n // 3] = np.nan, np.nan, np.nan, np.inf
  x[3, 5], x[4, -2], x[5, 1], x[5, -1] = np.inf, -np.inf, np.inf, -np.inf
  x[6] = -np.inf
  with np.errstate(invalid="ignore"):
    return rows_case(x, ("max", "min", "sum"), ("exact", "exact", "reduce"), rows=2)


def axes_kernel(x, *ys, axes):
  i = tt.program_id(0)
  v = x[i]
  for y, axis in zip(ys, axes, strict=True):
    y[i] = tt.sum(v, axis=axis, keepdims=True) - tt.min(v, axis, keepdims=True)


@case(shape=((3, 7, 33), (4, 24, 40), (1, 100, 229), (33, 2, 96), (2, 1, 7)))
def axes_of_three(rng, shape):
  x = rng.integers(-999, 999, (3, *shape), dtype=np.int32)
  axes = tuple(a for k in (1, 2, 3) for a in itertools.combinations(range(3), k))
  want = [np.stack([v.sum(a, keepdims=True) - v.min(a, keepdims=True) for v in x]).astype(np.int32) for a in axes]
  call = tt.tile_call(functools.partial(axes_kernel, axes=axes), out(*((w.shape, np.int32) for w in want)), grid=3)
  return Case(call, (x,), tuple(want), "exact")


def columns_kernel(x, y, z, *, bm, bn):
  j = tt.block(tt.program_id(0), bn)
  total = tt.alloc_fragment((bn,), np.float32)
  total[...] = 0
  top = tt.alloc_fragment((bn,), x.dtype)
  top[...] = -np.inf
  for i in tt.range(tt.cdiv(x.shape[0], bm)):
    v = x[tt.block(i, bm), j]
    total[...] += tt.sum(v.astype(np.float32), axis=0)
    top[...] = tt.maximum(top[...], tt.max(tt.load(x.at[tt.block(i, bm), j], fill_value=-np.inf), axis=0))
  y[j], z[j] = total[...], top[...]


@case(blocks=((64, 128), (100, 229), (33, 7), (8, 1000), (256, 32)))
def columns(rng, blocks):
  bm, bn = blocks
  n = on_a_gpu(1111, 145) if bn == 7 else 1111
  x = normal(rng, 300, n, dtype=ml_dtypes.bfloat16)
  call = tt.tile_call(functools.partial(columns_kernel, bm=bm, bn=bn), out(((n,), np.float32), ((n,), x.dtype)),
                      grid=tt.cdiv(n, bn), warpgroups=2)
  return Case(call, (x,), (f64(x).sum(0), x.max(0)), ("reduce", "exact"))


def scalars_kernel(x, y, z, w):
  i = tt.program_id(0)
  v = x[i]
  total = tt.sum(v)
  y[i] = total
  z[i] = tt.where(tt.any(v > 40), tt.max(v), -1)
  w[i] = 0
  with tt.when(total > 0):
    w[i] = tt.max(tt.sum(v * v, axis=0)) + tt.min(v)


@case(shape=((7, 33), (64, 20), (5, 1000)))
def results_of_rank_zero(rng, shape):
  x = rng.integers(-50, 50, (6, *shape), dtype=np.int32)
  total = x.sum((1, 2))
  top = np.where((x > 40).any((1, 2)), x.max((1, 2)), -1)
  branch = np.where(total > 0, (x ** 2).sum(1).max(1) + x.min((1, 2)), 0)
  call = tt.tile_call(scalars_kernel, out(*[((6,), np.int32)] * 3), grid=6, warpgroups=2)
  return Case(call, (x,), (total.astype(np.int32), top.astype(np.int32), branch.astype(np.int32)), "exact")


def halving_kernel(x, y, steps):
  """A loop that runs for as long as any thread's element says so."""
  i = tt.program_id(0)
  y[i, :], steps[i] = tt.while_loop(lambda c: tt.any(c[0] > 1), lambda c: (c[0] * 0.5, c[1] + 1), (x[i, :], 0))


@case(n=(20, 500))
def loops_until_all_agree(rng, n):
  x = np.exp2(rng.integers(-3, 9, (5, n))).astype(np.float32)
  x[3] = 0.25
  steps = np.maximum(np.ceil(np.log2(x.max(1))), 0).astype(np.int32)
  call = tt.tile_call(halving_kernel, out((x.shape, np.float32), ((5,), np.int32)), grid=5, warpgroups=2)
  return Case(call, (x,), (x / np.exp2(steps).astype(np.float32)[:, None], steps), "exact")


def made_kernel(y, *, n):
  """Reductions of what is no load: indices, constants, broadcasts."""
  i = tt.arange(n)
  c = tt.full((3, n), 2, np.int32)
  table = i[None, :] * tt.arange(5)[:, None]
  y[0] = tt.sum(i)
  y[1] = tt.sum(c)
  y[2] = tt.max(tt.sum(table, axis=0))
  y[3] = tt.sum(tt.max(table, axis=1))
  y[4] = tt.max(tt.prod(c, axis=0))


@case(n=(1, 33, 96, 500))
def reductions_of_indices_and_constants(rng, n):
  i = np.arange(n)
  want = np.asarray([i.sum(), 6 * n, 10 * (n - 1), 10 * (n - 1), 8], np.int32)
  return Case(tt.tile_call(functools.partial(made_kernel, n=n), out(((5,), np.int32)), grid=1), (), (want,), "exact")


def indices_kernel(x, first, last, whole):
  i = tt.program_id(0)
  first[i], last[i] = tt.argmax(x[i], axis=1), tt.argmin(x[i], axis=0)
  whole[i] = tt.argmax(x[i])


@case(shape=((1, 7), (4, 229), (33, 40), (3, 2000)))
def indices_of_extrema(rng, shape):
  """Many equal elements: the first counts. NaN counts as the extremum."""
  x = np.round(normal(rng, 4, *shape) * 2)
  x[1, -1, shape[1] // 2:] = np.nan
  x[2] = 3
  x[3, 0, 0] = -np.inf
  call = tt.tile_call(indices_kernel, out(((4, shape[0]), np.int32), ((4, shape[1]), np.int32), ((4,), np.int32)),
                      grid=4, warpgroups=2)
  want = x.argmax(2), x.argmin(1), x.reshape(4, -1).argmax(1)
  return Case(call, (x,), tuple(w.astype(np.int32) for w in want), "exact")


def transposed_kernel(x, y, z):
  s = tt.alloc_shared((48, 40), x.dtype)
  s[...] = x[...]
  y[...] = tt.sum(s.T[...], axis=0)
  z[...] = tt.max(x[...].T, axis=1)


@case
def reductions_of_transposes(rng):
  x = rng.integers(-99, 99, (48, 40), dtype=np.int32)
  call = tt.tile_call(transposed_kernel, out(((48,), np.int32), ((40,), np.int32)), grid=1)
  return Case(call, (x,), (x.sum(1).astype(np.int32), x.max(0)), "exact")


def nothing_kernel(x, total, top, count, *, rows, block):
  r = tt.block(tt.program_id(0), rows)
  t, m = tt.alloc_fragment((rows,), np.float32), tt.alloc_fragment((rows,), np.float32)
  t[...], m[...] = 0, -np.inf
  for k in tt.range(tt.cdiv(x.shape[1], block)):
    v = tt.load(x.at[r, tt.block(k, block)], fill_value=-np.inf)
    t[...] += tt.sum(tt.where(v == -np.inf, 0, v), axis=1)
    m[...] = tt.maximum(m[...], tt.max(v, axis=1))
  total[r], top[r] = t[...], m[...]
  count[r] = tt.sum(x[r, tt.block(0, block)] == 0, axis=1)          # past every edge: zeros


@case(shape=((5, 0), (0, 70), (0, 0), (5, 70)))
def extents_of_zero(rng, shape):
  x = normal(rng, *shape) + np.float32(9)
  call = tt.tile_call(functools.partial(nothing_kernel, rows=4, block=64),
                      out(((shape[0],), np.float32), ((shape[0],), np.float32), ((shape[0],), np.int32)),
                      grid=tt.cdiv(shape[0], 4))
  zeros = np.full(shape[0], 64 - min(64, shape[1]), np.int32)
  return Case(call, (x,), (f64(x).sum(1), x.max(1, initial=-np.inf), zeros), ("reduce", "exact", "exact"))


# ---- every reduction of every dtype over every awkward extent, and cumulative sums

AWKWARD = (7, 33, 96, 100, 229, 1000, 2880)
ALL_DTYPES = ("f32", "bf16", "f16", "i32", "u32", "bool")
FLOAT_OPS = {"sum": (np.sum, "reduce"), "mean": (np.mean, "reduce"), "prod": (np.prod, "reduce"),
             "max": (np.max, "exact"), "min": (np.min, "exact"), "any": (np.any, "exact"), "all": (np.all, "exact"),
             "argmax": (np.argmax, "exact"), "argmin": (np.argmin, "exact")}


def every_kernel(x, sums, *ys, names):
  r = tt.block(tt.program_id(0), 2)
  v = x[r, :]
  for y, name in zip(ys, names, strict=True):
    y[r] = getattr(tt, name)(v, axis=1)
  sums[r, :] = tt.cumsum(v, axis=1)


@case(what=tuple(itertools.product(ALL_DTYPES, AWKWARD)))
def every_reduction(rng, what):
  """Two rows of three to a program; a zero in the second, ties in the third."""
  name, n = what
  dtype = np.dtype({**DTYPES, "u32": np.uint32}[name])
  exact, wide = dtype.kind in "biu", np.dtype(np.int32) if name == "bool" else dtype
  x = np.abs(1 + normal(rng, 3, n) / n ** 0.5) if not exact else rng.integers(0, 2**31, (3, n))
  x = x > 2**29 if name == "bool" else x.astype(dtype)
  x[1, n // 2], x[2, n // 3:] = 0, 1
  names = [k for k in FLOAT_OPS if not exact or k != "mean"]
  want, kinds, types = [], [], []
  for k in names:
    f, kind = FLOAT_OPS[k]
    to = bool if k in ("any", "all") else np.int32 if k.startswith("arg") else wide if kind == "reduce" else dtype
    value = f(x if exact or kind == "exact" else f64(x), 1)
    want.append(value if kind == "reduce" and not exact else value.astype(to))
    kinds.append("exact" if exact else kind)
    types.append(to)
  sums = x.cumsum(1).astype(wide) if exact else f64(x).cumsum(1)
  call = tt.tile_call(functools.partial(every_kernel, names=tuple(names)),
                      out((x.shape, wide), *(((3,), t) for t in types)), grid=2)
  return Case(call, (x,), (sums, *want), ("exact" if exact else "reduce", *kinds))


def cumsums_kernel(x, *ys, axes):
  i = tt.program_id(0)
  v = x[i]
  for k, axis in enumerate(axes):
    ys[2 * k][i], ys[2 * k + 1][i] = tt.cumsum(v, axis), tt.cumsum(v, axis, reverse=True)


@case(shape=((7,), (1, 2880), (33, 40), (229, 3), (100, 96), (4, 1000), (3, 7, 33), (2, 100, 5)))
def cumulative_sums(rng, shape):
  """Along every axis, from both ends, by twelve warps."""
  x = rng.integers(-999, 999, (2, *shape), dtype=np.int32)
  axes = tuple(range(len(shape)))
  want = [w.astype(np.int32) for a in axes for w in (x.cumsum(a + 1), np.flip(np.flip(x, a + 1).cumsum(a + 1), a + 1))]
  call = tt.tile_call(functools.partial(cumsums_kernel, axes=axes), out(*[(x.shape, np.int32)] * len(want)), grid=2,
                      warpgroups=3)
  return Case(call, (x,), tuple(want), "exact")


@case(n=(33, 2000))
def cumulative_sums_of_nan_and_infinity(rng, n):
  """What stands before an element stays finite."""
  x = normal(rng, 2, n)
  x[0, n // 2], x[0, n - 3], x[1, n // 3] = np.inf, -np.inf, np.nan
  call = tt.tile_call(functools.partial(cumsums_kernel, axes=(0,)), out(*[(x.shape, np.float32)] * 2), grid=2)
  with np.errstate(invalid="ignore"):
    return Case(call, (x,), (f64(x).cumsum(1), np.flip(np.flip(f64(x), 1).cumsum(1), 1)), "reduce")


# ---- the programs of the language page


def softmax_kernel(x, y, *, rows, bn):
  n = x.shape[1]
  r = tt.block(tt.program_id(0), rows)
  if n <= bn:
    s = x[r, :].astype(jnp.float32)
    e = tt.exp(s - tt.max(s, axis=1, keepdims=True))
    y[r, :] = (e / tt.sum(e, axis=1, keepdims=True)).astype(y.dtype)
    return
  m = tt.alloc_fragment((rows,), jnp.float32)
  l = tt.alloc_fragment((rows,), jnp.float32)
  m[...], l[...] = -jnp.inf, 0
  for k in tt.range(tt.cdiv(n, bn)):
    s = tt.load(x.at[r, tt.block(k, bn)], fill_value=-jnp.inf).astype(jnp.float32)
    m_new = tt.maximum(m[...], tt.max(s, axis=1))
    l[...] = l[...] * tt.exp(m[...] - m_new) + tt.sum(tt.exp(s - m_new[:, None]), axis=1)
    m[...] = m_new
  for k in tt.range(tt.cdiv(n, bn)):
    s = x[r, tt.block(k, bn)].astype(jnp.float32)
    y[r, tt.block(k, bn)] = (tt.exp(s - m[:, None]) / l[:, None]).astype(y.dtype)


@case(sizes=((4, 229, 8192), (4, 1000, 8192), (1, 8192, 8192), (2, 3000, 512), (1, 5000, 2048), (3, 777, 100),
             (8, 96, 96)))
def softmax(rng, sizes):
  rows, n, bn = sizes
  x = (normal(rng, 10, n) * 3).astype(ml_dtypes.bfloat16)
  e = np.exp(f64(x) - f64(x).max(1, keepdims=True))
  call = tt.tile_call(functools.partial(softmax_kernel, rows=rows, bn=bn), out((x.shape, x.dtype)),
                      grid=tt.cdiv(10, rows))
  return Case(call, (x,), (e / e.sum(1, keepdims=True),), "elementwise")


def rms_norm_silu_kernel(x, w, y, *, rows, bn, eps):
  n = x.shape[1]
  r = tt.block(tt.program_id(0), rows)
  ss = tt.alloc_fragment((rows,), jnp.float32)
  ss[...] = 0
  for k in tt.range(tt.cdiv(n, bn)):
    v = x[r, tt.block(k, bn)].astype(jnp.float32)
    ss[...] += tt.sum(v * v, axis=1)
  scale = tt.rsqrt(ss[...] / n + eps)
  for k in tt.range(tt.cdiv(n, bn)):
    cols = tt.block(k, bn)
    v = x[r, cols].astype(jnp.float32) * scale[:, None] * w[None, cols].astype(jnp.float32)
    y[r, cols] = tt.silu(v).astype(y.dtype)


@case(sizes=((1, 8192, 4096), (1, 320, 4096), (2, 1000, 300), (4, 96, 64), (8, 2880, 256)))
def rms_norm_silu(rng, sizes):
  rows, n, bn = sizes
  x, w = normal(rng, 9, n, dtype=ml_dtypes.bfloat16), normal(rng, n, dtype=ml_dtypes.bfloat16)
  v = f64(x) / np.sqrt((f64(x) ** 2).mean(1, keepdims=True) + 1e-5) * f64(w)
  call = tt.tile_call(functools.partial(rms_norm_silu_kernel, rows=rows, bn=bn, eps=1e-5), out((x.shape, x.dtype)),
                      grid=tt.cdiv(9, rows))
  return Case(call, (x, w), (v / (1 + np.exp(-v)),), "elementwise")


def add_rms_norm_kernel(h, delta, w, h_out, y, *, rows, eps):
  r = tt.block(tt.program_id(0), rows)
  v = h[r, :].astype(jnp.float32) + delta[r, :].astype(jnp.float32)
  h_out[r, :] = v.astype(h_out.dtype)
  scale = tt.rsqrt(tt.mean(v * v, axis=1, keepdims=True) + eps)
  y[r, :] = (v * scale * w[None, :].astype(jnp.float32)).astype(y.dtype)


@case(sizes=((1, 1000), (4, 512), (2, 33), (1, 6000)))
def add_rms_norm(rng, sizes):
  rows, n = sizes
  h, delta, w = (normal(rng, *s, dtype=ml_dtypes.bfloat16) for s in ((11, n), (11, n), (n,)))
  like = (h.shape, h.dtype)
  call = tt.tile_call(functools.partial(add_rms_norm_kernel, rows=rows, eps=1e-5), out(like, like),
                      grid=tt.cdiv(11, rows), input_output_aliases={0: 0})
  v = f64(h) + f64(delta)
  return Case(call, (h, delta, w), (v, v / np.sqrt((v * v).mean(1, keepdims=True) + 1e-5) * f64(w)), "elementwise")


def layer_norm_kernel(x, y, *, rows):
  r = tt.block(tt.program_id(0), rows)
  v = x[r, :]
  d = v - tt.mean(v, axis=1, keepdims=True)
  y[r, :] = d * tt.rsqrt(tt.mean(d * d, axis=1, keepdims=True) + 1e-6)


@case(n=(7, 229, 3000))
def layer_norm(rng, n):
  x = normal(rng, 6, n) * 2 + 5
  d = f64(x) - f64(x).mean(1, keepdims=True)
  want = d / np.sqrt((d * d).mean(1, keepdims=True) + 1e-6)
  call = tt.tile_call(functools.partial(layer_norm_kernel, rows=2), out((x.shape, x.dtype)), grid=3, warpgroups=2)
  return Case(call, (x,), (want,), "reduce")


# ---- beside gemms


def attention_kernel(q, k, v, o, *, bm, bn):
  """Flash attention: row statistics of accumulators, kept in their layout."""
  i = tt.program_id(0)
  rows, d = tt.block(i, bm), q.shape[1]
  q_s = tt.alloc_shared((bm, d), q.dtype)
  k_s = tt.alloc_shared((bn, d), k.dtype)
  v_s = tt.alloc_shared((bn, d), v.dtype)
  s = tt.alloc_fragment((bm, bn), jnp.float32)
  acc = tt.alloc_fragment((bm, d), jnp.float32)
  m = tt.alloc_fragment((bm,), jnp.float32)
  l = tt.alloc_fragment((bm,), jnp.float32)
  acc[...], m[...], l[...] = 0, -jnp.inf, 0
  tt.copy(q.at[rows, :], q_s)
  for j in tt.pipelined(tt.cdiv(k.shape[0], bn), num_stages=2):
    tt.copy(k.at[tt.block(j, bn), :], k_s)
    tt.copy(v.at[tt.block(j, bn), :], v_s)
    tt.gemm(q_s, k_s.T, s, accumulate=False)
    x = tt.where((j * bn + tt.arange(bn))[None, :] < k.shape[0], s[...] * 0.125, -jnp.inf)
    m_new = tt.maximum(m[...], tt.max(x, axis=1))
    scale = tt.exp(m[...] - m_new)
    p = tt.exp(x - m_new[:, None])
    l[...] = l[...] * scale + tt.sum(p, axis=1)
    m[...] = m_new
    acc[...] = acc[...] * scale[:, None]
    tt.gemm(p.astype(v.dtype), v_s, acc)
  o[rows, :] = (acc[...] / l[:, None]).astype(o.dtype)


@case(sizes=((1, 64, 64, 300), (2, 128, 96, 500), (1, 128, 64, 64)))
def attention(rng, sizes):
  warpgroups, bm, bn, n = sizes
  q, k, v = ((normal(rng, r, 64) + c).astype(ml_dtypes.bfloat16) for r, c in ((200, 0), (n, 0), (n, 1)))
  call = tt.tile_call(functools.partial(attention_kernel, bm=bm, bn=bn), out((q.shape, q.dtype)),
                      grid=tt.cdiv(200, bm), warpgroups=warpgroups)
  s = f64(q) @ f64(k).T / 8
  p = np.exp(s - s.max(1, keepdims=True))
  return Case(call, (q, k, v), (p / p.sum(1, keepdims=True) @ f64(v),), "gemm")


def accumulator_sums_kernel(a, b, y, z):
  """Rows and columns of an accumulator whose columns are shared out among the warpgroups."""
  a_s = tt.alloc_shared((64, 64), a.dtype)
  b_s = tt.alloc_shared((64, 128), b.dtype)
  acc = tt.alloc_fragment((64, 128), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(3, num_stages=2):
    tt.copy(a.at[:, tt.block(k, 64)], a_s)
    tt.copy(b.at[tt.block(k, 64), :], b_s)
    tt.gemm(a_s, b_s, acc, policy=tt.FULL_COL)
  y[...] = tt.max(acc[...], axis=1)
  z[...] = tt.max(acc[...], axis=0)


@case
def accumulator_sums(rng):
  a, b = (rng.integers(-4, 4, s).astype(ml_dtypes.bfloat16) for s in ((64, 192), (192, 128)))
  call = tt.tile_call(accumulator_sums_kernel, out(((64,), np.float32), ((128,), np.float32)), grid=1, warpgroups=2)
  c = f64(a) @ f64(b)
  return Case(call, (a, b), (c.max(1), c.max(0)), "gemm")
