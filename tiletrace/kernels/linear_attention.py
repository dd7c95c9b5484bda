"""Causal linear attention in chunks, with a decay for each head: a state [dk, dv] goes from chunk to chunk.

S(t) = decay S(t - 1) + k(t)ᵀ v(t) and y(t) = scale q(t) S(t), as linear attention (decay 1), retention and lightning
attention have them. Within a chunk it is attention without a softmax: (Q Kᵀ ⊙ D) V with D(i, j) = decay^(i - j) for
j <= i (Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2024, section 2).
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.kernels.arguments import described, number

KEY_DIMS = (64, 128)
_CHUNK = 64               # queries whose keys are scored at once, by one warpgroup
_COLUMNS = 64             # of the values and the state in one program


@dataclasses.dataclass(frozen=True, slots=True)
class LinearAttentionTiling:
  """Tokens of a chunk, columns of the values of a program, and chunks on their way."""
  chunk: int = _CHUNK
  columns: int = _COLUMNS
  num_stages: int = 2


def linear_attention_kernel(q, k, v, decay, initial, y, final, *, scale, tiling):
  """decay [h], initial and final [b, h, dk, dv] may be None."""
  b, h, j = tt.program_id(0), tt.program_id(1), tt.program_id(2)
  chunk, cols = tiling.chunk, tt.block(j, tiling.columns)
  length, dk = q.shape[1], q.shape[3]
  q_s, k_s = (tt.alloc_shared((chunk, dk), x.dtype) for x in (q, k))
  v_s = tt.alloc_shared((chunk, tiling.columns), v.dtype)
  before_s = tt.alloc_shared((dk, tiling.columns), v.dtype)
  scores = tt.alloc_fragment((chunk, chunk), jnp.float32)
  weights = tt.alloc_fragment((chunk, chunk), jnp.float32)
  acc = tt.alloc_fragment((chunk, tiling.columns), jnp.float32)
  state = tt.alloc_fragment((dk, tiling.columns), jnp.float32)
  state[...] = 0 if initial is None else initial[b, h, :, cols]
  at, key_at = tt.arange(chunk), tt.arange(chunk)            # each where it is needed: down the rows, along them
  ahead = at[:, None] - key_at[None, :]
  rate = 0.0 if decay is None else tt.log2(decay[h])
  weights[...] = tt.where(ahead >= 0, tt.exp2(tt.maximum(ahead, 0).astype(jnp.float32) * rate) * scale, 0)
  for c in tt.pipelined(tt.cdiv(length, chunk), num_stages=tiling.num_stages):
    rows = tt.block(c, chunk)
    tt.copy(q.at[b, rows, h, :], q_s)
    tt.copy(k.at[b, rows, h, :], k_s)
    tt.copy(v.at[b, rows, h, cols], v_s)
    before_s[...] = state[...].astype(v.dtype)
    tt.gemm(q_s, k_s.T, scores, accumulate=False)
    tt.gemm(q_s, before_s, acc, accumulate=False)            # while the scores are weighted
    seen = (scores[...] * weights[...]).astype(v.dtype)
    if decay is None:
      passed = k_s.T
      acc[...] *= scale
    else:
      last = tt.minimum(length - c * chunk, chunk) - 1       # of the chunk's tokens
      acc[...] *= (tt.exp2((at + 1).astype(jnp.float32) * rate) * scale)[:, None]
      state[...] *= tt.exp2((last + 1).astype(jnp.float32) * rate)
      passed = (k_s[...].T * tt.exp2(tt.maximum(last - key_at, 0).astype(jnp.float32) * rate)[None, :]).astype(k.dtype)
    tt.gemm(seen, v_s, acc)
    tt.gemm(passed, v_s, state)
    y[b, rows, h, cols] = acc[...].astype(y.dtype)
  if final is not None:
    final[b, h, :, cols] = state[...]


def linear_attention_reference(query: jax.Array, key: jax.Array, value: jax.Array, *, decay: jax.Array | None = None,
                               scale: float = 1.0, initial_state: jax.Array | None = None,
                               return_state: bool = False) -> Any:
  """What `linear_attention` computes, in jax.numpy and f32: token by token."""
  b, _, h, dk = query.shape
  rate = jnp.ones((h,), jnp.float32) if decay is None else decay.astype(jnp.float32)
  state = jnp.zeros((b, h, dk, value.shape[-1]), jnp.float32) if initial_state is None else initial_state

  def step(state: jax.Array, token: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    q, k, v = (x.astype(jnp.float32) for x in token)
    state = state * rate[:, None, None] + k[..., :, None] * v[..., None, :]
    return state, scale * jnp.einsum("bhk,bhkv->bhv", q, state, precision="highest")

  q, k, v = (jnp.moveaxis(x, 1, 0) for x in (query, key, value))
  state, out = jax.lax.scan(step, state, (q, k, v))
  out = jnp.moveaxis(out, 0, 1).astype(query.dtype)
  return (out, state) if return_state else out


def linear_attention(query: jax.Array, key: jax.Array, value: jax.Array, *, decay: jax.Array | None = None,
                     scale: float = 1.0, initial_state: jax.Array | None = None, return_state: bool = False) -> Any:
  """Causal linear attention: y(t) = scale q(t) S(t), where S(t) = decay S(t - 1) + k(t)ᵀ v(t), in one kernel.

  Args:
    query, key: bfloat16 or float16 [b, s, h, dk], dk 64 or 128.
    value: of the same dtype [b, s, h, dv].
    decay: float32 [h], in (0, 1]; None is 1 (linear attention). Retention has 1 - 2^(-5 - head).
    scale: of the result.
    initial_state: float32 [b, h, dk, dv], the state before the first token; None is zeros.
    return_state: also give the state after the last token.

  Returns:
    [b, s, h, dv] of query's dtype; with return_state also float32 [b, h, dk, dv].

  Raises:
    TileTypeError: shapes, dtypes or key dimensions that it does not take.

  Sums are in f32; weights within a chunk of 64 tokens, and the state where a chunk reads it, are rounded to query's
  dtype. The derivatives are those of `linear_attention_reference`, by XLA.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import linear_attention, linear_attention_reference
    >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 100, 2, 64), jnp.bfloat16) for i in range(3))
    >>> decay = 1 - 2.0 ** (-5 - jnp.arange(2))
    >>> y = jax.jit(linear_attention)(q, k, v, decay=decay)
    >>> z = linear_attention_reference(q, k, v, decay=decay)
    >>> y.shape, bool(jnp.allclose(y.astype("float32"), z.astype("float32"), rtol=0.02, atol=0.5))
    ((1, 100, 2, 64), True)
  """
  _check_operands(query, key, value, decay, initial_state)
  b, _, h, dk = query.shape
  scale = number("linear_attention", "scale", scale)
  call = linear_attention_call(value.shape, query.dtype, dk=dk, scale=scale, state=return_state)
  out, state = call(query, key, value, decay, initial_state)
  assert state is None or state.shape == (b, h, dk, value.shape[-1])
  return (out, state) if return_state else out


def linear_attention_call(shape: tuple[int, ...], dtype: Any, *, dk: int, scale: float = 1.0, state: bool = False,
                          tiling: LinearAttentionTiling | None = None) -> tt.TileCall:
  """The call behind `linear_attention` for a value of `shape`, of (query, key, value, decay, initial state)."""
  b, _, h, dv = shape
  tiling = tiling or LinearAttentionTiling()
  outs = (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((b, h, dk, dv), jnp.float32) if state else None)
  return tt.tile_call(functools.partial(linear_attention_kernel, scale=scale, tiling=tiling), outs,
                      grid=(b, h, tt.cdiv(dv, tiling.columns)), name="linear_attention",
                      vjp=functools.partial(_backward, scale=scale, state=state))


def _backward(inputs: tuple, outputs: tuple, cotangents: tuple, *, scale: float, state: bool) -> tuple:
  present = [x is not None for x in inputs]

  def reference(*given: jax.Array) -> Any:
    left = iter(given)
    q, k, v, decay, initial = (next(left) if p else None for p in present)
    return linear_attention_reference(q, k, v, decay=decay, scale=scale,  # type: ignore[arg-type]
                                      initial_state=initial, return_state=state)

  _, pull = jax.vjp(reference, *(x for x in inputs if x is not None))
  found = iter(pull(cotangents if state else cotangents[0]))
  return tuple(next(found) if p else None for p in present)


def _check_operands(query: Any, key: Any, value: Any, decay: Any, initial: Any) -> None:
  arrays = {"query": query, "key": key, "value": value}
  for name, x in arrays.items():
    if getattr(x, "ndim", None) != 4 or x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != query.dtype:
      raise TileTypeError(f"linear_attention: {name} is {described(x)}", loc=caller_loc(),
                          hint="all bfloat16 or all float16 [batch, length, heads, dimension]")
  if query.shape != key.shape or query.shape[:3] != value.shape[:3]:
    raise TileTypeError("linear_attention: " + ", ".join(f"{n} {list(x.shape)}" for n, x in arrays.items()),
                        loc=caller_loc(), hint="query and key [b, s, h, dk], value [b, s, h, dv]")
  b, _, h, dk = query.shape
  if dk not in KEY_DIMS:
    raise TileTypeError(f"linear_attention: the key dimension is {dk}", loc=caller_loc(),
                        hint=f"one of {', '.join(map(str, KEY_DIMS))}; zeros may be appended to query and key")
  for name, x, shape in (("decay", decay, (h,)), ("initial_state", initial, (b, h, dk, value.shape[3]))):
    if x is not None and (getattr(x, "shape", None) != shape or x.dtype != jnp.float32):
      raise TileTypeError(f"linear_attention: {name} is {described(x)}", loc=caller_loc(),
                          hint=f"float32 {list(shape)}")
