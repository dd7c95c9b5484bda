"""Asynchronous copies between global and shared memory: TMA with tensor maps, and cp.async."""
from __future__ import annotations

import itertools
import math
from typing import Any

from tiletrace.core.graph import Eqn, RefOperand
from tiletrace.core.ops import memory as ops
from tiletrace.core.types import Dyn, Space
from tiletrace.lowering.emit import barrier, policies
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.cp_async import emit_copy_through_registers, emit_cp_async
from tiletrace.lowering.emit.shared_access import place_of, shared_start
from tiletrace.lowering.emit.values import Operand
from tiletrace.lowering.layouts.shared import recognise_swizzle
from tiletrace.lowering.layouts.tma import ALIGNMENT
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Addr, Reg
from tiletrace.lowering.tma_plan import TmaPlan, ending_dim, share, tma_plan


@emit_rules.register(ops.copy_p)
def _copy(ctx: EmitContext, eqn: Eqn) -> None:
  """A synchronous copy by the threads of the scope, through registers."""
  emit_copy_through_registers(ctx, eqn)


@emit_rules.register(ops.copy_async_p)
def _copy_async(ctx: EmitContext, eqn: Eqn) -> None:
  if eqn.params["dispatch"] == "cp_async":
    emit_cp_async(ctx, eqn)
    return
  assert eqn.params["dispatch"] == "tma", eqn.params
  src, dst = eqn.refs
  loading = src.type.space is Space.GLOBAL
  outside, inside = (src, dst) if loading else (dst, src)
  plan = tma_plan(outside, inside, ctx.layouts[inside.root], ctx.facts)
  assert isinstance(plan, TmaPlan), plan
  mbarrier = barrier.address(ctx, *eqn.values) if loading else None
  _issue(ctx, eqn, outside, inside, plan, mbarrier)


def _issue(ctx: EmitContext, eqn: Eqn, outside: RefOperand, inside: RefOperand, plan: TmaPlan, mbarrier: Addr | None
           ) -> None:
  """One instruction for each box. Of a multicast copy, this CTA's boxes only."""
  b, multicast = ctx.b, eqn.params.get("multicast", ())
  place = place_of(ctx, inside)
  base, offset = shared_start(ctx, inside, place)
  swizzle, starts = _swizzle(ctx, inside), _starts(ctx, outside)
  box, parts, mask = plan.box, plan.parts, None
  if multicast:
    ways, index, mask = _place_in_cluster(ctx, multicast)
    mine = share(plan, ways, itemsize=inside.type.dtype.itemsize, alignment=ALIGNMENT[swizzle])
    assert mine is not None, plan
    box, parts = mine.box, mine.parts
    starts = [_plus_times(ctx, s, index, o) for s, o in zip(starts, mine.step.offset, strict=True)]
    base = _plus_times(ctx, base, index, mine.step.smem_bytes)
  ends = ending_dim(outside)
  address = ctx.map_address(ctx.maps.make(outside.root, box, swizzle, ends))
  for part in parts:
    at = [_plus(ctx, s, o) for s, o in zip(starts, part.offset, strict=True)]
    if ends is not None:
      at[ends:ends + 1] = _before_the_end(ctx, outside, ends, at[ends], box[ends])
    coords = at[::-1]                                      # innermost first
    where = b.addr(base, offset + part.smem_bytes)
    dim = f"{len(coords)}d"
    if mask is not None and mbarrier is not None:
      policies.access(ctx, eqn, isa.TMA_LOAD_MULTICAST, where, address, coords, mbarrier, mask, dim=dim)
    elif mbarrier is not None:
      policies.access(ctx, eqn, isa.TMA_LOAD, where, address, coords, mbarrier, dim=dim)
    elif "reduce" in eqn.params:
      b(isa.TMA_REDUCE, address, coords, where, dim=dim, op=eqn.params["reduce"])
    else:
      policies.access(ctx, eqn, isa.TMA_STORE, address, coords, where, dim=dim)


def _place_in_cluster(ctx: EmitContext, axes: tuple[int, ...]) -> tuple[int, Reg, Reg]:
  """Of the CTAs along `axes` of this one's cluster: how many, the number of this one, and the mask of their ranks."""
  b, rank = ctx.b, ctx.cluster_rank()
  cluster = ctx.graph.options.cluster or ()
  strides = [math.prod(cluster[a + 1:]) for a in range(len(cluster))]
  ways = math.prod(cluster[a] for a in axes)
  places = itertools.product(*(range(cluster[a]) for a in axes))
  mask = sum(1 << sum(i * strides[a] for i, a in zip(at, axes)) for at in places)
  if ways == ctx.graph.options.cluster_size:
    return ways, rank, b.new(isa.MOV, mask, type="b16")
  index, first = b.new(isa.MOV, 0, type="b32"), rank
  for a in axes:
    digit = b.new(isa.REM, b.new(isa.DIV, rank, strides[a], type="u32"), cluster[a], type="u32")
    index = b.new(isa.MAD_LO, index, cluster[a], digit, type="s32")
    first = b.new(isa.SUB, first, b.new(isa.MUL_LO, digit, strides[a], type="s32"), type="s32")
  shifted = b.new(isa.SHL, mask, first, type="b32")
  return ways, index, b.new(isa.CVT, shifted, to="u16", source="u32")


def _plus_times(ctx: EmitContext, x: Operand, index: Reg, step: int) -> Any:
  """x + index * step."""
  return ctx.b.new(isa.MAD_LO, index, step, x, type="s32") if step else x


def _swizzle(ctx: EmitContext, inside: RefOperand) -> int:
  found = recognise_swizzle(ctx.layouts[inside.root], inside.type.dtype.itemsize * 8)
  assert found is not None
  return found[0]


def _starts(ctx: EmitContext, outside: RefOperand) -> list[Any]:
  starts = (d.start for d in outside.view.dims)
  return [ctx.scalar(outside.dyn[s.index]) if isinstance(s, Dyn) else s for s in starts]


def _before_the_end(ctx: EmitContext, outside: RefOperand, ends: int, start: Operand, box: int) -> tuple[Any, Any]:
  """The two coordinates of a box along a dimension that ends before the array: the inner one leaves as much room as
  there is to the end, and the outer one makes up for it."""
  b, edges = ctx.b, outside.view.dims[ends].edges
  end: Any = outside.type.shape[ends]
  for _, hi in edges:
    hi = ctx.scalar(outside.dyn[hi.index]) if isinstance(hi, Dyn) else hi
    end = min(hi, end) if isinstance(hi, int) and isinstance(end, int) else b.new(isa.MIN, hi, end, type="s32")
  room = b.new(isa.SUB, end, start, type="s32")
  room = b.new(isa.MIN, b.new(isa.MAX, room, 0, type="s32"), box, type="s32")
  return b.new(isa.ADD, start, room, type="s32"), b.new(isa.SUB, box, room, type="s32")


def _plus(ctx: EmitContext, x: Operand, n: int) -> Operand:
  if not isinstance(x, Reg):
    return int(x) + n
  return ctx.b.new(isa.ADD, x, n, type="s32") if n else x
