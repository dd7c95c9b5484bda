"""Sums and products of f16 and bf16 two at a time (PTX ISA 9.7.4, add, sub and mul of .f16x2 and .bf16x2).

The same numbers as in f32, rounded once: f32 holds products of both types, and 24 bits are enough for a sum that is
rounded to 11 to be right (Figueroa, "When is double rounding innocuous?", 1995).
"""
from __future__ import annotations

from collections.abc import Callable

from tiletrace.core import dtypes
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.ops import elementwise as ew
from tiletrace.lowering.emit.context import EmitContext
from tiletrace.lowering.emit.values import Elements, Operand, spread, words
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Instr
from tiletrace.lowering.ptx.registers import Reg

_TYPES = {dtypes.f16: "f16x2", dtypes.bf16: "bf16x2"}
PACKED: dict[Primitive, Instr] = {ew.add_p: isa.ADD, ew.sub_p: isa.SUB, ew.mul_p: isa.MUL}


def in_pairs(row: Instr, single: Callable[[EmitContext, Eqn], None]) -> Callable[[EmitContext, Eqn], None]:
  """A rule that applies `row` to whole words; to other types, to one element alone, and to bf16 before sm_90,
  `single`."""
  def rule(ctx: EmitContext, eqn: Eqn) -> None:
    out, b = eqn.outvars[0], ctx.b
    count, type_ = ctx.count(out), _TYPES.get(out.dtype)
    if type_ is None or count == 1 or (out.dtype == dtypes.bf16 and ctx.target.lacks("sm_90")):
      single(ctx, eqn)
      return
    xs = [words(spread(b, x, count) if x.count == 1 else x) for x in map(ctx.read, eqn.values)]
    made: dict[tuple, Operand] = {}      # equal words (a broadcast row) are computed once
    for pair in zip(*xs, strict=True):
      if pair not in made:
        made[pair] = b.new(row, *(x if isinstance(x, Reg) else b.new(isa.MOV, int(x), type="b32") for x in pair),
                           rnd="rn", type=type_)
    ctx.bind(out, Elements(out.dtype, count, tuple(made[pair] for pair in zip(*xs, strict=True))))
  return rule
