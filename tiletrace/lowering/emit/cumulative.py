"""Cumulative operations within a warp: serial in each thread, then shfl.sync.bfly; what is before each warp's block.

The text speaks of sums; products, maxima and minima are the same with another operation.
"""
from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import cumulative as ops
from tiletrace.core.ops.reduce import identity
from tiletrace.lowering.emit.addressing import ViewBounds, register_map, thread_sum
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.elementwise import EACH, compute_type, result
from tiletrace.lowering.emit.reduce import COMBINE
from tiletrace.lowering.emit.values import Operand, materialise, pack, unpack
from tiletrace.lowering.layouts.cumulation import Digit, cumulation
from tiletrace.lowering.layouts.fragment import drop_copies
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.tables import coordinates

_WHOLE_WARP = -1  # member mask


@dataclasses.dataclass(eq=False)
class _Sums:
  """The sums within a run of elements of one thread, or of several threads.

  Attributes:
    register: of the element, or of one of them.
    parts: the runs that it is made of; none where it is one element.
    value: the sum up to and with the one element (or up to it, where that is asked), without `before`; None is zero.
    before: the sum of what comes before the run and has not been added to its elements; None is zero.
    total: of the run.
  """
  register: int
  parts: list[_Sums]
  value: Operand | None
  before: Operand | None
  total: Operand


class _Scan:
  """Emits the cumulative sums of an equation's operand along its axis."""

  def __init__(self, ctx: EmitContext, eqn: Eqn):
    x, self.axis = eqn.values[0], eqn.params["axis"]
    assert isinstance(x, Var)
    if ctx.scope.elected is not None:
      op = eqn.params.get("op", eqn.primitive.name)
      raise LoweringError(f"{op} of {x.type} takes all threads of a warpgroup, tt.elect() leaves one", loc=eqn.loc,
                          hint="accumulate before tt.elect(), and use the result in it")
    self.ctx, self.b, self.x, self.reverse = ctx, ctx.b, x, eqn.params["reverse"]
    self.kind = compute_type(x.dtype)
    layout = ctx.layouts[x]
    unique, to_unique = drop_copies(layout)
    self.to_unique = to_unique
    self.first = [to_unique.index(u) for u in range(unique.extent("reg"))]      # a register of each that is no copy
    self.table = coordinates(layout, ctx.scope.threads)[:, self.first].astype(np.int64)
    self.plan = cumulation(layout, self.axis)
    self.exclusive = eqn.primitive is ops.cumulative_before_p
    reduction = ops.reduction_of(eqn)
    self.zero, self.each = identity(reduction, x.dtype), EACH[COMBINE[reduction.name]]

  @property
  def blocks(self) -> np.ndarray:
    """The block of each (thread, register): its index along the axis, and the other dimensions'."""
    out = self.table.copy()
    out[..., self.axis] //= self.plan.block
    return out

  def add(self, x: Operand | None, y: Operand) -> Operand:
    return y if x is None else self.each(self.b, self.kind, (x, y))

  def inputs(self) -> dict[int, Operand]:
    """The operand by register; from the last element backwards, zero beyond it. What is padding in all threads is
    left out."""
    bounds = ViewBounds(self.ctx, self.table, self.x.shape)
    xs = unpack(self.b, materialise(self.b, self.ctx.read(self.x)))
    out: dict[int, Operand] = {}
    for u, r in enumerate(self.first):
      if not bounds.inside[:, u].any():
        continue
      inside = bounds.at(u) if self.reverse else None
      out[u] = xs[r] if inside is None else self.b.new(isa.SELP, xs[r], self.zero, inside, type=self.kind)
    return out

  def sums(self) -> list[_Sums]:
    """The runs that one warp has, with the sums within each."""
    runs = [_Sums(u, [], None if self.exclusive else x, None, x) for u, x in self.inputs().items()]
    for axis, found in itertools.groupby(self.plan.within, lambda digit: digit.axis):
      group = list(found)
      if axis == "reg":
        runs = self._registers(runs, group[0].step, math.prod(digit.extent for digit in group))
      else:
        for digit in group:
          self._lanes(runs, digit)
    return runs

  def _registers(self, runs: list[_Sums], step: int, extent: int) -> list[_Sums]:
    """Joins the runs that differ in a digit, or several, which lie in registers, one after another."""
    values, others = self.table[0, :, self.axis] // step % extent, self.table[0].copy()
    others[:, self.axis] -= values * step
    groups: dict[tuple[int, ...], list[_Sums]] = {}
    for run in runs:
      groups.setdefault(tuple(others[run.register].tolist()), []).append(run)
    out = []
    for group in groups.values():
      group.sort(key=lambda run: values[run.register], reverse=self.reverse)
      carry: Operand | None = None
      for run in group:
        upto = self.add(carry, run.total)
        if run.parts or run.before is not None:
          run.before = carry if run.before is None else self.add(carry, run.before)
        else:                                                  # a single element takes it in at once
          run.value = carry if self.exclusive else upto
        carry = upto
      assert carry is not None
      out.append(group[0] if len(group) == 1 else _Sums(group[0].register, group, None, None, carry))
    return out

  def _lanes(self, runs: list[_Sums], digit: Digit) -> None:
    """Each lane gives its run's total to the lane that differs in the digit; that which comes after takes it in."""
    later = thread_sum(self.ctx, (self.table[:, 0, self.axis] // digit.step % 2).astype(np.int64))
    after = self.b.new(isa.SETP, later, 0, cmp="eq" if self.reverse else "ne", type="s32")
    for run in runs:
      moved = self.b.reg("f32" if self.kind == "f32" else "b32")
      self.b(isa.SHFL, moved, run.total, digit.stride, 31, _WHOLE_WARP, mode="bfly")
      taken = self.b.new(isa.SELP, moved, self.zero, after, type=self.kind)
      run.before = self.add(run.before, taken)
      run.total = self.add(run.total, moved)

  def elements(self, runs: list[_Sums]) -> list[Operand]:
    """The sums by register of the operand, what stands before each run taken in."""
    found: dict[int, Operand] = {}

    def flush(run: _Sums, before: Operand | None) -> None:
      before = before if run.before is None else self.add(before, run.before)
      for part in run.parts:
        flush(part, before)
      if not run.parts:
        value = before if run.value is None else self.add(before, run.value)
        found[run.register] = self.zero if value is None else value

    for run in runs:
      flush(run, None)
    some = next(iter(found.values()))
    return [found.get(u, some) for u in self.to_unique]        # padding may hold anything


@emit_rules.register(*ops.CUMULATIVE, ops.cumulative_before_p)
def _cumulative(ctx: EmitContext, eqn: Eqn) -> None:
  scan = _Scan(ctx, eqn)
  assert scan.plan.totals is None, "the scheduler exchanges what crosses warps"
  result(ctx, eqn, scan.elements(scan.sums()))


@emit_rules.register(ops.cumulative_partial_p)
def _partial(ctx: EmitContext, eqn: Eqn) -> None:
  scan = _Scan(ctx, eqn)
  local, totals = eqn.outvars
  runs = scan.sums()
  ctx.bind(local, pack(ctx.b, local.dtype, scan.elements(runs)))
  wanted = coordinates(ctx.layouts[totals], ctx.scope.threads)
  chosen = register_map(scan.blocks[:, [run.register for run in runs]], wanted, totals.shape)
  ctx.bind(totals, pack(ctx.b, totals.dtype, [runs[i].total for i in chosen]))


@emit_rules.register(ops.cumulative_join_p)
def _join(ctx: EmitContext, eqn: Eqn) -> None:
  scan = _Scan(ctx, eqn)
  before = eqn.values[1]
  assert isinstance(before, Var)
  xs, sums = unpack(ctx.b, ctx.read(scan.x)), unpack(ctx.b, ctx.read(before))
  own = register_map(coordinates(ctx.layouts[before], ctx.scope.threads), scan.blocks, before.shape)
  out = [scan.add(sums[own[u]], xs[r]) for u, r in enumerate(scan.first)]
  result(ctx, eqn, [out[u] for u in scan.to_unique])
