"""Addresses and bounds of elements at tiles of indices: a row's address from its index, the rest as for a tile."""
from __future__ import annotations

import numpy as np

from tiletrace.core.graph import RefOperand
from tiletrace.core.types import Dyn, Size
from tiletrace.lowering.emit.context import EmitContext
from tiletrace.lowering.emit.global_access import GlobalAccess
from tiletrace.lowering.emit.values import Elements, Operand
from tiletrace.lowering.indexed import access_groups, index_columns, view_table
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Addr, Reg


class IndexedAccess(GlobalAccess):
  """A GlobalAccess whose dimensions `dims` are indexed.

  Args:
    indices: for each of `dims` the index of every register's element, in the root's coordinates.
    guard: the other root dimensions whose bounds must be checked.
  """

  def __init__(self, ctx: EmitContext, ref: RefOperand, dims: tuple[int, ...], indices: list[Elements],
               guard: tuple[int, ...], layout: Layout, *, storing: bool = False):
    self.index_dims, self.indices = dims, [x.regs for x in indices]
    super().__init__(ctx, ref, guard, layout, storing=storing)
    self.may_overhang = True
    self._rows: dict[tuple, Reg] = {}
    self._inside_index: dict[tuple[int, Operand], Reg] = {}

  def _in_view(self, elements: np.ndarray) -> np.ndarray:
    return view_table(elements, len(self.ref.view.perm), self.index_dims)

  def _shape(self, layout: Layout | None) -> tuple[int, ...]:
    assert layout is not None
    return layout.valid

  def groups(self, vec: int) -> tuple[int, list[list[int]]]:
    columns = index_columns(self.elements.shape[2], len(self.ref.view.perm), self.index_dims)
    found = access_groups(self.elements, self._offsets(), columns, vec)
    assert found is not None, "the selection chose a wider access than the registers allow"
    return vec * self.ref.type.dtype.itemsize, found

  def at(self, reg: int, *, bounds_only: bool = False) -> tuple[Addr, Reg | None]:
    near, inside = int(self.delta[reg]), self._bounds(reg)
    row = self._row(reg)
    if not -(2**23) <= near < 2**23:
      row, near = self.ctx.b.new(isa.ADD, row, near, type="s64"), 0
    return self.ctx.b.addr(row, near), inside if bounds_only else self.both(inside, self.in_view(reg))

  def _row(self, reg: int) -> Reg:
    """The address of what the register's indices select."""
    indices, start = [regs[reg] for regs in self.indices], self._far_address(reg, 0)
    key = (start, *indices)
    if key not in self._rows:
      address = start
      for d, x in zip(self.index_dims, indices, strict=True):
        step = self.steps[self.ref.view.perm[d]]
        if isinstance(x, Reg) or isinstance(step, Size):
          address = self._plus(address, x, step)
        elif x:
          address = self.ctx.b.new(isa.ADD, address, int(x) * step, type="s64")
      self._rows[key] = address
    return self._rows[key]

  def _bounds(self, reg: int) -> Reg | None:
    found = super()._bounds(reg)
    for d, regs in zip(self.index_dims, self.indices, strict=True):
      found = self.both(found, self._index_inside(self.ref.view.perm[d], regs[reg]))
    return found

  def _index_inside(self, p: int, x: Operand) -> Reg:
    """0 <= index < extent of the root's dimension p, and within the edges of the enclosing views."""
    b = self.ctx.b
    if (p, x) not in self._inside_index:
      index = x if isinstance(x, Reg) else b.new(isa.MOV, int(x), type="b32")
      ok = b.new(isa.SETP, index, self.ctx.extent(self.ref.type.shape[p]), cmp="lt", type="u32")
      for edge in self.dims[p].edges:
        for end, cmp in zip(edge, ("ge", "lt"), strict=True):
          bound = self.ctx.scalar(self.ref.dyn[end.index]) if isinstance(end, Dyn) else end
          ok = b.new(isa.AND, ok, b.new(isa.SETP, index, bound, cmp=cmp, type="s32"), type="pred")
      self._inside_index[p, x] = ok
    return self._inside_index[p, x]
