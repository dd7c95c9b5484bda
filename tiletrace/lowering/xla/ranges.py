"""What is known about a graph's index scalars: an affine form in the program ids plus a bounded rest.

It proves that a view stays inside its reference (no mask, no padding) and that programs write apart (partition.py).
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from tiletrace.core.graph import Atom, Block, Eqn, Literal, TileGraph, Var
from tiletrace.core.ops.control import for_loop_p
from tiletrace.core.ops.elementwise import add_p, floordiv_p, max_p, min_p, mod_p, mul_p, neg_p, select_p, sub_p
from tiletrace.core.ops.grid import program_id_p
from tiletrace.core.rules import RuleTable
from tiletrace.core.types import Dyn

_INT32 = range(-2**31, 2**31)


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
  """The values sum(coefs[a] * program_id(a)) + r for some r in [lo, hi]; r may depend on anything."""
  coefs: tuple[int, ...]
  lo: int
  hi: int

  @property
  def is_constant(self) -> bool:
    return not any(self.coefs) and self.lo == self.hi

  def __add__(self, other: Range) -> Range:
    return Range(tuple(a + b for a, b in zip(self.coefs, other.coefs)), self.lo + other.lo, self.hi + other.hi)

  def scale(self, by: int) -> Range:
    lo, hi = sorted((self.lo * by, self.hi * by))
    return Range(tuple(c * by for c in self.coefs), lo, hi)


RangeRule = Callable[["Ranges", Eqn], "Range | None"]
range_rules: RuleTable[RangeRule] = RuleTable("range", levels=frozenset())


class Ranges:
  """The ranges of a graph's integer scalars. An atom of which nothing is known has none."""

  def __init__(self, graph: TileGraph):
    self.grid = graph.options.grid
    self._known: dict[Var, Range] = {}
    self._visit(graph.body)

  def _visit(self, block: Block) -> None:
    for eqn in block.eqns:
      if eqn.primitive is for_loop_p:
        self._keep(eqn.blocks[0].invars[0], _loop_index(self, eqn))
      elif (rule := range_rules.get(eqn.primitive)) is not None and not eqn.outvars[0].type.shape:  # type: ignore
        self._keep(eqn.outvars[0], rule(self, eqn))
      for inner in eqn.blocks:
        self._visit(inner)

  def _keep(self, var: Var, r: Range | None) -> None:
    if r is not None:
      lo, hi = self.bounds(r)
      if lo in _INT32 and hi in _INT32:  # else it may have wrapped
        self._known[var] = r

  def constant(self, value: int) -> Range:
    return Range((0,) * len(self.grid), value, value)

  def of(self, atom: Atom) -> Range | None:
    if isinstance(atom, Literal):
      return self.constant(int(atom.value)) if isinstance(atom.value, int) else None
    return self._known.get(atom)

  def of_part(self, part: int | Dyn, dyn: tuple[Atom, ...]) -> Range | None:
    """The range of a static or dynamic part of a view."""
    return self.of(dyn[part.index]) if isinstance(part, Dyn) else self.constant(part)

  def bounds(self, r: Range) -> tuple[int, int]:
    """The least and greatest value over the whole grid."""
    ends = [c * max(n - 1, 0) for c, n in zip(r.coefs, self.grid)]
    return r.lo + sum(min(e, 0) for e in ends), r.hi + sum(max(e, 0) for e in ends)

  def flatten(self, r: Range) -> Range:
    return Range((0,) * len(self.grid), *self.bounds(r))

  def hull(self, a: Range, b: Range) -> Range:
    if a.coefs != b.coefs:
      a, b = self.flatten(a), self.flatten(b)
    return Range(a.coefs, min(a.lo, b.lo), max(a.hi, b.hi))


def _loop_index(known: Ranges, eqn: Eqn) -> Range | None:
  lo, hi, step = map(known.of, eqn.values[:3])
  if lo is None or hi is None or step is None or not step.is_constant or step.lo < 1:
    return None
  last = hi + known.constant(-1)
  if lo.coefs != last.coefs:
    lo, last = known.flatten(lo), known.flatten(last)
  return Range(lo.coefs, lo.lo, max(lo.lo, last.hi))  # an empty loop runs no body: any range is right


@range_rules.register(program_id_p)
def _program_id(known: Ranges, eqn: Eqn) -> Range:
  axis = eqn.params["axis"]
  if known.grid[axis] == 1:
    return known.constant(0)
  return Range(tuple(int(a == axis) for a in range(len(known.grid))), 0, 0)


def _of_operands(rule: Callable[..., Range | None]) -> RangeRule:
  @functools.wraps(rule)
  def wrapped(known: Ranges, eqn: Eqn) -> Range | None:
    operands = [known.of(x) for x in eqn.values]
    return None if None in operands else rule(known, *operands)
  return wrapped


@range_rules.register(add_p)
@_of_operands
def _add(known: Ranges, a: Range, b: Range) -> Range:
  return a + b


@range_rules.register(sub_p)
@_of_operands
def _sub(known: Ranges, a: Range, b: Range) -> Range:
  return a + b.scale(-1)


@range_rules.register(neg_p)
@_of_operands
def _neg(known: Ranges, a: Range) -> Range:
  return a.scale(-1)


@range_rules.register(mul_p)
@_of_operands
def _mul(known: Ranges, a: Range, b: Range) -> Range:
  for x, y in ((a, b), (b, a)):
    if y.is_constant:
      return x.scale(y.lo)
  (al, ah), (bl, bh) = known.bounds(a), known.bounds(b)
  corners = (al * bl, al * bh, ah * bl, ah * bh)
  return Range((0,) * len(known.grid), min(corners), max(corners))


@range_rules.register(floordiv_p)
@_of_operands
def _floordiv(known: Ranges, a: Range, b: Range) -> Range | None:
  n = b.lo
  if not b.is_constant or n < 1:
    return None
  if any(c % n for c in a.coefs):
    a = known.flatten(a)
  return Range(tuple(c // n for c in a.coefs), a.lo // n, a.hi // n)


@range_rules.register(mod_p)
@_of_operands
def _mod(known: Ranges, a: Range, b: Range) -> Range | None:
  n = b.lo
  if not b.is_constant or n < 1:
    return None
  lo, hi = known.bounds(a)
  return a if lo >= 0 and hi < n else Range((0,) * len(known.grid), 0, n - 1)


@range_rules.register(min_p)
@_of_operands
def _min(known: Ranges, a: Range, b: Range) -> Range:
  if a.coefs != b.coefs:
    a, b = known.flatten(a), known.flatten(b)
  return Range(a.coefs, min(a.lo, b.lo), min(a.hi, b.hi))


@range_rules.register(max_p)
@_of_operands
def _max(known: Ranges, a: Range, b: Range) -> Range:
  if a.coefs != b.coefs:
    a, b = known.flatten(a), known.flatten(b)
  return Range(a.coefs, max(a.lo, b.lo), max(a.hi, b.hi))


@range_rules.register(select_p)
def _select(known: Ranges, eqn: Eqn) -> Range | None:
  on_true, on_false = map(known.of, eqn.values[1:])
  return None if on_true is None or on_false is None else known.hull(on_true, on_false)
