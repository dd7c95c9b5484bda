"""Layouts as text grids."""
from __future__ import annotations

import numpy as np

from tiletrace.lowering.layouts.relation import Layout


def draw(layout: Layout, *, rows: int = 16, columns: int = 16) -> str:
  """The top left corner of the last two dimensions, one cell an element.

  A fragment's cell is `T<thread>:<register>`, thread = lane + 32*warp; a `+` follows where there are more copies.
  A shared tile's cell is the element offset. `.` is padding, or an element that nobody holds.

  Example::

    print(draw(mma_m16n8k16_c(), rows=2))
    # T0:0 T0:1 T1:0 T1:1 T2:0 T2:1 T3:0 T3:1
    # T4:0 T4:1 T5:0 T5:1 T6:0 T6:1 T7:0 T7:1
  """
  height, width = ([1, 1, *layout.shape])[-2:]
  cells = _cells(layout, (1,) * max(0, layout.rank - 2) + (rows, columns)[2 - min(layout.rank, 2):])
  grid = [[cells.get((0,) * max(0, layout.rank - 2) + (i, j)[2 - min(layout.rank, 2):], ".")
           for j in range(min(width, columns))] for i in range(min(height, rows))]
  wide = max(len(cell) for line in grid for cell in line)
  lines = [" ".join(cell.rjust(wide) for cell in line) + (" ..." if width > columns else "") for line in grid]
  return "\n".join(lines + (["..."] if height > rows else []))


def _cells(layout: Layout, corner: tuple[int, ...]) -> dict[tuple[int, ...], str]:
  """The cell of each element below `corner`."""
  axes = layout.axes
  table = layout.table(axes)
  drawn = np.all((table >= 0) & (table < np.minimum(corner, layout.valid)), axis=-1)
  first: dict[tuple[int, ...], str] = {}
  copies: set[tuple[int, ...]] = set()
  for point in map(tuple, np.argwhere(drawn).tolist()):
    index = tuple(int(x) for x in table[point])
    if index in first:
      copies.add(index)
      continue
    at = {a: layout.start(a) + p for a, p in zip(axes, point)}
    first[index] = str(at.get("off", 0)) if {"off", "stage"} & set(axes) else (
      f"T{at.get('lane', 0) + 32 * at.get('warp', 0)}:{at.get('reg', 0)}")
  return {index: cell + ("+" if index in copies and ":" in cell else "") for index, cell in first.items()}
