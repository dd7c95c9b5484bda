"""Ref: a reference to memory and its views. `ref[...]` loads, `ref[...] = v` stores, `ref.at[...]` moves nothing."""
from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any, NoReturn

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import ForeignFunctionError, TileAttributeError, TileIndexError, TileTypeError
from tiletrace.core.foreign import is_jax, refuse_foreign
from tiletrace.core.graph import Var
from tiletrace.core.source import Loc, user_loc
from tiletrace.core.tile import METHODS, Tile
from tiletrace.core.trace import Scope, Trace, Value, current, name_of, wrapper
from tiletrace.core.types import Dyn, RefType, Size, Space, View, ViewDim, whole_view

Part = int | Tile  # of a view: a Python int, or an i32 scalar


class Ref(Value):
  """A reference, or a view of one: `view` says which elements of the root `var` it stands for.

  Attributes:
    view: see tiletrace.core.types.View.
    dyn: the dynamic parts of `view`, i32 scalars.
    writable: False for an input of the kernel.

  Example:
    >>> def kernel(x, y):
    ...   print(x, x.at[0, :].shape, x.T.shape)
    ...   y[...] = x[1, :]
    >>> x = jnp.arange(6.).reshape(2, 3)
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((3,), x.dtype), grid=1)(x)
    Ref<global>{f32[2,3]} (3,) (3, 2)
    Array([3., 4., 5.], dtype=float32)
  """
  __slots__ = ("dyn", "view", "writable")
  __array_ufunc__ = None
  type: RefType

  def __init__(self, trace: Trace, scope: Scope, var: Var, loc: Loc, view: View | None = None,
               dyn: tuple[Tile, ...] = (), writable: bool = True):
    super().__init__(trace, scope, var, loc)
    self.view = whole_view(self.type.shape) if view is None else view
    self.dyn, self.writable = dyn, writable

  def part(self, p: Any) -> Any:
    """What stands for a part of the view: an i32 scalar for a Dyn; an int or a Size is itself."""
    return self.dyn[p.index] if isinstance(p, Dyn) else p

  def viewed(self, dims: list[Dim], perm: tuple[int, ...]) -> Ref:
    """Another view of the same root."""
    view, dyn = _pack(dims, perm)
    return Ref(self.trace, self.scope, self.var, self.loc, view, dyn, self.writable)

  def with_view(self, view: View) -> Ref:
    """Another view with the same dynamic parts."""
    return Ref(self.trace, self.scope, self.var, self.loc, view, self.dyn, self.writable)

  @property
  def operands(self) -> tuple[Value, ...]:
    """The root and the dynamic operands, as equations take them."""
    return (self, *self.dyn)

  @property
  def shape(self) -> tuple[Any, ...]:
    """Python ints, and i32 scalars for dimensions of a dynamic size."""
    return tuple(METHODS["size"](n) if isinstance(n, Size) else self.part(n) for n in self.view.shape)

  @property
  def dtype(self) -> np.dtype:
    return self.type.dtype

  @property
  def ndim(self) -> int:
    return len(self.view.perm)

  @property
  def space(self) -> Space:
    return self.type.space

  @property
  def size(self) -> int:
    return math.prod(static_shape(self, "the size"))

  @property
  def nbytes(self) -> int:
    """Bytes of the view's elements: what a copy into it moves."""
    return self.size * self.dtype.itemsize

  @property
  def T(self) -> Ref:
    """The view with its dimensions reversed. Moves nothing."""
    return self.with_view(View(self.view.dims, self.view.perm[::-1]))

  @property
  def at(self) -> At:
    return At(self)

  def __repr__(self) -> str:
    shape = ",".join("?" if isinstance(n, Dyn) else str(n) for n in self.view.shape)
    return f"Ref<{self.space}>{{{dtypes.short_name(self.dtype)}[{shape}]}}"

  def __getitem__(self, index: Any) -> Tile:
    return METHODS["ref_getitem"](self, index)

  def __setitem__(self, index: Any, value: Any) -> None:
    METHODS["ref_setitem"](self, index, value)

  # --- a reference is not a value

  def _no(self, what: str, hint: str) -> TileTypeError:
    return TileTypeError(f"{what} of the reference {describe(self)}", loc=user_loc(), hint=hint)

  def __bool__(self) -> bool:
    raise self._no("the truth value", f"did you mean {plain_name(self)}[...]? An optional argument is tested with "
                   "`is None`")

  def __iter__(self) -> NoReturn:
    raise self._no("iteration", f"loop over an index: for i in tt.range(n): {plain_name(self)}[i]")

  def __len__(self) -> int:
    raise ForeignFunctionError(f"len() of the reference {describe(self)}", loc=user_loc(),
                               hint=f"use {plain_name(self)}.shape[0]")

  def __contains__(self, item: object) -> bool:
    raise self._no("membership", f"did you mean tt.any({plain_name(self)}[...] == x)?")

  def __index__(self) -> int:
    raise self._no("the integer value", f"did you mean {plain_name(self)}[...]?")

  __int__ = __float__ = __index__

  @property
  def __jax_array__(self) -> NoReturn:
    raise ForeignFunctionError(f"a jax function was applied to the reference {describe(self)}", loc=user_loc(),
                               hint=f"load it and use the tt function: tt.f({plain_name(self)}[...]), or tt.call_jax")

  def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
    raise ForeignFunctionError(f"a numpy function was applied to the reference {describe(self)}", loc=user_loc(),
                               hint=f"load it and use the tt function: tt.f({plain_name(self)}[...])")

  def __getattr__(self, name: str) -> NoReturn:
    hint = f"load it first: {plain_name(self)}[...].{name}" if hasattr(Tile, name) else None
    raise TileAttributeError(f"a reference has no attribute '{name}'", loc=user_loc(), hint=hint)

  __hash__ = object.__hash__


def _arithmetic(self: Ref, *args: Any) -> NoReturn:
  name = plain_name(self)
  raise TileTypeError(f"arithmetic on the reference {describe(self)}", loc=user_loc(),
                      hint=f"did you mean {name}[...]?")


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift",
              "rshift"):
  for _kind in ("", "r", "i"):
    setattr(Ref, f"__{_kind}{_name}__", _arithmetic)
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert"):
  setattr(Ref, f"__{_name}__", _arithmetic)


class At:
  """`ref.at[...]`: a view."""
  __slots__ = ("_ref",)

  def __init__(self, ref: Ref):
    self._ref = ref

  def __getitem__(self, index: Any) -> Any:
    """A Ref; at tiles of indices an Indexed (core/indexed.py)."""
    return METHODS["ref_at"](self._ref, index)

  def __setitem__(self, index: Any, value: Any) -> NoReturn:
    raise TileTypeError("ref.at[...] is a view and cannot be assigned", loc=user_loc(),
                        hint="store with ref[...] = v")

  def __call__(self, *args: Any) -> NoReturn:
    raise TileTypeError("ref.at takes square brackets", loc=user_loc(), hint="ref.at[...]")


@wrapper(RefType)
def make_ref(trace: Trace, scope: Scope, var: Var, loc: Loc) -> Ref:
  return Ref(trace, scope, var, loc)


def plain_name(x: Value) -> str:
  """The user's name of a reference or value, without quotes."""
  return (name_of(x) or x.var.hint or "ref").strip("'")


def describe(ref: Ref) -> str:
  """Name and type, for messages: "x: Ref<global>{f32[64,64]}"."""
  return f"{plain_name(ref)}: {ref!r}"


def static_shape(ref: Ref, what: str) -> tuple[int, ...]:
  """The shape of a view that must be static."""
  if not all(isinstance(n, int) for n in ref.view.shape):
    raise TileTypeError(f"{what} needs a static shape, {describe(ref)} has a dynamic dimension", loc=user_loc(),
                        hint="take a block of it: tt.block(i, size)")
  return ref.view.static_shape


# --- indices

@dataclasses.dataclass(frozen=True, slots=True)
class ds:
  """The `size` elements from `start` on, `stride` apart: one dimension of an index.

  `start` is a Python int or an integer scalar; it never wraps. `size` is a Python int, or, for global references, an
  integer scalar: then the view ends there, and blocks of the view read the fill value past its end.

  >>> def kernel(x, y):
  ...   y[...] = x[tt.ds(3, 4)]
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((4,), jnp.int32), grid=1)(jnp.arange(20))
  Array([3, 4, 5, 6], dtype=int32)
  """
  start: Any
  size: Any
  stride: int = 1

  def __post_init__(self) -> None:
    object.__setattr__(self, "start", _integer(self.start, "ds: start"))
    object.__setattr__(self, "size", _integer(self.size, "ds: size"))
    for what, x in (("start", self.start), ("size", self.size), ("stride", self.stride)):
      if isinstance(x, int) and not -2**31 <= x < 2**31:
        raise TileIndexError(f"ds: {what} is {x}, and an index is an i32", loc=user_loc())
    if isinstance(self.size, int) and self.size < 0:
      raise TileIndexError(f"ds: size is {self.size}, it must not be negative", loc=user_loc())
    if isinstance(self.stride, bool) or not isinstance(self.stride, int) or self.stride < 1:
      raise TileIndexError(f"ds: stride is {self.stride!r}, it must be a positive Python int", loc=user_loc())


def block(i: Any, size: int) -> ds:
  """The i-th block of `size` elements: `ds(i * size, size)`.

  >>> def kernel(x, y):
  ...   y[...] = x[tt.block(2, 4)]
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((4,), jnp.int32), grid=1)(jnp.arange(20))
  Array([ 8,  9, 10, 11], dtype=int32)
  """
  i = _integer(i, "block: i")
  if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
    if isinstance(size, Value) or is_jax(size):
      raise TileTypeError("block: size must be a Python int", loc=user_loc(),
                          hint="tiles have static sizes; a view of a dynamic size is tt.ds(start, size)")
    raise TileIndexError(f"block: size is {size!r}, it must be a positive Python int", loc=user_loc())
  return ds(i * int(size), int(size))


def _integer(x: Any, what: str) -> Part:
  """A Python int or an i32 scalar."""
  if isinstance(x, Tile):
    if x.ndim or not dtypes.is_integer(x.dtype):
      raise TileIndexError(f"{what} must be an integer scalar, got {x.type}", loc=user_loc())
    return x.astype(dtypes.i32)
  if isinstance(x, Ref):
    raise TileTypeError(f"{what} is the reference {describe(x)}", loc=user_loc(),
                        hint=f"load it: {plain_name(x)}[...]")
  if is_jax(x):
    return refuse_foreign(x, what)
  if isinstance(x, (bool, np.bool_)) or not hasattr(x, "__index__"):
    raise TileIndexError(f"{what} must be an integer, got {x!r}", loc=user_loc(),
                         hint="use // or tt.cdiv" if isinstance(x, float) else None)
  return operator.index(x)


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
  """ViewDim with its dynamic parts in place."""
  start: Part
  size: Part
  stride: int
  squeezed: bool
  edges: tuple[tuple[Part, Part], ...]


def unpack(ref: Ref) -> list[Dim]:
  p = ref.part
  return [Dim(p(d.start), p(d.size), d.stride, d.squeezed, tuple((p(a), p(b)) for a, b in d.edges))
          for d in ref.view.dims]


def _pack(dims: list[Dim], perm: tuple[int, ...]) -> tuple[View, tuple[Tile, ...]]:
  dyn: list[Tile] = []

  def part(p: Part) -> Any:
    if isinstance(p, (int, Size)):
      return p
    for k, known in enumerate(dyn):
      if known.var is p.var:
        return Dyn(k)
    dyn.append(p)
    return Dyn(len(dyn) - 1)

  packed = tuple(ViewDim(part(d.start), part(d.size), d.stride, d.squeezed,
                         tuple((part(a), part(b)) for a, b in d.edges)) for d in dims)
  return View(packed, perm), tuple(dyn)


def plus(a: Part, b: Part) -> Part:
  if isinstance(a, int) and a == 0:
    return b
  return a if isinstance(b, int) and b == 0 else a + b


def times(a: Part, b: int) -> Part:
  return a if b == 1 else a * b


def view_of(ref: Ref, index: Any) -> Ref:
  """The view `ref.at[index]`. See LANGUAGE: ints remove their dimension, slices are static, ds and block cut tiles."""
  current().raise_pending()
  items = expand(ref, index)
  dims, perm = unpack(ref), []
  for n, (p, item) in enumerate(zip(ref.view.perm, items)):
    if isinstance(item, slice) and item.start is None and item.stop is None and item.step is None:
      perm.append(p)
      continue
    dims[p] = _cut(ref, p, dims[p], n, item)
    if not dims[p].squeezed:
      perm.append(p)
  return ref.viewed(dims, tuple(perm))


def expand(ref: Ref, index: Any) -> list[Any]:
  """One item for each dimension: `...` and missing dimensions are full slices."""
  items = list(index) if isinstance(index, tuple) else [index]
  dots = [k for k, item in enumerate(items) if item is Ellipsis]
  if any(item is None for item in items):
    raise TileIndexError("a view cannot add an axis (None)", loc=user_loc(),
                         hint="load first: ref[:, None] or ref[...][:, None]")
  if len(dots) > 1:
    raise TileIndexError("an index can have one `...` only", loc=user_loc())
  given = len(items) - len(dots)
  if given > ref.ndim:
    raise TileIndexError(f"{describe(ref)} has {ref.ndim} dimensions, got {given} indices", loc=user_loc())
  fill = [slice(None)] * (ref.ndim - given)
  at = dots[0] if dots else len(items)
  return items[:at] + fill + items[at + len(dots):]


def _cut(ref: Ref, p: int, dim: Dim, n: int, item: Any) -> Dim:
  """`dim`, dimension `n` of the view `ref` and `p` of its root, cut by one index item."""
  extent = ref.type.shape[p]
  what = f"index {n} of {plain_name(ref)}"
  if isinstance(item, slice):
    start, size, stride = static_slice(item, dim.size, what)
    return _narrow(dim, extent, start, size, stride)
  if isinstance(item, ds):
    if isinstance(item.size, Tile) and ref.space is not Space.GLOBAL:
      raise TileIndexError(f"{what}: a size that is not a Python int needs a global reference, "
                           f"{describe(ref)} is {ref.space}", loc=user_loc())
    if ref.space is not Space.GLOBAL and isinstance(item.start, int):
      last = item.start + (item.size - 1) * item.stride
      if item.size and (item.start < 0 or (isinstance(dim.size, int) and last >= dim.size)):
        raise TileIndexError(f"{what}: elements {item.start} to {last} are out of range for size {dim.size}; "
                             f"only global references have an edge to hang over", loc=user_loc())
    return _narrow(dim, extent, item.start, item.size, item.stride)
  i = _integer(item, what)
  if isinstance(i, int) and isinstance(dim.size, int):
    if not -dim.size <= i < dim.size:
      raise TileIndexError(f"{what}: {i} is out of range for size {dim.size}", loc=user_loc())
    i %= dim.size
  elif isinstance(i, int) and i < 0:
    raise TileIndexError(f"{what}: {i} counts from the end of a dimension of dynamic size", loc=user_loc(),
                         hint="write size - 1 with the size you gave to tt.ds, or the reference's shape")
  return dataclasses.replace(_narrow(dim, extent, i, 1, 1), stride=1, squeezed=True)


def _narrow(dim: Dim, extent: int, start: Part, size: Part, stride: int) -> Dim:
  """The part start + stride * [0, size) of `dim`, a dimension of a root with `extent`. It ends where `dim` does."""
  inside = (isinstance(start, int) and isinstance(size, int) and isinstance(dim.size, int)
            and start >= 0 and start + (size - 1) * stride < dim.size)
  is_root = isinstance(dim.start, int) and dim.start == 0 and isinstance(dim.size, (int, Size)) and (
    dim.stride == 1 and dim.size == extent)
  edges = dim.edges if inside or is_root else (*dim.edges, (dim.start, plus(dim.start, times(dim.size, dim.stride))))
  return Dim(plus(dim.start, times(start, dim.stride)), size, dim.stride * stride, False,
             edges)


def static_slice(item: slice, size: Part, what: str) -> tuple[int, int, int]:
  """(start, size, stride) of a slice with Python-int bounds, which must be in range."""
  if any(isinstance(b, Value) or is_jax(b) for b in (item.start, item.stop, item.step)):
    raise TileIndexError(f"{what}: a slice with an abstract bound has no static size", loc=user_loc(),
                         hint="use tt.ds(start, size) or tt.block(i, size)")
  if not isinstance(size, int):
    raise TileIndexError(f"{what}: a static slice of a dimension of dynamic size", loc=user_loc(),
                         hint="use tt.ds(start, size)")
  for bound in (item.start, item.stop):
    if bound is not None and not -size <= _integer(bound, what) <= size:  # type: ignore[operator]
      raise TileIndexError(f"{what}: the slice bound {bound} is out of range for size {size}", loc=user_loc(),
                           hint="tiles do not clamp; tt.ds(start, size) of a global reference may hang over its edge")
  if item.step is not None and _integer(item.step, what) < 1:  # type: ignore[operator]
    raise TileIndexError(f"{what}: the slice step {item.step} is not positive", loc=user_loc())
  start, stop, step = item.indices(size)
  return start, len(range(start, stop, step)), step
