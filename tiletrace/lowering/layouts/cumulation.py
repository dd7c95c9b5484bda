"""How a fragment is summed cumulatively: the index along an axis as digits, each in one hardware axis."""
from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

from tiletrace.lowering.layouts.fragment import FragmentLayout, drop_copies
from tiletrace.lowering.layouts.normal import FIELD, REPLICA, Outer, pack, unpack
from tiletrace.lowering.layouts.relation import build


@dataclasses.dataclass(frozen=True, order=True)
class Digit:
  """A digit of the index along a dimension: `extent` values, each worth `step` elements.

  Attributes:
    step: elements from one value to the next; below it lie the lower digits.
    extent: how many values.
    axis: "reg", "lane" or "warp".
    stride: coordinates of that axis from one value to the next; a power of two on `lane`, where the extent is two.
  """
  step: int
  extent: int
  axis: str
  stride: int


def digits(layout: FragmentLayout, dim: int) -> tuple[Digit, ...] | None:
  """The digits of the index along `dim`, lowest first; None where two places hold one digit, or one place two.

  Copies, in registers or in threads, are no digits.

  Example: `digits(wgmma_accumulator(64, 96), 1)` is a register, two lanes, and twelve registers.
  """
  unique = drop_copies(layout)[0]
  found: list[Digit] = []
  for axis in ("reg", "lane", "warp"):
    for bit, column in enumerate(unique.columns(axis)):
      step = unpack(column, unique.rank)[dim]
      if step and (column != step << FIELD * dim or step & step - 1):
        return None
      if step:
        found.append(Digit(step, 2, axis, 1 << bit))
    for o in unique.outers_of(axis):
      if o.dim != dim:
        continue
      whole = axis != "lane"
      found += [Digit(o.step, o.extent, axis, o.stride)] if whole else [
        Digit(o.step << b, 2, axis, o.stride << b) for b in range(o.extent.bit_length() - 1)]
  found.sort()
  reach = 1
  for d in found:
    if d.step != reach:
      return None
    reach *= d.extent
  return tuple(found) if reach == unique.shape[dim] else None


@dataclasses.dataclass(frozen=True)
class Cumulation:
  """How a fragment is summed cumulatively along a dimension.

  Attributes:
    within: the digits below the lowest that lies in warps, which one warp sums by itself.
    block: how many elements those are.
    totals: layout of the sums of the blocks, in the threads that have them; None where one warp has all of the axis.
    gathered: layout of the sums of the blocks in which one warp has all of the axis, on its lanes.
  """
  within: tuple[Digit, ...]
  block: int
  totals: FragmentLayout | None
  gathered: FragmentLayout | None


@lru_cache(maxsize=256)
def cumulation(layout: FragmentLayout, dim: int) -> Cumulation:
  """Plans a cumulative sum along `dim`, which must have digits.

  Example: along `blocked((1, 1024), 32, 4)` blocks of 128 elements lie in one warp each, and there are eight.
  """
  found = digits(layout, dim)
  assert found is not None, layout
  first = next((i for i, d in enumerate(found) if d.axis == "warp"), len(found))
  block = math.prod(d.extent for d in found[:first])
  if first == len(found):
    return Cumulation(found, block, None, None)
  totals = drop_copies(_coarse(layout, dim, block))[0]
  return Cumulation(found[:first], block, totals, _gathered(totals.valid, dim, layout.extent("warp")))


def _gathered(shape: tuple[int, ...], dim: int, warps: int) -> FragmentLayout:
  """Lanes along `dim`, then registers; the other dimensions in warps, then registers."""
  lane, regs, in_warps = Outer("lane", 1, 32, dim, 1), [], []
  hull, reg = [32 if d == dim else 1 for d in range(len(shape))], 1
  for d in range(len(shape)):
    left = -(-shape[d] // hull[d])
    if d != dim:
      count = min((w for w in range(1, warps + 1) if warps % w == 0), key=lambda w: (-(-left // w), w))
      in_warps.append((count, d, hull[d]))
      left, hull[d], warps = -(-left // count), hull[d] * count, warps // count
    regs.append(Outer("reg", reg, left, d, hull[d]))
    reg, hull[d] = reg * left, hull[d] * left
  outers, warp = [lane, *regs], 1
  for count, d, step in sorted([*in_warps, (warps, REPLICA, 0)], key=lambda part: part[0].bit_count() != 1):
    outers.append(Outer("warp", warp, count, d, step))                  # an odd factor on top: thread bits stay bits
    warp *= count
  return build(hull, {}, outers, valid=shape)


def _coarse(layout: FragmentLayout, dim: int, block: int) -> FragmentLayout:
  """The layout of blocks: the digits along `dim` that are worth less than a block become copies."""
  core: dict[str, list[int]] = {}
  for axis, columns in layout.core:
    vectors = [list(unpack(c, layout.rank)) for c in columns]
    for v in vectors:
      v[dim] //= block
    core[axis] = [pack(v) for v in vectors]
  outers = []
  for o in layout.outers:
    step = o.step // block if o.dim == dim else o.step
    outers.append(Outer(o.axis, o.stride, o.extent, o.dim if step else REPLICA, step))
  shape, valid = ([*s] for s in (layout.shape, layout.valid))
  shape[dim], valid[dim] = shape[dim] // block, -(-valid[dim] // block)
  return build(shape, core, outers, valid=valid, origin=dict(layout.origin))
