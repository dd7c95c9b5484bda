"""Products of 8-bit floats with scales: one of each array, one of each row, or one of each block of 128."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.kernels.arguments import float_dtype
from tiletrace.kernels.matmul import Tiling, choose_tiling

BLOCK = 128               # elements along k, and rows of w, that share a scale
FLOATS = (jnp.float8_e4m3fn, jnp.float8_e5m2)
Scaling = Literal["tensor", "row", "block"]
# Three sets of sums in registers.
_EXACT_TILINGS = (Tiling(128, 128, 2, 6, 1.0, bk=BLOCK), Tiling(64, 128, 1, 7, 0.65, bk=BLOCK))


def scaled_matmul_kernel(x, w, x_scale, w_scale, y, *, scaling, bm, bn, bk, num_stages):
  """x[m, k] @ w[n, k].T, all of k summed by the tensor core. Scales: a scalar each, or [m] and [n]."""
  i, j = tt.program_id(0), tt.program_id(1)
  rows, cols = tt.block(i, bm), tt.block(j, bn)
  x_s = tt.alloc_shared((bm, bk), x.dtype)
  w_s = tt.alloc_shared((bn, bk), w.dtype)
  total = tt.alloc_fragment((bm, bn), jnp.float32)
  total[...] = 0
  for k in tt.pipelined(tt.cdiv(x.shape[1], bk), num_stages=num_stages):
    tt.copy(x.at[rows, tt.block(k, bk)], x_s)
    tt.copy(w.at[cols, tt.block(k, bk)], w_s)
    tt.gemm(x_s, w_s.T, total)
  y[rows, cols] = _scaled(total[...], x_scale, w_scale, rows, cols, scaling).astype(y.dtype)


def exact_scaled_matmul_kernel(x, w, x_scale, w_scale, y, *, scaling, bm, bn, bk, num_stages, unroll):
  """The same, where the sums of each `bk` products are added in f32, and scaled where a block has scales: [k / 128, m]
  and [n / 128, k / 128]. Of `unroll` blocks of k all but the first are multiplied while the one before is added."""
  i, j = tt.program_id(0), tt.program_id(1)
  rows, cols = tt.block(i, bm), tt.block(j, bn)
  x_s = tt.alloc_shared((bm, bk), x.dtype)
  w_s = tt.alloc_shared((bn, bk), w.dtype)
  total = tt.alloc_fragment((bm, bn), jnp.float32)
  parts = [tt.alloc_fragment((bm, bn), jnp.float32) for _ in range(2)]
  total[...] = 0
  if scaling == "block":
    by_tma = unroll * 4 % 16 == 0 and w_scale.shape[1] * 4 % 16 == 0           # or threads would fill the ring
    x_scale_s = tt.alloc_shared((unroll, bm), jnp.float32)
    w_scale_s = tt.alloc_shared((unroll,), jnp.float32) if by_tma else tt.alloc_fragment((unroll,), jnp.float32)
    of_w = w_scale.at[j * bn // BLOCK]
    if not by_tma:
      w_scale_s[...] = of_w[tt.ds(0, unroll)]
  for k in tt.pipelined(tt.cdiv(x.shape[1], unroll * bk), num_stages=num_stages):
    if scaling == "block":
      tt.copy(x_scale.at[tt.block(k, unroll), rows], x_scale_s)
      if by_tma:
        tt.copy(of_w.at[tt.block(k, unroll)], w_scale_s)
    for p in range(unroll + 1):
      if p < unroll:
        tt.copy(x.at[rows, tt.block(unroll * k + p, bk)], x_s)
        tt.copy(w.at[cols, tt.block(unroll * k + p, bk)], w_s)
        tt.gemm(x_s, w_s.T, parts[p % 2], accumulate=False)
      if p == 0 and scaling == "block":                                         # while the product is made
        w_scales = w_scale_s[...]
        scales = [x_scale_s[q] * w_scales[q] for q in range(unroll)]
        if not by_tma:
          w_scale_s[...] = of_w[tt.ds(unroll * (k + 1), unroll)]                # on their way until then
      if p > 0:
        part = parts[(p - 1) % 2][...]
        total[...] += part * scales[p - 1][:, None] if scaling == "block" else part
  y[rows, cols] = _scaled(total[...], x_scale, w_scale, rows, cols, scaling).astype(y.dtype)


def _scaled(sums: tt.Tile, x_scale: tt.Ref, w_scale: tt.Ref, rows: Any, cols: Any, scaling: Scaling) -> tt.Tile:
  if scaling == "row":
    return sums * x_scale[rows][:, None] * w_scale[cols][None, :]
  return sums * (x_scale[...] * w_scale[...]) if scaling == "tensor" else sums


def scaled_matmul_reference(x: jax.Array, w: jax.Array, x_scale: Any, w_scale: Any, *, out_dtype: Any = jnp.bfloat16
                            ) -> jax.Array:
  """What `scaled_matmul` computes, in jax.numpy: both arrays are scaled in f32, then multiplied."""
  scaling = _scaling(x, w, x_scale := jnp.asarray(x_scale), w_scale := jnp.asarray(w_scale))
  k = x.shape[1]
  if scaling == "row":
    x_scale, w_scale = x_scale[:, None], w_scale[:, None]
  elif scaling == "block":
    x_scale = jnp.repeat(x_scale, BLOCK, 1)[:, :k]
    w_scale = jnp.repeat(jnp.repeat(w_scale, BLOCK, 0)[:w.shape[0]], BLOCK, 1)[:, :k]
  x32, w32 = x.astype(jnp.float32) * x_scale, w.astype(jnp.float32) * w_scale
  return jnp.dot(x32, w32.T, precision=jax.lax.Precision.HIGHEST).astype(out_dtype)


def scaled_matmul(x: jax.Array, w: jax.Array, x_scale: Any, w_scale: Any, *, fast: bool = False,
                  out_dtype: Any = jnp.bfloat16) -> jax.Array:
  """(x * x_scale) @ (w * w_scale).T of 8-bit floats: sums in f32, rounded once.

  ===========  ==================================  ==================================================================
  scaling      x_scale, w_scale (float32)          an element of x[i, k] and of w[j, k] is worth
  ===========  ==================================  ==================================================================
  tensor       [] and []                           x[i, k] * x_scale, w[j, k] * w_scale
  row          [m] and [n]                         x[i, k] * x_scale[i], w[j, k] * w_scale[j]
  block        [m, ceil(k / 128)] and              x[i, k] * x_scale[i, k // 128],
               [ceil(n / 128), ceil(k / 128)]      w[j, k] * w_scale[j // 128, k // 128]
  ===========  ==================================  ==================================================================

  Args:
    x: float8_e4m3fn or float8_e5m2 [m, k].
    w: float8_e4m3fn or float8_e5m2 [n, k]: k is contiguous, as the tensor core reads 8-bit operands.
    x_scale, w_scale: float32; their shapes say which scaling it is.
    fast: sum all of k in the tensor core, which keeps about 14 bits of the sums of 8-bit floats. By default the sums of
      each 128 products are added in f32. Scales of blocks are applied there, so that fast=True excludes them.
    out_dtype: bfloat16, float16 or float32.

  Returns:
    [m, n].

  Raises:
    TileTypeError: dtypes or shapes that do not fit.

  It has no derivative: quantise in the forward pass, and differentiate what is not quantised (jax.custom_vjp).

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import scaled_matmul, scaled_matmul_reference
    >>> x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(((30, 256), (40, 256))))
    >>> x_scale, w_scale = jnp.max(jnp.abs(x), 1) / 448, jnp.max(jnp.abs(w), 1) / 448       # 448: the largest e4m3
    >>> q = [(v / s[:, None]).astype(jnp.float8_e4m3fn) for v, s in ((x, x_scale), (w, w_scale))]
    >>> y = jax.jit(scaled_matmul)(*q, x_scale, w_scale)
    >>> z = scaled_matmul_reference(*q, x_scale, w_scale)
    >>> y.shape, bool(jnp.allclose(y.astype("float32"), z.astype("float32"), rtol=0.02, atol=0.02))
    ((30, 40), True)
  """
  x, w = _operand("x", x), _operand("w", w)
  x_scale, w_scale = jnp.asarray(x_scale), jnp.asarray(w_scale)
  scaling = _scaling(x, w, x_scale, w_scale)
  if fast and scaling == "block":
    raise TileTypeError("scaled_matmul: fast=True with a scale for each block of 128", loc=caller_loc(),
                        hint="such sums leave the tensor core at every block; drop fast=")
  m, k = x.shape
  dtype = float_dtype("scaled_matmul", "out_dtype", out_dtype)
  call = scaled_matmul_call((m, w.shape[0]), dtype, k=k, scaling=scaling, fast=fast)
  return call(x, w, x_scale.T if scaling == "block" else x_scale, w_scale)


def scaled_matmul_call(shape: tuple[int, int], dtype: Any, *, k: int, scaling: Scaling, fast: bool = False,
                       tiling: Tiling | None = None) -> tt.TileCall:
  """The call behind `scaled_matmul`, of (x, w, x_scale, w_scale); x_scale of blocks is [ceil(k / 128), m]."""
  t = tiling or _choose(*shape, k, scaling, fast)
  kernel = scaled_matmul_kernel if fast else functools.partial(exact_scaled_matmul_kernel, unroll=_unroll(k))
  kernel = functools.partial(kernel, scaling=scaling, bm=t.bm, bn=t.bn, bk=t.bk, num_stages=t.num_stages)
  return tt.tile_call(kernel, jax.ShapeDtypeStruct(shape, dtype), name="scaled_matmul", **t.launch(*shape))


def _unroll(k: int) -> int:
  """Blocks of k that a loop's body multiplies: those past the last are zeros, a sixteenth of all of them at most. One
  where rows are not aligned for TMA: the threads that copy them have the registers of a set of sums."""
  blocks = tt.cdiv(k, BLOCK)
  return next(u for u in (4, 2, 1) if -blocks % u * 16 <= blocks) if k % 16 == 0 else 1


def _choose(m: int, n: int, k: int, scaling: Scaling, fast: bool) -> Tiling:
  if fast:
    return dataclasses.replace(choose_tiling(m, n, k, form="nt", itemsize=1, plain=scaling == "tensor"), bk=BLOCK)
  t = _EXACT_TILINGS[m <= _EXACT_TILINGS[1].bm]
  return dataclasses.replace(t, num_stages=5) if scaling == "block" else t


def _operand(name: str, x: Any) -> jax.Array:
  x = jnp.asarray(x)
  if x.dtype not in FLOATS or x.ndim != 2:
    raise TileTypeError(f"scaled_matmul: {name} is {x.dtype}{list(x.shape)}", loc=caller_loc(),
                        hint=f"a matrix of float8_e4m3fn or float8_e5m2: ({name} / scale).astype(jnp.float8_e4m3fn)")
  return x


def _scaling(x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> Scaling:
  (m, k), n = x.shape, w.shape[0]
  if w.shape[1] != k:
    raise TileTypeError(f"scaled_matmul: x {list(x.shape)} and w {list(w.shape)} have different inner extents",
                        loc=caller_loc(), hint="w is [n, k]")
  blocks = tt.cdiv(k, BLOCK)
  shapes: dict[Scaling, Any] = {"tensor": ((), ()), "row": ((m,), (n,)),
                                "block": ((m, blocks), (tt.cdiv(n, BLOCK), blocks))}
  for scaling, found in shapes.items():
    if (x_scale.shape, w_scale.shape) == found and x_scale.dtype == w_scale.dtype == jnp.float32:
      return scaling
  expected = "; ".join(f"{list(a)} and {list(b)}" for a, b in shapes.values())
  raise TileTypeError(f"scaled_matmul: x_scale is {x_scale.dtype}{list(x_scale.shape)}, w_scale {w_scale.dtype}"
                      f"{list(w_scale.shape)}", loc=caller_loc(), hint=f"float32, of the shapes {expected}")
