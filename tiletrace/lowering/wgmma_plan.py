"""How wgmma computes one gemm: the split over warpgroups, the instruction shape, or why it cannot."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from tiletrace.core import dtypes
from tiletrace.core.graph import Eqn
from tiletrace.lowering.layouts.catalog import wgmma_accumulator
from tiletrace.lowering.layouts.relation import Layout

Split = Literal["m", "n"]
_SPLITS: dict[str, tuple[Split, ...]] = {"full_row": ("m",), "full_col": ("n",), "square": ("m", "n")}


@dataclasses.dataclass(frozen=True, slots=True)
class WgmmaPlan:
  """A partition of acc[m, n] += a[m, k] @ b[k, n].

  Attributes:
    split: whether the warpgroups divide the rows or the columns.
    n: columns of an instruction (one along n for each warpgroup).
    m_blocks: 64-row instructions of a warpgroup. k_steps: 16-deep ones.
  """
  split: Split
  warpgroups: int
  n: int
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


def partitions(eqn: Eqn, warpgroups: int) -> Iterator[WgmmaPlan | str]:
  """Every split over the warpgroups, as a plan or the reason why it is not legal, in the order of the policy."""
  m, n, k = shape_of(eqn)
  acc_bits = eqn.refs[-1].type.dtype.itemsize * 8
  for split in _SPLITS[eqn.params["policy"] or "square"]:
    rows, columns = (m // warpgroups, n) if split == "m" else (m, n // warpgroups)
    even = rows * (warpgroups if split == "m" else 1) == m and columns * (warpgroups if split == "n" else 1) == n
    what = f"{'rows' if split == 'm' else 'columns'} split over {warpgroups} warpgroup{'s' if warpgroups > 1 else ''}"
    if not even or rows % 64:
      yield f"{what}: each must hold a multiple of 64 rows, M = {m} gives {m / (warpgroups if split == 'm' else 1):g}"
    elif columns % 8 or not 8 <= columns <= 256:
      yield f"{what}: N = {n} gives an instruction {columns} columns; legal are the multiples of 8 from 8 to 256"
    elif k % 16:
      yield f"{what}: K = {k} is not a multiple of 16"
    else:
      yield WgmmaPlan(split, warpgroups, columns, rows // 64, k // 16, acc_bits)


def best_partition(eqn: Eqn, warpgroups: int) -> WgmmaPlan | str:
  """The legal partition with the least shared-memory traffic per MMA cycle, or why there is none."""
  found = list(partitions(eqn, warpgroups))
  plans = [p for p in found if isinstance(p, WgmmaPlan)]
  if not plans:
    return "; ".join(p for p in found if isinstance(p, str))
  return min(plans, key=lambda p: p.smem_bytes_per_cycle)


def accumulator_layout(eqn: Eqn, plan: WgmmaPlan) -> Layout:
  m, n, _ = shape_of(eqn)
  return wgmma_accumulator(m, n, plan.warpgroups, plan.split)


def wgmma_plan(eqn: Eqn, acc: Layout, warpgroups: int) -> WgmmaPlan:
  """The partition that gave the accumulator its layout."""
  for plan in partitions(eqn, warpgroups):
    if isinstance(plan, WgmmaPlan) and accumulator_layout(eqn, plan) == acc:
      return plan
  raise AssertionError(f"{acc} is no wgmma accumulator of {eqn}")


def dtype_refusal(eqn: Eqn) -> str | None:
  """What wgmma computes (PTX ISA, wgmma.mma_async): bf16 into f32, f16 into f32 or f16."""
  dtype, acc = eqn.refs[-2].type.dtype, eqn.refs[-1].type.dtype
  if (dtype, acc) in ((dtypes.bf16, dtypes.f32), (dtypes.f16, dtypes.f32), (dtypes.f16, dtypes.f16)):
    return None
  return (f"{dtypes.short_name(dtype)} operands into {dtypes.short_name(acc)} are not among bf16->f32, f16->f32, "
          "f16->f16")
