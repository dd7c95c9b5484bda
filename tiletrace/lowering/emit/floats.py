"""f32 arithmetic as functions of registers and literals, for what is computed from many of them."""
from __future__ import annotations

from collections.abc import Sequence

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Instr
from tiletrace.lowering.ptx.module import Builder
from tiletrace.lowering.ptx.registers import Reg

Float = Reg | float


def _binary(row: Instr, b: Builder, x: Float, y: Float) -> Reg:
  return b.new(row, x, y, type="f32")


def add(b: Builder, x: Float, y: Float) -> Reg:
  return _binary(isa.ADD, b, x, y)


def sub(b: Builder, x: Float, y: Float) -> Reg:
  return _binary(isa.SUB, b, x, y)


def mul(b: Builder, x: Float, y: Float) -> Reg:
  return _binary(isa.MUL, b, x, y)


def div(b: Builder, x: Float, y: Float) -> Reg:
  return _binary(isa.DIV_RN, b, x, y)


def neg(b: Builder, x: Reg) -> Reg:
  return b.new(isa.NEG, x, type="f32")


def magnitude(b: Builder, x: Reg) -> Reg:
  return b.new(isa.ABS, x, type="f32")


def fma(b: Builder, x: Float, y: Float, z: Float) -> Reg:
  """x * y + z, rounded once."""
  return b.new(isa.FMA, x, y, z, rnd="rn", type="f32")


def horner(b: Builder, x: Reg, coefficients: Sequence[float]) -> Reg:
  """A polynomial in x, the highest power's coefficient first."""
  acc = fma(b, x, coefficients[0], coefficients[1])
  for c in coefficients[2:]:
    acc = fma(b, acc, x, c)
  return acc


def compare(b: Builder, cmp: str, x: Reg, y: Float) -> Reg:
  return b.new(isa.SETP, x, y, cmp=cmp, type="f32")


def select(b: Builder, p: Reg, x: Float, y: Float) -> Reg:
  return b.new(isa.SELP, x, y, p, type="f32")


def with_sign(b: Builder, sign: Reg, size: Float) -> Reg:
  return b.new(isa.COPYSIGN, sign, size, type="f32")


def bits(b: Builder, x: Reg) -> Reg:
  """The bits of x in a b32 register."""
  out = b.reg("b32")
  b(isa.MOV, out, x, type="b32")
  return out


def from_bits(b: Builder, x: Reg) -> Reg:
  """The f32 whose bits x has."""
  out = b.reg("f32")
  b(isa.MOV, out, x, type="b32")
  return out
