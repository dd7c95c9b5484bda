"""What is known of integer scalars before anything runs: an interval and a divisor for each.

Bounds checks are left out, and vector widths chosen, only where these prove it.
"""
from __future__ import annotations

import dataclasses
import math

import numpy as np

from tiletrace.core.graph import Atom, Block, Eqn, Literal, TileGraph, Var
from tiletrace.core.types import TileType

_MAX = 2**31 - 1
_MIN = -(2**31)


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
  """lo <= x <= hi and `divisor` divides x (0: x is 0)."""
  lo: int = _MIN
  hi: int = _MAX
  divisor: int = 1

  def __add__(self, o: Fact) -> Fact:
    return _fact(self.lo + o.lo, self.hi + o.hi, math.gcd(self.divisor, o.divisor))

  def __sub__(self, o: Fact) -> Fact:
    return _fact(self.lo - o.hi, self.hi - o.lo, math.gcd(self.divisor, o.divisor))

  def __mul__(self, o: Fact) -> Fact:
    ends = [a * b for a in (self.lo, self.hi) for b in (o.lo, o.hi)]
    return _fact(min(ends), max(ends), self.divisor * o.divisor)

  def join(self, o: Fact) -> Fact:
    return Fact(min(self.lo, o.lo), max(self.hi, o.hi), math.gcd(self.divisor, o.divisor))


UNKNOWN = Fact()


def _fact(lo: int, hi: int, divisor: int) -> Fact:
  """A fact about a 32-bit result: one that may wrap is known to be nothing but a multiple of a power of two."""
  if lo < _MIN or hi > _MAX:
    return Fact(divisor=divisor & -divisor if divisor else 1)
  return Fact(lo, hi, divisor)


def constant(value: int) -> Fact:
  return Fact(value, value, abs(value))


class Facts:
  """Facts of every i32 scalar of a graph. `facts[atom]` works for ints, Literals and Vars."""

  def __init__(self, graph: TileGraph):
    self._of: dict[Var, Fact] = {}
    self._grid = graph.options.grid
    self._block(graph.body)

  def __getitem__(self, a: Atom | int) -> Fact:
    if isinstance(a, int):
      return constant(a)
    if isinstance(a, Literal):
      return constant(int(a.value)) if isinstance(a.value, int) else UNKNOWN
    return self._of.get(a, UNKNOWN)

  def _block(self, block: Block) -> None:
    for eqn in block.eqns:
      if eqn.primitive.name == "for_loop":
        lo, hi, step = (self[v] for v in eqn.values[:3])
        if step.lo > 0:
          self._of[eqn.blocks[0].invars[0]] = Fact(lo.lo, max(lo.lo, hi.hi - 1), math.gcd(lo.divisor, step.divisor))
      for inner in eqn.blocks:
        self._block(inner)
      if eqn.outvars and _is_index(eqn.outvars[0]):
        self._of[eqn.outvars[0]] = self._result(eqn)

  def _result(self, eqn: Eqn) -> Fact:
    name = eqn.primitive.name
    if name == "program_id":
      return Fact(0, max(0, self._grid[eqn.params["axis"]] - 1))
    if name == "num_ctas":
      return Fact(1, _MAX)
    if name in ("cta_id", "warpgroup_id"):
      return Fact(0, _MAX)
    xs = [self[v] for v in eqn.values]
    rule = _RULES.get(name)
    return rule(*xs) if rule is not None else UNKNOWN


def _floordiv(x: Fact, y: Fact) -> Fact:
  if y.lo != y.hi or y.lo <= 0:
    return UNKNOWN
  n = y.lo
  return Fact(x.lo // n, x.hi // n, x.divisor // n if x.divisor % n == 0 else 1)


def _mod(x: Fact, y: Fact) -> Fact:
  if y.lo != y.hi or y.lo <= 0:
    return UNKNOWN
  if x.lo >= 0 and x.hi < y.lo:
    return x
  return Fact(0, y.lo - 1, math.gcd(x.divisor, y.lo))


def _min(x: Fact, y: Fact) -> Fact:
  return Fact(min(x.lo, y.lo), min(x.hi, y.hi), math.gcd(x.divisor, y.divisor))


def _max(x: Fact, y: Fact) -> Fact:
  return Fact(max(x.lo, y.lo), max(x.hi, y.hi), math.gcd(x.divisor, y.divisor))


_RULES = {
    "add": Fact.__add__, "sub": Fact.__sub__, "mul": Fact.__mul__, "floordiv": _floordiv, "mod": _mod,
    "min": _min, "max": _max, "select": lambda _, x, y: x.join(y),
}


def _is_index(v: Var) -> bool:
  return isinstance(v.type, TileType) and v.type.shape == () and v.type.dtype == np.int32
