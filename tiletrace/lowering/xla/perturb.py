"""Results of rounded operations moved by a few units in the last place: how far rounding alone may move an output.

The idea is that of Monte Carlo arithmetic (Parker, "Monte Carlo Arithmetic", 1997). What an output does when every
rounded operation before it is moved a little is what another order of sums, another exp or a contracted product may do
to it too: cancellation, a value rounded to 16 bits the other way, a comparison that flips.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tiletrace.core.dtypes import is_float
from tiletrace.core.graph import Eqn
from tiletrace.core.ops import elementwise as ops
from tiletrace.core.ops.mma import gemm_p
from tiletrace.core.types import TileType

SUMS = frozenset({"reduce_sum", "reduce_prod", "cumsum", "cumprod"})
# Of the same operands the same bits everywhere; what is not here counts as rounded. A cast rounds, but in one way only.
EXACT = frozenset({
  "min", "max", "floor", "ceil", "round", "trunc", "neg", "abs", "sign", "select", "cast", "bitcast", "reduce_max",
  "reduce_min", "cummax", "cummin", "broadcast_in_dim", "iota", "reshape", "transpose", "slice", "concatenate", "alloc",
  "load", "store", "copy"})
_CONTRACTED = frozenset({ops.add_p, ops.sub_p, ops.mul_p})        # correctly rounded, unless two of them become one

_WIDE_ULPS = 8        # several times what two right implementations differ by, so that rare flips are seen


def rounds(eqn: Eqn) -> bool:
  """Whether an equation computes floats that two right implementations may differ in."""
  if eqn.primitive is gemm_p:
    return True
  return eqn.primitive.name not in EXACT and not eqn.blocks and any(
      isinstance(v.type, TileType) and is_float(v.type.dtype) for v in eqn.outvars)


def perturbation(seed: int) -> Callable[[Eqn, Any], Any]:
  """(equation, what it computed) -> that, moved if it is a float and rounded.

  Floats of 32 bits and more move by up to 8 units in the last place, narrower ones by up to one: but not their sums,
  differences and products, which are computed in f32 and then rounded everywhere, so that nothing is contracted.
  """
  odd = np.uint32(0x9E3779B1 + 2 * seed)

  def move(eqn: Eqn, x: Any) -> Any:
    dtype = np.dtype(x.dtype)
    narrow = dtype.itemsize < 4
    if not rounds(eqn) or not is_float(dtype) or (narrow and eqn.primitive in _CONTRACTED):
      return x
    wide = jnp.asarray(x).astype(np.float64 if dtype.itemsize == 8 else np.float32)
    bits = lax.bitcast_convert_type(wide.astype(np.float32), np.uint32)      # the value decides: it differs everywhere
    mixed = (bits ^ (bits >> np.uint32(15))) * odd
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0x85EBCA6B)
    part = (mixed >> np.uint32(8)).astype(wide.dtype) * wide.dtype.type(2.0**-23) - wide.dtype.type(1)
    ulps = float(jnp.finfo(dtype).eps) * (1 if narrow else _WIDE_ULPS)
    return (wide * (wide.dtype.type(1) + part * wide.dtype.type(ulps))).astype(dtype)

  return move
