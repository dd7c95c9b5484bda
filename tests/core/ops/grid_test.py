from __future__ import annotations

import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.xla.kernels import run_compiled as run
from tests.tracing import Out, i32, trace
from tiletrace.core.errors import TileIndexError, TileTypeError


def test_program_ids_are_abstract_and_counts_are_static():
  seen = []

  def kernel(y):
    seen.extend([tt.program_id(1), tt.num_programs(0), tt.num_programs(1)])

  eqn, = trace(kernel, grid=(3, 5), y=Out(i32(1))).body.eqns
  assert (eqn.params, seen[0].shape, seen[1:]) == ({"axis": 1}, (), [3, 5])


def grouped(tile, rows, columns, group):
  """Grouped order, enumerated."""
  order = [(r, c) for first in range(0, rows, group) for c in range(columns)
           for r in range(first, min(first + group, rows))]
  return order[tile]


@pytest.mark.parametrize(("rows", "columns", "group"), [(8, 3, 4), (7, 5, 4), (3, 4, 8), (1, 6, 2), (9, 1, 3)])
def test_raster_is_the_grouped_order_for_ints_and_scalars(rows, columns, group):
  want = [grouped(t, rows, columns, group) for t in range(rows * columns)]
  assert [tt.raster(t, tiles=(rows, columns), group=group) for t in range(rows * columns)] == want

  def kernel(n, y):
    for t in tt.range(rows * columns):
      y[t, 0], y[t, 1] = tt.raster(t, tiles=(n[0], columns), group=group)
      y[t, 2], y[t, 3] = tt.raster(t, tiles=(rows, columns), group=group)

  graph = trace(kernel, grid=(1,), n=i32(1), y=Out(i32(rows * columns, 4)))
  got = np.asarray(run(graph, np.array([rows], np.int32))[0])
  np.testing.assert_array_equal(got, [w + w for w in want])


@pytest.mark.parametrize(("use", "error", "message"), [
  (lambda: tt.program_id(2), TileIndexError, r"program_id\(2\) of a grid with 2 axes"),
  (lambda: tt.num_programs(-1), TileIndexError, r"num_programs\(-1\) of a grid with 2 axes"),
  (lambda: tt.program_id(0.0), TileTypeError, r"program_id: axis must be a Python int, got 0.0"),
  (lambda: tt.raster(tt.program_id(0), tiles=(4, 4), group=0), TileTypeError, "raster: group is 0"),
  (lambda: tt.raster(0.5, tiles=(4, 4)), TileTypeError, "raster: tile must be an integer, got 0.5")])
def test_grid_arguments_are_checked(use, error, message):
  with pytest.raises(error, match=message):
    trace(lambda y: use(), grid=(3, 5), y=Out(i32(1)))
