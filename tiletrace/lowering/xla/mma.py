"""Matrix products."""
from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tiletrace.core.dtypes import f32, i32
from tiletrace.core.graph import Eqn
from tiletrace.core.ops.mma import gemm_p, mma_sync_p
from tiletrace.lowering.xla.machine import Machine, xla_rules

_EXACT_PRODUCTS = 2**24 // 255**2    # of two 8-bit integers, whose sum f32 holds exactly
_TF32_BITS = np.uint32(0xFFFF_E000)


@xla_rules.register(gemm_p)
def _gemm(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  a = m.load(eqn.refs[0], 0) if eqn.params["a_in"] == "ref" else jnp.asarray(m.read(eqn.values[1]))
  return _add_product(m, eqn, a, m.load(eqn.refs[-2], 0))


@xla_rules.register(mma_sync_p)
def _mma_sync(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  a, b = (jnp.asarray(m.read(v)) for v in eqn.values[1:])
  return _add_product(m, eqn, a, b)


def _add_product(m: Machine, eqn: Eqn, a: jax.Array, b: jax.Array) -> Sequence[jax.Array]:
  acc_ref, product = eqn.refs[-1], _product(a, b)
  accumulate = m.read(eqn.values[0])
  if not isinstance(accumulate, np.ndarray) or accumulate:
    acc = m.load(acc_ref, 0)
    if not isinstance(accumulate, np.ndarray):
      acc = lax.select(lax.broadcast(accumulate, acc.shape), acc, lax.full_like(acc, 0))
    product = acc.astype(product.dtype) + product
  m.store(acc_ref, product.astype(acc_ref.type.dtype))
  return []


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  """Products of narrow floats are exact in f32: the tensor core's products, at a CPU's full speed. So are sums of a few
  hundred products of 8-bit integers. Of f32 the tensor core does not see the low 13 bits (tf32)."""
  wide = i32 if a.dtype.kind in "iu" and a.shape[-1] > _EXACT_PRODUCTS else f32
  if a.dtype == f32:
    a, b = (lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & _TF32_BITS, f32) for x in (a, b))
  batch = tuple(range(a.ndim - 2))
  product = lax.dot_general(a.astype(wide), b.astype(wide), (((a.ndim - 1,), (a.ndim - 2,)), (batch, batch)),
                            preferred_element_type=wide, precision=lax.Precision.HIGHEST)
  return product.astype(i32) if a.dtype.kind in "iu" else product
