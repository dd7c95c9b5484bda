"""What instructions do to the machine: one function for each row that is more than arithmetic (see `numerics`).

An effect gets the machine and the instruction once, and returns what runs each time: `act(strand, threads, at)`, where
`threads` are the active ones and `at` indexes a register row with them. It returns True where the strand went elsewhere
(blocked, split, ended); otherwise the strand goes on with the next instruction.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tiletrace.lowering.ptx.instr import Instr

if TYPE_CHECKING:
  from tiletrace.sim.machine import Machine
  from tiletrace.sim.program import Op
  from tiletrace.sim.strands import Strand

Act = Callable[["Strand", np.ndarray, Any], "bool | None"]
Effect = Callable[["Machine", "Op"], Act]
EFFECTS: dict[Instr, Effect] = {}


def effect(*rows: Instr) -> Callable[[Effect], Effect]:
  """Registers an effect for rows."""
  def register(f: Effect) -> Effect:
    for row in rows:
      assert row not in EFFECTS, f"{row} has two effects"
      EFFECTS[row] = f
    return f
  return register
