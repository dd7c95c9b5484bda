"""Softmax over any axes, masked or not, and its derivative: each a kernel that reads a row once where it fits."""
from __future__ import annotations

import dataclasses
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
from tiletrace.kernels.arguments import float_array, whole
from tiletrace.kernels.rows import plan_rows

_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, slots=True)
class MaskGroups:
  """The rows of x in groups of consecutive ones that have consecutive rows of a mask, or one row of it in common.

  Attributes:
    rows: of a group.
    leading: (extent, rows of the mask from one to the next) of the dimensions that number the groups; 0 where the mask
      repeats.
    mask: its shape, (rows of a group, or 1, for each of its own groups; columns, or 1).
    columns: of x.
  """
  rows: int
  leading: tuple[tuple[int, int], ...]
  mask: tuple[int, int, int]
  columns: int

  @property
  def shape(self) -> tuple[int, int, int]:
    """Of x."""
    return math.prod(n for n, _ in self.leading), self.rows, self.columns


def group_mask(shape: tuple[int, ...], kept: int, mask: tuple[int, ...]) -> MaskGroups:
  """Groups the rows of x of `shape`, whose first `kept` dimensions number them, for a mask that broadcasts to it.

  Example:
    >>> group_mask((2, 8, 64, 100), 3, (2, 1, 64, 100))        # a mask for all heads: groups are (batch, head)
    MaskGroups(rows=64, leading=((2, 1), (8, 0)), mask=(2, 64, 100), columns=100)
  """
  dims = [(n, k != 1) for n, k in zip(shape[:kept], mask) if n != 1]
  rows, own = 1, dims[-1][1] if dims else True
  while dims and dims[-1][1] == own:
    rows *= dims.pop()[0]
  leading: list[tuple[int, int]] = []
  groups = 1
  for n, differs in reversed(dims):
    leading.insert(0, (n, groups if differs else 0))
    groups *= n if differs else 1
  columns = 1 if all(k == 1 for k in mask[kept:]) else math.prod(shape[kept:])
  return MaskGroups(rows, tuple(leading), (groups, rows if own else 1, columns), math.prod(shape[kept:]))


def softmax_kernel(x, mask, y, *, rows, columns, leading=None):
  """exp(s - max) as 2**(s log2(e) - max log2(e)): one fma and one ex2 an element.

  With `leading` (of MaskGroups) the arrays have one more dimension, of groups, and a mask's extent of 1 stands for all.
  """
  i = tt.program_id(0)
  if leading is not None:
    group, own = i, 0
    for n, step in reversed(leading):
      own, group = own + group % n * step, group // n
    x, mask, y, i = x.at[i], mask.at[own], y.at[i], tt.program_id(1)
  n = x.shape[1]
  r = tt.block(i, rows)

  def scores(cols):
    s = tt.load(x.at[r, cols], fill_value=-jnp.inf).astype(jnp.float32)
    if mask is None:
      return s
    some_rows, some_cols = (at if k == of else slice(None) for at, k, of in zip((r, cols), mask.shape, x.shape))
    return tt.where(mask[some_rows, some_cols], s, -jnp.inf)

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
    where: bool, broadcast to x: elements that take part. Others become 0, and so do rows in which none does. It is read
      as it is; only one that differs along some of several axes is first made as large as those.

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
  if not x.size:
    return x
  order = [*(d for d in range(x.ndim) if d not in axes), *axes]
  moved = x.transpose(order)
  kept, n = moved.shape[:x.ndim - len(axes)], math.prod(x.shape[d] for d in axes)
  flat = moved.reshape(math.prod(kept), n)
  mask = None if where is None else _mask(x, where).transpose(order)
  if mask is None or mask.shape == moved.shape:
    y = softmax_call(flat.shape, x.dtype)(flat, None if mask is None else mask.reshape(flat.shape))
  else:
    if any(k != 1 for k in mask.shape[len(kept):]):
      mask = jnp.broadcast_to(mask, (*mask.shape[:len(kept)], *moved.shape[len(kept):]))
    groups = group_mask(moved.shape, len(kept), mask.shape)
    y = grouped_softmax_call(groups, x.dtype)(moved.reshape(groups.shape), mask.reshape(groups.mask))
  y = y.reshape(moved.shape)
  return y.transpose([order.index(d) for d in range(x.ndim)])


def _axes(x: jax.Array, axis: int | Sequence[int]) -> tuple[int, ...]:
  axes = tuple(whole("softmax", "axis", a) for a in (axis if isinstance(axis, tuple | list) else (axis,)))
  if not axes or any(not -x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) < len(axes):
    raise TileTypeError(f"softmax: axis={axis} of an array of rank {x.ndim}", loc=caller_loc(),
                        hint=f"one or several of -{x.ndim} to {x.ndim - 1}")
  return tuple(sorted(a % x.ndim for a in axes))


def _mask(x: jax.Array, where: Any) -> jax.Array:
  """The mask with x's rank."""
  where = jnp.asarray(where)
  if where.dtype != bool:
    raise TileTypeError(f"softmax: where is {where.dtype}", loc=caller_loc(), hint="a mask is bool: where != 0")
  extents = (1,) * (x.ndim - where.ndim) + where.shape
  if len(extents) != x.ndim or any(k not in (1, n) for k, n in zip(extents, x.shape)):
    raise TileTypeError(f"softmax: where has the shape {where.shape}, x {x.shape}", loc=caller_loc(),
                        hint="it broadcasts to x: where[:, None] for each row")
  return where.reshape(extents)


def softmax_call(shape: tuple[int, ...], dtype: Any) -> tt.TileCall:
  """The call behind `softmax` over the last axis of x of shape (m, n), of (x, mask)."""
  plan = plan_rows(shape, np.dtype(dtype))
  return tt.tile_call(functools.partial(softmax_kernel, rows=plan.rows, columns=plan.columns),
                      jax.ShapeDtypeStruct(shape, dtype), name="softmax", vjp=_backward, **plan.launch())


def grouped_softmax_call(groups: MaskGroups, dtype: Any) -> tt.TileCall:
  """The call behind `softmax` with a mask that broadcasts: of (x, mask) of the shapes that the groups have."""
  count, m, n = groups.shape
  plan = plan_rows((count * m, n), np.dtype(dtype))
  rows = max(1, min(plan.rows, m))
  kernel = functools.partial(softmax_kernel, rows=rows, columns=plan.columns, leading=groups.leading)
  return tt.tile_call(kernel, jax.ShapeDtypeStruct(groups.shape, dtype), name="softmax", vjp=_backward,
                      **{**plan.launch(), "grid": (count, tt.cdiv(m, rows))})


def softmax_backward_call(shape: tuple[int, ...], dtype: Any) -> tt.TileCall:
  """The call behind the derivative of `softmax_call`, of (y, dy)."""
  plan = plan_rows(shape, np.dtype(dtype), 2)
  return tt.tile_call(functools.partial(softmax_backward_kernel, rows=plan.rows, columns=plan.columns),
                      jax.ShapeDtypeStruct(shape, dtype), name="softmax_backward", vjp="xla", **plan.launch())


def _backward(inputs: tuple, y: jax.Array, dy: jax.Array) -> tuple:
  flat = math.prod(y.shape[:-1]), y.shape[-1]
  return softmax_backward_call(flat, y.dtype)(y.reshape(flat), dy.reshape(flat)).reshape(y.shape), None
