"""Accesses at tiles of indices: the indices have the value's layout, which wishes to be coalesced within rows."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tiletrace.core import dtypes
from tiletrace.core.graph import Atom, Eqn, RefOperand, Var
from tiletrace.core.ops import atomic as atomics, gather as ops
from tiletrace.lowering.infer.constraints import (
  Constraint,
  InferContext,
  Prefers,
  equal,
  is_distributed,
  layout_rules,
)
from tiletrace.lowering.infer.memory import coalesced
from tiletrace.lowering.layouts.fragment import blocked
from tiletrace.lowering.layouts.relation import Layout


def indexed_coalesced(ref: RefOperand, dims: tuple[int, ...], shape: tuple[int, ...], warpgroups: int,
                      vec: int | None = None) -> Layout:
  """Threads along what is contiguous in memory, rows last; along the indices where there is nothing else."""
  columns = dict(ops.indexed_columns(shape, len(ref.view.perm), dims))
  of = {j: ref.view.perm[d] for d, j in columns.items()}
  index_at = ref.view.perm[dims[-1]]
  order = sorted(range(len(shape)), key=lambda j: (-of.get(j, index_at), -j))
  return blocked(shape, max(8, ref.type.dtype.itemsize * 8), 4 * warpgroups, vec=vec, order=order)


def _alike(eqn: Eqn, others: Sequence[Atom], value: Var) -> Iterator[Constraint]:
  for x in others:
    if is_distributed(x) and x is not value:
      assert isinstance(x, Var)
      yield equal(x, value, eqn)


def _wish(eqn: Eqn, value: Var, ctx: InferContext) -> Prefers:
  ref, dims = eqn.refs[0], eqn.params["dims"]
  # atomics of several elements at once are those of floats only
  vec = 1 if eqn.primitive is atomics.atomic_p and not dtypes.is_float(ref.type.dtype) else None
  layout = indexed_coalesced(ref, dims, value.shape, ctx.warpgroups(eqn), vec) if dims else coalesced(
    ref, ctx.warpgroups(eqn), vec)
  return Prefers(value, layout, eqn, math.prod(value.shape) * ref.type.dtype.itemsize)


@layout_rules.register(ops.gather_p)
def _gather(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  (out,) = eqn.outvars
  yield from _alike(eqn, eqn.values, out)
  yield _wish(eqn, out, ctx)


@layout_rules.register(ops.scatter_p, ops.gather_copy_p)
def _scatter(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  value = eqn.values[0]
  assert isinstance(value, Var)
  yield from _alike(eqn, eqn.values[1:], value)
  yield _wish(eqn, value, ctx)


@layout_rules.register(atomics.atomic_p)
def _atomic(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  value = eqn.values[0]
  if not is_distributed(value):
    return
  assert isinstance(value, Var)
  yield from _alike(eqn, (*eqn.values[1:], *eqn.outvars), value)
  yield _wish(eqn, value, ctx)


@layout_rules.register(atomics.atomic_to_shared_p)
def _to_shared(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  """Made by the scheduler, with the layouts of what it stands for."""
  yield from ()
