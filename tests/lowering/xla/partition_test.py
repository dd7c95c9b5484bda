"""Ranges of index scalars, and the proof that programs are independent."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.xla.kernels import call, traced
from tiletrace.core.graph import TileGraph, walk
from tiletrace.core.ops.memory import store_p
from tiletrace.lowering.xla import run as backend
from tiletrace.lowering.xla.buffer import overhangs
from tiletrace.lowering.xla.partition import Cell, Cells, partition
from tiletrace.lowering.xla.ranges import Range, Ranges

rng = np.random.default_rng(17)
GRID = (3, 4)


def start_of_the_store(kernel: Callable[..., Any]) -> Range | None:
  """The range of the start of y[...] in a kernel over (n: i32[1], y: i32[64])."""
  graph = traced(kernel, [np.zeros(1, np.int32)], [np.zeros(64, np.int32)], GRID)
  ref, = (e.refs[0] for e in walk(graph.body) if e.primitive is store_p)
  return Ranges(graph).of_part(ref.view.dims[0].start, ref.dyn)


@pytest.mark.parametrize(("index", "expected"), [
  (lambda i, j: i * 16 + j * 4 + 3, ((16, 4), 3, 3)),
  (lambda i, j: 7 - i, ((-1, 0), 7, 7)),
  (lambda i, j: i % 2 + j, ((0, 1), 0, 1)),
  (lambda i, j: i % 5, ((1, 0), 0, 0)),
  (lambda i, j: (i * 8 + 5) // 4, ((2, 0), 1, 1)),
  (lambda i, j: i // 2, ((0, 0), 0, 1)),
  (lambda i, j: i * j, ((0, 0), 0, 6)),
  (lambda i, j: tt.minimum(j, 2), ((0, 0), 0, 2)),
  (lambda i, j: tt.maximum(i + 1, i + 5), ((1, 0), 5, 5)),
  (lambda i, j: tt.where(i > 1, i * 2, i * 2 + 1), ((2, 0), 0, 1)),
])
def test_ranges_follow_index_arithmetic(index, expected):
  def kernel(n, y):
    y[tt.ds(index(tt.program_id(0), tt.program_id(1)), 1)] = 1

  assert start_of_the_store(kernel) == Range(*expected)


@pytest.mark.parametrize(("bounds", "expected"), [
  (lambda i: (2, 9, 3), ((0, 0), 2, 8)), (lambda i: (0, 0), ((0, 0), 0, 0)),
  (lambda i: (i * 8, i * 8 + 8), ((8, 0), 0, 7)), (lambda i: (0, i + 1), ((0, 0), 0, 2))])
def test_a_loop_index_ranges_between_its_bounds(bounds, expected):
  def kernel(n, y):
    for k in tt.range(*bounds(tt.program_id(0))):
      y[tt.ds(k, 1)] = 1

  assert start_of_the_store(kernel) == Range(*expected)


@pytest.mark.parametrize("index", [lambda n, i: n[0], lambda n, i: n[0] + i, lambda n, i: i * (1 << 30) * 4])
def test_nothing_is_known_of_loaded_and_wrapping_scalars(index):
  def kernel(n, y):
    y[tt.ds(index(n, tt.program_id(0)), 1)] = 1

  assert start_of_the_store(kernel) is None


def test_ranges_hold_in_every_program():
  """Whatever a kernel computes lies in its range: random arithmetic, run and compared."""
  r = np.random.default_rng(1)

  def expression(leaves: list[Any], depth: int) -> Any:
    if not depth:
      return leaves[r.integers(len(leaves))]
    a, b, n = expression(leaves, depth - 1), expression(leaves, depth - 1), int(r.integers(1, 9))
    pick = r.integers(7)
    return [lambda: a + b, lambda: a - b, lambda: a * n, lambda: a // n, lambda: a % n, lambda: tt.minimum(a, b),
            lambda: tt.maximum(a, b)][pick]()

  def kernel(y):
    i, j = tt.program_id(0), tt.program_id(1)
    for k in tt.range(2, 5):
      state = r.bit_generator.state
      for n in range(24):
        y[i, j, k - 2, n] = expression([i, j, k, i * 8 + j], 3)
      r.bit_generator.state = state                             # the body is recorded twice

  graph = traced(kernel, [], [np.zeros((*GRID, 3, 24), np.int32)], GRID)
  ranges, (values,) = Ranges(graph), backend.run(graph)
  stores = [e for e in walk(graph.body) if e.primitive is store_p]
  i, j = np.mgrid[:GRID[0], :GRID[1]][:, :, :, None]
  assert len(stores) == 24
  for n, eqn in enumerate(stores):
    known = ranges.of(eqn.values[0])
    assert known is not None
    rest = np.asarray(values)[..., n] - known.coefs[0] * i - known.coefs[1] * j
    assert known.lo <= rest.min() and rest.max() <= known.hi, (n, known)


# --- partition

def cells(graph: TileGraph) -> list[Cells] | None:
  ranges = Ranges(graph)
  found = partition(graph, ranges, overhangs(graph, ranges))
  return None if found is None else list(found.values())


def blocks(kernel: Callable[..., Any], shape: tuple[int, ...] = (40, 30), grid: tuple[int, ...] = GRID,
           aliases: dict[int, int] | None = None) -> list[Cells] | None:
  x = np.zeros(shape, np.float32)
  return cells(traced(kernel, [x], [x], grid, aliases))


def test_each_program_owns_its_block():
  def kernel(x, y):
    i, j = tt.program_id(0), tt.program_id(1)
    y[tt.block(i, 16), tt.block(j, 8)] = x[tt.block(j, 16), tt.block(i, 8)]

  assert blocks(kernel) == [(Cell((0,), (16,), 0, 16), Cell((1,), (8,), 0, 8))]


def test_two_axes_may_divide_one_dimension():
  def kernel(x, y):
    y[tt.block(tt.program_id(0) * 4 + tt.program_id(1), 3), :] = 1.0

  assert blocks(kernel) == [(Cell((0, 1), (12, 3), 0, 3), Cell((), (), 0, 30))]


def test_a_loop_inside_the_block_stays_in_it():
  def kernel(x, y):
    i, j = tt.program_id(0), tt.program_id(1)
    for k in tt.range(4):
      y[tt.ds(i * 16 + k * 4 + 1, 4), tt.block(j, 8)] = 1.0

  assert blocks(kernel) == [(Cell((0,), (16,), 1, 16), Cell((1,), (8,), 0, 8))]


@pytest.mark.parametrize("kernel", [
  lambda x, y, i, j: y.at[tt.block(i, 16), :],                  # j writes the same
  lambda x, y, i, j: y.at[tt.ds(i * 8, 16), tt.block(j, 8)],    # overlap
  lambda x, y, i, j: y.at[tt.block(i, 16), tt.block(j % 2, 8)],
  lambda x, y, i, j: y.at[tt.block(2 - i, 8), tt.block(j, 8)],  # disjoint, but not in increasing order
  lambda x, y, i, j: y.at[tt.ds(i * 8 + j, 1), 0],              # apart, but no mixed radix
], ids=["shared", "overlap", "modulo", "reversed", "sparse"])
def test_what_is_not_proven_runs_in_order(kernel):
  assert blocks(lambda x, y: tt.store(kernel(x, y, tt.program_id(0), tt.program_id(1)), 1.0)) is None


def test_reading_what_another_program_writes_runs_in_order():
  def neighbour(h, h_out):
    i = tt.program_id(0)
    h_out[tt.block(i, 4), :] = h[tt.block(i - 1, 4), :]

  def own(h, h_out):
    i = tt.program_id(0)
    h_out[tt.block(i, 4), :] = h[tt.block(i, 4), :] * 2

  assert blocks(neighbour, grid=(10,), aliases={0: 0}) is None
  assert blocks(own, grid=(10,), aliases={0: 0}) == [(Cell((0,), (4,), 0, 4), Cell((), (), 0, 30))]


def test_a_ragged_start_runs_in_order():
  def kernel(x, n, y):
    y[tt.ds(n[tt.program_id(0)], 4), :] = x[tt.block(tt.program_id(0), 4), :]

  x = np.zeros((12, 5), np.float32)
  assert cells(traced(kernel, [x, np.zeros(3, np.int32)], [x], (3,))) is None


def side_by_side_kernel(x, y, z, *, off):
  i, j = tt.program_id(0), tt.program_id(1)
  y[tt.ds(i * 7 + off, 5), tt.ds(j * 3, 2)] = x[tt.ds(i * 5, 5), tt.ds(j * 2, 2)]
  z[i * 4 + j, tt.ds(1, 3)] = x[i, tt.ds(j, 3)]


@pytest.mark.parametrize("off", [-9, -2, 0, 3, 17, 40])
@pytest.mark.parametrize("budget", [0, 2000, 1 << 30])
def test_the_order_of_programs_changes_nothing(off, budget, monkeypatch):
  monkeypatch.setattr(backend, "_SIDE_BY_SIDE_BYTES", budget)   # one by one, some rounds, all at once
  x = rng.standard_normal((15, 8)).astype(np.float32)
  y, z = call(side_by_side_kernel, x, out=[((20, 11), np.float32), ((12, 6), np.float32)], grid=GRID, off=off)
  want_y, want_z = np.full((60, 12), np.nan, np.float32), np.full((12, 6), np.nan, np.float32)
  for i in range(3):
    for j in range(4):
      at = i * 7 + off
      for row in range(5):
        if 0 <= at + row < 20:
          want_y[at + row, j * 3:j * 3 + 2] = x[i * 5 + row, j * 2:j * 2 + 2]
      want_z[i * 4 + j, 1:4] = x[i, j:j + 3]
  np.testing.assert_array_equal(y, want_y[:20, :11])
  np.testing.assert_array_equal(z, want_z)
