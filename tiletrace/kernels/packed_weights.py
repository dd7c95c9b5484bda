"""Weights of 4 and 8 bits packed in words, so that a thread's words are the operand that its tensor core takes.

A block of 64 rows of w[k, n] is a line of words for each column, all columns of a block one after another:

  words[k // 64, n // (2048 // bits * 8) ...]: u32 [ceil(k / 64), columns * bits * 2 / 256, 256]

where the columns are padded to a multiple of 32. In a column's 2 * bits words of a block, row

  r = 16 * (steps * s + t) + 8 * h + 2 * q + e          q < 4, h and e < 2

lies at bits * s + 16 * e of word 2 * steps * q + 2 * t + h, where steps = bits / 4, t < steps and s < 4 / steps. So one
shift and one mask give the pairs (e = 0, 1) of the s-th part of 16 * steps rows, and the words of lane 4 * column + q,
which are neighbours in memory, are its elements of the operand: PTX ISA, "Matrix Fragments for mma.m16n8k16" and
"Register Fragments for wgmma.mma_async".
"""
from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.kernels.arguments import float_array, whole

Format = Literal["int4", "int8", "fp4"]
FORMATS = get_args(Format)
BITS: dict[Format, int] = {"int4": 4, "int8": 8, "fp4": 4}
BLOCK = 64                # rows of w
LINE = 256                # words: a row of the packed array
COLUMNS = 32              # whose words, or whose words' half, are a line
_LARGEST: dict[Format, float] = {"int4": 7, "int8": 127, "fp4": 6}
_E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)       # of codes 0 to 7; 8 more is the sign


def words_of(n: int, form: Format) -> int:
  """Words of a block of n columns."""
  return tt.align_to(n, COLUMNS) * 2 * BITS[form]


def packed_shape(k: int, n: int, form: Format) -> tuple[int, int, int]:
  """The shape of w[k, n] packed."""
  return tt.cdiv(k, BLOCK), words_of(n, form) // LINE, LINE


def parts_of(form: Format) -> int:
  """Parts of a block that one shift and mask give."""
  return 16 // BITS[form]


def pack_weights(w: Any, *, format: Format = "int4") -> jax.Array:
  """w[k, n] as words; rows and columns that fill a block are zeros.

  Args:
    w: integers from -8 to 7 ("int4") or -128 to 127 ("int8"), whose low bits are taken; or floats, which are rounded to
      the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives ("fp4", e2m1).
    format: "int4", "int8" or "fp4".

  Returns:
    uint32 [ceil(k / 64), ceil(n / 32) * words / 256, 256] with 256 words for 32 columns of 4 bits, 512 for 32 of 8.

  Raises:
    TileTypeError: w is no matrix of such numbers.

  Example:
    >>> import jax.numpy as jnp
    >>> from tiletrace.kernels import dequantize_weights, pack_weights
    >>> packed = pack_weights(jnp.asarray([[1, -8], [2, 7]]), format="int4")
    >>> packed.shape, dequantize_weights(packed, jnp.full((1, 2), 0.5), k=2, group=128).tolist()
    ((1, 1, 256), [[0.5, -4.0], [1.0, 3.5]])
  """
  w = jnp.asarray(w)
  check_format("pack_weights", format)
  floats = jnp.issubdtype(w.dtype, jnp.floating)
  if w.ndim != 2 or floats != (format == "fp4"):
    raise TileTypeError(f"pack_weights: w is {w.dtype}{list(w.shape)}, format is {format!r}", loc=caller_loc(),
                        hint="a matrix [k, n] of integers, or of floats for fp4; quantize_weights makes one and scales")
  return _packed(w, format)


@functools.partial(jax.jit, static_argnames="format")
def _packed(w: jax.Array, format: Format) -> jax.Array:
  """Compiled: one by one its operations would be many small programs, and copies of all weights."""
  if format == "fp4":
    near = w.astype(jnp.float4_e2m1fn).astype(jnp.float32)
    codes = jnp.searchsorted(jnp.asarray(_E2M1), jnp.abs(near)) + 8 * jnp.signbit(near)
    codes = codes.astype(jnp.uint32)
  else:
    codes = w.astype(jnp.int32).astype(jnp.uint32) & (2**BITS[format] - 1)
  (k, n), bits = w.shape, BITS[format]
  blocks, steps = tt.cdiv(k, BLOCK), bits // 4
  columns = tt.align_to(n, COLUMNS)
  codes = jnp.pad(codes, ((0, blocks * BLOCK - k), (0, columns - n)))
  codes = codes.reshape(blocks, parts_of(format), steps, 2, 4, 2, columns)             # s, t, h, q, e
  place = bits * np.arange(parts_of(format))[:, None] + 16 * np.arange(2)
  shifted = codes << jnp.asarray(place, jnp.uint32)[:, None, None, None, :, None]
  words = jnp.sum(shifted, axis=(1, 5), dtype=jnp.uint32)                              # block, t, h, q, column
  return words.transpose(0, 4, 3, 1, 2).reshape(packed_shape(k, n, format))


@functools.partial(jax.jit, static_argnames=("k", "n", "format"))
def unpack_weights(packed: jax.Array, k: int, n: int, *, format: Format = "int4") -> jax.Array:
  """The numbers of `pack_weights` as float32 [k, n]."""
  bits, blocks = BITS[format], packed.shape[0]
  words = packed.reshape(blocks, -1, 4, bits // 4, 2).transpose(0, 3, 4, 2, 1)         # block, t, h, q, column
  place = bits * np.arange(parts_of(format))[:, None] + 16 * np.arange(2)
  codes = words[:, None, :, :, :, None] >> jnp.asarray(place, jnp.uint32)[:, None, None, None, :, None]
  codes = (codes & (2**bits - 1)).reshape(blocks * BLOCK, -1)[:k, :n]
  if format == "fp4":
    return jnp.asarray([*_E2M1, *(-_E2M1)])[codes]
  return ((codes ^ 2**(bits - 1)).astype(jnp.int32) - 2**(bits - 1)).astype(jnp.float32)


def quantize_weights(w: jax.Array, *, format: Format = "int4", group: int = 128,
                     dtype: Any = None) -> tuple[jax.Array, jax.Array]:
  """(packed, scales) of w[k, n]: the largest of each group of rows is the format's largest number.

  Args:
    w: float [k, n].
    format: "int4", "int8" or "fp4".
    group: rows that share a scale, in each column.
    dtype: of the scales, by default w's.

  Returns:
    what `pack_weights` gives, and scales [ceil(k / group), n].

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from tiletrace.kernels import dequantize_weights, quantize_weights
    >>> w = jax.random.normal(jax.random.key(0), (200, 40))
    >>> packed, scales = quantize_weights(w, format="int8", group=64)
    >>> again = dequantize_weights(packed, scales, k=200, group=64, format="int8")
    >>> scales.shape, bool(jnp.max(jnp.abs(again - w)) < 0.02)
    ((4, 40), True)
  """
  check_format("quantize_weights", format)
  w = float_array("quantize_weights", "w", w)
  if w.ndim != 2:
    raise TileTypeError(f"quantize_weights: w has the shape {w.shape}", loc=caller_loc(), hint="[k, n]")
  whole("quantize_weights", "group", group, least=1)
  k, n = w.shape
  groups = tt.cdiv(k, group)
  w32 = jnp.pad(w.astype(jnp.float32), ((0, groups * group - k), (0, 0))).reshape(groups, group, n)
  scales = (jnp.max(jnp.abs(w32), axis=1) / _LARGEST[format]).astype(dtype or w.dtype)
  q = (w32 / jnp.where(scales == 0, 1, scales).astype(jnp.float32)[:, None]).reshape(-1, n)[:k]
  if format != "fp4":
    q = jnp.clip(jnp.round(q), -_LARGEST[format], _LARGEST[format]).astype(jnp.int32)
  return pack_weights(q, format=format), scales


def dequantize_weights(packed: jax.Array, scales: jax.Array, *, k: int, group: int, format: Format = "int4",
                       dtype: Any = jnp.float32) -> jax.Array:
  """w[k, n] in `dtype` of packed weights and scales [ceil(k / group), n], which are rounded to it first.

  Example:
    >>> import jax.numpy as jnp
    >>> from tiletrace.kernels import dequantize_weights, pack_weights
    >>> packed = pack_weights(jnp.asarray([[3.0], [-0.5]]), format="fp4")
    >>> dequantize_weights(packed, jnp.full((1, 1), 10), k=2, group=32, format="fp4").tolist()
    [[30.0], [-5.0]]
  """
  numbers = unpack_weights(packed, k, scales.shape[1], format=format).astype(dtype)
  return numbers * jnp.repeat(scales.astype(dtype), group, axis=0)[:k]


def check_format(what: str, form: Any) -> None:
  if form not in FORMATS:
    raise TileTypeError(f"{what}: format is {form!r}", loc=caller_loc(), hint="one of " + ", ".join(map(repr, FORMATS)))


def decoded(words: tt.Tile, part: int, columns: int, form: Format, dtype: Any, *, offset: bool = False) -> tt.Tile:
  """In a kernel: part `part` of blocks as numbers of bf16 or f16, [blocks * columns, rows of the part].

  Args:
    words: u32, of blocks and all of their `columns`; any shape.
    columns: of all the blocks together.
    offset: leaves `offset_of(form, dtype)` in the numbers, which saves an instruction for each two.
  """
  steps, dtype = BITS[form] // 4, jnp.dtype(dtype)
  x = _fp4(words, part, dtype) if form == "fp4" else _integers(words, part, BITS[form], dtype)
  if not offset and offset_of(form, dtype):
    x = x - offset_of(form, dtype)
  x = x.reshape(columns, 4, steps, 2, 2)                                               # q, t, h, e
  return tt.transpose(x, (0, 2, 3, 1, 4)).reshape(columns, 16 * steps)


def offset_of(form: Format, dtype: Any) -> int:
  """What the first step of decoding adds to every number; 0: nothing that is the same for all."""
  if form == "fp4" or (form == "int8" and dtype == jnp.bfloat16):
    return 0
  return (128 if dtype == jnp.bfloat16 else 1024) + 2 ** (BITS[form] - 1)


def _integers(words: tt.Tile, part: int, bits: int, dtype: Any) -> tt.Tile:
  """A number n of at most 7 (bf16) or 10 (f16) bits in the mantissa of 128 (1024) is 128 + n (1024 + n): `offset_of`
  too much where the sign has no place of its own."""
  shifted = words >> np.uint32(bits * part) if part else words
  if bits == 8 and dtype == jnp.bfloat16:       # 128 + the low 7 bits; less 128, or 256 by the sign in the exponent
    low, high = (tt.bitcast_convert_type(shifted & np.uint32(0x10001 * m) | np.uint32(0x43004300), dtype)
                 for m in (0x7F, 0x80))
    return low - high
  magic = 0x4300 if dtype == jnp.bfloat16 else 0x6400
  half = 2 ** (bits - 1)                        # with the sign's bit inverted n + half is not negative
  pairs = shifted & np.uint32(0x10001 * (2**bits - 1)) ^ np.uint32(0x10001 * (magic | half))
  return tt.bitcast_convert_type(pairs, dtype)


def _fp4(words: tt.Tile, part: int, dtype: Any) -> tt.Tile:
  """e2m1 in the bits of f16 is 2**-14 times its value, subnormal numbers included."""
  sign = words << np.uint32(12 - 4 * part) if part < 3 else words
  up = 9 - 4 * part
  number = words << np.uint32(up) if up > 0 else words >> np.uint32(-up)
  pairs = sign & np.uint32(0x80008000) | number & np.uint32(0x0E000E00)
  return (tt.bitcast_convert_type(pairs, jnp.float16) * 2.0**14).astype(dtype)
