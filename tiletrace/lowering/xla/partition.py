"""Which part of each output a program owns: the proof that programs may run side by side.

Programs are independent when every access (read or write) to a reference that is written stays inside the program's own
cell of it, and cells are apart. A cell is a box; along a dimension that programs divide, program ids p own
[sum(c * p) + lo, sum(c * p) + lo + size), where the strides c are those of a mixed radix number over `size`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tiletrace.core.graph import RefOperand, TileGraph, Var, walk
from tiletrace.lowering.xla.buffer import span
from tiletrace.lowering.xla.machine import written
from tiletrace.lowering.xla.ranges import Ranges


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
  """A program's part of one dimension. `axes` are the grid axes that divide it, slowest first; () is all of it."""
  axes: tuple[int, ...]
  coefs: tuple[int, ...]
  lo: int
  size: int


Cells = tuple[Cell, ...]


def partition(graph: TileGraph, ranges: Ranges, overhangs: dict[Var, tuple[tuple[int, int], ...]]
              ) -> dict[Var, Cells] | None:
  """The cells of each global reference that is written; None when programs may not be independent."""
  accesses: dict[Var, list[RefOperand]] = {v: [] for v in written([graph.body]) if v in graph.invars}
  for eqn in walk(graph.body):
    for ref in eqn.refs:
      if ref.root in accesses:
        accesses[ref.root].append(ref)
  out = {v: tuple(_cell(ranges, refs, d, overhangs[v][d]) for d in range(len(refs[0].view.dims)))
         for v, refs in accesses.items()}
  needed = sorted(a for a, n in enumerate(ranges.grid) if n > 1)
  return out if all(sorted(a for c in cells for a in c.axes) == needed for cells in out.values()) else None


def _cell(ranges: Ranges, refs: Sequence[RefOperand], d: int, overhang: tuple[int, int]) -> Cell:
  low, high = overhang
  whole = Cell((), (), -low, low + refs[0].type.shape[d] + high)
  starts = [ranges.of_part(r.view.dims[d].start, r.dyn) for r in refs]
  first = starts[0]
  if first is None or not any(first.coefs) or any(s is None or s.coefs != first.coefs for s in starts):
    return whole
  lo = min(s.lo for s in starts if s is not None)
  width = max(s.hi + span(r.view.dims[d]) for s, r in zip(starts, refs) if s is not None) - lo
  axes = sorted((a for a, c in enumerate(first.coefs) if c), key=lambda a: first.coefs[a], reverse=True)
  coefs = [first.coefs[a] for a in axes]
  radix = all(c == n * ranges.grid[a] for c, n, a in zip(coefs, coefs[1:], axes[1:]))
  return Cell(tuple(axes), tuple(coefs), lo, coefs[-1]) if radix and coefs[-1] >= width else whole
