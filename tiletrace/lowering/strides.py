"""Strides of arrays in row-major order, some of which a call decides, and where a tile's elements lie in them."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tiletrace.core.graph import RefOperand
from tiletrace.core.types import Extent, Size
from tiletrace.lowering.tables import split_sum


def row_major_strides(shape: Sequence[Extent]) -> tuple[Extent, ...]:
  """Elements between neighbours along each dimension."""
  return tuple(math.prod(shape[d + 1:]) for d in range(len(shape)))  # type: ignore[arg-type, misc]


def divisor(n: Extent) -> int:
  """What divides an extent or a stride at every call."""
  return n.factor if isinstance(n, Size) else n


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Offsets:
  """Where elements of a tile lie in an array, beside where its view starts: base[thread] + delta[register] elements,
  and rows[i][register] steps more along each dimension whose stride the call decides."""
  base: np.ndarray
  delta: np.ndarray
  rows: tuple[np.ndarray, ...]

  def groups(self, vec: int, keys: Sequence[np.ndarray] = ()) -> np.ndarray | None:
    """Registers in groups [n, vec] of neighbours in memory, in ascending order, that are alike in `keys`; None where
    they do not come so."""
    if len(self.delta) % vec:
      return None
    keys = (*self.rows, *keys)
    groups = np.lexsort((self.delta, *keys)).reshape(-1, vec)
    alike = all((k[groups] == k[groups][:, :1]).all() for k in keys)
    return groups if alike and (self.delta[groups] == self.delta[groups][:, :1] + np.arange(vec)).all() else None


def offsets(ref: RefOperand, table: np.ndarray) -> Offsets:
  """Of the element `table` [threads, registers, rank of the view] of a view."""
  strides = row_major_strides(ref.type.shape)
  flat, rows = np.zeros(table.shape[:2], np.int64), []
  for i, p in enumerate(ref.view.perm):
    steps, stride = table[..., i].astype(np.int64) * ref.view.dims[p].stride, strides[p]
    if isinstance(stride, Size):
      rows.append(split_sum(steps)[1])
    else:
      flat += steps * stride
  return Offsets(*split_sum(flat), tuple(rows))
