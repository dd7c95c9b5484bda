"""How PTX registers and types are held in numpy arrays.

A register class is one dtype: pred is bool, b16/b32/b64 are unsigned integers, f32 and f64 are floats. Functional units
take and give arrays in the storage of an operand's natural class (`Slot.classes[0]`); a value of 8 bits fills a b16
register, zero- or sign-extended.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

STORAGE: dict[str, Any] = {
    "pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "f32": np.float32, "f64": np.float64,
}
NUMBERS: dict[str, Any] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
}
Unit = Callable[..., Any]        # arrays -> an array or a tuple of arrays


def width(type_: str) -> int:
  """Bits of a scalar type: 16 for "bf16", 32 for "s32"."""
  return int(type_.strip("bfsu"))


def resize(x: np.ndarray, type_: str, cls: str) -> np.ndarray:
  """A value of `type_` moved to a register of class `cls`: truncated, or extended by the sign of an s-type.

  PTX ISA 9.4.1, "Operand Size Exceeding Instruction-Type Size". Floats keep their bits.

  >>> resize(np.array([0xFFFE], np.uint16), "s16", "b32").item() == 0xFFFF_FFFE
  True
  """
  to = STORAGE[cls]
  if x.dtype == to:
    return x
  size = np.dtype(to).itemsize
  if x.itemsize == size:
    return x.view(to)
  bits = x.view(f"u{x.itemsize}")
  if type_[0] == "s" and x.itemsize < size:
    return bits.view(f"i{x.itemsize}").astype(f"i{size}").view(to)
  return bits.astype(f"u{size}").view(to)


def parts(x: np.ndarray, dtype: Any) -> np.ndarray:
  """[n] registers -> [n, k] parts of the smaller `dtype`, the low one first."""
  return np.ascontiguousarray(x).view(dtype).reshape(*x.shape, -1)


def joined(x: np.ndarray, dtype: Any) -> np.ndarray:
  """[n, k] parts -> [n] registers of `dtype`; the inverse of `parts`."""
  return np.ascontiguousarray(x).view(dtype)[..., 0]
