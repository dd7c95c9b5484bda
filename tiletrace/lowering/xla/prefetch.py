"""prefetch as jax ops: XLA moves its arrays as it likes."""
from __future__ import annotations

from collections.abc import Sequence

import jax

from tiletrace.core.graph import Eqn
from tiletrace.core.ops.prefetch import prefetch_p
from tiletrace.lowering.xla.machine import Machine, xla_rules


@xla_rules.register(prefetch_p)
def _nothing(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  return []
