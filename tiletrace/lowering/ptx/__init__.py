"""PTX as data: the instruction table, modules of structured instructions, the lint."""
from __future__ import annotations

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Form, Inst, Instr, PtxError
from tiletrace.lowering.ptx.lint import check, lint
from tiletrace.lowering.ptx.module import Builder, Entry, Module, Note, Param
from tiletrace.lowering.ptx.registers import Addr, Label, Reg, Special, Symbol

__all__ = ["Addr", "Builder", "Entry", "Form", "Inst", "Instr", "Label", "Module", "Note", "Param", "PtxError", "Reg",
           "Special", "Symbol", "check", "isa", "lint"]
