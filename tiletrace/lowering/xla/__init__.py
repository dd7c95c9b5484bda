"""The other backend: a TileGraph as plain jax operations (run.py). Importing it registers every family's rules."""
from __future__ import annotations

from tiletrace.lowering.xla import (
  control,
  cumulative,
  debug,
  elementwise,
  gather,
  grid,
  memory,
  mma,
  prefetch,
  profile,
  reduce,
  shape,
  transcendental,
)

__all__ = [
  "control", "cumulative", "debug", "elementwise", "gather", "grid", "memory", "mma", "prefetch", "profile", "reduce",
  "shape", "transcendental",
]
