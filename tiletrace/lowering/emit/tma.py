"""Asynchronous copies between global and shared memory: TMA with tensor maps, and cp.async."""
from __future__ import annotations

from tiletrace.core.graph import Eqn, RefOperand
from tiletrace.core.ops import memory as ops
from tiletrace.core.types import Dyn, Space
from tiletrace.lowering.emit import barrier
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.cp_async import emit_copy_through_registers, emit_cp_async
from tiletrace.lowering.emit.shared_access import place_of, shared_start
from tiletrace.lowering.emit.values import Operand
from tiletrace.lowering.layouts.shared import recognise_swizzle
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.tma_plan import TmaPlan, tma_plan


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
  _issue(ctx, outside, inside, plan, mbarrier)


def _issue(ctx: EmitContext, outside: RefOperand, inside: RefOperand, plan: TmaPlan, mbarrier) -> None:
  """One instruction for each box; coordinates are innermost first."""
  b = ctx.b
  place = place_of(ctx, inside)
  base, offset = shared_start(ctx, inside, place)
  found = recognise_swizzle(ctx.layouts[inside.root], inside.type.dtype.itemsize * 8)
  assert found is not None
  tensor_map = ctx.maps.make(outside.root, plan.box, found[0])
  address = ctx.map_address(tensor_map)
  starts = [_start(ctx, outside, d) for d in range(len(outside.view.dims))]
  for part in plan.parts:
    coords = [_plus(ctx, s, o) for s, o in zip(starts, part.offset, strict=True)][::-1]
    where = b.addr(base, offset + part.smem_bytes)
    dim = f"{len(coords)}d"
    if mbarrier is not None:
      b(isa.TMA_LOAD, where, address, coords, mbarrier, dim=dim)
    else:
      b(isa.TMA_STORE, address, coords, where, dim=dim)


def _start(ctx: EmitContext, ref: RefOperand, d: int) -> Operand:
  start = ref.view.dims[d].start
  return ctx.scalar(ref.dyn[start.index]) if isinstance(start, Dyn) else start


def _plus(ctx: EmitContext, x: Operand, n: int) -> Operand:
  if not isinstance(x, Reg):
    return int(x) + n
  return ctx.b.new(isa.ADD, x, n, type="s32") if n else x
