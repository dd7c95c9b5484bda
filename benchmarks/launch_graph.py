"""Peers of the harness that the host does not slow down: every set of inputs in one CUDA graph, launched without JAX.

A jitted program that calls a kernel for each of its inputs costs the host 10 to 25 us a call, graphs of XLA's included:
its arguments are flattened, and its results allocated, at each call. Kernels that are faster are measured here.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tiletrace.ffi import launch
from tiletrace.ffi.image import KernelImage

LEAST = 48        # launches of a graph, so that the start of one does not count

Inputs = tuple[jax.Array, ...]


class LaunchGraph:
  """`enqueue(i, stream)` for each of `count` sets of inputs, all of them as often as `repeats` says."""

  def __init__(self, enqueue: Callable[[int, int], Any], count: int, repeats: int):
    self.graph = launch.Graph(lambda stream: [enqueue(i, stream) for _ in range(repeats) for i in range(count)])

  def __call__(self, sets: Any) -> LaunchGraph:
    self.graph()
    return self

  def block_until_ready(self) -> LaunchGraph:
    """What jax.block_until_ready calls."""
    self.graph.synchronize()
    return self


def repeated(sets: Sequence[Inputs]) -> list[Inputs]:
  """The sets as the harness counts them: as often as the graphs below run each."""
  return [*sets] * repeats_of(sets)


def repeats_of(sets: Sequence[Any]) -> int:
  return -(-LEAST // len(sets))


def kernel_graph(image: KernelImage, sets: Sequence[Inputs], out_shape: Any, repeats: int | None = None
                 ) -> tuple[LaunchGraph, list[launch.Buffer]]:
  """A kernel on each set, and its results, which are poisoned before it runs.

  Args:
    repeats: of all the sets; by default so many that the start of a graph does not count.
  """
  jax.block_until_ready(list(sets))
  launcher = launch.Launcher(image)
  outs = [launch.empty(tuple(out_shape.shape), out_shape.dtype) for _ in sets]

  def enqueue(i: int, stream: int) -> None:
    launcher(*(x.unsafe_buffer_pointer() for x in sets[i]), outs[i].pointer, stream=stream)

  return LaunchGraph(enqueue, len(sets), repeats_of(sets) if repeats is None else repeats), outs


def copy_graph(arrays: Sequence[jax.Array]) -> LaunchGraph:
  """The driver's copy of each array."""
  jax.block_until_ready(list(arrays))
  outs = [launch.Buffer((x.nbytes,), np.uint8) for x in arrays]

  def enqueue(i: int, stream: int) -> None:
    launch.copy(outs[i].pointer, arrays[i].unsafe_buffer_pointer(), arrays[i].nbytes, stream=stream)

  return LaunchGraph(enqueue, len(arrays), repeats_of(arrays))
