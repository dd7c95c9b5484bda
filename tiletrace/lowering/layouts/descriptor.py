"""Matrix descriptors of wgmma operands in shared memory, derived from the layout and checked against it.

PTX ISA, "Asynchronous warpgroup level matrix shared memory layout" and "Matrix descriptor". Element (mn, k) is read at

=========  ==================================================  =====================================================
major      swizzled (span = 32, 64, 128 bytes)                 no swizzle
=========  ==================================================  =====================================================
k          row group g, row r, k byte b: g*SBO + r*span + b    g*SBO + r*16 + (b/16)*LBO + b%16
mn         (b/span)*LBO + (k/8)*SBO + (k%8)*span + b%span      (b/16)*SBO + (k/8)*LBO + (k%8)*16 + b%16
=========  ==================================================  =====================================================
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from tiletrace.lowering.layouts.normal import unpack
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import chunk_bits, recognise_swizzle

_CODE = {0: 0, 128: 1, 64: 2, 32: 3}                 # bits 62-63 of the descriptor
ROWS = 7                                             # times the span: the bits of the row in 8, zero at a start
Major = Literal["k", "mn"]
Role = Literal["A", "B"]


@dataclass(frozen=True)
class Fields:
  """What the 64 bits say, in bytes: start address (18 bits), LBO, SBO, swizzle."""
  start: int
  lbo: int
  sbo: int
  swizzle: int


@dataclass(frozen=True)
class Descriptor:
  """A wgmma operand in shared memory.

  Attributes:
    swizzle: bytes, 0, 32, 64 or 128.
    lbo, sbo: leading and stride byte offsets.
    major: "k" (no transpose bit) or "mn" (transpose bit set).
    tile: extent along m or n of one instruction.
    step: extent along k of one instruction.
    mn_offsets: byte offset of each instruction tile along m or n.
    k_offsets: byte offset of each k-step; the two add.
    start: byte offset of a part in the layout that it was cut from.
  """
  swizzle: int
  lbo: int
  sbo: int
  major: Major
  tile: int
  step: int
  mn_offsets: tuple[int, ...]
  k_offsets: tuple[int, ...]
  start: int = 0

  @property
  def transpose(self) -> int:
    """The instruction's imm-trans bit."""
    return int(self.major == "mn")

  def k_offset(self, k_index: int) -> int:
    """Bytes to add to the start address for the k_index-th k-step; not linear where a step leaves the span."""
    return self.k_offsets[k_index]

  def tile_offset(self, mn0: int, k0: int) -> int:
    """Bytes to add to the start address for the instruction tile at element (mn0, k0)."""
    assert mn0 % self.tile == 0 and k0 % self.step == 0, f"({mn0}, {k0}) is not a tile of {self.tile} x {self.step}"
    return self.mn_offsets[mn0 // self.tile] + self.k_offsets[k0 // self.step]

  def part_step(self, parts: int) -> int | None:
    """Bytes between `parts` equal parts along m or n (those of warpgroups), or None where they are not evenly apart."""
    starts = np.asarray(self.mn_offsets[::len(self.mn_offsets) // parts])
    steps = np.diff(starts)
    if not len(steps):
      return 0
    return int(steps[0]) if (steps == steps[0]).all() else None

  def encode(self, start_address_bytes: int = 0) -> int:
    """The 64-bit descriptor. The buffer's base must be aligned to the swizzle's period; the base offset is zero.

    A CTA of a cluster carries its rank above bit 23 of a shared address: only 18 bits enter.
    """
    assert start_address_bytes % 16 == 0, f"start address {start_address_bytes} is not a multiple of 16"
    start = (start_address_bytes & 0x3FFFF) >> 4
    return start | self.lbo >> 4 << 16 | self.sbo >> 4 << 32 | _CODE[self.swizzle] << 62

  @staticmethod
  def decode(bits: int) -> Fields:
    """Reads the 64 bits back."""
    swizzle = {code: mode for mode, code in _CODE.items()}[bits >> 62]
    return Fields((bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, swizzle)


def wgmma_descriptor(layout: Layout, dtype_bits: int, *, role: Role, tile: int | None = None) -> Descriptor:
  """Descriptor of a shared tile: A is [m, k], B is [k, n] (permute a stored [n, k]). The major dimension is inferred.

  Args:
    layout: shared layout of rank 2.
    dtype_bits: 8, 16 or 32.
    role: which operand.
    tile: rows (A, default 64) or columns (B, default all, at most 256) of one instruction.

  Example::

    d = wgmma_descriptor(shared_layout((64, 256), 16, 128), 16, role="B")
    (d.major, d.lbo, d.sbo, d.k_offset(1))     # ("mn", 8192, 1024, 2048)
  """
  found = derive_descriptor(layout, dtype_bits, role, tile)
  assert isinstance(found, Descriptor), f"no matrix descriptor for {layout}: {found}"
  return found


def descriptor_refusal(layout: Layout, dtype_bits: int, *, role: Role, tile: int | None = None) -> str | None:
  """Why `wgmma_descriptor` has no answer, or None."""
  found = derive_descriptor(layout, dtype_bits, role, tile)
  return found if isinstance(found, str) else None


def walk(desc: Descriptor | Fields, major: Major, mn: np.ndarray, k: np.ndarray, dtype_bits: int) -> np.ndarray:
  """Byte offset, before the swizzle, at which the hardware reads element (mn, k) of an instruction tile."""
  span = desc.swizzle or 16
  if major == "k":
    byte = k * dtype_bits // 8
    row = mn // 8 * desc.sbo + mn % 8 * span
    return row + (byte if desc.swizzle else byte // 16 * desc.lbo + byte % 16)
  byte = mn * dtype_bits // 8
  far, near = (desc.lbo, desc.sbo) if desc.swizzle else (desc.sbo, desc.lbo)
  return byte // span * far + byte % span + k // 8 * near + k % 8 * span


@lru_cache(maxsize=256)
def derive_descriptor(layout: Layout, dtype_bits: int, role: Role, tile: int | None = None,
                      start: tuple[int, ...] = (0, 0), shape: tuple[int, ...] | None = None) -> Descriptor | str:
  """The descriptor of the part [start, start + shape) of a layout, by default all of it, or why there is none."""
  if layout.rank != 2 or dtype_bits not in (8, 16, 32):
    return f"rank {layout.rank} with {dtype_bits}-bit elements; a descriptor covers a matrix of 8, 16 or 32 bits"
  found = recognise_swizzle(layout, dtype_bits)
  if found is None:
    return "the shared layout is not one of the hardware's swizzles"
  swizzle, plain = found
  chunk = chunk_bits(dtype_bits)
  columns = plain.columns("off")[:chunk]
  mn_dim, k_dim = (0, 1) if role == "A" else (1, 0)
  dims = {d for c in columns for d, x in enumerate(unpack(c, 2)) if x}
  if len(columns) < chunk or len(dims) != 1:
    return "16 consecutive bytes do not lie along one dimension"
  major: Major = "k" if dims == {k_dim} else "mn"
  if major == "mn" and dtype_bits != 16:
    return f"{dtype_bits}-bit operands are K-major only"
  mn_extent, k_extent = ((shape or layout.shape)[d] for d in (mn_dim, k_dim))
  step = 256 // dtype_bits
  tile = tile or (64 if role == "A" else min(mn_extent, 256))
  if k_extent % step or mn_extent % tile:
    return f"[{mn_extent}, {k_extent}] (m or n, k) is not made of instruction tiles of [{tile}, {step}]"
  tables = plain.inverse_tables("off")
  (mn0, mn_bytes), (k0, k_bytes) = (_cut((x + s) * dtype_bits // 8, start[d], n) for (x, s), d, n in (
    (tables[mn_dim], mn_dim, mn_extent), (tables[k_dim], k_dim, k_extent)))
  if (mn0 + k0) % 16:
    return f"a part at {start} starts within 16 bytes"
  if (mn0 + k0) & ROWS * swizzle:
    return f"a part at {start} starts within 8 rows of {swizzle} bytes"
  unit = (swizzle or 16) * 8 // dtype_bits
  lbo, sbo = _strides(major, swizzle, mn_bytes, k_bytes, chunk=1 << chunk, unit=unit)
  desc = Descriptor(swizzle, lbo, sbo, major, tile, step, tuple(int(x) for x in mn_bytes[::tile]),
                    tuple(int(x) for x in k_bytes[::step]), mn0 + k0)
  # The unswizzled offsets are a sum over the two dimensions, and so is the walk: each is compared on its own.
  zero = np.zeros(1, np.int64)
  for which, table, n in (("m or n", mn_bytes, tile), ("k", k_bytes, step)):
    i = np.arange(n)
    want = walk(desc, major, *((i, zero) if which != "k" else (zero, i)), dtype_bits)
    starts = table.reshape(-1, n)
    if not (starts - starts[:, :1] == want).all():
      return f"the offsets along {which} are not those of a {swizzle}-byte {major}-major operand"
  return desc if max(lbo, sbo) < 1 << 18 else f"strides {lbo} and {sbo} bytes do not fit 18 bits"


def _cut(table: np.ndarray, start: int, size: int) -> tuple[int, np.ndarray]:
  """(the first offset, offsets from there) of a range."""
  part = table[start:start + size]
  return int(part[0]), part - part[0]


def _strides(major: Major, swizzle: int, mn_bytes: np.ndarray, k_bytes: np.ndarray, *, chunk: int,
             unit: int) -> tuple[int, int]:
  """(LBO, SBO) in bytes; a stride that no instruction takes is 16."""
  def at(table: np.ndarray, i: int) -> int:
    return int(table[i]) if i < len(table) else 16

  if major == "k":
    return (16 if swizzle else at(k_bytes, chunk)), at(mn_bytes, 8)
  blocks, groups = at(mn_bytes, unit), at(k_bytes, 8)
  return (blocks, groups) if swizzle else (groups, blocks)


@lru_cache(maxsize=256)
def prove_descriptor(layout: Layout, dtype_bits: int, desc: Descriptor, role: Role) -> None:
  """Asserts, from the encoded bits, that the hardware reads every element of every instruction tile where it lies."""
  fields = Descriptor.decode(desc.encode())
  mn_dim = 0 if role == "A" else 1
  mn, k = np.ogrid[:desc.tile, :desc.step]
  count = fields.swizzle // 16
  for mn0 in range(0, layout.shape[mn_dim], desc.tile):
    for k0 in range(0, layout.shape[1 - mn_dim], desc.step):
      address = desc.tile_offset(mn0, k0) + walk(fields, desc.major, mn, k, dtype_bits)
      if count:
        address = address ^ (address >> 7 & count - 1) << 4
      index = (mn + mn0, k + k0) if role == "A" else (k + k0, mn + mn0)
      stored = layout.coordinates("off", index) * dtype_bits // 8
      assert np.array_equal(address, stored), f"tile ({mn0}, {k0}) of {layout} is not what {desc} describes"
