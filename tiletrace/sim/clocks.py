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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Token:
  """A release through global memory: what a thread of a CTA knew, as other CTAs may learn it.

  Attributes:
    wide: whether other CTAs may: gpu or system scope.
    foreign: what the thread had learnt from other CTAs.
  """
  cta: int
  wide: bool
  clock: Clock
  foreign: tuple[Token, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Init:
  """An mbarrier's initialisation, and whether it is visible to the asynchronous proxy."""
  thread: int
  value: int
  fenced: bool
  where: Any


class Grid:
  """What the race detectors of a grid share: numbers for places, which shadows keep."""

  def __init__(self):
    self._places: dict[Hashable, int] = {}
    self.places: list[Any] = []

  def place(self, where: Hashable) -> int:
    """A number for `where`; `places` has it back."""
    index = self._places.setdefault(where, len(self.places))
    if index == len(self.places):
      self.places.append(where)
    return index


def rows_of(threads: np.ndarray) -> Any:
  """Threads as a slice where they are neighbours: numpy then makes no copy."""
  first, n = int(threads[0]), len(threads)
  neighbours = int(threads[-1]) - first == n - 1 and (threads[1:] > threads[:-1]).all()
  return slice(first, first + n) if neighbours else threads


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
