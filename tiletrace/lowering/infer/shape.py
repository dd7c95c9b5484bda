"""Shape ops: the operand's layout follows from the result's, and back where nothing is lost."""
from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np

from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import shape as ops
from tiletrace.lowering.infer.constraints import (
  Constraint,
  InferContext,
  Prefers,
  Relates,
  is_distributed,
  layout_rules,
)
from tiletrace.lowering.layouts.fragment import blocked, drop_copies
from tiletrace.lowering.layouts.normal import NotALayout
from tiletrace.lowering.layouts.relation import Layout, fit


def default_layout(var: Var, eqn: Eqn, ctx: InferContext) -> Layout:
  """Coalesced over the threads that own the value."""
  return blocked(var.shape, max(8, var.dtype.itemsize * 8), 4 * ctx.warpgroups(eqn))


@layout_rules.register(ops.broadcast_in_dim_p)
def _broadcast(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  (x,), (out,) = eqn.values, eqn.outvars
  dims = eqn.params["broadcast_dimensions"]
  if not is_distributed(x):
    return
  assert isinstance(x, Var)
  small, large = x.shape, out.shape
  gone = [d for d in range(len(large)) if d not in dims]
  spread = [d for i, d in enumerate(dims) if small[i] == 1 and large[d] != 1]

  def backward(layout: Layout) -> Layout:
    """Without the new dimensions, and with those that are repeated collapsed to one."""
    kept = layout.project([*gone, *spread])
    for d in sorted(spread):
      kept = kept.expand_dims(dims.index(d))
    return drop_copies(kept)[0]

  def forward(layout: Layout) -> Layout | None:
    """New dimensions of one. Where elements are repeated, others choose: all copies in one thread would be too many."""
    if spread or any(large[d] != 1 for d in gone):
      return None
    for d in gone:
      layout = layout.expand_dims(d)
    return layout

  yield Relates(x, out, eqn, forward, backward)
  yield Prefers(out, default_layout(out, eqn, ctx), eqn, math.prod(out.shape))


@layout_rules.register(ops.transpose_p)
def _transpose(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  (x,), (out,) = eqn.values, eqn.outvars
  perm = eqn.params["permutation"]
  if is_distributed(x):
    inverse = [int(i) for i in np.argsort(perm)]
    yield Relates(x, out, eqn, lambda l: l.permute(perm), lambda l: l.permute(inverse))


@layout_rules.register(ops.slice_p)
def _slice(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  """A slice keeps the operand's layout where it cuts whole registers of every thread."""
  (x,), (out,) = eqn.values, eqn.outvars
  if not is_distributed(x):
    return
  start, limit, strides = eqn.params["start"], eqn.params["limit"], eqn.params["strides"]

  def forward(layout: Layout) -> Layout | None:
    return cut_registers(layout, start, limit) if all(s == 1 for s in strides or ()) else None

  yield Relates(x, out, eqn, forward, lambda layout: None)
  yield Prefers(out, default_layout(out, eqn, ctx), eqn, math.prod(out.shape))


@layout_rules.register(ops.reshape_p)
def _reshape(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  """Element by element in memory order: the layout of one side follows from that of the other."""
  (x,), (out,) = eqn.values, eqn.outvars
  if not is_distributed(x) or not is_distributed(out):
    return
  small, large = x.shape, out.shape
  if [n for n in small if n != 1] == [n for n in large if n != 1]:
    yield Relates(x, out, eqn, lambda l: _ones(l, small, large), lambda l: _ones(l, large, small))
  else:
    yield Relates(x, out, eqn, lambda l: _reshaped(l, small, large), lambda l: _reshaped(l, large, small))
    yield Prefers(out, default_layout(out, eqn, ctx), eqn, math.prod(out.shape))


@functools.lru_cache(maxsize=1024)
def _reshaped(layout: Layout, source: tuple[int, ...], target: tuple[int, ...]) -> Layout | None:
  """The layout of the reshaped value whose elements stay where they are; None where it is padded, or is none."""
  table = layout.table(("warp", "lane", "reg"))
  if layout.valid != layout.shape or (table < 0).any():
    return None
  flat = np.ravel_multi_index(tuple(np.moveaxis(table, -1, 0)), source)
  return fit_layout(np.stack(np.unravel_index(flat, target), -1), target)


def _ones(layout: Layout, source: tuple[int, ...], target: tuple[int, ...]) -> Layout:
  out = layout.project([d for d, n in enumerate(source) if n == 1])
  for d, n in enumerate(target):
    if n == 1:
      out = out.expand_dims(d)
  return out


@layout_rules.register(ops.iota_p)
def _iota(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  yield Prefers(eqn.outvars[0], default_layout(eqn.outvars[0], eqn, ctx), eqn, 1)


@layout_rules.register(ops.concatenate_p)
def _concatenate(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  """A part keeps the registers that every thread has of it in the result."""
  out = eqn.outvars[0]
  for x, (start, limit) in zip(eqn.values, parts(eqn)):
    if is_distributed(x):
      yield Relates(x, out, eqn, lambda layout: None,  # type: ignore[arg-type]
                    functools.partial(cut_registers, start=start, limit=limit))
  yield Prefers(out, default_layout(out, eqn, ctx), eqn, 1)


def parts(eqn: Eqn) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
  """For each operand of a concatenate, where it starts and ends in the result."""
  shape, dim, begin = eqn.outvars[0].shape, eqn.params["dimension"], 0
  for x in eqn.values:
    end = begin + x.shape[dim]
    yield (tuple(begin if d == dim else 0 for d in range(len(shape))),
           tuple(end if d == dim else n for d, n in enumerate(shape)))
    begin = end


def cut_registers(layout: Layout, start: tuple[int, ...], limit: tuple[int, ...]) -> Layout | None:
  """The layout of x[start:limit] where every thread keeps the same registers; None where it does not."""
  table = layout.table(("warp", "lane", "reg"))
  inside = np.all((table >= np.asarray(start)) & (table < np.asarray(limit)), axis=-1)
  kept = np.flatnonzero(inside[0, 0])
  if not kept.size or (inside != inside[0, 0]).any():
    return None
  shape = tuple(b - a for a, b in zip(start, limit, strict=True))
  part = table[:, :, kept] - np.asarray(start)
  return fit_layout(part, shape)


def chunk_layout(layout: Layout, chunks: int) -> Layout | None:
  """The layout of x[rows, columns] as [chunk of columns, rows, columns of a chunk]; None where it is none."""
  rows, columns = layout.shape
  split = _reshaped(layout, (rows, columns), (rows, chunks, columns // chunks))
  return None if split is None else split.permute((1, 0, 2))


def fit_layout(table: np.ndarray, shape: tuple[int, ...]) -> Layout | None:
  """The layout of a table [warps, lanes, registers, rank], or None where it is none."""
  from_origin = table[0, 0, 0]
  if from_origin.any():
    return None
  try:
    return fit(("warp", "lane", "reg"), shape, table)
  except NotALayout:
    return None
