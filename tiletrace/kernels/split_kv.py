"""Attention of few queries: the keys of all examples are divided evenly among the SMs, and the results of parts joined.

The blocks of keys of all examples, one after another, are cut into as many parts as there are programs, of equal length
whatever the lengths of the examples are. What a part has of an example is a *piece*. An example that is one piece is
finished by the program that has it; the others leave, for each piece, softmax(q kᵀ) v of its keys alone and the
log-sum-exps, which `combine` weighs against each other (Dao et al., Flash-Decoding).
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import tiletrace as tt
from tiletrace.lowering.target import SM_90A

_TOLERATED = 1.1         # times the least time, where examples of equal length then need no cut
_START = 6               # what the start and the end of a program take, in blocks of keys
_COMBINED = 8192         # elements of pieces that a program of `combine` loads at a time: 64 registers of a thread
_COMBINED_ROWS = 4
_COMBINING = 4           # programs of `combine` for each SM
OVERLAP = tt.CompileOptions(overlap_launch=True)


def choose_parts(batch: int, programs: int, blocks: int, *, slots: int = SM_90A.sm_count) -> int:
  """How many parts the keys are cut into, where each part takes `programs` programs and `slots` run at once.

  What takes the fewest blocks one after another; of those that are nearly as good, one that cuts examples of equal
  length evenly or not.

  Args:
    blocks: of keys, of all examples.

  Example:
    >>> choose_parts(1, 2, 512), choose_parts(128, 2, 4096), choose_parts(6, 8, 384), choose_parts(1, 8, 512)
    (64, 64, 16, 16)
  """
  counts = range(1, min(max(2 * slots // programs, batch, 1), max(blocks, 1)) + 1)
  time = {p: tt.cdiv(p * programs, slots) * (tt.cdiv(blocks, p) + _START) for p in counts}
  least = min(time.values())
  even = [p for p in counts if (p % batch == 0 or batch % p == 0) and time[p] <= _TOLERATED * least]
  return min(even or counts, key=lambda p: (time[p], p))


def plan(lengths: jax.Array, capacity: int, block: int, parts: int) -> tuple[jax.Array, jax.Array]:
  """Where examples begin, in blocks of keys, and which one each part begins in.

  Args:
    lengths: int32 [b]; taken as 0 or more, and `capacity` or less.

  Returns:
    starts: int32 [b + 1]; the last one is the number of all blocks.
    owners: int32 [parts + 1]; the last one is b.
  """
  b = lengths.shape[0]
  blocks = (jnp.clip(lengths, 0, capacity) + block - 1) // block
  before = jnp.arange(b) < jnp.arange(b + 1)[:, None]
  starts = jnp.sum(jnp.where(before, blocks, 0), axis=1, dtype=jnp.int32)         # two fusions in all: a scan has more
  first = starts[-1] * jnp.arange(parts + 1, dtype=jnp.int32) // jnp.clip(starts[-1], 1, parts)
  return starts, jnp.sum(starts[1:] <= first[:, None], axis=1, dtype=jnp.int32)


def each_piece(starts: Any, owners: Any, body: Callable[[Any, Any, Any, Any, Any], None]) -> None:
  """In a kernel whose first axis of the grid is the parts: body(example, piece, first, last, whole) for each piece of
  this program's part. It has the blocks from first to last; `whole`: that is all of the example's."""
  p, parts, b = tt.program_id(0), tt.num_programs(0), starts.shape[0] - 1
  total = starts[b]
  used = _used(parts, total)
  begin, end = total * p // used, total * (p + 1) // used
  for e in tt.range(owners[p], tt.minimum(owners[p + 1] + 1, b)):
    start, stop = starts[e], starts[e + 1]
    first, last = tt.maximum(begin - start, 0), tt.minimum(end, stop) - start
    with tt.when(first < last):
      body(e, p + e, first, last, last - first == stop - start)


def _used(parts: int, total: Any) -> Any:
  """How many parts the blocks are cut into, so that none of those has no block."""
  return tt.clip(total, 1, parts)


def store_piece(o: Sequence[tuple[slice, Any]], lse: Any, where: tuple, piece: Any, whole: Any, refs: tuple, *,
                through: Any = None) -> None:
  """In a kernel: what a piece gives, and lse[rows] to base 2, go to their place.

  Args:
    o: columns, and float32 [rows, columns].
    where: index of the rows in `out`, without the last dimension.
    refs: (out, residual or None, partial, partial_lse).
    through: shared memory [rows, all columns] of out's dtype, no longer used: threads that hold few elements of a row
      side by side write whole lines from there.
  """
  out, residual, partial, partial_lse = refs
  with tt.when(whole) as w:
    for columns, x in o:
      tt.store(out.at[*where, columns] if through is None else through.at[:, columns], x.astype(out.dtype))
    if through is not None:
      tt.copy(through, out.at[*where, :])
    if residual is not None:
      residual[*where] = lse * math.log(2)
  with w.otherwise():
    for columns, x in o:
      partial[piece, *where[1:], columns] = x
    partial_lse[piece, *where[1:]] = lse


def combine_kernel(starts, partial, partial_lse, out, residual, new_out, new_residual, *, parts, rows, chunk):
  """out[b, heads, rows, d] and residual[b, heads, rows] of the examples that are not one piece.

  A program has every n-th tile of `rows` rows of an example, so that few programs find that there is nothing to do. It
  loads `chunk` pieces at once.
  """
  e, heads, tiles = tt.program_id(0), out.shape[1], tt.cdiv(out.shape[2], rows)
  start, stop, total = starts[e], starts[e + 1], tt.maximum(starts[starts.shape[0] - 1], 1)
  used = _used(parts, total)
  first, last = ((start + 1) * used - 1) // total, (stop * used - 1) // total    # the parts that have its ends
  pieces = tt.where(start == stop, 0, last - first + 1)
  acc = tt.alloc_fragment((rows, out.shape[3]), jnp.float32)
  top = tt.alloc_fragment((rows,), jnp.float32)
  sum_ = tt.alloc_fragment((rows,), jnp.float32)
  with tt.when(pieces != 1):
    for i in tt.range(tt.program_id(1), heads * tiles, tt.num_programs(1)):
      head, at = i // tiles, tt.block(i % tiles, rows)
      acc[...], top[...], sum_[...] = 0, -jnp.inf, 0
      for c in tt.range(0, pieces, chunk):
        places = [tt.minimum(c + p, pieces - 1) + first + e for p in range(chunk)]
        o = [partial[place, head, at, :] for place in places]
        lse = [tt.where(c + p < pieces, partial_lse[place, head, at], -jnp.inf) for p, place in enumerate(places)]
        new = functools.reduce(tt.maximum, lse, top[...])
        base = tt.where(new == -jnp.inf, 0, new)           # no key is seen
        alpha, weights = tt.exp2(top[...] - base), [tt.exp2(x - base) for x in lse]
        acc[...] = sum((x * w[:, None] for x, w in zip(o, weights, strict=True)), acc[...] * alpha[:, None])
        sum_[...] = sum(weights, sum_[...] * alpha)
        top[...] = new
      share = 1 / tt.where(sum_[...] == 0, 1, sum_[...])
      new_out[e, head, at, :] = (acc[...] * share[:, None]).astype(out.dtype)
      if residual is not None:
        new_residual[e, head, at] = (top[...] + tt.log2(sum_[...])) * math.log(2)


def combine_call(name: str, shape: tuple[int, int, int, int], final: tuple, *, parts: int) -> tt.TileCall:
  """What joins the pieces of `split_calls`."""
  b, heads, rows, width = shape
  few = min(_COMBINED_ROWS, rows)
  chunk = max(1, min(16, parts, _COMBINED // (few * width)))
  programs = max(1, min(_COMBINING * SM_90A.sm_count // b, heads * tt.cdiv(rows, few)))
  return tt.tile_call(functools.partial(combine_kernel, parts=parts, rows=few, chunk=chunk), final, grid=(b, programs),
                      name=f"{name}_combine", options=OVERLAP,
                      input_output_aliases={3: 0} | ({4: 1} if final[1] is not None else {}))


def split_calls(name: str, kernel: Callable, shape: tuple[int, int, int, int], dtype: Any, *, parts: int, bm: int,
                warpgroups: int, residual: bool, options: tt.CompileOptions = OVERLAP, sharing: int = 1
                ) -> tuple[tt.TileCall, tt.TileCall]:
  """The calls that give out[b, heads, rows, d] and residual[b, heads, rows] or None.

  Args:
    kernel: of (starts, owners, *operands, out, residual, partial, partial_lse), on the grid (parts, tiles, heads).
    shape: of the result.
    bm: rows of a tile.
    options: of the split.
    sharing: how many tiles of rows read the keys together, as a cluster: it divides their number.

  Returns:
    the split, of (starts, owners, *operands), and the combination, of (starts, partial, partial_lse, out, residual).
  """
  b, heads, rows, _ = shape
  f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  final = (jax.ShapeDtypeStruct(shape, dtype), f32(shape[:3]) if residual else None)
  partial = (parts + b - 1, *shape[1:])
  split = tt.tile_call(kernel, (*final, f32(partial), f32(partial[:3])), grid=(parts, tt.cdiv(rows, bm), heads),
                       warpgroups=warpgroups, name=name, options=options,
                       cluster=(1, sharing, 1) if sharing > 1 else None)
  return split, combine_call(name, shape, final, parts=parts)


def split_attention(name: str, kernel: Callable, query: jax.Array, caches: tuple[jax.Array, ...], lengths: jax.Array,
                    table: jax.Array | None, *, heads: int, width: int, bm: int, block: int, warpgroups: int,
                    residual: bool, options: tt.CompileOptions = OVERLAP, sharing: int = 1) -> Any:
  """query[b, s_q, n, h] as rows of `heads` groups, through the two calls; [b, s_q, n, width], and [b, s_q, n].

  Args:
    caches: [b, s, ...] each, or pages [pages, page_size, ...] by table[b, max_pages].
    block: keys at a time.
    options: of the kernel.
    sharing: of the tiles of rows that read the same keys, how many do so together (split_calls).
  """
  b, t, n, h = query.shape
  group = n // heads
  rows = t * group
  q = query.reshape(b, t, heads, group, h).swapaxes(1, 2).reshape(b, heads, rows, h)
  capacity = caches[0].shape[1] * (1 if table is None else table.shape[1])
  parts = choose_parts(b, tt.cdiv(rows, bm) * heads, b * tt.cdiv(capacity, block))
  starts, owners = plan(lengths, capacity, block, parts)
  split, combine = split_calls(name, kernel, (b, heads, rows, width), query.dtype, parts=parts, bm=bm,
                               warpgroups=warpgroups, residual=residual, options=options, sharing=sharing)
  out, lse, partial, partial_lse = split(starts, owners, q, *caches, lengths, table)
  out, lse = combine(starts, partial, partial_lse, out, lse)
  out = out.reshape(b, heads, t, group, width).swapaxes(1, 2).reshape(b, t, n, width)
  if not residual:
    return out
  return out, lse.reshape(b, heads, t, group).swapaxes(1, 2).reshape(b, t, n)
