"""Products with packed weights of 4 or 8 bits and a scale for each group of rows, dequantised on their way."""
from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.kernels.arguments import FLOATS, float_dtype
from tiletrace.kernels.packed_weights import (
  BITS,
  BLOCK,
  COLUMNS,
  LINE,
  Format,
  check_format,
  decoded,
  dequantize_weights,
  offset_of,
  packed_shape,
  parts_of,
)
from tiletrace.lowering.target import SM_90A

_LEAST_GROUP = 32
_FEW_ROWS = 16            # of x: what one mma.sync takes
_FEWER_ROWS = 8           # the same where x is the right operand
_ROWS, _COLUMNS = 16, 8   # of a result of mma.sync
_FEW_BLOCKS = 8           # of w in a slot where there are few rows of x: one for each warp
_RING_BYTES = 220 << 10
# A tile's time, in units of the first one's, where it is one of a wave (an H200, k = 4096).
_MANY_ROWS = ((256, 128, 2, 4, 1.0), (128, 64, 1, 8, 0.6))


@dataclasses.dataclass(frozen=True, slots=True)
class DequantTiling:
  """Rows of x and columns of w of a tile, slots of the ring, and blocks of 64 rows of w in one."""
  bm: int
  bn: int
  warpgroups: int
  num_stages: int
  blocks: int = 1

  @property
  def few_rows(self) -> bool:
    return self.bm <= _FEW_ROWS


def choose_dequant_tiling(m: int, n: int, *, form: Format, group: int) -> DequantTiling:
  """Every tile dequantises its weights anew: as many rows of x as there are, up to 256, unless smaller tiles are needed
  to give every SM one. Few rows wait for the weights: one program for each SM, of as many columns as that takes and its
  registers allow, with 32 KiB or more on their way."""
  if m > 128:
    *tiling, _ = min(_MANY_ROWS, key=lambda t: tt.cdiv(tt.cdiv(m, t[0]) * tt.cdiv(n, t[1]), SM_90A.sm_count) * t[4])
    return DequantTiling(*tiling)
  if m > _FEW_ROWS:
    return DequantTiling(tt.align_to(m, 8) if m <= 64 else 128, 128, 2, 6)
  blocks = next(b for b in range(_FEW_BLOCKS, 0, -1) if b * BLOCK % group == 0 or group % (b * BLOCK) == 0)
  bm = _FEWER_ROWS if m <= _FEWER_ROWS and blocks & (blocks - 1) == 0 else _FEW_ROWS
  bn = next((c for c in (COLUMNS, 2 * COLUMNS) if n <= c * SM_90A.sm_count), 16 * COLUMNS // BITS[form])
  slot = blocks * BLOCK * (bn * BITS[form] // 8 + 2 * bm) + 4 * tt.cdiv(blocks * BLOCK, group) * bn
  stages = (_RING_BYTES - 4 * blocks * bm * bn) // slot                         # beside the sums of the warps
  return DequantTiling(bm, bn, 2, max(2, min(stages, 4 if bn * BITS[form] <= 256 else 3)), blocks)


def dequant_matmul_kernel(x, w, scales, y, *, form, group, tiling):
  """yᵀ = wᵀ xᵀ: the weights go from a ring to registers, and are the product's left operand there."""
  i, j = tt.program_id(0), tt.program_id(1)
  bm, bn = tiling.bm, tiling.bn
  rows, cols = tt.block(i, bm), tt.block(j, bn)
  lines, parts = bn * 2 * BITS[form] // LINE, parts_of(form)
  x_s = tt.alloc_shared((bm, BLOCK), x.dtype)
  w_s = tt.alloc_shared((lines, LINE), w.dtype)
  scale_s = tt.alloc_shared((tt.cdiv(BLOCK, group), bn), scales.dtype)
  acc = tt.alloc_fragment((bn, bm), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(w.shape[0], num_stages=tiling.num_stages):
    tt.copy(w.at[k, tt.block(j, lines), :], w_s)
    tt.copy(scales.at[tt.ds(k * BLOCK // group, scale_s.shape[0]), cols], scale_s)
    tt.copy(x.at[rows, tt.block(k, BLOCK)], x_s)
    words = w_s[...]
    scale = scale_s[...].astype(x.dtype)
    for p in range(parts):
      of = scale[p * BLOCK // parts // group]
      tt.gemm(decoded(words, p, bn, form, x.dtype) * of[:, None], x_s.at[:, tt.block(p, BLOCK // parts)].T, acc)
  y[rows, cols] = acc[...].astype(y.dtype).T


def few_rows_kernel(x, w, scales, y, *, form, group, tiling):
  """y = x w by mma.sync: each warp has blocks of w of its own and multiplies them with their part of x, so that every
  number goes to registers once; what the warps have is added at the end. Of few enough rows w is the left operand.

  Instructions bound it, not bytes: where a block has one scale for each column, its numbers are multiplied as they come
  out of their words, with an offset; a product of that alone is taken off, and what is left is scaled.
  """
  bm, bn, blocks = tiling.bm, tiling.bn, tiling.blocks
  j, parts = tt.program_id(0), parts_of(form)
  rows, cols = tt.block(0, bm), tt.block(j, bn)
  lines, fewer, shared = bn * 2 * BITS[form] // LINE, bm <= _FEWER_ROWS, min(blocks, max(1, group // BLOCK))
  scaled = max(1, BLOCK // group)                          # parts of a block with scales of their own
  offset = offset_of(form, x.dtype) if scaled == 1 else 0
  w_s = tt.alloc_shared((blocks, lines, LINE), w.dtype)
  scale_s = tt.alloc_shared((tt.cdiv(blocks * BLOCK, group), bn), scales.dtype)
  x_s = tt.alloc_shared((bm, blocks * BLOCK), x.dtype)
  acc = tt.alloc_fragment((blocks, bn, bm) if fewer else (blocks, bm, bn), jnp.float32)
  product = tt.alloc_fragment(acc.shape, jnp.float32) if scaled == 1 else acc
  extra = tt.alloc_fragment((blocks, _ROWS, bm) if fewer else (blocks, bm, _COLUMNS), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(w.shape[0], blocks), num_stages=tiling.num_stages):
    tt.copy(w.at[tt.block(k, blocks), tt.block(j, lines), :], w_s)
    tt.copy(scales.at[tt.ds(k * blocks * BLOCK // group, scale_s.shape[0]), cols], scale_s)
    tt.copy(x.at[rows, tt.block(k, blocks * BLOCK)], x_s)
    words, of_x = w_s[...], x_s[...].reshape(bm, blocks, BLOCK)
    scale = [_of_blocks(scale_s[tt.ds(i, blocks // shared, scaled), :].astype(x.dtype), blocks) for i in range(scaled)]
    numbers = [decoded(words, p, blocks * bn, form, x.dtype, offset=bool(offset)).reshape(blocks, bn, BLOCK // parts)
               for p in range(parts)]
    if scaled > 1:
      numbers = [n * scale[p * scaled // parts][:, :, None] for p, n in enumerate(numbers)]
    weights = tt.concatenate(numbers, axis=2)
    left, right, much = (weights, tt.transpose(of_x, (1, 2, 0)), (blocks, _ROWS, BLOCK)) if fewer else (
        tt.transpose(of_x, (1, 0, 2)), tt.transpose(weights, (0, 2, 1)), (blocks, BLOCK, _COLUMNS))
    if offset:
      much = tt.full(much, -offset, x.dtype)
      tt.gemm(much if fewer else left, right if fewer else much, extra, accumulate=False)
      product[...] = _repeated(extra[...], 1 if fewer else 2, bn)
    tt.gemm(left, right, product, accumulate=scaled > 1 or bool(offset))
    if scaled == 1:
      acc[...] += product[...] * (scale[0][:, :, None] if fewer else scale[0][:, None, :]).astype(jnp.float32)
  part_s = tt.alloc_shared(acc.shape, jnp.float32)
  part_s[...] = acc[...]
  total = part_s[0]
  for b in range(1, blocks):
    total = total + part_s[b]
  y[rows, cols] = (total.T if fewer else total).astype(y.dtype)


def _repeated(x: tt.Tile, axis: int, n: int) -> tt.Tile:
  """x again and again along an axis, `n` numbers in all: each thread has what it needs."""
  shape = list(x.shape)
  times = [*shape[:axis], n // shape[axis], *shape[axis:]]
  return tt.broadcast_to(x.reshape(*shape[:axis], 1, *shape[axis:]), times).reshape(*shape[:axis], n, *shape[axis + 1:])


def _of_blocks(scale: tt.Tile, blocks: int) -> tt.Tile:
  """[blocks, columns] of scales [groups, columns]."""
  groups, columns = scale.shape
  return tt.broadcast_to(scale[:, None, :], (groups, blocks // groups, columns)).reshape(blocks, columns)


def dequant_matmul_reference(x: jax.Array, packed: jax.Array, scales: jax.Array, *, group: int = 128,
                             format: Format = "int4", out_dtype: Any = None) -> jax.Array:
  """What `dequant_matmul` computes, in jax.numpy: weights in x's dtype, products and sums in f32."""
  w = dequantize_weights(packed, scales, k=x.shape[-1], group=group, format=format, dtype=x.dtype)
  y = jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
  return y.astype(out_dtype or x.dtype)


def dequant_matmul(x: jax.Array, packed: jax.Array, scales: jax.Array, *, group: int = 128, format: Format = "int4",
                   out_dtype: Any = None) -> jax.Array:
  """x @ w of packed weights: numbers times their group's scale in x's dtype, or sums over a group times it in f32.

  Args:
    x: bfloat16 or float16 [..., k].
    packed: uint32, w[k, n] by `pack_weights` or `quantize_weights`.
    scales: float [ceil(k / group), n], rounded to x's dtype.
    group: rows of w that share a scale: 32, a multiple of 64, or k or more.
    format: "int4", "int8" or "fp4" (e2m1), as packed.
    out_dtype: of the result, by default x's.

  Returns:
    [..., n].

  Raises:
    TileTypeError: dtypes or shapes that do not fit.

  Of up to 16 rows of x what is infinite, or 2**120 and more, gives NaN in its row: numbers carry an offset there.
  The derivatives, of x and scales, are those of `dequant_matmul_reference`, by XLA.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import dequant_matmul, dequant_matmul_reference, quantize_weights
    >>> x, w = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(((30, 256), (256, 40))))
    >>> packed, scales = quantize_weights(w, format="int4", group=128)
    >>> y = jax.jit(dequant_matmul)(x, packed, scales)
    >>> z = dequant_matmul_reference(x, packed, scales)
    >>> y.shape, bool(jnp.allclose(y.astype("float32"), z.astype("float32"), rtol=0.02, atol=0.2))
    ((30, 40), True)
  """
  x, packed, scales = _operands(x, packed, scales, group, format)
  *outer, k = x.shape
  m, n = math.prod(outer), scales.shape[1]
  dtype = float_dtype("dequant_matmul", "out_dtype", out_dtype, x.dtype)
  call = dequant_matmul_call((m, n), dtype, k=k, group=group, format=format)
  return call(x.reshape(m, k), packed, scales).reshape(*outer, n)


def dequant_matmul_call(shape: tuple[int, int], dtype: Any, *, k: int, group: int = 128, format: Format = "int4",
                        tiling: DequantTiling | None = None) -> tt.TileCall:
  """The call behind `dequant_matmul` for a result of `shape`, of (x, packed, scales)."""
  m, n = shape
  group = group if group < k else tt.align_to(k, BLOCK * _FEW_BLOCKS)
  t = tiling or choose_dequant_tiling(m, n, form=format, group=group)
  kernel = few_rows_kernel if t.few_rows else dequant_matmul_kernel
  if t.few_rows:
    launch: dict[str, Any] = {"grid": tt.cdiv(n, t.bn), "persistent": n > t.bn * SM_90A.sm_count}
  else:
    launch = {"grid": (tt.cdiv(m, t.bm), tt.cdiv(n, t.bn)), "raster": 16, "persistent": True}
  options = tt.CompileOptions(overlap_launch=t.few_rows)
  return tt.tile_call(
      functools.partial(kernel, form=format, group=group, tiling=t), jax.ShapeDtypeStruct(shape, dtype),
      warpgroups=t.warpgroups, **launch, name="dequant_matmul", options=options,
      vjp=functools.partial(_backward, group=group, format=format))


def _backward(inputs: tuple, y: jax.Array, dy: jax.Array, *, group: int, format: Format) -> tuple:
  x, packed, scales = inputs
  _, pull = jax.vjp(lambda x, s: dequant_matmul_reference(x, packed, s, group=group, format=format,
                                                          out_dtype=y.dtype), x, scales)
  dx, dscales = pull(dy)
  return dx, None, dscales


def _operands(x: Any, packed: Any, scales: Any, group: int, form: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
  check_format("dequant_matmul", form)
  x, packed, scales = map(jnp.asarray, (x, packed, scales))
  if x.dtype not in (jnp.bfloat16, jnp.float16) or x.ndim < 1:
    raise TileTypeError(f"dequant_matmul: x is {x.dtype}{list(x.shape)}", loc=caller_loc(),
                        hint="bfloat16 or float16 [..., k]: x.astype(jnp.bfloat16)")
  k = x.shape[-1]
  if isinstance(group, bool) or not isinstance(group, int) or (
      group < k and (group < _LEAST_GROUP or (group > _LEAST_GROUP and group % BLOCK))):
    raise TileTypeError(f"dequant_matmul: group={group!r}", loc=caller_loc(),
                        hint=f"{_LEAST_GROUP}, a multiple of {BLOCK}, or k = {k} and more: one scale for each column")
  groups = tt.cdiv(k, group)
  if scales.ndim != 2 or scales.shape[0] != groups or scales.dtype not in FLOATS:
    raise TileTypeError(f"dequant_matmul: scales is {scales.dtype}{list(scales.shape)}", loc=caller_loc(),
                        hint=f"floats [{groups}, n]: one for each {group} rows of w[{k}, n], in each column")
  wanted = packed_shape(k, scales.shape[1], form)
  if packed.shape != wanted or packed.dtype != jnp.uint32:
    raise TileTypeError(f"dequant_matmul: packed is {packed.dtype}{list(packed.shape)}", loc=caller_loc(),
                        hint=f"uint32{list(wanted)} is w[{k}, {scales.shape[1]}] of {form}: "
                             f"pack_weights(w, format={form!r})")
  return x, packed, scales
