"""Program ids. Sizes are numbers here: jax runs the graph of one call (core/specialise.py)."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import jax
import numpy as np

from tiletrace.core.graph import Eqn
from tiletrace.core.ops.grid import program_id_p, size_p
from tiletrace.lowering.xla.machine import Machine, xla_rules


@xla_rules.register(program_id_p)
def _program_id(m: Machine, eqn: Eqn) -> Sequence[jax.Array | np.ndarray]:
  return [m.program_ids[eqn.params["axis"]]]


@xla_rules.register(size_p)
def _size(m: Machine, eqn: Eqn) -> NoReturn:
  raise AssertionError(f"{eqn.params['size']} in a graph for jax: the call's sizes stand there")
