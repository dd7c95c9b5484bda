"""Allocation, loads, stores and copies."""
from __future__ import annotations

from collections.abc import Sequence

import jax

from tiletrace.core.graph import Eqn
from tiletrace.core.ops.memory import alloc_p, copy_p, load_p, store_p
from tiletrace.core.types import RefType
from tiletrace.lowering.xla.buffer import padded_frame, poisoned
from tiletrace.lowering.xla.machine import Machine, xla_rules


@xla_rules.register(alloc_p)
def _alloc(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  var = eqn.outvars[0]
  assert isinstance(var.type, RefType)
  m.frames[var] = padded_frame(var.type, m.overhangs.get(var, ((0, 0),) * len(var.type.shape)))
  m.memory[var] = m.vary(poisoned(m.frames[var].shape, var.type.dtype))
  return []


@xla_rules.register(load_p)
def _load(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  return [m.load(eqn.refs[0], eqn.params["fill_value"], *map(m.read, eqn.values))]


@xla_rules.register(store_p)
def _store(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  m.store(eqn.refs[0], *map(m.read, eqn.values))
  return []


@xla_rules.register(copy_p)
def _copy(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  src, dst = eqn.refs
  m.store(dst, m.load(src, eqn.params["fill_value"]))
  return []
