"""Operations that cross threads or warps, replaced by exchanges through shared memory."""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import Block, Eqn, Var
from tiletrace.core.source import Loc
from tiletrace.core.types import Space, TileType
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.schedule.builder import Builder


class Exchange:
  """Rewrites the equations of one kind, in all blocks: a subclass says which, by `replace`.

  Args:
    syncs: whether to put syncs into the exchanges; else they are placed from the order of effects.

  Attributes:
    scratch: the shared buffers that the exchanges need, as equations.
    notes: the report.
  """

  def __init__(self, layouts: dict[Var, Layout], *, syncs: bool = False):
    self.layouts, self.syncs = layouts, syncs
    self.scratch: list[Eqn] = []
    self.notes: list[str] = []

  def replace(self, eqn: Eqn) -> list[Eqn] | None:
    """What stands for an equation; None: it is of another kind."""
    raise NotImplementedError

  def block(self, block: Block) -> Block:
    eqns: list[Eqn] = []
    for eqn in block.eqns:
      found = self.replace(eqn)
      if found is None:
        found = [eqn.replace(blocks=tuple(map(self.block, eqn.blocks))) if eqn.blocks else eqn]
      eqns += found
    return dataclasses.replace(block, eqns=tuple(eqns))

  def buffer(self, loc: Loc, value: TileType, hint: str, layout: Layout) -> Var:
    """A shared buffer for a value, of which it has the shape and dtype."""
    alloc = Builder(loc)
    buffer = alloc.alloc(Space.SHARED, value.shape, value.dtype, hint)
    self.layouts[buffer] = layout
    self.scratch += alloc.eqns
    return buffer

  def sync(self, b: Builder) -> None:
    if self.syncs:
      b.sync()
