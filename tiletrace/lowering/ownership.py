"""Which warpgroups own the values of an equation, and whether the author wrote the roles."""
from __future__ import annotations

from tiletrace.core.graph import Block, Eqn, TileGraph, walk


def is_explicit(graph: TileGraph) -> bool:
  """The author wrote roles: the scheduler invents none."""
  return any(e.primitive.name == "warpgroup" for e in walk(graph.body))


def role_sizes(graph: TileGraph) -> dict[Eqn, int]:
  """For each equation, how many warpgroups own its values: those of its role, or all that compute."""
  sizes: dict[Eqn, int] = {}

  def visit(block: Block, count: int) -> None:
    for eqn in block.eqns:
      sizes[eqn] = count
      inner = eqn.params["count"] if eqn.primitive.name == "warpgroup" else count
      for b in eqn.blocks:
        visit(b, inner)

  visit(graph.body, graph.options.warpgroups)
  return sizes
