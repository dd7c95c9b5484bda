"""How wgmma computes one gemm: the split over warpgroups, the instruction shape, or why it cannot."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tiletrace.core import dtypes
from tiletrace.core.graph import Eqn, Var
from tiletrace.core.types import Space
from tiletrace.lowering.layouts.catalog import wgmma_accumulator
from tiletrace.lowering.layouts.relation import Layout

_STEP_BYTES = 32  # of an operand along k in one instruction (PTX ISA, wgmma.mma_async: k8, k16, k32)


@dataclasses.dataclass(frozen=True, slots=True)
class WgmmaPlan:
  """A partition of acc[m, n] += a[m, k] @ b[k, n].

  Attributes:
    grid: warpgroups along the rows and along the columns; warpgroup w has part w % grid[0] of the rows and part
      w // grid[0] of the columns.
    n: columns of an instruction (one along n for each warpgroup).
    depth: extent of an instruction along k.
    m_blocks: 64-row instructions of a warpgroup. k_steps: instructions along k.
    acc_bits: width of an element of the accumulator.
  """
  grid: tuple[int, int]
  n: int
  depth: int
  m_blocks: int
  k_steps: int
  acc_bits: int

  @property
  def acc_registers(self) -> int:
    """32-bit registers of one instruction's accumulator."""
    return self.n * self.acc_bits // 64

  @property
  def total_registers(self) -> int:
    return self.acc_registers * self.m_blocks

  @property
  def smem_bytes_per_cycle(self) -> float:
    """Shared-memory bytes a warpgroup's SS instruction reads (A 2 KB + B 32 N) per cycle of the tensor core (N/2)."""
    return (2048 + 32 * self.n) / (self.n / 2)


def shape_of(eqn: Eqn) -> tuple[int, int, int]:
  """(m, n, k) of a gemm equation."""
  *_, b, acc = eqn.refs
  m, n = acc.shape
  return m, n, b.shape[0]


def register_operand(eqn: Eqn) -> Var | None:
  """A of a gemm, where it lies in registers: a fragment or a value."""
  if eqn.params["a_in"] == "value":
    a = eqn.values[1]
    assert isinstance(a, Var)
    return a
  return eqn.refs[0].root if eqn.refs[0].type.space is Space.FRAGMENT else None


def grids(policy: str | tuple[int, int], warpgroups: int) -> list[tuple[int, int]]:
  """The splits that a policy allows, (along rows, along columns): rows only, columns only, then both."""
  if isinstance(policy, tuple):
    return [policy]
  rows, columns = (warpgroups, 1), (1, warpgroups)
  both = [(r, warpgroups // r) for r in range(warpgroups - 1, 1, -1) if warpgroups % r == 0]
  return {"full_row": [rows], "full_col": [columns], "square": [rows, columns, *both]}[policy]


def partitions(eqn: Eqn, warpgroups: int) -> Iterator[WgmmaPlan | str]:
  """Every split over the warpgroups, as a plan or the reason why it is not legal, in the order of the policy."""
  m, n, k = shape_of(eqn)
  *_, b, acc = eqn.refs
  depth = _STEP_BYTES // b.type.dtype.itemsize
  for grid in dict.fromkeys(grids(eqn.params["policy"] or "square", warpgroups)):
    rows, columns, what = m / grid[0], n / grid[1], _describe(grid)
    legal = column_refusal(columns, acc.type.dtype)
    if grid[0] * grid[1] != warpgroups:
      yield f"policy={grid} divides acc among {grid[0] * grid[1]} warpgroups, {warpgroups} compute it"
    elif grid[1] > 1 and grid[0] & grid[0] - 1:  # the parts would be no linear function of the warp's bits
      yield f"{what}: where both are split, the rows are split over a power of two"
    elif rows % 64:
      yield f"{what}: each must hold a multiple of 64 rows, M = {m} gives {rows:g}"
    elif legal is not None:
      yield f"{what}: N = {n} gives an instruction {columns:g} columns; legal are {legal}"
    elif k % depth:
      yield f"{what}: K = {k} is not a multiple of {depth}: pad both operands with zeros to {-(-k // depth) * depth}"
    else:
      yield WgmmaPlan(grid, int(columns), depth, int(rows) // 64, k // depth, acc.type.dtype.itemsize * 8)


def column_refusal(columns: float, acc: object) -> str | None:
  """The legal widths where this is none of them (PTX ISA, wgmma.mma_async, "Matrix shapes")."""
  if acc == dtypes.i32 and ((columns > 24 and columns % 16) or columns % 8 or not 8 <= columns <= 256):
    return "8, 24 and the multiples of 16 from 16 to 256"
  if columns % 8 or not 8 <= columns <= 256:
    return "the multiples of 8 from 8 to 256"
  return None


def _describe(grid: tuple[int, int]) -> str:
  def over(what: str, n: int) -> str:
    return f"{what} split over {n} warpgroup{'s' if n > 1 else ''}"

  if grid[1] == 1:
    return over("rows", grid[0])
  return over("columns", grid[1]) if grid[0] == 1 else f"{over('rows', grid[0])}, {over('columns', grid[1])}"


def best_partition(eqn: Eqn, warpgroups: int) -> WgmmaPlan | str:
  """The legal partition with the least shared-memory traffic per MMA cycle, or why there is none."""
  found = list(partitions(eqn, warpgroups))
  plans = [p for p in found if isinstance(p, WgmmaPlan)]
  if not plans:
    return "; ".join(p for p in found if isinstance(p, str))
  return min(plans, key=lambda p: p.smem_bytes_per_cycle)


def accumulator_layout(eqn: Eqn, plan: WgmmaPlan) -> Layout:
  m, n, _ = shape_of(eqn)
  return wgmma_accumulator(m, n, plan.grid)


def wgmma_plan(eqn: Eqn, acc: Layout, warpgroups: int) -> WgmmaPlan:
  """The partition that gave the accumulator its layout."""
  for plan in partitions(eqn, warpgroups):
    if isinstance(plan, WgmmaPlan) and accumulator_layout(eqn, plan) == acc:
      return plan
  raise AssertionError(f"{acc} is no wgmma accumulator of {eqn}")
