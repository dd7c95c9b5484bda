"""Variants: the ways an op may be emitted, best first, each with named predicates that say why they decline.

The choice and every reason are recorded. Only a declared reason moves on to the next variant: an exception is a
fault of ours and is never caught here.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn
from tiletrace.core.source import Loc

Predicate = Callable[[Eqn, Any], str | None]  # (equation, SelectContext) -> None, or the reason to decline


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
  """One way to emit an op. `when` is tried in order; the first reason declines."""
  name: str
  when: tuple[Predicate, ...] = ()

  def declines(self, eqn: Eqn, ctx: Any) -> str | None:
    for predicate in self.when:
      reason = predicate(eqn, ctx)
      if reason is not None:
        return reason
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
  """The variant chosen for one equation and why the better ones declined."""
  op: str
  variant: str
  declined: tuple[tuple[str, str], ...]
  loc: Loc

  def __str__(self) -> str:
    out = [f"{self.loc.short()}  {self.op}: {self.variant}"]
    out += [f"    not {name}: {reason}" for name, reason in self.declined]
    return "\n".join(out)


def choose(op: str, variants: Sequence[Variant], eqn: Eqn, ctx: Any, *, forced: str | None = None) -> Choice:
  """The first variant that does not decline, or the forced one.

  Raises:
    LoweringError: none fits (the table of reasons), the forced one declines, or it does not exist.
  """
  names = [v.name for v in variants]
  if forced is not None and forced not in names:
    raise LoweringError(f"'{op}' has no variant '{forced}'", loc=eqn.loc, hint=f"its variants are {', '.join(names)}")
  declined: list[tuple[str, str]] = []
  for v in variants:
    if forced is not None and v.name != forced:
      continue
    reason = v.declines(eqn, ctx)
    if reason is None:
      return Choice(op, v.name, tuple(declined), eqn.loc)
    declined.append((v.name, reason))
  width = max(len(n) for n, _ in declined)
  table = "\n".join(f"    {n.ljust(width)}  {r}" for n, r in declined)
  what = f"the forced variant of '{op}' declines" if forced is not None else f"no way to emit '{op}'"
  hint = "change the shapes or placement that the reasons name"
  raise LoweringError(f"{what}:\n{table}", loc=eqn.loc, hint=hint if forced is None else f"{hint}, or do not force it")
