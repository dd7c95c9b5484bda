"""Addresses of a tile in shared memory, a predicate where the fragment is padded beyond the view."""
from __future__ import annotations

import numpy as np

from tiletrace.core.graph import RefOperand
from tiletrace.lowering.emit import addressing
from tiletrace.lowering.emit.context import EmitContext
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.matrix_views import MatrixPlace
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Addr, Reg
from tiletrace.lowering.shared_views import SharedPlace, shared_place
from tiletrace.lowering.tables import coordinates, shared_bytes, widest_groups


def place_of(ctx: EmitContext, ref: RefOperand) -> SharedPlace:
  place = shared_place(ref, ctx.layouts[ref.root], ctx.facts)
  assert isinstance(place, SharedPlace), place
  return place


def shared_start(ctx: EmitContext, ref: RefOperand, place: SharedPlace | MatrixPlace) -> tuple[Reg, int]:
  """(base register with the dynamic part of the start, byte offset with the static part)."""
  base, offset = ctx.smem_address(ref.root)
  item = ref.type.dtype.itemsize
  for atom, stride in place.dynamic:
    x = ctx.scalar(atom)
    if isinstance(x, Reg):
      base = ctx.b.new(isa.MAD_LO, x, stride * item, base, type="s32")
    else:
      offset += int(x) * stride * item
  return base, offset + place.base * item


class SharedAccess:
  """One load or store of a tile by the threads of the scope.

  Args:
    ref: the shared view.
    layout: the fragment's layout; None for a scalar.

  Attributes:
    table: byte offset from the view's start of each (thread, register).
    size, groups: bytes, and registers, of each access.
  """

  def __init__(self, ctx: EmitContext, ref: RefOperand, layout: Layout | None):
    item, threads = ref.type.dtype.itemsize, ctx.scope.threads
    place = place_of(ctx, ref)
    self.ctx, (self._base, self._offset) = ctx, shared_start(ctx, ref, place)
    if layout is None:
      elements = np.zeros((threads, 1, 0), np.int64)
      self.table = np.full((threads, 1), place.layout.offset_of(()) * item)
    else:
      elements = coordinates(layout, threads)
      self.table = shared_bytes(place, layout, threads, item)
    self._alignment = place.alignment(item, ctx.facts)
    self._view = addressing.ViewBounds(ctx, elements, ref.view.static_shape)
    self.size, self.groups = widest_groups(
      self.table, item, self._view.inside, self._alignment)
    self._addresses: list[Addr] | None = None

  @property
  def count(self) -> int:
    return self.table.shape[1]

  def starts_at(self, nbytes: int) -> bool:
    """Whether the view certainly starts at a multiple of `nbytes`."""
    return self._alignment % nbytes == 0

  @property
  def fill(self) -> int | None:
    """What registers that hold padding are filled with before a load; None where there is none."""
    return 0 if self._view.overhangs else None

  def at(self, i: int) -> tuple[Addr, Reg | None]:
    """The address of group i, and the predicate under which it is accessed (None: always)."""
    if self._addresses is None:
      self._addresses = self.addresses([g[0] for g in self.groups])
    return self._addresses[i], self._view.at(self.groups[i][0])

  def rows(self, table: np.ndarray) -> list[Addr]:
    """The addresses of any columns of byte offsets [threads, n]."""
    where = addressing.shared_addresses(self.ctx, table, self._base, self._offset).addresses
    return [self.ctx.b.addr(*x) for x in where]

  def addresses(self, registers: list[int]) -> list[Addr]:
    return self.rows(self.table[:, registers])

  def load(self, i: int, regs, kind) -> None:
    address, pred = self.at(i)
    self.ctx.b(isa.LD_SHARED, regs, address, pred=pred, **kind)

  def store(self, i: int, regs, kind) -> None:
    address, pred = self.at(i)
    self.ctx.b(isa.ST_SHARED, address, regs, pred=pred, **kind)
