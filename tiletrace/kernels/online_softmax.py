"""Softmax of rows whose logits come block by block, in kernels (Milakov and Gimelshein, arXiv:1805.02867), and what it
is in jax.numpy."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import tiletrace as tt

LOG2E = math.log2(math.e)
_GROWTH = 8.0            # in powers of 2


class OnlineSoftmax:
  """Of each row, what its exponents are relative to, and the sum of its weights so far; in registers.

  Args:
    rows: how many.
    c: what logits are multiplied with to be powers of 2.
  """

  def __init__(self, rows: int, c: float):
    self.c = c
    self.top = tt.alloc_fragment((rows,), jnp.float32)
    self.total = tt.alloc_fragment((rows,), jnp.float32)

  def start(self) -> None:
    self.top[...], self.total[...] = -jnp.inf, 0

  def weights(self, logits: Any, *, add: bool = True) -> tuple[Any, Any]:
    """Takes a block of logits [rows, n] in; gives its weights, and what the weights before it are to be multiplied
    with, [rows]. Without `add` the sum of weights is left to `add`, which can stand after products that it overlaps.

    What exponents are relative to stays where a row has grown by 2**8 at most, so that accumulators are seldom
    rescaled.
    """
    before = self.top[...]
    grown = tt.maximum(before, tt.max(logits, axis=1))
    top = tt.where(grown - before > _GROWTH / self.c, grown, before)
    base = tt.where(top == -jnp.inf, 0, top)               # a row that has seen no key yet
    alpha = tt.exp2((before - base) * self.c, approximate=True)      # 1 where they are the same: no FMA rounds it apart
    base *= self.c
    weights = tt.exp2(logits * self.c - base[:, None], approximate=True)
    if add:
      self.add(weights, alpha)
    self.top[...] = top
    return weights, alpha

  def add(self, weights: Any, alpha: Any) -> None:
    """What `weights` gave of a block goes into the sum."""
    self.total[...] = self.total[...] * alpha + tt.sum(weights, axis=1)

  def share(self) -> Any:
    """[rows]: what weighted sums are to be multiplied with at the end; 1 for a row that has seen nothing."""
    return 1 / tt.where(self.total[...] == 0, 1, self.total[...])

  def log2_sum(self) -> Any:
    """[rows]: the log-sum-exps to base 2; -inf for a row that has seen nothing."""
    return self.top[...] * self.c + tt.log2(self.total[...])


def zero_past(values: Sequence[Any], j: Any, stop: Any, few: int | None = None) -> None:
  """In a kernel: rows of the j-th block of values from `stop` on become 0, for NaN there, times zero, would not be.

  Args:
    values: references [n, columns] in shared memory that hold the block.
    few: rows at a time, where few registers are left; they divide n.
  """
  n = values[0].shape[0]
  step = n if few is None else few
  with tt.when((j + 1) * n > stop):
    for s in values:
      for r in range(0, n, step):
        tt.store(s.at[r:r + step], 0, mask=(r + tt.arange(step) >= stop - j * n)[:, None])


def softmax_where(logits: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
  """softmax along the last axis of what is seen, and its log-sum-exp; 0 and -inf where nothing is."""
  residual = jax.nn.logsumexp(logits, axis=-1, where=seen)
  base = jnp.where(jnp.isfinite(residual), residual, 0)[..., None]
  return jnp.where(seen, jnp.exp(logits - base), 0), residual
