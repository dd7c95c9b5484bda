"""Dynamic shapes: jax.export's dimension strings ("8*m, k"), and what an array's shape says of them.

>>> pattern = parse("8*m, k, 64")
>>> print(*pattern)
8*m k 64
>>> sizes = Sizes("f")
>>> sizes.match("x", pattern, (128, 777, 64))
(Size(names=('m',), factor=8), Size(names=('k',), factor=1), 64)
>>> sizes.values
{'m': 16, 'k': 777}
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import user_loc
from tiletrace.core.types import MAX_SIZE, Extent, Size

_NAME = re.compile(r"(?:(\d+)\s*\*\s*)?([A-Za-z]\w*)(?:\s*\*\s*(\d+))?")

Pattern = tuple[Any, ...]       # for each dimension an int, a Size of one name, None (as it is); Ellipsis: as they are


def parse(text: Any) -> Pattern:
  """The dimensions of one string: ints, names, multiples of names ("8*m" promises a multiple of 8), "_" for a dimension
  that is static whatever its size, "..." for any number of these. None is "...".

  Raises:
    ValueError: anything else, with the dimension.
  """
  if text is None:
    return (Ellipsis,)
  if not isinstance(text, str):
    raise ValueError(f"{text!r} is no string")
  inner = text.strip().removeprefix("(").removesuffix(")")
  found = tuple(_dimension(part.strip()) for part in inner.split(",") if part.strip())
  if sum(d is Ellipsis for d in found) > 1:
    raise ValueError(f"{text!r} has more than one '...'")
  return found


def _dimension(text: str) -> Any:
  if text in ("_", "..."):
    return None if text == "_" else Ellipsis
  if text.isdecimal():
    return int(text)
  match = _NAME.fullmatch(text)
  if match is None or (match[1] and match[3]):
    raise ValueError(f"dimension {text!r} is none of an int, a name, a multiple such as 8*m, '_' and '...'")
  factor = int(match[1] or match[3] or 1)
  if not 1 <= factor <= MAX_SIZE:
    raise ValueError(f"dimension {text!r}: multiples go from 1 to {MAX_SIZE}")
  return Size((match[2],), factor)


class Sizes:
  """What the names of a call's dimensions stand for, learned from one array after another.

  Args:
    kernel: its name, for messages.
  Attributes:
    values: name -> its number, an int or a symbolic dimension of jax.export.
  """

  def __init__(self, kernel: str):
    self._kernel, self._where = kernel, {}
    self.values: dict[str, Any] = {}

  def match(self, name: str, pattern: Pattern, shape: Sequence[Any]) -> tuple[Extent, ...]:
    """The types' shape of the array `name`: ints, and a Size for each dimension that has a name.

    Raises:
      TileTypeError: the array has another rank or size, a promised multiple does not hold, or one name is two sizes.
    """
    if Ellipsis in pattern:
      at, missing = pattern.index(Ellipsis), len(shape) - len(pattern) + 1
      pattern = (*pattern[:at], *[None] * missing, *pattern[at + 1:])
    if len(pattern) != len(shape):
      self._fail(f"{name} has the {len(shape)} dimensions {_text(shape)}, dynamic_shapes says {_text(pattern)}",
                 "give one string for each array, inputs first, then outputs")
    return tuple(self._one(f"dimension {d} of {name}", wanted, n) for d, (wanted, n) in enumerate(zip(pattern, shape)))

  def _one(self, where: str, wanted: Any, n: Any) -> Extent:
    if isinstance(wanted, Size):
      return self._named(where, wanted, n)
    if wanted is not None and n != wanted:
      self._fail(f"{where} is {n}, dynamic_shapes says {wanted}", None)
    if not isinstance(n, int):
      self._fail(f"{where} is the symbolic size {n}, dynamic_shapes has no name for it",
                 "a dimension without a name is compiled for its size: give it a name")
    return n

  def _named(self, where: str, wanted: Size, n: Any) -> Size:
    (name,) = wanted.names
    if isinstance(n, int) and n > MAX_SIZE:
      self._fail(f"{where} is {n}: a dynamic dimension has at most {MAX_SIZE} elements",
                 "split it into two dimensions, or leave it static")
    if n % wanted.factor != 0:
      self._fail(f"{where} is {n}, no multiple of {wanted.factor}, which dynamic_shapes promises: {wanted}",
                 f"pad the array, or promise less: {name}")
    value = n // wanted.factor
    known = self.values.setdefault(name, value)
    first, whole = self._where.setdefault(name, (where, n))
    if known != value:
      self._fail(f"{where} is {n}, but {first} is {whole}, and dynamic_shapes has the name {name} for both", None)
    return wanted

  def _fail(self, message: str, hint: str | None) -> None:
    raise TileTypeError(f"{self._kernel}: {message}", loc=user_loc(), hint=hint)


def _text(dims: Sequence[Any]) -> str:
  return f"({', '.join('_' if d is None else '...' if d is Ellipsis else str(d) for d in dims)})"
