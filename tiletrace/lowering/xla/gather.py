"""Loads and stores at tiles of indices, and atomic operations: elements of the whole view by their place in it."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tiletrace.core.dtypes import is_float
from tiletrace.core.graph import Eqn, RefOperand
from tiletrace.core.ops import atomic as atomics, gather as ops
from tiletrace.lowering.xla.elementwise import convert
from tiletrace.lowering.xla.machine import Machine, xla_rules


class _Places:
  """Where the elements of a result lie in the view, and which of them exist."""

  def __init__(self, m: Machine, ref: RefOperand, dims: tuple[int, ...], indices: Sequence[Any], mask: Sequence[Any]):
    self.shape, self.size = ref.shape, math.prod(ref.shape)
    out = jnp.asarray(m.read(indices[0])).shape
    place, inside = jnp.zeros(out, np.int32), jnp.ones(out, bool)
    at = {d: jnp.asarray(m.read(i)) for d, i in zip(dims, indices)}
    at |= {d: lax.broadcasted_iota(np.int32, out, j) for d, j in ops.indexed_columns(out, len(self.shape), dims)}
    for d, extent in enumerate(self.shape):
      place = place * np.int32(extent) + at[d]
      inside = inside & (at[d] >= 0) & (at[d] < extent)
    for x in mask:
      inside = inside & m.read(x)
    self.place, self.inside = jnp.where(inside, place, 0), inside
    self.dropped = jnp.where(inside, place, self.size)           # past the end: for mode="drop"


def _gather(m: Machine, eqn: Eqn) -> jax.Array:
  src, dims = eqn.refs[0], eqn.params["dims"]
  indices, mask = ops.split_values(eqn, 0)
  places, fill = _Places(m, src, dims, indices, mask), eqn.params["fill_value"]
  found = m.load(src, fill).reshape(-1)[places.place]
  return jnp.where(places.inside, found, np.asarray(fill).astype(found.dtype))


@xla_rules.register(ops.gather_p)
def _load(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  return [_gather(m, eqn)]


@xla_rules.register(ops.gather_copy_p)
def _copy(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  m.store(eqn.refs[1], _gather(m, eqn))
  return []


@xla_rules.register(ops.scatter_p)
def _scatter(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  dst, value = eqn.refs[0], jnp.asarray(m.read(eqn.values[0]))
  indices, mask = ops.split_values(eqn, 1)
  places = _Places(m, dst, eqn.params["dims"], indices, mask)
  flat = m.load(dst, 0).reshape(-1).at[places.dropped.reshape(-1)].set(value.reshape(-1), mode="drop")
  m.store(dst, flat.reshape(places.shape))
  return []


# ---- atomics: the elements of a tile one after another, in row-major order, and programs in grid order

@xla_rules.register(atomics.atomic_p)
def _atomic(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  ref, op, n = eqn.refs[0], eqn.params["op"], atomics.num_operands(eqn)
  values = [jnp.asarray(m.read(v)) for v in eqn.values[:n]]
  indices, mask = ops.split_values(eqn, n)
  if not indices:
    old = m.load(ref, 0, *map(m.read, mask))
    m.store(ref, _changed(op, old, values), *map(m.read, mask))
    return [old] if eqn.outvars else []
  places = _Places(m, ref, eqn.params["dims"], indices, mask)
  before, flat = m.load(ref, 0).reshape(-1), [v.reshape(-1) for v in values]
  after, old = _one_by_one(op, before, flat, places)
  if op in ("add", "max", "min") and before.dtype.itemsize == 4:         # a scatter: XLA drops the loop without results
    after = getattr(before.at[places.dropped.reshape(-1)], op)(flat[0], mode="drop")
  m.store(ref, after.reshape(places.shape))
  return [old.reshape(values[0].shape)] if eqn.outvars else []


def _changed(op: str, old: jax.Array, values: Sequence[jax.Array]) -> jax.Array:
  if op in ("exchange", "cas") and is_float(np.dtype(old.dtype)):             # of their bits
    bits = np.dtype(f"uint{old.dtype.itemsize * 8}")
    old, *values = (lax.bitcast_convert_type(x, bits) for x in (old, *values))
    return lax.bitcast_convert_type(atomics.apply(op, old, tuple(values), jnp.where), np.float32)
  wide = [x.astype(np.float32) if is_float(np.dtype(x.dtype)) else x for x in (old, *values)]
  return convert(atomics.apply(op, wide[0], tuple(wide[1:]), jnp.where), np.dtype(old.dtype))


def _one_by_one(op: str, flat: jax.Array, values: Sequence[jax.Array], places: _Places) -> tuple[jax.Array, jax.Array]:
  """(the array afterwards, what each found): an index may come several times."""
  place, inside = places.place.reshape(-1), places.inside.reshape(-1)

  def element(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    flat, found = state
    old = flat[place[i]]
    new = jnp.where(inside[i], _changed(op, old, [v[i] for v in values]), old)
    return flat.at[place[i]].set(new), found.at[i].set(jnp.where(inside[i], old, jnp.zeros_like(old)))

  start = (flat, jnp.zeros_like(values[0]) + flat[:1] * 0)       # varies as the array does
  return lax.fori_loop(np.int32(0), np.int32(place.size), element, start)
