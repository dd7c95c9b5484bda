"""Register contents for the tests of the functional units: random bits, and the numbers that break things."""
from __future__ import annotations

import numpy as np

from tiletrace.sim.storage import STORAGE

_F32 = [0x0000_0000, 0x8000_0000, 0x0000_0001, 0x8000_0001, 0x007F_FFFF, 0x0080_0000, 0x7F7F_FFFF, 0xFF7F_FFFF,
        0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0xFFC0_1234, 0x3F80_0000, 0xBF80_0000, 0x3F80_0001, 0x4EFF_FFFF,
        0x4F00_0000, 0xCF00_0000, 0x4F80_0000, 0x4780_0000, 0x477F_EFFF, 0x477F_F000, 0x3880_0000, 0x3300_0000,
        0x3F00_0000, 0x3FC0_0000, 0x4020_0000, 0x43E0_0000, 0x43E8_0000, 0x43E8_0001]
_F16 = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3C00, 0xBC00, 0x7F80,
        0xFF80, 0x7FC0, 0x3F80, 0x0080, 0x007F]


def registers(cls: str, n: int, seed: int, *, special: bool = True) -> np.ndarray:
  """[n] registers of a class. Of floats half are random bits and half moderate numbers, so that sums cancel."""
  rng = np.random.default_rng(seed)
  dtype = np.dtype(STORAGE[cls])
  if cls == "pred":
    return rng.integers(0, 2, n).astype(bool)
  bits = rng.integers(0, 1 << 8 * dtype.itemsize, n, dtype=f"u{dtype.itemsize}")
  if dtype.kind == "u":
    small = rng.integers(0, 5, n, dtype=dtype)
    bits = np.where(rng.integers(0, 4, n) == 0, np.where(small > 2, ~small, small), bits)
    edges = [0, 1, (1 << 8 * dtype.itemsize) - 1, 1 << 8 * dtype.itemsize - 1, (1 << 8 * dtype.itemsize - 1) - 1]
    return place(bits, np.array(edges, dtype), rng) if special else bits
  moderate = (rng.integers(-64, 65, n) * 2.0**rng.integers(-12, 13, n)).astype(dtype)
  numbers = np.where(rng.integers(0, 2, n) == 1, bits.view(dtype), moderate)
  edges32 = np.array(_F32, np.uint32).view(np.float32)
  return place(numbers, edges32.astype(dtype), rng) if special else numbers


def halves(n: int, seed: int) -> np.ndarray:
  """[n] uint16: random bits among the edges of f16 and bf16."""
  rng = np.random.default_rng(seed)
  return place(rng.integers(0, 1 << 16, n, dtype=np.uint16), np.array(_F16, np.uint16), rng)


def packed(n: int, seed: int) -> np.ndarray:
  """[n] uint32 of two halves each."""
  return halves(2 * n, seed).view(np.uint32)


def place(x: np.ndarray, edges: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """A quarter of the elements replaced by edge cases."""
  return np.where(rng.integers(0, 4, len(x)) == 0, rng.choice(edges, len(x)), x)
