"""wgmma.mma_async: what its descriptors read and what it computes (PTX ISA 9.7.15); `fragments` has its registers.

A matrix in shared memory is told by 64 bits ("Matrix Descriptor Format"): start address >> 4 in bits 0-13, leading
dimension byte offset >> 4 in 16-29 (LBO), stride dimension byte offset >> 4 in 32-45 (SBO), base offset in 49-51,
swizzle in 62-63 (0 none, 1: 128, 2: 64, 3: 32 bytes). Core matrices are 8 lines of 16 bytes. Along the contiguous
dimension 32 bytes of k, or all of m or n, follow in chunks of 16 bytes; across it the lines follow in groups of 8:

* no swizzle: a core matrix is 128 consecutive bytes. K-major: LBO between the chunks, SBO between the groups of rows.
  MN-major: SBO between the chunks, LBO between the groups of k.
* a swizzle of s bytes: 8 lines of s bytes are consecutive, and SBO lies between such groups; K-major needs no more.
  MN-major: LBO lies between the pieces of s bytes. Bits [4, 7) of the address are then XORed with bits [7, 10), as many
  as the swizzle has, counted from the base offset.
"""
from __future__ import annotations

import dataclasses
import functools

import numpy as np

from tiletrace.sim.fragments import ITEMSIZE, NUMBERS

_SPANS = (0, 128, 64, 32)
_PERIOD = 1024               # bytes after which every swizzle repeats
_RESERVED = 0b11 << 14 | 0b11 << 30 | 0b111 << 46 | 0b11_1111_1111 << 52


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
  """A matrix descriptor's fields: bytes; `base_offset` counts 128 of them, `swizzle` is 0, 32, 64 or 128."""
  start: int
  lbo: int
  sbo: int
  base_offset: int
  swizzle: int


def decode(desc: int) -> Fields:
  return Fields((desc & 0x3FFF) << 4, (desc >> 16 & 0x3FFF) << 4, (desc >> 32 & 0x3FFF) << 4, desc >> 49 & 7,
                _SPANS[desc >> 62 & 3])


def refusal(desc: int) -> str | None:
  """Why the bits are no descriptor (reserved ones are set), or None."""
  wrong = desc & _RESERVED
  return f"matrix descriptor {desc:#018x} has reserved bits {wrong:#x}" if wrong else None


# ---- operands in shared memory

def operand_addresses(desc: int, rows: int, k: int, itemsize: int, major: str) -> np.ndarray:
  """[rows, k] int64: the shared byte address of every element of an operand, A [m, k] or B [n, k].

  Args:
    desc: the descriptor's 64 bits.
    rows: 64 for A, n for B.
    k: elements along k of the instruction, 32 bytes of them.
    itemsize: bytes of an element: 1, 2 or 4.
    major: "k", or "mn" where the transpose bit is set (2-byte elements only).
  """
  start = (desc & 0x3FFF) << 4
  pattern = _pattern(desc >> 14, start % _PERIOD, rows, k, itemsize, major)
  return pattern + (start - start % _PERIOD)


@functools.lru_cache(maxsize=4096)
def _pattern(layout: int, phase: int, rows: int, k: int, itemsize: int, major: str) -> np.ndarray:
  """The addresses for a start address of `phase`: what lies above the swizzle's period only shifts them."""
  fields = decode(layout << 14)
  per_chunk = 16 // itemsize
  line = fields.swizzle or 16
  along, across = (k, rows) if major == "k" else (rows, k)
  chunk, inside = np.divmod(np.arange(along), per_chunk)
  piece, chunk = np.divmod(chunk, line // 16)
  if fields.swizzle:
    between_pieces, between_groups = fields.lbo, fields.sbo
    assert major == "mn" or not piece.any(), "32 bytes of k lie within every swizzle's span"
  elif major == "k":
    between_pieces, between_groups = fields.lbo, fields.sbo
  else:
    between_pieces, between_groups = fields.sbo, fields.lbo
  group, row = np.divmod(np.arange(across), 8)
  addresses = np.add.outer(group * between_groups + row * line + phase,
                           piece * between_pieces + chunk * 16 + inside * itemsize)
  if fields.swizzle:
    turn = (addresses >> 7) - fields.base_offset & fields.swizzle // 16 - 1
    addresses ^= turn << 4
  out = np.ascontiguousarray(addresses if major == "k" else addresses.T)
  out.flags.writeable = False
  return out


def operand_cells(desc: int, rows: int, k: int, itemsize: int, major: str) -> np.ndarray:
  """[n] int64: the shared addresses of the 16-byte cells that an operand touches, ascending."""
  start = (desc & 0x3FFF) << 4
  cells = _cells(desc >> 14, start % _PERIOD, rows, k, itemsize, major)
  return cells + (start - start % _PERIOD)


@functools.lru_cache(maxsize=4096)
def _cells(layout: int, phase: int, rows: int, k: int, itemsize: int, major: str) -> np.ndarray:
  return np.unique(_pattern(layout, phase, rows, k, itemsize, major) // 16) * 16


@functools.lru_cache(maxsize=4096)
def _elements(layout: int, phase: int, rows: int, k: int, itemsize: int, major: str) -> np.ndarray:
  return _pattern(layout, phase, rows, k, itemsize, major) // itemsize


def read_operand(memory: np.ndarray, desc: int, rows: int, type_: str, major: str) -> np.ndarray:
  """[rows, k] float64: an operand's numbers.

  Args:
    memory: a CTA's shared memory, uint8; all of `operand_cells` lies in it.
    desc, rows, major: as of `operand_addresses`.
    type_: "f16", "bf16", "tf32", "e4m3", "e5m2", "s8" or "u8".
  """
  size = ITEMSIZE[type_]
  start = (desc & 0x3FFF) << 4
  base = start - start % _PERIOD
  index = _elements(desc >> 14, start % _PERIOD, rows, 32 // size, size, major)
  return NUMBERS[type_](memory[base:len(memory) // size * size].view(f"u{size}").take(index))


# ---- the product

def multiply(acc: np.ndarray | None, a: np.ndarray, b: np.ndarray, *, negate: bool = False) -> np.ndarray:
  """acc + a b^T in float64: the instruction's sum before it is rounded to the accumulator's type.

  Products of these types are exact in float64, and so are sums of integers; sums of floats err by a few 2**-53. The
  hardware adds with less (about 2**-23 of the largest term for 16-bit types, 2**-13 for 8-bit ones), in an order that
  NVIDIA does not document.

  Args:
    acc: [m, n], or None where scale-d is false.
    a: [m, k]. b: [n, k].
    negate: whether exactly one of imm-scale-a and imm-scale-b is -1.
  """
  product = a @ b.T
  if negate:
    product = -product
  return product if acc is None else acc + product
