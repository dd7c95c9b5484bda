"""Registers of all threads of a cluster: one row for each register, one column for each thread."""
from __future__ import annotations

import struct
from typing import Any

import numpy as np

from tiletrace.lowering.ptx.instr import Slot
from tiletrace.lowering.ptx.module import Entry
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.sim.storage import STORAGE, resize

_POISON = 0xA5


class Constant:
  """An operand that is the same in every thread; indexed like a row, it gives one element."""
  __slots__ = ("value",)

  def __init__(self, value: np.ndarray):
    self.value = value

  def __getitem__(self, at: Any) -> np.ndarray:
    return self.value


Row = np.ndarray | Constant


class Registers:
  """The register file of `threads` threads.

  Attributes:
    written: for each tracked register, which threads have written it.
  """

  def __init__(self, entry: Entry, threads: int, tracked: list[Reg]):
    self.threads = threads
    self._files = {cls: np.zeros((len(regs), threads), STORAGE[cls]) for cls, regs in entry.registers.items()}
    self.written = {reg: np.zeros(threads, bool) for reg in tracked}
    self.clear()

  def clear(self) -> None:
    """Nothing is written; the bits are poison."""
    for cls, file in self._files.items():
      file.view(np.uint8)[...] = 1 if cls == "pred" else _POISON
    for row in self.written.values():
      row[...] = False

  def row(self, reg: Reg) -> np.ndarray:
    return self._files[reg.cls][reg.index]

  def source(self, x: Any, slot: Slot) -> Row:
    """What an operand is read from, in the storage of its slot's natural class."""
    dtype = np.dtype(STORAGE[slot.classes[0]])
    if not isinstance(x, Reg):
      return Constant(literal(x, dtype).reshape(1))
    row = self.row(x)
    if row.itemsize == dtype.itemsize:
      return row.view(dtype)
    return row.view(dtype)[::row.itemsize // dtype.itemsize]      # the low bits: little-endian

  def sources(self, x: Any, slot: Slot) -> list[Row]:
    """The rows of a vector, or one."""
    return [self.source(r, slot) for r in x] if isinstance(x, tuple) else [self.source(x, slot)]

  def destination(self, reg: Reg, slot: Slot) -> tuple[np.ndarray, tuple[str, str] | None]:
    """(the row to assign, in the slot's storage or, where that must be extended to the register's class, its own;
    then the type and class for `resize`)."""
    row, dtype = self.row(reg), np.dtype(STORAGE[slot.classes[0]])
    if row.itemsize == dtype.itemsize:
      return row.view(dtype), None
    return row, (slot.type, reg.cls)

  def assign(self, reg: Reg, slot: Slot, value: np.ndarray, threads: Any) -> None:
    """Writes a value in the slot's storage."""
    row, extend = self.destination(reg, slot)
    row[threads] = value if extend is None else resize(value, *extend)


def literal(x: int | float, dtype: np.dtype) -> np.ndarray:
  """A literal's bits in a register's storage (PTX ISA 4.5).

  >>> int(literal(-1, np.dtype(np.uint32))), float(literal(2.0, np.dtype(np.float32)))
  (4294967295, 2.0)
  """
  if dtype.kind in "bf":
    return np.array(x, dtype)
  if isinstance(x, float):
    return np.array(int.from_bytes(struct.pack(">f" if dtype.itemsize == 4 else ">d", x), "big"), dtype)
  return np.array(x & ((1 << 8 * dtype.itemsize) - 1), dtype)
