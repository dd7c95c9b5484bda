"""Shapes of values."""
from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from tiletrace.core.graph import Eqn
from tiletrace.core.ops.shape import broadcast_in_dim_p, concatenate_p, iota_p, reshape_p, slice_p, transpose_p
from tiletrace.lowering.xla.machine import Machine, xla_rules


@xla_rules.register(broadcast_in_dim_p)
def _broadcast_in_dim(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  return [lax.broadcast_in_dim(m.read(eqn.values[0]), eqn.params["shape"], eqn.params["broadcast_dimensions"])]


@xla_rules.register(iota_p)
def _iota(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  return [lax.broadcasted_iota(np.int32, eqn.params["shape"], eqn.params["dimension"])]


@xla_rules.register(reshape_p)
def _reshape(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  return [lax.reshape(m.read(eqn.values[0]), eqn.params["shape"])]


@xla_rules.register(transpose_p)
def _transpose(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  return [lax.transpose(m.read(eqn.values[0]), eqn.params["permutation"])]


@xla_rules.register(slice_p)
def _slice(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  p = eqn.params
  return [lax.slice(m.read(eqn.values[0]), p["start"], p["limit"], p["strides"])]


@xla_rules.register(concatenate_p)
def _concatenate(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  return [lax.concatenate([jax.numpy.asarray(m.read(x)) for x in eqn.values], eqn.params["dimension"])]
