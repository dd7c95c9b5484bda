"""Softmax over any axes, masked or not, and its derivative: each a kernel that reads a row once where it fits."""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.kernels.rows import float_array, plan_rows

_LOG2E = math.log2(math.e)


def softmax_kernel(x, mask, y, *, rows, columns):
  """exp(s - max) as 2**(s log2(e) - max log2(e)): one fma and one ex2 an element."""
  n = x.shape[1]
  r = tt.block(tt.program_id(0), rows)

  def scores(cols):
    s = tt.load(x.at[r, cols], fill_value=-jnp.inf).astype(jnp.float32)
    return s if mask is None else tt.where(mask[r, cols], s, -jnp.inf)

  def finite(top):                                         # of a row, or a part of one, that sees nothing
    return top if mask is None and n <= columns else tt.where(top == -jnp.inf, 0, top)

  def exp(s, top):
    return tt.exp2(s * _LOG2E - top * _LOG2E)

  def inverse(total):
    return 1 / (total if mask is None else tt.where(total == 0, 1, total))

  if n <= columns:                                         # the rows stay in registers: read once
    s = scores(slice(None))
    e = exp(s, finite(tt.max(s, axis=1, keepdims=True)))
    y[r, :] = (e * inverse(tt.sum(e, axis=1, keepdims=True))).astype(y.dtype)
    return
  m = tt.alloc_fragment((rows, 1), jnp.float32)
  total = tt.alloc_fragment((rows, 1), jnp.float32)
  m[...], total[...] = -jnp.inf, 0
  for k in tt.range(tt.cdiv(n, columns)):
    s = scores(tt.block(k, columns))
    top = tt.maximum(m[...], tt.max(s, axis=1, keepdims=True))
    base = finite(top)
    total[...] = total[...] * exp(m[...], base) + tt.sum(exp(s, base), axis=1, keepdims=True)
    m[...] = top
  base, scale = finite(m[...]), inverse(total[...])
  for k in tt.range(tt.cdiv(n, columns)):
    cols = tt.block(k, columns)
    y[r, cols] = (exp(scores(cols), base) * scale).astype(y.dtype)


def softmax_backward_kernel(y, dy, dx, *, rows, columns):
  """dx = y (dy - sum(y dy))."""
  n = y.shape[1]
  r = tt.block(tt.program_id(0), rows)

  def both(cols):
    return y[r, cols].astype(jnp.float32), dy[r, cols].astype(jnp.float32)

  if n <= columns:
    p, g = both(slice(None))
    dx[r, :] = (p * (g - tt.sum(p * g, axis=1, keepdims=True))).astype(dx.dtype)
    return
  products = tt.alloc_fragment((rows, columns), jnp.float32)
  products[...] = 0
  for k in tt.range(tt.cdiv(n, columns)):
    p, g = both(tt.block(k, columns))
    products[...] += p * g
  total = tt.sum(products[...], axis=1, keepdims=True)
  for k in tt.range(tt.cdiv(n, columns)):
    p, g = both(tt.block(k, columns))
    dx[r, tt.block(k, columns)] = (p * (g - total)).astype(dx.dtype)


def softmax_reference(x: jax.Array, axis: int | Sequence[int] = -1, *, where: jax.Array | None = None) -> jax.Array:
  """What `softmax` computes, in jax.numpy."""
  s = x.astype(jnp.float32)
  if where is not None:
    s = jnp.where(where, s, -jnp.inf)
  axes = axis if isinstance(axis, int) else tuple(axis)
  top = jnp.max(s, axes, keepdims=True)
  if where is not None:
    top = jnp.where(top == -jnp.inf, 0, top)
  e = jnp.exp(s - top)
  total = jnp.sum(e, axes, keepdims=True)
  return (e / (total if where is None else jnp.where(total == 0, 1, total))).astype(x.dtype)


def softmax(x: jax.Array, axis: int | Sequence[int] = -1, *, where: jax.Array | None = None) -> jax.Array:
  """exp(x) / sum(exp(x)) over `axis`, computed in f32 from x - max(x): `jax.nn.softmax`.

  Args:
    x: float, any rank.
    axis: one or several; other than the last ones are moved there first, which XLA does by a copy.
    where: bool, broadcast to x: elements that take part. Others become 0, and so do rows in which none does.

  Returns:
    an array of x's shape and dtype.

  Raises:
    TileTypeError: x is no float, an axis that x does not have, or a mask that is no bool or does not broadcast.

  The derivative with respect to x is a kernel too.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import softmax
    >>> x = jax.random.normal(jax.random.key(0), (4, 1000))
    >>> y = jax.jit(softmax)(x, where=jnp.arange(1000) < 229)
    >>> bool(jnp.allclose(y.sum(-1), 1)), float(y[:, 229:].max())
    (True, 0.0)
  """
  x = float_array("softmax", "x", x)
  axes = _axes(x, axis)
  order = [*(d for d in range(x.ndim) if d not in axes), *axes]
  moved = x.transpose(order)
  kept, n = moved.shape[:x.ndim - len(axes)], math.prod(x.shape[d] for d in axes)
  mask = None if where is None else _mask(x, where).transpose(order).reshape(math.prod(kept), n)
  flat = moved.reshape(math.prod(kept), n)
  y = softmax_call(flat.shape, x.dtype)(flat, mask).reshape(moved.shape)
  return y.transpose([order.index(d) for d in range(x.ndim)])


def _axes(x: jax.Array, axis: int | Sequence[int]) -> tuple[int, ...]:
  axes = (axis,) if isinstance(axis, int) else tuple(axis)
  if not axes or any(not -x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) < len(axes):
    raise TileTypeError(f"softmax: axis={axis} of an array of rank {x.ndim}", loc=caller_loc(),
                        hint=f"one or several of -{x.ndim} to {x.ndim - 1}")
  return tuple(sorted(a % x.ndim for a in axes))


def _mask(x: jax.Array, where: Any) -> jax.Array:
  where = jnp.asarray(where)
  if where.dtype != bool:
    raise TileTypeError(f"softmax: where is {where.dtype}", loc=caller_loc(), hint="a mask is bool: where != 0")
  try:
    return jnp.broadcast_to(where, x.shape)
  except ValueError:
    raise TileTypeError(f"softmax: where has the shape {where.shape}, x {x.shape}", loc=caller_loc(),
                        hint="it broadcasts to x: where[:, None] for each row") from None


def softmax_call(shape: tuple[int, ...], dtype: Any) -> tt.TileCall:
  """The call behind `softmax` over the last axis of x of shape (m, n), of (x, mask)."""
  plan = plan_rows(shape, np.dtype(dtype))
  return tt.tile_call(functools.partial(softmax_kernel, rows=plan.rows, columns=plan.columns),
                      jax.ShapeDtypeStruct(shape, dtype), name="softmax", vjp=_backward, **plan.launch())


def softmax_backward_call(shape: tuple[int, ...], dtype: Any) -> tt.TileCall:
  """The call behind the derivative of `softmax_call`, of (y, dy)."""
  plan = plan_rows(shape, np.dtype(dtype), 2)
  return tt.tile_call(functools.partial(softmax_backward_kernel, rows=plan.rows, columns=plan.columns),
                      jax.ShapeDtypeStruct(shape, dtype), name="softmax_backward", vjp="xla", **plan.launch())


def _backward(inputs: tuple, y: jax.Array, dy: jax.Array) -> tuple:
  return softmax_backward_call(y.shape, y.dtype)(y, dy), None
