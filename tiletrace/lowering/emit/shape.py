"""Shape ops: registers change their names; nothing moves between threads (that is a relayout)."""
from __future__ import annotations

import numpy as np

from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import shape as ops
from tiletrace.lowering.emit import addressing
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.values import Elements, pack, spread, take, unpack
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.tables import coordinates, split_sum
from tiletrace.lowering.words import per_word


def _table(ctx: EmitContext, var: Var) -> np.ndarray:
  if var.shape == ():
    return np.zeros((ctx.scope.threads, 1, 0), np.int64)
  return coordinates(ctx.layouts[var], ctx.scope.threads)


def _rename(ctx: EmitContext, eqn: Eqn, wanted: np.ndarray) -> None:
  """The result's registers are the operand's that hold the elements `wanted` [threads, registers, operand rank]."""
  source = eqn.values[0]
  x = ctx.read(source)
  if x.count == 1 and source.shape == ():
    ctx.bind(eqn.outvars[0], spread(ctx.b, x, wanted.shape[1]))
    return
  assert isinstance(source, Var)
  index = addressing.register_map(_table(ctx, source), wanted, source.shape)
  ctx.bind(eqn.outvars[0], take(ctx.b, x, index))


@emit_rules.register(ops.broadcast_in_dim_p)
def _broadcast(ctx: EmitContext, eqn: Eqn) -> None:
  out = _table(ctx, eqn.outvars[0])
  dims, shape = eqn.params["broadcast_dimensions"], eqn.values[0].shape
  wanted = out[..., list(dims)] if dims else out[..., :0]
  _rename(ctx, eqn, np.where(np.asarray(shape) == 1, 0, wanted) if dims else wanted)


@emit_rules.register(ops.slice_p)
def _slice(ctx: EmitContext, eqn: Eqn) -> None:
  out = _table(ctx, eqn.outvars[0])
  start, strides = eqn.params["start"], eqn.params["strides"] or (1,) * out.shape[-1]
  _rename(ctx, eqn, out * np.asarray(strides) + np.asarray(start))


@emit_rules.register(ops.transpose_p)
def _transpose(ctx: EmitContext, eqn: Eqn) -> None:
  out = _table(ctx, eqn.outvars[0])
  inverse = np.argsort(eqn.params["permutation"])
  _rename(ctx, eqn, out[..., inverse])


@emit_rules.register(ops.reshape_p)
def _reshape(ctx: EmitContext, eqn: Eqn) -> None:
  out = _table(ctx, eqn.outvars[0])
  shape, source = eqn.outvars[0].shape, eqn.values[0].shape
  flat = np.zeros(out.shape[:-1], np.int64)
  for d, n in enumerate(shape):
    flat = flat * n + np.minimum(out[..., d], n - 1)
  wanted = np.stack(np.unravel_index(flat, source), -1) if source else out[..., :0]
  padding = np.any(out >= np.asarray(shape, out.dtype), axis=-1, keepdims=True)
  wanted = np.where(padding, np.asarray(source, out.dtype), wanted)  # past the end: any register will do
  _rename(ctx, eqn, wanted)


@emit_rules.register(ops.iota_p)
def _iota(ctx: EmitContext, eqn: Eqn) -> None:
  base, delta = split_sum(_table(ctx, eqn.outvars[0])[..., eqn.params["dimension"]].astype(np.int64))
  x = addressing.thread_sum(ctx, base)
  regs = tuple((ctx.b.new(isa.ADD, x, int(d), type="s32") if d else x) if isinstance(x, Reg) else int(x) + int(d)
               for d in delta)
  ctx.bind(eqn.outvars[0], Elements(eqn.outvars[0].dtype, len(regs), regs))


@emit_rules.register(ops.concatenate_p)
def _concatenate(ctx: EmitContext, eqn: Eqn) -> None:
  """The registers of the parts one after another, in the order of the result: each thread has its share of each."""
  dim, out = eqn.params["dimension"], eqn.outvars[0]
  xs, tables, begin = [ctx.read(v) for v in eqn.values], [], 0
  for v in eqn.values:
    table = _table(ctx, v)  # type: ignore[arg-type]
    inside = np.all(table < np.asarray(v.shape), axis=-1, keepdims=True)
    tables.append(np.where(inside, table + begin * (np.arange(len(v.shape)) == dim), -1))
    begin += v.shape[dim]
  have, wanted = np.concatenate(tables, 1), _table(ctx, out)
  if all(x.count % per_word(x.dtype) == 0 for x in xs):
    joined = Elements(out.dtype, sum(x.count for x in xs), tuple(r for x in xs for r in x.regs))
  else:
    joined = pack(ctx.b, out.dtype, [r for x in xs for r in unpack(ctx.b, x)])
  ctx.bind(out, take(ctx.b, joined, addressing.register_map(have, wanted, out.shape)))
