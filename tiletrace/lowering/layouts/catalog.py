"""Hardware atoms, transcribed from the PTX ISA; `make` proves each by enumeration when it is first asked for.

Registers count *elements*: a 32-bit register holds `32 / bits` neighbours, lowest first. Fragments put register 0's
elements first, so f32, f16 and bf16 accumulators have one layout.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Literal

from tiletrace.lowering.layouts.relation import Layout, make


def _groups(tile: Layout, m: int, warpgroups: int) -> Layout:
  """Stacks a 64-row atom down the rows of each warpgroup, then the warpgroups."""
  assert m % (64 * warpgroups) == 0, f"m={m} is not a multiple of 64 rows for each of {warpgroups} warpgroups"
  return tile.repeat("reg", m // (64 * warpgroups), 0).repeat("warp", warpgroups, 0)


@lru_cache(maxsize=256)
def wgmma_accumulator(m: int, n: int, warpgroups: int | tuple[int, int] = 1,
                      split: Literal["m", "n"] = "m") -> Layout:
  """Accumulator D [m, n] of wgmma.mma_async, f32, f16 or s32 (PTX ISA, "Register Fragments for wgmma.mma_async").

  Lane l of warp w of a warpgroup holds element i at row 16w + l/4 + 8*(i/2 % 2), column 8*(i/4) + 2*(l % 4) + i % 2.

  Args:
    m, n: extents; 64 rows an instruction, n a multiple of 8 up to 256 for each warpgroup's instruction.
    warpgroups: how many, or (along the rows, along the columns); those of one part of the columns come first.
    split: of a count, whether the warpgroups divide the rows or the columns.
  """
  if isinstance(warpgroups, int):
    warpgroups = (warpgroups, 1) if split == "m" else (1, warpgroups)
  rows, columns = warpgroups
  width = n // columns
  assert width * columns == n and width % 8 == 0 and 8 <= width <= 256, (
    f"n={n} gives a warpgroup {width} columns; legal are the multiples of 8 to 256")
  atom = make({"reg": width // 2, "lane": 32, "warp": 4}, (64, width), lambda reg, lane, warp: (
    16 * warp + lane // 4 + 8 * (reg // 2 % 2), 8 * (reg // 4) + 2 * (lane % 4) + reg % 2))
  return _groups(atom, m, rows).repeat("warp", columns, 1)


@lru_cache(maxsize=256)
def wgmma_a_fragment(m: int, k: int, bits: int, warpgroups: int = 1) -> Layout:
  """Operand A [m, k] of wgmma.mma_async in registers, element widths 8 (k32), 16 (k16), 32 (k8, tf32).

  PTX ISA, "Register Fragments for wgmma.mma_async", matrix A. A thread's 32-bit registers of one instruction are
  (row, k), (row + 8, k), (row, k + 16 bytes), (row + 8, k + 16 bytes); further k-steps follow in register order.
  """
  word = {8: 4, 16: 2, 32: 1}[bits]
  step = 8 * word
  assert k % step == 0, f"k={k} is not a multiple of {step}, one instruction's depth for {bits}-bit elements"
  atom = make({"reg": 4 * word, "lane": 32, "warp": 4}, (64, step), lambda reg, lane, warp: (
    16 * warp + lane // 4 + 8 * (reg // word % 2), reg % word + word * (lane % 4) + 4 * word * (reg // (2 * word))))
  return _groups(atom.repeat("reg", k // step, 1), m, warpgroups)


def mma_m16n8k16_a() -> Layout:
  """Operand A [16, 16] of mma.sync.m16n8k16, 16-bit (PTX ISA, "Matrix Fragments for mma.m16n8k16")."""
  return make({"reg": 8, "lane": 32}, (16, 16), lambda reg, lane: (
    lane // 4 + 8 * (reg // 2 % 2), 2 * (lane % 4) + reg % 2 + 8 * (reg // 4)))


def mma_m16n8k16_b() -> Layout:
  """Operand B [k = 16, n = 8] of mma.sync.m16n8k16, 16-bit (PTX ISA, "Matrix Fragments for mma.m16n8k16")."""
  return make({"reg": 4, "lane": 32}, (16, 8), lambda reg, lane: (
    2 * (lane % 4) + reg % 2 + 8 * (reg // 2), lane // 4))


def mma_m16n8k16_c() -> Layout:
  """Accumulators C and D [16, 8] of mma.sync.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16")."""
  return make({"reg": 4, "lane": 32}, (16, 8), lambda reg, lane: (
    lane // 4 + 8 * (reg // 2), 2 * (lane % 4) + reg % 2))


def matrix_fragment(x: int = 1, *, trans: bool = False) -> Layout:
  """What ldmatrix.x leaves and stmatrix.x takes: [x, 8, 8] of 16-bit elements, matrix i in the i-th 32-bit register.

  PTX ISA, "Warp-level matrix load instruction: ldmatrix". Indices are of the matrices as they lie in shared memory.
  """
  assert x in (1, 2, 4), f"x={x} is not 1, 2 or 4"
  plain = make({"reg": 2 * x, "lane": 32}, (x, 8, 8), lambda reg, lane: (
    reg // 2, lane // 4, 2 * (lane % 4) + reg % 2))
  return plain.permute((0, 2, 1)) if trans else plain


def matrix_addresses(x: int = 4) -> Layout:
  """Rows whose 16-byte addresses the lanes give to ldmatrix and stmatrix: lane 8*i + r names row r of matrix i."""
  return make({"lane": 32}, (x, 8), lambda lane: (lane // 8 % x, lane % 8))
