"""How well the simulator and a GPU agree: what tests record, and the table of it that a run prints at its end.

`TT_AGREEMENT=PATH` writes what was recorded as JSON, too. Workers of pytest-xdist send theirs with their reports.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

PROPERTY = "agreement"           # of a test's report


@dataclasses.dataclass(frozen=True)
class Record:
  """One thing that both machines did.

  Attributes:
    group: its class: a section of the PTX ISA, or a kind of kernel.
    name: the instruction with its modifiers, or the kernel.
    equal: whether all results were the same, bit for bit (NaN for NaN).
    error, bound: the distance of the result that came closest to its bound, and that bound.
  """
  group: str
  name: str
  equal: bool
  error: float = 0.0
  bound: float = 0.0

  @property
  def part(self) -> float:
    """Of the bound that the error is; above 1: beyond it."""
    return 0.0 if self.equal else float(parts(self.error, self.bound))


def parts(error: np.ndarray | float, bound: np.ndarray | float) -> np.ndarray:
  """error / bound; without a bound infinite, and where both are infinite 1."""
  with np.errstate(all="ignore"):
    quotient = np.nan_to_num(np.divide(error, bound), nan=np.inf, posinf=np.inf)
  return np.where(np.isinf(bound) & ~np.isnan(error), 1.0, quotient)


_NOW: list[Record] = []          # of the running test


def record(group: str, name: str, equal: Any, error: Any = np.inf, bound: Any = 0.0) -> None:
  """Keeps what one instruction did.

  Args:
    equal: which results were the same. error, bound: of each: the distance, and the greatest that is allowed.
  """
  same, distance, allowed = np.broadcast_arrays(*(np.atleast_1d(x) for x in (equal, error, bound)))
  differs = ~same.astype(bool)
  if not differs.any():
    _NOW.append(Record(group, name, True))
    return
  distance, allowed = distance[differs].astype(np.float64), allowed[differs].astype(np.float64)
  worst = int(np.argmax(parts(distance, allowed)))
  _NOW.append(Record(group, name, False, float(distance[worst]), float(allowed[worst])))


def taken() -> list[dict]:
  """What was recorded since the last call, as plain data."""
  out = [dataclasses.asdict(r) for r in _NOW]
  _NOW.clear()
  return out


def merged(records: Iterable[Record]) -> list[Record]:
  """One for each name of a group: equal if all were, else the worst."""
  out: dict[tuple[str, str], Record] = {}
  for r in records:
    known = out.get((r.group, r.name))
    if known is None or r.part > known.part or (known.equal and not r.equal):
      out[r.group, r.name] = r
  return sorted(out.values(), key=lambda r: (r.group, r.name))


def table(records: Iterable[Record]) -> str:
  """Lines of a Markdown table: for each group how many were compared, how many were equal in every bit or within
  their bound, and the greatest error, as part of its bound."""
  groups: dict[str, list[Record]] = {}
  for r in merged(records):
    groups.setdefault(r.group, []).append(r)
  lines = ["| what | compared | equal | within bound | beyond | greatest error, of its bound |",
           "|---|---|---|---|---|---|"]
  for group, found in groups.items():
    equal, within = sum(r.equal for r in found), sum(not r.equal and r.part <= 1 for r in found)
    worst = max(found, key=lambda r: r.part)
    error = "0" if worst.equal else f"{worst.error:.2g} of {worst.bound:.2g}: {worst.name}"
    lines.append(f"| {group} | {len(found)} | {equal} | {within} | {len(found) - equal - within} | {error} |")
  return "\n".join(lines)


def write(path: str, records: Sequence[Record]) -> None:
  """As JSON; no bound and no number are null."""
  data = [{k: v if not isinstance(v, float) or np.isfinite(v) else None for k, v in dataclasses.asdict(r).items()}
          for r in merged(records)]
  with open(path, "w", encoding="utf-8") as f:
    json.dump({"table": table(records).splitlines(), "records": data}, f, indent=1)
