"""Elements of 8 and 16 bits: words of them, and each in the 32-bit type it is computed in.

PTX converts to 8-bit floats by saturating (PTX ISA, cvt, .satfinite); jax.numpy's casts give NaN (e4m3, which has no
infinities) or infinity (e5m2) where the rounded number is too large. Here it is as in jax.numpy.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiletrace.core import dtypes
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.module import Builder
from tiletrace.lowering.ptx.registers import Reg

Operand = Reg | int | float

INTEGERS = (dtypes.i8, dtypes.u8, dtypes.i16, dtypes.u16)
FLOATS8 = (dtypes.f8e4m3, dtypes.f8e5m2)
_PTX = {dtypes.f16: "f16x2", dtypes.bf16: "bf16x2", dtypes.f8e4m3: "e4m3x2", dtypes.f8e5m2: "e5m2x2"}
_E4M3_LAST = 464.0       # halfway between 448, the largest e4m3, and 480, which would be next: a tie rounds down
_E5M2_FIRST = 61440.0    # halfway between 57344, the largest e5m2, and 65536: a tie rounds up
_PAIR, _QUAD = 0x5410, 0x0040     # prmt: the low halves of two registers; the low bytes of two, in a low half


def bits(dtype: np.dtype, x: Operand) -> int:
  """The bits of a literal."""
  return int(np.asarray(x).astype(dtype).view(f"u{dtype.itemsize}"))


def split(b: Builder, dtype: np.dtype, word: Operand) -> list[Operand]:
  """The elements of a register: floats in f32, integers extended to 32 bits."""
  if dtype == dtypes.bf16:  # a bf16 is the high half of the f32 of the same value; b32 takes f32 registers (9.4.1)
    low, high = b.reg("f32"), b.reg("f32")
    b(isa.SHL, low, word, 16, type="b32")
    b(isa.AND, high, word, -65536, type="b32")
    return [low, high]
  if dtype == dtypes.f16:
    return [b.new(isa.CVT, half, to="f32", source="f16") for half in b.new(isa.UNPACK, word, type="b32")]
  if dtype in FLOATS8:      # each is an f16
    pairs = [b.new(isa.CVT_F8_TO_F16, pair, source=_PTX[dtype]) for pair in b.new(isa.UNPACK, word, type="b32")]
    return [x for pair in pairs for x in split(b, dtypes.f16, pair)]
  width, kind = 8 * dtype.itemsize, "s32" if dtype.kind == "i" else "u32"
  return [b.new(isa.BFE, word, at, width, type=kind) for at in range(0, 32, width)]


def join(b: Builder, dtype: np.dtype, xs: Sequence[Operand]) -> Operand:
  """A register of up to two or four elements: the inverse of `split`."""
  if dtype in INTEGERS:
    return join_bytes(b, xs) if dtype.itemsize == 1 else join_halves(b, xs)
  xs = [*xs, *[0.0] * (len(xs) % 2)]
  if dtype not in FLOATS8:
    return b.new(isa.CVT_PACK, xs[1], xs[0], rnd="rn", to=_PTX[dtype])
  if dtype == dtypes.f8e4m3:
    xs = [_nan_beyond(b, x) for x in xs]
  pairs = [b.new(isa.CVT_F8_PACK, xs[i + 1], xs[i], to=_PTX[dtype]) for i in range(0, len(xs), 2)]
  word = b.new(isa.PACK, [pairs[0], pairs[-1]], type="b32")
  if dtype == dtypes.f8e5m2:  # the code after the largest number is infinity
    for i, x in enumerate(xs):
      large = _magnitude_is(b, "ge", x, _E5M2_FIRST)
      if large is not None:
        word = b.new(isa.ADD, word, b.new(isa.SELP, 1 << 8 * i, 0, large, type="b32"), type="s32")
  return word


def _magnitude_is(b: Builder, cmp: str, x: Operand, limit: float) -> Reg | None:
  """|x| compared with a limit; None for a literal, which `pack` rounds."""
  if not isinstance(x, Reg):
    return None
  return b.new(isa.SETP, b.new(isa.ABS, x, type="f32"), limit, cmp=cmp, type="f32")


def _nan_beyond(b: Builder, x: Operand) -> Operand:
  large = _magnitude_is(b, "gt", x, _E4M3_LAST)
  return x if large is None else b.new(isa.SELP, float("nan"), x, large, type="f32")


def join_halves(b: Builder, xs: Sequence[Operand]) -> Operand:
  """The low halves of up to two registers."""
  return b.new(isa.PRMT, xs[0], xs[-1], _PAIR) if len(xs) == 2 else xs[0]


def join_bytes(b: Builder, xs: Sequence[Operand]) -> Operand:
  """The low bytes of up to four registers."""
  pairs = [b.new(isa.PRMT, xs[i], xs[min(i + 1, len(xs) - 1)], _QUAD) for i in range(0, len(xs), 2)]
  return join_halves(b, pairs)
