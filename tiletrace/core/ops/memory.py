"""References: allocation, loads, stores and copies, with their asynchronous forms (level 0)."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.bytecode import target_name
from tiletrace.core.effects import Effect, OrderEffect, read, write
from tiletrace.core.errors import ResourceError, TileIndexError, TileTypeError
from tiletrace.core.graph import Atom, Eqn, Literal, Primitive, RefOperand
from tiletrace.core.indexed import Indexed, has_index_tiles, indexed
from tiletrace.core.operands import check, literal, operand, python_number, refuse_keywords, tile_types
from tiletrace.core.ops.elementwise import where
from tiletrace.core.ops.shape import broadcast_in_dim, reshape, spread, static_size_tuple
from tiletrace.core.printer import Printer, print_rules
from tiletrace.core.ref import Ref, describe, ds, plain_name, static_shape, view_of
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_frame, user_loc
from tiletrace.core.tile import METHODS, MeshIndex, Tile, bind_tile
from tiletrace.core.trace import bind
from tiletrace.core.types import BarrierType, RefType, Space, TileType, View

alloc_p = Primitive("alloc")
load_p = Primitive("load")
store_p = Primitive("store")
copy_p = Primitive("copy")
copy_async_p = Primitive("copy_async", level=0)
commit_group_p = Primitive("commit_group", level=0)
wait_group_p = Primitive("wait_group", level=0)

REGISTER_FILE = 65536 * 4  # bytes of one SM: no tile value is larger
GROUPS = ("bulk", "cp_async")
EVICTION = (None, "evict_first", "evict_last")
COPY_WORDS = {
  "coalesced_width": "the vector width follows from the layouts", "disable_tma": 'dispatch="cp_async"',
  "other": "fill_value=", "val": "tt.store(ref, value)",
}
_ALLOC_WORDS = {"scope": "the function says it: alloc_shared or alloc_fragment", "init": "ref[...] = value",
                "swizzle": "layout=tt.swizzle(128)"}


# --- rules

def _ref(r: RefOperand) -> str:
  return f"{r.root.hint or 'ref'}{list(r.view.shape)}"


@type_rules.register(alloc_p)
def _alloc_type(eqn: Eqn) -> tuple[RefType, ...]:
  p = eqn.params
  check(p["space"] in (Space.SHARED, Space.FRAGMENT), f"alloc: there is nothing to allocate in {p['space']} memory")
  return (RefType(p["shape"], p["dtype"], p["space"]),)


@type_rules.register(load_p)
def _load_type(eqn: Eqn) -> tuple[TileType, ...]:
  (src,), mask = eqn.refs, tile_types(eqn.values)
  _check_mask("load", src, mask)
  return (TileType(src.shape, src.type.dtype),)


@type_rules.register(store_p)
def _store_type(eqn: Eqn) -> tuple[()]:
  (dst,), (value, *mask) = eqn.refs, tile_types(eqn.values)
  check(value.dtype == dst.type.dtype, f"store of {value} into {_ref(dst)} of {dtypes.short_name(dst.type.dtype)}")
  check(value.shape in ((), dst.shape), f"store of {value} into {_ref(dst)}")
  _check_mask("store", dst, mask)
  return ()


def _check_mask(what: str, ref: RefOperand, mask: Sequence[TileType]) -> None:
  check(len(mask) <= 1 and all(m.dtype == dtypes.bool_ and m.shape in ((), ref.shape) for m in mask),
        f"{what}: mask {', '.join(map(str, mask))} for {_ref(ref)}")


@type_rules.register(copy_p, copy_async_p)
def _copy_type(eqn: Eqn) -> tuple[()]:
  src, dst = eqn.refs
  name = eqn.primitive.name
  check(src.shape == dst.shape, f"{name}: shapes differ, src {_ref(src)}, dst {_ref(dst)}")
  check(src.type.dtype == dst.type.dtype, f"{name} does not convert, src is {dtypes.short_name(src.type.dtype)}, "
        f"dst is {dtypes.short_name(dst.type.dtype)}")
  if eqn.primitive is copy_async_p and eqn.values:
    barrier, index = (v.type for v in eqn.values)
    check(isinstance(barrier, BarrierType) and index == TileType((), dtypes.i32), "copy_async: (barrier, index)")
  else:
    check(not eqn.values, f"{name} takes references only")
  return ()


@type_rules.register(commit_group_p, wait_group_p)
def _group_type(eqn: Eqn) -> tuple[()]:
  check(eqn.params["kind"] in GROUPS, f"{eqn.primitive}: kind {eqn.params['kind']!r}")
  return ()


@effect_rules.register(alloc_p)
def _alloc_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return ()


@effect_rules.register(load_p)
def _load_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (read(0),)


@effect_rules.register(store_p)
def _store_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (write(0),)


@effect_rules.register(copy_p)
def _copy_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (read(0), write(1))


@effect_rules.register(copy_async_p)
def _copy_async_effects(eqn: Eqn) -> tuple[Effect, ...]:
  reads = (read(0), read(1)) if "reduce" in eqn.params else (read(0),)
  return (*reads, write(1), OrderEffect("copy_async"))


@effect_rules.register(commit_group_p, wait_group_p)
def _group_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (OrderEffect(eqn.primitive.name),)


# --- text

@print_rules.register(alloc_p)
def _print_alloc(eqn: Eqn, p: Printer) -> str:
  return f"{p.outs(eqn)}alloc{p.params(eqn, 'space', 'shape', 'dtype')}"


@print_rules.register(load_p)
def _print_load(eqn: Eqn, p: Printer) -> str:
  return f"{p.binder(eqn.outvars[0])} <- {p.ref(eqn.refs[0])}{_print_options(eqn, p, eqn.values)}"


@print_rules.register(store_p)
def _print_store(eqn: Eqn, p: Printer) -> str:
  value, *mask = eqn.values
  return f"{p.ref(eqn.refs[0])} <- {p.atom(value)}{_print_options(eqn, p, mask)}"


@print_rules.register(copy_p, copy_async_p)
def _print_copy(eqn: Eqn, p: Printer) -> str:
  src, dst = eqn.refs
  barrier = " on {}[{}]".format(*map(p.atom, eqn.values)) if eqn.values else ""
  return (f"{p.ref(dst)} <- {eqn.primitive}{p.params(eqn, 'fill_value', 'eviction_policy')} {p.ref(src)}{barrier}"
          f"{_print_options(eqn, p, ())}")


def _print_options(eqn: Eqn, p: Printer, mask: Sequence[Atom]) -> str:
  fill, policy = eqn.params.get("fill_value", 0), eqn.params.get("eviction_policy")
  return ((f" fill_value={fill!r}" if fill != 0 else "") + (f" {policy}" if policy else "")
          + "".join(f" mask={p.atom(m)}" for m in mask))


# --- allocation

@dataclasses.dataclass(frozen=True, slots=True)
class Swizzle:
  """A shared layout by its TMA swizzle: rows of `nbytes` whose 16-byte units are exchanged by XOR with the row."""
  nbytes: int

  def __str__(self) -> str:
    return f"swizzle({self.nbytes})"


def swizzle(nbytes: int) -> Swizzle:
  """A layout for alloc_shared: the 128, 64 or 32 byte swizzle of TMA and wgmma, or 0 for none.

  The example of `tt.gemm_async` uses it.
  """
  if nbytes not in (0, 32, 64, 128):
    raise TileTypeError(f"swizzle: nbytes is {nbytes!r}", loc=user_loc(), hint="128, 64, 32 or 0")
  return Swizzle(nbytes)


def _alloc(space: Space, what: str, shape: Any, dtype: Any, layout: Hashable, unknown: dict[str, Any]) -> Ref:
  refuse_keywords(what, unknown, _ALLOC_WORDS)
  if layout is not None and (isinstance(layout, type) or not dataclasses.is_dataclass(layout)):
    raise TileTypeError(f"{what}: layout is {layout!r}, which is no layout", loc=user_loc(),
                        hint="tt.swizzle(128), or a layout written with tiletrace.layout's S and R")
  sizes = static_size_tuple(shape, f"{what}")
  if 0 in sizes:
    raise TileTypeError(f"{what}: shape {sizes} has no elements", loc=user_loc())
  ref, = bind(alloc_p, (), dict(space=space, shape=sizes, dtype=_dtype(dtype, what), layout=layout))
  assert isinstance(ref, Ref)
  frame = user_frame()
  ref.var.hint = None if frame is None else target_name(frame)
  return ref


def _dtype(dtype: Any, what: str) -> np.dtype:
  try:
    return dtypes.canonical(dtype)
  except TileTypeError as e:
    raise TileTypeError(f"{what}: {e.message}", loc=user_loc(), hint=e.hint) from None


def alloc_shared(shape: Any, dtype: Any, *, layout: Hashable = None, **unknown: Any) -> Ref:
  """A buffer in shared memory, uninitialised. `shape`: Python ints; `layout`: default inferred.

  >>> def kernel(x, y):
  ...   s = tt.alloc_shared((2, 3), x.dtype)
  ...   s[...] = x[...]
  ...   y[...] = tt.transpose(s[...])
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((3, 2), x.dtype), grid=1)(x)
  Array([[0., 3.],
         [1., 4.],
         [2., 5.]], dtype=float32)
  """
  return _alloc(Space.SHARED, "alloc_shared", shape, dtype, layout, unknown)


def alloc_fragment(shape: Any, dtype: Any, *, layout: Hashable = None, **unknown: Any) -> Ref:
  """A buffer in registers, spread over the threads of the current scope, uninitialised. Rank 0: a mutable scalar.

  >>> def kernel(x, y):
  ...   total = tt.alloc_fragment((3,), jnp.float32)
  ...   total[...] = 0
  ...   for i in tt.range(2):
  ...     total[...] += x[i, :]
  ...   y[...] = total[...]
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((3,), x.dtype), grid=1)(x)
  Array([3., 5., 7.], dtype=float32)
  """
  return _alloc(Space.FRAGMENT, "alloc_fragment", shape, dtype, layout, unknown)


# --- loads and stores

def ref_argument(x: Any, what: str, hint: str | None = None) -> Ref:
  if isinstance(x, Ref):
    return x
  if isinstance(x, Tile):
    raise TileTypeError(f"{what} is a value {x.type}, not a reference", loc=user_loc(), hint=hint)
  operand(x, what)
  raise TileTypeError(f"{what} is {type(x).__name__}, not a reference", loc=user_loc(), hint=hint)


def tile_of(ref: Ref | Indexed, what: str) -> tuple[int, ...]:
  """The static shape of a view that becomes a value, or comes from one."""
  if isinstance(ref, Indexed):
    shape, ref = ref.shape, ref.ref
    if not all(isinstance(n, int) for n in shape):
      static_shape(ref, what)
  else:
    shape = static_shape(ref, what)
  nbytes = math.prod(shape) * ref.dtype.itemsize
  if nbytes > REGISTER_FILE:
    raise ResourceError(
      f"{what}: a tile {TileType(shape, ref.dtype)} of {plain_name(ref)} ({nbytes >> 10} KiB) does not "
      f"fit in the {REGISTER_FILE >> 10} KiB of registers", loc=user_loc(),
      hint=f"kernel arguments are whole arrays: take a block, {plain_name(ref)}[tt.block(i, 128), ...]")
  if 0 in shape:
    raise TileTypeError(f"{what}: {describe(ref)} has no elements", loc=user_loc())
  return shape


def evicted(what: str, policy: str | None, *refs: Any) -> dict[str, str]:
  """The parameter that says how long L2 keeps what is read or written; nothing where nobody asks."""
  if policy not in EVICTION:
    raise TileTypeError(f"{what}: eviction_policy is {policy!r}", loc=user_loc(),
                        hint="one of " + ", ".join(repr(x) for x in EVICTION))
  if policy is not None and not any(isinstance(r, Ref) and r.type.space is Space.GLOBAL for r in refs):
    raise TileTypeError(f"{what}: eviction_policy={policy!r}, but no block of global memory is read or written",
                        loc=user_loc(), hint="L2 holds global memory; drop eviction_policy=")
  return {} if policy is None else {"eviction_policy": policy}


def fill_operand(fill_value: Any, dtype: np.dtype, what: str) -> bool | int | float:
  x = operand(fill_value, f"{what}: fill_value")
  if isinstance(x, Tile):
    raise TileTypeError(f"{what}: fill_value must be a Python number, got {x.type}", loc=user_loc(),
                        hint="tt.where(mask, tt.load(ref), value)")
  return literal(x, dtype, f"{what}: fill_value").value


def mask_operand(mask: Any, shape: tuple[int, ...], what: str) -> tuple[Tile | Literal, ...]:
  if mask is None:
    return ()
  x = operand(mask, f"{what}: mask")
  if not isinstance(x, Tile):
    return (literal(x, dtypes.bool_, what),)
  if x.dtype != dtypes.bool_:
    raise TileTypeError(f"{what}: mask is {x.type}, not a bool", loc=user_loc(), hint="compare it: mask != 0")
  return (_broadcast(x, shape, f"{what}: mask"),)


def _plain(x: Tile | Literal) -> Any:
  return x.value if isinstance(x, Literal) else x


def _broadcast(x: Tile, shape: tuple[int, ...], what: str) -> Tile:
  """`x`, of rank 0 or of equal rank, spread to `shape`; rank 0 stays."""
  if not x.shape:
    return x
  if len(x.shape) != len(shape) or any(n not in (1, m) for n, m in zip(x.shape, shape)):
    raise TileTypeError(f"{what} of shape {list(x.shape)} does not fit {list(shape)}", loc=user_loc(),
                        hint="insert an axis: v[:, None] or v[None, :]" if len(x.shape) != len(shape) else None)
  return spread(x, shape)


def load(ref: Any, *, fill_value: Any = 0, mask: Any = None, eviction_policy: str | None = None, **unknown: Any
         ) -> Tile:
  """The value of a view. Elements past an edge, or where `mask` is False, are `fill_value`.

  Args:
    ref: a reference or view of static shape.
    fill_value: Python number of the reference's kind.
    mask: bool tile that broadcasts to the view's shape, or a scalar.
    eviction_policy: "evict_first" of what nobody reads again, "evict_last" of what should stay in L2.
  Raises:
    TileTypeError, ResourceError: not a reference, a dynamic shape, or more than the registers hold.

  Example:
    >>> def kernel(x, y):
    ...   y[...] = tt.load(x.at[tt.ds(4, 4)], fill_value=-1)
    >>> x = jnp.arange(6)
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((4,), x.dtype), grid=1)(x)
    Array([ 4,  5, -1, -1], dtype=int32)
  """
  refuse_keywords("load", unknown, COPY_WORDS)
  policy = evicted("load", eviction_policy, ref)
  if isinstance(ref, Indexed):
    return METHODS["gather"](ref, fill_value, mask)
  ref = ref_argument(ref, "load: ref", "a value needs no load; write ref.at[...] for a view")
  shape = tile_of(ref, "load")
  if mask is not None and ref.type.space is not Space.GLOBAL:  # nothing to protect: every element is there
    return where(_plain(*mask_operand(mask, shape, "load")), load(ref), fill_operand(fill_value, ref.dtype, "load"))
  return bind_tile(load_p, (*ref.operands, *mask_operand(mask, shape, "load")), views=(ref.view,),
                   fill_value=fill_operand(fill_value, ref.dtype, "load"), **policy)


def store(ref: Any, value: Any, *, mask: Any = None, eviction_policy: str | None = None, **unknown: Any) -> None:
  """Writes `value` to a view; elements past an edge, or where `mask` is False, are dropped.

  Args:
    ref: a writable reference or view of static shape.
    value: a scalar, or a tile of the reference's dtype and rank whose size-1 dimensions are repeated.
    mask: bool tile that broadcasts to the view's shape, or a scalar.
    eviction_policy: as for tt.load.
  Raises:
    TileTypeError: the dtype or shape does not fit, or the reference is an input.

  Example:
    >>> def kernel(x, y):
    ...   tt.store(y, x[...], mask=tt.arange(6) < 4)
    ...   tt.store(y, 0, mask=tt.arange(6) >= 4)
    >>> x = jnp.arange(6)
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
    Array([0, 1, 2, 3, 0, 0], dtype=int32)
  """
  refuse_keywords("store", unknown, COPY_WORDS)
  policy = evicted("store", eviction_policy, ref)
  ref = ref if isinstance(ref, Indexed) else ref_argument(
    ref, "store: ref", "a tile value is immutable; store into a reference: ref[...] = v")
  if isinstance(value, Ref):
    raise TileTypeError(f"store: the stored {describe(value)} is a reference, not a value", loc=user_loc(),
                        hint=f"load it: {plain_name(value)}[...], or tt.copy(src, dst)")
  x = operand(value, "store: value")
  if isinstance(ref, Indexed):
    METHODS["scatter"](ref, x, mask)
    return
  writable(ref, "store")
  shape = tile_of(ref, "store")
  if mask is not None and ref.type.space is not Space.GLOBAL:
    store(ref, where(_plain(*mask_operand(mask, shape, "store")), _plain(stored_operand(x, ref, shape)), load(ref)))
    return
  operands = (*ref.operands, stored_operand(x, ref, shape), *mask_operand(mask, shape, "store"))
  bind(store_p, operands, dict(views=(ref.view,), **policy))


def stored_operand(x: Any, ref: Ref, shape: tuple[int, ...], what: str = "store") -> Tile | Literal:
  to = dtypes.short_name(ref.dtype)
  if isinstance(x, (Tile, np.generic)) and x.dtype != ref.dtype:
    raise TileTypeError(f"{what} of {dtypes.short_name(x.dtype)} into {describe(ref)}", loc=user_loc(),
                        hint=f"convert it: value.astype({plain_name(ref)}.dtype)")
  if isinstance(x, Tile):
    return _broadcast(x, shape, f"{what}: value")
  number = python_number(x)
  if isinstance(number, float) and not dtypes.is_float(ref.dtype):
    raise TileTypeError(f"{what} of the float {number} into {describe(ref)}", loc=user_loc(), hint=f"an {to} number")
  if not isinstance(number, bool) and ref.dtype == dtypes.bool_:
    raise TileTypeError(f"{what} of the number {number} into {describe(ref)}", loc=user_loc(), hint="True or False")
  return literal(number, ref.dtype, f"{what}: value")


def writable(ref: Ref, what: str) -> None:
  if not ref.writable:
    raise TileTypeError(f"{what} to '{ref.var.hint}', which is an input", loc=user_loc(),
                        hint="alias it: tile_call(..., input_output_aliases={input: output})")


def _items(index: Any) -> list[Any]:
  return list(index) if isinstance(index, tuple) else [index]


def ref_getitem(ref: Ref, index: Any) -> Tile:
  """`ref[index]`: the value of that view."""
  items = _items(index)
  if has_index_tiles(items):
    if not _is_mesh(items):
      return load(indexed(ref, index))
    view, mesh = _mesh_view(ref, items)
    value = load(view)
    kept = tuple(k for k, n in enumerate(mesh) if n is not None)
    return value if len(kept) == len(mesh) else broadcast_in_dim(value, tuple(n or 1 for n in mesh), kept)
  value = load(view_of(ref, tuple(i for i in items if i is not None)))
  if all(i is not None for i in items):
    return value
  return value[tuple(i if i is None or i is Ellipsis else slice(None) for i in items if i is None or _stays(i))]


def _stays(item: Any) -> bool:
  """The index item keeps its dimension."""
  return isinstance(item, (slice, ds)) or item is Ellipsis


def ref_setitem(ref: Ref, index: Any, value: Any) -> None:
  """`ref[index] = value`."""
  items = _items(index)
  if any(i is None for i in items):
    raise TileIndexError("a new axis (None) in a store", loc=user_loc(), hint="drop it; the value is broadcast")
  if not has_index_tiles(items):
    store(view_of(ref, index), value)
    return
  if not _is_mesh(items):
    store(indexed(ref, index), value)
    return
  view, mesh = _mesh_view(ref, items)
  if isinstance(value, Tile) and value.shape:
    target = tuple(n or 1 for n in mesh)
    if len(value.shape) == len(target) and any(n > 1 and m is None for n, m in zip(value.shape, mesh)):
      raise TileTypeError(f"store of {list(value.shape)} at indices of shape {list(target)}: several values would go "
                          "to one element", loc=user_loc(),
                          hint="reduce the value first: tt.sum(v, axis=..., keepdims=True)")
    value = reshape(_broadcast(value, target, "store: value"), tuple(n for n in mesh if n is not None))
  store(view, value)


def ref_at(ref: Ref, index: Any) -> Ref | Indexed:
  """`ref.at[index]`."""
  return indexed(ref, index) if has_index_tiles(_items(index)) else view_of(ref, index)


def _is_mesh(items: list[Any]) -> bool:
  """The index tiles are those of one tt.parallel, each of another axis."""
  tiles = [i for i in items if isinstance(i, Tile) and i.ndim]
  mesh = [i for i in tiles if isinstance(i, MeshIndex)]
  return len(mesh) == len(tiles) == len({i.axis for i in mesh}) and len({i.mesh for i in mesh}) == 1


def _mesh_view(ref: Ref, items: list[Any]) -> tuple[Ref, tuple[int | None, ...]]:
  """The view that indices of tt.parallel and scalars select, in the mesh's order, and the mesh's extent along each
  axis that is used (None for the others: they broadcast)."""
  axes: list[int] = []
  plain: list[Any] = []
  mesh: tuple[int, ...] = ()
  for item in items:
    if isinstance(item, MeshIndex):
      mesh = item.mesh
      axes.append(item.axis)
      plain.append(ds(item.offset, item.extent))
    elif item is None or _stays(item):
      raise TileIndexError(f"index of {plain_name(ref)} mixes indices of tt.parallel with {item!r}", loc=user_loc(),
                           hint="give one index of tt.parallel or one scalar for each dimension")
    else:
      plain.append(item)
  if len(items) != ref.ndim:
    raise TileIndexError(f"{describe(ref)} has {ref.ndim} dimensions, got {len(items)} indices", loc=user_loc(),
                         hint="give one index of tt.parallel or one scalar for each dimension")
  view = view_of(ref, tuple(plain))
  perm = tuple(p for _, p in sorted(zip(axes, view.view.perm)))
  ordered = view.with_view(View(view.view.dims, perm))
  return ordered, tuple(n if k in axes else None for k, n in enumerate(mesh))


METHODS.update(ref_at=ref_at, ref_getitem=ref_getitem, ref_setitem=ref_setitem)
