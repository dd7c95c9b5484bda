"""Matrices in the registers of warps: the fragments of wgmma.mma_async and mma.sync (PTX ISA 9.7.14, 9.7.15).

Both place them alike. Thread t = 32 w + 4 q + c of several warps, 0 <= q < 8, 0 <= c < 4; a matrix has 16 rows for each
warp, so a warpgroup's has 64.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tiletrace.sim.conversions import F8_NUMBERS
from tiletrace.sim.halves import decode as decode_half, encode as encode_half

WARPGROUP = 128


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


def accumulator_positions(n: int) -> tuple[np.ndarray, np.ndarray]:
  """Rows and columns [n/2, 128] of D that register r of thread t holds ("Register Fragments", matrix D).

  Of f16 accumulators register i holds numbers 2i and 2i + 1.
  """
  r, t = np.ogrid[:n // 2, :WARPGROUP]
  lane = t % 32
  return t // 32 * 16 + lane // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (lane % 4) + r % 2


def a_positions(itemsize: int) -> tuple[np.ndarray, np.ndarray]:
  """Rows and k [4, 4 / itemsize, 128] of A: which elements the parts of its four registers are, the low one first."""
  e = 4 // itemsize
  r, i, t = np.ogrid[:4, :e, :WARPGROUP]
  lane = t % 32
  return t // 32 * 16 + lane // 4 + 8 * (r % 2) + 0 * i, 4 * e * (r // 2) + e * (lane % 4) + i


def gather_accumulator(registers: np.ndarray) -> np.ndarray:
  """[n/2, 32 w] numbers by register and thread -> the matrix [16 w, n]."""
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


def gather_b(registers: np.ndarray, type_: str) -> np.ndarray:
  """Registers [1 or 2, 32 w] uint32 of mma.sync's B -> its numbers [w, 8, k] in float64, columns of B before k."""
  size = ITEMSIZE[type_]
  count, threads = registers.shape
  parts = np.ascontiguousarray(registers).view(f"u{size}").reshape(count, threads // 32, 8, 4, 4 // size)
  bits = parts.transpose(1, 2, 0, 3, 4).reshape(threads // 32, 8, count * 16 // size)
  return NUMBERS[type_](np.ascontiguousarray(bits))
