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
from tiletrace.kernels.packed_weights import (
  BITS,
  BLOCK,
  COLUMNS,
  LINE,
  Format,
  check_format,
  decoded,
  dequantize_weights,
  packed_shape,
  parts_of,
)
from tiletrace.lowering.target import SM_90A

_LEAST_GROUP = 32
_ACCUMULATORS = 4         # mma.sync takes longer than the next one's issue: so many in turn


_FEW_ROWS = 16            # of x: what one mma.sync takes
_FEW_BLOCKS = 8           # of w in a slot where there are few rows of x
_RING_BYTES = 192 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class DequantTiling:
  """Rows of x and columns of w of a tile, blocks of 64 rows of w in a slot of the ring, and how many slots it has."""
  bm: int
  bn: int
  warpgroups: int
  num_stages: int
  blocks: int = 1

  @property
  def few_rows(self) -> bool:
    return self.bm == _FEW_ROWS


def choose_dequant_tiling(m: int, n: int, *, form: Format, group: int) -> DequantTiling:
  """Every tile dequantises its weights anew: as many rows of x as there are, up to 256. Few rows wait for the weights:
  then as many CTAs as there are SMs, with most of their weights on the way at once."""
  if m > 128:
    return DequantTiling(256, 128, 2, 4)
  if m > _FEW_ROWS:
    return DequantTiling(tt.align_to(m, 8) if m <= 64 else 128, 128, 2, 6)
  ctas = 1 if n <= COLUMNS * SM_90A.sm_count else 2                # of an SM
  bn, most = COLUMNS * ctas, _FEW_BLOCKS // ctas
  blocks = next(b for b in range(most, 0, -1) if b * BLOCK % group == 0 or group % (b * BLOCK) == 0)
  slot = blocks * BLOCK * (bn * BITS[form] // 8 + 2 * _FEW_ROWS)
  return DequantTiling(_FEW_ROWS, bn, 1, min(_RING_BYTES // ctas // slot, 8), blocks)


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
  """y = x w by mma.sync: each warp converts its own columns of the weights, and sums in four accumulators in turn."""
  j, bn, blocks = tt.program_id(0), tiling.bn, tiling.blocks
  rows, cols = tt.block(0, tiling.bm), tt.block(j, bn)
  lines, depth = bn * 2 * BITS[form] // LINE, BLOCK // parts_of(form)
  w_s = tt.alloc_shared((blocks, lines, LINE), w.dtype)
  scale_s = tt.alloc_shared((tt.cdiv(blocks * BLOCK, group), bn), scales.dtype)
  x_s = tt.alloc_shared((tiling.bm, blocks * BLOCK), x.dtype)
  accs = [tt.alloc_fragment((tiling.bm, bn), jnp.float32) for _ in range(_ACCUMULATORS)]
  for acc in accs:
    acc[...] = 0
  for k in tt.pipelined(tt.cdiv(w.shape[0], blocks), num_stages=tiling.num_stages):
    tt.copy(w.at[tt.block(k, blocks), tt.block(j, lines), :], w_s)
    tt.copy(scales.at[tt.ds(k * blocks * BLOCK // group, scale_s.shape[0]), cols], scale_s)
    tt.copy(x.at[rows, tt.block(k, blocks * BLOCK)], x_s)
    for b in tt.range(blocks, unroll=blocks):
      words, x_b = w_s[b], x_s.at[:, tt.block(b, BLOCK)]
      of = [scale_s[(b * BLOCK + r) // group].astype(x.dtype) for r in range(0, BLOCK, group)]
      for p in range(parts_of(form)):
        weights = decoded(words, p, bn, form, x.dtype) * of[p * depth // group][:, None]
        tt.gemm(x_b.at[:, tt.block(p, depth)], weights.T, accs[p % _ACCUMULATORS], policy=tt.FULL_COL)
  total = accs[0][...]
  for acc in accs[1:]:
    total = total + acc[...]
  y[rows, cols] = total.astype(y.dtype)


def dequant_matmul_reference(x: jax.Array, packed: jax.Array, scales: jax.Array, *, group: int = 128,
                             format: Format = "int4", out_dtype: Any = None) -> jax.Array:
  """What `dequant_matmul` computes, in jax.numpy: weights in x's dtype, products and sums in f32."""
  w = dequantize_weights(packed, scales, k=x.shape[-1], group=group, format=format, dtype=x.dtype)
  y = jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
  return y.astype(out_dtype or x.dtype)


def dequant_matmul(x: jax.Array, packed: jax.Array, scales: jax.Array, *, group: int = 128, format: Format = "int4",
                   out_dtype: Any = None) -> jax.Array:
  """x @ w of packed weights: numbers times their group's scale in x's dtype; sums in f32.

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
  call = dequant_matmul_call((m, n), out_dtype or x.dtype, k=k, group=group, format=format)
  return call(x.reshape(m, k), packed, scales).reshape(*outer, n)


def dequant_matmul_call(shape: tuple[int, int], dtype: Any, *, k: int, group: int = 128, format: Format = "int4",
                        tiling: DequantTiling | None = None) -> tt.TileCall:
  """The call behind `dequant_matmul` for a result of `shape`, of (x, packed, scales)."""
  m, n = shape
  group = group if group < k else tt.align_to(k, BLOCK * _FEW_BLOCKS)
  t = tiling or choose_dequant_tiling(m, n, form=format, group=group)
  kernel = few_rows_kernel if t.few_rows else dequant_matmul_kernel
  if t.few_rows:             # two CTAs share what they read of x, which together is more than the weights
    launch: dict[str, Any] = {"grid": tt.align_to(tt.cdiv(n, t.bn), 2), "cluster": (2,)}
  else:
    launch = {"grid": (tt.cdiv(m, t.bm), tt.cdiv(n, t.bn)), "raster": 16, "persistent": True}
  return tt.tile_call(
      functools.partial(kernel, form=format, group=group, tiling=t), jax.ShapeDtypeStruct(shape, dtype),
      warpgroups=t.warpgroups, **launch, name="dequant_matmul",
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
  if scales.ndim != 2 or scales.shape[0] != groups or scales.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
    raise TileTypeError(f"dequant_matmul: scales is {scales.dtype}{list(scales.shape)}", loc=caller_loc(),
                        hint=f"floats [{groups}, n]: one for each {group} rows of w[{k}, n], in each column")
  wanted = packed_shape(k, scales.shape[1], form)
  if packed.shape != wanted or packed.dtype != jnp.uint32:
    raise TileTypeError(f"dequant_matmul: packed is {packed.dtype}{list(packed.shape)}", loc=caller_loc(),
                        hint=f"uint32{list(wanted)} is w[{k}, {scales.shape[1]}] of {form}: "
                             f"pack_weights(w, format={form!r})")
  return x, packed, scales
