"""Strands: threads that run at one program counter, and the frames where divergent ones meet again."""
from __future__ import annotations

from typing import Any

import numpy as np

WARP = 32


class Frame:
  """A reconvergence point that some threads of one warp wait at for the others of that warp.

  Attributes:
    join: index of the instruction.
    missing: threads that have not arrived.
    arrived: those that have.
  """
  __slots__ = ("arrived", "join", "missing")

  def __init__(self, join: int, missing: int):
    self.join, self.missing = join, missing
    self.arrived: list[np.ndarray] = []


class Strand:
  """Threads at one program counter. Whole warps, or (below a divergent branch) some lanes of one warp.

  Attributes:
    threads: thread ids, ascending.
    at: the same as an index of a register row: a slice where they are contiguous.
    warps: their warps.
    whole: whether all lanes of all these warps are in it.
    frames: the reconvergence points ahead, the nearest last; empty for strands of several warps.
    retried: how often try_wait was made to fail here.
  """
  __slots__ = ("at", "frames", "pc", "retried", "threads", "warps", "whole")

  def __init__(self, pc: int, threads: np.ndarray, frames: tuple[Frame, ...] = ()):
    self.pc, self.threads, self.frames = pc, threads, frames
    self.at = index(threads)
    self.warps = ascending(threads // WARP)
    self.whole = len(threads) == WARP * len(self.warps)
    self.retried = False


def index(threads: np.ndarray) -> Any:
  """An index of a register row for ascending thread ids."""
  first, last = int(threads[0]), int(threads[-1])
  return slice(first, last + 1) if last - first + 1 == len(threads) else threads


def ascending(numbers: np.ndarray) -> np.ndarray:
  """Each number of an array in ascending order once: numpy's `unique` would sort it."""
  first = np.empty(len(numbers), bool)
  first[0] = True
  np.not_equal(numbers[1:], numbers[:-1], out=first[1:])
  return numbers[first]


def lanes_by_warp(threads: np.ndarray) -> list[np.ndarray]:
  """The threads cut at the borders of warps."""
  return np.split(threads, np.flatnonzero(np.diff(threads // WARP)) + 1)


def diverge(strand: Strand, taken: np.ndarray, target: int, fall: int, join: int) -> list[Strand]:
  """Cuts a strand at a branch: whole warps that agree go on together, a warp that disagrees gets a frame.

  Args:
    taken: for each of its threads, whether it branches.
    target, fall: where those go that do, and that do not.
    join: where the two ways meet.
  """
  out, agreed = [], {target: [], fall: []}
  for threads, way in zip(lanes_by_warp(strand.threads), _split_like(strand.threads, taken)):
    if way.all() or not way.any():
      agreed[target if way[0] else fall].append(threads)
      continue
    frame = Frame(join, len(threads))
    out += [Strand(target, threads[way], (*strand.frames, frame)), Strand(fall, threads[~way], (*strand.frames, frame))]
  for pc, parts in agreed.items():
    if parts:
      out.append(Strand(pc, np.concatenate(parts), strand.frames))
  return out


def _split_like(threads: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
  return np.split(values, np.flatnonzero(np.diff(threads // WARP)) + 1)


def merge(strands: list[Strand]) -> Strand:
  """One strand of several at the same place with the same frames."""
  if len(strands) == 1:
    return strands[0]
  return Strand(strands[0].pc, np.sort(np.concatenate([s.threads for s in strands])), strands[0].frames)
