"""gemm by wgmma: descriptors from the layouts, one commit group for each gemm."""
from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, RefOperand
from tiletrace.core.ops import mma as ops
from tiletrace.core.types import Space
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.shared_access import place_of, shared_start
from tiletrace.lowering.emit.values import Elements, Operand, materialise
from tiletrace.lowering.layouts.descriptor import Descriptor, wgmma_descriptor
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.wgmma_plan import WgmmaPlan, wgmma_plan

_TYPES = {dtypes.bf16: "bf16", dtypes.f16: "f16"}
_START = 0x3FFF  # the descriptor's start address field


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
  in_dtype = b_ref.type.dtype
  right = _shared(ctx, b_ref, "B", plan.n, plan, in_dtype.itemsize * 8)
  left = None if a_value or a_ref[0].type.space is Space.FRAGMENT else (
      _shared(ctx, a_ref[0], "A", 64, plan, in_dtype.itemsize * 8))
  registers = None if left is not None else materialise(b, ctx.read(a_value[0] if a_value else a_ref[0].root))
  scale: Operand = ctx.scalar(accumulate)
  b(isa.WGMMA_FENCE)
  for m, k in itertools.product(range(plan.m_blocks), range(plan.k_steps)):
    _instruction(ctx, plan, left, registers, right, acc, m, k, scale if k == 0 else 1, _TYPES[in_dtype])
  b(isa.WGMMA_COMMIT)


def _instruction(ctx: EmitContext, plan: WgmmaPlan, left: _SharedOperand | None, registers: Elements | None,
                 right: _SharedOperand, acc: Elements, m: int, k: int, scale: Operand, kind: str) -> None:
  b, n_regs = ctx.b, plan.acc_registers
  d = list(acc.regs[m * n_regs:(m + 1) * n_regs])
  mods: dict[str, Any] = {"shape": f"m64n{plan.n}k16", "d": "f32" if acc.dtype == dtypes.f32 else "f16",
                          "a": kind, "b": kind}
  b_desc = right.at(ctx, right.descriptor.k_offset(k))
  if left is not None:
    a_desc = left.at(ctx, left.descriptor.tile_offset(64 * m, 16 * k))
    b(isa.WGMMA_SS, d, a_desc, b_desc, scale, 1, 1, left.descriptor.transpose, right.descriptor.transpose, **mods)
  else:
    assert registers is not None
    first = 4 * (m * plan.k_steps + k)
    b(isa.WGMMA_RS, d, list(registers.regs[first:first + 4]), b_desc, scale, 1, 1, right.descriptor.transpose, **mods)


def _shared(ctx: EmitContext, ref: RefOperand, role: str, tile: int, plan: WgmmaPlan, bits: int) -> _SharedOperand:
  """The descriptor of the warpgroup's part: its high word is a constant, its low word holds the address."""
  b = ctx.b
  place = place_of(ctx, ref)
  desc = wgmma_descriptor(place.layout, bits, role=role, tile=tile)  # type: ignore[arg-type]
  base, offset = shared_start(ctx, ref, place)
  per_warpgroup = _warpgroup_step(desc, role, plan)
  wg = ctx.warpgroup()
  if per_warpgroup and isinstance(wg, Reg):
    base = b.new(isa.MAD_LO, wg, per_warpgroup, base, type="s32")
  address = b.new(isa.ADD, base, offset, type="s32") if offset else base
  start = b.new(isa.BFE, address, 4, 14, type="u32")  # in a cluster the address carries the CTA's rank above bit 23
  bits64 = desc.encode(0)
  low = b.new(isa.OR, start, bits64 & 0xFFFFFFFF, type="b32") if bits64 & 0xFFFFFFFF else start
  high = b.new(isa.MOV, _signed(bits64 >> 32), type="b32")
  return _SharedOperand(desc, b.new(isa.PACK, [low, high], type="b64"))


def _signed(word: int) -> int:
  return word - (1 << 32) if word >= 1 << 31 else word


def _warpgroup_step(desc: Descriptor, role: str, plan: WgmmaPlan) -> int:
  """Bytes between the parts of neighbouring warpgroups: rows of A or columns of B, which must lie evenly."""
  if plan.warpgroups == 1 or (role == "A") != (plan.split == "m"):
    return 0
  per = plan.m_blocks if role == "A" else 1
  starts = np.asarray([desc.mn_offsets[w * per] for w in range(plan.warpgroups)])
  steps = np.diff(starts)
  assert (steps == steps[0]).all(), f"the warpgroups' parts are not evenly apart: {starts}"
  return int(steps[0])

