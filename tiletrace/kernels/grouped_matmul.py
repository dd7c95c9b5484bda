"""Grouped (ragged) matrix products, for mixtures of experts: the rows of each group times the group's own matrix."""
from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.kernels.arguments import float_dtype, half_array
from tiletrace.kernels.matmul import Tiling
from tiletrace.lowering.target import SM_90A

_SMALL = 96          # rows of an average group, up to which tiles of 64 rows waste less
_WAVES = 4           # of tiles, from which on a plan is made


def grouped_matmul_kernel(x, w, sizes, y, *, transpose_w, bm, bn, bk, num_stages):
  """Tiles of rows are counted group by group, so that no tile has rows of two. Each program finds its group."""
  t, cols = tt.program_id(0), tt.block(tt.program_id(1), bn)
  size = sizes[...]
  last_row, tiles = tt.cumsum(size), tt.cdiv(size, bm)     # rows, and tiles, up to and with each group
  last_tile = tt.cumsum(tiles)
  g = tt.sum(last_tile <= t)                               # the group that owns tile t
  with tt.when(g < sizes.shape[0]) as owned:
    end, rows = tt.take(last_row, g), tt.take(size, g)
    first = end - rows + (t - (tt.take(last_tile, g) - tt.cdiv(rows, bm))) * bm
    _tile(x, w, y, g, tt.maximum(first, 0), end, cols, transpose_w=transpose_w, bm=bm, bn=bn, bk=bk,
          num_stages=num_stages)
  with owned.otherwise():                                  # rows of no group, and the programs that are left over
    first = tt.max(last_row) + (t - tt.max(last_tile)) * bm
    y[tt.ds(first, bm), cols] = tt.zeros((bm, bn), y.dtype)


def planned_grouped_matmul_kernel(x, w, sizes, tiles, y, *, transpose_w, bm, bn, bk, num_stages):
  """The same with the tiles of `plan`, which the producer reads by itself: it runs ahead into the next tile."""
  t, cols = tt.program_id(0), tt.block(tt.program_id(1), bn)
  g, first, end = tiles[0, t], tt.maximum(tiles[1, t], 0), tiles[2, t]
  with tt.when(g < sizes.shape[0]) as owned:
    _tile(x, w, y, g, first, end, cols, transpose_w=transpose_w, bm=bm, bn=bn, bk=bk, num_stages=num_stages)
  with owned.otherwise():
    y[tt.ds(first, bm), cols] = tt.zeros((bm, bn), y.dtype)


def _tile(x: Any, w: Any, y: Any, g: Any, first: Any, end: Any, cols: Any, *, transpose_w: bool, bm: int, bn: int,
          bk: int, num_stages: int) -> None:
  """Of group g the rows from `first`, which ends at `end`: past it the last tile of a group reads zeros, and stores
  nothing."""
  x_s = tt.alloc_shared((bm, bk), x.dtype)
  w_s = tt.alloc_shared((bn, bk) if transpose_w else (bk, bn), w.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(x.shape[1], bk), num_stages=num_stages):
    inner = tt.block(k, bk)
    tt.copy(x.at[tt.ds(0, end), :].at[tt.ds(first, bm), inner], x_s)
    tt.copy(w.at[g, cols, inner] if transpose_w else w.at[g, inner, cols], w_s)
    tt.gemm(x_s, w_s.T if transpose_w else w_s, acc)
  y.at[tt.ds(0, end), :][tt.ds(first, bm), cols] = acc[...].astype(y.dtype)


def plan(sizes: jax.Array, m: int, bm: int) -> jax.Array:
  """The group, the first row and the end of the group's rows for each tile of `bm` rows: i32 [3, cdiv(m, bm) + groups].

  Tiles of the rows behind the last group have the group `groups`; those that are left over begin at m or later.
  """
  groups = sizes.shape[0]
  t, each = jnp.arange(tt.cdiv(m, bm) + groups, dtype=jnp.int32)[:, None], jnp.arange(groups, dtype=jnp.int32)
  tiles = (sizes + bm - 1) // bm
  until = each <= each[:, None]
  last_row, last_tile = (jnp.sum(jnp.where(until, v, 0), 1, dtype=jnp.int32) for v in (sizes, tiles))
  owns = (last_tile - tiles <= t) & (t < last_tile)
  # How much more than those of a tile behind all groups; a scan would be more kernels than these sums.
  rest = groups, last_row[-1] - last_tile[-1] * bm, m
  own = each, last_row - sizes - (last_tile - tiles) * bm, last_row
  g, start, end = (r + jnp.sum(jnp.where(owns, v - r, 0), 1, dtype=jnp.int32) for r, v in zip(rest, own, strict=True))
  return jnp.stack([g, start + t[:, 0] * bm, end])


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
  m, groups, n = x.shape[0], w.shape[0], w.shape[1 if transpose_w else 2]
  t = choose_tiling(m, n, groups)
  planned = pays_to_plan(m, n, x.shape[1], groups, t)
  call = grouped_matmul_call(m, w.shape, dtype, transpose_w=transpose_w, tiling=t, planned=planned)
  return call(x, w, sizes, *([plan(sizes, m, t.bm)] if planned else []))


def choose_tiling(m: int, n: int, groups: int) -> Tiling:
  """Large tiles, where an average group fills them."""
  if m <= _SMALL * groups:
    return Tiling(64, 128, 1, 6, 1.0)
  return Tiling(128, 256, 2, 4, 1.0) if n > 128 else Tiling(128, 128, 2, 5, 1.0)


def pays_to_plan(m: int, n: int, k: int, groups: int, t: Tiling) -> bool:
  """Where SMs have several tiles, and TMA fills their rings: a plan is kernels of a few microseconds. Of tiles of 64
  rows, planned ones are not measured."""
  several = math.prod(_grid(m, n, groups, t)) >= _WAVES * SM_90A.sm_count
  return several and t.bm > 64 and (n * 2) % 16 == (k * 2) % 16 == 0


def _grid(m: int, n: int, groups: int, t: Tiling) -> tuple[int, int]:
  """A group may end within a tile, and so may the last one."""
  return tt.cdiv(m, t.bm) + groups, tt.cdiv(n, t.bn)


def grouped_matmul_call(m: int, w_shape: tuple[int, ...], dtype: Any, *, transpose_w: bool = False,
                        tiling: Tiling | None = None, planned: bool = False, persistent: bool | str | None = None
                        ) -> tt.TileCall:
  """The call behind `grouped_matmul` for m rows and w of `w_shape`, of (x, w, sizes); where it is planned, of
  (x, w, sizes, plan(sizes, m, tiling.bm)). `persistent` as in tile_call, by default where it is planned."""
  groups, n = w_shape[0], w_shape[1 if transpose_w else 2]
  t = tiling or choose_tiling(m, n, groups)
  return tt.tile_call(
      functools.partial(planned_grouped_matmul_kernel if planned else grouped_matmul_kernel, transpose_w=transpose_w,
                        bm=t.bm, bn=t.bn, bk=t.bk, num_stages=t.num_stages),
      jax.ShapeDtypeStruct((m, n), dtype), name="grouped_matmul", warpgroups=t.warpgroups,
      persistent=planned if persistent is None else persistent, raster=16, grid=_grid(m, n, groups, t),
      vjp=functools.partial(_backward, transpose_w=transpose_w))


def _backward(inputs: tuple, y: jax.Array, dy: jax.Array, *, transpose_w: bool) -> tuple:
  x, w, sizes, *plans = inputs
  dz = dy.astype(x.dtype)
  dx = grouped_matmul(dz, w, sizes, transpose_w=not transpose_w)
  reference = functools.partial(grouped_matmul_reference, transpose_w=transpose_w)
  (dw,) = jax.vjp(lambda w: reference(x, w, sizes), w)[1](dz)
  return dx, dw, None, *(None for _ in plans)
