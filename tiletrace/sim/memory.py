"""Shared memory of a cluster and the arrays of global memory, as bytes with exact bounds."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tiletrace.sim.faults import Violation

RESERVED = 1024          # bytes below a CTA's own shared memory, for the system (CUDA Programming Guide)
_GUARD = 4096            # bytes between arrays: a small step past an end hits no neighbour
_BASE = 0x7F00_0000_0000
_ALIGNMENT = 256         # of arrays, as cuMemAlloc's
_POISON = 0xA5


class Bytes:
  """A flat memory that is read and written through views of any element size."""

  def __init__(self, nbytes: int):
    self.bytes = np.full(-(-nbytes // 16) * 16, _POISON, np.uint8)
    self._views = {1: self.bytes, **{size: self.bytes.view(f"u{size}") for size in (2, 4, 8)},
                   16: self.bytes.view(np.dtype((np.void, 16)))}

  def load(self, offsets: np.ndarray, size: int) -> np.ndarray:
    """[n] byte offsets, multiples of `size` -> [n] unsigned integers of that many bytes."""
    return self._views[size][offsets // size]

  def store(self, offsets: np.ndarray, size: int, values: np.ndarray) -> None:
    self._views[size][offsets // size] = values


class Shared(Bytes):
  """Shared memory of the CTAs of a cluster, one after another.

  Attributes:
    span: bytes from one CTA's memory to the next one's. Offset `rank * span + address` is a CTA's `address`.
    valid: which bytes have been written.
  """

  def __init__(self, smem_bytes: int, ctas: int):
    self.smem_bytes, self.ctas = smem_bytes, ctas
    self.end = RESERVED + smem_bytes
    self.span = -(-self.end // 1024) * 1024
    super().__init__(self.span * ctas)
    self.valid = np.zeros(len(self.bytes), np.uint8)
    self._valid = {1: self.valid, **{size: self.valid.view(f"u{size}") for size in (2, 4, 8)}}

  def clear(self) -> None:
    self.bytes[...] = _POISON
    self.valid[...] = 0

  def check(self, addresses: np.ndarray, nbytes: int, alignment: int, threads: np.ndarray | Sequence[int]) -> None:
    """Addresses within a CTA: in bounds and aligned.

    Raises:
      Violation: otherwise.
    """
    low, high = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))
    if low < RESERVED or high + nbytes > self.end:
      bad = (addresses < RESERVED) | (addresses > self.end - nbytes)
      which = addresses[bad]
      raise Violation("out of bounds", f"{nbytes} bytes at shared address {int(which[0]):#x}; the CTA has "
                      f"{self.smem_bytes} bytes from {RESERVED:#x} to {self.end:#x}",
                      threads=np.asarray(threads)[bad] if len(threads) == len(bad) else (), addresses=which)
    if alignment > 1 and (int(np.bitwise_or.reduce(addresses)) & (alignment - 1)):
      bad = addresses & (alignment - 1) != 0
      raise Violation("misaligned", f"shared address {int(addresses[bad][0]):#x} is no multiple of {alignment}",
                      threads=np.asarray(threads)[bad] if len(threads) == len(bad) else (), addresses=addresses[bad])

  def check_valid(self, offsets: np.ndarray, size: int, threads: np.ndarray | Sequence[int]) -> None:
    """All bytes were written.

    Raises:
      Violation: otherwise.
    """
    step = min(size, 8)
    ones = int.from_bytes(b"\1" * step, "little")
    for k in range(0, size, step):
      known = self._valid[step][(offsets + k) // step] == ones
      if not known.all():
        bad = offsets[~known] % self.span
        raise Violation("uninitialised shared memory", f"{size} bytes at shared address {int(bad[0]):#x}",
                        threads=np.asarray(threads)[~known] if len(threads) == len(known) else (), addresses=bad)

  def mark(self, offsets: np.ndarray, size: int) -> None:
    """The bytes are written now."""
    step = min(size, 8)
    ones = int.from_bytes(b"\1" * step, "little")
    for k in range(0, size, step):
      self._valid[step][(offsets + k) // step] = ones

  def unmark(self, start: int, end: int) -> None:
    self.valid[start:end] = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
  """An operand in global memory.

  Attributes:
    address: of its first byte, a multiple of 256.
    offset: of the same in the flat memory.
  """
  name: str
  address: int
  offset: int
  nbytes: int


class Global(Bytes):
  """The operands, each with guard zones around it.

  Attributes:
    arrays: in the order given, by ascending address.
  """

  def __init__(self, contents: dict[str, np.ndarray]):
    self.arrays: list[Array] = []
    at = _GUARD
    for name, x in contents.items():
      self.arrays.append(Array(name, _BASE + at, at, x.nbytes))
      at = -(-(at + x.nbytes + _GUARD) // _ALIGNMENT) * _ALIGNMENT
    super().__init__(at)
    self._starts = np.array([a.address for a in self.arrays], np.int64)
    self._ends = np.array([a.address + a.nbytes for a in self.arrays], np.int64)
    for array, x in zip(self.arrays, contents.values()):
      self.bytes[array.offset:array.offset + array.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)

  def contents(self, index: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A copy of an array."""
    a = self.arrays[index]
    return self.bytes[a.offset:a.offset + a.nbytes].copy().view(dtype).reshape(shape)

  def array_at(self, address: int) -> int:
    """The index of the array that an address lies in."""
    return int(np.searchsorted(self._starts, address, "right")) - 1

  def offsets(self, addresses: np.ndarray, nbytes: int, alignment: int, threads: np.ndarray | Sequence[int]
              ) -> np.ndarray:
    """[n] int64 addresses -> offsets in the flat memory, after checks.

    Raises:
      Violation: an access outside of every array, or misaligned.
    """
    if alignment > 1 and (int(np.bitwise_or.reduce(addresses)) & (alignment - 1)):
      bad = addresses & (alignment - 1) != 0
      raise Violation("misaligned", f"global address {int(addresses[bad][0]):#x} is no multiple of {alignment}",
                      threads=np.asarray(threads)[bad] if len(threads) == len(bad) else (), addresses=addresses[bad])
    low, high = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))
    at = self.array_at(low)
    if at < 0 or high + nbytes > self._ends[at]:
      self._check_each(addresses, nbytes, threads)
    return addresses - _BASE

  def _check_each(self, addresses: np.ndarray, nbytes: int, threads: np.ndarray | Sequence[int]) -> None:
    at = np.searchsorted(self._starts, addresses, "right") - 1
    bad = (at < 0) | (addresses + nbytes > self._ends[at])
    if bad.any():
      first = int(addresses[bad][0])
      raise Violation("out of bounds", f"{nbytes} bytes at global address {first:#x}, {self.nearest(first)}",
                      threads=np.asarray(threads)[bad] if len(threads) == len(bad) else (), addresses=addresses[bad])

  def nearest(self, address: int) -> str:
    """Where an address lies, seen from the closest array."""
    if not self.arrays:
      return "there are no arrays"
    def distance(a: Array) -> int:
      return max(a.address - address, address - a.address - a.nbytes + 1, 0)
    a = min(self.arrays, key=distance)
    if address < a.address:
      return f"{a.address - address} bytes before {a.name} ({a.nbytes} bytes at {a.address:#x})"
    past = address - a.address - a.nbytes
    where = f"{past} bytes past the end of" if past >= 0 else "across the end of"
    return f"{where} {a.name} ({a.nbytes} bytes at {a.address:#x})"
