"""Accesses at tiles of indices, and atomic operations: how wide they are, and what their results are for."""
from __future__ import annotations

import functools
from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Block, Eqn, Var, walk
from tiletrace.core.ops import atomic as atomics, gather as ops
from tiletrace.core.types import Space
from tiletrace.lowering.indexed import indexed_width
from tiletrace.lowering.select.context import SelectContext, access_width, guard_dims, select_rules
from tiletrace.lowering.select.memory import fill_is_zero
from tiletrace.lowering.shared_views import SharedPlace, shared_place
from tiletrace.lowering.tables import coordinates, inside_view, shared_bytes, widest_groups
from tiletrace.lowering.variants import Choice, Variant, choose


def _guard(eqn: Eqn, ctx: SelectContext) -> tuple[int, ...]:
  """The dimensions that are not indexed and may be overhung; the others are checked always."""
  ref = eqn.refs[0]
  rows = {ref.view.perm[d] for d in eqn.params["dims"]}
  return tuple(d for d in guard_dims(ref, ctx.facts) if d not in rows)


def _masked(mask: tuple[Any, ...]) -> bool:
  return any(isinstance(m, Var) and m.shape for m in mask)


def _width(eqn: Eqn, value: Var, ctx: SelectContext, most: int = 16) -> int:
  return indexed_width(eqn.refs[0], eqn.params["dims"], ctx.layouts[value], ctx.threads(eqn), ctx.facts, most)


@select_rules.register(ops.gather_p)
def _gather(eqn: Eqn, ctx: SelectContext) -> tuple[Eqn, Choice | None]:
  vec = 1 if _masked(ops.split_values(eqn, 0)[1]) else _width(eqn, eqn.outvars[0], ctx)
  return eqn.replace(params={**eqn.params, "guard": _guard(eqn, ctx), "vec": vec}), None


@select_rules.register(ops.scatter_p)
def _scatter(eqn: Eqn, ctx: SelectContext) -> tuple[Eqn, Choice | None]:
  value = eqn.values[0]
  assert isinstance(value, Var)
  vec = 1 if _masked(ops.split_values(eqn, 1)[1]) else _width(eqn, value, ctx)
  return eqn.replace(params={**eqn.params, "guard": _guard(eqn, ctx), "vec": vec}), None


# ---- copies of rows to shared memory

def _sizes(eqn: Eqn, ctx: SelectContext) -> tuple[int, int]:
  """Bytes of the widest load, and of the widest store to shared memory that it allows."""
  src, dst = eqn.refs
  item, index = src.type.dtype.itemsize, eqn.values[0]
  assert isinstance(index, Var)
  place = shared_place(dst, ctx.layouts[dst.root], ctx.facts)
  assert isinstance(place, SharedPlace), place
  layout, threads = ctx.layouts[index], ctx.threads(eqn)
  inside = inside_view(coordinates(layout, threads), dst.view.static_shape)
  size, _ = widest_groups(shared_bytes(place, layout, threads, item), item, inside,
                          place.alignment(item, ctx.facts))
  return _width(eqn, index, ctx) * item, size


def _rows_fit_cp_async(eqn: Eqn, ctx: SelectContext) -> str | None:
  size = min(_sizes(eqn, ctx))
  return None if size in (4, 8, 16) else f"only {size} bytes of a row are provably aligned, it moves 4, 8 or 16"


@select_rules.register(ops.gather_copy_p)
def _copy(eqn: Eqn, ctx: SelectContext) -> tuple[Eqn, Choice | None]:
  variants = (Variant("cp_async", (fill_is_zero, _rows_fit_cp_async)), Variant("vector"))
  choice = choose("gather_copy", variants, eqn, ctx, forced=eqn.params["dispatch"] or ctx.options.forced("gather_copy"))
  loads, stores = _sizes(eqn, ctx)
  size = min(loads, stores) if choice.variant == "cp_async" else loads
  params = {"dispatch": choice.variant, "guard": _guard(eqn, ctx), "vec": size // eqn.refs[0].type.dtype.itemsize}
  return eqn.replace(params={**eqn.params, **params}), choice


# ---- atomics

@functools.lru_cache(maxsize=8)
def _used(body: Block) -> frozenset[Var]:
  """What equations and blocks take."""
  found = [a for e in walk(body) for a in (*e.invars, *(x for b in e.blocks for x in b.outs))]
  return frozenset(a for a in (*found, *body.outs) if isinstance(a, Var))


@select_rules.register(atomics.atomic_p)
def _atomic(eqn: Eqn, ctx: SelectContext) -> tuple[Eqn, Choice | None]:
  """Without a use of its result an operation is a `red`, of several elements where the ISA has that."""
  returns = bool(_used(ctx.graph.body) & set(eqn.outvars))
  p, value, ref = eqn.params, eqn.values[0], eqn.refs[0]
  assert ref.type.space is Space.GLOBAL
  params = {**p, "returns": returns, "guard": _guard(eqn, ctx), "vec": 1}
  reduces = not returns and p["op"] == "add" and p["sem"] in ("relaxed", "release") and p["scope"] != "cluster"
  mask = ops.split_values(eqn, atomics.num_operands(eqn))[1]
  has_vectors = not ctx.target.lacks("sm_90")
  if ref.type.dtype == dtypes.bf16 and not has_vectors:
    raise LoweringError(f"atomic {p['op']} of bf16: {ctx.target.lacks('sm_90')}", loc=eqn.loc,
                        hint="accumulate in an array of f32")
  if reduces and dtypes.is_float(ref.type.dtype) and isinstance(value, Var) and value.shape and not _masked(mask):
    most = 4 if ref.type.dtype != dtypes.f32 or not has_vectors else 16
    params["vec"] = _width(eqn, value, ctx, most) if p["dims"] else min(
      most // ref.type.dtype.itemsize,
      access_width(ref, ctx.layouts[value], ctx.threads(eqn), params["guard"], ctx.facts))
  return eqn.replace(params=params, outvars=eqn.outvars if returns else ()), None
