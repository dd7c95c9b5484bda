"""Results of simulated launches against the same kernel as jax ops, by the table of tolerances.

The two are made from one TileGraph by two back ends that share nothing below it, so where they differ one is wrong.
They may differ by twice the tolerance, since either is as far as that from exact results. What differs more is held
against the kernel's own sensitivity: as jax ops with every rounded operation moved by a few units in the last place
(`lowering.xla.perturb`). An output that then changes in as many places and by as much is ill-conditioned, and not
judged.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from tiletrace.core.dtypes import f16, is_float
from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import TileGraph, Var, walk
from tiletrace.core.ops.mma import gemm_p
from tiletrace.core.rules import effects
from tiletrace.core.source import Loc
from tiletrace.lowering.pipeline import Lowering
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.xla.buffer import poison
from tiletrace.lowering.xla.perturb import SUMS, rounds
from tiletrace.lowering.xla.reference import reference
from tiletrace.sim.faults import Difference, Fault, Place
from tiletrace.sim.program import Program
from tiletrace.sim.tolerances import bounds

MOST_ELEMENTS = 1 << 24          # of a launch's operands and results together
_SEEDS = (1, 2)                  # of how rounded operations are moved
_MORE_PLACES, _FARTHER = 2, 4    # than under those seeds: wrong
_STORES = frozenset({isa.ST_GLOBAL, isa.ST_GLOBAL_HINT, isa.TMA_STORE, isa.TMA_STORE_HINT, isa.BULK_STORE})


def kind_of(graph: TileGraph) -> str:
  """The kind of computation (tolerances.py) of a kernel's floating-point results: the least accurate that it has."""
  found = {e.primitive.name for e in walk(graph.body) if rounds(e)}
  if any(e.primitive is gemm_p and e.refs[-1].type.dtype == f16 for e in walk(graph.body)):
    return "f16_gemm"
  return "gemm" if gemm_p.name in found else "reduce" if found & SUMS else "elementwise" if found else "exact"


def unwritten(got: np.ndarray, want: np.ndarray) -> np.ndarray:
  """Where both have what they put into outputs at first (floats: NaN, written or not). That is the same for unsigned
  integers, and may have been written: nothing is marked there."""
  if is_float(want.dtype):
    return np.isnan(got) & np.isnan(want)
  if want.dtype.kind == "u":
    return np.zeros(want.shape, bool)
  ones = (got.reshape(-1).view(np.uint8).reshape(*got.shape, got.itemsize) == 0xFF).all(axis=-1)
  return ones & (want == poison(want.dtype))


def difference(output: str, got: np.ndarray, want: np.ndarray, kind: str) -> Difference | None:
  """Of two arrays of one shape and dtype; integers and bools are compared exactly. None: there is none."""
  assert (got.shape, got.dtype) == (want.shape, want.dtype), (got, want)
  with np.errstate(all="ignore"):
    allowed = 2 * bounds(want, want.dtype, kind if is_float(want.dtype) else "exact")
    errors = np.abs(got.astype(np.float64) - want.astype(np.float64))
    differs = (got != want) & ~(errors <= allowed) & ~unwritten(got, want)
  if not differs.any():
    return None
  errors = np.where(np.isnan(errors), math.inf, errors)
  first = np.unravel_index(np.argmax(differs), differs.shape)
  return Difference(output, got.shape, want.dtype.name, int(differs.sum()), tuple(map(int, first)), _number(got[first]),
                    _number(want[first]), float(allowed[first]), float(errors[differs].max()))


def _number(x: np.generic) -> int | float:
  return float(x) if is_float(x.dtype) else int(x)


class Comparison:
  """The results of one kernel against those as jax ops.

  Args:
    lowering: what was simulated.
    graph: what was traced.
  """

  def __init__(self, lowering: Lowering, graph: TileGraph):
    self._lowering, self._graph, self._kind = lowering, graph, kind_of(graph)
    self._names = graph.arg_names[graph.num_inputs:]
    self._compiled: dict[int | None, Callable[[Sequence[np.ndarray]], list[np.ndarray]]] = {}

  def why_not(self) -> str | None:
    """Why results of this kernel are not compared, or None."""
    if any(e.primitive.level == 0 for e in walk(self._graph.body)):
      return "results are not compared: plain jax ops have no explicit orchestration"
    size = sum(math.prod(v.type.shape) for v in self._graph.invars)  # type: ignore[union-attr]
    if size > MOST_ELEMENTS:
      return f"results are not compared: {size} elements of operands and results, the limit is {MOST_ELEMENTS}"
    return None

  def compare(self, inputs: Sequence[np.ndarray], launches: Sequence[Sequence[np.ndarray]]
              ) -> tuple[list[Fault], list[str]]:
    """What is wrong with the outputs of launches that had the same inputs, and notes of what was not judged."""
    try:
      wanted = self._as_jax(inputs)
    except LoweringError as e:
      return [], [f"results are not compared: {e}"]
    faults, notes = [], []
    for outputs in launches:
      for i, (name, got, want) in enumerate(zip(self._names, outputs, wanted, strict=True)):
        found = difference(name, got, want, self._kind)
        if found is not None and self._ill_conditioned(i, found, inputs, want):
          notes.append(f"{found.count} of {got.size} elements of {name} differ from jax ops, by at most "
                       f"{found.error:.3g}, and are not judged: rounding alone changes as many by as much")
        elif found is not None:
          faults.append(self._fault(i, found))
        if count := int(unwritten(got, want).sum()):
          notes.append(f"{count} of {got.size} elements of {name} are not compared: "
                       f"unwritten{' or NaN' if is_float(got.dtype) else ''} in both")
    return faults, notes

  def _as_jax(self, inputs: Sequence[np.ndarray], seed: int | None = None) -> list[np.ndarray]:
    if seed not in self._compiled:
      self._compiled[seed] = reference(self._graph, seed)
    return self._compiled[seed](inputs)

  def _ill_conditioned(self, i: int, found: Difference, inputs: Sequence[np.ndarray], want: np.ndarray) -> bool:
    moved = [difference(found.output, self._as_jax(inputs, seed)[i], want, self._kind) for seed in _SEEDS]
    return (found.count <= _MORE_PLACES * max(m.count if m else 0 for m in moved)
            and found.error <= _FARTHER * max(m.error if m else 0.0 for m in moved))

  def _fault(self, i: int, found: Difference) -> Fault:
    stores = _stores(self._lowering.graph, self._lowering.graph.outputs[i])
    places = [p for p in (_place(self._lowering, loc) for loc in stores) if p is not None]
    text = str(found) if len(stores) < 2 else f"{found}; stored at {', '.join(loc.short() for loc in stores)}"
    return Fault("wrong result", self._graph.name, None, text, places[0] if places else None, difference=found)


def _stores(graph: TileGraph, output: Var) -> list[Loc]:
  """The lines that write an output, each once."""
  locs = [e.loc for e in walk(graph.body) if not e.blocks for x in effects(e)
          if isinstance(x, RefEffect) and x.access is Access.WRITE and e.refs[x.operand].root is output]
  return list({_key(loc): loc for loc in locs}.values())


def _key(loc: Loc) -> tuple:
  return loc.filename, dataclasses.astuple(loc.span)


def _place(lowering: Lowering, loc: Loc) -> Place | None:
  """The first instruction that stores to global memory for a line of the kernel."""
  for op in Program(lowering.emitted.module).ops:
    if op.inst.row in _STORES and op.inst.loc is not None and _key(op.inst.loc) == _key(loc):
      return op.place
  return None
