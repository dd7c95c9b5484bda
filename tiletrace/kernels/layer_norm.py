"""Layer normalisation: the mean, then the variance of what is left, from registers where a row fits there."""
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from tiletrace.kernels.arguments import float_array, number
from tiletrace.kernels.rows import check_vector, flatten_rows, plan_rows


def layer_norm_kernel(x, gamma, beta, y, *, rows, columns, eps):
  n = x.shape[1]
  r = tt.block(tt.program_id(0), rows)

  def finish(d, scale, cols):
    out = d * scale
    if gamma is not None:
      out = out * gamma[cols][None, :].astype(jnp.float32)
    if beta is not None:
      out = out + beta[cols][None, :].astype(jnp.float32)
    y[r, cols] = out.astype(y.dtype)

  def mean(v):
    return tt.sum(v, axis=1, keepdims=True) * (1 / n)

  if n <= columns:                                         # the rows stay in registers: read once
    v = x[r, :].astype(jnp.float32)
    d = v - mean(v)
    finish(d, tt.rsqrt(mean(d * d) + eps), slice(None))
    return
  sums = tt.alloc_fragment((rows, columns), jnp.float32)
  sums[...] = 0
  for k in tt.range(tt.cdiv(n, columns)):
    sums[...] += x[r, tt.block(k, columns)].astype(jnp.float32)
  middle = mean(sums[...])
  squares = tt.alloc_fragment((rows, columns), jnp.float32)
  squares[...] = 0
  for k in tt.range(tt.cdiv(n, columns)):
    d = x[r, tt.block(k, columns)].astype(jnp.float32) - middle
    if n % columns:                                        # past the edge x is 0, and d is not
      d = tt.where((k * columns + tt.arange(columns))[None, :] < n, d, 0)
    squares[...] += d * d
  scale = tt.rsqrt(mean(squares[...]) + eps)
  for k in tt.range(tt.cdiv(n, columns)):
    cols = tt.block(k, columns)
    finish(x[r, cols].astype(jnp.float32) - middle, scale, cols)


def layer_norm_reference(x: jax.Array, gamma: jax.Array | None = None, beta: jax.Array | None = None, *,
                         eps: float = 1e-5) -> jax.Array:
  """What `layer_norm` computes, in jax.numpy."""
  v = x.astype(jnp.float32)
  d = v - jnp.mean(v, axis=-1, keepdims=True)
  y = d * jax.lax.rsqrt(jnp.mean(d * d, axis=-1, keepdims=True) + eps)
  if gamma is not None:
    y = y * gamma.astype(jnp.float32)
  if beta is not None:
    y = y + beta.astype(jnp.float32)
  return y.astype(x.dtype)


def layer_norm(x: jax.Array, gamma: jax.Array | None = None, beta: jax.Array | None = None, *,
               eps: float = 1e-5) -> jax.Array:
  """Normalises the last axis: `(x - mean(x)) / sqrt(var(x) + eps) * gamma + beta`, accumulated in f32.

  Args:
    x: float [..., n], any rank and any n.
    gamma, beta: [n], floats of any width.
    eps: added to the variance.

  Returns:
    an array of x's shape and dtype.

  Raises:
    TileTypeError: an operand of another shape, or one that is no float.

  The derivative is that of `layer_norm_reference`: XLA's, from the saved inputs.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import layer_norm
    >>> y = layer_norm(5 + jax.random.normal(jax.random.key(0), (7, 229)))
    >>> bool(abs(y.mean()) < 1e-5), bool(abs(y.std() - 1) < 1e-3)
    (True, True)
  """
  x, eps = float_array("layer_norm", "x", x), number("layer_norm", "eps", eps)
  gamma, beta = check_vector("layer_norm", "gamma", gamma, x), check_vector("layer_norm", "beta", beta, x)
  if not x.size:
    return x
  flat = flatten_rows(x)
  return layer_norm_call(flat.shape, x.dtype, eps=eps)(flat, gamma, beta).reshape(x.shape)


def layer_norm_call(shape: tuple[int, ...], dtype: Any, *, eps: float = 1e-5) -> tt.TileCall:
  """The call behind `layer_norm` for x of shape (m, n), of (x, gamma, beta)."""
  plan = plan_rows(shape, np.dtype(dtype))
  return tt.tile_call(functools.partial(layer_norm_kernel, rows=plan.rows, columns=plan.columns, eps=eps),
                      jax.ShapeDtypeStruct(shape, dtype), name="layer_norm", **plan.launch(),
                      vjp=functools.partial(_backward, eps=eps))


def _backward(inputs: tuple, outputs: Any, dy: jax.Array, *, eps: float) -> tuple:
  return jax.vjp(functools.partial(layer_norm_reference, eps=eps), *inputs)[1](dy)
