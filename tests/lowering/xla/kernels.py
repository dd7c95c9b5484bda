"""Traces a kernel for the xla tests, and runs it."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tiletrace.core.dtypes import canonical
from tiletrace.core.graph import CallOptions, TileGraph
from tiletrace.core.source import function_loc
from tiletrace.core.trace import Trace, trace_kernel
from tiletrace.core.types import RefType, Space
from tiletrace.lowering.xla.run import run


def traced(kernel: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any], grid: tuple[int, ...],
           aliases: dict[int, int] | None = None, **static: Any) -> TileGraph:
  """The graph of `kernel(*inputs, *outputs, **static)`; `aliases`: input -> output."""
  kernel = functools.partial(kernel, **static)
  loc = function_loc(kernel)
  assert loc is not None
  options = CallOptions(grid)
  refs: list[Any] = []

  def arguments(trace: Trace) -> list[Any]:
    types = [RefType(tuple(x.shape), canonical(x.dtype), Space.GLOBAL) for x in (*inputs, *outputs)]
    shared = {o: i for i, o in (aliases or {}).items()}
    for n, type in enumerate(types):
      out = n - len(inputs)
      refs.append(refs[shared[out]] if out in shared else trace.binder(type, loc, f"r{n}"))
      if n < len(inputs):
        refs[n].writable = n in (aliases or {})
    return refs

  body, _ = trace_kernel(kernel, arguments, name="kernel", options=options)
  return TileGraph("kernel", tuple(r.var for r in refs), tuple(f"r{n}" for n in range(len(refs))), len(inputs), body,
                   options, loc)


def run_compiled(graph: TileGraph, *arrays: Any) -> list[jax.Array]:
  """`run` under jit: one compilation instead of one for each of its operations outside the loop over programs."""
  return jax.jit(functools.partial(run, graph))(*arrays)


def call(kernel: Callable[..., Any], *inputs: Any, out: Any, grid: tuple[int, ...],
         aliases: dict[int, int] | None = None, **static: Any) -> list[np.ndarray]:
  """Traces and runs under jit. `out`: one (shape, dtype) or a list of them."""
  outs = [jax.ShapeDtypeStruct(*o) for o in (out if isinstance(out, list) else [out])]
  graph = traced(kernel, inputs, outs, grid, aliases, **static)
  return [np.asarray(x) for x in run_compiled(graph, *inputs)]
