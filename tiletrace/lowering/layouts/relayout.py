"""Conversions between two fragment layouts of one tile: how far the data must move, and the plan.

The algebra: q = inverse(source) o destination maps each destination point to the source point that holds its
element. Written as q(reg r, lane l) = (lane a(r) ^ b(l), reg c(r) ^ d(l)) inside a warp.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from tiletrace.lowering.layouts import f2
from tiletrace.lowering.layouts.normal import Outer
from tiletrace.lowering.layouts.relation import Layout, build

Class = Literal["same", "registers", "shuffle", "shared"]
Swap = tuple[int, int]
_PACKED = ("reg", "lane", "warp")
_WARP_SHIFT = 32                 # in the packed points of this module: reg below, lane at 16, warp at 32
_LANE_SHIFT = 16


@dataclass(frozen=True)
class ShuffleStep:
  """One `shfl.sync.idx` for each repeat: lane l reads register `send` of lane `lane_base(l) ^ lane` into `receive`."""
  send: int
  lane: int
  receive: int


@dataclass(frozen=True)
class ShufflePlan:
  """A conversion inside each warp, one shuffle a 32-bit register.

  In this order: for each (lane mask, register mask) of `send_swaps`, a lane whose coordinate has odd parity under the
  lane mask exchanges every register i with i ^ mask; the steps; `receive_swaps` likewise on what was received. The
  source lane's base is the XOR of `lane_columns` at the one bits of the receiving lane.

  Registers of the plan are words of `pack` elements: `sources` go in and one a step comes out. Each repeat adds its
  (source, destination) to the register numbers.
  """
  pack: int
  sources: int
  lane_columns: tuple[int, ...]
  send_swaps: tuple[Swap, ...]
  receive_swaps: tuple[Swap, ...]
  steps: tuple[ShuffleStep, ...]
  repeats: tuple[tuple[int, int], ...]

  @property
  def shuffles(self) -> int:
    return len(self.steps) * len(self.repeats)

  @property
  def cost(self) -> int:
    """Instructions: shuffles, and two selects for each exchanged pair."""
    return self.shuffles * (1 + len(self.send_swaps) + len(self.receive_swaps))


@lru_cache(maxsize=512)
def classify(src: Layout, dst: Layout) -> Class:
  """How a conversion must move data.

  "same": nothing to do. "registers": every thread already holds what it needs, a renaming. "shuffle": inside the
  warp, see `shuffle_plan`. "shared": through shared memory.
  """
  if src.key() == dst.key():
    return "same"
  if register_permutation(src, dst) is not None:
    return "registers"
  return "shared" if shuffle_plan(src, dst) is None else "shuffle"


@lru_cache(maxsize=512)
def register_permutation(src: Layout, dst: Layout) -> tuple[int, ...] | None:
  """For each destination register the source register that holds its element in every thread, or None.

  Found by enumeration, so any outers, hulls and copies are allowed; a register of nothing but padding takes register 0.
  """
  assert src.valid == dst.valid, f"layouts of different tiles: {src.valid} and {dst.valid}"
  axes = ("reg", "lane", "warp")
  if any(src.start(a) != dst.start(a) for a in axes) or any(src.extent(a) != dst.extent(a) for a in axes[1:]):
    return None
  have, want = (_elements(t, axes) for t in (src, dst))
  held: dict[int, list[int]] = {}
  for reg in range(len(have)):
    for x in {int(have[reg, 0]), *(int(x) for x in have[reg, :: max(1, have.shape[1] // 8)])}:
      held.setdefault(x, []).append(reg)
  found = []
  for line in want:
    needed = np.flatnonzero(line >= 0)
    if not len(needed):
      found.append(0)
      continue
    if needed[0] == 0:
      candidates = held.get(int(line[0]), [])
    else:
      candidates = np.flatnonzero(have[:, needed[0]] == line[needed[0]]).tolist()
    match = [r for r in candidates if (have[r, needed] == line[needed]).all()]
    if not match:
      return None
    found.append(match[0])
  return tuple(found)


def _elements(layout: Layout, axes: tuple[str, ...]) -> np.ndarray:
  """Row-major element number [registers, threads]; -1 where there is padding or no element."""
  table = layout.table(axes)
  number = np.zeros(table.shape[:-1], np.int64)
  padding = np.zeros(table.shape[:-1], bool)
  for d, extent in enumerate(layout.valid):
    number = number * extent + table[..., d]
    padding |= (table[..., d] >= extent) | (table[..., d] < 0)
  number[padding] = -1
  return number.reshape(len(number), -1)


@lru_cache(maxsize=512)
def shuffle_plan(src: Layout, dst: Layout, pack: int = 1) -> ShufflePlan | None:
  """A plan of shuffles, or None where the data must leave the warp or the maps do not share their outers.

  Args:
    src, dst: layouts of one tile.
    pack: elements of a 32-bit word; both layouts must keep those neighbours together in the low register bits.
  """
  stripped = _strip(src, dst)
  if stripped is None:
    return None
  src_core, dst_core, repeats = stripped
  q = _source_points(src_core, dst_core)
  if q is None:
    return None
  regs, lanes, warps = q
  if any(x >> _WARP_SHIFT for x in (*regs, *lanes)) or warps != [1 << _WARP_SHIFT + i for i in range(len(warps))]:
    return None
  low = f2.log2(pack)
  rest = [*regs[low:], *lanes]
  if regs[:low] != [1 << i for i in range(low)] or any(x & pack - 1 for x in rest):
    return None
  a, b = ([x >> _LANE_SHIFT & 31 for x in xs] for xs in (regs[low:], lanes))
  c, d = ([(x & (1 << _LANE_SHIFT) - 1) >> low for x in xs] for xs in (regs[low:], lanes))
  found = _bijective(a, b)
  if found is None:
    return None
  e, columns = found
  pivots, _ = f2.echelon(columns)

  def receiver(lane: int) -> int:
    combination = f2.solve(pivots, lane)
    assert combination is not None
    return combination

  # lane s sends register c(r0 ^ e(l)) ^ d(l) with l = columns^-1(s ^ a(r0)): linear in s, plus a constant of the step
  def sent(lane: int) -> int:
    return f2.apply(c, f2.apply(e, lane)) ^ f2.apply(d, lane)

  send_linear = [sent(receiver(1 << i)) for i in range(5)]
  steps = []
  for r0 in range(1 << len(a)):
    moved = f2.apply(a, r0)
    steps.append(ShuffleStep(f2.apply(c, r0) ^ sent(receiver(moved)), moved, r0))
  if any(x % pack for pair in repeats for x in pair):
    return None
  sources = 1 << len(src_core.columns("reg")) - low
  return ShufflePlan(pack, sources, tuple(columns), _swaps(send_linear), _swaps(e), tuple(steps),
                     tuple((s // pack, t // pack) for s, t in repeats))


def word_plan(src: Layout, dst: Layout, pack: int) -> ShufflePlan | None:
  """The plan for registers of `pack` elements each."""
  if src.extent("reg") % pack or dst.extent("reg") % pack:
    return None
  return shuffle_plan(src, dst, pack)


def _strip(src: Layout, dst: Layout) -> tuple[Layout, Layout, tuple[tuple[int, int], ...]] | None:
  """Both layouts without the outers they share, and the register bases of the repeats; None if others remain."""
  if src.shape != dst.shape or src.valid != dst.valid or src.origin != dst.origin:
    return None
  def role(o: Outer) -> tuple:
    return (o.axis, o.dim, o.step, o.extent) if o.axis == "reg" else (o.axis, o.dim, o.step, o.extent, o.stride)
  mine, theirs = ({role(o): o for o in t.outers} for t in (src, dst))
  if mine.keys() != theirs.keys():
    return None
  bases = [(0, 0)]
  for key, o in mine.items():
    if o.axis == "reg":
      bases = [(s + i * o.stride, t + i * theirs[key].stride) for i in range(o.extent) for s, t in bases]
  return build(src.shape, dict(src.core)), build(dst.shape, dict(dst.core)), tuple(sorted(bases))


def _source_points(src: Layout, dst: Layout) -> tuple[list[int], list[int], list[int]] | None:
  """q's columns for the register, lane and warp bits of the destination, each a packed source point.

  Among the copies of an element it takes the nearest: where a bit of the source is free, it is the reader's own.
  """
  if any(a not in _PACKED for a in (*src.axes, *dst.axes)):
    return None
  shifts = {"reg": 0, "lane": _LANE_SHIFT, "warp": _WARP_SHIFT}
  points = [(1 << shifts[axis] + i, c) for axis in ("reg", "lane", "warp") for i, c in enumerate(src.columns(axis))]

  def spread(combination: int) -> int:
    return f2.apply([p for p, _ in points], combination)

  pivots, kernel = f2.echelon([c for _, c in points])
  free: dict[int, int] = {}                        # highest bit (warp, then lane, then register) -> kernel vector
  for v in sorted((spread(k) for k in kernel), reverse=True):
    for p, w in free.items():
      v = min(v, v ^ w) if v >> p & 1 else v
    if v:
      p = v.bit_length() - 1
      free = {q: w ^ v if w >> p & 1 else w for q, w in free.items()}
      free[p] = v
  columns = []
  for axis in ("reg", "lane", "warp"):
    found = []
    for i, c in enumerate(dst.columns(axis)):
      combination = f2.solve(pivots, c)
      if combination is None:
        return None
      x, own = spread(combination), 1 << shifts[axis] + i
      for p, w in free.items():
        if (x ^ own) >> p & 1:
          x ^= w
      found.append(x)
    columns.append(found)
  return columns[0], columns[1], columns[2]


def _bijective(a: list[int], b: list[int]) -> tuple[list[int], list[int]] | None:
  """(e, B) with B = b ^ a.e invertible, so that each step serves every lane from a different one.

  Greedy, column by column: if no choice is independent of the columns so far, their span contains the image of a and
  every b up to here, so a and b together reach fewer than all 32 lanes; then, and only then, there is no plan.
  """
  if len(b) != 5:
    return None
  e: list[int] = []
  columns: list[int] = []
  for column in b:
    for choice in sorted(range(1 << len(a)), key=lambda x: (x.bit_count(), x)):
      trial = column ^ f2.apply(a, choice)
      if f2.rank([*columns, trial]) == len(columns) + 1:
        e.append(choice)
        columns.append(trial)
        break
    else:
      return None
  return e, columns


def _swaps(linear: list[int]) -> tuple[Swap, ...]:
  """A linear map lane -> register mask as the fewest (lane mask, register mask) conditional exchanges."""
  by_pivot: dict[int, tuple[int, int]] = {}        # register mask in echelon -> lanes that use it
  basis, _ = f2.echelon(linear)
  for p, (mask, _) in basis.items():
    lanes = sum(1 << i for i, x in enumerate(linear) if x >> p & 1)
    by_pivot[p] = (lanes, mask)
  return tuple(by_pivot[p] for p in sorted(by_pivot))
