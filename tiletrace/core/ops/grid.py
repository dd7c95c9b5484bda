"""Where a program stands: program ids, sizes that the call decides, and (level 0) the hardware's ids of a persistent
launch."""
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect
from tiletrace.core.errors import TileIndexError, TileTypeError
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.ops.control import integer
from tiletrace.core.ops.elementwise import minimum
from tiletrace.core.printer import Printer, print_rules
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import METHODS, Tile, bind_tile
from tiletrace.core.trace import current
from tiletrace.core.types import Size, TileType

program_id_p = Primitive("program_id")
size_p = Primitive("size")
cta_id_p = Primitive("cta_id", level=0)
num_ctas_p = Primitive("num_ctas", level=0)
warpgroup_id_p = Primitive("warpgroup_id", level=0)
lookup_p = Primitive("lookup", level=0)


@type_rules.register(program_id_p, size_p, cta_id_p, num_ctas_p, warpgroup_id_p, lookup_p)
def _scalar(eqn: Eqn) -> tuple[TileType, ...]:
  return (TileType((), dtypes.i32),)


@effect_rules.register(program_id_p, size_p, cta_id_p, num_ctas_p, warpgroup_id_p, lookup_p)
def _pure(eqn: Eqn) -> tuple[Effect, ...]:
  return ()


def _axis(what: str, axis: Any) -> int:
  grid = current().options.grid
  if isinstance(axis, (bool, Tile)) or not hasattr(axis, "__index__"):
    raise TileTypeError(f"{what}: axis must be a Python int, got {axis!r}", loc=user_loc())
  axis = operator.index(axis)
  if not 0 <= axis < len(grid):
    raise TileIndexError(f"{what}({axis}) of a grid with {len(grid)} {'axes' if len(grid) != 1 else 'axis'}",
                         loc=user_loc())
  return axis


def program_id(axis: int) -> Tile:
  """i32 scalar: this program's index along `axis` of the grid.

  >>> def kernel(y):
  ...   i = tt.program_id(0)
  ...   y[i] = 10 * i
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((4,), jnp.int32), grid=4)()
  Array([ 0, 10, 20, 30], dtype=int32)
  """
  return bind_tile(program_id_p, (), axis=_axis("program_id", axis))


def num_programs(axis: int) -> Any:
  """Python int: the grid's extent along `axis`; an i32 scalar with dynamic_shapes, where each call has its own grid.

  >>> def kernel(y):
  ...   y[tt.program_id(0)] = tt.num_programs(0)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((4,), jnp.int32), grid=4)()
  Array([4, 4, 4, 4], dtype=int32)
  """
  extent: int | Size = current().options.grid[_axis("num_programs", axis)]
  return size_of(extent) if isinstance(extent, Size) else extent


def size_of(size: Size) -> Tile:
  """i32 scalar: a number that the call decides."""
  return bind_tile(size_p, (), size=size)


def cta_id() -> Tile:
  """i32 scalar (level 0): the index of this CTA in the launch, as hardware counts.

  >>> def kernel(y):
  ...   with tt.elect():
  ...     for t in tt.range(tt.cta_id(), 6, tt.num_ctas()):
  ...       y[t] = tt.lookup((5, 3, 8), t % 3)
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((6,), jnp.int32), grid=2)()
  Array([5, 3, 8, 5, 3, 8], dtype=int32)
  """
  return bind_tile(cta_id_p, ())


def num_ctas() -> Tile:
  """i32 scalar (level 0): how many CTAs the launch has.

  The example of `tt.cta_id` uses it.
  """
  return bind_tile(num_ctas_p, ())


def warpgroup_id() -> Tile:
  """i32 scalar (level 0): the index of this thread's warpgroup among those of the current role.

  >>> def kernel(y):
  ...   with tt.elect(each="warpgroup"):
  ...     y[tt.warpgroup_id()] = tt.warpgroup_id()
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((2,), jnp.int32), grid=1, warpgroups=2)()
  Array([0, 1], dtype=int32)
  """
  return bind_tile(warpgroup_id_p, ())


def raster(tile: Any, *, tiles: tuple[Any, Any], group: int = 8) -> tuple[Any, Any]:
  """The (row, column) of the `tile`-th of `tiles` in grouped order, which keeps operands in L2.

  Groups of `group` rows of tiles; inside a group column by column. The last group may be smaller.

  Args:
    tile: i32 scalar or Python int in [0, tiles[0] * tiles[1]).
    tiles: rows and columns of tiles.
    group: rows in a group.

  >>> [tt.raster(t, tiles=(3, 2), group=2) for t in range(6)]
  [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
  """
  rows, columns = tiles
  if not isinstance(tile, int):
    integer(tile, "raster: tile")
  if isinstance(group, bool) or not isinstance(group, int) or group < 1:
    raise TileTypeError(f"raster: group is {group!r}, it must be a positive Python int", loc=user_loc())
  per_group = group * columns
  first = tile // per_group * group
  height = minimum(rows - first, group) if isinstance(rows, Tile) or rows % group else group
  within = tile % per_group
  return first + within % height, within // height




def lookup(values: Sequence[int], index: Tile) -> Tile:
  """i32 scalar (level 0): `values[index]`, of Python ints that become a table in the kernel. The index is in range.

  The example of `tt.cta_id` uses it.

  Raises:
    TileTypeError: values that are no 32-bit ints, or none; an index that is no integer scalar.
  """
  table = tuple(values)
  if not table or not all(isinstance(v, int) and -2**31 <= v < 2**31 for v in table):
    raise TileTypeError("lookup: values must be 32-bit Python ints, one at least", loc=user_loc())
  return bind_tile(lookup_p, (integer(index, "lookup: index"),), values=table)


@print_rules.register(lookup_p)
def _print_lookup(eqn: Eqn, printer: Printer) -> str:
  """A long table by its first values and its length."""
  values = eqn.params["values"]
  shown = " ".join(map(str, values if len(values) <= 16 else values[:8]))
  more = "" if len(values) <= 16 else f" ... {len(values)} in all"
  return f"{printer.outs(eqn)}lookup[{shown}{more}] {printer.atom(eqn.values[0])}"


METHODS.update(size=size_of)
