"""A graph of dynamic shapes as the graph of one call: each Size is a number."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.graph import Atom, Block, Eqn, Literal, TileGraph, Var, map_block, substitute
from tiletrace.core.ops.grid import size_p
from tiletrace.core.types import Dyn, RefType, Size, View, extent_at


def specialise(graph: TileGraph, sizes: Mapping[str, int]) -> TileGraph:
  """The graph with the names of dynamic dimensions, and of the grid's axes, replaced by `sizes`."""
  env: dict[Var, Atom] = {}
  for var in dict.fromkeys(graph.invars):
    assert isinstance(var.type, RefType)
    shape = tuple(extent_at(n, sizes) for n in var.type.shape)
    if shape != var.type.shape:
      env[var] = Var(dataclasses.replace(var.type, shape=shape), var.hint)
  invars = tuple(env.get(v, v) for v in graph.invars)
  body = substitute(_numbers(map_block(graph.body, lambda e: _views(e, sizes)), sizes, env), env)
  options = dataclasses.replace(graph.options, grid=tuple(extent_at(n, sizes) for n in graph.options.grid))
  return graph.replace(invars=invars, body=dataclasses.replace(body, invars=invars if body.invars else ()),
                       options=options)


def _numbers(block: Block, sizes: Mapping[str, int], env: dict[Var, Atom]) -> Block:
  """The block without the equations that give sizes: their results go to `env`."""
  eqns: list[Eqn] = []
  for eqn in block.eqns:
    if eqn.primitive is size_p:
      env[eqn.outvars[0]] = Literal(eqn.params["size"].at(sizes), dtypes.i32)
    else:
      eqns.append(eqn.replace(blocks=tuple(_numbers(b, sizes, env) for b in eqn.blocks)) if eqn.blocks else eqn)
  return dataclasses.replace(block, eqns=tuple(eqns))


def _views(eqn: Eqn, sizes: Mapping[str, int]) -> Eqn:
  views = eqn.params.get("views", ())
  if not any(isinstance(d.size, Size) for v in views for d in v.dims):
    return eqn
  return eqn.replace(params={**eqn.params, "views": tuple(_view(v, sizes) for v in views)})


def _view(view: View, sizes: Mapping[str, Any]) -> View:
  dims = (d if isinstance(d.size, Dyn) else dataclasses.replace(d, size=extent_at(d.size, sizes)) for d in view.dims)
  return dataclasses.replace(view, dims=tuple(dims))
