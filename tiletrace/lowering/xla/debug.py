"""Debugging as calls back to Python, once for each program; without it the equations do not come here."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tiletrace.core.errors import DebugCheckError
from tiletrace.core.graph import Eqn
from tiletrace.core.ops.debug import debug_check_p, debug_print_p
from tiletrace.core.types import TileType
from tiletrace.lowering.debug import Site
from tiletrace.lowering.xla.machine import Machine, xla_rules


@xla_rules.register(debug_print_p)
def _print(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  types = tuple(a.type for a in eqn.values if isinstance(a.type, TileType))
  site = Site(False, eqn.params["fmt"], types, eqn.loc)
  jax.debug.callback(functools.partial(_say, site), list(m.program_ids), [m.read(v) for v in eqn.values])
  return []


@xla_rules.register(debug_check_p)
def _check(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  site = Site(True, eqn.params["message"], (), eqn.loc)
  jax.debug.callback(functools.partial(_demand, site), list(m.program_ids), m.read(eqn.values[0]))
  return []


def _say(site: Site, ids: Sequence[Any], values: Sequence[Any]) -> None:
  print(site.say(ids, [np.asarray(v)[()] for v in values]))


def _demand(site: Site, ids: Sequence[Any], holds: Any) -> None:
  if not holds:
    raise DebugCheckError(site.say(ids, ()), loc=site.loc)
