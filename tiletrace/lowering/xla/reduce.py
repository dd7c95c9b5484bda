"""Reductions of values along axes."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax

from tiletrace.core.dtypes import f32, i8, i32, u8
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.ops.reduce import (
  reduce_and_p,
  reduce_max_p,
  reduce_min_p,
  reduce_or_p,
  reduce_prod_p,
  reduce_sum_p,
  reduce_xor_p,
)
from tiletrace.lowering.xla.elementwise import convert, is_narrow
from tiletrace.lowering.xla.machine import Machine, xla_rules


def _register(primitive: Primitive, fn: Callable[..., jax.Array]) -> None:
  @xla_rules.register(primitive)
  def rule(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
    x = jax.numpy.asarray(m.read(eqn.values[0]))
    return [convert(fn(x.astype(_wide(x.dtype)), eqn.params["axes"]), x.dtype)]


def _wide(dtype: np.dtype) -> np.dtype:
  """What is accumulated in, as the language says. Beside a reduction of 8-bit integers XLA's CPU backend saturates what
  is computed of the same values."""
  if is_narrow(dtype):
    return f32
  return i32 if dtype in (i8, u8) else dtype


def _propagating_nan(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
  """XLA's CPU backend loses NaN in large batched extrema."""
  def extremum(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    if not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
      return fn(x, axes)
    return jax.numpy.where(lax.reduce_or(x != x, axes), jax.numpy.nan, fn(x, axes))
  return extremum


_register(reduce_sum_p, lax.reduce_sum)
_register(reduce_prod_p, lax.reduce_prod)
_register(reduce_max_p, _propagating_nan(lax.reduce_max))
_register(reduce_min_p, _propagating_nan(lax.reduce_min))
_register(reduce_and_p, lax.reduce_and)
_register(reduce_or_p, lax.reduce_or)
_register(reduce_xor_p, lax.reduce_xor)
