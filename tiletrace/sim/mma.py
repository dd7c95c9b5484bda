"""mma.sync and the matrix moves that feed it: ldmatrix, stmatrix, movmatrix (PTX ISA 9.7.14).

Arrays hold all threads of one or several whole warps: [registers, 32 w].
"""
from __future__ import annotations

import numpy as np

from tiletrace.lowering.ptx.instr import Mods
from tiletrace.sim.fragments import gather_a, gather_b, read_accumulator, write_accumulator

_LANES = np.arange(32)


def multiply(mods: Mods, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
  """D = A B + C of each warp, summed in float64, rounded once to D's type (`wgmma.multiply`: what hardware does).

  Args:
    mods: "a", "b" and "d" of the form: element types; the numbers of registers tell the shape.
    a: [2 or 4, 32 w] uint32. b: [1 or 2, 32 w] uint32.
    c: "f32": [4, 32 w] float32; "f16": [2, 32 w] uint32; "s32": [4, 32 w] uint32.

  Returns:
    D's registers, shaped like C's.
  """
  left, right = gather_a(a, mods["a"]), gather_b(b, mods["b"])
  product = left.reshape(len(right), 16, -1) @ right.transpose(0, 2, 1)
  return write_accumulator(read_accumulator(c, mods["d"]) + product.reshape(-1, 8), mods["d"])


def matrix_rows(addresses: np.ndarray, num: int) -> np.ndarray:
  """[32 w] addresses by lane -> [w, num, 8]: lane 8 i + r names row r of matrix i; further lanes are ignored."""
  return addresses.reshape(-1, 32)[:, :8 * num].reshape(-1, num, 8)


def element_addresses(addresses: np.ndarray, num: int, trans: bool) -> np.ndarray:
  """[num, 32 w, 2] byte addresses of the halves of each register of ldmatrix and stmatrix, the low half first.

  Lane 4 q + c holds (q, 2c) and (q, 2c + 1) of a matrix, transposed (2c, q) and (2c + 1, q).

  Args:
    addresses: [32 w], the address operand of each lane.
    num: matrices, 1, 2 or 4.
    trans: .trans.
  """
  rows = matrix_rows(addresses, num)
  row, pair = _LANES[:, None] // 4, 2 * (_LANES[:, None] % 4) + np.arange(2)
  picked, column = (pair, row) if trans else (row, pair)
  out = rows[:, :, picked] + 2 * column                               # [w, num, 32, 2]
  return np.ascontiguousarray(out.transpose(1, 0, 2, 3)).reshape(num, -1, 2)


def transpose(a: np.ndarray) -> np.ndarray:
  """movmatrix: [32 w] uint32, each warp's 8 x 8 matrix of 16-bit elements, transposed."""
  matrices = np.ascontiguousarray(a).view(np.uint16).reshape(-1, 8, 8)
  return np.ascontiguousarray(matrices.transpose(0, 2, 1)).view(np.uint32).reshape(-1)
