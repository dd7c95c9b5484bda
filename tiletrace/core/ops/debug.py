"""tt.debug_print and tt.debug_check: what a kernel says while it runs, where debugging is on; else they are nothing."""
from __future__ import annotations

from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect, OrderEffect
from tiletrace.core.errors import TileTypeError
from tiletrace.core.graph import Eqn, Literal, Primitive
from tiletrace.core.operands import check, literal, operand, tile_types
from tiletrace.core.ops.reduce import all_
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile
from tiletrace.core.trace import bind
from tiletrace.core.types import RefType, TileType

MOST_ELEMENTS = 4096     # of a printed tile

debug_print_p = Primitive("debug_print")      # params: fmt
debug_check_p = Primitive("debug_check")      # params: message
# One record in the ring of a compiled kernel (lowering/debug.py). References: the ring, and one i32 of shared memory
# where there is a tile among the values. Params: site, the number that stands for its text.
debug_record_p = Primitive("debug_record", level=0)


@type_rules.register(debug_print_p)
def _print_type(eqn: Eqn) -> tuple[()]:
  check(not eqn.refs and all(isinstance(a.type, TileType) for a in eqn.values), "debug_print takes tile values")
  return ()


@type_rules.register(debug_check_p)
def _check_type(eqn: Eqn) -> tuple[()]:
  check(tile_types(eqn.invars) == (TileType((), dtypes.bool_),), "debug_check takes a bool scalar")
  return ()


@type_rules.register(debug_record_p)
def _record_type(eqn: Eqn) -> tuple[()]:
  roots = [r.type for r in eqn.refs]
  check(all(isinstance(t, RefType) and t.dtype == dtypes.i32 for t in roots) and len(roots) in (1, 2),
        "debug_record writes to a ring of i32")
  check(len(roots) == 2 or not any(t.shape for t in tile_types(eqn.values)), "a tile needs a place for its address")
  return ()


@effect_rules.register(debug_print_p, debug_check_p, debug_record_p)
def _kept(eqn: Eqn) -> tuple[Effect, ...]:
  """Records do not overlap, whoever writes them: nothing needs to order them but the program."""
  return (OrderEffect(eqn.primitive.name),)


def debug_print(fmt: str, *values: Any) -> None:
  """Prints from a running kernel, like jax.debug.print: once for each program that comes to this line.

  Nothing is printed, and no code is made, unless debugging is on: CompileOptions(debug=True), or TT_DEBUG=1. The text
  comes after the call, with the program's ids and the line before it; programs are in no order.

  Args:
    fmt: with `{}`, `{0:.3f}` and so on for the values, as str.format takes them.
    *values: tiles and numbers. A tile, of 4096 elements at most, is printed as a numpy array.
  Raises:
    TileTypeError: `fmt` does not fit the values; a value that is no tile or number, too large, or of 64 bits.

  Example:
    >>> def kernel(x, y):
    ...   tt.debug_print("the sum is {:.1f}", tt.sum(x[...]))
    ...   y[...] = x[...]
    >>> x = jnp.array([1., 2.])
    >>> options = tt.CompileOptions(debug=True)
    >>> call = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1, options=options)
    >>> y = jax.block_until_ready(call(x))  # doctest: +ELLIPSIS
    <...>:2, program (0,): the sum is 3.0
  """
  what = "tt.debug_print"
  if not isinstance(fmt, str):
    raise TileTypeError(f"{what}: the format is {fmt!r}, not a string", loc=user_loc(),
                        hint='tt.debug_print("x is {}", x)')
  operands = [_value(v, f"{what}: value {n}") for n, v in enumerate(values)]
  try:
    fmt.format(*(np.zeros(v.type.shape, v.type.dtype)[()] for v in operands))
  except (IndexError, KeyError, ValueError, TypeError, AttributeError) as e:
    raise TileTypeError(f"{what}: {fmt!r} does not fit ({', '.join(str(v.type) for v in operands)}): {e}",
                        loc=user_loc(), hint="one {} for each value; a tile takes no :.3f") from None
  bind(debug_print_p, operands, {"fmt": fmt})


def debug_check(condition: Any, message: str) -> None:
  """Raises an error after the call if the condition is not true in some program, where debugging is on.

  Args:
    condition: a bool scalar or tile, of which every element must be true.
    message: of the error, beside the line and the program's ids.
  Raises:
    TileTypeError: the condition is not bool, or the message no string.

  Example:
    >>> def kernel(x, y):
    ...   tt.debug_check(x[...] > 0, "x must be positive")
    ...   y[...] = tt.log(x[...])
    >>> x = jnp.array([1., 2.])
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1, options=tt.CompileOptions(debug=True))(x)
    Array([0.       , 0.6931472], dtype=float32)
  """
  what = "tt.debug_check"
  if not isinstance(message, str):
    raise TileTypeError(f"{what}: the message is {message!r}, not a string", loc=user_loc(),
                        hint='tt.debug_check(n > 0, "n must be positive")')
  p = operand(condition, f"{what}: condition")
  if isinstance(p, Tile) and p.dtype == dtypes.bool_:
    p = all_(p) if p.ndim else p
  elif isinstance(p, bool | np.bool_):
    p = Literal(bool(p), dtypes.bool_)
  else:
    said = str(p.type) if isinstance(p, Tile) else repr(p)
    raise TileTypeError(f"{what} takes a bool, got {said}", loc=user_loc(), hint="compare it: x != 0")
  bind(debug_check_p, (p,), {"message": message})


def _value(x: Any, what: str) -> Tile | Literal:
  x = operand(x, what)
  if not isinstance(x, Tile):
    return literal(x, x.dtype if isinstance(x, np.generic) else dtypes.canonical(type(x)), what)
  if x.dtype.itemsize > 4 or x.size > MOST_ELEMENTS:
    raise TileTypeError(f"{what} is {x.type}: {MOST_ELEMENTS} elements of 32 bits can be printed", loc=user_loc(),
                        hint="print a slice of it, x[:8, :8], or cast it")
  return x
