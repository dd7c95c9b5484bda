"""Cumulative sums along an axis."""
from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from tiletrace.core.graph import Eqn
from tiletrace.core.ops.cumsum import cumsum_p
from tiletrace.lowering.xla.machine import Machine, xla_rules


@xla_rules.register(cumsum_p)
def _cumsum(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  x = jax.numpy.asarray(m.read(eqn.values[0]))
  return [lax.cumsum(x, eqn.params["axis"], reverse=eqn.params["reverse"])]
