"""Records of profiling: the first thread of each warpgroup stores the time; it counts its records in a register."""
from __future__ import annotations

from tiletrace.core.graph import Eqn, walk
from tiletrace.core.ops.profile import profile_mark_p, profile_record_p
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.profile import FIXED, HEADER
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg

_BLOCK, _COUNT, _ROOM = ("profile block",), ("profile count",), ("profile room",)


@emit_rules.register(profile_mark_p)
def _gone(ctx: EmitContext, eqn: Eqn) -> None:
  raise AssertionError(f"{eqn.primitive}: a record stands for it, or it was removed")


def begin_profile(ctx: EmitContext) -> None:
  """Before everything else: where this warpgroup's records lie, and that there are none."""
  record = next((e for e in walk(ctx.graph.body) if e.primitive is profile_record_p), None)
  if record is None:
    return
  b, ring, block = ctx.b, record.refs[0].root, record.params["block"]
  warpgroup = b.new(isa.SHR, ctx.tid(), 7, type="u32")
  place = b.new(isa.MAD_LO, b.special("ctaid.x"), record.params["warpgroups"], warpgroup, type="u32")
  ctx.uniform(_BLOCK, lambda: b.new(isa.MAD_WIDE, place, 4 * block, ctx.pointer(ring), type="u32"))
  ctx.uniform(_COUNT, lambda: b.new(isa.MOV, 0, type="b32"))
  rooms = ring.shape[0] // block
  fits = b.new(isa.SETP, place, rooms, cmp="lt", type="u32")
  ctx.uniform(_ROOM, lambda: b.new(isa.AND, fits, ctx.leader(), type="pred"))


@emit_rules.register(profile_record_p)
def _record(ctx: EmitContext, eqn: Eqn) -> None:
  b, p = ctx.b, eqn.params
  block, count, room = (ctx.uniform(key, _missing) for key in (_BLOCK, _COUNT, _ROOM))
  time, clock = b.special("globaltimer"), b.special("clock")
  end = b.label("recorded")
  b(isa.BRA, end, pred=room, negate=True)
  capacity = (p["block"] - HEADER) // p["words"]
  slot = b.new(isa.AND, count, capacity - 1, type="b32")
  at = b.new(isa.MAD_WIDE, slot, 4 * p["words"], block, type="u32")
  start = 4 * HEADER
  b(isa.ST_GLOBAL, b.addr(at, start), [b.new(isa.MOV, 2 * p["span"] + p["begin"], type="b32"), b.special("smid")],
    vec="v2", type="b32")
  b(isa.ST_GLOBAL, b.addr(at, start + 8), time, type="u64")
  b(isa.ST_GLOBAL, b.addr(at, start + 16), clock, type="b32")
  for i, value in enumerate(eqn.values):
    b(isa.ST_GLOBAL, b.addr(at, start + 4 * (FIXED + i)), ctx.scalar(value), type="b32")
  b(isa.ADD, count, count, 1, type="u32")
  b(isa.ST_GLOBAL, b.addr(block), count, type="b32")
  b.place(end)


def _missing() -> Reg:
  raise AssertionError("begin_profile comes first")
