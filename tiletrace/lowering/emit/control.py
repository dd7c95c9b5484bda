"""Loops and branches. The index and what is carried live in fixed registers."""
from __future__ import annotations

from collections.abc import Sequence

from tiletrace.core.graph import Atom, Block, Eqn, Var
from tiletrace.core.ops import assume, barrier, control as ops, elementwise, step
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.values import Elements, Operand, materialise, move, move_register, unpack
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg


def _fresh_copy(ctx: EmitContext, var: Var, eqn: Eqn, source: Atom) -> Elements:
  out = ctx.fresh(var, eqn)
  move(ctx.b, out, ctx.read(source))
  return out


def assign(ctx: EmitContext, targets: Sequence[Elements], sources: Sequence[Atom]) -> None:
  """targets = sources, all at once: copies first where a target is also a source."""
  values = [ctx.read(a) for a in sources]
  written = {r for t in targets for r in t.regs}
  for i, (t, v) in enumerate(zip(targets, values, strict=True)):
    if any(r in written and r not in t.regs for r in v.regs if isinstance(r, Reg)):
      values[i] = Elements(v.dtype, v.count, tuple(ctx.b.reg(r.cls) if isinstance(r, Reg) else r for r in v.regs))
      for new, old in zip(values[i].regs, v.regs, strict=True):
        if isinstance(new, Reg):
          move_register(ctx.b, new, old)
  for t, v in zip(targets, values, strict=True):
    move(ctx.b, t, v)


@emit_rules.register(ops.for_loop_p)
def _for_loop(ctx: EmitContext, eqn: Eqn) -> None:
  b = ctx.b
  lo, hi, step, *init = eqn.values
  body = eqn.blocks[0]
  index, *carried = body.invars
  start, stop, stride = ctx.scalar(lo), ctx.scalar(hi), ctx.scalar(step)
  carry = [_fresh_copy(ctx, v, eqn, a) for v, a in zip(carried, init, strict=True)]
  if isinstance(step, Var) and isinstance(stride, int) and stride <= 0:
    stop, stride = start, 1                          # computed, and known by now: as if the GPU found that
  trips = _known_trips(start, stop, stride)
  copies = max((n for n in range(1, eqn.params["unroll"] + 1) if len(trips) % n == 0), default=1) if trips else 1
  if 1 < copies == len(trips):
    for i in trips:
      ctx.bind(index, Elements(index.dtype, 1, (i,)))
      ctx.block(body)
      assign(ctx, carry, body.outs)
    for var, elements in zip(eqn.outvars, carry, strict=True):
      ctx.bind(var, elements)
    return
  at = ctx.fresh(index, eqn).regs[0]
  assert isinstance(at, Reg)
  b(isa.MOV, at, start, type="b32")
  downwards = isinstance(stride, int) and stride < 0
  end, top = b.label("end"), b.label("loop")
  if downwards or not ctx.facts.certainly_runs(eqn):
    b(isa.BRA, end, pred=b.new(isa.SETP, at, stop, cmp="le" if downwards else "ge", type="s32"))
  if isinstance(stride, Reg) and ctx.facts[step].lo <= 0:
    b(isa.BRA, end, pred=b.new(isa.SETP, stride, 0, cmp="le", type="s32"))
  if eqn.params["unroll"] == 1:
    b.pragma("nounroll")
  b.place(top)
  for _ in range(copies):
    ctx.block(body)
    assign(ctx, carry, body.outs)
    b(isa.ADD, at, at, stride, type="s32")
  b(isa.BRA, top, pred=b.new(isa.SETP, at, stop, cmp="gt" if downwards else "lt", type="s32"))
  b.place(end)
  for var, elements in zip(eqn.outvars, carry, strict=True):
    ctx.bind(var, elements)


def _known_trips(start: Operand, stop: Operand, stride: Operand) -> range:
  """The indices of a loop; none where they are not known."""
  if isinstance(start, int) and isinstance(stop, int) and isinstance(stride, int):
    return range(start, stop, stride)
  return range(0)


@emit_rules.register(ops.while_loop_p)
def _while_loop(ctx: EmitContext, eqn: Eqn) -> None:
  b = ctx.b
  condition, body = eqn.blocks
  carry = [ctx.fresh(v, eqn) for v in condition.invars]
  for elements, a in zip(carry, eqn.values, strict=True):
    move(b, elements, ctx.read(a))
  for v, elements in zip(body.invars, carry, strict=True):
    ctx.bind(v, elements)
  end, top = b.label("end"), b.label("while")
  b.pragma("nounroll")
  b.place(top)
  ctx.block(condition)
  b(isa.BRA, end, pred=_predicate(ctx, condition.outs[0]), negate=True)
  ctx.block(body)
  assign(ctx, carry, body.outs)
  b(isa.BRA, top)
  b.place(end)
  for var, elements in zip(eqn.outvars, carry, strict=True):
    ctx.bind(var, elements)


def _predicate(ctx: EmitContext, a: Atom) -> Reg:
  found = materialise(ctx.b, ctx.read(a)).regs[0]
  assert isinstance(found, Reg)
  return found


@emit_rules.register(step.step_p)
def _gone(ctx: EmitContext, eqn: Eqn) -> None:
  raise AssertionError("steps are rotated first")


@emit_rules.register(ops.cond_p)
def _cond(ctx: EmitContext, eqn: Eqn) -> None:
  b = ctx.b
  (pred,) = eqn.values
  value = ctx.scalar(pred)
  if len(eqn.blocks) == 1 and isinstance(value, Reg) and _is_arrival(eqn.blocks[0]):
    _guarded_arrival(ctx, eqn.blocks[0], value)
    return
  results = [ctx.fresh(v, eqn) for v in eqn.outvars]
  if not isinstance(value, Reg):
    taken = eqn.blocks[0 if value else 1] if value or len(eqn.blocks) > 1 else None
    if taken is not None:
      ctx.block(taken)
      assign(ctx, results, taken.outs)
    return
  end = b.label("endif")
  other = b.label("else") if len(eqn.blocks) > 1 else end
  b(isa.BRA, other, pred=value, negate=True)
  for i, block in enumerate(eqn.blocks):
    if i:
      b(isa.BRA, end)
      b.place(other)
    ctx.block(block)
    assign(ctx, results, block.outs)
  b.place(end)


_SCALAR_OPS = frozenset({elementwise.add_p, elementwise.sub_p, elementwise.eq_p, elementwise.select_p,
                         elementwise.mod_p})


def _is_arrival(block: Block) -> bool:
  """Scalar arithmetic and one arrival: better predicated than branched around, and wgmma may stay pending across it."""
  *before, last = block.eqns or (None,)
  return last is not None and last.primitive is barrier.barrier_arrive_p and all(
      e is not None and (e.primitive in _SCALAR_OPS or e.primitive.name == "load") for e in before)


def _guarded_arrival(ctx: EmitContext, block: Block, pred: Reg) -> None:
  *before, last = block.eqns
  for eqn in before:
    with ctx.b.at(eqn.loc):
      emit_rules[eqn.primitive](ctx, eqn)
  with ctx.guarded(pred), ctx.b.at(last.loc):
    emit_rules[last.primitive](ctx, last)


@emit_rules.register(ops.switch_p)
def _switch(ctx: EmitContext, eqn: Eqn) -> None:
  """Compares with each branch in turn; an index outside is clamped, as jax.lax.switch's."""
  b = ctx.b
  index: Operand = unpack(b, ctx.read(eqn.values[0]))[0]
  results = [ctx.fresh(v, eqn) for v in eqn.outvars]
  end = b.label("endswitch")
  for i, block in enumerate(eqn.blocks):
    after = b.label("case")
    if i < len(eqn.blocks) - 1:
      b(isa.BRA, after, pred=b.new(isa.SETP, index, i, cmp="gt", type="s32"))
    ctx.block(block)
    assign(ctx, results, block.outs)
    b(isa.BRA, end)
    b.place(after)
  b.place(end)


@emit_rules.register(assume.assume_p)
def _assume(ctx: EmitContext, eqn: Eqn) -> None:
  """Known since the facts were collected; what computes the condition is dead code."""
