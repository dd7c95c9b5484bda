"""Fragments: tiles in registers, spread over lanes and warps."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from tiletrace.lowering.layouts import f2
from tiletrace.lowering.layouts.normal import FIELD, REPLICA, NotALayout, Outer
from tiletrace.lowering.layouts.relation import Layout, build, fit

FragmentLayout = Layout      # axes reg, lane, warp


def _ceil_pow2(n: int) -> int:
  return 1 << max(0, n - 1).bit_length()


def blocked(shape: Sequence[int], dtype_bits: int, warps: int, *, vec: int | None = None,
            order: Sequence[int] | None = None) -> FragmentLayout:
  """The default coalesced layout: up to 16 bytes a thread along the contiguous dimension, lanes, then rows, then warps.

  Any extents: what does not divide is padded to a hull, chosen for the fewest registers; `valid` keeps `shape`.

  Args:
    shape: extents; () is a scalar copied to every thread.
    dtype_bits: width of an element.
    warps: warps of the owning scope, any count.
    vec: elements a thread holds side by side; by default the largest power of two in 16 bytes that divides the extent.
    order: dimensions, contiguous first; by default the last dimension first.

  Example::

    blocked((64, 96), 16, 4).extent("reg")    # 48 elements a thread: 8 along the row, 3 x 2 repeats
  """
  shape = tuple(shape)
  order = tuple(range(len(shape)))[::-1] if order is None else tuple(order)
  assert sorted(order) == list(range(len(shape))), f"order={order} does not permute {len(shape)} dimensions"
  return _blocked(shape, dtype_bits, warps, vec, order)


@lru_cache(maxsize=512)
def _blocked(shape: tuple[int, ...], dtype_bits: int, warps: int, vec: int | None, order: tuple[int, ...],
             lanes_along: int | None = None, warp_order: tuple[int, ...] | None = None) -> Layout:
  """`lanes_along`: lanes along the contiguous dimension, where it has that many; `warp_order`: who gets warps first."""
  take: dict[str, list[tuple[int, int, int]]] = {"reg": [], "lane": [], "warp": []}     # (dim, extent, step)
  reach, left = dict.fromkeys(order, 1), {d: shape[d] for d in order}

  def give(axis: str, dim: int, extent: int) -> None:
    take[axis].append((dim, extent, reach[dim]))
    reach[dim] *= extent
    left[dim] = -(-left[dim] // extent)

  lanes = 32
  for i, d in enumerate(order):
    if i == 0:
      widest = max(1, 128 // dtype_bits)
      give("reg", d, vec or min(widest, left[d] & -left[d] or 1))
      count = lanes_along or _lanes_along(left[d], reach[d] * dtype_bits // 8)
      count = min(count, _ceil_pow2(left[d]))
    else:
      count = _ceil_pow2(left[d])
    count = min(count, lanes)
    give("lane", d, count)
    lanes //= count
  for d in warp_order or (*order[1:], *order[:1]):
    count = min((w for w in range(1, warps + 1) if warps % w == 0), key=lambda w: (-(-left[d] // w), w))
    give("warp", d, count)
    warps //= count
  for d in order:
    give("reg", d, left[d])
  take["lane"].append((REPLICA, lanes, 0))
  take["warp"].append((REPLICA, warps, 0))
  take["warp"].sort(key=lambda part: part[1].bit_count() != 1)  # an odd factor on top: thread bits below stay bits
  outers = []
  for axis, parts in take.items():
    stride = 1
    for dim, extent, step in parts:
      outers.append(Outer(axis, stride, extent, dim, step))
      stride *= extent
  return build([reach[d] for d in range(len(shape))], {}, outers, valid=shape)


def blocked_for_reduction(shape: Sequence[int], dtype_bits: int, warps: int, dims: Sequence[int], *,
                          order: Sequence[int] | None = None) -> FragmentLayout:
  """A coalesced layout of a tile that is reduced over `dims`: the fewest registers, then whole results within a warp,
  then the most lanes along the contiguous dimension.

  The arguments are those of `blocked`.

  Example::

    blocked_for_reduction((4, 100), 32, 4, (1,)).apply(warp=1)     # (1, 0): a warp for each row of 25 x 16 bytes
  """
  shape = tuple(shape)
  order = tuple(range(len(shape)))[::-1] if order is None else tuple(order)
  return _blocked_for_reduction(shape, dtype_bits, warps, tuple(dims), order)


@lru_cache(maxsize=256)
def _blocked_for_reduction(shape: tuple[int, ...], dtype_bits: int, warps: int, dims: tuple[int, ...],
                           order: tuple[int, ...]) -> Layout:
  inner = [d for d in (*order[1:], *order[:1]) if d not in dims]
  outer = [d for d in (*order[1:], *order[:1]) if d in dims]
  row, widest = shape[order[0]], max(1, 128 // dtype_bits)
  unit_bytes = min(widest, row & -row or 1) * dtype_bits // 8
  lanes = [n for n in (32, 16, 8, 4, 2, 1) if n == 32 or n * unit_bytes >= 64]      # whole sectors of a cache line
  candidates = [_blocked(shape, dtype_bits, warps, None, order, n, (*inner, *outer)) for n in lanes]
  return min(candidates, key=lambda l: (l.extent("reg"), max(map(len, reduction(l, dims).warps))))


def _lanes_along(units: int, unit_bytes: int) -> int:
  """Lanes along the contiguous dimension: 64 bytes side by side, then the least padding, then the most lanes."""
  fewest = min(_ceil_pow2(units), max(1, min(32, 64 // max(1, unit_bytes))))
  candidates = [1 << b for b in range(6) if fewest <= 1 << b <= _ceil_pow2(units)]
  return min(candidates, key=lambda n: (-(-units // n) * n, -n))


def fragment_view(layout: FragmentLayout, starts: Sequence[int],
                  sizes: Sequence[int]) -> tuple[FragmentLayout, tuple[int, ...]] | None:
  """The box [starts, starts + sizes) of a fragment: its layout and its registers, in order.

  None unless the box takes whole registers of every thread.

  Example: `fragment_view(wgmma_accumulator(64, 256), (0, 64), (64, 64))` is the layout of (64, 64) in registers 32..63.
  """
  starts, sizes = tuple(starts), tuple(sizes)
  table = layout.table(("reg", *(a for a in layout.axes if a != "reg")))
  inside = np.ones(table.shape[:-1], bool)
  for d, (start, size) in enumerate(zip(starts, sizes)):
    inside &= (table[..., d] >= start) & (table[..., d] < start + size)
  whole = inside.reshape(len(inside), -1)
  if (whole.any(axis=1) != whole.all(axis=1)).any() or not whole.any():
    return None
  registers = np.flatnonzero(whole[:, 0])
  axes = ("reg", *(a for a in layout.axes if a != "reg"))
  try:
    part = fit(axes, sizes, table[registers] - np.array(starts, table.dtype))
  except NotALayout:
    return None
  origin = {a: x for a, x in layout.origin if a != "reg"}
  return part.with_origin(**origin), tuple(int(r) for r in registers)


@dataclass(frozen=True)
class Reduction:
  """How a fragment is reduced over some dimensions.

  Attributes:
    layout: of the result.
    registers: for each result register, the registers to combine inside the thread.
    lanes: XOR masks for `shfl.sync.bfly`, in any order.
    warps: groups of warps that hold parts of the same results (minus the origin); one warp each where none do.
  """
  layout: FragmentLayout
  registers: tuple[tuple[int, ...], ...]
  lanes: tuple[int, ...]
  warps: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def reduction(layout: FragmentLayout, dims: tuple[int, ...]) -> Reduction:
  """Plans a reduction: a tree in the thread, then lanes, then warps. Copies count once.

  Example: over the columns of `wgmma_accumulator(64, 64)`: two results of 16 registers each, lane masks 1 and 2.
  """
  unique, to_unique = drop_copies(layout)
  result, to_result = drop_copies(unique.project(dims))
  groups: list[list[int]] = [[] for _ in range(result.extent("reg"))]
  for reg, target in enumerate(to_result):
    groups[target].append(to_unique.index(reg))
  masks = f2.kernel(result.columns("lane"))          # lanes of one result; those that hold other elements are combined
  moved = [f2.apply(unique.columns("lane"), m) for m in masks]
  lanes = [m for i, m in enumerate(masks) if f2.rank(moved[:i + 1]) > f2.rank(moved[:i])]
  crossing = [g for g in result.kernel().bits if len(g) > 1]
  assert not crossing, f"reducing {layout} over {dims} mixes axes: {crossing}"
  full, table = (t.restrict("warp").table(("warp",)) for t in (unique, result))
  parts: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
  for w in range(len(table)):
    if table.shape[1:] == (0,) or table[w].min() >= 0:
      parts.setdefault(tuple(table[w].tolist()), {}).setdefault(tuple(full[w].tolist()), w)
  warps = tuple(tuple(p.values()) for p in parts.values())
  return Reduction(result, tuple(tuple(g) for g in groups), tuple(lanes), warps)


@lru_cache(maxsize=256)
def warp_partials(layout: FragmentLayout, dims: tuple[int, ...]) -> FragmentLayout | None:
  """Layout of what each warp has of a reduction over `dims`: [parts, *kept dimensions], the registers of the result.

  None where every result lies within one warp.

  Example: `warp_partials(blocked((1, 1024), 32, 4), (1,))` is [4, 1], a part for each warp.
  """
  plan = reduction(layout, dims)
  parts = max(map(len, plan.warps))
  if parts == 1:
    return None
  part, table = _parts_of_warps(layout, plan), plan.layout.table(("warp", "lane", "reg"))
  part = np.broadcast_to(part[:, None, None, None], (*table.shape[:-1], 1))
  kept, valid = plan.layout.shape, plan.layout.valid
  return fit(("warp", "lane", "reg"), (parts, *kept), np.concatenate([part, table], -1), valid=(parts, *valid))


def _parts_of_warps(layout: FragmentLayout, plan: Reduction) -> np.ndarray:
  """For each warp, which part of its results it has."""
  assert len(set(map(len, plan.warps))) == 1, f"{layout} has results of several sizes"
  full = layout.restrict("warp").table(("warp",))
  group_of = {w: group for group in plan.warps for w in group}
  by_element = {tuple(full[w].tolist()): group_of[w].index(w) for w in group_of}
  return np.asarray([by_element[tuple(x)] for x in full.tolist()])


@lru_cache(maxsize=256)
def thread_partials(layout: FragmentLayout, dims: tuple[int, ...]) -> FragmentLayout | None:
  """Layout of what each thread has of a reduction over `dims`: [parts, *kept dimensions], the registers of the result.

  None where every result lies within one thread, or where the threads of a result do not number its parts.

  Example: `thread_partials(blocked((4, 1024), 32, 4), (1,))` is [32, 4], a part for each lane.
  """
  plan = reduction(layout, dims)
  of_warps, lanes = max(map(len, plan.warps)), 1 << len(plan.lanes)
  if of_warps * lanes == 1 or any(m & m - 1 for m in plan.lanes):
    return None
  table, lane = plan.layout.table(("warp", "lane", "reg")), np.arange(32)
  part = np.zeros((len(table), 32), np.int64)
  for i, mask in enumerate(plan.lanes):
    part += ((lane & mask) != 0) << i
  part += lanes * _parts_of_warps(layout, plan)[:, None]
  kept, valid = plan.layout.shape, plan.layout.valid
  table = np.concatenate([np.broadcast_to(part[..., None, None], (*table.shape[:-1], 1)), table], -1)
  try:
    return fit(("warp", "lane", "reg"), (lanes * of_warps, *kept), table, valid=(lanes * of_warps, *valid))
  except NotALayout:
    return None


def drop_copies(layout: FragmentLayout) -> tuple[FragmentLayout, tuple[int, ...]]:
  """The layout without register copies, and for each old register the new one that holds its element.

  Registers that are copies only together with a lane or warp move stay.
  """
  columns = layout.columns("reg")
  pivots, _ = f2.echelon(columns)
  kept = sorted(f2.log2(c & -c) for c in (1 << i for i in range(len(columns)))
                if f2.rank(columns[:f2.log2(c) + 1]) > f2.rank(columns[:f2.log2(c)]))
  assert len(kept) == len(pivots)
  images = [columns[i] for i in kept]
  basis, _ = f2.echelon(images)
  stride, outers, strides = 1 << len(kept), [], []
  for o in layout.outers:
    if o.axis != "reg":
      outers.append(o)
    elif o.dim != REPLICA:
      outers.append(Outer("reg", stride, o.extent, o.dim, o.step))
      strides.append((o, stride))
      stride *= o.extent
    else:
      strides.append((o, 0))
  core = {**dict(layout.core), "reg": images}
  smaller = build(layout.shape, core, outers, valid=layout.valid, origin=dict(layout.origin))
  to_new = []
  for reg in range(layout.extent("reg")):
    rest, new = reg, 0
    for o, s in reversed(strides):
      i, rest = divmod(rest, o.stride)
      new += i * s
    combination = f2.solve(basis, f2.apply(columns, rest))
    assert combination is not None
    to_new.append(new + combination)
  return smaller, tuple(to_new)


def row_of(layout: FragmentLayout, dim: int) -> FragmentLayout:
  """Layout of a statistic of the rows along `dim`: that dimension is gone, and with it the register copies.

  Example: `row_of(wgmma_accumulator(64, 256), 1)` is [64], two registers a thread, copied to four lanes.
  """
  return drop_copies(layout.project((dim,)))[0]


@lru_cache(maxsize=1024)
def split_registers(layout: FragmentLayout, parts: int) -> FragmentLayout:
  """Each element as `parts` neighbours in registers, a power of two of them: a new last dimension."""
  new, wide = layout.rank, layout.expand_dims(layout.rank)
  columns = [1 << FIELD * new + b for b in range(parts.bit_length() - 1)]
  outers = [replace(o, stride=o.stride * parts) if o.axis == "reg" else o for o in wide.outers]
  core = {**dict(wide.core), "reg": [*columns, *wide.columns("reg")]}
  return build((*layout.shape, parts), core, outers, valid=(*layout.valid, parts), origin=dict(layout.origin))


@lru_cache(maxsize=1024)
def join_registers(layout: FragmentLayout, parts: int) -> FragmentLayout | None:
  """The inverse of `split_registers`; None where the last dimension is not the neighbours."""
  table = layout.table(("warp", "lane", "reg"))[:, :, ::parts, :-1]
  try:
    found = fit(("warp", "lane", "reg"), layout.shape[:-1], table, valid=layout.valid[:-1])
  except NotALayout:
    return None
  return found if split_registers(found, parts) == layout else None
