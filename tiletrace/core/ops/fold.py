"""What simplify may compute: literals exactly as the device would, and identities that hold for every value."""
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.graph import Atom, Eqn, Literal, Primitive
from tiletrace.core.ops import elementwise as e
from tiletrace.core.ops.shape import broadcast_in_dim_p
from tiletrace.core.simplify import fold_rules
from tiletrace.core.types import TileType

# numpy agrees with the device on these, bit by bit, in f32 and the integers: each is one IEEE or modular operation.
NUMPY: dict[Primitive, Callable[..., Any]] = {
  e.add_p: operator.add, e.sub_p: operator.sub, e.mul_p: operator.mul, e.div_p: operator.truediv,
  e.min_p: np.minimum, e.max_p: np.maximum, e.neg_p: operator.neg, e.abs_p: np.abs, e.floor_p: np.floor,
  e.ceil_p: np.ceil, e.and_p: operator.and_, e.or_p: operator.or_, e.xor_p: operator.xor, e.not_p: operator.invert,
  e.eq_p: operator.eq, e.ne_p: operator.ne, e.lt_p: operator.lt, e.le_p: operator.le, e.gt_p: operator.gt,
  e.ge_p: operator.ge, e.isnan_p: np.isnan, e.floordiv_p: operator.floordiv, e.mod_p: operator.mod,
  e.shift_left_p: operator.lshift, e.shift_right_p: operator.rshift,
}
_EXACT = frozenset({dtypes.bool_, dtypes.i32, dtypes.u32, dtypes.f32})


def _constant(eqn: Eqn) -> Literal | None:
  """The value of an equation whose operands are all literals."""
  values = [a for a in eqn.invars if isinstance(a, Literal)]
  if len(values) != len(eqn.invars) or any(a.type.dtype not in _EXACT for a in values):
    return None
  x = [a.type.dtype.type(a.value) for a in values]
  if eqn.primitive in (e.floordiv_p, e.mod_p) and x[1] == 0:
    return None
  if eqn.primitive in (e.shift_left_p, e.shift_right_p) and not 0 <= x[1] < 32:
    return None
  with np.errstate(all="ignore"):
    out = NUMPY[eqn.primitive](*x)
  return _literal(out, eqn)


def _literal(value: Any, eqn: Eqn) -> Literal:
  dtype = eqn.outvars[0].type.dtype  # type: ignore[union-attr]
  return Literal(dtype.type(value).item(), dtype)


def _is(a: Atom, value: int) -> bool:
  return isinstance(a, Literal) and a.value == value


def _like(a: Atom, eqn: Eqn) -> Atom | None:
  """`a`, where it has the result's type: an operand of rank 0 is not the tile that it is spread to."""
  return a if a.type == eqn.outvars[0].type else None


def _zero(eqn: Eqn) -> Literal | None:
  out = eqn.outvars[0].type
  return Literal(0, out.dtype) if isinstance(out, TileType) and not out.shape else None


def _identity(eqn: Eqn) -> Atom | None:
  """x + 0, x * 1, x * 0, x // 1, ... with the literal on the right. Floats: only x * 1 and x / 1 keep every value."""
  name, (x, y) = eqn.primitive, eqn.invars
  if _is(y, 1) and name in (e.mul_p, e.div_p, e.floordiv_p):
    return _like(x, eqn)
  if dtypes.is_float(y.type.dtype):  # type: ignore[union-attr]
    return None
  if _is(y, 0) and name in (e.add_p, e.sub_p, e.or_p, e.xor_p, e.shift_left_p, e.shift_right_p):
    return _like(x, eqn)
  if (_is(y, 0) and name in (e.mul_p, e.and_p)) or (_is(y, 1) and name is e.mod_p) or (x == y and name is e.sub_p):
    return _bool_zero(eqn)
  if x == y and name in (e.and_p, e.or_p, e.min_p, e.max_p):
    return _like(x, eqn)
  if isinstance(y, Literal) and y.type.dtype == dtypes.bool_ and y.value:
    return _like(x, eqn) if name is e.and_p else _like(y, eqn) if name is e.or_p else None
  return None


def _bool_zero(eqn: Eqn) -> Literal | None:
  zero = _zero(eqn)
  return Literal(False, dtypes.bool_) if zero is not None and zero.type.dtype == dtypes.bool_ else zero


@fold_rules.register(e.add_p, e.sub_p, e.mul_p, e.div_p, e.floordiv_p, e.mod_p, e.min_p, e.max_p, e.and_p, e.or_p,
                     e.xor_p, e.shift_left_p, e.shift_right_p)
def _fold_binary(eqn: Eqn) -> Atom | None:
  return _constant(eqn) or _identity(eqn)


@fold_rules.register(e.neg_p, e.abs_p, e.floor_p, e.ceil_p, e.not_p, e.isnan_p, e.eq_p, e.ne_p, e.lt_p, e.le_p, e.gt_p,
                     e.ge_p)
def _fold_constant(eqn: Eqn) -> Atom | None:
  return _constant(eqn)


@fold_rules.register(e.select_p)
def _fold_select(eqn: Eqn) -> Atom | None:
  p, x, y = eqn.invars
  if isinstance(p, Literal):
    return _like(x if p.value else y, eqn)
  return _like(x, eqn) if x == y else None


@fold_rules.register(e.cast_p)
def _fold_cast(eqn: Eqn) -> Atom | None:
  x, = eqn.invars
  to = eqn.params["dtype"]
  if not isinstance(x, Literal) or x.type.dtype not in _EXACT or to not in _EXACT:
    return None
  if dtypes.is_float(x.type.dtype) and not dtypes.is_float(to):
    low, high = dtypes.range_of(to)
    if not low <= x.value <= high:  # NaN too: what the device does is not numpy's
      return None
  value = np.asarray(x.value, x.type.dtype).astype(to)
  return Literal(value.item(), to)


@fold_rules.register(broadcast_in_dim_p)
def _fold_broadcast(eqn: Eqn) -> Atom | None:
  return _like(eqn.invars[0], eqn)
