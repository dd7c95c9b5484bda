"""Loads, stores and copies at tiles of indices: `x[idx, :]`, `y[idx, :] = v`, `tt.copy(x.at[idx, :], x_s)`."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect, read, write
from tiletrace.core.errors import TileTypeError
from tiletrace.core.graph import Eqn, Literal, Primitive, RefOperand
from tiletrace.core.indexed import Indexed, describe_indexed
from tiletrace.core.operands import check, tile_types
from tiletrace.core.ops.memory import fill_operand, mask_operand, store, stored_operand, tile_of, writable
from tiletrace.core.ops.shape import broadcast_in_dim, spread
from tiletrace.core.printer import Printer, print_rules
from tiletrace.core.ref import Ref, describe
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import METHODS, Tile, bind_tile
from tiletrace.core.trace import bind
from tiletrace.core.types import Space, TileType

# The view has the whole extent of the root along its dimensions `dims` (params of all), which are indexed. Then come
# one i32 tile of the result's shape for each of these, in the root's coordinates: elements outside it, or outside the
# view's edges, do not exist.
gather_p = Primitive("gather")              # values: *indices, mask; params fill_value
scatter_p = Primitive("scatter")            # values: value, *indices, mask
gather_copy_p = Primitive("gather_copy")    # refs: source, destination in shared memory; values: *indices


def check_indices(eqn: Eqn, ref: RefOperand, indices: Sequence[TileType]) -> tuple[int, ...]:
  """The shape that the indices, of which there is at least one, give to a view."""
  dims, shape = eqn.params["dims"], indices[0].shape
  sizes = ref.view.shape
  kept = (*sizes[:dims[0]], *sizes[dims[-1] + 1:])
  rank = len(shape) - len(kept)
  check(all(i == TileType(shape, dtypes.i32) for i in indices) and rank >= 1
        and shape[:dims[0]] + shape[dims[0] + rank:] == kept,
        f"{eqn.primitive}: indices {' and '.join(map(str, indices))} of dimensions {dims} of a view {list(sizes)}")
  return shape


def indexed_columns(shape: tuple[int, ...], view_rank: int, dims: tuple[int, ...]) -> list[tuple[int, int]]:
  """(dimension of the view, of the result) for every dimension of the view that is not indexed."""
  rank = len(shape) - (view_rank - len(dims))
  return [(d, d if d < dims[0] else d - len(dims) + rank) for d in range(view_rank) if d not in dims]


def split_values(eqn: Eqn, first: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """(indices, mask) of the values that follow the `first` ones."""
  n = first + len(eqn.params["dims"])
  return eqn.values[first:n], eqn.values[n:]


def _check_mask(eqn: Eqn, mask: Sequence[TileType], shape: tuple[int, ...]) -> None:
  check(len(mask) <= 1 and all(m.dtype == dtypes.bool_ and m.shape in ((), shape) for m in mask),
        f"{eqn.primitive}: mask {', '.join(map(str, mask))} for {list(shape)}")


@type_rules.register(gather_p)
def _gather_type(eqn: Eqn) -> tuple[TileType, ...]:
  (src,), (indices, mask) = eqn.refs, split_values(eqn, 0)
  shape = check_indices(eqn, src, tile_types(indices))
  _check_mask(eqn, tile_types(mask), shape)
  return (TileType(shape, src.type.dtype),)


@type_rules.register(scatter_p)
def _scatter_type(eqn: Eqn) -> tuple[()]:
  (dst,), (indices, mask) = eqn.refs, split_values(eqn, 1)
  shape = check_indices(eqn, dst, tile_types(indices))
  check(tile_types(eqn.values[:1])[0] == TileType(shape, dst.type.dtype),
        f"scatter of {eqn.values[0].type} to {list(shape)} of {dst.type}")
  _check_mask(eqn, tile_types(mask), shape)
  return ()


@type_rules.register(gather_copy_p)
def _copy_type(eqn: Eqn) -> tuple[()]:
  (src, dst), (indices, rest) = eqn.refs, split_values(eqn, 0)
  shape = check_indices(eqn, src, tile_types(indices))
  check(not rest and dst.shape == shape and src.type.dtype == dst.type.dtype and dst.type.space is Space.SHARED,
        f"gather_copy of {list(shape)} from {src.type} to {list(dst.shape)} of {dst.type}")
  return ()


@effect_rules.register(gather_p)
def _gather_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (read(0),)


@effect_rules.register(scatter_p)
def _scatter_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (write(0),)


@effect_rules.register(gather_copy_p)
def _copy_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (read(0), write(1))


@print_rules.register(gather_p)
def _print_gather(eqn: Eqn, p: Printer) -> str:
  indices, mask = split_values(eqn, 0)
  fill = eqn.params["fill_value"]
  return (f"{p.binder(eqn.outvars[0])} <- gather{p.params(eqn, 'dims')} {p.ref(eqn.refs[0])} "
          f"{' '.join(map(p.atom, indices))}" + (f" fill_value={fill!r}" if fill != 0 else "")
          + "".join(f" mask={p.atom(m)}" for m in mask))


@print_rules.register(scatter_p)
def _print_scatter(eqn: Eqn, p: Printer) -> str:
  indices, mask = split_values(eqn, 1)
  return (f"{p.ref(eqn.refs[0])} <- scatter{p.params(eqn, 'dims')} {p.atom(eqn.values[0])} "
          f"{' '.join(map(p.atom, indices))}" + "".join(f" mask={p.atom(m)}" for m in mask))


@print_rules.register(gather_copy_p)
def _print_copy(eqn: Eqn, p: Printer) -> str:
  src, dst = eqn.refs
  return (f"{p.ref(dst)} <- gather_copy{p.params(eqn, 'dims', 'fill_value')} {p.ref(src)} "
          f"{' '.join(map(p.atom, eqn.values))}")


# --- wrappers

def index_operands(x: Indexed, shape: tuple[int, ...]) -> tuple[Tile, ...]:
  """The index tiles, repeated along the dimensions that they do not index."""
  first, rank = x.dims[0], len(x.index_shape)
  out = []
  for t in x.indices:
    t = spread(t, x.index_shape)
    out.append(t if x.index_shape == shape else broadcast_in_dim(t, shape, tuple(range(first, first + rank))))
  return tuple(out)


def whole_tile(x: Tile | Literal, shape: tuple[int, ...]) -> Tile:
  """A value of `shape`, or a scalar repeated to it."""
  return x if isinstance(x, Tile) and x.shape == shape else broadcast_in_dim(x, shape, ())


def gather(x: Indexed, fill_value: Any, mask: Any) -> Tile:
  """The elements; `fill_value` for those that do not exist."""
  shape = tile_of(x, "load")
  return bind_tile(gather_p, (*x.ref.operands, *index_operands(x, shape), *mask_operand(mask, shape, "load")),
                   views=(x.ref.view,), dims=x.dims, fill_value=fill_operand(fill_value, x.dtype, "load"))


def scatter(x: Indexed, value: Any, mask: Any) -> None:
  """Writes elements; those that do not exist are dropped."""
  writable(x.ref, "store")
  shape = tile_of(x, "store")
  stored = whole_tile(stored_operand(value, x.ref, shape), shape)
  bind(scatter_p, (*x.ref.operands, stored, *index_operands(x, shape), *mask_operand(mask, shape, "store")),
       dict(views=(x.ref.view,), dims=x.dims))


def indexed_copy(src: Any, dst: Any, fill_value: Any, dispatch: str | None) -> None:
  """A copy from rows by index into shared memory; others are a load and a store."""
  if dispatch not in (None, "cp_async", "vector"):
    raise TileTypeError(f"copy: dispatch={dispatch!r} of rows by index", loc=user_loc(), hint='"cp_async" or "vector"')
  if isinstance(src, Indexed) and isinstance(dst, Ref) and dst.space is Space.SHARED:
    shape = tile_of(src, "copy: src")
    if shape != dst.shape or src.dtype != dst.dtype:
      raise TileTypeError(f"copy: src {src!r}, dst {describe(dst)} differ", loc=user_loc(),
                          hint="one shape and dtype; values convert: dst[...] = src[idx, :].astype(dst.dtype)")
    bind(gather_copy_p, (*src.ref.operands, *dst.operands, *index_operands(src, shape)),
         dict(views=(src.ref.view, dst.view), dims=src.dims,
              fill_value=fill_operand(fill_value, src.dtype, "copy"), dispatch=dispatch))
    return
  if dispatch is not None:
    names = " and ".join(describe_indexed(x) for x in (src, dst) if isinstance(x, Indexed))
    raise TileTypeError(f"copy: dispatch={dispatch!r} does not apply, {names} is loaded and stored", loc=user_loc(),
                        hint="drop dispatch=")
  store(dst, METHODS["load"](src, fill_value=fill_value))


METHODS.update(gather=gather, scatter=scatter, indexed_copy=indexed_copy)
