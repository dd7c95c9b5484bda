"""Layouts of shared buffers: which dimension is contiguous, and which swizzle every user of the buffer accepts."""
from __future__ import annotations

import dataclasses
import math

from tiletrace.core import dtypes
from tiletrace.core.errors import LayoutError
from tiletrace.core.graph import Eqn, RefOperand, Var, walk
from tiletrace.core.ops.memory import Swizzle
from tiletrace.core.types import RefType, Space
from tiletrace.lowering.infer.constraints import InferContext, written_layout
from tiletrace.lowering.layouts.descriptor import Role
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import SWIZZLES, shared_layout
from tiletrace.lowering.matrix_views import matrix_place
from tiletrace.lowering.shared_views import shared_place, stack
from tiletrace.lowering.wgmma_plan import WgmmaPlan, best_partition

_GEMMS = ("gemm", "gemm_async")
_COPIES = ("copy", "copy_async")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Use:
  """`role` is "A" or "B" for a gemm's operand, None for anything else; `tile` is the instruction's extent, `parts` how
  many warpgroups share the rows or columns out."""
  eqn: Eqn
  ref: RefOperand
  role: Role | None = None
  tile: int = 0
  parts: int = 1


def shared_layouts(ctx: InferContext) -> dict[Var, Layout]:
  """A layout for each shared buffer of the graph.

  Raises:
    LayoutError: the author's layout= does not suit a gemm that reads the buffer.
  """
  eqns = list(walk(ctx.graph.body))
  uses: dict[Var, list[_Use]] = {}
  for eqn in eqns:
    for i, ref in enumerate(eqn.refs):
      if ref.type.space is Space.SHARED:
        uses.setdefault(ref.root, []).append(_use(eqn, i, ref, ctx))
  allocs = [e for e in eqns if e.primitive.name == "alloc" and e.params["space"] is Space.SHARED]
  return {e.outvars[0]: _choose(e, uses.get(e.outvars[0], []), ctx) for e in allocs}


def _use(eqn: Eqn, i: int, ref: RefOperand, ctx: InferContext) -> _Use:
  if eqn.primitive.name not in _GEMMS:
    return _Use(eqn, ref)
  plan = best_partition(eqn, ctx.warpgroups(eqn))
  assert isinstance(plan, WgmmaPlan), "the accumulator has a layout"
  is_b = i == len(eqn.refs) - 2
  return _Use(eqn, ref, "B" if is_b else "A", plan.n if is_b else 64, plan.grid[is_b])


def _contiguous(alloc: Eqn, uses: list[_Use]) -> int:
  """The buffer's dimension that the global arrays copied into it have contiguous; else the one that a gemm needs, the
  last one by default.

  Raises:
    LayoutError: a gemm needs another one than the copies bring.
  """
  copied, needed = _copied_along(uses), next((n for u in uses if (n := _k_major(u)) is not None), None)
  if copied is not None and needed not in (None, copied):
    gemm = next(u for u in uses if _k_major(u) is not None)
    name, dtype = alloc.outvars[0].hint or "the buffer", dtypes.short_name(gemm.ref.type.dtype)
    stored = ("[n, k]", f"{name}.T") if gemm.role == "B" else ("[m, k]", name)
    raise LayoutError(f"gemm reads {gemm.role} of {dtype} along k only, for wgmma transposes nothing but 16-bit types, "
                      f"and the array copied to {name} is contiguous along {'mn'[gemm.role == 'B']}", loc=gemm.eqn.loc,
                      also=(f"{name} is allocated at", alloc.loc),
                      hint=f"store the array as {stored[0]}, allocate the buffer so, and pass {stored[1]}; or "
                           'dispatch="mma_sync", which gathers the operand element by element')
  if copied is None:
    return len(alloc.outvars[0].type.shape) - 1 if needed is None else needed  # type: ignore[union-attr]
  return copied


def _k_major(use: _Use) -> int | None:
  """The buffer's dimension that a gemm needs contiguous, if any: k of all but 16-bit operands."""
  if not use.role or use.ref.type.dtype.itemsize == 2:
    return None
  return use.ref.view.perm[1 if use.role == "A" else 0]


def _copied_along(uses: list[_Use]) -> int | None:
  for use in uses:
    if use.eqn.primitive.name in _COPIES:
      other = next(r for r in use.eqn.refs if r.root is not use.ref.root or r.type.space is Space.GLOBAL)
      if other.type.space is Space.GLOBAL:
        kept = [i for i, p in enumerate(other.view.perm) if p == len(other.view.dims) - 1]
        if kept:
          return use.ref.view.perm[kept[0]]
  return None


def _choose(alloc: Eqn, uses: list[_Use], ctx: InferContext) -> Layout:
  var, asked = alloc.outvars[0], alloc.params["layout"]
  assert isinstance(var.type, RefType)
  if asked is not None and not isinstance(asked, Swizzle):
    return written_layout(alloc)
  inner = _contiguous(alloc, uses)
  reasons = []
  for swizzle in (asked.nbytes,) if asked is not None else SWIZZLES:
    layout = _candidate(var.type, inner, swizzle, any(u.role for u in uses))
    if isinstance(layout, str):
      reasons.append(f"swizzle({swizzle}): {layout}")
      continue
    refusal = next((r for u in uses if (r := _refusal(u, layout, ctx)) is not None), None)
    if refusal is None:
      return layout
    reasons.append(f"swizzle({swizzle}): {refusal}")
  raise LayoutError(f"no shared layout for {var.hint or 'this buffer'} {var.type}:\n    " + "\n    ".join(reasons),
                    loc=alloc.loc, hint="change the block shape so that the contiguous dimension is a multiple of 8; a "
                                        "gemm's parts start at multiples of 8 rows, and of 16 bytes along it")


def _candidate(type_: RefType, inner: int, swizzle: int, for_gemm: bool) -> Layout | str:
  """Two tile dimensions (the last two), stacked for each leading index."""
  shape, bits = type_.shape, max(8, type_.dtype.itemsize * 8)
  tile, lead = shape[-2:], shape[:-2]
  if not shape:
    return "a buffer of one element has no rows" if swizzle else shared_layout(shape, bits, 0)
  if inner < len(lead):
    if swizzle or for_gemm:
      return f"dimension {inner} is contiguous in global memory, and is not one of the last two"
    return shared_layout(shape, bits, 0, order=(inner, *(d for d in reversed(range(len(shape))) if d != inner)))
  inner -= len(lead)
  order = (inner, *(d for d in range(len(tile)) if d != inner))
  row_bytes, rows = tile[inner] * bits // 8, math.prod(tile) // tile[inner]
  if swizzle and (len(tile) < 2 or row_bytes % swizzle or rows % 8):
    return f"rows of {row_bytes} bytes, {rows} of them, are not made of 8 x {swizzle} bytes"
  block = 16 if for_gemm and not swizzle and row_bytes % 16 == 0 else None
  layout = shared_layout(tile, bits, swizzle, order=order, block_bytes=block)
  for n in reversed(lead):
    layout = stack(layout, n, bits)
  return layout


def _refusal(use: _Use, layout: Layout, ctx: InferContext) -> str | None:
  if use.role is None:
    place = shared_place(use.ref, layout, ctx.facts)
    return place if isinstance(place, str) else None
  place = matrix_place(use.ref, layout, ctx.facts, role=use.role, tile=use.tile)
  if isinstance(place, str):
    return place
  if place.descriptor.part_step(use.parts) is None:
    return f"the parts of {use.parts} warpgroups are not evenly apart"
  return None
