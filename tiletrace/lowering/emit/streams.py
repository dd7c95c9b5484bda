"""Which inputs stream through a kernel: caches keep nothing of them that is read again."""
from __future__ import annotations

import collections

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Block, TileGraph, Var, walk
from tiletrace.core.rules import effects

_OWN = frozenset({"program_id", "cta_id"})


def streamed_inputs(graph: TileGraph) -> frozenset[Var]:
  """Inputs that one equation reads, at a place that depends on the program."""
  reads = collections.Counter(e.refs[x.operand].root for e in walk(graph.body) if not e.blocks for x in effects(e)
                              if isinstance(x, RefEffect) and x.access is Access.READ)
  own = _own_values(graph.body, set())
  placed = {r.root for e in walk(graph.body) for r in e.refs if any(d in own for d in r.dyn)}
  return frozenset(v for v in graph.invars[:graph.num_inputs] if reads[v] == 1 and v in placed)


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
