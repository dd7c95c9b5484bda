"""A layout as cells: who holds each element of its last two dimensions. What tt.plot_layout draws."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiletrace.lowering.layouts.relation import Layout
from tiletrace.sim.banks import BANKS, WORD


@dataclasses.dataclass(frozen=True)
class Picture:
  """The top left corner of one layout, where the dimensions before the last two stand at 0.

  Attributes:
    shape: of the tensor, without padding. rows, columns: of the corner.
    shared: whether it is shared memory: a cell has element offsets, else (thread, register) pairs.
    itemsize: bytes of an element, for banks; None: not known.
    cells: row by row, what each element has; thread = lane + 32 * warp.
  """
  name: str
  variables: tuple[str, ...]
  text: str
  shape: tuple[int, ...]
  rows: int
  columns: int
  shared: bool
  itemsize: int | None
  cells: tuple[tuple[tuple[int, ...], ...], ...]

  def at(self, row: int, column: int) -> tuple[tuple[int, ...], ...]:
    """The (thread, register) pairs that hold an element, or its offset; a copy each."""
    return self.cells[row * self.columns + column]

  def bank(self, row: int, column: int) -> int | None:
    """The bank where a shared element begins."""
    found = self.at(row, column)
    return found[0][0] * self.itemsize // WORD % BANKS if self.shared and self.itemsize and found else None

  def data(self) -> dict[str, Any]:
    """For the page: cells as flat lists."""
    out = dataclasses.asdict(self)
    out["cells"] = [[x for owner in cell for x in owner] for cell in self.cells]
    return out


def picture(layout: Layout, *, name: str = "layout", variables: Sequence[str] = (), itemsize: int | None = None,
            rows: int = 64, columns: int = 64) -> Picture:
  """The picture of a layout.

  Args:
    rows, columns: the most that are drawn.
  """
  valid = (1, 1, *layout.valid)[-2:]
  rows, columns = min(rows, valid[0]), min(columns, valid[1])
  shared = "off" in layout.axes
  axes = ("off",) if shared else ("warp", "lane", "reg")
  table = layout.table(axes)
  rank = layout.rank
  index = np.zeros((*table.shape[:-1], 2), np.int64)            # scalars and vectors are one row
  index[..., 2 - min(rank, 2):] = table[..., max(0, rank - 2):]
  drawn = (index >= 0).all(-1) & (index[..., 0] < rows) & (index[..., 1] < columns)
  drawn &= (table[..., :max(0, rank - 2)] == 0).all(-1)
  cells: list[list[tuple[int, ...]]] = [[] for _ in range(rows * columns)]
  starts = [layout.start(a) for a in axes]
  for point in np.argwhere(drawn).tolist():
    row, column = index[tuple(point)].tolist()
    at = [x + s for x, s in zip(point, starts)]
    cells[row * columns + column].append((at[0],) if shared else (at[1] + 32 * at[0], at[2]))
  return Picture(name, tuple(variables), str(layout), layout.valid, rows, columns, shared, itemsize,
                 tuple(map(tuple, cells)))
