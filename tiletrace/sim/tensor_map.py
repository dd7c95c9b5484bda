"""Tensor copies: which bytes of global and shared memory one box of a tensor map covers.

PTX ISA 5.5, "Tensors" (bounding box, out-of-boundary access, swizzling modes) and 9.7.9 cp.async.bulk.tensor. A box is
dense in shared memory, the innermost dimension first; a swizzle of 32, 64 or 128 bytes then XORs bits [4, 4+B) of the
absolute shared address with bits [7, 7+B), B = 1, 2, 3. Outside the tensor loads give zeros (which count as
transferred), and stores and reductions do nothing.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from tiletrace.ffi.image import TensorMapSpec
from tiletrace.lowering.ptx import isa
from tiletrace.sim import numerics
from tiletrace.sim.storage import Unit

SHARED_ALIGNMENT = 128
_PERIOD = 1024               # of the swizzles: they read address bits below


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
  """The moves of one tensor copy; each entry is `itemsize` bytes, aligned to them on both sides.

  Attributes:
    shared: [n] int64, byte offsets in shared memory.
    addresses: [n] int64, byte addresses in global memory; meaningless where not `inside`.
    inside: [n] bool, whether the entry lies within the tensor.
    itemsize: bytes of an entry: one element, or up to 16 bytes of neighbours that share their fate.
    nbytes: what the copy counts on an mbarrier: the whole box.
  """
  shared: np.ndarray
  addresses: np.ndarray
  inside: np.ndarray
  itemsize: int
  nbytes: int


def swizzle_addresses(addresses: np.ndarray, span: int) -> np.ndarray:
  """Absolute shared addresses under a swizzle of `span` bytes (0: none)."""
  mask = max(span // 16 - 1, 0)
  return addresses ^ (addresses >> 7 & mask) << 4 if mask else addresses


def refusal(base_address: int, spec: TensorMapSpec, dst: int) -> str | None:
  """What the hardware does not take: a shared address off 128 bytes, a global one off 16; or None."""
  if dst % SHARED_ALIGNMENT:
    return f"shared address {dst:#x} of a tensor copy is no multiple of {SHARED_ALIGNMENT}"
  if (base_address + spec.offset_bytes) % 16:
    return f"the tensor map's global address {base_address + spec.offset_bytes:#x} is no multiple of 16"
  return None


def start_refusal(spec: TensorMapSpec, coords: Sequence[int], *, storing: bool = False) -> str | None:
  """What no tensor copy may do: start off 16 bytes along the innermost dimension, or, where it stores, before the
  tensor, or across an end of rows within 16 bytes; or None. The ISA's text does not say so. Kernels that did the former
  died of an illegal instruction on an H200, the last wrote up to the next multiple of 16 bytes."""
  start = coords[0] * spec.itemsize
  if start % 16:
    return (f"the innermost coordinate {coords[0]} of a tensor copy is {start} bytes, no multiple of 16: an illegal "
            "instruction")
  if storing and min(coords) < 0:
    return f"a store or reduction at the coordinates {list(coords)}, before the tensor: an illegal instruction"
  row = spec.dims[0] * spec.itemsize
  if storing and row % 16 and coords[0] + spec.box[0] > spec.dims[0]:
    return (f"a store or reduction across the end of rows of {row} bytes, no multiple of 16: pieces of 16 bytes are "
            "written whole")
  return None


def shape_refusal(spec: TensorMapSpec) -> str | None:
  """Boxes whose rows are narrower than the swizzle's span: an H200 does not lay them side by side, and what it does is
  not modelled; or None."""
  row = spec.box[0] * spec.itemsize
  if spec.swizzle and row != spec.swizzle:
    return f"the box is {row} bytes wide, the rows of the {spec.swizzle}-byte swizzle are not"
  return None


def box(spec: TensorMapSpec, base_address: int, coords: Sequence[int], dst: int, *, by_element: bool = False) -> Box:
  """The moves of the box at `coords`.

  Args:
    spec: the tensor map.
    base_address: global address of the operand; the map's `offset_bytes` are added.
    coords: signed element coordinates of the box's first element, innermost first, one for each dimension.
    dst: shared byte offset of the box (source or destination).
    by_element: entries are single elements, as reductions need them.
  """
  assert len(coords) == len(spec.dims), f"{len(coords)} coordinates for a tensor of {len(spec.dims)} dimensions"
  size = spec.itemsize
  low, high = (min(max(x, 0), spec.box[0]) * size for x in (-coords[0], spec.dims[0] - coords[0]))
  entry = size if by_element else math.gcd(16, low, high, coords[0] * size)
  start = base_address + spec.offset_bytes + coords[0] * size + sum(
      c * stride for c, stride in zip(coords[1:], spec.strides))
  first = dst // _PERIOD * _PERIOD
  shared = _shared_offsets(spec.box, size, spec.swizzle, entry, dst - first)
  inside = _inside(spec.box, spec.dims, tuple(coords), entry // size)
  return Box(shared + first, _global_offsets(spec.box, spec.strides, size, entry) + start, inside, entry,
             math.prod(spec.box) * size)


@functools.lru_cache(maxsize=512)
def _shared_offsets(shape: tuple[int, ...], size: int, span: int, entry: int, start: int) -> np.ndarray:
  dense = np.arange(0, math.prod(shape) * size, entry, dtype=np.int64)
  return swizzle_addresses(dense + start, span)


@functools.lru_cache(maxsize=512)
def _global_offsets(shape: tuple[int, ...], strides: tuple[int, ...], size: int, entry: int) -> np.ndarray:
  offsets = np.arange(0, shape[0] * size, entry, dtype=np.int64)
  for extent, stride in zip(shape[1:], strides):
    offsets = np.add.outer(np.arange(extent, dtype=np.int64) * stride, offsets).reshape(-1)
  return offsets


@functools.lru_cache(maxsize=512)
def _inside(shape: tuple[int, ...], dims: tuple[int, ...], coords: tuple[int, ...], per_entry: int) -> np.ndarray:
  inside = np.ones(1, bool)
  for d, (extent, dim, c) in enumerate(zip(shape, dims, coords)):
    at = np.arange(c, c + extent, 1 if d else per_entry, dtype=np.int64)
    inside = np.logical_and.outer((at >= 0) & (at < dim), inside).reshape(-1)
  return inside


_TYPES = {"uint32": "u32", "int32": "s32", "uint64": "u64", "int64": "s64", "float16": "f16", "bfloat16": "bf16",
          "float32": "f32"}
_REDUCTIONS = {"add": isa.ADD, "min": isa.MIN, "max": isa.MAX, "and": isa.AND, "or": isa.OR, "xor": isa.XOR}


def reduction(dtype: str, op: str) -> Unit:
  """What cp.reduce.async.bulk.tensor does with (global, shared) elements in unsigned storage; f32 as floats.

  PTX ISA 9.7.9: add of 32-bit integers, u64, f16, bf16 and f32; min and max of integers, f16 and bf16; and, or and xor
  of bits.

  Raises:
    ValueError: the ISA has no such reduction.
  """
  row, type_ = _REDUCTIONS[op], _TYPES.get(dtype)
  if op in ("and", "or", "xor") and type_ in ("u32", "s32", "u64", "s64"):
    type_ = f"b{type_[1:]}"
  elif type_ is None or (op, type_) == ("add", "s64") or (op != "add" and type_ == "f32") or op in ("and", "or", "xor"):
    raise ValueError(f"no tensor copy reduces {dtype} by {op}")
  unit = numerics.unit(row.form(type=type_))
  assert unit is not None
  return unit
