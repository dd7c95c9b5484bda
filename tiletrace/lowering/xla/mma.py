"""Matrix products."""
from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from tiletrace.core.dtypes import f32
from tiletrace.core.graph import Eqn
from tiletrace.core.ops.mma import gemm_p
from tiletrace.lowering.xla.machine import Machine, xla_rules


@xla_rules.register(gemm_p)
def _gemm(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  refs, values = eqn.refs, eqn.values
  if eqn.params["a_in"] == "ref":
    a = m.load(refs[0], 0)
  else:
    a = m.read(values[1])
  b_ref, acc_ref = refs[-2:]
  b = m.load(b_ref, 0)
  # Products of 16-bit floats are exact in f32: the tensor core's products, at a CPU's full speed.
  product = lax.dot_general(a.astype(f32), b.astype(f32), (((1,), (0,)), ((), ())), preferred_element_type=f32)
  accumulate = m.read(values[0])
  if not isinstance(accumulate, np.ndarray) or accumulate:
    acc = m.load(acc_ref, 0)
    if not isinstance(accumulate, np.ndarray):
      acc = lax.select(lax.broadcast(accumulate, acc.shape), acc, lax.full_like(acc, 0))
    product = acc + product
  m.store(acc_ref, product)
  return []
