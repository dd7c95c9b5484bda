"""What is handed on between threads: clocks of a CTA's threads and asynchronous operations, and order between CTAs."""
from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
  """Knowledge that is handed on: dense rows of the detector's clocks (or none), and single columns of the first.

  Attributes:
    known: int32 [columns when it was released] each: what happened, and what of it the async proxy sees.
    columns, values: int32 [n]: asynchronous operations known to be complete.
  """
  known: tuple[np.ndarray, ...]
  columns: np.ndarray
  values: np.ndarray


NO_COLUMNS = np.zeros(0, np.int32)
NOTHING = Clock((), NO_COLUMNS, NO_COLUMNS)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Agent:
  """An asynchronous operation: its epoch, what was known when it was issued, and by whom."""
  kind: str
  column: int
  value: int
  threads: tuple[int, ...]
  known: tuple[np.ndarray, ...]


class Grid:
  """Order between CTAs, by whole CTAs: turn k of a CTA ends where it releases for the k-th time at gpu scope."""

  def __init__(self, ctas: int):
    self.turns = np.eye(ctas, dtype=np.int32)    # [who knows, about whom]
    self._places: dict[Hashable, int] = {}
    self.places: list[Any] = []

  def place(self, where: Hashable) -> int:
    """A number for `where`, for shadows; `places` has it back."""
    index = self._places.setdefault(where, len(self.places))
    if index == len(self.places):
      self.places.append(where)
    return index

  def release(self, cta: int) -> np.ndarray:
    """What `cta` did so far, for whoever acquires it."""
    known = self.turns[cta].copy()
    self.turns[cta, cta] += 1
    return known

  def acquire(self, cta: int, known: np.ndarray) -> None:
    np.maximum(self.turns[cta], known, out=self.turns[cta])


def rows_of(threads: np.ndarray) -> Any:
  """Threads as a slice where they are neighbours: numpy then makes no copy."""
  first, n = int(threads[0]), len(threads)
  return slice(first, first + n) if int(threads[-1]) - first == n - 1 and (np.diff(threads) == 1).all() else threads


def join(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray:
  """The later of two rows, column by column; one may be shorter or missing."""
  if a is None or b is None:
    out = b if a is None else a
    assert out is not None
    return out
  if len(a) < len(b):
    a, b = b, a
  out = a.copy()
  np.maximum(out[:len(b)], b, out=out[:len(b)])
  return out
