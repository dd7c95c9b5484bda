"""Steps of pipelined loops (tt.step), run one iteration apart.

  for j in lo..hi: A(j); B(j)      becomes      if lo < hi: A(lo); for j in lo+1..hi: A(j) with B(j-1); B(hi-1)
"""
from __future__ import annotations

import dataclasses

from tiletrace.core import dtypes
from tiletrace.core.graph import Atom, Block, Eqn, Literal, TileGraph, Var, copied, expand_block, walk
from tiletrace.core.ops import control, elementwise
from tiletrace.core.ops.step import plan, step_p
from tiletrace.core.source import Loc
from tiletrace.core.types import TileType
from tiletrace.lowering.facts import Facts


def rotate(graph: TileGraph) -> TileGraph:
  """The graph whose loops with steps are rotated.

  Raises:
    ControlFlowError: see `plan`.
  """
  if not any(e.primitive is step_p for e in walk(graph.body)):
    return graph
  facts = Facts(graph)
  return graph.replace(body=expand_block(
      graph.body, lambda eqn: _rotated(eqn, facts) if eqn.primitive is control.for_loop_p else (eqn,)))


def _rotated(loop: Eqn, facts: Facts) -> list[Eqn]:
  body, (lo, hi) = loop.blocks[0], loop.values[:2]
  found = plan(body, loop.loc)
  if found is None:
    return [loop]
  (index,) = body.invars
  first, second = (*found.shared, *found.first), (*found.shared, *found.second)
  before: list[Eqn] = copied(first, {index: lo})
  start = _scalar(before, elementwise.add_p, lo, 1, loop.loc)
  inside: list[Eqn] = [*found.shared, *found.first[:found.at]]
  previous = _scalar(inside, elementwise.sub_p, index, 1, loop.loc)
  inside += [*copied(second, {index: previous}), *found.first[found.at:]]
  after: list[Eqn] = []
  last = _scalar(after, elementwise.sub_p, hi, 1, loop.loc)
  after += copied(second, {index: last})
  eqns = [*before, loop.replace(invars=(start, hi, *loop.values[2:]),
                                blocks=(dataclasses.replace(body, eqns=tuple(inside)),)), *after]
  if facts.certainly_runs(loop):
    return eqns
  runs: list[Eqn] = []
  condition = _scalar(runs, elementwise.lt_p, lo, hi, loop.loc, control.PREDICATE)
  return [*runs, Eqn(control.cond_p, (condition,), (), {}, loop.loc, (Block((), tuple(eqns)),))]


def _scalar(out: list[Eqn], primitive, x: Atom, y: Atom | int, loc: Loc, type: TileType = control.INDEX) -> Var:
  y = Literal(y, dtypes.i32) if isinstance(y, int) else y
  out.append(Eqn(primitive, (x, y), (result := Var(type),), {}, loc))
  return result
