"""wgmma.mma_async: what its descriptors read, where its fragments lie, what it computes (PTX ISA 9.7.15).

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
from collections.abc import Callable

import numpy as np

from tiletrace.sim.conversions import F8_NUMBERS
from tiletrace.sim.halves import decode as decode_half, encode as encode_half

THREADS, ROWS = 128, 64
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


# ---- numbers

def _tf32(bits: np.ndarray) -> np.ndarray:
  """The tensor core does not see the low 13 bits."""
  return (bits & np.uint32(0xFFFF_E000)).view(np.float32).astype(np.float64)


_F8 = {type_: table.astype(np.float64) for type_, table in F8_NUMBERS.items()}
ITEMSIZE = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
# type -> its unsigned bits, of any shape, as float64. Integers of 8 bits and their sums are exact in it.
NUMBERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "f16": lambda bits: bits.view(np.float16).astype(np.float64),
    "bf16": lambda bits: decode_half(bits, "bf16").astype(np.float64),
    "tf32": _tf32,
    "e4m3": lambda bits: _F8["e4m3"][bits],
    "e5m2": lambda bits: _F8["e5m2"][bits],
    "s8": lambda bits: bits.view(np.int8).astype(np.float64),
    "u8": lambda bits: bits.astype(np.float64),
}


# ---- fragments in registers. Thread t = 32 w + 4 q + c of a warpgroup (or of several warps of mma.sync).

def accumulator_positions(n: int) -> tuple[np.ndarray, np.ndarray]:
  """Rows and columns [n/2, 128] of D that register r of thread t holds ("Register Fragments", matrix D).

  Of f16 accumulators register i holds numbers 2i and 2i + 1.
  """
  r, t = np.ogrid[:n // 2, :THREADS]
  lane = t % 32
  return t // 32 * 16 + lane // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (lane % 4) + r % 2


def a_positions(itemsize: int) -> tuple[np.ndarray, np.ndarray]:
  """Rows and k [4, 4 / itemsize, 128] of A: which elements the parts of its four registers are, the low one first."""
  e = 4 // itemsize
  r, i, t = np.ogrid[:4, :e, :THREADS]
  lane = t % 32
  return t // 32 * 16 + lane // 4 + 8 * (r % 2) + 0 * i, 4 * e * (r // 2) + e * (lane % 4) + i


def gather_accumulator(registers: np.ndarray) -> np.ndarray:
  """[.., n/2, 32 w] numbers by register and thread -> the matrix [16 w, n]."""
  count, threads = registers.shape
  parts = registers.reshape(count // 4, 2, 2, threads // 32, 8, 4)          # n/8, row half, pair | warp, q, c
  return parts.transpose(3, 1, 4, 0, 5, 2).reshape(threads // 2, 2 * count)


def scatter_accumulator(matrix: np.ndarray) -> np.ndarray:
  """The matrix [16 w, n] -> numbers by register and thread [n/2, 32 w]."""
  rows, n = matrix.shape
  parts = matrix.reshape(rows // 16, 2, 8, n // 8, 4, 2)                    # warp, row half, q | n/8, c, pair
  return np.ascontiguousarray(parts.transpose(3, 1, 5, 0, 2, 4)).reshape(n // 2, 2 * rows)


def gather_a(registers: np.ndarray, type_: str) -> np.ndarray:
  """Registers [2 or 4, 32 w] uint32 of A -> its numbers [16 w, k] in float64 ("Register Fragments", matrix A)."""
  size = ITEMSIZE[type_]
  count, threads = registers.shape
  parts = np.ascontiguousarray(registers).view(f"u{size}")
  parts = parts.reshape(count // 2, 2, threads // 32, 8, 4, 4 // size)      # k half, row half | warp, q, c, element
  bits = parts.transpose(2, 1, 3, 0, 4, 5).reshape(threads // 2, count * 8 // size)
  return NUMBERS[type_](np.ascontiguousarray(bits))


def read_accumulator(registers: np.ndarray, type_: str) -> np.ndarray:
  """D's registers -> the matrix [16 w, n] in float64.

  Args:
    registers: "f32": [n/2, 32 w] float32; "s32": [n/2, 32 w] uint32; "f16": [n/4, 32 w] uint32 of two numbers each.
  """
  if type_ == "f16":
    halves = np.ascontiguousarray(registers).view(np.float16).reshape(*registers.shape, 2)
    registers = halves.transpose(0, 2, 1).reshape(-1, registers.shape[1])
  elif type_ == "s32":
    registers = registers.view(np.int32)
  return gather_accumulator(registers).astype(np.float64)


def write_accumulator(matrix: np.ndarray, type_: str) -> np.ndarray:
  """A float64 matrix [16 w, n] -> D's registers, rounded to nearest (integers wrap around)."""
  registers = scatter_accumulator(matrix)
  if type_ == "s32":
    return registers.astype(np.int64).astype(np.uint32)
  if type_ == "f16":
    bits = encode_half(registers, "f16").reshape(-1, 2, registers.shape[1])
    return bits[:, 0].astype(np.uint32) | bits[:, 1].astype(np.uint32) << np.uint32(16)
  return registers.astype(np.float32)


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
