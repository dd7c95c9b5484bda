"""Rule tables: one mapping Primitive -> function for each concern, and the op x concern matrix."""
from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from tiletrace.core.effects import Effect
from tiletrace.core.errors import RuleError
from tiletrace.core.graph import ALL_PRIMITIVES, Eqn, Primitive
from tiletrace.core.types import Type

F = TypeVar("F")
ALL_TABLES: list[RuleTable] = []


class RuleTable(Generic[F]):
  """`@table.register(op)` adds a rule; a second rule for an op raises; a missing one explains itself.

  `levels` says for which levels of primitives a rule is required: {0}, {1} or {0, 1}; an empty set means optional.
  """

  def __init__(self, concern: str, *, levels: frozenset[int] = frozenset({0, 1})):
    self.concern, self.levels = concern, levels
    self._rules: dict[Primitive, F] = {}
    ALL_TABLES.append(self)

  def register(self, *primitives: Primitive) -> Callable[[F], F]:
    def add(rule: F) -> F:
      for p in primitives:
        if p in self._rules:
          raise RuleError(f"the {self.concern} rule for '{p}' is already {self._rules[p]}")
        self._rules[p] = rule
      return rule
    return add

  def __getitem__(self, primitive: Primitive) -> F:
    try:
      return self._rules[primitive]
    except KeyError:
      raise RuleError(f"no {self.concern} rule for '{primitive}'",
                      hint=f"@{self.concern}_rules.register({primitive}_p)") from None

  def get(self, primitive: Primitive) -> F | None:
    return self._rules.get(primitive)

  def __contains__(self, primitive: Primitive) -> bool:
    return primitive in self._rules


# The two tables with several readers; every other table lives in the module that reads it.
# A type rule: (eqn) -> the types of its outvars, re-derived from operands, parameters and blocks.
type_rules: RuleTable[Callable[[Eqn], tuple[Type, ...]]] = RuleTable("type")
effect_rules: RuleTable[Callable[[Eqn], tuple[Effect, ...]]] = RuleTable("effect")


def effects(eqn: Eqn) -> tuple[Effect, ...]:
  return effect_rules[eqn.primitive](eqn)


def coverage() -> str:
  """The op x concern matrix; MISSING marks a hole."""
  rows = [["op", "level", *(t.concern for t in ALL_TABLES)]]
  for p in ALL_PRIMITIVES:
    marks = ("x" if p in t else "MISSING" if p.level in t.levels else "-" for t in ALL_TABLES)
    rows.append([p.name, str(p.level), *marks])
  widths = [max(map(len, col)) for col in zip(*rows, strict=True)]
  return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)
