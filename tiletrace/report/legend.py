"""The layouts of a kernel by name."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiletrace.core.graph import Var
from tiletrace.core.printer import Printer
from tiletrace.lowering.layouts.draw import draw
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.pipeline import Lowering
from tiletrace.lowering.words import num_words

_DRAWN = 8      # rows and columns


class Legend:
  """Names of layouts, as the text of the schedule numbers them, and whose they are.

  Attributes:
    variables: what to call each variable: as the user does, else as the text of the schedule does.
    names: of layouts, in their order. owners: the variables of each.
  """

  def __init__(self, lowering: Lowering):
    program = lowering.program
    printer = Printer(program.graph)
    self.variables = {v: v.hint or name for v, name in printer.names.items()}
    self.names: dict[Layout, str] = {}
    self.owners: dict[Layout, list[Var]] = {}
    for var in printer.names:                 # in the order of binding, as pipeline.with_layouts numbers them
      if var in program.layouts:
        self.name(program.layouts[var])
        self.owners.setdefault(program.layouts[var], []).append(var)

  def name(self, layout: Layout) -> str:
    return self.names.setdefault(layout, f"L{len(self.names) + 1}")

  def data(self) -> dict[str, Any]:
    return {name: self._one(layout, self.owners.get(layout, [])) for layout, name in self.names.items()}

  def _one(self, layout: Layout, owners: Sequence[Var]) -> dict[str, Any]:
    shared = "off" in layout.axes
    held = sorted({num_words(v.dtype, layout.extent("reg")) for v in owners}) if not shared else []
    return {"layout": str(layout), "of": "shared memory" if shared else "registers", "shape": list(layout.shape),
            "elements_per_thread": None if shared else layout.extent("reg"), "registers": held,
            "warps": None if shared else layout.extent("warp"), "copies": layout.kernel().size,
            "variables": list(dict.fromkeys(self.variables[v] for v in owners)),
            "drawing": draw(layout, rows=_DRAWN, columns=_DRAWN).splitlines()}
