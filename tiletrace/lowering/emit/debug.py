"""Records of debugging: an atomic addition takes words of the ring, then each thread writes what it has of a value."""
from __future__ import annotations

import numpy as np

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Atom, Eqn, Var
from tiletrace.core.ops import barrier, debug
from tiletrace.core.types import TileType
from tiletrace.lowering.emit import addressing
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.values import Operand, unpack
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.tables import coordinates, replicated_bits, split_sum


@emit_rules.register(debug.debug_print_p, debug.debug_check_p)
def _gone(ctx: EmitContext, eqn: Eqn) -> None:
  raise AssertionError(f"{eqn.primitive}: a record stands for it, or it was removed")


@emit_rules.register(debug.debug_record_p)
def _record(ctx: EmitContext, eqn: Eqn) -> None:
  b, ring, values = ctx.b, eqn.refs[0].root, [1, *(_size(v) for v in eqn.values)]
  size = sum(values)
  tiles = [v for v in eqn.values if v.shape]
  if tiles and ctx.scope.elected is not None:
    raise LoweringError(f"debug_print of {tiles[0].type} takes all threads of a warpgroup, tt.elect() leaves one",
                        loc=eqn.loc, hint="print scalars here, or before tt.elect()")
  end = b.label("recorded")
  first = None if ctx.scope.elected is not None else b.new(isa.SETP, ctx.local_tid(), 0, cmp="eq", type="s32")
  if tiles:
    at = _shared_place(ctx, eqn, ring, size, first)
  else:
    if first is not None:
      b(isa.BRA, end, pred=first, negate=True)
    at = _take(ctx, ring, size)
  b(isa.BRA, end, pred=b.new(isa.SETP, at, ring.shape[0] - 1 - size, cmp="gt", type="u32"))
  address = b.new(isa.MAD_WIDE, at, 4, ctx.pointer(ring), type="u32")
  one = first if tiles else None
  offset = 4                                                   # past the count
  for value, n in zip((None, *eqn.values), values, strict=True):
    if value is not None and value.shape:
      assert isinstance(value, Var)
      _tile(ctx, value, address, offset)
    else:
      word: Operand = eqn.params["site"] if value is None else ctx.scalar(value)
      kind = "f32" if value is not None and value.type.dtype.kind == "f" else "b32"  # type: ignore[union-attr]
      b(isa.ST_GLOBAL, b.addr(address, offset), word, type=kind, pred=one)
    offset += 4 * n
  b.place(end)


def _size(value: Atom) -> int:
  assert isinstance(value.type, TileType)
  return value.type.size


def _take(ctx: EmitContext, ring: Var, size: int) -> Reg:
  """Words [at, at + size) behind the count are this thread's."""
  return ctx.b.new(isa.ATOM, ctx.b.addr(ctx.pointer(ring)), size, sem="relaxed", scope="gpu", space="global", op="add",
                   type="u32")


def _shared_place(ctx: EmitContext, eqn: Eqn, ring: Var, size: int, first: Reg | None) -> Reg:
  """One thread takes the words, and all learn where, through shared memory. The first sync: they have read the last."""
  b, loc = ctx.b, eqn.loc
  base, offset = ctx.smem_address(eqn.refs[1].root)
  known, sync = b.label("taken"), Eqn(barrier.sync_p, (), (), {"each": "scope"}, loc)
  emit_rules[barrier.sync_p](ctx, sync)
  b(isa.BRA, known, pred=first, negate=True)
  b(isa.ST_SHARED, b.addr(base, offset), _take(ctx, ring, size), type="b32")
  b.place(known)
  emit_rules[barrier.sync_p](ctx, sync)
  return b.new(isa.LD_SHARED, b.addr(base, offset), type="b32")


def _tile(ctx: EmitContext, value: Var, address: Reg, offset: int) -> None:
  """Each element to its place in row-major order, by one of the threads that have it."""
  b, table = ctx.b, coordinates(ctx.layouts[value], ctx.scope.threads)
  bounds = addressing.ViewBounds(ctx, table, value.shape)
  strides = np.cumprod([4, *value.shape[:0:-1]])[::-1]
  base, delta = split_sum((table.astype(np.int64) * strides).sum(-1))
  start = b.new(isa.MAD_WIDE, addressing.thread_sum(ctx, base), 1, address, type="s32")
  mask = replicated_bits(table)
  one = b.new(isa.SETP, b.new(isa.AND, ctx.local_tid(), mask, type="b32"), 0, cmp="eq", type="s32") if mask else None
  kind = "f32" if value.dtype.kind == "f" else "b32"
  for r, word in enumerate(unpack(b, ctx.read(value))):
    if bounds.inside[:, r].any():
      inside = addressing.both(b, one, bounds.at(r))
      b(isa.ST_GLOBAL, b.addr(start, offset + int(delta[r])), word, type=kind, pred=inside)
