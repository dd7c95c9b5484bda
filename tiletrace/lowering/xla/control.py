"""Loops and branches: jax.lax's, over the values they carry and the references that their bodies write."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tiletrace.core.graph import Eqn, Literal
from tiletrace.core.ops.assume import assume_p
from tiletrace.core.ops.control import cond_p, for_loop_p, switch_p, while_loop_p
from tiletrace.core.ops.step import step_p
from tiletrace.lowering.xla.machine import Machine, xla_rules


@xla_rules.register(for_loop_p)
def _for_loop(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  lo, hi, step, *init = map(m.read, eqn.values)
  body = m.function(eqn.blocks[0], carried := m.carried(eqn.blocks))

  def trip(k: jax.Array, state: Any) -> Any:
    return body([lo + k * step, *state[0]], state[1])

  if isinstance(eqn.values[2], Literal):
    trips = -((lo - hi) // step)  # ceil((hi - lo) / step); static bounds make a scan, which differentiates
  else:
    trips = jnp.where(step > 0, -((lo - hi) // jnp.maximum(step, 1)), 0)
  start = (list(map(m.vary, init)), [m.memory[v] for v in carried])
  outs, arrays = lax.fori_loop(np.int32(0), trips, trip, start)
  m.memory.update(zip(carried, arrays))
  return outs


@xla_rules.register(while_loop_p)
def _while_loop(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  carried = m.carried(eqn.blocks)
  test, body = (m.function(block, carried) for block in eqn.blocks)
  start = ([m.vary(m.read(x)) for x in eqn.values], [m.memory[v] for v in carried])
  outs, arrays = lax.while_loop(lambda state: test(*state)[0][0], lambda state: body(*state), start)
  m.memory.update(zip(carried, arrays))
  return outs


@xla_rules.register(cond_p)
def _cond(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  pred = m.read(eqn.values[0])
  carried = m.carried(eqn.blocks)
  branches = [m.function(block, carried) for block in eqn.blocks]
  if len(branches) == 1:
    branches.append(lambda values, arrays: ([], list(arrays)))
  outs, arrays = lax.cond(pred, *branches, [], [m.memory[v] for v in carried])
  m.memory.update(zip(carried, arrays))
  return outs


@xla_rules.register(switch_p)
def _switch(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  carried = m.carried(eqn.blocks)
  branches = [m.function(block, carried) for block in eqn.blocks]
  outs, arrays = lax.switch(m.read(eqn.values[0]), branches, [], [m.memory[v] for v in carried])
  m.memory.update(zip(carried, arrays))
  return outs


@xla_rules.register(step_p)
def _step(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  """One step after the other."""
  m.run(eqn.blocks[0])
  return []


@xla_rules.register(assume_p)
def _assume(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  """Every access is checked here, whatever is assumed."""
  return []
