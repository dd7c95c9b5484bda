"""Attention of few queries to long caches of keys and values, whole or in pages: what a model does for each new token.

All queries that share keys, which are the heads of a group at each of the s_q places, are rows of one tile, so that a
cache is read once. What bounds this is memory: the keys are divided among the SMs (split_kv.py).
"""
from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.kernels.arguments import number
from tiletrace.kernels.flash_attention import check_dtypes, check_head_dim
from tiletrace.kernels.kv_cache import Keys, Sight, block_of, check_cache, gathered, seen_reference
from tiletrace.kernels.online_softmax import LOG2E, OnlineSoftmax, softmax_where, zero_past
from tiletrace.kernels.split_kv import each_piece, split_attention, store_piece

STREAMED = tt.CompileOptions(l2_promotion=128, overlap_launch=True)          # one program reads a key, once


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeTiling:
  """bm rows of queries, divided among the warpgroups, and bn keys at a time; `num_stages` ring slots of keys and
  values. Queries in registers, where there is room: a slot of theirs would empty the ring between pieces."""
  bm: int
  bn: int
  warpgroups: int
  num_stages: int
  held: bool = True


def choose_decode_tiling(head_dim: int, page_size: int | None = None) -> DecodeTiling:
  """About 100 KB or more of keys and values on their way to an SM while one more block is computed with.

  Args:
    page_size: of caches in pages.
  """
  bn = block_of(128 if head_dim <= 128 else 64 if head_dim <= 192 else 32, page_size)    # what registers leave
  return DecodeTiling(64, bn, 1, min(16, (200 << 10) // (4 * bn * head_dim)), head_dim <= 128)


def flash_decode_kernel(starts, owners, q, k, v, lengths, table, out, residual, partial, partial_lse, *, tiling, scale,
                        sight):
  """out[b, k, rows, h] of q[b, k, rows, h]; k, v: [b, s, k, h], or [pages, page_size, k, h] by table[b, max_pages]."""
  i, head = tt.program_id(1), tt.program_id(2)
  bm, bn, d = tiling.bm, tiling.bn, q.shape[3]
  rows, keys = tt.block(i, bm), Keys(k, table, bn, sight)
  q_s = None if tiling.held else tt.alloc_shared((bm, d), q.dtype)
  k_s = tt.alloc_shared((bn, d), q.dtype)
  v_s = tt.alloc_shared((bn, d), q.dtype)
  logits = tt.alloc_fragment((bm, bn), jnp.float32)
  acc = tt.alloc_fragment((bm, d), jnp.float32)
  softmax = OnlineSoftmax(bm, scale * LOG2E)

  def piece(e, index, first, last, whole):
    stop = tt.clip(lengths[e], 0, keys.capacity)
    acc[...] = 0
    softmax.start()
    queries = q[e, head, rows, :] if q_s is None else q_s
    if q_s is not None:
      tt.copy(q.at[e, head, rows, :], q_s)
    for j in tt.pipelined(first, last, num_stages=tiling.num_stages):
      parts = keys.find(e, j)
      edge = keys.is_edge(j, stop, parts)
      for cache, s in ((k, k_s), (v, v_s)):
        for page, place, part in parts:
          tt.copy(cache.at[page, place, head, :], s.at[part])
      tt.gemm(queries, k_s.T, logits, accumulate=False)
      with tt.when(edge):
        logits[...] = tt.where(keys.seen(j, stop, keys.find(e, j), i * bm, bm), logits[...], -jnp.inf)
      p, alpha = softmax.weights(logits[...])
      acc[...] *= alpha[:, None]
      zero_past([v_s], j, stop)
      tt.gemm(p.astype(q.dtype), v_s, acc)
    acc[...] *= softmax.share()[:, None]
    store_piece([(slice(None), acc[...])], softmax.log2_sum(), (e, head, rows), index, whole,
                (out, residual, partial, partial_lse))

  each_piece(starts, owners, piece)


def flash_decode(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, *,
                 block_table: jax.Array | None = None, scale: float | None = None, is_causal: bool = True,
                 return_residual: bool = False) -> Any:
  """softmax(scale * query keyᵀ) value of the last few tokens of sequences, whose keys and values are cached.

  Args:
    query: bfloat16 or float16 [b, s_q, n, h], h in 64, 96, 128, 192 or 256: of the last s_q tokens.
    key, value: of the same dtype [b, s, k, h]; or, with block_table, pages [pages, page_size, k, h], page_size a
      multiple of 16, better of 128. n is a multiple of k (grouped queries).
    lengths: int32 [b], of the sequences, the last s_q tokens included. Taken as 0 or more, and at most s (or
      max_pages * page_size). What lies past them is not used, whatever it is.
    block_table: int32 [b, max_pages]: the page that holds keys i * page_size to (i + 1) * page_size of sequence b is
      block_table[b, i]. An entry below 0, or of `pages` or more, is a page whose keys are not seen.
    scale: of the logits, above 0, by default 1 / sqrt(h).
    is_causal: query i sees the keys before lengths - s_q + i + 1; else all before lengths.
    return_residual: also give the log-sum-exp of each query's logits.

  Returns:
    [b, s_q, n, h] of query's dtype; with return_residual also float32 [b, s_q, n]. A query that sees no key gives
    zeros, and -inf as its residual.

  Raises:
    TileTypeError: shapes, dtypes or head dimensions that it does not take.

  There are no derivatives.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import flash_decode, flash_decode_reference
    >>> q, k, v = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(
    ...     ((2, 1, 4, 64), (9, 16, 2, 64), (9, 16, 2, 64))))
    >>> table, lengths = jnp.asarray([[3, 8, 1], [0, 5, -1]], jnp.int32), jnp.asarray([40, 19], jnp.int32)
    >>> y = jax.jit(flash_decode)(q, k, v, lengths, block_table=table)
    >>> z = flash_decode_reference(q, k, v, lengths, block_table=table)
    >>> y.shape, bool(jnp.allclose(y.astype("float32"), z.astype("float32"), atol=0.02))
    ((2, 1, 4, 64), True)
  """
  b, t, n, h = _check_operands(query, key, value)
  check_cache("flash_decode", b, key, lengths, block_table)
  scale = number("flash_decode", "scale", 1 / math.sqrt(h) if scale is None else scale, above=0)
  heads = key.shape[2]
  tiling = choose_decode_tiling(h, None if block_table is None else key.shape[1])
  kernel = functools.partial(flash_decode_kernel, tiling=tiling, sight=Sight(t if is_causal else 1, n // heads),
                             scale=scale)
  return split_attention("flash_decode", kernel, query, (key, value), lengths, block_table, heads=heads, width=h,
                         bm=tiling.bm, block=tiling.bn, warpgroups=tiling.warpgroups, residual=return_residual,
                         options=STREAMED)


def flash_decode_reference(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, *,
                           block_table: jax.Array | None = None, scale: float | None = None, is_causal: bool = True,
                           return_residual: bool = False) -> Any:
  """What `flash_decode` computes, in jax.numpy and f32."""
  b, t, n, h = query.shape
  (k, has), (v, _) = gathered(key, block_table), gathered(value, block_table)
  used = (jnp.arange(k.shape[1]) < lengths[:, None])[..., None, None]
  k, v = (jnp.where(used, x, 0).astype(jnp.float32) for x in (k, v))
  q = query.reshape(b, t, k.shape[2], -1, h).astype(jnp.float32) * (1 / math.sqrt(h) if scale is None else scale)
  logits = jnp.einsum("btkgh,bskh->btkgs", q, k, precision="highest")
  seen = seen_reference(lengths, has, t, is_causal)[:, :, None, None, :]
  p, residual = softmax_where(logits, seen)
  out = jnp.einsum("btkgs,bskh->btkgh", p, v, precision="highest").astype(query.dtype).reshape(query.shape)
  return (out, residual.reshape(b, t, n)) if return_residual else out


def _check_operands(query: Any, key: Any, value: Any) -> tuple[int, ...]:
  arrays = {"query": query, "key": key, "value": value}
  for name, x in arrays.items():
    if getattr(x, "ndim", None) != 4 or not x.size:
      raise TileTypeError(f"flash_decode: {name} has the shape {np.shape(x)}", loc=caller_loc(),
                          hint="query [b, s_q, n, h]; key and value [b, s, k, h], or pages [pages, page_size, k, h]")
  check_dtypes("flash_decode", arrays)
  n, h = query.shape[2:]
  if value.shape != key.shape or h != key.shape[3] or n % key.shape[2]:
    raise TileTypeError("flash_decode: " + ", ".join(f"{name} {list(x.shape)}" for name, x in arrays.items()),
                        loc=caller_loc(), hint="query [b, s_q, n, h], where n is a multiple of k; key and value "
                        "[b, s, k, h], or pages [pages, page_size, k, h]")
  check_head_dim("flash_decode", h)
  return query.shape
