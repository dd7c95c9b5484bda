"""What the GPU takes for a call by the profiler, for calls that are shorter than what the host needs to make them."""
from __future__ import annotations

import pathlib
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax

CALLS = 32


def gpu_seconds(fn: Callable[..., Any], sets: Sequence[tuple[jax.Array, ...]]) -> float:
  """The kernels of one call of jit(fn), gaps between them excluded; the inputs take turns.

  Raises:
    RuntimeError: the profiler saw no kernel.
  """
  compiled = jax.jit(fn)
  for inputs in sets:
    jax.block_until_ready(compiled(*inputs))
  with tempfile.TemporaryDirectory() as directory:
    with jax.profiler.trace(directory):
      jax.block_until_ready([compiled(*sets[i % len(sets)]) for i in range(CALLS)])
    spans = defaultdict(list)
    for path in pathlib.Path(directory).rglob("*.xplane.pb"):
      for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines if "GPU" in plane.name else ():
          for event in line.events if (line.name or "").startswith("Stream") else ():
            spans[event.name].append(event.duration_ns)
  if not spans:
    raise RuntimeError("the profiler saw no kernel")
  return 1e-9 * sum(statistics.median(times) * round(len(times) / CALLS) for times in spans.values())
