"""Every choice that the hardware leaves open, from one seed: who runs next, and when asynchronous work is done."""
from __future__ import annotations

import random


class Adversary:
  """The same seed gives the same run.

  Seed 0 is the plain run: warps advance together, completions take turns between at once and as late as is legal. Other
  seeds reorder warps as well.
  """

  def __init__(self, seed: int):
    self.seed = seed
    self._random = random.Random(seed)
    self._wild = 0.0 if seed == 0 else self._random.choice((0.05, 0.2, 0.5))
    self._impatient = (1 / 16 if seed == 0 else 1 / 8, 1 / 2)[seed % 2]

  def pick(self, n: int) -> int:
    """One of n."""
    return self._random.randrange(n) if n > 1 else 0

  def out_of_order(self) -> bool:
    """Whether any strand runs next instead of the one furthest behind."""
    return self._random.random() < max(self._wild, 1 / 16)

  def pause(self) -> bool:
    """Whether a strand lets others go first after an instruction that they may notice."""
    return self._wild > 0 and self._random.random() < self._wild

  def split(self) -> bool:
    """Whether the warps of a strand part."""
    return self._wild > 0 and self._random.random() < self._wild / 4

  def early(self) -> bool:
    """Whether an asynchronous operation reads its source at once, or as late as it may."""
    return self._random.random() < 0.5

  def eager(self) -> bool:
    """Whether an asynchronous operation completes soon, or only when everybody waits."""
    return self._random.random() < 0.5

  def fails(self) -> bool:
    """Whether try_wait gives up before its phase completes, as it may."""
    return self._random.random() < self._impatient
