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
  Literal,
  RefOperand,
  TileGraph,
  Var,
  map_block,
  prefixed,
  walk,
  with_refs,
)
from tiletrace.core.ops.elementwise import add_p, mul_p
from tiletrace.core.ops.grid import cta_id_p, num_ctas_p, program_id_p
from tiletrace.core.simplify import static_views
from tiletrace.core.types import Dyn, RefType, TileType, ViewDim

_I32 = TileType((), dtypes.i32)


def batch(graph: TileGraph, size: int, batched: Sequence[bool], *, max_rank: int) -> TileGraph:
  """The graph that runs `graph` once for each of `size` examples.

  Args:
    graph: a traced kernel.
    size: extent of the new grid axis and of the new leading dimensions.
    batched: for each of `graph.invars`, whether it gets the dimension; both of an aliased pair, or none. Every output
      must: two examples may not write one array.
    max_rank: where the new dimension would be one too many, it is merged with the first, [size * n, ...], if all
      accesses index that by the same program ids (as they do in a graph that `batch` made).
  Returns:
    a graph whose grid is (size, *graph.options.grid).
  Raises:
    LoweringError: the kernel reads the launch itself (cta_id, num_ctas), so its programs are not the grid's.
  """
  assert all(batched[graph.num_inputs:]), batched
  for eqn in walk(graph.body):
    if eqn.primitive in (cta_id_p, num_ctas_p):
      raise LoweringError(f"{graph.name} cannot be batched: it distributes its work over the launch by itself",
                          loc=eqn.loc, hint="use tt.program_id and tile_call's persistent=True, or jax.lax.map")
  return _Batching(graph, size, max_rank).graph(dict.fromkeys(v for v, b in zip(graph.invars, batched) if b))


@dataclasses.dataclass(frozen=True, slots=True)
class _Wider:
  """The reference of all examples: `index` selects along its first dimension, which is new or merged with the old."""
  root: Var
  index: Var
  merged: bool

  def ref(self, ref: RefOperand) -> RefOperand:
    """The access of one example."""
    if not self.merged:
      view, lead = prefixed(ref.view, self.index)
      return RefOperand(self.root, view, (*lead, *ref.dyn))
    first = ViewDim(Dyn(len(ref.dyn)), 1, squeezed=True)
    view = dataclasses.replace(ref.view, dims=(first, *ref.view.dims[1:]))
    return RefOperand(self.root, view, (*ref.dyn, self.index))


class _Batching:

  def __init__(self, graph: TileGraph, size: int, max_rank: int):
    self._old, self._size, self._max_rank = graph, size, max_rank
    self._example = Var(_I32, "example")
    self._definitions = {v: e for e in graph.body.eqns for v in e.outvars}
    self._rows: dict[Var, Var] = {}      # the index of a dimension -> that of the merged one

  def graph(self, roots: dict[Var, None]) -> TileGraph:
    """`roots`: the references that get the dimension."""
    old = self._old
    wider = {root: self._wider(root) for root in roots}
    body = map_block(old.body, functools.partial(_eqn, wider=wider))
    eqns = [Eqn(program_id_p, (), (self._example,), {"axis": 0}, old.loc)]
    for eqn in body.eqns:
      eqns.append(eqn)
      for var in eqn.outvars:
        eqns += self._row_eqns(var)

    def new(vars: tuple[Var, ...]) -> tuple[Var, ...]:
      return tuple(wider[v].root if v in wider else v for v in vars)

    cluster = None if old.options.cluster is None else (1, *old.options.cluster)
    return old.replace(invars=new(old.invars), body=Block(new(body.invars), tuple(eqns), body.outs),
                       options=dataclasses.replace(old.options, grid=(self._size, *old.options.grid), cluster=cluster))

  def _wider(self, root: Var) -> _Wider:
    assert isinstance(root.type, RefType)
    shape = root.type.shape
    index = self._first_index(root) if len(shape) == self._max_rank else None
    first = (self._size,) if index is None else (self._size * shape[0],)
    type_ = dataclasses.replace(root.type, shape=(*first, *shape[index is not None:]))
    row = self._example if index is None else self._rows.setdefault(index, Var(_I32, "row"))
    return _Wider(Var(type_, root.hint), row, index is not None)

  def _first_index(self, root: Var) -> Var | None:
    """What every access indexes the first dimension by, if that runs over its whole extent and no further."""
    refs = [r for e in walk(self._old.body) for r in e.refs if r.root is root]
    starts = {r.dyn[s.index] if isinstance(s := r.view.dims[0].start, Dyn) else None for r in refs}
    index = next(iter(starts), None)
    first = [r.view.dims[0] for r in refs]
    if len(starts) != 1 or not isinstance(index, Var) or any(d.edges or not d.squeezed for d in first):
      return None
    return index if self._extent(index) == refs[0].type.shape[0] else None

  def _extent(self, atom: Atom) -> int | None:
    """n where the scalar takes the values 0 to n - 1: a program id, or id * k + (0 to k - 1)."""
    eqn = self._definitions.get(atom) if isinstance(atom, Var) else None
    if eqn is None:
      return None
    if eqn.primitive is program_id_p:
      return self._old.options.grid[eqn.params["axis"]]
    if eqn.primitive is not add_p:
      return None
    product, rest = eqn.values
    factor = self._definitions.get(product) if isinstance(product, Var) else None
    if factor is None or factor.primitive is not mul_p or not isinstance(factor.values[1], Literal):
      return None
    outer, k = self._extent(factor.values[0]), int(factor.values[1].value)
    return outer * k if outer is not None and self._extent(rest) == k else None

  def _row_eqns(self, index: Var) -> list[Eqn]:
    """row = example * n + index, after the equation that binds `index`."""
    if index not in self._rows:
      return []
    start = Var(_I32)
    n = Literal(self._extent(index), dtypes.i32)  # type: ignore[arg-type]
    return [Eqn(mul_p, (self._example, n), (start,), {}, self._old.loc),
            Eqn(add_p, (start, index), (self._rows[index],), {}, self._old.loc)]


def _eqn(eqn: Eqn, *, wider: dict[Var, _Wider]) -> Eqn:
  if eqn.primitive is program_id_p:
    return eqn.replace(params={"axis": eqn.params["axis"] + 1})
  if not any(r.root in wider for r in eqn.refs):
    return eqn
  return static_views(with_refs(eqn, [wider[r.root].ref(r) if r.root in wider else r for r in eqn.refs]))
