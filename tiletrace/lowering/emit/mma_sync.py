"""gemm by mma.sync: both operands and the accumulator in the registers of warps."""
from __future__ import annotations

import itertools
from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.graph import Eqn
from tiletrace.core.ops import mma as ops
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.mma import ACCUMULATOR_TYPES, OPERAND_TYPES, as_words
from tiletrace.lowering.emit.values import Elements, Operand
from tiletrace.lowering.mma_plan import plan_of
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg

_ROWS = {4: isa.MMA_TF32, 2: isa.MMA, 1: isa.MMA_F8}


@emit_rules.register(ops.mma_sync_p)
def _mma_sync(ctx: EmitContext, eqn: Eqn) -> None:
  """For every k-step, product, 16-row and 8-column tile of the warp one instruction."""
  b = ctx.b
  accumulate, a_value, b_value = eqn.values
  plan, acc = plan_of(eqn, ctx.scope.count), ctx.read(eqn.refs[0].root)
  left, right = (as_words(ctx, ctx.read(v)) for v in (a_value, b_value))
  _clear(ctx, acc, ctx.scalar(accumulate))
  row = isa.MMA_S8 if acc.dtype == dtypes.i32 else _ROWS[a_value.dtype.itemsize]
  kind = ACCUMULATOR_TYPES[acc.dtype]
  mods: dict[str, Any] = {"shape": f"m16n8k{plan.depth}", "d": kind, "c": kind, "a": OPERAND_TYPES[a_value.dtype],
                          "b": OPERAND_TYPES[b_value.dtype]}
  rows, columns, steps = plan.tiles
  size = 2 if acc.dtype == dtypes.f16 else 4
  products = (plan.batch or (1, 1))[0]
  for k, s, m, n in itertools.product(range(steps), range(products), range(rows), range(columns)):
    d = list(acc.regs[size * ((s * rows + m) * columns + n):][:size])
    first, second = 4 * ((s * rows + m) * steps + k), 2 * ((s * columns + n) * steps + k)
    b(row, d, left[first:first + 4], right[second:second + 2], d, **mods)


def _clear(ctx: EmitContext, acc: Elements, accumulate: Operand) -> None:
  """Zeros in the accumulator, where it is to be overwritten."""
  zero: int | float = 0.0 if acc.dtype == dtypes.f32 else 0
  kind = "f32" if acc.dtype == dtypes.f32 else "b32"
  for r in acc.regs:
    assert isinstance(r, Reg)
    if isinstance(accumulate, Reg):
      ctx.b(isa.SELP, r, r, zero, accumulate, type=kind)
    elif not accumulate:
      ctx.b(isa.MOV, r, zero, type=kind)
