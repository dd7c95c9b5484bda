"""Flash attention, forward: softmax(q kᵀ) v, and the logits are never in memory (Dao, arXiv:2307.08691).

Gemms and softmax overlap in the order of Shah et al., arXiv:2407.08608.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.ffi.primitive import default_target
from tiletrace.kernels.arguments import check_elementwise, described, number, whole
from tiletrace.kernels.online_softmax import LOG2E, OnlineSoftmax, softmax_where

HEAD_DIMS = (64, 96, 128, 192, 256)
_L2_BYTES = 32 << 20       # of keys and values that programs beside each other share

Score = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionTiling:
  """bm queries, divided among the warpgroups, and bn keys at a time; `num_stages` ring slots of keys and of values;
  `persistent` as in tile_call."""
  bm: int
  bn: int
  warpgroups: int
  num_stages: int
  persistent: bool | str = True


def choose_attention_tiling(head_dim: int, keys: int, *, causal: bool = False, plain: bool = True,
                            target: str = "sm_90a") -> AttentionTiling:
  """Three warpgroups of 64 rows hide each other's softmax, where their registers (160 a thread) hold both accumulators,
  and what a score function takes. Targets without wgmma hold operands in registers, too, and have less shared memory:
  heads of 128 at most fit there."""
  if target != "sm_90a":
    return AttentionTiling(128, 64 if head_dim <= 96 else 48 if head_dim == 128 else 32, 2, 2, persistent=False)
  if not plain and head_dim <= 128:
    return AttentionTiling(128, 128 if head_dim < 128 else 96, 2, 2)
  if head_dim == 64:
    return AttentionTiling(192, 128, 3, 2, persistent=causal and keys <= 8192)
  if head_dim == 96:
    return AttentionTiling(192, 96, 3, 2)
  if head_dim == 128:
    if causal and keys <= 8192:
      return AttentionTiling(128, 128, 2, 2)
    return AttentionTiling(192, 80, 3, 3, persistent=not causal)
  return AttentionTiling(128, 96, 2, 2) if head_dim == 192 else AttentionTiling(128, 80, 2, 2)


def attention_kernel(q, k, v, lengths, o, residual, *, tiling, rule):
  """o[b, t, n, h], residual[b, t, n]; lengths[b] of k and v, or None."""
  b, i, n = _place_in_grid()
  s = k.shape[1]
  stop = s if lengths is None else tt.minimum(lengths[b], s)
  head = n // (q.shape[2] // k.shape[2])                   # query heads of a group share one head of keys
  rows = tt.block(i, tiling.bm)
  out, lse = attend(
      q.at[b, rows, n, :], lambda j: k.at[b, tt.block(j, tiling.bn), head, :],
      lambda j: _seen_rows(v.at[b, :, head, :], j * tiling.bn, stop, tiling.bn), stop=stop,
      place=i * tiling.bm + rule.offset, tail=lengths is not None, tiling=tiling, rule=rule,
      inside=rule.right is not None and q.shape[1] + rule.offset + rule.right <= s)
  o[b, rows, n, :] = out.astype(o.dtype)
  if residual is not None:
    residual[b, rows, n] = lse


def packed_attention_kernel(q, k, v, q_starts, k_starts, o, residual, *, tiling, rule):
  """o[t, n, h], residual[t, n]: queries q_starts[b] to q_starts[b + 1] see keys k_starts[b] to k_starts[b + 1]."""
  b, i, n = _place_in_grid()
  head = n // (q.shape[1] // k.shape[1])
  row, end = tt.maximum(q_starts[b] + i * tiling.bm, 0), q_starts[b + 1]
  first_key, end_key = k_starts[b], k_starts[b + 1]
  with tt.when(row < end):                                 # the grid has tiles for the longest sequence
    out, lse = attend(
        q.at[tt.ds(row, tiling.bm), n, :],
        lambda j: k.at[tt.ds(first_key + j * tiling.bn, tiling.bn), head, :],
        lambda j: _seen_rows(v.at[:, head, :], first_key + j * tiling.bn, end_key, tiling.bn), stop=end_key - first_key,
        place=i * tiling.bm + rule.offset, tail=True, inside=False, tiling=tiling, rule=rule)
    o.at[tt.ds(0, end), n, :][tt.ds(row, tiling.bm), :] = out.astype(o.dtype)              # not the next one's rows
    if residual is not None:
      residual.at[tt.ds(0, end), n][tt.ds(row, tiling.bm)] = lse


def _seen_rows(values, start, stop, rows):
  """Of [length, h] the `rows` from `start`: zeros from `stop` on, as what is there may be no number."""
  return values.at[tt.ds(0, stop), :].at[tt.ds(tt.maximum(start, 0), rows), :]


def _place_in_grid():
  """(example, tile of queries, head): heads in groups, and of each group the longest rows first."""
  return (tt.program_id(0), tt.num_programs(2) - 1 - tt.program_id(2),
          tt.program_id(1) * tt.num_programs(3) + tt.program_id(3))


def _grid(b: int, tiles: int, heads: int, kv_heads: int, head_bytes: int, rule: AttentionRule) -> tuple[int, ...]:
  """Heads go together where rows differ in length, as far as their keys and values (`head_bytes` each) stay in L2."""
  fitting = [g for g in range(1, heads + 1) if heads % g == 0 and (
      g == 1 or tt.cdiv(g * kv_heads, heads) * head_bytes <= _L2_BYTES)]
  group = fitting[-1] if rule.right is not None or rule.left is not None else 1
  return b, heads // group, tiles, group


def attend(q, keys, values, *, stop, place, tail, inside, tiling, rule):
  """The rows of one tile of queries against all keys that they see.

  Blocks of keys go from the last to the first: what is masked, along the diagonal and past the end, comes first.

  Args:
    q: view [bm, h] of the queries; the first stands at `place` among the keys.
    keys, values: of the j-th block of keys, a view [bn, h]; values that are not seen are zeros.
    stop: keys from there on are not seen. `tail`: there may be some. `inside`: no query reaches them.
  Returns:
    float32 [bm, h], and the log-sum-exps [bm].
  """
  bm, bn, d = tiling.bm, tiling.bn, q.shape[1]
  q_s = tt.alloc_shared((bm, d), q.dtype)
  k_s = tt.alloc_shared((bn, d), q.dtype)
  v_s = tt.alloc_shared((bn, d), q.dtype)
  logits = tt.alloc_fragment((bm, bn), jnp.float32)
  p = tt.alloc_fragment((bm, bn), q.dtype)
  acc = tt.alloc_fragment((bm, d), jnp.float32)
  rows = OnlineSoftmax(bm, LOG2E if rule.score is not None else rule.scale * LOG2E)
  alpha = tt.alloc_fragment((bm,), jnp.float32)
  acc[...], alpha[...] = 0, 1
  rows.start()
  ends = tail or (not inside and stop % bn > 0)            # whether a block may reach past the last key
  last = tt.cdiv(stop if rule.right is None else tt.minimum(stop, place + bm + rule.right), bn)
  first = 0 if rule.left is None else tt.maximum(place - rule.left, 0) // bn
  blocks = tt.maximum(last - first, 1)                     # one, all masked, where no key is seen

  def scores(j):
    tt.copy(keys(j), k_s)
    tt.gemm(q_s, k_s.T, logits, accumulate=False)

  def weigh(j):
    tt.copy(values(j), v_s)
    tt.gemm(p, v_s, acc)

  def softmax(j):
    if rule.score is not None:
      logits[...] = tt.call_jax(rule.score, logits[...] * rule.scale)
    if ends or rule.left is not None or rule.right is not None:
      with tt.when(_is_edge(j * bn, (j + 1) * bn, stop, place, bm, ends, rule)):
        logits[...] = tt.where(_seen(j * bn, bn, stop, place, bm, ends, rule), logits[...], -jnp.inf)
    weights, alpha[...] = rows.weights(logits[...])
    p[...] = weights.astype(p.dtype)

  tt.copy(q, q_s)
  j = first + blocks - 1
  scores(j)
  softmax(j)
  for m in tt.pipelined(1, blocks, num_stages=tiling.num_stages):
    scores(j - m)                                          # in flight while acc is rescaled,
    acc[...] *= alpha[:, None]
    weigh(j - m + 1)                                       # and this one during the softmax
    softmax(j - m)
  acc[...] *= alpha[:, None]
  weigh(first)
  return acc[...] * rows.share()[:, None], rows.log2_sum() * math.log(2)


def _is_edge(start, end, stop, place, bm, ends, rule):
  """Whether any query of the tile does not see all keys from start to end."""
  edges = [end > stop] if ends else []
  if rule.right is not None:
    edges.append(end - 1 > place + rule.right)
  if rule.left is not None:
    edges.append(start < place + bm - 1 - rule.left)
  return functools.reduce(operator.or_, edges)


def _seen(start, bn, stop, place, bm, ends, rule):
  """bool [bm, bn]: whether a query sees a key."""
  at = tt.arange(bn)[None, :]                              # of the block's keys
  bounds = [at < stop - start] if ends else []
  rows = place - start + tt.arange(bm)[:, None]
  if rule.right is not None:
    bounds.append(at <= rows + rule.right)
  if rule.left is not None:
    bounds.append(at >= rows - rule.left)
  return functools.reduce(operator.and_, bounds)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionRule:
  """Which logits count, and as what: query i sees the keys from i + offset - left to i + offset + right."""
  scale: float
  left: int | None = None
  right: int | None = None
  offset: int = 0
  score: Score | None = None


def flash_attention(query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float | None = None,
                    is_causal: bool = False, key_value_seq_lengths: jax.Array | None = None,
                    local_window_size: int | tuple[int | None, int | None] | None = None, query_offset: int = 0,
                    score: Score | None = None, return_residual: bool = False) -> Any:
  """softmax(scale * query keyᵀ) value for each head, as jax.nn.dot_product_attention, in one kernel.

  Args:
    query: bfloat16 or float16 [b, t, n, h], h in 64, 96, 128, 192 or 256.
    key, value: of the same dtype [b, s, k, h]; n is a multiple of k (grouped queries).
    scale: of the logits, by default 1 / sqrt(h).
    is_causal: query i sees the keys up to i + query_offset.
    key_value_seq_lengths: int32 [b]; keys from there on are not seen, and their values not used. At most s is taken.
    local_window_size: (left, right), or both in one: query i sees the keys from i + query_offset - left to
      i + query_offset + right; None is no bound.
    query_offset: where the first query stands among the keys; s - t lets the last query see the last key.
    score: a jax.numpy function of the scaled logits, element by element in f32, before the mask; a soft cap is
      `lambda x: 50 * jnp.tanh(x / 50)`. Pass the same function object in each call: another one is another kernel.
    return_residual: also give the log-sum-exp of each query's logits.

  Returns:
    [b, t, n, h] of query's dtype; with return_residual also float32 [b, t, n]. A query that sees no key gives zeros,
    and -inf as its residual.

  Raises:
    TileTypeError: shapes, dtypes or head dimensions that it does not take.

  The derivatives are those of `attention_reference`, by XLA.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import attention_reference, flash_attention
    >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 50, n, 64), jnp.bfloat16) for i, n in enumerate((4, 2, 2)))
    >>> y = jax.jit(lambda q, k, v: flash_attention(q, k, v, is_causal=True))(q, k, v)
    >>> z = attention_reference(q, k, v, is_causal=True)
    >>> y.shape, bool(jnp.allclose(y.astype("float32"), z.astype("float32"), atol=0.02))
    ((1, 50, 4, 64), True)
  """
  b, *_, h = _check_operands("flash_attention", query, key, value)
  lengths = key_value_seq_lengths
  if lengths is not None and (getattr(lengths, "shape", None) != (b,) or lengths.dtype != jnp.int32):
    raise TileTypeError(f"flash_attention: key_value_seq_lengths is {described(lengths)}", loc=caller_loc(),
                        hint=f"int32 [{b}], one length for each example")
  rule = _rule("flash_attention", h, scale, is_causal, local_window_size, query_offset, score)
  tiling = choose_attention_tiling(h, key.shape[1], causal=is_causal, plain=rule.score is None,
                                   target=default_target())
  call = attention_call(query.shape, key.shape, query.dtype, tiling, rule, residual=return_residual)
  out, residual = call(query, key, value, lengths)
  return (out, residual) if return_residual else out


def flash_attention_packed(query: jax.Array, key: jax.Array, value: jax.Array, query_starts: jax.Array,
                           key_starts: jax.Array, *, max_query_length: int, scale: float | None = None,
                           is_causal: bool = False,
                           local_window_size: int | tuple[int | None, int | None] | None = None, query_offset: int = 0,
                           score: Score | None = None, return_residual: bool = False) -> Any:
  """`flash_attention` of sequences of different lengths that lie one after another.

  Args:
    query: bfloat16 or float16 [t, n, h].
    key, value: of the same dtype [s, k, h].
    query_starts: int32 [b + 1], ascending: the queries of sequence i are those from query_starts[i] up to
      query_starts[i + 1].
    key_starts: int32 [b + 1], the same of keys and values.
    max_query_length: of any sequence, a Python int (more is slower; queries past it are not computed).
    scale, is_causal, local_window_size, query_offset, score, return_residual: as in `flash_attention`; places are
      counted from each sequence's start.

  Returns:
    [t, n, h]; with return_residual also float32 [t, n]. Queries of no sequence are not written: their values are
    arbitrary.

  Raises:
    TileTypeError: shapes, dtypes or head dimensions that it does not take.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import attention_reference, flash_attention_packed
    >>> q, k, v = (jax.random.normal(jax.random.key(i), (50, 2, 64), jnp.bfloat16) for i in range(3))
    >>> starts = jnp.asarray([0, 20, 50], jnp.int32)
    >>> y = flash_attention_packed(q, k, v, starts, starts, max_query_length=30)
    >>> z = attention_reference(*(x[None, 20:] for x in (q, k, v)))[0]
    >>> bool(jnp.allclose(y[20:].astype("float32"), z.astype("float32"), atol=0.02))
    True
  """
  *_, h = _check_operands("flash_attention_packed", query, key, value, rank=3)
  for name, x in (("query_starts", query_starts), ("key_starts", key_starts)):
    if x.ndim != 1 or x.shape[0] < 2 or x.dtype != jnp.int32 or x.shape != query_starts.shape:
      raise TileTypeError(f"flash_attention_packed: {name} is {x.dtype}{list(x.shape)}", loc=caller_loc(),
                          hint="int32 [sequences + 1], the same of queries and keys")
  whole("flash_attention_packed", "max_query_length", max_query_length, least=1)
  rule = _rule("flash_attention_packed", h, scale, is_causal, local_window_size, query_offset, score)
  tiling = choose_attention_tiling(h, key.shape[0], causal=is_causal, plain=rule.score is None,
                                   target=default_target())
  tiling = dataclasses.replace(tiling, persistent=False)       # the hardware hands out programs that differ in length
  call = packed_attention_call(query.shape, key.shape, query_starts.shape[0] - 1, max_query_length, query.dtype, tiling,
                               rule, residual=return_residual)
  out, residual = call(query, key, value, query_starts, key_starts)
  return (out, residual) if return_residual else out


def packed_attention_call(shape: tuple[int, ...], key_shape: tuple[int, ...], sequences: int, max_query_length: int,
                          dtype: Any, tiling: AttentionTiling, rule: AttentionRule, *, residual: bool = False
                          ) -> tt.TileCall:
  """The call behind `flash_attention_packed` for a query of `shape`, of (query, key, value, query_starts, key_starts).
  """
  t, n, h = shape
  outs = (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((t, n), jnp.float32) if residual else None)
  return tt.tile_call(functools.partial(packed_attention_kernel, tiling=tiling, rule=rule), outs,
                      grid=_grid(sequences, tt.cdiv(max_query_length, tiling.bm), n, key_shape[1],
                                 4 * max_query_length * h, rule),
                      warpgroups=tiling.warpgroups, persistent=tiling.persistent, name="flash_attention_packed")


def attention_call(shape: tuple[int, ...], key_shape: tuple[int, ...], dtype: Any, tiling: AttentionTiling,
                   rule: AttentionRule, *, residual: bool = False) -> tt.TileCall:
  """The call behind `flash_attention` for a query of `shape`, of (query, key, value, lengths or None)."""
  (b, t, n, h), (_, s, kv_heads, _) = shape, key_shape
  outs = (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((b, t, n), jnp.float32) if residual else None)
  return tt.tile_call(functools.partial(attention_kernel, tiling=tiling, rule=rule), outs,
                      grid=_grid(b, tt.cdiv(t, tiling.bm), n, kv_heads, 4 * s * h, rule),
                      warpgroups=tiling.warpgroups, persistent=tiling.persistent, name="flash_attention",
                      vjp=functools.partial(_backward, rule=rule, residual=residual))


def attention_reference(query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float | None = None,
                        is_causal: bool = False, key_value_seq_lengths: jax.Array | None = None,
                        local_window_size: int | tuple[int | None, int | None] | None = None, query_offset: int = 0,
                        score: Score | None = None, return_residual: bool = False) -> Any:
  """What `flash_attention` computes, in jax.numpy and f32."""
  t, (s, heads, h) = query.shape[1], key.shape[1:]
  group = query.shape[2] // heads
  q, k, v = query.astype(jnp.float32), *(jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (key, value))
  logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * (1 / math.sqrt(h) if scale is None else scale)
  logits = logits if score is None else score(logits)
  at, place = jnp.arange(s)[None, :], query_offset + jnp.arange(t)[:, None]
  left, right = _window("attention_reference", local_window_size)
  seen = jnp.ones((t, s), bool) if not is_causal else at <= place
  seen = seen if left is None else seen & (at >= place - left)
  seen = (seen if right is None else seen & (at <= place + right))[None, None]
  if key_value_seq_lengths is not None:
    used = jnp.arange(s)[None, :] < key_value_seq_lengths[:, None]
    seen = seen & used[:, None, None, :]
    v = jnp.where(used[:, :, None, None], v, 0)
  p, residual = softmax_where(logits, seen)
  out = jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest").astype(query.dtype)
  return (out, residual.transpose(0, 2, 1)) if return_residual else out


def _backward(inputs: tuple, outputs: tuple, cotangents: tuple, *, rule: AttentionRule, residual: bool) -> tuple:
  query, key, value, lengths = inputs

  def reference(query, key, value):
    return attention_reference(query, key, value, scale=rule.scale, key_value_seq_lengths=lengths, score=rule.score,
                               local_window_size=(rule.left, rule.right), query_offset=rule.offset,
                               return_residual=residual)

  _, pull = jax.vjp(reference, query, key, value)
  return (*pull(cotangents if residual else cotangents[0]), None)


def _rule(function: str, head_dim: int, scale: float | None, causal: bool, window: Any, offset: int,
          score: Score | None) -> AttentionRule:
  left, right = _window(function, window)
  check_elementwise(function, "score", score)
  if causal:
    right = 0 if right is None else min(right, 0)
  scale = number(function, "scale", 1 / math.sqrt(head_dim) if scale is None else scale)
  if scale <= 0 and score is None:        # the largest logit is then not that of the largest product
    score = _unchanged
  return AttentionRule(scale, left, right, whole(function, "query_offset", offset), score)


def _unchanged(x: jax.Array) -> jax.Array:
  return x


def _window(function: str, size: Any) -> tuple[int | None, int | None]:
  sides = size if isinstance(size, tuple | list) else (size, size)
  if len(sides) != 2 or any(x is not None and (type(x) is not int or x < 0) for x in sides):
    raise TileTypeError(f"{function}: local_window_size={size!r}", loc=caller_loc(),
                        hint="Python ints of 0 or more, (left, right), where None is no bound")
  return sides[0], sides[1]


def _check_operands(function: str, query: Any, key: Any, value: Any, rank: int = 4) -> tuple[int, ...]:
  arrays = {"query": query, "key": key, "value": value}
  for name, x in arrays.items():
    if getattr(x, "ndim", None) != rank:
      raise TileTypeError(f"{function}: {name} has the shape {np.shape(x)}", loc=caller_loc(),
                          hint=f"[{'batch, ' if rank == 4 else ''}length, heads, head dimension]")
  check_dtypes(function, arrays)
  (*lead, _, n, h), (*others, _, kv, kh) = query.shape, key.shape
  if value.shape != key.shape or lead != others or h != kh or not kv or n % kv:
    raise TileTypeError(f"{function}: " + ", ".join(f"{name} {list(x.shape)}" for name, x in arrays.items()),
                        loc=caller_loc(),
                        hint="key and value [b, s, k, h] for a query [b, t, n, h], where n is a multiple of k")
  check_head_dim(function, h)
  return query.shape


def check_dtypes(function: str, arrays: dict[str, Any]) -> None:
  """Refuses arrays of other than the first one's dtype of 16 bits."""
  first, *_ = arrays
  for name, x in arrays.items():
    if x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != arrays[first].dtype:
      raise TileTypeError(f"{function}: {name} is {x.dtype}, {first} {arrays[first].dtype}", loc=caller_loc(),
                          hint="all bfloat16, or all float16")


def check_head_dim(function: str, h: int) -> None:
  """Refuses what no tiling is for."""
  if h not in HEAD_DIMS:
    raise TileTypeError(f"{function}: the head dimension is {h}", loc=caller_loc(),
                        hint=f"one of {', '.join(map(str, HEAD_DIMS))}; zeros may be appended to query, key and value")
