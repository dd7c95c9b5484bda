"""Root-mean-square normalisation, with what stands around it in a transformer block in the same pass over memory."""
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from tiletrace.kernels.arguments import float_array, number
from tiletrace.kernels.rows import (
  check_like,
  check_vector,
  flatten_rows,
  plan_rows,
  ring_of_rows,
  rows_of_pairs,
)


def rms_norm_kernel(x, gamma, residual, gate, y, h=None, *, rows, columns, eps, silu, num_stages=0):
  n = x.shape[1]
  r = tt.block(tt.program_id(0), rows)

  def value(cols):
    v = x[r, cols].astype(jnp.float32)
    return v if residual is None else v + residual[r, cols].astype(jnp.float32)

  narrow = y.dtype.itemsize == 2                           # then what 24 bits do is not seen

  def finish(v, scale, cols, gates):
    out = v * scale
    if gamma is not None:
      out = out * gamma[cols][None, :].astype(jnp.float32)
    if silu:
      out = tt.silu(out, approximate=narrow)
    if gates is not None:
      out = out * tt.silu(gates.astype(jnp.float32), approximate=narrow)
    y[r, cols] = out.astype(y.dtype)
    if h is not None:
      h[r, cols] = v.astype(h.dtype)

  if num_stages:                                           # the rows come through a ring, while others are worked on
    arrays = [a for a in (x, residual, gate) if a is not None]
    slots = [tt.alloc_shared((rows, n), a.dtype) for a in arrays]
    for _ in tt.pipelined(1, num_stages=num_stages):
      for a, slot in zip(arrays, slots, strict=True):
        tt.copy(a.at[r, :], slot)
      v = slots[0][...].astype(jnp.float32)
      if residual is not None:
        v = v + slots[1][...].astype(jnp.float32)
      scale = tt.rsqrt(tt.sum(v * v, axis=1, keepdims=True) * (1 / n) + eps)
      finish(v, scale, slice(None), None if gate is None else slots[-1][...])
    return
  if n <= columns:                                         # the rows stay in registers: read once
    v = value(slice(None))
    gates = None if gate is None else gate[r, :]           # on its way while the rows are summed
    scale = tt.rsqrt(tt.sum(v * v, axis=1, keepdims=True) * (1 / n) + eps)
    finish(v, scale, slice(None), gates)
    return
  squares = tt.alloc_fragment((rows, columns), jnp.float32)
  squares[...] = 0
  for k in tt.range(tt.cdiv(n, columns)):
    v = value(tt.block(k, columns))                        # zeros past the edge
    squares[...] += v * v
  scale = tt.rsqrt(tt.sum(squares[...], axis=1, keepdims=True) * (1 / n) + eps)
  for k in tt.range(tt.cdiv(n, columns)):
    cols = tt.block(k, columns)
    finish(value(cols), scale, cols, None if gate is None else gate[r, cols])


def rms_norm_reference(x: jax.Array, gamma: jax.Array | None = None, *, residual: jax.Array | None = None,
                       gate: jax.Array | None = None, silu: bool = False, eps: float = 1e-6) -> Any:
  """What `rms_norm` computes, in jax.numpy."""
  h = x.astype(jnp.float32)
  if residual is not None:
    h = h + residual.astype(jnp.float32)
  y = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
  if gamma is not None:
    y = y * gamma.astype(jnp.float32)
  if silu:
    y = jax.nn.silu(y)
  if gate is not None:
    y = y * jax.nn.silu(gate.astype(jnp.float32))
  y = y.astype(x.dtype)
  return y if residual is None else (y, h.astype(x.dtype))


def rms_norm(x: jax.Array, gamma: jax.Array | None = None, *, residual: jax.Array | None = None,
             gate: jax.Array | None = None, silu: bool = False, eps: float = 1e-6) -> Any:
  """Normalises the last axis: `y = x / sqrt(mean(x * x) + eps)`, accumulated in f32.

  Args:
    x: float [..., n], any rank (BTHWC, say) and any n.
    gamma: [n], float of any width: y is multiplied by it.
    residual: like x: it is added to x first, and the sum is returned too.
    gate: like x: y is multiplied by silu(gate), after all else.
    silu: y becomes silu(y), after gamma.
    eps: added to the mean of squares.

  Returns:
    y, of x's shape and dtype; with `residual` (y, x + residual).

  Raises:
    TileTypeError: an operand of another shape, or one that is no float.

  The derivative is that of `rms_norm_reference`: XLA's, from the saved inputs.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import rms_norm
    >>> x = jax.random.normal(jax.random.key(0), (2, 3, 320), jnp.bfloat16)
    >>> y = jax.jit(rms_norm)(x, jnp.ones(320))
    >>> y.shape, y.dtype, bool(abs(jnp.mean(jnp.square(y.astype("float32"))) - 1) < 0.01)
    ((2, 3, 320), dtype(bfloat16), True)
  """
  x, eps = float_array("rms_norm", "x", x), number("rms_norm", "eps", eps)
  gamma = check_vector("rms_norm", "gamma", gamma, x)
  residual, gate = check_like("rms_norm", "residual", residual, x), check_like("rms_norm", "gate", gate, x)
  if not x.size:
    return x if residual is None else (x, x)
  flat = flatten_rows(x)
  call = rms_norm_call(flat.shape, x.dtype, residual=residual is not None, gate=gate is not None, silu=silu, eps=eps)
  out = call(flat, gamma, *(None if a is None else flatten_rows(a) for a in (residual, gate)))
  return jax.tree.map(lambda o: o.reshape(x.shape), out)


def rms_norm_call(shape: tuple[int, ...], dtype: Any, *, residual: bool = False, gate: bool = False, silu: bool = False,
                  eps: float = 1e-6) -> tt.TileCall:
  """The call behind `rms_norm` for x of shape (m, n), of (x, gamma, residual, gate): it has stages to look at."""
  arrays = 1 + residual + gate
  pairs = None if residual else rows_of_pairs(shape, np.dtype(dtype), arrays)             # a sum has 32 bits
  plan = pairs or ring_of_rows(shape, np.dtype(dtype), arrays) or plan_rows(
      shape, np.dtype(dtype), arrays, lean=True)
  like = jax.ShapeDtypeStruct(shape, dtype)
  return tt.tile_call(
      functools.partial(rms_norm_kernel, rows=plan.rows, columns=plan.columns, eps=eps, silu=silu,
                        num_stages=plan.num_stages),
      (like, like) if residual else like, name="rms_norm", **plan.launch(),
      vjp=functools.partial(_backward, eps=eps, silu=silu))


def _backward(inputs: tuple, outputs: Any, cotangents: Any, *, eps: float, silu: bool) -> tuple:
  def reference(x, gamma, residual, gate):
    return rms_norm_reference(x, gamma, residual=residual, gate=gate, silu=silu, eps=eps)
  return jax.vjp(reference, *inputs)[1](cotangents)
