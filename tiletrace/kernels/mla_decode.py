"""Multi-head latent attention, of the last few tokens of sequences (DeepSeek-V2, arXiv:2405.04434, weights absorbed).

All heads share one cache, whose rows are keys and, but for the last 64 columns, values too. Two warpgroups own 256 of
the 512 columns of the result each, since one could not hold them; they share the keys of a block, and what they need of
each other (a row's maximum, and the weights of the other one's keys) goes through shared memory.
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
from tiletrace.kernels.flash_decode import flash_decode_reference
from tiletrace.kernels.kv_cache import Keys, Sight, block_of, check_cache
from tiletrace.kernels.online_softmax import LOG2E, OnlineSoftmax, zero_past
from tiletrace.kernels.split_kv import each_piece, split_attention, store_piece

LATENT, ROPE = 512, 64
_ROWS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class MlaTiling:
  """bn keys at a time; the latent columns in `chunks`, each with `num_stages` ring slots and barriers of its own."""
  bn: int
  chunks: int
  num_stages: int


def choose_mla_tiling(rows: int, page_size: int | None = None) -> MlaTiling:
  """Where several tiles of rows share a cache through L2, arithmetic bounds: 128 keys in one slot, since wgmma of fewer
  for each warpgroup waits for shared memory; a chunk is refilled once its values are added, while others still are.
  Where memory bounds: two slots, so that one is always on its way.

  Args:
    rows: queries that share a cache, s_q * heads.
    page_size: of a cache in pages.
  """
  if rows > _ROWS and (page_size is None or (page_size % 64 == 0 and block_of(128, page_size) == 128)):
    return MlaTiling(128, 4, 1)
  return MlaTiling(64 if page_size is None else math.gcd(64, page_size), 1, 2)     # more pages take more registers


def choose_sharing(rows: int, tiling: MlaTiling, *, paged: bool) -> int:
  """How many tiles of rows are a cluster, for which a chunk of the cache is read from L2 once, and multicast.

  Of the tilings for several tiles of rows: there power bounds (700 W on an H200), of which reads from L2 take a part.
  Not of caches in pages: what each page brings has not been measured in clusters.
  """
  return 2 if tiling.chunks > 1 and not paged and tt.cdiv(rows, _ROWS) % 2 == 0 else 1


def mla_decode_kernel(starts, owners, q, cache, lengths, table, out, residual, partial, partial_lse, *, tiling, scale,
                      sight):
  """out[b, 1, rows, 512] of q[b, 1, rows, 576]; cache is [b, s, 576], or [pages, page_size, 576] by table."""
  i, bn = tt.program_id(1), tiling.bn
  rows, keys = tt.block(i, _ROWS), Keys(cache, table, bn, sight)
  width = LATENT // tiling.chunks
  chunks = [slice(x, x + width) for x in range(0, LATENT, width)]
  q_s = tt.alloc_shared((_ROWS, LATENT), q.dtype)
  rope_s = tt.alloc_shared((bn, ROPE), q.dtype)
  kv_s = [tt.alloc_shared((bn, width), q.dtype) for _ in chunks]
  logits = tt.alloc_fragment((_ROWS, bn), jnp.float32)
  p = tt.alloc_fragment((_ROWS, bn), q.dtype)
  acc = [tt.alloc_fragment((_ROWS, width), jnp.float32) for _ in chunks]
  softmax = OnlineSoftmax(_ROWS, scale * LOG2E)

  def piece(e, index, first, last, whole):
    stop = tt.clip(lengths[e], 0, keys.capacity)
    softmax.start()
    for a in acc:
      a[...] = 0
    tt.copy(q.at[e, 0, rows, :LATENT], q_s)
    q_rope = q[e, 0, rows, LATENT:]                        # in registers: shared memory is full
    for j in tt.pipelined(first, last, num_stages=tiling.num_stages):
      parts = keys.find(e, j)
      edge = keys.is_edge(j, stop, parts)
      for columns, s in ((slice(LATENT, None), rope_s), *zip(chunks, kv_s, strict=True)):
        for page, place, part in parts:
          tt.copy(cache.at[page, place, columns], s.at[part])
      tt.gemm(q_rope, rope_s.T, logits, accumulate=False, policy=tt.FULL_COL)
      for chunk, s in zip(chunks, kv_s, strict=True):
        tt.gemm(q_s.at[:, chunk], s.T, logits, policy=tt.FULL_COL)
      with tt.when(edge):
        logits[...] = tt.where(keys.seen(j, stop, keys.find(e, j), i * _ROWS, _ROWS), logits[...], -jnp.inf)
      weights, alpha = softmax.weights(logits[...], add=False)
      p[...] = weights.astype(p.dtype)
      zero_past(kv_s, j, stop, min(bn, 32))
      for a in acc:
        a[...] *= alpha[:, None]
      for s, a in zip(kv_s, acc, strict=True):
        tt.gemm(p, s, a, policy=tt.FULL_COL)
      softmax.add(weights, alpha)                          # while the last product is under way
    share = softmax.share()[:, None]
    for a in acc:
      a[...] *= share
    store_piece([(chunk, a[...]) for chunk, a in zip(chunks, acc, strict=True)], softmax.log2_sum(), (e, 0, rows),
                index, whole, (out, residual, partial, partial_lse), through=q_s)

  each_piece(starts, owners, piece)


def mla_decode(query: jax.Array, cache: jax.Array, lengths: jax.Array, *, scale: float,
               block_table: jax.Array | None = None, is_causal: bool = True, return_residual: bool = False) -> Any:
  """softmax(scale * query cacheᵀ) cache[..., :512] of the last few tokens of sequences.

  Args:
    query: bfloat16 or float16 [b, s_q, heads, 576] of the last s_q tokens: 512 in the latent space, and 64 with a
      position (rope). Tiles have 64 rows of s_q * heads: fewer cost the same.
    cache: of the same dtype [b, s, 576]; or, with block_table, pages [pages, page_size, 576], page_size a multiple of
      16, better 64 or 128.
    lengths: int32 [b], of the sequences, the last s_q tokens included. Taken as 0 or more, and at most s (or
      max_pages * page_size). What lies past them is not used, whatever it is.
    scale: of the logits, above 0. 1 / sqrt(192) for DeepSeek-V2 and V3: that of heads before weights were absorbed.
    block_table: int32 [b, max_pages]: the page that holds keys i * page_size to (i + 1) * page_size of sequence b is
      block_table[b, i]. An entry below 0, or of `pages` or more, is a page whose keys are not seen.
    is_causal: query i sees the keys before lengths - s_q + i + 1; else all before lengths.
    return_residual: also give the log-sum-exp of each query's logits.

  Returns:
    [b, s_q, heads, 512] of query's dtype; with return_residual also float32 [b, s_q, heads]. A query that sees no key
    gives zeros, and -inf as its residual.

  Raises:
    TileTypeError: shapes or dtypes that it does not take.

  There are no derivatives.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import mla_decode, mla_decode_reference
    >>> q, cache = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(
    ...     ((2, 1, 16, 576), (2, 100, 576))))
    >>> lengths = jnp.asarray([100, 31], jnp.int32)
    >>> y = jax.jit(lambda *xs: mla_decode(*xs, scale=192**-0.5))(q, cache, lengths)
    >>> z = mla_decode_reference(q, cache, lengths, scale=192**-0.5)
    >>> y.shape, bool(jnp.allclose(y.astype("float32"), z.astype("float32"), atol=0.02))
    ((2, 1, 16, 512), True)
  """
  b, t, heads, _ = _check_operands(query, cache)
  check_cache("mla_decode", b, cache, lengths, block_table)
  scale = number("mla_decode", "scale", scale, above=0)
  tiling = choose_mla_tiling(t * heads, None if block_table is None else cache.shape[1])
  return mla_decode_tiled(query, cache, lengths, block_table, tiling, scale=scale, is_causal=is_causal,
                          residual=return_residual)


def mla_decode_tiled(query: jax.Array, cache: jax.Array, lengths: jax.Array, table: jax.Array | None,
                     tiling: MlaTiling, *, scale: float, is_causal: bool = True, residual: bool = False) -> Any:
  """`mla_decode` of operands that fit, with a tiling."""
  t, heads = query.shape[1:3]
  kernel = functools.partial(mla_decode_kernel, tiling=tiling, scale=scale,
                             sight=Sight(t if is_causal else 1, heads))
  return split_attention("mla_decode", kernel, query, (cache,), lengths, table, heads=1, width=LATENT, bm=_ROWS,
                         block=tiling.bn, warpgroups=2, residual=residual,
                         sharing=choose_sharing(t * heads, tiling, paged=table is not None))


def mla_decode_reference(query: jax.Array, cache: jax.Array, lengths: jax.Array, *, scale: float,
                         block_table: jax.Array | None = None, is_causal: bool = True,
                         return_residual: bool = False) -> Any:
  """What `mla_decode` computes, in jax.numpy and f32."""
  keys = cache[:, :, None, :]
  found = flash_decode_reference(query, keys, keys, lengths, block_table=block_table, scale=scale, is_causal=is_causal,
                                 return_residual=True)
  out, residual = found[0][..., :LATENT], found[1]
  return (out, residual) if return_residual else out


def _check_operands(query: Any, cache: Any) -> tuple[int, ...]:
  for name, x, rank in (("query", query, 4), ("cache", cache, 3)):
    if getattr(x, "ndim", None) != rank or not x.size or x.shape[-1] != LATENT + ROPE:
      raise TileTypeError(f"mla_decode: {name} has the shape {np.shape(x)}", loc=caller_loc(),
                          hint="query [b, s_q, heads, 576]; cache [b, s, 576], or pages [pages, page_size, 576]")
    if x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != query.dtype:
      raise TileTypeError(f"mla_decode: {name} is {x.dtype}, query {query.dtype}", loc=caller_loc(),
                          hint="both bfloat16, or both float16")
  return query.shape
