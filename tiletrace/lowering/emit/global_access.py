"""Addresses and bounds of a tile in global memory: 64-bit addresses, a predicate where the tile may overhang."""
from __future__ import annotations

import numpy as np

from tiletrace.core.graph import RefOperand
from tiletrace.core.types import Dyn, Extent, Size
from tiletrace.lowering.emit import addressing
from tiletrace.lowering.emit.context import EmitContext
from tiletrace.lowering.emit.values import Operand
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Addr, Reg
from tiletrace.lowering.strides import Offsets, row_major_strides
from tiletrace.lowering.tables import coordinates, replicated_bits, split_sum

_IMMEDIATE = 2**23  # bytes: keeps base + immediate well inside PTX's signed 32-bit offset


class GlobalAccess:
  """One load or store of a tile by the threads of the scope.

  Args:
    ref: the global view.
    guard: root dimensions whose bounds must be checked at run time.
    layout: the fragment's layout; None for a scalar.
    storing: only one of the threads that hold copies of an element may act.

  Attributes:
    elements: of the fragment, for each (thread, register).
    table: the same, in the view.
  """

  def __init__(self, ctx: EmitContext, ref: RefOperand, guard: tuple[int, ...], layout: Layout | None, *,
               storing: bool = False):
    self.ctx, self.ref, self.guard = ctx, ref, guard
    threads = ctx.scope.threads
    self.elements = (coordinates(layout, threads) if layout is not None
                     else np.zeros((threads, 1, 0), np.int64))
    self.table = self._in_view(self.elements)
    self.count = self.table.shape[1]
    self.dims = ref.view.dims
    self.steps: list[Extent] = [s * ref.type.dtype.itemsize for s in row_major_strides(ref.type.shape)]
    self._predicates: dict[tuple, Reg | None] = {}
    self._index: dict[int, tuple[Operand, np.ndarray]] = {}
    self._view = addressing.ViewBounds(ctx, self.elements, self._shape(layout))
    self.may_overhang = bool(guard) or self._view.overhangs
    self._single = self._one_copy(layout) if storing else None
    self._address()

  def _in_view(self, elements: np.ndarray) -> np.ndarray:
    return elements

  def _shape(self, layout: Layout | None) -> tuple[int, ...]:
    """The fragment's, without padding."""
    return self.ref.view.static_shape

  def _start(self, d: int) -> Operand:
    start = self.dims[d].start
    return self.ctx.scalar(self.ref.dyn[start.index]) if isinstance(start, Dyn) else start

  def _kept(self) -> list[tuple[int, int]]:
    """(root dimension, the view's dimension) of every dimension that is kept."""
    return [(p, i) for i, p in enumerate(self.ref.view.perm)]

  def _address(self) -> None:
    """pointer + uniform start + the thread's part; registers differ by an immediate."""
    b = self.ctx.b
    address = self.ctx.pointer(self.ref.root)
    constant = 0
    self.rows: list[tuple[Size, np.ndarray]] = []     # (bytes, how many of them) beside `delta`, for each register
    for d, step in enumerate(self.steps):
      start = self._start(d)
      if isinstance(step, Size):
        x, rows = self._root_index(d)
        address = self._plus(address, x, step)
        self.rows += [(step, rows)] if rows.any() else []
      elif isinstance(start, Reg):
        address = self._plus(address, start, step)
      else:
        constant += int(start) * step
    kept = [(p, i) for p, i in self._kept() if isinstance(self.steps[p], int)]
    scale = np.asarray([self.dims[p].stride * self.steps[p] for p, _ in kept], np.int64)
    columns = [i for _, i in kept]
    flat = np.zeros(self.table.shape[:2], np.int64)
    if columns:
      flat = (self.table[..., columns].astype(np.int64) * scale).sum(-1)
    base, self.delta = split_sum(flat)
    for part in self._thread_parts(base, columns, scale):
      address = self._plus(address, *part)
    constant += int(base[0])
    self.address = b.new(isa.ADD, address, constant, type="s64") if constant else address
    self._far: dict[tuple[int, ...], Reg] = {}

  def _thread_parts(self, base: np.ndarray, columns: list[int], scale: np.ndarray) -> list[tuple[Operand, int]]:
    """(32-bit index, bytes) whose products sum to base - base[0]: one product where 32 bits hold it."""
    rest = base - base[0]
    if not rest.any():
      return []
    if np.abs(rest).max() < 2**31:
      return [(addressing.thread_sum(self.ctx, rest), 1)]
    parts = []
    for c, s in zip(columns, scale.tolist(), strict=True):
      per_dim, _ = split_sum(self.table[..., c])
      if (per_dim != per_dim[0]).any():
        parts.append((addressing.thread_sum(self.ctx, per_dim - per_dim[0]), s))
    return parts

  def _plus(self, address: Reg, x: Operand, step: Extent) -> Reg:
    """address + x * step, where x is a signed 32-bit register, or a number, and step may be wider."""
    b = self.ctx.b
    if isinstance(step, Size):
      wide = b.new(isa.CVT, x, to="s64", source="s32") if isinstance(x, Reg) else int(x)
      return b.new(isa.MAD_LO, self.ctx.stride(step), wide, address, type="s64") if wide != 0 else address
    if -(2**31) <= step < 2**31:
      return b.new(isa.MAD_WIDE, x, step, address, type="s32")
    wide = b.new(isa.CVT, x, to="s64", source="s32")
    return b.new(isa.MAD_LO, wide, step, address, type="s64")

  def groups(self, vec: int) -> tuple[int, list[list[int]]]:
    """(bytes, registers) of each access of `vec` elements, consecutive in memory."""
    order = self._offsets().groups(vec)
    assert order is not None, "the selection chose a wider access than the registers allow"
    return vec * self.ref.type.dtype.itemsize, order[np.argsort(order.min(1), kind="stable")].tolist()

  def _offsets(self) -> Offsets:
    return Offsets(np.zeros(0), self.delta // self.ref.type.dtype.itemsize, tuple(rows for _, rows in self.rows))

  def cache_hints(self, vec_bytes: int) -> dict[str, str]:
    """Modifiers of a load; one of narrow accesses leaves the rest of its sectors in L1."""
    hints = self.ctx.cache_hints.get(self.ref.root, {})
    return hints if vec_bytes == 16 else {k: v for k, v in hints.items() if k != "l1"}

  def at(self, reg: int, *, bounds_only: bool = False) -> tuple[Addr, Reg | None]:
    """The address of a register's element, and the predicate under which it is accessed (None: always).

    With `bounds_only` the predicate says no more than that the element lies inside the array and its views.
    """
    near = int(self.delta[reg]) % _IMMEDIATE
    address = self._far_address(reg, int(self.delta[reg]) - near)
    if not bounds_only:
      return self.ctx.b.addr(address, near), self.both(self._bounds(reg), self.in_view(reg))
    return self.ctx.b.addr(address, near), self._bounds(reg)

  def _far_address(self, reg: int, far: int) -> Reg:
    """The address of the register's row, and `far` bytes; made once."""
    key = (far, *(int(rows[reg]) for _, rows in self.rows))
    if key not in self._far:
      address = self._far_address(reg, 0) if far else self.address
      if far:
        address = self.ctx.b.new(isa.ADD, address, far, type="s64")
      else:
        for step, rows in self.rows:
          address = self._plus(address, int(rows[reg]), step)
      self._far[key] = address
    return self._far[key]

  def in_view(self, reg: int) -> Reg | None:
    """Whether this thread owns the register's element: it is no copy, and no padding of the fragment."""
    return self.both(self._single, self._view.at(reg))

  # ---- predicates

  def both(self, p: Reg | None, q: Operand | None) -> Reg | None:
    return addressing.both(self.ctx.b, p, q)

  def _bounds(self, reg: int) -> Reg | None:
    found = None
    for d in self.guard:
      found = self.both(found, self._inside(d, reg))
    return found

  def _one_copy(self, layout: Layout | None) -> Reg | None:
    """Thread bits that change no element must be zero."""
    b = self.ctx.b
    if self.ctx.scope.elected:
      return None
    mask = replicated_bits(self.elements) if layout is not None else self.ctx.scope.threads - 1
    if layout is None and self.ctx.scope.threads & mask:
      return b.new(isa.SETP, self.ctx.local_tid(), 0, cmp="eq", type="s32")
    if not mask:
      return None
    return b.new(isa.SETP, b.new(isa.AND, self.ctx.local_tid(), mask, type="b32"), 0, cmp="eq", type="s32")

  def _root_index(self, d: int) -> tuple[Operand, np.ndarray]:
    """(register or literal, per-register part) of the root index along dimension d."""
    if d not in self._index:
      start, stride = self._start(d), self.dims[d].stride
      if self.dims[d].squeezed:
        self._index[d] = start, np.zeros(self.count, np.int64)
      else:
        i = self.ref.view.perm.index(d)
        base, delta = split_sum(self.table[..., i].astype(np.int64) * stride)
        x = addressing.thread_sum(self.ctx, base)
        if isinstance(x, Reg) or isinstance(start, Reg):
          x = start if x == 0 else x if start == 0 else self.ctx.b.new(isa.ADD, x, start, type="s32")
        else:
          x = int(x) + int(start)
        self._index[d] = x, delta
    return self._index[d]

  def _inside(self, d: int, reg: int) -> Operand | None:
    """0 <= index < extent, and within every edge of the enclosing views."""
    b = self.ctx.b
    x, delta = self._root_index(d)
    step = int(delta[reg])
    key = ("in", d, step)
    if key not in self._predicates:
      index = b.new(isa.ADD, x, step, type="s32") if step or not isinstance(x, Reg) else x
      extent = self.ctx.extent(self.ref.type.shape[d])
      p = b.new(isa.SETP, index, extent, cmp="lt", type="u32")  # unsigned: negative fails too
      for lo, hi in self.dims[d].edges:
        for edge, cmp in ((lo, "ge"), (hi, "lt")):
          bound = self.ctx.scalar(self.ref.dyn[edge.index]) if isinstance(edge, Dyn) else edge
          p = b.new(isa.AND, p, b.new(isa.SETP, index, bound, cmp=cmp, type="s32"), type="pred")
      self._predicates[key] = p
    return self._predicates[key]
