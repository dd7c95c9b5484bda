"""Accesses at tiles of indices: which registers share their indices, and how wide a thread's accesses may be."""
from __future__ import annotations

import numpy as np

from tiletrace.core.graph import RefOperand
from tiletrace.core.ops.gather import indexed_columns
from tiletrace.core.types import Dyn, Size
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.strides import Offsets, divisor, offsets, row_major_strides
from tiletrace.lowering.tables import coordinates, split_sum


def view_table(table: np.ndarray, view_rank: int, dims: tuple[int, ...]) -> np.ndarray:
  """Elements of the result [threads, registers, rank] as elements of the view, 0 along its indexed dimensions."""
  out = np.zeros((*table.shape[:2], view_rank), table.dtype)
  for d, j in indexed_columns((0,) * table.shape[2], view_rank, dims):
    out[..., d] = table[..., j]
  return out


def index_columns(rank: int, view_rank: int, dims: tuple[int, ...]) -> list[int]:
  """The dimensions of the result that the indices have."""
  kept = {j for _, j in indexed_columns((0,) * rank, view_rank, dims)}
  return [j for j in range(rank) if j not in kept]


def access_groups(table: np.ndarray, at: Offsets, columns: list[int], vec: int) -> list[list[int]] | None:
  """Registers in groups of `vec` with the same indices and neighbouring elements; None where they do not come so.

  Args:
    table: element of the result of each (thread, register).
    at: where these lie in memory, without what the indices add.
    columns: the dimensions of the result that the indices have.
  """
  groups = at.groups(vec, [split_sum(table[..., j].astype(np.int64))[1] for j in columns])
  return None if groups is None else groups[np.argsort(groups.min(1), kind="stable")].tolist()


def indexed_width(ref: RefOperand, dims: tuple[int, ...], layout: Layout, threads: int, facts: Facts,
                  most: int = 16) -> int:
  """Elements of the widest access, `most` bytes: neighbours in every thread, in one row, provably aligned, wholly
  inside or outside of the array."""
  table, item = coordinates(layout, threads), ref.type.dtype.itemsize
  at = offsets(ref, view_table(table, len(ref.view.perm), dims))
  columns = index_columns(table.shape[2], len(ref.view.perm), dims)
  width = 1
  while 2 * width * item <= most and _fits(ref, dims, table, at, columns, 2 * width, facts):
    width *= 2
  return width


def _fits(ref: RefOperand, dims: tuple[int, ...], table: np.ndarray, at: Offsets, columns: list[int], width: int,
          facts: Facts) -> bool:
  groups = access_groups(table, at, columns, width)
  if groups is None or (at.delta[[g[0] for g in groups]] % width).any() or (at.base % width).any():
    return False
  rows = {ref.view.perm[d] for d in dims}
  for p, (dim, stride) in enumerate(zip(ref.view.dims, row_major_strides(ref.type.shape), strict=True)):
    start = facts[ref.dyn[dim.start.index] if isinstance(dim.start, Dyn) else dim.start]
    any_row = p in rows or (isinstance(stride, Size) and not dim.squeezed)
    if (1 if any_row else start.divisor) * divisor(stride) % width:
      return False
  inner = ref.view.dims[-1]
  assert not isinstance(inner.size, Dyn)
  return not inner.edges and divisor(ref.type.shape[-1]) % width == 0 and divisor(inner.size) % width == 0
