"""Where the CTAs of a kernel that is persistent="dynamic" take their programs from: a counter in global memory, one
more argument that the kernel reads and writes.

It is zero when a launch begins. Each launch has its own, since two of one kernel may run at the same time, so the
counter is no variable of the module.
"""
from __future__ import annotations

import dataclasses

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import TileGraph, Var, walk
from tiletrace.core.types import RefType, Space
from tiletrace.lowering.ownership import is_explicit

NAME = "programs_taken"


@dataclasses.dataclass(frozen=True, slots=True)
class Counter:
  """The operand; nobody reads the result."""

  @property
  def report(self) -> None:
    return None

  def empty(self) -> np.ndarray:
    return np.zeros(1, np.int32)


def with_counter(graph: TileGraph) -> tuple[TileGraph, Counter | None]:
  """The graph with the counter as its last input and last output, where its programs are taken dynamically.

  Raises:
    LoweringError: the author's roles have a tile loop of their own.
  """
  if not graph.options.takes_tiles:
    return graph, None
  if is_explicit(graph):
    role = next(e for e in walk(graph.body) if e.primitive.name == "warpgroup")
    raise LoweringError(f'{graph.name} has roles of its own, and persistent="dynamic" loops over the programs for '
                        "kernels that have none", loc=role.loc,
                        hint="persistent=True, and write the loop: over tt.cta_id() and tt.num_ctas(), or over what "
                             "tt.atomic_add gives of an array of yours")
  return graph.with_hidden(Var(RefType((1,), dtypes.i32, Space.GLOBAL), NAME), NAME, graph.body), Counter()


def counter_of(graph: TileGraph) -> Var:
  """The counter of a graph that has one."""
  found = graph.invars[graph.num_inputs - 1]
  assert graph.options.takes_tiles and found.hint == NAME, found
  return found
