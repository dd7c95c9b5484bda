"""Which loads may take the read-only path (PTX ISA 9.7.9, ld.global.nc).

What two equations read stays with ordinary loads: ptxas takes two read-only loads of one address for one, unrolls the
loops that they stand in to see it, and keeps whole arrays in registers. No load is kept out of L1: `L1::no_allocate`
made norms 3 to 5 % slower on an H200. Kernels whose launches overlap have no read-only loads: they are alive while the
kernel before them writes what they read.
"""
from __future__ import annotations

import collections

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import TileGraph, Var, walk
from tiletrace.core.rules import effects


def cache_hints(graph: TileGraph) -> dict[Var, dict[str, str]]:
  """Modifiers of loads of the inputs that no program writes and one equation reads."""
  reads = collections.Counter(e.refs[x.operand].root for e in walk(graph.body) if not e.blocks for x in effects(e)
                              if isinstance(x, RefEffect) and x.access is Access.READ)
  return {v: {"nc": "nc"} for v in graph.invars[:graph.num_inputs] if reads[v] == 1 and v not in graph.outputs}
