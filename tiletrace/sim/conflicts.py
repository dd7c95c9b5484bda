"""What the race detector finds: kinds with stable names, and two accesses that nothing orders."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

RACE = "race"
MISSING_PROXY_FENCE = "missing proxy fence"
OVERWRITTEN_WHILE_READ = "overwritten while read asynchronously"
NOT_WAITED_FOR = "asynchronous write not waited for"
RACE_BETWEEN_CTAS = "race between CTAs"
WRITE_TO_INPUT = "write to an input"
BARRIER_NOT_VISIBLE = "mbarrier initialisation not visible"
KINDS = (RACE, MISSING_PROXY_FENCE, OVERWRITTEN_WHILE_READ, NOT_WAITED_FOR, RACE_BETWEEN_CTAS, WRITE_TO_INPUT,
         BARRIER_NOT_VISIBLE)


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
  """Two accesses that nothing orders.

  Attributes:
    kind: one of KINDS.
    where, other: what the caller gave with the later and the earlier access; `other` is None where there is none.
    threads, others: who made them; for an asynchronous operation who issued it.
    addresses: starts of the granules in conflict.
    nbytes: of a granule.
  """
  kind: str
  where: Any
  other: Any
  threads: tuple[int, ...]
  others: tuple[int, ...]
  addresses: tuple[int, ...]
  nbytes: int

  def __str__(self) -> str:
    text = f"{self.kind}: {self.where} by threads {ranges(self.threads)}"
    if self.other is not None:
      text += f" against {self.other} by threads {ranges(self.others)}"
    return f"{text}, at {min(self.addresses):#x}..{max(self.addresses) + self.nbytes - 1:#x}"


def ranges(numbers: Sequence[int]) -> str:
  """`0..31, 64`."""
  out: list[list[int]] = []
  for n in sorted(numbers):
    if out and n == out[-1][1] + 1:
      out[-1][1] = n
    else:
      out.append([n, n])
  return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in out)
