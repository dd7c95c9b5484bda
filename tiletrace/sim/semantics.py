"""All that the simulator can run: importing the effects registers them. `missing` is empty, or a test fails."""
from __future__ import annotations

import tiletrace.sim.access
import tiletrace.sim.barriers
import tiletrace.sim.control
import tiletrace.sim.copies
import tiletrace.sim.matrices
import tiletrace.sim.mbarriers
import tiletrace.sim.tensor_copies
import tiletrace.sim.warpgroups
import tiletrace.sim.warps  # noqa: F401
from tiletrace.lowering.ptx import isa
from tiletrace.sim import numerics
from tiletrace.sim.tables import EFFECTS


def missing() -> list[str]:
  """Rows of the instruction table without semantics."""
  return [name for name, row in isa.ROWS.items() if row not in EFFECTS and row not in numerics.UNITS
          and row is not isa.BRA]
