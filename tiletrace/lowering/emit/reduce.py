"""Reductions within a warp: a tree in each thread, then shfl.sync.bfly. The scheduler does what crosses warps."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, Primitive, Var, primitive
from tiletrace.core.ops import elementwise as ew, reduce as ops
from tiletrace.lowering.emit.addressing import ViewBounds
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.elementwise import EACH, compute_type, result
from tiletrace.lowering.emit.values import Elements, Operand, materialise, unpack
from tiletrace.lowering.layouts.fragment import Reduction, reduction
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.module import Builder
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.tables import coordinates

COMBINE: dict[str, Primitive] = {"reduce_sum": ew.add_p, "reduce_prod": ew.mul_p, "reduce_max": ew.max_p,
                                  "reduce_min": ew.min_p, "reduce_and": ew.and_p, "reduce_or": ew.or_p,
                                  "reduce_xor": ew.xor_p}
_WHOLE_WARP = -1  # member mask


@emit_rules.register(*ops.REDUCTIONS)
def _reduce(ctx: EmitContext, eqn: Eqn) -> None:
  plan = reduction(_layout(ctx, eqn), eqn.params["axes"])
  assert all(len(group) == 1 for group in plan.warps), "the scheduler exchanges what crosses warps"
  _within_warp(ctx, eqn, eqn.primitive.name, plan)


@emit_rules.register(ops.reduce_partial_p)
def _partial(ctx: EmitContext, eqn: Eqn) -> None:
  _within_warp(ctx, eqn, eqn.params["op"], reduction(_layout(ctx, eqn), eqn.params["axes"]))


@emit_rules.register(ops.reduce_thread_p)
def _thread(ctx: EmitContext, eqn: Eqn) -> None:
  plan = reduction(_layout(ctx, eqn), eqn.params["axes"])
  _within_warp(ctx, eqn, eqn.params["op"], dataclasses.replace(plan, lanes=()))


@emit_rules.register(ops.warp_any_p)
def _warp_any(ctx: EmitContext, eqn: Eqn) -> None:
  b = ctx.b
  mine = _tree(unpack(b, ctx.read(eqn.values[0])), lambda x, y: EACH[ew.or_p](b, "pred", (x, y)))
  (mine,) = materialise(b, Elements(eqn.values[0].dtype, 1, (mine,))).regs
  ctx.bind(eqn.outvars[0], Elements(eqn.values[0].dtype, 1, (b.new(isa.VOTE, mine, _WHOLE_WARP, mode="any"),)))


def _layout(ctx: EmitContext, eqn: Eqn):
  x = eqn.values[0]
  assert isinstance(x, Var)
  return ctx.layouts[x]


def _within_warp(ctx: EmitContext, eqn: Eqn, op: str, plan: Reduction) -> None:
  b, dtype = ctx.b, eqn.values[0].dtype
  if ctx.scope.elected is not None:
    raise LoweringError(f"{op.removeprefix('reduce_')} of {eqn.values[0].type} takes all threads of a warpgroup, "
                        "tt.elect() leaves one", loc=eqn.loc, hint="reduce before tt.elect(), and use the result in it")
  each, kind = EACH[COMBINE[op]], compute_type(dtype)

  def combine(x: Operand, y: Operand) -> Operand:
    return each(b, kind, (x, y))

  xs = _without_padding(ctx, eqn, op)
  out = [_tree([xs[r] for r in group if r in xs], combine) for group in plan.registers]
  whole = _whole_warp(op, kind) if len(plan.lanes) == 5 else None
  result(ctx, eqn, [whole(b, x) for x in out] if whole else _across_lanes(b, out, plan.lanes, kind, combine))


def _without_padding(ctx: EmitContext, eqn: Eqn, op: str) -> dict[int, Operand]:
  """The operand by register, the identity beyond the reduced dimensions; left out where all threads have that."""
  b, x, axes = ctx.b, eqn.values[0], list(eqn.params["axes"])
  bounds = ViewBounds(ctx, coordinates(_layout(ctx, eqn), ctx.scope.threads)[..., axes],
                      tuple(x.shape[a] for a in axes))
  kind, nothing = compute_type(x.dtype), ops.identity(primitive(op), x.dtype)
  out: dict[int, Operand] = {}
  predicates: dict[bytes, Reg | None] = {}
  for reg, value in enumerate(unpack(b, materialise(b, ctx.read(x)))):
    inside = bounds.inside[:, reg]
    if not inside.any():
      continue
    key = inside.tobytes()  # a vector of elements lies inside or outside as one
    if key not in predicates:
      predicates[key] = bounds.at(reg)
    predicate = predicates[key]
    out[reg] = value if predicate is None else _choose(b, kind, value, nothing, predicate)
  return out


def _choose(b: Builder, kind: str, value: Operand, nothing: int | float, inside: Reg) -> Operand:
  if kind != "pred":
    return b.new(isa.SELP, value, nothing, inside, type=kind)
  if nothing == 0:
    return b.new(isa.AND, value, inside, type="pred")
  return b.new(isa.OR, value, b.new(isa.NOT, inside, type="pred"), type="pred")


def _tree(xs: list[Operand], combine: Callable[[Operand, Operand], Operand]) -> Operand:
  """Neighbours first: short chains, and an error that grows with the logarithm of the length."""
  assert xs, "every result has an element"
  while len(xs) > 1:
    xs = [combine(*xs[i:i + 2]) if i + 1 < len(xs) else xs[i] for i in range(0, len(xs), 2)]
  return xs[0]


def _whole_warp(op: str, kind: str) -> Callable[[Builder, Operand], Operand] | None:
  """One instruction for all 32 lanes: redux of integers, vote of booleans (PTX ISA 9.7.13, redux.sync, vote.sync)."""
  name = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min"}.get(op)
  if kind == "pred":
    return lambda b, x: b.new(isa.VOTE, x, _WHOLE_WARP, mode="any" if op == "reduce_max" else "all")
  if kind in ("s32", "u32") and name is not None:
    return lambda b, x: b.new(isa.REDUX, x, _WHOLE_WARP, op=name, type=kind)
  if op in ("reduce_and", "reduce_or", "reduce_xor"):
    return lambda b, x: b.new(isa.REDUX, x, _WHOLE_WARP, op=op.removeprefix("reduce_"), type="b32")
  return None


def _across_lanes(b: Builder, xs: list[Operand], masks: tuple[int, ...], kind: str,
                  combine: Callable[[Operand, Operand], Operand]) -> list[Operand]:
  """Every lane ends with the whole result. Booleans travel as words, and as predicates between the steps."""
  for mask in masks:
    moved = []
    for x in xs:
      y = b.reg("f32" if kind == "f32" else "b32")
      word = b.new(isa.SELP, 1, 0, x, type="b32") if kind == "pred" else x
      b(isa.SHFL, y, word, mask, 31, _WHOLE_WARP, mode="bfly")
      moved.append(b.new(isa.SETP, y, 0, cmp="ne", type="b32") if kind == "pred" else y)
    xs = [combine(x, y) for x, y in zip(xs, moved, strict=True)]
  return xs
