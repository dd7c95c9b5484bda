"""The rest of jnp's functions of floats, and functions of the bits of a number."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.ops import transcendental as ops
from tiletrace.lowering.emit import exponentials as ex, math_functions as fn, trigonometry as trig
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.elementwise import each_element, of_float, register
from tiletrace.lowering.emit.floats import bits, from_bits
from tiletrace.lowering.emit.values import Elements, Operand, materialise
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Instr
from tiletrace.lowering.ptx.module import Builder
from tiletrace.lowering.ptx.registers import Reg


def _rounded(mode: str) -> Callable[[Builder, Reg], Operand]:
  return lambda b, x: b.new(isa.CVT, x, rnd=mode, to="f32", source="f32")


def _atan2(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
  y, x = (register(b, v, kind) for v in xs)
  return trig.atan2(b, y, x)


_FUNCTIONS: dict[Primitive, Callable[[Builder, Reg], Operand]] = {
  ops.tan_p: trig.tan, ops.asin_p: trig.asin, ops.acos_p: trig.acos, ops.atan_p: trig.atan, ops.sinh_p: ex.sinh,
  ops.cosh_p: ex.cosh, ops.asinh_p: ex.asinh, ops.acosh_p: ex.acosh, ops.atanh_p: ex.atanh, ops.expm1_p: ex.expm1,
  ops.log1p_p: ex.log1p, ops.log10_p: ex.log10, ops.cbrt_p: fn.cbrt, ops.erfc_p: fn.erfc,
  ops.round_p: _rounded("rni"), ops.trunc_p: _rounded("rzi"),
}
for _primitive, _function in _FUNCTIONS.items():
  emit_rules.register(_primitive)(each_element(of_float(_function)))
emit_rules.register(ops.atan2_p)(each_element(_atan2))


def _counted(row: Instr) -> Callable[[EmitContext, Eqn], None]:
  """Bits of an element, which is held in 32, without the upper ones that a narrower type does not have."""
  def rule(ctx: EmitContext, eqn: Eqn) -> None:
    absent = 32 - 8 * eqn.outvars[0].dtype.itemsize

    def count(b: Builder, kind: str, xs: tuple[Operand, ...]) -> Operand:
      x = register(b, xs[0], kind)
      if absent:
        x = b.new(isa.AND, x, (1 << 32 - absent) - 1, type="b32")
      n = b.new(row, x, type="b32")
      return b.new(isa.SUB, n, absent, type="s32") if absent and row is isa.CLZ else n
    each_element(count)(ctx, eqn)
  return rule


emit_rules.register(ops.mul_hi_p)(each_element(
  lambda b, kind, xs: b.new(isa.MUL_HI, *(x if isinstance(x, Reg) else int(x) for x in xs), type=kind)))
emit_rules.register(ops.population_count_p)(_counted(isa.POPC))
emit_rules.register(ops.clz_p)(_counted(isa.CLZ))


@emit_rules.register(ops.bitcast_p)
def _bitcast(ctx: EmitContext, eqn: Eqn) -> None:
  """Words that several elements share stay; of 32-bit ones only the register's class changes."""
  x, to = ctx.read(eqn.values[0]), eqn.params["dtype"]
  if x.dtype.itemsize != to.itemsize:
    x = materialise(ctx.b, x)
  count = x.count * x.dtype.itemsize // to.itemsize
  wanted = "f32" if to == dtypes.f32 else "b32"

  def one(r: Operand) -> Operand:
    if not isinstance(r, Reg):                     # a number, not its bits
      return np.asarray(r).astype(x.dtype).view(to).item()
    return r if r.cls == wanted else {"f32": bits, "b32": from_bits}[r.cls](ctx.b, r)

  packed = not x.is_literal and to.itemsize < 4 and x.dtype != dtypes.f32
  regs = x.regs if packed else tuple(map(one, x.regs))
  ctx.bind(eqn.outvars[0], Elements(to, count, regs))
