"""Which loads may take the read-only path, and which of those pass by L1, which would keep nothing that is read again.

What two equations read stays with ordinary loads: ptxas takes two read-only loads of one address for one, unrolls the
loops that they stand in to see it, and keeps whole arrays in registers.
"""
from __future__ import annotations

import collections

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Block, TileGraph, Var, walk
from tiletrace.core.rules import effects

_OWN = frozenset({"program_id", "cta_id"})


def cache_hints(graph: TileGraph) -> dict[Var, dict[str, str]]:
  """Modifiers of loads (PTX ISA 9.7.9, ld.global.nc) of the inputs that no program writes and one equation reads: past
  L1 where the place depends on the program. That is for accesses of whole sectors."""
  reads = collections.Counter(e.refs[x.operand].root for e in walk(graph.body) if not e.blocks for x in effects(e)
                              if isinstance(x, RefEffect) and x.access is Access.READ)
  own = _own_values(graph.body, set())
  placed = {r.root for e in walk(graph.body) for r in e.refs if any(d in own for d in r.dyn)}
  constant = [v for v in graph.invars[:graph.num_inputs] if reads[v] == 1 and v not in graph.outputs]
  return {v: {"nc": "nc", "l1": "L1::no_allocate"} if v in placed else {"nc": "nc"} for v in constant}


def _own_values(block: Block, own: set) -> set:
  """What is computed from the program's index, this block's and those inside it."""
  for eqn in block.eqns:
    depends = eqn.primitive.name in _OWN or any(a in own for a in eqn.values if isinstance(a, Var))
    for inner in eqn.blocks:
      if depends:
        own.update(inner.invars)
      _own_values(inner, own)
    if depends or any(a in own for b in eqn.blocks for a in b.outs if isinstance(a, Var)):
      own.update(eqn.outvars)
  return own
