"""Batching: one more grid axis, and one more dimension on the references that have one, for jax.vmap.

The new axis is the first and slowest of the grid, so the raster of the last two and the kernel's own order stay; its
program id indexes the new leading dimension of each batched reference. What the kernel sees does not change: its
program_id(a) becomes program_id(a + 1), and views keep their shape.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from tiletrace.core import dtypes
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import (
  Atom,
  Block,
  Eqn,
  Primitive,
  RefOperand,
  TileGraph,
  Var,
  map_block,
  prefixed,
  substitute,
  walk,
  with_refs,
)
from tiletrace.core.ops.grid import cta_id_p, num_ctas_p, program_id_p
from tiletrace.core.types import RefType, TileType

_LAUNCH: tuple[Primitive, ...] = (cta_id_p, num_ctas_p)


def batch(graph: TileGraph, size: int, batched: Sequence[bool]) -> TileGraph:
  """The graph that runs `graph` once for each of `size` examples.

  Args:
    graph: a traced kernel.
    size: extent of the new grid axis and of the new leading dimensions.
    batched: for each of `graph.invars`, whether it gets the dimension; both of an aliased pair, or none. Every output
      must: two examples may not write one array.
  Returns:
    a graph whose grid is (size, *graph.options.grid).
  Raises:
    LoweringError: the kernel reads the launch itself (cta_id, num_ctas), so its programs are not the grid's.
  """
  assert all(batched[graph.num_inputs:]), batched
  for eqn in walk(graph.body):
    if eqn.primitive in _LAUNCH:
      raise LoweringError(f"{graph.name} cannot be batched: it distributes its work over the launch by itself",
                          loc=eqn.loc, hint="use tt.program_id and tile_call's persistent=True, or jax.lax.map")
  new = {v: Var(_with_dimension(v, size), v.hint) for v, b in zip(graph.invars, batched, strict=True) if b}
  example = Var(TileType((), dtypes.i32), "example")
  first = Eqn(program_id_p, (), (example,), {"axis": 0}, graph.loc)
  body = map_block(graph.body, functools.partial(_batch_eqn, new=new, example=example))
  body = _renamed(dataclasses.replace(body, eqns=(first, *body.eqns)), new)
  return graph.replace(invars=tuple(new.get(v, v) for v in graph.invars), body=body,
                       options=dataclasses.replace(graph.options, grid=(size, *graph.options.grid)))


def _with_dimension(var: Var, size: int) -> RefType:
  assert isinstance(var.type, RefType)
  return dataclasses.replace(var.type, shape=(size, *var.type.shape))


def _batch_eqn(eqn: Eqn, *, new: dict[Var, Var], example: Var) -> Eqn:
  if eqn.primitive is program_id_p:
    return eqn.replace(params={"axis": eqn.params["axis"] + 1})
  if not any(r.root in new for r in eqn.refs):
    return eqn
  return with_refs(eqn, [_of_example(r, example) if r.root in new else r for r in eqn.refs])


def _of_example(ref: RefOperand, example: Var) -> RefOperand:
  view, lead = prefixed(ref.view, example)
  return RefOperand(ref.root, view, (*lead, *ref.dyn))


def _renamed(body: Block, new: dict[Var, Var]) -> Block:
  names: dict[Var, Atom] = {**new}
  return dataclasses.replace(substitute(body, names), invars=tuple(new.get(v, v) for v in body.invars))
