"""A tile value in registers: one thread's elements, and how they are packed, taken apart and moved."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import LoweringError
from tiletrace.core.source import Loc
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.module import Builder
from tiletrace.lowering.ptx.registers import Reg

Operand = Reg | int | float  # a register, or a literal of a scalar (bool: 0 or 1)

_CLASS = {dtypes.f32: "f32", dtypes.i32: "b32", dtypes.u32: "b32", dtypes.bool_: "pred",
          dtypes.f16: "b32", dtypes.bf16: "b32"}
_PACKED = (dtypes.f16, dtypes.bf16)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Elements:
  """`count` elements of one thread.

  Attributes:
    dtype: the element type.
    count: elements per thread (1 for a scalar, which may be a literal).
    regs: f32: one f32 register each; i32, u32: one b32 each; bool: one predicate each; f16, bf16: two elements in
      each b32, the first in the low half (the last high half is unused where `count` is odd).
  """
  dtype: np.dtype
  count: int
  regs: tuple[Operand, ...]


def register_class(dtype: np.dtype, loc: Loc) -> str:
  """The class of the registers that hold `dtype`.

  Raises:
    LoweringError: tiles of this dtype cannot be held in registers yet.
  """
  if dtype not in _CLASS:
    raise LoweringError(f"{dtypes.short_name(dtype)} values have no registers on the GPU yet", loc=loc,
                        hint="convert on the way: .astype(jnp.int32) or .astype(jnp.float32); "
                             "f32, bf16, f16, i32, u32 and bool are supported")
  return _CLASS[dtype]


def num_registers(dtype: np.dtype, count: int) -> int:
  return (count + 1) // 2 if dtype in _PACKED else count


def allocate(b: Builder, dtype: np.dtype, count: int, loc: Loc) -> Elements:
  return Elements(dtype, count, tuple(b.regs(register_class(dtype, loc), num_registers(dtype, count))))


def unpack(b: Builder, x: Elements) -> list[Operand]:
  """One operand for each element, in the type it is computed in: f32 for every float."""
  if x.dtype not in _PACKED:
    return list(x.regs)
  if x.count == 1 and not isinstance(x.regs[0], Reg):
    return [float(np.asarray(x.regs[0], x.dtype))]
  out: list[Operand] = []
  for r in x.regs:
    out += _halves(b, x.dtype, r)
  return out[:x.count]


def _halves(b: Builder, dtype: np.dtype, r: Operand) -> tuple[Reg, Reg]:
  if dtype == dtypes.bf16:  # a bf16 is the high half of the f32 of the same value
    low, high = b.reg("f32"), b.reg("f32")
    b(isa.SHL, _b32(b, low), r, 16, type="b32")
    b(isa.AND, _b32(b, high), r, -65536, type="b32")
    return low, high
  h0, h1 = b.new(isa.UNPACK, r, type="b32")
  return b.new(isa.CVT, h0, to="f32", source="f16"), b.new(isa.CVT, h1, to="f32", source="f16")


def _b32(b: Builder, f: Reg) -> Reg:
  return f  # bit-size types accept f32 registers of the same width (PTX ISA 9.4.1)


def pack(b: Builder, dtype: np.dtype, xs: Sequence[Operand]) -> Elements:
  """The inverse of `unpack`; floats are rounded to nearest even."""
  if dtype not in _PACKED:
    return Elements(dtype, len(xs), tuple(xs))
  if len(xs) == 1 and not isinstance(xs[0], Reg):
    return Elements(dtype, 1, (float(np.asarray(xs[0], dtype)),))
  to = "bf16x2" if dtype == dtypes.bf16 else "f16x2"
  regs = []
  for i in range(0, len(xs), 2):
    high = xs[i + 1] if i + 1 < len(xs) else 0.0
    regs.append(b.new(isa.CVT_PACK, high, xs[i], rnd="rn", to=to))
  return Elements(dtype, len(xs), tuple(regs))


def bits_of(x: Elements) -> Elements:
  """A 16-bit scalar literal as the bits of a b32 register's low half; other elements unchanged."""
  if x.dtype in _PACKED and x.count == 1 and not isinstance(x.regs[0], Reg):
    return Elements(x.dtype, 1, (int(np.asarray(x.regs[0], x.dtype).view(np.uint16)),))
  return x


def take(b: Builder, x: Elements, index: Sequence[int]) -> Elements:
  """The elements at `index`, in that order: register renaming, byte permutes for halves that change place."""
  if x.dtype not in _PACKED:
    return Elements(x.dtype, len(index), tuple(x.regs[i] for i in index))
  x = bits_of(x)
  regs: list[Operand] = []
  for i in range(0, len(index), 2):
    first = index[i]
    second = index[i + 1] if i + 1 < len(index) else first + 1 - 2 * (first % 2)
    if first % 2 == 0 and second == first + 1:
      regs.append(x.regs[first // 2])
      continue
    low, high = 2 * (first % 2), 4 + 2 * (second % 2)
    selector = low | (low + 1) << 4 | high << 8 | (high + 1) << 12
    regs.append(b.new(isa.PRMT, x.regs[first // 2], x.regs[min(second // 2, len(x.regs) - 1)], selector))
  return Elements(x.dtype, len(index), tuple(regs))


def put(b: Builder, dst: Elements, index: Sequence[int], src: Elements) -> None:
  """dst[index[i]] = src[i]; the other elements stay."""
  src = bits_of(src)
  for i, at in enumerate(index):
    if dst.dtype not in _PACKED:
      target = dst.regs[at]
      assert isinstance(target, Reg)
      move_register(b, target, src.regs[i])
      continue
    target, taken = dst.regs[at // 2], src.regs[i // 2]
    assert isinstance(target, Reg)
    half = 0x54 if i % 2 == 0 else 0x76  # bytes of `taken`, which prmt numbers from 4
    b(isa.PRMT, target, target, taken, half << 8 | 0x10 if at % 2 else 0x3200 | half)


def spread(b: Builder, x: Elements, count: int) -> Elements:
  """A scalar as `count` equal elements."""
  assert x.count == 1, x
  if x.dtype not in _PACKED:
    return Elements(x.dtype, count, x.regs * count)
  x = bits_of(x)
  if isinstance(x.regs[0], Reg):
    pair: Operand = b.new(isa.PRMT, x.regs[0], x.regs[0], 0x1010)
  else:
    pair = int(x.regs[0]) | int(x.regs[0]) << 16
  return Elements(x.dtype, count, (pair,) * num_registers(x.dtype, count))


def move(b: Builder, dst: Elements, src: Elements) -> None:
  """dst = src, register by register; a scalar source fills."""
  if src.count == 1 and dst.count != 1:
    src = spread(b, src, dst.count)
  src = bits_of(src)
  for d, s in zip(dst.regs, src.regs, strict=True):
    assert isinstance(d, Reg)
    if s is not d:
      move_register(b, d, s)


def move_register(b: Builder, d: Reg, s: Operand) -> None:
  if d.cls == "pred":
    b(isa.MOV_PRED, d, s)
  else:
    b(isa.MOV, d, s, type="b32" if d.cls == "b32" else "f32")


def materialise(b: Builder, x: Elements) -> Elements:
  """The same elements with every literal in a register."""
  x = bits_of(x)
  if all(isinstance(r, Reg) for r in x.regs):
    return x
  cls = _CLASS[x.dtype]
  out = Elements(x.dtype, x.count, tuple(b.regs(cls, len(x.regs))))
  move(b, out, x)
  return out
