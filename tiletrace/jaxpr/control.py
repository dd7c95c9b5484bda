"""Loops and branches of jax.lax: those whose length is known, and is short, are unrolled."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tiletrace.core.graph import Literal
from tiletrace.core.ops import control, shape as shapes
from tiletrace.jaxpr.rules import Operand, Refused, as_tile, cast, static_integer
from tiletrace.jaxpr.shape import stacked

_UNROLLED = 64      # iterations of a scan

# Records a jaxpr.
_Record = Callable[[Any, Sequence[Operand]], "list[Operand]"]


def _scan(record: _Record, operands: list[Operand], eqn: Any) -> list[Operand]:
  """One iteration after the other: each of its slices has a place of its own."""
  p = eqn.params
  length, consts, carried = p["length"], p["num_consts"], p["num_consts"] + p["num_carry"]
  if length > _UNROLLED:
    raise Refused(f"has {length} iterations, which would be unrolled: at most {_UNROLLED} are")
  state, rows = operands[consts:carried], {}
  for k in reversed(range(length)) if p["reverse"] else range(length):
    out = record(p["jaxpr"], [*operands[:consts], *state, *(_row(x, k) for x in operands[carried:])])
    state, rows[k] = out[:len(state)], out[len(state):]
  return [*state, *(stacked([rows[k][j] for k in range(length)], 0) for j in range(len(eqn.outvars) - len(state)))]


def _row(x: Any, k: int) -> Operand:
  if isinstance(x, np.ndarray):
    return x[k] if x.ndim > 1 else Literal(x[k].item(), x.dtype)
  return shapes.getitem(x, k)


def _while(record: _Record, operands: list[Operand], eqn: Any) -> list[Operand]:
  p = eqn.params
  tests, bodies = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
  of_test, of_body, state = operands[:tests], operands[tests:bodies], tuple(map(as_tile, operands[bodies:]))
  if any(v.aval.shape for v in p["cond_jaxpr"].jaxpr.outvars):
    raise Refused("has a condition for each element of a batch")
  out = control.while_loop(
      lambda carry: as_tile(record(p["cond_jaxpr"], [*of_test, *carry])[0]),
      lambda carry: tuple(map(as_tile, record(p["body_jaxpr"], [*of_body, *carry]))), state)
  return list(out)


def _cond(record: _Record, operands: list[Operand], eqn: Any) -> list[Operand]:
  """The branch of an index, which is clamped."""
  branches = eqn.params["branches"]
  index, *given = operands
  known = static_integer(index)
  if known is not None:
    return record(branches[min(max(known, 0), len(branches) - 1)], given)
  taken = [lambda b=b: tuple(map(as_tile, record(b, given))) for b in branches]
  index = cast(index, np.dtype(np.int32))
  return list(control.cond(index > 0, taken[1], taken[0]) if len(taken) == 2 else control.switch(index, taken))


BLOCKS: dict[str, Callable[[_Record, list[Any], Any], list[Operand]]] = {"scan": _scan, "while": _while, "cond": _cond}
