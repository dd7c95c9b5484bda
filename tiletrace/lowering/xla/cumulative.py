"""Cumulative operations along an axis."""
from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from tiletrace.core.graph import Eqn
from tiletrace.core.ops import cumulative as ops
from tiletrace.lowering.xla.machine import Machine, xla_rules

_FUNCTIONS = {ops.cumsum_p: lax.cumsum, ops.cumprod_p: lax.cumprod, ops.cummax_p: lax.cummax, ops.cummin_p: lax.cummin}


@xla_rules.register(*_FUNCTIONS)
def _cumulative(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  x = jax.numpy.asarray(m.read(eqn.values[0]))
  return [_FUNCTIONS[eqn.primitive](x, eqn.params["axis"], reverse=eqn.params["reverse"])]
