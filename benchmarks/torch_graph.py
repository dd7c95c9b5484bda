"""A function of torch as a peer of the harness: every set of inputs in one CUDA graph."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any


class TorchGraph:
  """Calls `function(*tensors)` for each set of tensors, once to warm up and then from a CUDA graph."""

  def __init__(self, function: Callable[..., Any], sets: Sequence[Sequence[Any]]):
    self.torch = importlib.import_module("torch")
    side = self.torch.cuda.Stream()
    with self.torch.cuda.stream(side):
      for tensors in sets:
        function(*tensors)
    self.torch.cuda.synchronize()
    self.graph = self.torch.cuda.CUDAGraph()
    with self.torch.cuda.graph(self.graph):
      self.outputs = [function(*tensors) for tensors in sets]

  def __call__(self, sets: Any) -> TorchGraph:
    self.graph.replay()
    return self

  def block_until_ready(self) -> None:
    """What jax.block_until_ready calls."""
    self.torch.cuda.synchronize()
