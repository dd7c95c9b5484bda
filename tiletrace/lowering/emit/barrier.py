"""mbarriers, named barriers, fences and the groups of asynchronous copies."""
from __future__ import annotations

from tiletrace.core.graph import Atom, Eqn, Var
from tiletrace.core.ops import barrier as ops, memory
from tiletrace.core.types import BarrierType
from tiletrace.lowering.emit.context import WARPGROUP, EmitContext, emit_rules
from tiletrace.lowering.emit.values import Operand
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Addr, Reg
from tiletrace.lowering.target import WARPS

_BYTES = 8  # of an mbarrier object


@emit_rules.register(ops.alloc_barrier_p)
def _alloc(ctx: EmitContext, eqn: Eqn) -> None:
  """Placed by the scheduler and initialised in the kernel's prologue."""


def init_barriers(ctx: EmitContext) -> None:
  """One thread initialises every barrier of the kernel and makes that visible to the asynchronous proxy; a CTA of a
  cluster waits for its peers, which may arrive at its barriers and copy into its memory from then on."""
  b = ctx.b
  barriers = [v for v in ctx.offsets if isinstance(v.type, BarrierType)]
  if not barriers:
    return
  skip = b.label("initialised")
  b(isa.BRA, skip, pred=b.new(isa.SETP, ctx.tid(), 0, cmp="ne", type="s32"))
  for var in barriers:
    assert isinstance(var.type, BarrierType)
    base, offset = ctx.smem_address(var)
    for i in range(var.type.count):
      b(isa.MBARRIER_INIT, b.addr(base, offset + _BYTES * i), var.type.arrivals)
  b(isa.FENCE_MBARRIER_INIT)
  b(isa.FENCE_PROXY_ASYNC, space="shared::cta")
  b.place(skip)
  if ctx.graph.options.cluster_size == 1:
    b(isa.BAR_SYNC_ALL, 0)
  else:
    b(isa.CLUSTER_ARRIVE, sem="release", aligned="aligned")
    b(isa.CLUSTER_WAIT, sem="acquire", aligned="aligned")


def leave_cluster(ctx: EmitContext) -> None:
  """No CTA ends while a peer may still arrive at its barriers. The roles' threads come here one by one."""
  if ctx.graph.options.cluster_size > 1 and any(isinstance(v.type, BarrierType) for v in ctx.offsets):
    ctx.b(isa.CLUSTER_ARRIVE, sem="release")
    ctx.b(isa.CLUSTER_WAIT, sem="acquire")


def address(ctx: EmitContext, bar: Atom, index: Atom) -> Addr:
  """The address of barrier `index` of an array."""
  assert isinstance(bar, Var)
  base, offset = ctx.smem_address(bar)
  i: Operand = ctx.scalar(index)
  if isinstance(i, Reg):
    return ctx.b.addr(ctx.b.new(isa.MAD_LO, i, _BYTES, base, type="s32"), offset)
  return ctx.b.addr(base, offset + _BYTES * int(i))


@emit_rules.register(ops.barrier_wait_p)
def _wait(ctx: EmitContext, eqn: Eqn) -> None:
  b = ctx.b
  bar, index, phase = eqn.values
  where, parity = address(ctx, bar, index), ctx.scalar(phase)
  spin = b.label("wait")
  b.place(spin)
  done = b.new(isa.MBARRIER_TRY_WAIT, where, parity)
  b(isa.BRA, spin, pred=done, negate=True)


def _guard(ctx: EmitContext, first: Reg) -> Reg | None:
  """Who arrives: the elected thread, or in each warpgroup the threads of the predicate `first`; and only where the
  predicate around the arrival holds."""
  if ctx.scope.elected or ctx.guard is None:
    return ctx.guard if ctx.scope.elected else first
  return ctx.b.new(isa.AND, ctx.guard, first, type="pred")


@emit_rules.register(ops.barrier_arrive_p)
def _arrive(ctx: EmitContext, eqn: Eqn) -> None:
  """`count` arrivals in all: by the elected thread, or in equal parts by the first thread of each warpgroup, or by one
  of each warp when all of its lanes have come here."""
  where, count = address(ctx, *eqn.values), eqn.params["count"]
  if eqn.params.get("each") == "warp":
    assert not ctx.scope.elected and count == ctx.scope.count * WARPS, eqn
    ctx.b(isa.BAR_WARP_SYNC, -1)
    lane = ctx.b.new(isa.AND, ctx.tid(), 31, type="b32")
    ctx.b(isa.MBARRIER_ARRIVE, where, pred=_guard(ctx, ctx.b.new(isa.SETP, lane, 0, cmp="eq", type="s32")))
    return
  if not ctx.scope.elected:
    assert count % ctx.scope.count == 0, f"{count} arrivals by {ctx.scope.count} warpgroups"
    count //= ctx.scope.count
  if eqn.params.get("cluster"):
    _arrive_everywhere(ctx, where, count)
  elif count == 1:
    ctx.b(isa.MBARRIER_ARRIVE, where, pred=_guard(ctx, ctx.leader()))
  else:
    ctx.b(isa.MBARRIER_ARRIVE_COUNT, where, count, pred=_guard(ctx, ctx.leader()))


def _arrive_everywhere(ctx: EmitContext, where: Addr, count: int) -> None:
  """At the same barrier of every CTA of the cluster: thread i of a warpgroup at that of rank i, or one at all."""
  b = ctx.b
  assert isinstance(where.base, Reg)
  local = b.new(isa.ADD, where.base, where.offset, type="s32")
  chosen, lane = ctx.peers()
  guard = _guard(ctx, chosen)
  for rank in range(ctx.graph.options.cluster_size) if ctx.scope.elected else (lane,):
    remote = b.addr(b.new(isa.MAPA, local, rank, pred=guard))
    for _ in range(count):
      b(isa.MBARRIER_ARRIVE_CLUSTER, remote, pred=guard)


@emit_rules.register(ops.barrier_arrive_expect_tx_p)
def _expect(ctx: EmitContext, eqn: Eqn) -> None:
  ctx.b(isa.MBARRIER_ARRIVE_EXPECT_TX, address(ctx, *eqn.values), eqn.params["nbytes"],
        pred=_guard(ctx, ctx.leader()))


@emit_rules.register(ops.fence_p)
def _fence(ctx: EmitContext, eqn: Eqn) -> None:
  assert eqn.params["kind"] == "proxy_async_shared", eqn.params
  ctx.b(isa.FENCE_PROXY_ASYNC, space="shared::cta")


@emit_rules.register(ops.sync_p)
def _sync(ctx: EmitContext, eqn: Eqn) -> None:
  """bar.sync over the scope, or over each of its warpgroups."""
  b, scope = ctx.b, ctx.scope
  if eqn.params["each"] == "scope":
    if scope == ctx.whole:
      b(isa.BAR_SYNC_ALL, 0)
    else:
      b(isa.BAR_SYNC, ctx.barrier_id(("scope", scope.first, scope.count), 1), scope.threads)
    return
  first = ctx.barrier_id(("warpgroup", scope.first, scope.count), scope.count)
  wg = ctx.warpgroup()
  b(isa.BAR_SYNC, b.new(isa.ADD, wg, first, type="s32") if isinstance(wg, Reg) else first, WARPGROUP)


@emit_rules.register(memory.commit_group_p)
def _commit(ctx: EmitContext, eqn: Eqn) -> None:
  ctx.b(isa.BULK_COMMIT if eqn.params["kind"] == "bulk" else isa.CP_ASYNC_COMMIT)


@emit_rules.register(memory.wait_group_p)
def _wait_group(ctx: EmitContext, eqn: Eqn) -> None:
  n = eqn.params["n"]
  if eqn.params["kind"] == "bulk":
    ctx.b(isa.BULK_WAIT, n, read="read" if eqn.params["read"] else "")
  else:
    ctx.b(isa.CP_ASYNC_WAIT_GROUP, n)
