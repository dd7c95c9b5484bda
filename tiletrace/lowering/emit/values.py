"""A tile value in registers: one thread's elements, and how they are packed, taken apart and moved."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import LoweringError
from tiletrace.core.source import Loc
from tiletrace.lowering.emit import narrow
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.module import Builder
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.words import num_words, per_word

Operand = Reg | int | float  # a register, or a literal of a scalar (bool: 0 or 1)

_CLASS = {dtypes.f32: "f32", dtypes.bool_: "pred", **dict.fromkeys(
    (dtypes.i32, dtypes.u32, dtypes.f16, dtypes.bf16, *narrow.INTEGERS, *narrow.FLOATS8), "b32")}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Elements:
  """`count` elements of one thread.

  Attributes:
    dtype: the element type.
    count: elements per thread (1 for a scalar, which may be a literal: its number, never its bits).
    regs: f32: one f32 register each; i32, u32: one b32 each; bool: one predicate each; narrower ones: two or four in
      each b32, the first in the low bits (the last upper parts are unused where `count` does not fill them).
  """
  dtype: np.dtype
  count: int
  regs: tuple[Operand, ...]

  @property
  def is_literal(self) -> bool:
    return self.count == 1 and not isinstance(self.regs[0], Reg)


def register_class(dtype: np.dtype, loc: Loc) -> str:
  """The class of the registers that hold `dtype`.

  Raises:
    LoweringError: tiles of this dtype cannot be held in registers yet.
  """
  if dtype not in _CLASS:
    raise LoweringError(f"{dtypes.short_name(dtype)} values have no registers on the GPU yet", loc=loc,
                        hint="convert on the way: .astype(jnp.int32) or .astype(jnp.float32); 64-bit types are not "
                             "supported")
  return _CLASS[dtype]


def allocate(b: Builder, dtype: np.dtype, count: int, loc: Loc) -> Elements:
  return Elements(dtype, count, tuple(b.regs(register_class(dtype, loc), num_words(dtype, count))))


def unpack(b: Builder, x: Elements) -> list[Operand]:
  """One operand for each element, in the type it is computed in: f32 for every float, 32 bits for every integer."""
  if per_word(x.dtype) == 1:
    return list(x.regs)
  if x.is_literal:
    return [np.asarray(x.regs[0]).astype(x.dtype).item()]
  out: list[Operand] = []
  for r in x.regs:
    out += narrow.split(b, x.dtype, r)
  return out[:x.count]


def pack(b: Builder, dtype: np.dtype, xs: Sequence[Operand]) -> Elements:
  """The inverse of `unpack`; floats are rounded to nearest even, integers keep their low bits."""
  n = per_word(dtype)
  if n == 1:
    return Elements(dtype, len(xs), tuple(xs))
  if len(xs) == 1 and not isinstance(xs[0], Reg):
    with np.errstate(all="ignore"):
      return Elements(dtype, 1, (np.asarray(xs[0]).astype(dtype).item(),))
  return Elements(dtype, len(xs), tuple(narrow.join(b, dtype, xs[i:i + n]) for i in range(0, len(xs), n)))


def words(x: Elements) -> tuple[Operand, ...]:
  """The registers, a literal of a narrow type as bits in the low part of one."""
  if per_word(x.dtype) > 1 and x.is_literal:
    return (narrow.bits(x.dtype, x.regs[0]),)
  return x.regs


def take(b: Builder, x: Elements, index: Sequence[int]) -> Elements:
  """The elements at `index`, in that order: register renaming, byte permutes for parts that change place."""
  n = per_word(x.dtype)
  if n == 1:
    return Elements(x.dtype, len(index), tuple(x.regs[i] for i in index))
  if x.is_literal:
    return spread(b, x, len(index))
  size, regs = 4 // n, []
  for first in range(0, len(index), n):
    places = [divmod(i, n) for i in index[first:first + n]]
    places += [(places[0][0], p) for p in range(len(places), n)]  # unused parts: as if nothing moved
    regs.append(_gather(b, x.regs, [(w, size * p + byte) for w, p in places for byte in range(size)]))
  return Elements(x.dtype, len(index), tuple(regs))


def _gather(b: Builder, regs: Sequence[Operand], sources: Sequence[tuple[int, int]]) -> Operand:
  """A word of four bytes, each (register, byte of it): prmt chooses among two registers at a time."""
  used = list(dict.fromkeys(w for w, _ in sources))
  if len(used) == 1 and [byte for _, byte in sources] == [0, 1, 2, 3]:
    return regs[used[0]]
  first, second = used[0], used[min(1, len(used) - 1)]
  here = [byte + 4 * (w != first) if w in (first, second) else 0 for w, byte in sources]
  out = b.new(isa.PRMT, regs[first], regs[second], _selector(here))
  if len(used) <= 2:
    return out
  rest = _gather(b, regs, [s if s[0] in used[2:] else (used[2], i) for i, s in enumerate(sources)])
  return b.new(isa.PRMT, out, rest, _selector([i + 4 * (w in used[2:]) for i, (w, _) in enumerate(sources)]))


def _selector(chosen: Sequence[int]) -> int:
  """The control operand of prmt: for each byte of the result one of the eight of its operands (PTX ISA, prmt)."""
  return sum(c << 4 * i for i, c in enumerate(chosen))


def put(b: Builder, dst: Elements, index: Sequence[int], src: Elements) -> None:
  """dst[index[i]] = src[i]; the other elements stay."""
  n, source = per_word(dst.dtype), words(src)
  if n == 1:
    for i, at in enumerate(index):
      target = dst.regs[at]
      assert isinstance(target, Reg)
      move_register(b, target, source[i])
    return
  size = 4 // n
  chosen: dict[tuple[int, int], list[int]] = {}
  for i, at in enumerate(index):
    bytes_of = chosen.setdefault((at // n, i // n), [0, 1, 2, 3])
    for byte in range(size):
      bytes_of[size * (at % n) + byte] = 4 + size * (i % n) + byte
  for (w, s), bytes_of in chosen.items():
    target = dst.regs[w]
    assert isinstance(target, Reg)
    b(isa.PRMT, target, target, source[s], _selector(bytes_of))


def spread(b: Builder, x: Elements, count: int) -> Elements:
  """A scalar as `count` equal elements."""
  assert x.count == 1, x
  n = per_word(x.dtype)
  if n == 1 or count == 1:
    return Elements(x.dtype, count, x.regs * count)
  (low,) = words(x)
  if isinstance(low, Reg):
    full: Operand = b.new(isa.PRMT, low, low, 0x1010 if n == 2 else 0)
  else:
    full = int(low) * (0x10001 if n == 2 else 0x1010101)
  return Elements(x.dtype, count, (full,) * num_words(x.dtype, count))


def move(b: Builder, dst: Elements, src: Elements) -> None:
  """dst = src, register by register; a scalar source fills."""
  if src.count == 1 and dst.count != 1:
    src = spread(b, src, dst.count)
  for d, s in zip(dst.regs, words(src), strict=True):
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
  if all(isinstance(r, Reg) for r in x.regs):
    return x
  out = Elements(x.dtype, x.count, tuple(b.regs(_CLASS[x.dtype], len(x.regs))))
  move(b, out, x)
  return out
