"""Many functions in one kernel, each compared with itself on arrays: a compilation for a whole table."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import tiletrace as tt
from tests.tolerances import assert_close
from tiletrace.lowering import pipeline

# name -> (function, its operands)
Table = Mapping[str, tuple[Any, ...]]


def check(table: Table, backend: str, close: Callable[[str, np.ndarray, np.ndarray], None] | None = None) -> None:
  """Every result of every function, as `tt.call_jax` gives it on a backend and as jax gives it; what the simulator
  runs is assembled, too. `close` compares one result; by default as a reduction."""
  arrays = list({id(x): x for _, *xs in table.values() for x in xs}.values())
  place = {id(x): i for i, x in enumerate(arrays)}
  rows = [(name, fn, [place[id(x)] for x in xs]) for name, (fn, *xs) in table.items()]
  wants = jax.jit(lambda *given: [fn(*(given[i] for i in at)) for _, fn, at in rows])(*arrays)
  names = [name for (name, *_), want in zip(rows, wants, strict=True) for _ in jax.tree.leaves(want)]
  flat = [np.asarray(x) for x in jax.tree.leaves(wants)]

  def kernel(*refs):
    outputs = iter(refs[len(arrays):])
    for _, fn, at in rows:
      for out in jax.tree.leaves(tt.call_jax(fn, *(refs[i][...] for i in at))):
        next(outputs)[...] = out

  types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat]
  if backend == "sim":
    lowered = tt.tile_call(kernel, types, grid=1).lower(*arrays)
    assert not pipeline.assemble(lowered.lowering).spill_stores
    results = lowered.simulate(*arrays)
  else:
    results = tt.tile_call(kernel, types, grid=1, backend=backend)(*arrays)
  for name, got, want in zip(names, results, flat, strict=True):
    (close or _as_a_reduction)(name, np.asarray(got), want)


def _as_a_reduction(name: str, got: np.ndarray, want: np.ndarray) -> None:
  assert_close(got, want, "exact" if want.dtype.kind in "biu" else "reduce", name)
