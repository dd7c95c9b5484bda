"""Prefetches that a kernel begins with: all threads of a CTA make them, before any role, and with overlapping launches
before the kernel before has ended."""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import Block, Eqn, TileGraph, Var, copied
from tiletrace.core.ops.barrier import alloc_barrier_p
from tiletrace.core.ops.memory import alloc_p
from tiletrace.core.ops.prefetch import prefetch_p
from tiletrace.core.rules import effects
from tiletrace.lowering.schedule.builder import Builder
from tiletrace.lowering.schedule.grid import place_on_grid


def leading(block: Block) -> int:
  """How many equations a block begins with that prefetch, or do no more than compute for it."""
  count = 0
  for i, eqn in enumerate(block.eqns):
    if eqn.primitive is prefetch_p:
      count = i + 1
    elif eqn.blocks or (effects(eqn) and eqn.primitive not in (alloc_p, alloc_barrier_p)):
      break
  return count


def take_leading(graph: TileGraph) -> tuple[list[Eqn], TileGraph]:
  """(the leading prefetches of one program with what they need, as level-0 equations; the graph without them). Of
  persistent kernels they stay where they are: a CTA makes those of its next program when it comes to it."""
  if graph.options.persistent:
    return [], graph
  found = graph.body.eqns[:leading(graph.body)]
  wanted = [e for e in found if e.primitive is prefetch_p]
  needed: set[Var] = set()
  kept: list[Eqn] = []
  for eqn in reversed(found):
    if eqn in wanted or needed & set(eqn.outvars):
      kept.insert(0, eqn)
      needed |= {a for a in eqn.invars if isinstance(a, Var)}
  rest = dataclasses.replace(graph.body, eqns=tuple(e for e in graph.body.eqns if e not in set(wanted)))
  placed = place_on_grid(Block((), tuple(copied(kept, {})), ()), graph.options, Builder(graph.loc))
  return list(placed.eqns), graph.replace(body=rest)
