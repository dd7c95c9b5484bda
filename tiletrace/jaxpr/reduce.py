"""Reductions and cumulative operations of jax."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.graph import Literal, Primitive
from tiletrace.core.ops import cumulative, reduce as reductions, transcendental
from tiletrace.core.tile import Tile
from tiletrace.jaxpr.rules import as_tile, cast, formula, full, op, rule
from tiletrace.jaxpr.shape import along, joined


def _reduction(name: str, primitive: Primitive, of_bools: Primitive | None = None) -> None:
  @rule(name)
  def reduced(x: Any, *, axes: Sequence[int], **_: Any) -> Any:
    chosen = of_bools if of_bools is not None and x.type.dtype == dtypes.bool_ else primitive
    return op(chosen, x, axes=tuple(sorted(axes))) if axes else x


for _name, _primitive in {
    "reduce_sum": reductions.reduce_sum_p, "reduce_prod": reductions.reduce_prod_p,
    "reduce_max": reductions.reduce_max_p, "reduce_min": reductions.reduce_min_p}.items():
  _reduction(_name, _primitive)


_reduction("reduce_or", reductions.reduce_or_p, reductions.reduce_max_p)
_reduction("reduce_and", reductions.reduce_and_p, reductions.reduce_min_p)


@rule("reduce_xor")
def _reduce_xor(x: Any, *, axes: Sequence[int], **_: Any) -> Any:
  """Of bools: whether an odd number is true."""
  if not axes:
    return x
  bits = x.astype(dtypes.i32) if x.dtype == dtypes.bool_ else x
  out = op(reductions.reduce_xor_p, bits, axes=tuple(sorted(axes)))
  return out != 0 if x.dtype == dtypes.bool_ else out


@rule("argmax")
def _argmax(x: Any, *, axes: Sequence[int], index_dtype: Any) -> Any:
  return cast(reductions.argmax(x, axes[0]), dtypes.canonical(index_dtype))


@rule("argmin")
def _argmin(x: Any, *, axes: Sequence[int], index_dtype: Any) -> Any:
  return cast(reductions.argmin(x, axes[0]), dtypes.canonical(index_dtype))


def _cumulative(name: str, primitive: Primitive) -> None:
  @rule(name)
  def accumulated(x: Any, *, axis: int, reverse: bool) -> Any:
    return cast(getattr(cumulative, primitive.name)(as_tile(x), axis, reverse=reverse), x.type.dtype)


for _primitive in cumulative.CUMULATIVE:
  _cumulative(_primitive.name, _primitive)


@formula("cumlogsumexp")
def _cumlogsumexp(x: Tile, *, axis: int, reverse: bool) -> Tile:
  """In log2(n) steps, each of which joins what is twice as far away: early elements keep their precision, which is lost
  where all are scaled by one maximum."""
  n, distance = x.shape[axis], 1
  while distance < n:
    rest = tuple(distance if d == axis else m for d, m in enumerate(x.shape))
    nothing = full(Literal(-math.inf, x.dtype), rest)
    parts = (along(x, axis, distance, n), nothing) if reverse else (nothing, along(x, axis, 0, n - distance))
    x = transcendental.logaddexp(x, joined(parts, axis))
    distance *= 2
  return x
