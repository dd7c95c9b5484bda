"""Operands of PTX instructions: virtual registers, symbols, addresses, labels, special registers.

Operands stay objects until `Module.render`, so that the simulator and the lint read the same thing as `ptxas`.
"""
from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

REGISTER_PREFIX = {"pred": "%p", "b16": "%h", "b32": "%r", "b64": "%rd", "f32": "%f", "f64": "%fd"}

# PTX ISA section 10: the special registers that kernels read, with the type `mov` reads them as.
SPECIAL_REGISTERS = {
    **{f"{r}.{axis}": "u32"
       for r in ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
       for axis in "xyz"},
    "cluster_ctarank": "u32", "cluster_nctarank": "u32", "laneid": "u32", "warpid": "u32", "smid": "u32",
    "nsmid": "u32", "lanemask_eq": "u32", "lanemask_le": "u32", "lanemask_lt": "u32", "lanemask_ge": "u32",
    "lanemask_gt": "u32", "clock": "u32", "clock64": "u64", "globaltimer": "u64", "dynamic_smem_size": "u32",
    "total_smem_size": "u32", "gridid": "u64",
}


class Reg:
  """A typed virtual register: mutable, named by class and order of creation. Compared by identity."""
  __slots__ = ("cls", "index", "name")

  def __init__(self, cls: str, index: int):
    self.cls, self.index, self.name = cls, index, f"{REGISTER_PREFIX[cls]}{index}"

  def __repr__(self) -> str:
    return self.name


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
  """The name of a variable; as an operand, its address in the window of its space ("shared", "param" or
  "global")."""
  name: str
  space: str

  def __str__(self) -> str:
    return self.name


@dataclasses.dataclass(frozen=True, slots=True)
class Addr:
  """base + offset bytes, written in brackets."""
  base: Reg | Symbol
  offset: int = 0

  def __str__(self) -> str:
    return f"[{self.base.name}+{self.offset}]" if self.offset else f"[{self.base.name}]"


class Label:
  """A branch target. Compared by identity; the name starts with `$`, so that it never meets another name."""
  __slots__ = ("name",)

  def __init__(self, name: str):
    self.name = name

  def __repr__(self) -> str:
    return self.name


@dataclasses.dataclass(frozen=True, slots=True)
class Special:
  """A special register, e.g. Special("tid.x")."""
  name: str

  def __str__(self) -> str:
    return f"%{self.name}"


Operand = Reg | Symbol | Addr | Label | Special | int | float
Operands = tuple["Operand | tuple[Operand, ...]", ...]
OperandLike = Operand | str | Sequence[Operand]


def float_literal(value: float, dtype: str = "f32") -> str:
  """The exact bits of a float as PTX writes them (PTX ISA section 4.5.2).

  >>> float_literal(1.0), float_literal(-0.5, "f64")
  ('0f3F800000', '0dBFE0000000000000')
  """
  if dtype == "f64":
    return f"0d{struct.pack('>d', value).hex().upper()}"
  return f"0f{struct.pack('>f', value).hex().upper()}"


def int_literal(value: int) -> str:
  """Decimal where a reader thinks in decimal, hexadecimal from 2**31 on: those are masks and descriptors."""
  return str(value) if value < 1 << 31 else hex(value)
