"""The result of scheduling: a level-0 graph with its shared memory, and what the report says of it."""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import TileGraph, Var
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.target import Target


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Program:
  """A kernel that could have been written by hand at level 0.

  Attributes:
    layouts: of every distributed value, fragment and shared buffer.
    offsets: byte offset in dynamic shared memory of each shared buffer and barrier array.
    threads: of a CTA. smem_bytes: dynamic shared memory of a CTA.
    notes: report lines: rings, roles, lost overlaps, conversions.
  """
  graph: TileGraph
  layouts: dict[Var, Layout]
  offsets: dict[Var, int]
  target: Target
  threads: int
  smem_bytes: int
  notes: tuple[str, ...]
