"""Memory ops: fragments hand their layout to what is loaded from them; global accesses wish to be coalesced."""
from __future__ import annotations

import math
from collections.abc import Iterator

from tiletrace.core.graph import Eqn, RefOperand, Var
from tiletrace.core.ops import memory as ops
from tiletrace.core.ops.memory import Swizzle
from tiletrace.core.types import Space
from tiletrace.lowering.infer.constraints import (
  Constraint,
  Fixed,
  InferContext,
  Prefers,
  Relates,
  equal,
  is_distributed,
  layout_rules,
  written_layout,
)
from tiletrace.lowering.infer.shape import cut_registers
from tiletrace.lowering.layouts.fragment import blocked, blocked_for_reduction
from tiletrace.lowering.layouts.relation import Layout


def coalesced(ref: RefOperand, warpgroups: int, vec: int | None = None) -> Layout:
  """Threads along the view's dimension that is contiguous in memory."""
  shape = ref.view.static_shape
  order = sorted(range(len(shape)), key=lambda i: -ref.view.perm[i])
  return blocked(shape, max(8, ref.type.dtype.itemsize * 8), 4 * warpgroups, vec=vec, order=order)


def _wish(ref: RefOperand, value: Var, eqn: Eqn, ctx: InferContext) -> Prefers:
  """Coalesced. Tiles of a shape that is reduced somewhere agree on the layout that is good for that."""
  shape, dtype = ref.view.static_shape, ref.type.dtype
  if shape not in ctx.reduced:
    return Prefers(value, coalesced(ref, ctx.warpgroups(eqn)), eqn, math.prod(shape) * dtype.itemsize)
  order = sorted(range(len(shape)), key=lambda i: -ref.view.perm[i])
  layout = blocked_for_reduction(shape, max(8, dtype.itemsize * 8), 4 * ctx.warpgroups(eqn), ctx.reduced[shape],
                                 order=order)
  return Prefers(value, layout, eqn, math.prod(shape) * 4 + 1)


def _cut(ref: RefOperand, layout: Layout) -> Layout | None:
  """The layout of a static view of a fragment, where it cuts whole registers of every thread."""
  dims = ref.view.dims
  if any(not isinstance(d.start, int) or not isinstance(d.size, int) or d.stride != 1 for d in dims):
    return None
  part = cut_registers(layout, tuple(d.start for d in dims), tuple(d.start + d.size for d in dims))  # type: ignore[operator]
  if part is None:
    return None
  kept = [d for d in range(len(dims)) if not dims[d].squeezed]
  part = part.project([d for d in range(len(dims)) if dims[d].squeezed])
  return part.permute([kept.index(p) for p in ref.view.perm])


def _fragment(ref: RefOperand, value: Var, eqn: Eqn) -> Relates:
  if ref.is_whole:
    return equal(ref.root, value, eqn)
  return Relates(ref.root, value, eqn, lambda layout: _cut(ref, layout), lambda layout: None)


@layout_rules.register(ops.alloc_p)
def _alloc(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  layout, (out,) = eqn.params["layout"], eqn.outvars
  if layout is None or isinstance(layout, Swizzle):
    return  # shared swizzles are read by the shared-buffer pass
  if is_distributed(out):
    yield Fixed(out, written_layout(eqn), eqn, "the layout= of this allocation")


@layout_rules.register(ops.load_p)
def _load(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  (ref,), (out,) = eqn.refs, eqn.outvars
  if not is_distributed(out):
    return
  for mask in eqn.values:
    if is_distributed(mask):
      assert isinstance(mask, Var)
      yield equal(mask, out, eqn)
  if ref.type.space is Space.FRAGMENT:
    yield _fragment(ref, out, eqn)
  else:
    yield _wish(ref, out, eqn, ctx)


@layout_rules.register(ops.store_p)
def _store(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  ref, (value, *mask) = eqn.refs[0], eqn.values
  if not is_distributed(value):
    return
  assert isinstance(value, Var)
  for m in mask:
    if is_distributed(m):
      assert isinstance(m, Var)
      yield equal(m, value, eqn)
  if ref.type.space is Space.FRAGMENT:
    yield Relates(value, ref.root, eqn, lambda l: l if ref.is_whole else None,
                  lambda l: l if ref.is_whole else _cut(ref, l))
  else:
    yield _wish(ref, value, eqn, ctx)


@layout_rules.register(ops.copy_p, ops.copy_async_p, ops.commit_group_p, ops.wait_group_p)
def _nothing(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  """Copies choose a layout of their own when they are selected."""
  yield from ()
