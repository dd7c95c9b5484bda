"""What is known of integer scalars before anything runs: an interval and a divisor for each.

Bounds checks are left out, and vector widths chosen, only where these prove it. What tt.assume says of a scalar that
its own block makes is true wherever that scalar is; of others it is used for what the block computes below.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from tiletrace.core.graph import Atom, Block, Eqn, Literal, TileGraph, Var
from tiletrace.core.types import Extent, Size, TileType

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


  def meet(self, o: Fact) -> Fact:
    """What both say; what one says, where they contradict each other."""
    lo, hi = max(self.lo, o.lo), min(self.hi, o.hi)
    return Fact(lo, hi, math.lcm(self.divisor, o.divisor)) if lo <= hi else self


UNKNOWN = Fact()


def _fact(lo: int, hi: int, divisor: int) -> Fact:
  """A fact about a 32-bit result: one that may wrap is known to be nothing but a multiple of a power of two."""
  if lo < _MIN or hi > _MAX:
    return Fact(divisor=divisor & -divisor if divisor else 1)
  return Fact(lo, hi, divisor)


def constant(value: int) -> Fact:
  return Fact(value, value, abs(value))


def extent_fact(n: Extent) -> Fact:
  """What is known of an extent: of one that a call decides, what each call checks."""
  if not isinstance(n, Size):
    return constant(n)
  return Fact(n.factor, n.most, n.factor)


class Facts:
  """Facts of every i32 scalar of a graph. `facts[atom]` works for ints, Literals and Vars."""

  def __init__(self, graph: TileGraph):
    self._of: dict[Var, Fact] = {}
    self._grid, self._cluster = graph.options.grid, graph.options.cluster_size
    self._by: dict[Var, Eqn] = {}
    self._assumed: dict[Var, Fact] = {}            # of scalars that the block of the tt.assume makes
    self._block(graph.body)
    if self._assumed:                              # again, for what is computed above the tt.assume
      self._block(graph.body)

  def __getitem__(self, a: Atom | int) -> Fact:
    if isinstance(a, int):
      return constant(a)
    if isinstance(a, Literal):
      return constant(int(a.value)) if isinstance(a.value, int) else UNKNOWN
    return self._of.get(a, UNKNOWN)

  def difference(self, a: Atom | int, b: Atom | int) -> Fact:
    """What is known of a - b: more than the two facts say where both are sums that share terms."""
    plus, minus = self._terms(a), self._terms(b)
    for term in [t for t in plus if isinstance(t, Var)]:
      if term in minus:
        plus.remove(term)
        minus.remove(term)
    apart = sum((self[t] for t in plus), constant(0)) - sum((self[t] for t in minus), constant(0))
    return apart.meet(self[a] - self[b])

  def _terms(self, a: Atom | int) -> list[Atom | int]:
    eqn = self._by.get(a) if isinstance(a, Var) else None
    return [a] if eqn is None or eqn.primitive.name != "add" else [t for v in eqn.values for t in self._terms(v)]

  def certainly_runs(self, loop: Eqn) -> bool:
    """A loop that goes up has an iteration at least."""
    first, end, step = loop.values[:3]
    return self[first].hi < self[end].lo and self[step].lo > 0

  def _block(self, block: Block) -> None:
    own: set[Var] = {v for eqn in block.eqns for v in eqn.outvars} | set(block.invars)
    outer: dict[Var, Fact] = {}                    # what is known, outside, of what is assumed here
    for eqn in block.eqns:
      if eqn.primitive.name == "for_loop":
        lo, hi, step = (self[v] for v in eqn.values[:3])
        if step.lo > 0:
          self._learn(eqn.blocks[0].invars[0], Fact(lo.lo, max(lo.lo, hi.hi - 1), math.gcd(lo.divisor, step.divisor)))
      for inner in eqn.blocks:
        self._block(inner)
      self._by.update((v, eqn) for v in eqn.outvars)
      if eqn.outvars and _is_index(eqn.outvars[0]):
        self._learn(eqn.outvars[0], self._result(eqn))
      if eqn.primitive.name == "assume":
        for var, fact in self._said(eqn.values[0]):
          if var in own:
            self._assumed[var] = self._assumed.get(var, UNKNOWN).meet(fact)
          else:
            outer.setdefault(var, self[var])
          self._of[var] = self[var].meet(fact)
    self._of |= outer

  def _learn(self, var: Var, fact: Fact) -> None:
    self._of[var] = fact.meet(self._assumed.get(var, UNKNOWN))

  def _said(self, condition: Atom) -> Iterator[tuple[Var, Fact]]:
    """What a condition says of i32 scalars."""
    eqn = self._by.get(condition) if isinstance(condition, Var) else None
    if eqn is None:
      return
    name, operands = eqn.primitive.name, eqn.values
    if name == "and":
      for a in operands:
        yield from self._said(a)
    elif name in _SWAPPED:
      x, y = operands
      for a, relation, b in ((x, name, y), (y, _SWAPPED[name], x)):
        if isinstance(a, Var) and _is_index(a):
          yield a, _compared(relation, self[b])
      made = self._by.get(x) if isinstance(x, Var) else None
      if name == "eq" and made is not None and made.primitive.name == "mod" and self[y] == constant(0):
        a, n = made.values
        if isinstance(a, Var) and _is_index(a) and self[n].lo == self[n].hi != 0:
          yield a, Fact(divisor=abs(self[n].lo))

  def _result(self, eqn: Eqn) -> Fact:
    name = eqn.primitive.name
    if name == "program_id":
      return Fact(0, max(0, extent_fact(self._grid[eqn.params["axis"]]).hi - 1))
    if name == "size":
      return extent_fact(eqn.params["size"])
    if name == "num_ctas":
      return Fact(self._cluster, _MAX)              # whole clusters
    if name in ("cta_id", "warpgroup_id"):
      return Fact(0, _MAX)
    if name == "lookup":
      values = eqn.params["values"]
      return Fact(min(values), max(values), math.gcd(*values))
    xs = [self[v] for v in eqn.values]
    rule = _RULES.get(name)
    return rule(*xs) if rule is not None else UNKNOWN


_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


def _compared(relation: str, bound: Fact) -> Fact:
  """What `x relation y` says of x."""
  return {"lt": Fact(hi=max(_MIN, bound.hi - 1)), "le": Fact(hi=bound.hi), "gt": Fact(lo=min(_MAX, bound.lo + 1)),
          "ge": Fact(lo=bound.lo), "eq": bound}[relation]


def _floordiv(x: Fact, y: Fact) -> Fact:
  if y.lo <= 0 or (y.lo != y.hi and x.lo < 0):
    return UNKNOWN
  if y.lo != y.hi:
    return Fact(x.lo // y.hi, x.hi // y.lo)
  n = y.lo
  return Fact(x.lo // n, x.hi // n, x.divisor // n if x.divisor % n == 0 else 1)


def _mod(x: Fact, y: Fact) -> Fact:
  if y.lo <= 0:
    return UNKNOWN
  if x.lo >= 0 and x.hi < y.lo:
    return x
  return Fact(0, y.hi - 1, math.gcd(x.divisor, y.divisor))


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
