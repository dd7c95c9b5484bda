"""Tile: an immutable tile value with jnp's operators, and the traps for what tracing cannot do with one."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from tiletrace.core.errors import ForeignFunctionError, TileAttributeError, TileTypeError
from tiletrace.core.graph import Literal, Primitive, Var
from tiletrace.core.source import Loc, user_loc
from tiletrace.core.trace import Scope, Trace, Value, bind, wrapper
from tiletrace.core.types import TileType

# Methods of Tile and Ref by name, filled by core.ops, which stands on this module.
METHODS: dict[str, Callable[..., Any]] = {}


def _operator(name: str, *, reflected: bool = False) -> Callable[..., Any]:
  if reflected:
    return lambda self, other: METHODS[name](other, self)
  return lambda self, *args: METHODS[name](self, *args)


class Tile(Value):
  """An immutable tile value; rank 0 is a scalar. Operators and functions are jnp's, without rank promotion.

  Dtypes change by `.astype` only, apart from promotion, which never makes 64 bits by itself.

  >>> def kernel(x, y):
  ...   v = x[...]
  ...   print(v.shape, v.dtype, (v > 1).dtype, v[:, None].ndim)
  ...   y[...] = (2 * v + 1).sum(axis=1)
  >>> x = jnp.arange(6.).reshape(2, 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2,), jnp.float32), grid=1)(x)
  (2, 3) float32 bool 3
  Array([ 9., 27.], dtype=float32)
  """
  __slots__ = ()
  __array_ufunc__ = None  # a numpy scalar on the left leaves the operation to us
  type: TileType

  @property
  def shape(self) -> tuple[int, ...]:
    return self.type.shape

  @property
  def dtype(self) -> np.dtype:
    return self.type.dtype

  @property
  def ndim(self) -> int:
    return len(self.type.shape)

  @property
  def size(self) -> int:
    return self.type.size

  @property
  def T(self) -> Tile:
    return METHODS["transpose"](self)

  def astype(self, dtype: Any) -> Tile:
    """This tile converted to `dtype`; float to integer truncates towards zero."""
    return METHODS["astype"](self, dtype)

  def reshape(self, *shape: Any) -> Tile:
    return METHODS["reshape"](self, shape[0] if len(shape) == 1 else shape)

  def sum(self, axis: Any = None, *, keepdims: bool = False, dtype: Any = None) -> Tile:
    return METHODS["sum"](self, axis, keepdims=keepdims, dtype=dtype)

  def max(self, axis: Any = None, *, keepdims: bool = False) -> Tile:
    return METHODS["max"](self, axis, keepdims=keepdims)

  def min(self, axis: Any = None, *, keepdims: bool = False) -> Tile:
    return METHODS["min"](self, axis, keepdims=keepdims)

  def mean(self, axis: Any = None, *, keepdims: bool = False) -> Tile:
    return METHODS["mean"](self, axis, keepdims=keepdims)

  def any(self, axis: Any = None, *, keepdims: bool = False) -> Tile:
    return METHODS["any"](self, axis, keepdims=keepdims)

  def all(self, axis: Any = None, *, keepdims: bool = False) -> Tile:
    return METHODS["all"](self, axis, keepdims=keepdims)

  def cumsum(self, axis: int | None = None, *, reverse: bool = False, dtype: Any = None) -> Tile:
    return METHODS["cumsum"](self, axis, reverse=reverse, dtype=dtype)

  def cumprod(self, axis: int | None = None, *, reverse: bool = False, dtype: Any = None) -> Tile:
    return METHODS["cumprod"](self, axis, reverse=reverse, dtype=dtype)

  def __getitem__(self, index: Any) -> Tile:
    return METHODS["getitem"](self, index)

  def __repr__(self) -> str:
    return f"Tile<{self.type}>"

  __add__, __radd__ = _operator("add"), _operator("add", reflected=True)
  __sub__, __rsub__ = _operator("subtract"), _operator("subtract", reflected=True)
  __mul__, __rmul__ = _operator("multiply"), _operator("multiply", reflected=True)
  __truediv__, __rtruediv__ = _operator("divide"), _operator("divide", reflected=True)
  __floordiv__, __rfloordiv__ = _operator("floor_divide"), _operator("floor_divide", reflected=True)
  __mod__, __rmod__ = _operator("mod"), _operator("mod", reflected=True)
  __pow__, __rpow__ = _operator("power"), _operator("power", reflected=True)
  __and__, __rand__ = _operator("bitwise_and"), _operator("bitwise_and", reflected=True)
  __or__, __ror__ = _operator("bitwise_or"), _operator("bitwise_or", reflected=True)
  __xor__, __rxor__ = _operator("bitwise_xor"), _operator("bitwise_xor", reflected=True)
  __lshift__, __rlshift__ = _operator("left_shift"), _operator("left_shift", reflected=True)
  __rshift__, __rrshift__ = _operator("right_shift"), _operator("right_shift", reflected=True)
  __lt__, __le__, __gt__, __ge__ = map(_operator, ("less", "less_equal", "greater", "greater_equal"))
  __eq__, __ne__ = _operator("equal"), _operator("not_equal")
  __neg__, __abs__, __invert__ = map(_operator, ("negative", "abs", "invert"))
  __hash__ = None  # type: ignore[assignment]

  def __pos__(self) -> Tile:
    return self

  # --- what tracing cannot answer

  def _unknown(self, what: str, hint: str) -> TileTypeError:
    return TileTypeError(f"{what} of a traced {self.type} is not known while tracing", loc=user_loc(), hint=hint)

  def __bool__(self) -> bool:
    raise self._unknown(
      "the truth value", "use `with tt.when(p):` or tt.where(p, x, y); write & | ~ for and/or/not, split chained "
      "comparisons (a < b < c), tt.maximum/tt.minimum for max/min, tt.any(x == y) for `in`; Python `if` and `assert` "
      "are for static values")

  def __index__(self) -> int:
    raise self._unknown("the integer value", "use tt.range for a loop, ref[i] to index a reference; "
                        "Python's range() and list indices are static")

  def __int__(self) -> int:
    raise self._unknown("the integer value", "use x.astype(jnp.int32)")

  def __float__(self) -> float:
    raise self._unknown("the float value", "use x.astype(jnp.float32), and tt.exp rather than math.exp")

  def __iter__(self) -> NoReturn:
    raise self._unknown("the sequence of elements", "use tt.parallel, a reduction, or static slices x[:, :8]")

  def __contains__(self, item: object) -> bool:
    raise self._unknown("membership", "use tt.any(x == y)")

  def __len__(self) -> int:
    # not a TypeError: list() swallows those from __len__
    raise ForeignFunctionError(f"len() of a traced {self.type}", loc=user_loc(), hint="use x.shape[0]")

  def __round__(self, ndigits: int | None = None) -> NoReturn:
    raise self._unknown("round()", "use tt.round(x)")

  # --- mistakes

  def __setitem__(self, index: Any, value: Any) -> NoReturn:
    raise TileTypeError("a tile value is immutable", loc=user_loc(),
                        hint="allocate a fragment: ref = tt.alloc_fragment(shape, dtype); ref[...] = v")

  @property
  def at(self) -> NoReturn:
    raise TileTypeError("a tile value is immutable and has no .at", loc=user_loc(),
                        hint="use tt.where with tt.arange, or a fragment reference: ref[...] = v")

  def __matmul__(self, other: Any) -> NoReturn:
    raise TileTypeError("`@` on tile values has no accumulator", loc=user_loc(), hint="use tt.gemm(a, b, acc)")

  __rmatmul__ = __matmul__

  @property
  def __jax_array__(self) -> NoReturn:
    # a property, and not an AttributeError or TypeError: jax's own hasattr() test raises it
    raise ForeignFunctionError(f"a jax function was applied to a tile {self.type}", loc=user_loc(),
                               hint="use the tt function of the same name, or tt.call_jax(fn, x)")

  def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
    raise ForeignFunctionError(f"a numpy function was applied to a tile {self.type}", loc=user_loc(),
                               hint="use the tt function of the same name, or tt.call_jax(fn, x)")

  def __getattr__(self, name: str) -> NoReturn:
    raise TileAttributeError(f"a tile value has no attribute '{name}'", loc=user_loc(),
                             hint="functions are in the module: tt.exp(x), tt.where(p, x, y), ...")


@wrapper(TileType)
def make_tile(trace: Trace, scope: Scope, var: Var, loc: Loc) -> Tile:
  return Tile(trace, scope, var, loc)


def bind_tile(primitive: Primitive, operands: Sequence[Value | Literal], **params: Any) -> Tile:
  """`bind` of a primitive with one tile as its result."""
  out, = bind(primitive, operands, params)
  assert isinstance(out, Tile)
  return out


class MeshIndex(Tile):
  """An index of tt.parallel: the tile offset + iota along `axis` of the open mesh.

  Attributes:
    axis: which axis of the mesh.
    mesh: the extents of tt.parallel.
    offset: what was added to the index: `ref[i0 + i, j]` is the block `tt.ds(i0, extent)`.
  """
  __slots__ = ("axis", "mesh", "offset")

  def __init__(self, tile: Tile, axis: int, mesh: tuple[int, ...], offset: int | Tile):
    super().__init__(tile.trace, tile.scope, tile.var, tile.loc)
    self.axis, self.mesh, self.offset = axis, mesh, offset

  @property
  def extent(self) -> int:
    return self.mesh[self.axis]
