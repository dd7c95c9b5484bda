"""Bits of integers, and logic of bools, by jnp's names: the primitives are those of elementwise."""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.ops.elementwise import (
  and_p,
  astype,
  binary,
  operands,
  or_p,
  shift_left_p,
  shift_right_p,
  xor_p,
)
from tiletrace.core.tile import METHODS, Tile


def bitwise_and(x: Any, y: Any) -> Any:
  """x & y of integers or bools.

  >>> tt.bitwise_and(6, 3)
  2
  """
  return binary(and_p, "bitwise_and", operator.and_, x, y)


def bitwise_or(x: Any, y: Any) -> Any:
  """x | y of integers or bools.

  >>> tt.bitwise_or(6, 3)
  7
  """
  return binary(or_p, "bitwise_or", operator.or_, x, y)


def bitwise_xor(x: Any, y: Any) -> Any:
  """x ^ y of integers or bools.

  >>> tt.bitwise_xor(6, 3)
  5
  """
  return binary(xor_p, "bitwise_xor", operator.xor, x, y)


def left_shift(x: Any, y: Any) -> Any:
  """x << y of integers.

  >>> tt.left_shift(3, 2)
  12
  """
  return binary(shift_left_p, "left_shift", operator.lshift, x, y)


def right_shift(x: Any, y: Any) -> Any:
  """x >> y of integers: arithmetic for signed, logical for unsigned ones.

  >>> tt.right_shift(-8, 1)
  -4
  """
  return binary(shift_right_p, "right_shift", operator.rshift, x, y)


def logical_and(x: Any, y: Any) -> Any:
  """Whether x and y are both not 0.

  >>> tt.logical_and(2, 0)
  False
  """
  return _logical(bitwise_and, "logical_and", x, y)


def logical_or(x: Any, y: Any) -> Any:
  """Whether x or y is not 0.

  >>> tt.logical_or(2, 0)
  True
  """
  return _logical(bitwise_or, "logical_or", x, y)


def _logical(bitwise: Callable[[Any, Any], Any], what: str, x: Any, y: Any) -> Any:
  return bitwise(*(astype(v, dtypes.bool_) if isinstance(v, Tile) else bool(v)
                   for v in operands(what, "x y", x, y)))


METHODS.update(bitwise_and=bitwise_and, bitwise_or=bitwise_or, bitwise_xor=bitwise_xor, left_shift=left_shift,
               right_shift=right_shift)
