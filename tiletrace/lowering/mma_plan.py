"""How the warps compute one gemm by mma.sync: tiles of 16 x 8, and the fragments that A, B and the accumulator are in.

PTX ISA, "Matrix Fragments for mma.m16n8k8", "m16n8k16" and "m16n8k32". Extents that are no multiples of a tile are
padded: what lies beyond k is zero in both operands.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from tiletrace.core.graph import Eqn
from tiletrace.lowering.layouts.normal import REPLICA
from tiletrace.lowering.layouts.relation import Layout, make

_M, _N = 16, 8


@dataclasses.dataclass(frozen=True, slots=True)
class MmaPlan:
  """A partition of acc[m, n] += a[m, k] @ b[k, n], or of several side by side.

  Attributes:
    shape: (m, n, k).
    warps: along the rows, along the columns, and how many times all of that is computed.
    tiles: of 16 rows, of 8 columns, and instructions along k, of one warp.
    depth: extent of an instruction along k, 32 bytes.
    word: elements of a and b in a register.
    batch: (products of a warp, warps along them) where the operands have a dimension for these.
  """
  shape: tuple[int, int, int]
  warps: tuple[int, int, int]
  tiles: tuple[int, int, int]
  depth: int
  word: int
  batch: tuple[int, int] | None = None

  @property
  def fragment_registers(self) -> int:
    """Registers of a thread for an accumulator of 32-bit elements."""
    return 4 * self.tiles[0] * self.tiles[1] * (self.batch or (1, 1))[0]


@lru_cache(maxsize=256)
def mma_plan(shape: tuple[int, int, int], itemsize: int, warps: int, policy: str | tuple[int, int],
             batch: int | None = None) -> MmaPlan:
  """The split that gives a warp the fewest instructions, then the fewest words to load, then the least padding. Warps
  divide products side by side before they divide one.

  Args:
    shape: (m, n, k).
    batch: how many products lie side by side; None where the operands are matrices.
    itemsize: bytes of an element of a and b.
    warps: of all warpgroups that own the accumulator.
    policy: "full_row" and "full_col" split the rows, the columns alone; two numbers say how many warpgroups lie along
      each, the warps of one along the rows, as for wgmma.
  """
  m, n, k = shape
  depth, word = 32 // itemsize, 4 // itemsize
  along = math.gcd(batch or 1, warps)
  share = None if batch is None else (batch // along, along)
  plans = []
  for rows, columns in _splits(warps // along, policy):
    tiles = -(-m // (_M * rows)), -(-n // (_N * columns)), -(-k // depth)
    plans.append(MmaPlan(shape, (rows, columns, warps // along // rows // columns), tiles, depth, word, share))
  return min(plans, key=lambda p: (p.tiles[0] * p.tiles[1], 2 * p.tiles[0] + p.tiles[1], p.warps[0] * p.warps[1]))


def _splits(warps: int, policy: str | tuple[int, int]) -> list[tuple[int, int]]:
  """Warps along the rows, along the columns: what is not the last of the extents that a warp's index is made of is a
  power of two, as addresses are made of its bits."""
  if isinstance(policy, tuple):
    return [(4 * policy[0], policy[1])]
  bits = warps & -warps
  powers = [1 << i for i in range(bits.bit_length())]
  found = [(rows, columns) for rows in powers for columns in (warps // rows, *reversed(powers))
           if warps // rows % columns == 0]
  return [(rows, columns) for rows, columns in dict.fromkeys([*found, (warps, 1)])
          if (policy != "full_col" or rows == 1) and (policy != "full_row" or columns == 1)]


def plan_of(eqn: Eqn, warpgroups: int) -> MmaPlan:
  """The plan of an mma_sync equation."""
  _, a, b = eqn.values
  (*batch, m, k), n = a.shape, b.shape[-1]
  return mma_plan((m, n, k), a.dtype.itemsize, 4 * warpgroups, eqn.params["policy"], *batch)


def _layout(plan: MmaPlan, atom: tuple[int, int], registers: int, at: Callable[[Any, Any], tuple[Any, Any]],
            repeats: Sequence[tuple[int, int]], warps: tuple[int, int], valid: tuple[int, int]) -> Layout:
  """What the warps hold of an operand: `at(reg, lane)` of one instruction, and all that follow.

  Args:
    atom: rows and columns of the operand of one instruction.
    repeats: (dimension, how often), the nearer in registers first.
    warps: the dimension that warps along the accumulator's rows divide, and those along its columns, or REPLICA.
  """
  outer = () if plan.batch is None else (0,)
  tile = make({"reg": registers, "lane": 32}, (*(1 for _ in outer), *atom),
              lambda reg, lane: (*(0 * reg for _ in outer), *at(reg, lane)))
  for dim, count in repeats:
    tile = tile.repeat("reg", count, len(outer) + dim)
  products, along = plan.batch or (1, 1)
  if outer:
    tile = tile.repeat("reg", products, 0)
  for dim, count in zip(warps, plan.warps):
    tile = tile.repeat("warp", count, dim if dim == REPLICA else len(outer) + dim)
  if outer:
    tile = tile.repeat("warp", along, 0)
  return tile.repeat("warp", plan.warps[2], REPLICA).with_valid((*(products * along for _ in outer), *valid))


@lru_cache(maxsize=256)
def a_layout(plan: MmaPlan) -> Layout:
  """A [m, k]: a thread's registers of one instruction are (row, k), (row + 8, k), and both again 16 bytes further."""
  w, (m, _, k) = plan.word, plan.shape
  return _layout(plan, (_M, plan.depth), 4 * w, lambda reg, lane: (
    lane // 4 + 8 * (reg // w % 2), reg % w + w * (lane % 4) + 4 * w * (reg // (2 * w))),
    ((1, plan.tiles[2]), (0, plan.tiles[0])), (0, REPLICA), (m, k))


@lru_cache(maxsize=256)
def b_layout(plan: MmaPlan) -> Layout:
  """B [k, n]: a thread's registers of one instruction are (k, column), (k + 16 bytes, column)."""
  w, (_, n, k) = plan.word, plan.shape
  return _layout(plan, (plan.depth, _N), 2 * w, lambda reg, lane: (
    reg % w + w * (lane % 4) + 4 * w * (reg // w), lane // 4),
    ((0, plan.tiles[2]), (1, plan.tiles[1])), (REPLICA, 1), (k, n))


@lru_cache(maxsize=256)
def accumulator_layout(plan: MmaPlan) -> Layout:
  """C and D [m, n], whatever their type."""
  m, n, _ = plan.shape
  return _layout(plan, (_M, _N), 4, lambda reg, lane: (
    lane // 4 + 8 * (reg // 2), 2 * (lane % 4) + reg % 2),
    ((1, plan.tiles[1]), (0, plan.tiles[0])), (0, 1), (m, n))
