"""Program ids."""
from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from tiletrace.core.graph import Eqn
from tiletrace.core.ops.grid import program_id_p
from tiletrace.lowering.xla.machine import Machine, xla_rules


@xla_rules.register(program_id_p)
def _program_id(m: Machine, eqn: Eqn) -> Sequence[jax.Array | np.ndarray]:
  return [m.program_ids[eqn.params["axis"]]]
