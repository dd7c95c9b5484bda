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
  x, (start, limit, strides) = m.read(eqn.values[0]), (eqn.params[k] for k in ("start", "limit", "strides"))
  backwards = [d for d, s in enumerate(strides) if s < 0]
  if not backwards:
    return [lax.slice(x, start, limit, strides)]
  runs = [range(a, b, s)[::-1] if s < 0 else range(a, b, s) for a, b, s in zip(start, limit, strides)]
  return [lax.rev(lax.slice(x, [r.start for r in runs], [r.stop for r in runs], [r.step for r in runs]), backwards)]


@xla_rules.register(concatenate_p)
def _concatenate(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  return [lax.concatenate([jax.numpy.asarray(m.read(x)) for x in eqn.values], eqn.params["dimension"])]
