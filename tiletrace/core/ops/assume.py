"""tt.assume: what the author knows of integer scalars and the compiler cannot prove."""
from __future__ import annotations

from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect, OrderEffect
from tiletrace.core.errors import TileTypeError
from tiletrace.core.graph import Eqn, Literal, Primitive
from tiletrace.core.operands import check, tile_types
from tiletrace.core.ops.control import predicate
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.trace import bind
from tiletrace.core.types import TileType

assume_p = Primitive("assume")


@type_rules.register(assume_p)
def _assume_type(eqn: Eqn) -> tuple[()]:
  check(tile_types(eqn.invars) == (TileType((), dtypes.bool_),), "assume takes a bool scalar")
  return ()


@effect_rules.register(assume_p)
def _kept(eqn: Eqn) -> tuple[Effect, ...]:
  return (OrderEffect("assume"),)


def assume(condition: Any) -> None:
  """Promises that a condition on integer scalars holds, wherever the program comes to this line.

  The compiler leaves out bounds checks and takes wider copies where what it is told, and what follows from that by
  arithmetic, proves them. It understands comparisons of scalars with each other and with numbers, `x % n == 0`, and `&`
  of these. They hold in the block in which they stand: of a scalar that this block makes in all of it, of another one
  for what the block computes from it further down. No code is made for it. If the promise is broken the kernel may read
  and write anything.

  Args:
    condition: a bool scalar, or a Python bool.
  Raises:
    TileTypeError: no bool scalar; or False.

  Example:
    >>> def kernel(x, y):
    ...   start = x[0]
    ...   tt.assume((start % 8 == 0) & (start >= 0) & (start <= 16))
    ...   y[...] = x[tt.ds(start, 4)]
    >>> x = jnp.arange(8, 32)
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((4,), x.dtype), grid=1)(x)
    Array([16, 17, 18, 19], dtype=int32)
  """
  p = predicate(condition, "tt.assume")
  if not isinstance(p, Literal):
    bind(assume_p, (p,), {})
  elif not p.value:
    raise TileTypeError("tt.assume: the condition is False", loc=user_loc(), hint="it never holds here")
