"""gemm by wgmma: descriptors from the layouts, one commit group for each gemm."""
from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, RefOperand
from tiletrace.core.ops import mma as ops
from tiletrace.core.types import Space
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.shared_access import shared_start
from tiletrace.lowering.emit.values import Elements, Operand, materialise
from tiletrace.lowering.layouts.descriptor import Descriptor, Role
from tiletrace.lowering.matrix_views import MatrixPlace, matrix_place
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.wgmma_plan import WgmmaPlan, wgmma_plan

OPERAND_TYPES = {dtypes.bf16: "bf16", dtypes.f16: "f16", dtypes.f32: "tf32", dtypes.f8e4m3: "e4m3",
                 dtypes.f8e5m2: "e5m2", dtypes.i8: "s8", dtypes.u8: "u8"}
ACCUMULATOR_TYPES = {dtypes.f32: "f32", dtypes.f16: "f16", dtypes.i32: "s32"}
# (A in shared memory, A in registers), by the width of an element
_ROWS = {16: (isa.WGMMA_SS, isa.WGMMA_RS), 32: (isa.WGMMA_TF32_SS, isa.WGMMA_TF32_RS),
         8: (isa.WGMMA_F8_SS, isa.WGMMA_F8_RS)}
_INTEGER_ROWS = (isa.WGMMA_S8_SS, isa.WGMMA_S8_RS)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _SharedOperand:
  """A descriptor whose start is not yet advanced to an instruction's tile."""
  descriptor: Descriptor
  base: Reg  # the 64-bit descriptor of the operand's first tile of this warpgroup

  def at(self, ctx: EmitContext, offset: int) -> Reg:
    return ctx.b.new(isa.ADD, self.base, offset >> 4, type="s64") if offset else self.base


@emit_rules.register(ops.gemm_p)
def _gemm(ctx: EmitContext, eqn: Eqn) -> None:
  raise LoweringError("gemm reached the emitter: the scheduler makes it gemm_async", loc=eqn.loc)


@emit_rules.register(ops.wgmma_wait_p)
def _wait(ctx: EmitContext, eqn: Eqn) -> None:
  ctx.b(isa.WGMMA_WAIT, eqn.params["n"])


@emit_rules.register(ops.gemm_async_p)
def _gemm_async(ctx: EmitContext, eqn: Eqn) -> None:
  """fence; for every k-step and every 64-row block of the warpgroup one wgmma; commit."""
  b = ctx.b
  *a_ref, b_ref, acc_ref = eqn.refs
  accumulate, *a_value = eqn.values
  plan = wgmma_plan(eqn, ctx.layouts[acc_ref.root], ctx.scope.count)
  acc = ctx.read(acc_ref.root)
  right = _shared(ctx, b_ref, "B", plan.n, plan)
  left = None if a_value or a_ref[0].type.space is Space.FRAGMENT else _shared(ctx, a_ref[0], "A", 64, plan)
  registers = None if left is not None else as_words(ctx, ctx.read(a_value[0] if a_value else a_ref[0].root))
  a_dtype = a_value[0].dtype if a_value else a_ref[0].type.dtype
  mods: dict[str, Any] = {"shape": f"m64n{plan.n}k{plan.depth}", "d": ACCUMULATOR_TYPES[acc.dtype],
                          "a": OPERAND_TYPES[a_dtype], "b": OPERAND_TYPES[b_ref.type.dtype]}
  scale: Operand = ctx.scalar(accumulate)
  b(isa.WGMMA_FENCE)
  for m, k in itertools.product(range(plan.m_blocks), range(plan.k_steps)):
    _instruction(ctx, plan, left, registers, right, acc, m, k, scale if k == 0 else 1, mods)
  b(isa.WGMMA_COMMIT)


def as_words(ctx: EmitContext, a: Elements) -> list[Operand]:
  """A's registers as the instruction takes them: 32 bits each, of whatever type."""
  regs = materialise(ctx.b, a).regs
  return [ctx.b.new(isa.MOV, r, type="b32") if isinstance(r, Reg) and r.cls == "f32" else r for r in regs]


def _instruction(ctx: EmitContext, plan: WgmmaPlan, left: _SharedOperand | None, registers: list[Operand] | None,
                 right: _SharedOperand, acc: Elements, m: int, k: int, scale: Operand, mods: dict[str, Any]) -> None:
  """Only 16-bit operands have bits for transposes, and only floats for signs (PTX ISA, wgmma.mma_async)."""
  b, n_regs, desc = ctx.b, plan.acc_registers, right.descriptor
  d = list(acc.regs[m * n_regs:(m + 1) * n_regs])
  shared, in_registers = _INTEGER_ROWS if acc.dtype == dtypes.i32 else _ROWS[256 // plan.depth]
  signs = () if acc.dtype == dtypes.i32 else (1, 1)
  b_desc, b_bits = right.at(ctx, desc.k_offset(k)), (desc.transpose,) if plan.depth == 16 else ()
  if left is not None:
    a_desc = left.at(ctx, left.descriptor.tile_offset(64 * m, plan.depth * k))
    a_bits = (left.descriptor.transpose,) if plan.depth == 16 else ()
    b(shared, d, a_desc, b_desc, scale, *signs, *a_bits, *b_bits, **mods)
  else:
    assert registers is not None
    first = 4 * (m * plan.k_steps + k)
    b(in_registers, d, registers[first:first + 4], b_desc, scale, *signs, *b_bits, **mods)


def _shared(ctx: EmitContext, ref: RefOperand, role: Role, tile: int, plan: WgmmaPlan) -> _SharedOperand:
  """The descriptor of the warpgroup's part: its high word is a constant, its low word holds the address."""
  b = ctx.b
  place = matrix_place(ref, ctx.layouts[ref.root], ctx.facts, role=role, tile=tile)
  assert isinstance(place, MatrixPlace), place
  desc = place.descriptor
  base, offset = shared_start(ctx, ref, place)
  offset += desc.start
  per_warpgroup = desc.part_step(plan.grid[role == "B"])
  assert per_warpgroup is not None, f"the warpgroups' parts are not evenly apart: {desc}"
  wg = ctx.warpgroup()
  if per_warpgroup and isinstance(wg, Reg):
    if min(plan.grid) > 1:
      wg = b.new(isa.REM if role == "A" else isa.DIV, wg, plan.grid[0], type="u32")
    base = b.new(isa.MAD_LO, wg, per_warpgroup, base, type="s32")
  address = b.new(isa.ADD, base, offset, type="s32") if offset else base
  start = b.new(isa.BFE, address, 4, 14, type="u32")  # in a cluster the address carries the CTA's rank above bit 23
  bits64 = desc.encode(0)
  low = b.new(isa.OR, start, bits64 & 0xFFFFFFFF, type="b32") if bits64 & 0xFFFFFFFF else start
  high = b.new(isa.MOV, _signed(bits64 >> 32), type="b32")
  return _SharedOperand(desc, b.new(isa.PACK, [low, high], type="b64"))


def _signed(word: int) -> int:
  return word - (1 << 32) if word >= 1 << 31 else word
