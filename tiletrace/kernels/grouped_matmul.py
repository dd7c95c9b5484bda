"""Grouped (ragged) matrix products, for mixtures of experts: the rows of each group times the group's own matrix."""
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.kernels.arguments import float_dtype, half_array
from tiletrace.kernels.matmul import Tiling

_SMALL = 96          # rows of an average group, up to which tiles of 64 rows waste less


def grouped_matmul_kernel(x, w, sizes, y, *, transpose_w, bm, bn, bk, num_stages):
  """Tiles of rows are counted group by group, so that no tile has rows of two; each program finds the group of its own.

  A tile at the end of a group reads rows of the next one too, which keeps its copies plain TMA boxes; they are not
  stored, since the view of `y` ends with the group.
  """
  t, j = tt.program_id(0), tt.program_id(1)
  groups, cols = sizes.shape[0], tt.block(j, bn)
  size = sizes[...]
  last_row, tiles = tt.cumsum(size), tt.cdiv(size, bm)     # rows, and tiles, up to and with each group
  last_tile = tt.cumsum(tiles)
  g = tt.sum(last_tile <= t)                               # the group that owns tile t
  with tt.when(g < groups) as owned:
    end, rows = tt.take(last_row, g), tt.take(size, g)
    within = t - (tt.take(last_tile, g) - tt.cdiv(rows, bm))
    first = end - rows + within * bm                       # before the loop: the producer is sent one number
    x_s = tt.alloc_shared((bm, bk), x.dtype)
    w_s = tt.alloc_shared((bn, bk) if transpose_w else (bk, bn), w.dtype)
    acc = tt.alloc_fragment((bm, bn), jnp.float32)
    acc[...] = 0
    for k in tt.pipelined(tt.cdiv(x.shape[1], bk), num_stages=num_stages):
      inner = tt.block(k, bk)
      tt.copy(x.at[tt.ds(first, bm), inner], x_s)
      tt.copy(w.at[g, cols, inner] if transpose_w else w.at[g, inner, cols], w_s)
      tt.gemm(x_s, w_s.T if transpose_w else w_s, acc)
    y.at[tt.ds(end - rows, rows), :][tt.block(within, bm), cols] = acc[...].astype(y.dtype)
  with owned.otherwise():                                  # rows of no group, and the programs that are left over
    end = tt.max(last_row)
    rest = y.at[tt.ds(end, y.shape[0] - end), :]
    rest[tt.block(t - tt.max(last_tile), bm), cols] = tt.zeros((bm, bn), y.dtype)


def grouped_matmul_reference(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transpose_w: bool = False,
                             out_dtype: Any = None) -> jax.Array:
  """What `grouped_matmul` computes, by jax.lax.ragged_dot."""
  w = jnp.swapaxes(w, 1, 2) if transpose_w else w
  y = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
  return y.astype(out_dtype or x.dtype)


def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transpose_w: bool = False,
                   out_dtype: Any = None) -> jax.Array:
  """jax.lax.ragged_dot: y[r] = x[r] @ w[g] for the rows r of each group g, accumulated in f32 and rounded once.

  Args:
    x: bfloat16 or float16 [m, k], its rows sorted by group.
    w: of x's dtype, [groups, k, n]; [groups, n, k] where each is stored transposed.
    sizes: i32 [groups], how many rows each group has, in order; none negative, m in all at most. Only the GPU reads
      them: nothing is compiled for them, and they may differ in each call.
    transpose_w: read each matrix of w as its transpose.
    out_dtype: of the result, by default x's.

  Returns:
    [m, n]; rows after the last group are 0.

  Raises:
    TileTypeError: dtypes or shapes that do not fit.

  The derivative with respect to x is such a product too; that with respect to w is jax.lax.ragged_dot's.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import grouped_matmul, grouped_matmul_reference
    >>> x, w = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(((100, 72), (3, 72, 40))))
    >>> sizes = jnp.asarray([70, 0, 25], jnp.int32)
    >>> y, z = jax.jit(grouped_matmul)(x, w, sizes), grouped_matmul_reference(x, w, sizes)
    >>> y.shape, bool(jnp.allclose(y.astype("float32"), z.astype("float32"), rtol=0.02, atol=0.02))
    ((100, 40), True)
  """
  x, w = (half_array("grouped_matmul", name, y, wider="jax.lax.ragged_dot") for name, y in (("x", x), ("w", w)))
  sizes = jnp.asarray(sizes)
  if x.ndim != 2 or w.ndim != 3 or x.dtype != w.dtype:
    raise TileTypeError(f"grouped_matmul: x is {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}", loc=caller_loc(),
                        hint="one dtype; x[m, k] and w[groups, k, n]")
  if x.shape[1] != w.shape[2 if transpose_w else 1]:
    raise TileTypeError(f"grouped_matmul: x {list(x.shape)} and w {list(w.shape)} have different inner extents",
                        loc=caller_loc(), hint="transpose_w says that each matrix of w is stored transposed")
  if sizes.shape != w.shape[:1] or sizes.dtype != np.int32:
    raise TileTypeError(f"grouped_matmul: sizes is {sizes.dtype}{list(sizes.shape)}, w has {w.shape[0]} matrices",
                        loc=caller_loc(), hint="one int32 for each: sizes.astype(jnp.int32)")
  dtype = float_dtype("grouped_matmul", "out_dtype", out_dtype, x.dtype)
  if not w.shape[0]:
    return jnp.zeros((x.shape[0], w.shape[1 if transpose_w else 2]), dtype)
  return grouped_matmul_call(x.shape[0], w.shape, dtype, transpose_w=transpose_w)(x, w, sizes)


def choose_tiling(m: int, n: int, groups: int) -> Tiling:
  """Large tiles, where an average group fills them."""
  if m <= _SMALL * groups:
    return Tiling(64, 128, 1, 6, 1.0)
  return Tiling(128, 256, 2, 4, 1.0) if n > 128 else Tiling(128, 128, 2, 5, 1.0)


def grouped_matmul_call(m: int, w_shape: tuple[int, ...], dtype: Any, *, transpose_w: bool = False,
                        tiling: Tiling | None = None, persistent: bool | str = False) -> tt.TileCall:
  """The call behind `grouped_matmul` for m rows and w of `w_shape`, of (x, w, sizes); `persistent` as in tile_call."""
  groups, n = w_shape[0], w_shape[1 if transpose_w else 2]
  t = tiling or choose_tiling(m, n, groups)
  return tt.tile_call(
      functools.partial(grouped_matmul_kernel, transpose_w=transpose_w, bm=t.bm, bn=t.bn, bk=t.bk,
                        num_stages=t.num_stages),
      jax.ShapeDtypeStruct((m, n), dtype), name="grouped_matmul", warpgroups=t.warpgroups, persistent=persistent,
      grid=(tt.cdiv(m, t.bm) + groups, tt.cdiv(n, t.bn)),     # a group may end within a tile, and so may the last one
      vjp=functools.partial(_backward, transpose_w=transpose_w))


def _backward(inputs: tuple, y: jax.Array, dy: jax.Array, *, transpose_w: bool) -> tuple:
  x, w, sizes = inputs
  dz = dy.astype(x.dtype)
  dx = grouped_matmul(dz, w, sizes, transpose_w=not transpose_w)
  reference = functools.partial(grouped_matmul_reference, transpose_w=transpose_w)
  (dw,) = jax.vjp(lambda w: reference(x, w, sizes), w)[1](dz)
  return dx, dw, None
