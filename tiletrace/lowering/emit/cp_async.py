"""Copies that the threads of the scope make themselves: cp.async, and loads and stores through registers."""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import Eqn
from tiletrace.core.types import Space
from tiletrace.lowering.emit import policies
from tiletrace.lowering.emit.context import EmitContext
from tiletrace.lowering.emit.global_access import GlobalAccess
from tiletrace.lowering.emit.memory import collect, scatter
from tiletrace.lowering.emit.shared_access import SharedAccess
from tiletrace.lowering.emit.values import Elements
from tiletrace.lowering.ptx import isa


def emit_cp_async(ctx: EmitContext, eqn: Eqn) -> None:
  """cp.async of 4, 8 or 16 bytes; past an edge the source size is 0, and the hardware writes zeros."""
  src, dst = eqn.refs
  b, layout, vec = ctx.b, eqn.params["layout"], eqn.params["vec"]
  access = GlobalAccess(ctx, src, eqn.params["guard"], layout, storing=True)
  size, groups = access.groups(vec)
  side = SharedAccess(ctx, dst, layout)
  where = side.addresses([g[0] for g in groups])
  for group, target in zip(groups, where, strict=True):
    address, inside = access.at(group[0], bounds_only=True)
    in_view = access.in_view(group[0])
    if inside is None:
      row = isa.CP_ASYNC_CG if size == 16 else isa.CP_ASYNC
      policies.access(ctx, eqn, row, target, address, size, pred=in_view)
    else:
      row = isa.CP_ASYNC_CG_ZFILL if size == 16 else isa.CP_ASYNC_ZFILL
      kept = b.new(isa.SELP, size, 0, inside, type="u32")
      policies.access(ctx, eqn, row, target, address, size, kept, pred=in_view)


def emit_copy_through_registers(ctx: EmitContext, eqn: Eqn) -> None:
  """global -> shared, shared -> global or shared -> shared, element by element of the copy's layout."""
  src, dst = eqn.refs
  layout, dtype = eqn.params["layout"], src.type.dtype
  if src.type.space is Space.GLOBAL:
    _emit_load_to_shared(ctx, eqn)
    return
  inside = SharedAccess(ctx, src, layout)
  value = collect(ctx, dtype, inside.count, inside.groups, inside.size, inside.load, eqn, inside.fill)
  if dst.type.space is Space.SHARED:
    target = SharedAccess(ctx, dst, layout)
    scatter(ctx, value, target.groups, target.size, target.store)
    return
  outside = GlobalAccess(ctx, dst, eqn.params["guard"], layout, storing=True)
  size, groups = outside.groups(eqn.params["vec"])
  scatter(ctx, value, groups, size, lambda i, regs, kind: _global_store(ctx, eqn, outside, groups[i][0], regs, kind))


def _emit_load_to_shared(ctx: EmitContext, eqn: Eqn) -> None:
  """In parts: the loads of one are issued before the stores of the part before it, so that two are in flight and no
  more than their registers are live."""
  src, dst = eqn.refs
  layout, dtype = eqn.params["layout"], src.type.dtype
  outside, inside = GlobalAccess(ctx, src, eqn.params["guard"], layout), SharedAccess(ctx, dst, layout)
  size, groups = outside.groups(eqn.params["vec"])
  fill = eqn.params["fill_value"] if outside.may_overhang else None

  def load(part: _Part) -> Elements:
    return collect(ctx, dtype, len(part.registers), part.local(part.loads), size, lambda i, regs, kind: _global_load(
        ctx, eqn, outside, part.loads[i][0], regs, kind), eqn, fill)

  def store(part: _Part, value: Elements) -> None:
    at = [inside.groups.index(g) for g in part.stores]
    scatter(ctx, value, part.local(part.stores), inside.size, lambda i, regs, kind: inside.store(at[i], regs, kind))

  pending: tuple[_Part, Elements] | None = None
  for part in _parts(groups, inside.groups, eqn.params["part"] // max(1, size // 4) * (size // dtype.itemsize)):
    loaded = part, load(part)
    if pending is not None:
      store(*pending)
    pending = loaded
  if pending is not None:
    store(*pending)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
  """Registers of a fragment, and the loads and stores that make them up."""
  registers: list[int]
  loads: list[list[int]]
  stores: list[list[int]]

  def local(self, groups: list[list[int]]) -> list[list[int]]:
    """The groups, as indices into `registers`."""
    at = {r: i for i, r in enumerate(self.registers)}
    return [[at[r] for r in g] for g in groups]


def _parts(loads: list[list[int]], stores: list[list[int]], at_most: int) -> list[_Part]:
  """Cuts a fragment where neither a load nor a store is cut, into like parts of `at_most` registers or one access."""
  store_of = {r: i for i, g in enumerate(stores) for r in g}
  at_most = -(-len(store_of) // -(-len(store_of) // at_most))
  load_of = {r: i for i, g in enumerate(loads) for r in g}
  parts: list[_Part] = []
  seen: set[int] = set()
  for i, first in enumerate(loads):
    if i in seen:
      continue
    registers, unseen = dict.fromkeys(first), list(first)
    while unseen:
      r = unseen.pop()
      for other in (*loads[load_of[r]], *stores[store_of[r]]):
        if other not in registers:
          registers[other] = None
          unseen.append(other)
    mine = list(dict.fromkeys(load_of[r] for r in registers))
    seen.update(mine)
    stored = dict.fromkeys(store_of[r] for r in registers)
    part = _Part(list(registers), [loads[j] for j in mine], [stores[j] for j in stored])
    if parts and len(parts[-1].registers) + len(registers) <= at_most:
      parts[-1] = _Part(*(a + b for a, b in zip(dataclasses.astuple(parts[-1]), dataclasses.astuple(part))))
    else:
      parts.append(part)
  return parts


def _global_load(ctx: EmitContext, eqn: Eqn, access: GlobalAccess, reg: int, regs, kind) -> None:
  address, pred = access.at(reg)
  policies.access(ctx, eqn, isa.LD_GLOBAL, regs, address, pred=pred, **kind)


def _global_store(ctx: EmitContext, eqn: Eqn, access: GlobalAccess, reg: int, regs, kind) -> None:
  address, pred = access.at(reg)
  policies.access(ctx, eqn, isa.ST_GLOBAL, address, regs, pred=pred, **kind)
