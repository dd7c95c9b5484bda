"""From the logical grid to the launch: program ids as arithmetic, the raster, the persistent tile loop."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Atom, Block, CallOptions, Eqn, TileGraph, Var, substitute, walk
from tiletrace.core.ops import elementwise, grid as ops
from tiletrace.core.types import Extent, Size
from tiletrace.lowering.schedule.builder import Builder, i32
from tiletrace.lowering.schedule.tiles import Taking, tile_loop


def raster_ids(b: Builder, tile: Atom, grid: tuple[Extent, ...], raster: int | None) -> list[Atom]:
  """The program ids of the `tile`-th program: last axis fastest, or tt.raster's grouped order of the last two axes."""
  ids: list[Atom] = []
  rest = tile
  if raster is not None:
    if len(grid) < 2:
      raise LoweringError(f"raster={raster} groups rows of a two-dimensional grid, the grid is {grid}", loc=b.loc,
                          hint="drop raster=, or give the grid two axes")
    rows, columns = grid[-2:]
    lead = grid[:-2]
    if lead:
      each = _product(b, (rows, columns))
      rest = b.floordiv(tile, each)
      tile = b.mod(tile, each)
    ids = list(grouped(b, tile, rows, columns, raster))
    grid = lead
  for n in reversed(grid[1:]):
    ids.insert(0, b.mod(rest, n))
    rest = b.floordiv(rest, n)
  if grid:
    ids.insert(0, rest)
  return ids


def grouped(b: Builder, tile: Atom, rows: Extent, columns: Extent, group: int) -> tuple[Atom, Atom]:
  """The equations of tt.raster, in its order."""
  per_group = _product(b, (group, columns))
  first = b.mul(b.floordiv(tile, per_group), group)
  height: Atom = i32(group)
  if isinstance(rows, Size) or rows % group:
    height = b.op(elementwise.min_p, b.sub(rows, first), group)
  within = b.mod(tile, per_group)
  row = b.add(first, b.mod(within, height))
  return row, b.floordiv(within, height)


def _product(b: Builder, extents: Sequence[Extent]) -> Atom | Extent:
  """A number of programs. Facts know the bound of a Size that is one axis, so what is static is multiplied apart."""
  static = math.prod(n for n in extents if isinstance(n, int))
  sizes: Extent = math.prod(n for n in extents if isinstance(n, Size))  # type: ignore[arg-type, misc]
  return static if isinstance(sizes, int) else sizes if static == 1 else b.mul(sizes, static)


def uses_ids(block: Block) -> bool:
  return any(e.primitive is ops.program_id_p for e in walk(block))


def with_ids(block: Block, ids: list[Atom], prefix: list[Eqn]) -> Block:
  """The block with its program_id equations replaced by `ids`, computed by `prefix` at its start."""
  env: dict[Var, Atom] = {e.outvars[0]: ids[e.params["axis"]] for e in walk(block) if e.primitive is ops.program_id_p}
  body = substitute(_without_ids(block), env)
  return dataclasses.replace(body, eqns=(*prefix, *body.eqns))


def _without_ids(block: Block) -> Block:
  eqns = tuple(e.replace(blocks=tuple(map(_without_ids, e.blocks))) for e in block.eqns
               if e.primitive is not ops.program_id_p)
  return dataclasses.replace(block, eqns=eqns)


def place_on_grid(block: Block, options: CallOptions, b: Builder, order: tuple[int, ...] | None = None,
                  taking: Taking | None = None) -> Block:
  """One role's work for every program it runs: once, or in a loop over tiles.

  Args:
    block: the work of one program.
    b: an empty builder with the kernel's location.
    order: of a persistent kernel, the program at each place (`balance`).
    taking: where programs are taken dynamically, how the role learns its next one.
  Returns:
    a block without program_id.
  """
  size = options.cluster_size
  if not options.persistent:
    if not uses_ids(block):
      return block
    cta = b.bind(ops.cta_id_p, (), {})[0]
    return with_ids(block, _program_ids(b, *_cluster_of(b, cta, size), options), b.eqns)
  first, rank = _cluster_of(b, b.bind(ops.cta_id_p, (), {})[0], size)
  step, _ = _cluster_of(b, b.bind(ops.num_ctas_p, (), {})[0], size)
  inner = b.inner()
  tile = Var(i32(0).type, "tile")
  if order is not None:
    total, body = len(order), _at_place(block, tile, options, order, inner)
  else:
    body = with_ids(block, _program_ids(inner, tile, rank, options), inner.eqns)
    total = _product(b, _in_clusters(options))
  if taking is not None:
    tile_loop(b, first, total, taking, tile, body)
  else:
    b.for_loop(first, total, step, Block((tile,), body.eqns, ()))
  return b.block()


def _at_place(block: Block, place: Var, options: CallOptions, order: tuple[int, ...], b: Builder) -> Block:
  """The work of the program at a place, if there is one."""
  total = math.prod(options.grid)
  found = b.bind(ops.lookup_p, (place,), {"values": order})[0]
  inner = b.inner()
  tile = inner.op(elementwise.min_p, found, total - 1) if total in order else found
  work = with_ids(block, _program_ids(inner, tile, None, options), inner.eqns)
  if total not in order:
    return Block((place,), (*b.eqns, *work.eqns), ())
  b.when(b.op(elementwise.lt_p, found, total), dataclasses.replace(work, invars=(), outs=()))
  return b.block((place,))


def _cluster_of(b: Builder, n: Atom, size: int) -> tuple[Atom, Atom | None]:
  """(cluster, rank in it) of the n-th CTA; without clusters the CTA itself."""
  return (n, None) if size == 1 else (b.floordiv(n, size), b.mod(n, size))


def _in_clusters(options: CallOptions) -> tuple[Extent, ...]:
  """The grid's extents, in clusters."""
  return tuple(n // c for n, c in zip(options.grid, options.cluster or (1,) * len(options.grid), strict=True))


def _program_ids(b: Builder, tile: Atom, rank: Atom | None, options: CallOptions) -> list[Atom]:
  """The programs of a cluster are neighbours: the raster runs over clusters, and a CTA's rank says which of its
  cluster's programs it runs, last axis fastest."""
  if rank is None:
    return raster_ids(b, tile, options.grid, options.raster)
  cluster, grid = options.cluster or (1,) * len(options.grid), _in_clusters(options)
  raster = None if options.raster is None else max(1, options.raster // cluster[-2])
  ids, stride = [], options.cluster_size
  for i, c in zip(raster_ids(b, tile, grid, raster), cluster, strict=True):
    stride //= c
    digit = rank if stride == 1 else b.floordiv(rank, stride)
    ids.append(i if c == 1 else b.add(b.mul(i, c), b.mod(digit, c)))
  return ids


def lower_ids(graph: TileGraph) -> TileGraph:
  """Program ids of a kernel without invented roles (an author's own roles included)."""
  if not uses_ids(graph.body):
    return graph
  b = Builder(graph.loc)
  cta = b.bind(ops.cta_id_p, (), {})[0]
  ids = _program_ids(b, *_cluster_of(b, cta, graph.options.cluster_size), graph.options)
  return graph.replace(body=with_ids(graph.body, ids, b.eqns))
