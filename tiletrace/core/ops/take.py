"""An element or slice of a tile value at an index that is not known while tracing."""
from __future__ import annotations

import operator
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import TileIndexError, TileTypeError
from tiletrace.core.graph import Literal
from tiletrace.core.ops.control import integer
from tiletrace.core.ops.elementwise import equal, maximum, minimum, where
from tiletrace.core.ops.reduce import any_, identity, max_, reduce_max_p
from tiletrace.core.ops.shape import getitem, iota, tile_argument
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile


def take(x: Any, index: Any, axis: int = 0) -> Tile:
  """`x[index]` along `axis`, which disappears: for an index that the GPU computes.

  Every thread compares the positions of its elements with the index, and the one that is equal goes to all that need
  it, by a maximum: the cost is that of tt.max over the axis. Every bit arrives as it is.

  Args:
    x: a tile.
    index: an integer scalar, clamped to the axis, as jax.lax.switch's; or a Python int, negative from the end.
    axis: of x.
  Raises:
    TileIndexError: x has no such axis, no element along it, or the Python int is outside.
    TileTypeError: the index is no integer scalar.

  Example:
    >>> def kernel(x, y):
    ...   y[...] = x[...] + tt.take(x[...], tt.argmax(x[...]))
    >>> x = jnp.array([1., 5., 2.])
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
    Array([ 6., 10.,  7.], dtype=float32)
  """
  value = tile_argument(x, "take: x")
  if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
    raise TileTypeError(f"take: axis {axis!r}", loc=user_loc(), hint="one int")
  axis = operator.index(axis)
  if not -value.ndim <= axis < value.ndim:
    raise TileIndexError(f"take: axis {axis} of {value.type}", loc=user_loc())
  axis %= value.ndim
  extent = value.shape[axis]
  i = integer(index, "take: index")
  if isinstance(i, Literal):
    if not -extent <= i.value < extent:
      raise TileIndexError(f"take: index {i.value} of axis {axis} of {value.type}", loc=user_loc())
    return getitem(value, (*(slice(None),) * axis, int(i.value)))
  if not value.size:
    raise TileIndexError(f"take: {value.type} has no elements", loc=user_loc())
  here = equal(iota(value.shape, axis), maximum(minimum(i, extent - 1), 0))
  if value.dtype == dtypes.bool_:
    return any_(here & value, axis)
  return max_(where(here, value, identity(reduce_max_p, value.dtype)), axis)
