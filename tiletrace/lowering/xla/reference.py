"""A kernel's results as jax ops on this CPU, as numpy arrays: what other machines' results are compared with."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from tiletrace.core.graph import TileGraph
from tiletrace.lowering.xla.perturb import perturbation
from tiletrace.lowering.xla.run import run


def reference(graph: TileGraph, seed: int | None = None) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
  """The kernel as a function of arrays, compiled once, whatever jax's default device and settings are.

  Args:
    graph: of level 1.
    seed: of `perturb.perturbation`; None: nothing is moved.
  Raises (the function, when it is called first):
    LoweringError: an equation is of level 0.
  """
  perturb = None if seed is None else perturbation(seed)
  compiled = jax.jit(lambda *arrays: run(graph, *arrays, perturb=perturb))
  types = [v.type for v in graph.invars]
  wide = any(t.dtype.itemsize == 8 for t in types)  # type: ignore[union-attr]

  def call(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    (cpu, *_) = jax.local_devices(backend="cpu")
    # unwritten elements are NaN on purpose
    with jax.default_device(cpu), jax.debug_nans(False), jax.debug_infs(False), jax.enable_x64(wide):
      return [np.asarray(x) for x in compiled(*arrays)]

  return call
