"""What the user hands to an operation -> operands of an equation: tiles, literals, and the errors for all else."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError
from tiletrace.core.foreign import refuse_foreign
from tiletrace.core.graph import Atom, Literal
from tiletrace.core.ref import Ref, plain_name
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile
from tiletrace.core.types import TileType

Number = bool | int | float | np.generic  # known while tracing
Operand = Tile | Number


def operand(x: Any, what: str) -> Operand:
  """A tile or a number. A numpy scalar stays strong, but is narrowed to 32 bits; `what` is e.g. "add: x"."""
  if isinstance(x, Tile):
    return x
  if isinstance(x, np.ndarray):
    if x.ndim:
      raise TileTypeError(f"{what} is a numpy array of shape {list(x.shape)}", loc=user_loc(),
                          hint="pass it to the kernel as an argument, or compute it with tt.arange")
    x = x[()]
  if isinstance(x, np.generic):
    dtype = dtypes.canonical(x.dtype)
    return dtypes.narrow(dtype).type(x)
  if isinstance(x, (bool, int, float)):
    return x
  if isinstance(x, Ref):
    name = plain_name(x)
    raise TileTypeError(f"{what}: {name} is a reference, not a value", loc=user_loc(),
                        hint=f"did you mean {name}[...]?")
  return refuse_foreign(x, what)


def is_static(x: Operand) -> bool:
  return not isinstance(x, Tile)


def python_number(x: Any) -> bool | int | float:
  return x.item() if isinstance(x, np.generic) else x


def promoted(primitive: str, *operands: Operand) -> np.dtype:
  """The common dtype of operands."""
  try:
    return dtypes.promote(*(x.dtype if isinstance(x, (Tile, np.generic)) else x for x in operands))
  except TileTypeError as e:
    raise TileTypeError(f"{primitive}: {e.message}", loc=user_loc(), hint=e.hint) from None


def literal(x: Any, dtype: np.dtype, what: str) -> Literal:
  """A number as a literal of `dtype`: integers must fit, floats are rounded where they are used."""
  x = python_number(x)
  if dtypes.is_float(dtype):
    return Literal(float(x), dtype)
  if dtype == dtypes.bool_:
    return Literal(bool(x), dtype)
  if isinstance(x, float):
    raise TileTypeError(f"{what}: the float {x} is no {dtypes.short_name(dtype)}", loc=user_loc())
  low, high = dtypes.range_of(dtype)
  if not low <= x <= high:
    raise TileTypeError(f"{what}: {x} does not fit in {dtypes.short_name(dtype)}", loc=user_loc(),
                        hint="cast the tile to a wider type: .astype(...)")
  return Literal(int(x), dtype)


def common_shape(primitive: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
  """The broadcast shape: equal ranks with dimensions equal or 1, or rank 0; no rank promotion."""
  full = [s for s in shapes if s]
  text = " and ".join(str(list(s)) for s in full)
  if len({len(s) for s in full}) > 1:
    raise TileTypeError(f"{primitive}: ranks differ, {text}", loc=user_loc(),
                        hint="say which axis is meant: x[:, None] for a value of each row, "
                             "x[None, :] for one of each column")
  out = []
  for sizes in zip(*full):
    wide = {n for n in sizes if n != 1}
    if len(wide) > 1:
      raise TileTypeError(f"{primitive}: shapes {text} do not broadcast", loc=user_loc(),
                          hint="insert an axis: x[:, None] or keepdims=True")
    out.append(wide.pop() if wide else 1)
  return tuple(out)


# --- for type rules

def tile_types(eqn_values: Sequence[Atom]) -> tuple[TileType, ...]:
  types = tuple(v.type for v in eqn_values)
  assert all(isinstance(t, TileType) for t in types), types
  return types  # type: ignore[return-value]


def check(ok: bool, message: str, hint: str | None = None) -> None:
  """In a type rule: the operands fit."""
  if not ok:
    raise TileTypeError(message, loc=user_loc(), hint=hint)


def refuse_keywords(what: str, unknown: dict[str, Any], translations: dict[str, str]) -> None:
  """Raises for a keyword that `what` does not have; `translations` says how other languages' words are written here."""
  for name in unknown:
    raise TileTypeError(f"{what} has no keyword {name!r}", loc=user_loc(), hint=translations.get(name))
