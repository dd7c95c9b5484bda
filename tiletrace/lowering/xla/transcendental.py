"""The rest of jnp's functions of floats, and functions of the bits of a number."""
from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tiletrace.core.graph import Eqn
from tiletrace.core.ops import transcendental as ops
from tiletrace.lowering.xla.elementwise import register
from tiletrace.lowering.xla.machine import Machine, xla_rules


def _round(x: jax.Array) -> jax.Array:
  return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _mul_hi(x: jax.Array, y: jax.Array) -> jax.Array:
  """From products of halves: nothing is 64 bits wide without x64."""
  signed = x.dtype == np.int32
  a, b = (lax.bitcast_convert_type(v, np.uint32) for v in (x, y))
  low, half = np.uint32(0xFFFF), np.uint32(16)
  a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
  middle = a1 * b0 + (a0 * b0 >> half)
  other = a0 * b1 + (middle & low)
  high = a1 * b1 + (middle >> half) + (other >> half)
  if signed:                                                   # reading a negative a as unsigned adds 2**32 b
    zero = np.uint32(0)
    high = high - jnp.where(x < 0, b, zero) - jnp.where(y < 0, a, zero)
  return lax.bitcast_convert_type(high, x.dtype)


for _primitive, _function in {
    ops.tan_p: lax.tan, ops.asin_p: lax.asin, ops.acos_p: lax.acos, ops.atan_p: lax.atan, ops.atan2_p: lax.atan2,
    ops.sinh_p: lax.sinh, ops.cosh_p: lax.cosh, ops.asinh_p: lax.asinh, ops.acosh_p: lax.acosh,
    ops.atanh_p: lax.atanh, ops.expm1_p: lax.expm1, ops.log1p_p: lax.log1p, ops.log10_p: jnp.log10,
    ops.cbrt_p: lax.cbrt, ops.erfc_p: lax.erfc, ops.round_p: _round, ops.trunc_p: jnp.trunc,
    ops.population_count_p: lax.population_count,
    ops.clz_p: lax.clz, ops.mul_hi_p: _mul_hi}.items():
  register(_primitive, _function)


@xla_rules.register(ops.bitcast_p)
def _bitcast(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  return [lax.bitcast_convert_type(jnp.asarray(m.read(eqn.values[0])), eqn.params["dtype"])]
