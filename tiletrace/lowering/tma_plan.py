"""How TMA moves one view between global and shared memory, or why it cannot."""
from __future__ import annotations

import dataclasses
import math

from tiletrace.core.graph import RefOperand
from tiletrace.core.types import Dyn, Size, ViewDim
from tiletrace.lowering.facts import Fact, Facts
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import recognise_swizzle
from tiletrace.lowering.layouts.tma import ALIGNMENT, MAX_BOX, tma_boxes, tma_refusal
from tiletrace.lowering.shared_views import SharedPlace, shared_place
from tiletrace.lowering.strides import divisor, row_major_strides


@dataclasses.dataclass(frozen=True, slots=True)
class TmaPart:
  """One instruction: `offset` is added to the view's start, per root dimension."""
  offset: tuple[int, ...]
  smem_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TmaPlan:
  """`box` is per root dimension, in the root's order; every part moves one."""
  box: tuple[int, ...]
  parts: tuple[TmaPart, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TmaShare:
  """One CTA's part of a multicast copy: the i-th of them moves `parts`, each `i * step` further."""
  box: tuple[int, ...]
  parts: tuple[TmaPart, ...]
  step: TmaPart


def share(plan: TmaPlan, ways: int, *, itemsize: int, alignment: int) -> TmaShare | None:
  """A plan in `ways` equal parts: whole boxes, or slices of each box along its outermost dimension.

  Args:
    alignment: bytes that the start of a box in shared memory must be a multiple of.
  Returns:
    None where it has no such parts.
  """
  each, left = divmod(len(plan.parts), ways)
  if not left:
    first, other = plan.parts[0], plan.parts[each]
    step = TmaPart(tuple(o - f for o, f in zip(other.offset, first.offset)), other.smem_bytes - first.smem_bytes)
    even = all(plan.parts[i * each + j] == _moved(plan.parts[j], step, i) for i in range(ways) for j in range(each))
    return TmaShare(plan.box, plan.parts[:each], step) if even else None
  outermost = next(d for d, n in enumerate(plan.box) if n > 1)
  rows, nbytes = plan.box[outermost] // ways, math.prod(plan.box) * itemsize // ways
  if plan.box[outermost] % ways or nbytes % alignment or outermost == len(plan.box) - 1:
    return None
  offset = tuple(rows if d == outermost else 0 for d in range(len(plan.box)))
  box = tuple(rows if d == outermost else n for d, n in enumerate(plan.box))
  return TmaShare(box, plan.parts, TmaPart(offset, nbytes))


def _moved(part: TmaPart, step: TmaPart, times: int) -> TmaPart:
  return TmaPart(tuple(p + times * s for p, s in zip(part.offset, step.offset)),
                 part.smem_bytes + times * step.smem_bytes)


def global_refusal(ref: RefOperand) -> str | None:
  """What TMA asks of the global side (CUDA driver API, cuTensorMapEncodeTiled), independent of layouts."""
  shape, item = ref.type.shape, ref.type.dtype.itemsize
  if not 1 <= len(shape) <= 5:
    return f"the array has rank {len(shape)}, a tensor map 1 to 5"
  if any(n == 0 for n in shape):
    return "the array is empty"
  for d, stride in enumerate(row_major_strides(shape)[:-1]):
    stride *= item
    if divisor(stride) % 16 and isinstance(stride, Size):
      multiple = Size(stride.names[:1], 16 // math.gcd(16, item))
      return (f"rows of dimension {d} are {stride} bytes apart, not provably a multiple of 16: dynamic_shapes can "
              f"promise {multiple}")
    if divisor(stride) % 16:
      return f"rows of dimension {d} are {stride} bytes apart, not a multiple of 16"
    if divisor(stride) >= 2**40:
      return f"rows of dimension {d} are {stride} bytes apart, 2**40 or more"
  if any(divisor(n) > 2**31 - 1 for n in shape):
    return "an extent exceeds 2**31 - 1"
  if any(dim.stride != 1 for dim in ref.view.dims):
    return "the view has strides"
  if (reason := _ends_refusal(ref)) is not None:
    return reason
  if ref.view.dims[-1].squeezed:
    return "the contiguous dimension is indexed by an element"
  return None


def ending_dim(ref: RefOperand) -> int | None:
  """The root dimension along which a view ends before the array, where TMA clips it.

  A tensor map ends where the array does. But its box has one dimension more for such a view: of `box` elements, as far
  apart as those of the dimension that ends, and in that order. A box that starts at element `box - n` of it has n
  elements inside; how much further on those lie than the array's first is said along the dimension itself.
  """
  return next((d for d, dim in enumerate(ref.view.dims) if dim.edges), None)


def _ends_refusal(ref: RefOperand) -> str | None:
  ends = [d for d, dim in enumerate(ref.view.dims) if dim.edges]
  if not ends:
    return None
  what = "the view ends before the array"
  if len(ends) > 1:
    return f"{what} along {len(ends)} dimensions, a tensor map can clip one"
  if ends[0] == len(ref.view.dims) - 1:
    return f"{what} along its contiguous dimension, where a tensor map cannot clip"
  if len(ref.view.dims) == 5:
    return f"{what}, and a tensor map that clips it would have 6 dimensions"
  if any(isinstance(n, Size) for n in ref.type.shape):
    return f"{what}, which the call decides: a tensor map cannot clip there"
  return None


def start_refusal(ref: RefOperand, facts: Facts, *, proven: bool = True, storing: bool = False) -> str | None:
  """What TMA asks of where a view of global memory starts: a multiple of 16 bytes along the contiguous dimension, and,
  of a store, not before the array (kernels that did otherwise died of an illegal instruction on an H200); nor may the
  rows that a store writes to end within such 16 bytes (it wrote them whole). A view that ends before the array must
  certainly start inside: its map begins before the array, where it would not clip.

  Args:
    proven: whether that must be certain; else only what certainly starts elsewhere is refused.
  """
  starts = [facts[ref.dyn[d.start.index] if isinstance(d.start, Dyn) else d.start] for d in ref.view.dims]
  if starts[-1].divisor * ref.type.dtype.itemsize % 16 and (proven or starts[-1].lo == starts[-1].hi):
    return "the view does not provably start at a multiple of 16 bytes along its contiguous dimension"
  row = ref.type.shape[-1] * ref.type.dtype.itemsize
  if storing and divisor(row) % 16:
    certain = "not provably a" if isinstance(row, Size) else "no"
    return f"rows end at {row} bytes, {certain} multiple of 16, and TMA stores whole pieces of 16 bytes"
  if storing and any((s.lo if proven else s.hi) < 0 for s in starts):
    return "the view does not provably start inside the array"
  ends = ending_dim(ref)
  return None if ends is None else _ending_start_refusal(ref, ref.view.dims[ends], starts[ends], facts)


def _ending_start_refusal(ref: RefOperand, dim: ViewDim, at: Fact, facts: Facts) -> str | None:
  if at.lo < 0:
    return "the view, which ends before the array, does not provably start inside it"
  start, *firsts = (ref.dyn[p.index] if isinstance(p, Dyn) else p for p in (dim.start, *(lo for lo, _ in dim.edges)))
  if any(facts.difference(start, lo).lo < 0 for lo in firsts):
    return "the view does not provably start inside of the one that it is cut from"
  return None


def tma_plan(outside: RefOperand, inside: RefOperand, layout: Layout, facts: Facts) -> TmaPlan | str:
  """The boxes for a copy between a global view and a shared view of the same shape."""
  reason = global_refusal(outside)
  if reason is not None:
    return reason
  place = shared_place(inside, layout, facts)
  if isinstance(place, str):
    return place
  if not place.is_block:
    return "the view in shared memory has strides"
  bits = inside.type.dtype.itemsize * 8
  order = sorted(range(len(outside.view.perm)), key=lambda i: -outside.view.perm[i])
  reason = tma_refusal(place.layout, bits, order)
  if reason is not None:
    return reason
  found = recognise_swizzle(place.layout, bits)
  assert found is not None
  if place.alignment(bits // 8, facts) % ALIGNMENT[found[0]]:
    return f"the view does not provably start at a multiple of {ALIGNMENT[found[0]]} bytes in the buffer"
  return _clip(outside, place, order, bits)


def _clip(outside: RefOperand, place: SharedPlace, order: list[int], bits: int) -> TmaPlan | str:
  """The tile's boxes, cut to the view: a block of a tile is whole boxes, or fewer rows of each box."""
  box_shape, parts = None, []
  for box in tma_boxes(place.layout, bits, order):
    size = tuple(min(b, n - o) for b, n, o in zip(box.box_shape, place.shape, box.offset, strict=True))
    if min(size, default=1) <= 0:
      continue
    if box_shape is not None and size != box_shape:
      return f"the block {list(place.shape)} cuts the boxes to different shapes"
    box_shape = size
    shorter = [i for i in range(len(size)) if size[i] < box.box_shape[i]]
    wide = [j for j in range(len(size)) if box.box_shape[j] > 1]
    if any(order.index(i) < order.index(j) for i in shorter for j in wide if j != i):
      return f"the block {list(place.shape)} leaves gaps inside a box"
    offset = [0] * len(outside.view.dims)
    for i, p in enumerate(outside.view.perm):
      offset[p] = box.offset[i]
    parts.append(TmaPart(tuple(offset), box.smem_offset * bits // 8))
  assert box_shape is not None
  full = [1] * len(outside.view.dims)
  for i, p in enumerate(outside.view.perm):
    full[p] = box_shape[i]
  assert max(full) <= MAX_BOX
  return TmaPlan(tuple(full), tuple(parts))
