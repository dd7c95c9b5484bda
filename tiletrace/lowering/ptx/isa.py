"""The instruction table: every PTX instruction tiletrace may emit, as attributes (`isa.ADD`, `isa.WGMMA_SS`).

The rows live in one file per family. `ROWS` maps each name to its row.
"""
from __future__ import annotations

from tiletrace.lowering.ptx import isa_async, isa_control, isa_float, isa_integer, isa_memory, isa_mma
from tiletrace.lowering.ptx.instr import Instr
from tiletrace.lowering.ptx.isa_async import *  # noqa: F403
from tiletrace.lowering.ptx.isa_control import *  # noqa: F403
from tiletrace.lowering.ptx.isa_float import *  # noqa: F403
from tiletrace.lowering.ptx.isa_integer import *  # noqa: F403
from tiletrace.lowering.ptx.isa_memory import *  # noqa: F403
from tiletrace.lowering.ptx.isa_mma import *  # noqa: F403

FAMILIES = (isa_integer, isa_float, isa_memory, isa_async, isa_mma, isa_control)
ROWS: dict[str, Instr] = {name: value for family in FAMILIES for name, value in vars(family).items()
                          if isinstance(value, Instr)}
