"""Relayouts inside a warp: other register names, or shuffles. What crosses warps was lowered by the scheduler."""
from __future__ import annotations

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops.relayout import own_columns_p, relayout_p
from tiletrace.lowering.emit.addressing import register_map, thread_xor
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.values import Elements, Operand, materialise, take
from tiletrace.lowering.layouts.relayout import ShufflePlan, Swap, word_plan
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.tables import coordinates
from tiletrace.lowering.words import per_word

_WHOLE_WARP = -1  # member mask


@emit_rules.register(relayout_p)
def _relayout(ctx: EmitContext, eqn: Eqn) -> None:
  (source,), (out,), how = eqn.values, eqn.outvars, eqn.params["how"]
  assert isinstance(source, Var) and how in ("same", "registers", "shuffle"), eqn.params
  if how == "shuffle":
    _shuffles(ctx, eqn)
    return
  have, want = (coordinates(ctx.layouts[v], ctx.scope.threads) for v in (source, out))
  ctx.bind(out, take(ctx.b, ctx.read(source), register_map(have, want, source.shape)))


@emit_rules.register(own_columns_p)
def _own_columns(ctx: EmitContext, eqn: Eqn) -> None:
  """The same registers: each warpgroup has a part of the columns, in the order of the whole."""
  source, out = eqn.values[0], eqn.outvars[0]
  assert isinstance(source, Var) and ctx.layouts[source].extent("reg") == ctx.layouts[out].extent("reg")
  ctx.bind(out, ctx.read(source))


def _shuffles(ctx: EmitContext, eqn: Eqn) -> None:
  """Words through shfl.sync.idx; booleans travel as words."""
  (source,), (out,), b = eqn.values, eqn.outvars, ctx.b
  if ctx.scope.elected is not None:
    raise LoweringError(f"a relayout of {source.type} takes all threads of a warp, tt.elect() leaves one", loc=eqn.loc,
                        hint="compute it before tt.elect()")
  assert isinstance(source, Var)
  plan = word_plan(ctx.layouts[source], ctx.layouts[out], per_word(source.dtype))
  assert plan is not None, "the scheduler takes shuffles where there is a plan"
  words: list[Operand] = list(materialise(b, ctx.read(source)).regs)
  if source.dtype == dtypes.bool_:
    words = [b.new(isa.SELP, 1, 0, w, type="b32") for w in words]
  moved = _Shuffler(ctx, plan).run(words, ctx.layouts[out].extent("reg") // plan.pack)
  if source.dtype == dtypes.bool_:
    moved = [b.new(isa.SETP, w, 0, cmp="ne", type="b32") for w in moved]
  elif source.dtype == dtypes.f32:
    moved = [_as_float(ctx, w) for w in moved]
  ctx.bind(out, Elements(source.dtype, ctx.layouts[out].extent("reg"), tuple(moved)))


def _as_float(ctx: EmitContext, word: Operand) -> Operand:
  if isinstance(word, Reg) and word.cls == "f32":
    return word
  out = ctx.b.reg("f32")
  ctx.b(isa.MOV, out, word, type="b32")
  return out


class _Shuffler:
  """The code of a plan."""

  def __init__(self, ctx: EmitContext, plan: ShufflePlan):
    self.ctx, self.b, self.plan = ctx, ctx.b, plan
    self._odd: dict[int, Reg] = {}
    self._from: dict[int, Operand] = {}

  def run(self, words: list[Operand], count: int) -> list[Operand]:
    out: list[Operand] = [0] * count
    for source, target in self.plan.repeats:
      block = self._swapped(words[source:source + self.plan.sources], self.plan.send_swaps)
      received: list[Operand] = [0] * len(self.plan.steps)
      for step in self.plan.steps:
        received[step.receive] = word = self.b.reg("b32")
        self.b(isa.SHFL, word, block[step.send], self._lane(step.lane), 31, _WHOLE_WARP, mode="idx")
      out[target:target + len(received)] = self._swapped(received, self.plan.receive_swaps)
    return out

  def _swapped(self, words: list[Operand], swaps: tuple[Swap, ...]) -> list[Operand]:
    for lanes, registers in swaps:
      odd = self._parity(lanes)
      words = [self.b.new(isa.SELP, words[i ^ registers], words[i], odd, type="b32") for i in range(len(words))]
    return words

  def _parity(self, mask: int) -> Reg:
    """Whether this lane has an odd number of ones under the mask."""
    if mask not in self._odd:
      bits: Operand = self.b.new(isa.AND, self.ctx.local_tid(), mask, type="b32")
      if mask & mask - 1:
        bits = self.b.new(isa.AND, self.b.new(isa.POPC, bits, type="b32"), 1, type="b32")
      self._odd[mask] = self.b.new(isa.SETP, bits, 0, cmp="ne", type="b32")
    return self._odd[mask]

  def _lane(self, flip: int) -> Operand:
    """The lane that this one reads from."""
    if not self._from:
      columns = [*self.plan.lane_columns, *[0] * ((self.ctx.scope.threads - 1).bit_length() - 5)]
      thread = np.arange(self.ctx.scope.threads)
      lane = np.zeros(len(thread), np.int64)
      for i, column in enumerate(columns):
        lane ^= np.where(thread >> i & 1, column, 0)
      self._from[0] = thread_xor(self.ctx, columns, lane, np.zeros_like(lane))
    if flip not in self._from:
      self._from[flip] = self.b.new(isa.XOR, self._from[0], flip, type="b32")
    return self._from[flip]
