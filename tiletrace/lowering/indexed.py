"""Accesses at tiles of indices: which registers share their indices, and how wide a thread's accesses may be."""
from __future__ import annotations

import math

import numpy as np

from tiletrace.core.graph import RefOperand
from tiletrace.core.ops.gather import indexed_columns
from tiletrace.core.types import Dyn
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.layouts.relation import Layout
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


def access_groups(table: np.ndarray, delta: np.ndarray, columns: list[int], vec: int) -> list[list[int]] | None:
  """Registers in groups of `vec` with the same indices and neighbouring elements; None where they do not come so.

  Args:
    table: element of the result of each (thread, register).
    delta: the registers' part of the offset in memory, in elements, without what the indices add.
    columns: the dimensions of the result that the indices have.
  """
  if len(delta) % vec:
    return None
  keys = [split_sum(table[..., j].astype(np.int64))[1] for j in columns]
  groups = np.lexsort((delta, *keys)).reshape(-1, vec)
  alike = all((k[groups] == k[groups][:, :1]).all() for k in keys)
  if not alike or (delta[groups] != delta[groups][:, :1] + np.arange(vec)).any():
    return None
  return groups[np.argsort(groups.min(1), kind="stable")].tolist()


def indexed_width(ref: RefOperand, dims: tuple[int, ...], layout: Layout, threads: int, facts: Facts,
                  most: int = 16) -> int:
  """Elements of the widest access, `most` bytes: neighbours in every thread, in one row, provably aligned, wholly
  inside or outside of the array."""
  table, item = coordinates(layout, threads), ref.type.dtype.itemsize
  steps = [math.prod(ref.type.shape[d + 1:]) for d in range(len(ref.type.shape))]
  inside = view_table(table, len(ref.view.perm), dims).astype(np.int64)
  scale = np.asarray([ref.view.dims[p].stride * steps[p] for p in ref.view.perm], np.int64)
  base, delta = split_sum((inside * scale).sum(-1))
  columns = index_columns(table.shape[2], len(ref.view.perm), dims)
  width = 1
  while 2 * width * item <= most and _fits(ref, dims, table, base, delta, columns, 2 * width, steps, facts):
    width *= 2
  return width


def _fits(ref: RefOperand, dims: tuple[int, ...], table: np.ndarray, base: np.ndarray, delta: np.ndarray,
          columns: list[int], width: int, steps: list[int], facts: Facts) -> bool:
  groups = access_groups(table, delta, columns, width)
  if groups is None or (delta[[g[0] for g in groups]] % width).any() or (base % width).any():
    return False
  rows = {ref.view.perm[d] for d in dims}
  for p, dim in enumerate(ref.view.dims):
    start = facts[ref.dyn[dim.start.index] if isinstance(dim.start, Dyn) else dim.start]
    if (steps[p] if p in rows else start.divisor * steps[p]) % width:
      return False
  inner = ref.view.dims[-1]
  assert isinstance(inner.size, int)
  return not inner.edges and ref.type.shape[-1] % width == 0 and inner.size % width == 0
