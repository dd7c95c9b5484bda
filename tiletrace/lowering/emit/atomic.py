"""Atomic operations on global memory (PTX ISA 9.7.13, atom and red)."""
from __future__ import annotations

from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import atomic as ops, gather as indexing
from tiletrace.lowering.emit.addressing import both
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.floats import bits
from tiletrace.lowering.emit.global_access import GlobalAccess
from tiletrace.lowering.emit.indexed_access import IndexedAccess
from tiletrace.lowering.emit.memory import collect, mask_of, scatter
from tiletrace.lowering.emit.shared_access import SharedAccess
from tiletrace.lowering.emit.values import Elements, Operand, materialise, take
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.tables import replicated_bits

_HALVES = {dtypes.f16: "f16", dtypes.bf16: "bf16"}
_OPCODES = {"exchange": "exch"}


class _Atomic:
  """One atomic operation of a tile: every element once, by one thread, from one register."""

  def __init__(self, ctx: EmitContext, eqn: Eqn):
    self.ctx, self.eqn, self.op = ctx, eqn, eqn.params["op"]
    n, value, ref = ops.num_operands(eqn), eqn.values[0], eqn.refs[0]
    self.layout = ctx.layouts[value] if isinstance(value, Var) and value.shape else None
    indices, masks = indexing.split_values(eqn, n)
    if indices:
      assert self.layout is not None
      self.access: GlobalAccess = IndexedAccess(ctx, ref, eqn.params["dims"], [ctx.read(i) for i in indices],
                                                eqn.params["guard"], self.layout, storing=True)
    else:
      self.access = GlobalAccess(ctx, ref, eqn.params["guard"], self.layout, storing=True)
    self.masks = [ctx.read(m) for m in masks]
    self.dtype = ref.type.dtype
    self.values = [materialise(ctx.b, ctx.read(v)) for v in eqn.values[:n]]
    self.first = self._first()

  def _first(self) -> list[int]:
    """For each register the first one that holds its element in every thread."""
    table = self.access.elements
    seen: dict[tuple[int, ...], int] = {}
    first = [seen.setdefault(tuple(row), r) for r, row in enumerate(table[0].tolist())]
    if self.layout is not None and not self.ctx.scope.elected:
      kept, valid = sorted(set(first)), np.asarray(self.layout.valid)
      free = np.arange(len(table)) & replicated_bits(table) == 0
      held = table[free][:, kept].reshape(-1, table.shape[2])
      held = held[(held < valid).all(-1)]
      if len(np.unique(held, axis=0)) != len(held):
        raise LoweringError(f"atomic_{self.op}: some elements of the value lie in several threads, which no bits of "
                            "their index tell apart", loc=self.eqn.loc,
                            hint="make the value in the shape that it is added in; warpgroups=1, 2 or 4")
    return first

  def at(self, group: list[int]):
    address, pred = self.access.at(group[0])
    for m in self.masks:
      pred = self.access.both(pred, mask_of(m, group))
    return address, pred

  @property
  def order(self) -> dict[str, Any]:
    return {"sem": self.eqn.params["sem"], "scope": self.eqn.params["scope"]}

  def reduce(self) -> None:
    """Without results."""
    vec = self.eqn.params["vec"]
    size, groups = self.access.groups(vec)
    if any(self.first[r] != r for g in groups for r in g):
      size, groups = self.dtype.itemsize, [[r] for r in sorted(set(self.first))]
    if self.op in ("exchange", "cas") or self.eqn.params["sem"] not in ("relaxed", "release"):
      self.fetch()
      return

    def red(i: int, regs, kind) -> None:
      address, pred = self.at(groups[i])
      if self.of_floats:
        for op, type_, value, p in self._as_integers(regs, pred):
          self.ctx.b(isa.RED, address, value, pred=p, op=op, type=type_, space="global", **self.order)
      elif self.dtype in _HALVES:
        type_ = _HALVES[self.dtype] + ("x2" if size == 4 else "")
        self.ctx.b(isa.RED_HALF, address, regs, pred=pred, type=type_, **self.order)
      elif kind.get("vec"):
        self.ctx.b(isa.RED_VECTOR, address, regs, pred=pred, vec=kind["vec"], **self.order)
      else:
        self.ctx.b(isa.RED, address, regs, pred=pred, op=self.op, type=self._type(), space="global", **self.order)

    scatter(self.ctx, self.values[0], groups, size, red)

  @property
  def of_floats(self) -> bool:
    return self.op in ("max", "min") and self.dtype == dtypes.f32

  def _as_integers(self, x: Operand, pred: Reg | None) -> list[tuple[str, str, Reg, Reg]]:
    """max or min of f32 as (op, type, value, predicate): non-negative numbers are ordered as their bits are, signed;
    negative ones the other way round, unsigned, and above the others."""
    b = self.ctx.b
    assert isinstance(x, Reg)
    word = bits(b, x)
    negative = b.new(isa.SETP, word, 0, cmp="lt", type="s32")
    positive = b.new(isa.NOT, negative, type="pred")
    other = "min" if self.op == "max" else "max"
    parts = ((self.op, "s32", positive), (other, "u32", negative))
    return [(op, type_, word, both(b, p, pred)) for op, type_, p in parts]    # type: ignore[misc]

  def _type(self) -> str:
    if self.op in ("and", "or", "xor", "exchange", "cas"):
      return "b32"
    return {dtypes.f32: "f32", dtypes.u32: "u32"}.get(self.dtype, "s32")

  def fetch(self) -> Elements:
    """With results: 0 where there is no element."""
    kept = sorted(set(self.first))
    groups = [[r] for r in kept]
    parts = [self._parts(v) for v in self.values]

    def atom(i: int, out: Reg, kind) -> None:
      address, pred = self.at(groups[i])
      values = [p[kept[i]] for p in parts]
      if self.of_floats:
        old = self.ctx.b.new(isa.MOV, 0, type="b32")
        for op, type_, value, p in self._as_integers(values[0], pred):
          self.ctx.b(isa.ATOM, old, address, value, pred=p, op=op, type=type_, space="global", **self.order)
        self.ctx.b(isa.MOV, out, old, type="b32")
      elif self.dtype in _HALVES:
        self.ctx.b(isa.ATOM_HALF, out, address, *values, pred=pred, type=_HALVES[self.dtype], **self.order)
      elif self.op == "cas":
        self.ctx.b(isa.ATOM_CAS, out, address, *values, pred=pred, type="b32", space="global", **self.order)
      else:
        self.ctx.b(isa.ATOM, out, address, *values, pred=pred, op=_OPCODES.get(self.op) or self.op, type=self._type(),
                   space="global", **self.order)

    place = {r: i for i, r in enumerate(kept)}
    local = [[i] for i in range(len(kept))]
    found = collect(self.ctx, self.dtype, len(kept), local, self.dtype.itemsize, atom, self.eqn, 0)
    return found if len(kept) == len(self.first) else take(self.ctx.b, found, [place[r] for r in self.first])

  def _parts(self, x: Elements) -> list[Operand]:
    if self.dtype not in _HALVES:
      return list(x.regs)
    return [h for r in x.regs for h in self.ctx.b.new(isa.UNPACK, r, type="b32")]


@emit_rules.register(ops.atomic_p)
def _atomic(ctx: EmitContext, eqn: Eqn) -> None:
  atomic = _Atomic(ctx, eqn)
  if eqn.outvars:
    ctx.bind(eqn.outvars[0], atomic.fetch())
  else:
    atomic.reduce()


@emit_rules.register(ops.atomic_to_shared_p)
def _to_shared(ctx: EmitContext, eqn: Eqn) -> None:
  """What the one thread of each element got, for those that hold copies of it."""
  atomic = _Atomic(ctx, eqn)
  old = atomic.fetch()
  side = SharedAccess(ctx, eqn.refs[1], atomic.layout)
  groups = [[r] for r in sorted(set(atomic.first))]
  where = side.addresses([g[0] for g in groups])
  scatter(ctx, old, groups, atomic.dtype.itemsize, lambda i, regs, kind: ctx.b(
    isa.ST_SHARED, where[i], regs, pred=atomic.access.in_view(groups[i][0]), **kind))
