"""The other backend: a TileGraph as plain jax operations.

Level-1 operations are synchronous and references are values that are replaced (machine.py). Programs run in grid order
over carried outputs; where each provably keeps to its own part of the outputs (partition.py), many run side by side.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tiletrace.core.graph import TileGraph, Var, walk
from tiletrace.core.types import RefType, TileType
from tiletrace.lowering.debug import speaks, with_checks, without_debug
from tiletrace.lowering.profile import without_profile
from tiletrace.lowering.xla.buffer import CellOrigin, Frame, crop, overhangs, pad, padded_frame, poisoned
from tiletrace.lowering.xla.machine import Machine, Perturb, vary, varying_axes
from tiletrace.lowering.xla.partition import Cell, Cells, partition
from tiletrace.lowering.xla.ranges import Ranges

# Programs side by side amortise the cost of an operation (microseconds) while what they hold stays in cache.
_SIDE_BY_SIDE_BYTES = 4 << 20


def run(graph: TileGraph, *arrays: jax.Array, perturb: Perturb | None = None, debug: bool = False
        ) -> list[jax.Array]:
  """Runs a traced kernel on arrays or tracers.

  Args:
    graph: of level 1.
    *arrays: one for each input of the graph, of exactly its shape and dtype.
    perturb: changes what equations compute, see machine.py; None: they are left as they are.
    debug: whether the kernel prints and checks.

  Returns:
    one array for each output; elements that no program wrote are poison (NaN, the least signed, the greatest unsigned
    integer, False), or the input's for an aliased output.

  Raises:
    LoweringError: an equation is of level 0.
  """
  graph = without_profile(with_checks(graph) if debug else without_debug(graph))
  return _Runner(graph, arrays, perturb).outputs()


class _Runner:
  """One call of `run`."""

  def __init__(self, graph: TileGraph, arrays: Sequence[jax.Array], perturb: Perturb | None):
    self.graph, self.grid, self.perturb = graph, graph.options.grid, perturb
    self.ranges = Ranges(graph)
    overhang = overhangs(graph, self.ranges)
    self.overhangs = {v: overhang.get(v, ((0, 0),) * len(_ref_type(v).shape)) for v in graph.invars} | overhang
    self.axes = frozenset().union(*map(varying_axes, arrays))
    inputs = graph.invars[:graph.num_inputs]
    self.given = {v: vary(jnp.asarray(x), self.axes) for v, x in zip(inputs, arrays, strict=True)}
    for v, x in self.given.items():
      assert (x.shape, x.dtype) == (_ref_type(v).shape, _ref_type(v).dtype), (v, x)
    # What programs say comes in their order, and once: side by side some may run twice.
    self.cells = None if speaks(graph) else partition(graph, self.ranges, self.overhangs)

  def outputs(self) -> list[jax.Array]:
    programs = math.prod(self.grid)
    side_by_side = min(programs, _SIDE_BY_SIDE_BYTES // max(1, self._program_bytes()))
    if self.cells is not None and side_by_side > 1:
      results = self._side_by_side(self.cells, programs, side_by_side)
    else:
      results = self._in_order(programs)
    return [results[v] if v in results else self._initial(v) for v in self.graph.outputs]

  def _initial(self, v: Var) -> jax.Array:
    """An output before any program has run."""
    return self.given[v] if v in self.given else self._poisoned(_ref_type(v).shape, _ref_type(v).dtype)

  def _poisoned(self, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return vary(poisoned(shape, dtype), self.axes)

  def _padded(self, refs: Iterable[Var]) -> tuple[dict[Var, Frame], dict[Var, jax.Array]]:
    """References as they are before any program, with their overhang."""
    refs = tuple(dict.fromkeys(refs))
    return ({v: padded_frame(_ref_type(v), self.overhangs[v]) for v in refs},
            {v: pad(self._initial(v), self.overhangs[v]) for v in refs})

  def _machine(self, index: jax.Array, frames: dict[Var, Frame], memory: dict[Var, jax.Array]) -> Machine:
    return Machine(self.ranges, self.overhangs, frames, self._program_ids(index), self.axes, {}, memory,
                   self.perturb)

  def _program_ids(self, index: jax.Array) -> list[jax.Array | np.ndarray]:
    """Of the `index`-th program in grid order: the last axis varies fastest."""
    ids: list[jax.Array | np.ndarray] = []
    for n in reversed(self.grid):
      ids.append(np.zeros((), np.int32) if n == 1 else index % n)
      index = index if n == 1 else index // n
    return ids[::-1]

  def _in_order(self, programs: int) -> dict[Var, jax.Array]:
    frames, memory = self._padded(self.graph.invars)
    outs = tuple(dict.fromkeys(self.graph.outputs))

    def program(index: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
      machine = self._machine(index, dict(frames), {**memory, **dict(zip(outs, arrays))})
      machine.run(self.graph.body)
      return [machine.memory[v] for v in outs]

    arrays = lax.fori_loop(np.int32(0), np.int32(programs), program, [memory[v] for v in outs])
    return {v: crop(x, self.overhangs[v]) for v, x in zip(outs, arrays)}

  def _side_by_side(self, cells: dict[Var, Cells], programs: int, at_once: int) -> dict[Var, jax.Array]:
    hulls = {v: self._hull(v, c) for v, c in cells.items()}
    before = {v: pad(self.given[v], hulls[v]) for v in cells if v in self.given}
    read_only = self._padded(v for v in self.graph.invars if v not in cells)

    def program(index: jax.Array) -> list[jax.Array]:
      ids = self._program_ids(index)
      frames, memory = dict(read_only[0]), dict(read_only[1])
      for v, own in cells.items():
        frames[v] = Frame(tuple(_origin(c, ids) for c in own), size := tuple(c.size for c in own))
        if v in before:
          at = [lo + (o.value if isinstance(o, CellOrigin) else o) for (lo, _), o in zip(hulls[v], frames[v].origin)]
          memory[v] = lax.dynamic_slice(before[v], at, size, allow_negative_indices=False)
        else:
          memory[v] = self._poisoned(size, _ref_type(v).dtype)
      machine = self._machine(index, frames, memory)
      machine.run(self.graph.body)
      return [machine.memory[v] for v in cells]

    rounds = -(-programs // at_once)
    at_once = -(-programs // rounds)
    # the last round is filled up with repetitions of the last program
    indices = jnp.minimum(jnp.arange(rounds * at_once, dtype=np.int32), np.int32(programs - 1))
    stacks = lax.map(jax.vmap(program), indices.reshape(rounds, at_once)) if rounds > 1 else jax.vmap(program)(indices)
    return {v: self._assemble(v, cells[v], x.reshape(-1, *(c.size for c in cells[v]))[:programs])
            for v, x in zip(cells, stacks)}

  def _length(self, c: Cell) -> int:
    """How far the cells of all programs reach along a dimension."""
    return c.size * math.prod(self.grid[a] for a in c.axes)

  def _hull(self, v: Var, own: Cells) -> list[tuple[int, int]]:
    """The overhang that makes the reference hold every program's cell."""
    return [(max(0, -c.lo), max(0, c.lo + self._length(c) - n)) for c, n in zip(own, _ref_type(v).shape)]

  def _assemble(self, v: Var, own: Cells, stack: jax.Array) -> jax.Array:
    """The output from every program's cell, [programs, *cell]."""
    x = stack.reshape(*self.grid, *stack.shape[1:])
    used = [a for c in own for a in c.axes]
    order = [a for a in range(len(self.grid)) if a not in used]  # of extent 1
    for d, c in enumerate(own):
      order += [*c.axes, len(self.grid) + d]
    x = x.transpose(order).reshape([self._length(c) for c in own])
    shape = _ref_type(v).shape
    first = [max(0, c.lo) for c in own]
    stop = [min(n, c.lo + self._length(c)) for c, n in zip(own, shape)]
    x = x[tuple(slice(f - c.lo, max(f, s) - c.lo) for f, s, c in zip(first, stop, own))]
    return x if x.shape == shape else lax.dynamic_update_slice(self._initial(v), x, first)

  def _program_bytes(self) -> int:
    """What one program holds at once, roughly: its buffers and cells, and the largest values."""
    types = [v.type for eqn in walk(self.graph.body) for v in eqn.outvars]
    buffers = sum(t.nbytes for t in types if isinstance(t, RefType))
    cells = sum(math.prod(c.size for c in own) * _ref_type(v).dtype.itemsize for v, own in (self.cells or {}).items())
    values = max((t.size * t.dtype.itemsize for t in types if isinstance(t, TileType)), default=0)
    return buffers + cells + 2 * values


def _ref_type(v: Var) -> RefType:
  assert isinstance(v.type, RefType)
  return v.type


def _origin(c: Cell, program_ids: Sequence[jax.Array | np.ndarray]) -> int | CellOrigin:
  if not c.axes:
    return c.lo
  terms = [jnp.asarray(program_ids[a]) * np.int32(k) for a, k in zip(c.axes, c.coefs)]
  return CellOrigin(functools.reduce(lax.add, terms, jnp.asarray(c.lo, np.int32)), c.lo)
