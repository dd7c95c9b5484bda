"""Copies, loads and stores: TMA, cp.async, vectors, scalars; stmatrix."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, RefOperand, Var
from tiletrace.core.ops import memory as ops
from tiletrace.core.types import Space
from tiletrace.lowering.infer.memory import coalesced
from tiletrace.lowering.infer.shape import chunk_layout, cut_registers
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.select.context import SelectContext, access_width, guard_dims, select_rules
from tiletrace.lowering.shared_views import SharedPlace, shared_place, stack
from tiletrace.lowering.tables import coordinates, inside_view, shared_bytes, stmatrix_rows, widest_groups
from tiletrace.lowering.tma_plan import global_refusal, start_refusal, tma_plan
from tiletrace.lowering.variants import Choice, Variant, choose

# ---- predicates: None, or the reason to decline


def is_global_to_shared(eqn: Eqn, ctx: SelectContext) -> str | None:
  src, dst = eqn.refs
  if (src.type.space, dst.type.space) != (Space.GLOBAL, Space.SHARED):
    return f"it copies {src.type.space} to {dst.type.space} memory"
  return None


def has_tma(eqn: Eqn, ctx: SelectContext) -> str | None:
  return ctx.target.lacks("sm_90")


def fill_is_zero(eqn: Eqn, ctx: SelectContext) -> str | None:
  fill = eqn.params["fill_value"]
  return None if fill == 0 else f"the hardware fills with 0, not {fill}"


def tma_fits(eqn: Eqn, ctx: SelectContext) -> str | None:
  return _no_tma(eqn, ctx, proven=True)


def cp_async_fits(eqn: Eqn, ctx: SelectContext) -> str | None:
  src, _ = eqn.refs
  plan = thread_copy(eqn, ctx)
  size = plan.width * src.type.dtype.itemsize
  place = shared_place(eqn.refs[1], ctx.layouts[eqn.refs[1].root], ctx.facts)
  assert isinstance(place, SharedPlace), place
  if place.alignment(src.type.dtype.itemsize, ctx.facts) % size:
    return f"the view in shared memory does not provably start at a multiple of {size} bytes"
  return None if size in (4, 8, 16) else f"only {size} bytes are provably aligned and side by side, it moves 4, 8 or 16"


def is_wider_than_an_element(eqn: Eqn, ctx: SelectContext) -> str | None:
  return None if thread_copy(eqn, ctx).width > 1 else "no two elements are provably aligned and side by side"


def is_not_explicit(eqn: Eqn, ctx: SelectContext) -> str | None:
  return "the kernel writes its own roles: use tt.copy_async from a staging buffer" if ctx.explicit else None


def is_unmasked(eqn: Eqn, ctx: SelectContext) -> str | None:
  return "it is masked" if len(eqn.values) > 1 else None


def is_not_elected(eqn: Eqn, ctx: SelectContext) -> str | None:
  return None if eqn.refs[0].view.perm else "it stores a scalar"


def comes_from_wgmma(eqn: Eqn, ctx: SelectContext) -> str | None:
  """Staging pays where the fragment is no coalesced layout, as an accumulator is not."""
  value = eqn.values[0]
  if not isinstance(value, Var) or value not in ctx.layouts:
    return "it stores a scalar"
  ref = eqn.refs[0]
  if ctx.layouts[value] == coalesced(ref, ctx.warpgroups(eqn)):
    return "the value is coalesced already"
  return None


def is_not_ordered(eqn: Eqn, ctx: SelectContext) -> str | None:
  if eqn.refs[0].root in ctx.unordered:
    return "the kernel accesses the same elements elsewhere, and TMA is not ordered with that"
  return None


def tma_can_store(eqn: Eqn, ctx: SelectContext) -> str | None:
  ref = eqn.refs[0]
  if len(ref.view.perm) != 2:
    return f"the tile has rank {len(ref.view.perm)}, staging is made for 2"
  if ref.view.perm[1] != len(ref.view.dims) - 1:
    return "the tile's last dimension is not contiguous in memory"
  if ref.type.dtype.itemsize != 2:
    return f"stmatrix stages 16-bit elements, these have {8 * ref.type.dtype.itemsize} bits"
  return global_refusal(ref) or start_refusal(ref, ctx.facts, storing=True)


def staging_fits(eqn: Eqn, ctx: SelectContext) -> str | None:
  """Each warpgroup stages its own rows, or its own 64 columns."""
  by_rows = _rows_refusal(eqn, ctx)
  if by_rows is None or stages_columns(eqn.refs[0], ctx.layouts[eqn.values[0]], ctx.warpgroups(eqn)):  # type: ignore
    return None
  return by_rows


def stages_columns(ref: RefOperand, layout: Layout, warpgroups: int) -> bool:
  """Whether a tile, as an accumulator transposed is, leaves in chunks of 64 columns, one of each warpgroup."""
  rows, columns = ref.view.static_shape
  if warpgroups == 1 or columns != 64 * warpgroups or rows % 8:
    return False
  table = layout.table(("warp", "lane", "reg"))[..., 1].reshape(warpgroups, -1)
  if any((table[w] // 64 != w).any() for w in range(warpgroups)) or layout.valid != layout.shape:
    return False
  part = chunk_layout(layout, warpgroups)
  if part is None:
    return False
  stage = SharedPlace(stack(shared_layout((rows, 64), 16, 128), warpgroups, 16), (warpgroups, rows, 64), 0, (),
                      (1, 1, 1))
  return stmatrix_rows(shared_bytes(stage, part, 128 * warpgroups, 2)) is not None


def _rows_refusal(eqn: Eqn, ctx: SelectContext) -> str | None:
  """Each warpgroup stages its own rows in 64-column chunks, 128-byte swizzled."""
  (rows, columns), wgs = eqn.refs[0].view.static_shape, ctx.warpgroups(eqn)
  layout = ctx.layouts[eqn.values[0]]  # type: ignore[index]
  if columns % 64:
    return f"{columns} columns are not whole 64-column chunks"
  table = layout.table(("warp", "lane", "reg"))[..., 0].reshape(wgs, -1)
  bands = (set(range(w * rows // wgs, (w + 1) * rows // wgs)) for w in range(wgs))
  if rows % wgs or any(set(table[w].tolist()) != band for w, band in enumerate(bands)):
    return "the warpgroups do not own whole bands of rows"
  if (rows // wgs) % 8:
    return f"{rows // wgs} rows a warpgroup are not a multiple of 8"
  part = cut_registers(layout, (0, 0), (rows, 64))
  if part is None:
    return "64 columns are not whole registers of the fragment"
  stage = SharedPlace(shared_layout((rows, 64), 16, 128), (rows, 64), 0, (), (1, 1))
  if stmatrix_rows(shared_bytes(stage, part, ctx.threads(eqn), 2)) is None:
    return "the fragment's 8x8 blocks are not those of stmatrix"
  return None


# ---- copies


@dataclasses.dataclass(frozen=True, slots=True)
class ThreadCopy:
  """A copy by the threads of the scope: the layout that spreads it, elements per access, dimensions to check.

  `part`: registers that its loads fill before the first of them is stored, twice.
  """
  layout: Layout
  width: int
  guard: tuple[int, ...]
  part: int = 32

  @property
  def params(self) -> dict[str, Any]:
    """What the equation carries of it."""
    return {"layout": self.layout, "vec": self.width, "guard": self.guard, "part": self.part}


def thread_copy(eqn: Eqn, ctx: SelectContext) -> ThreadCopy:
  """The widest access that both sides allow. Elements narrower than 4 bytes are stored 4 bytes at a time where only
  their loads are not aligned."""
  src, dst = eqn.refs
  outside, inside = (src, dst) if src.type.space is Space.GLOBAL else (dst, src)
  item, threads = outside.type.dtype.itemsize, ctx.threads(eqn)
  place = shared_place(inside, ctx.layouts[inside.root], ctx.facts)
  assert isinstance(place, SharedPlace), place
  guard = guard_dims(outside, ctx.facts) if outside.type.space is Space.GLOBAL else ()
  vec = 16 // item
  while True:
    layout = coalesced(outside, ctx.warpgroups(eqn), vec=vec)
    width = vec if outside.type.space is Space.SHARED else access_width(outside, layout, threads, guard, ctx.facts)
    size = _shared_width(inside, place, layout, threads)
    if min(width, size // item) >= vec or vec == 1:
      break
    vec //= 2
  if vec * item < 4 and outside.type.space is Space.GLOBAL:
    pairs = coalesced(outside, ctx.warpgroups(eqn), vec=4 // item)
    if _shared_width(inside, place, pairs, threads) == 4:
      layout = pairs
  return ThreadCopy(layout, vec, guard)


def _shared_width(ref: RefOperand, place: SharedPlace, layout: Layout, threads: int) -> int:
  """Bytes of the widest access to a shared view by a fragment of that layout."""
  item = ref.type.dtype.itemsize
  inside = inside_view(coordinates(layout, threads), ref.view.static_shape)
  return widest_groups(shared_bytes(place, layout, threads, item), item, inside)[0]


COPY = (
  Variant("tma", (has_tma, is_global_to_shared, fill_is_zero, tma_fits)),
  Variant("cp_async", (is_global_to_shared, fill_is_zero, cp_async_fits)),
  Variant("vector", (is_wider_than_an_element,)),
  Variant("scalar"),
)


@select_rules.register(ops.copy_p)
def _copy(eqn: Eqn, ctx: SelectContext) -> tuple[Eqn, Choice]:
  forced = eqn.params["dispatch"] or ctx.options.forced("copy")
  choice = choose("copy", COPY, eqn, ctx, forced=forced)
  params: dict = {"dispatch": choice.variant, "forced": forced is not None}
  if choice.variant != "tma":
    plan = thread_copy(eqn, ctx)
    params |= plan.params
  return eqn.replace(params={**eqn.params, **params}), choice


def copy_by_threads(eqn: Eqn, ctx: SelectContext, notes: list[str]) -> list[Eqn]:
  """A copy that no producer makes, in the threads that compute: as chosen, or the best variant but TMA. cp.async is
  committed and waited for at once.

  Raises:
    LoweringError: the author forced TMA.
  """
  params = eqn.params
  if params["dispatch"] == "tma":
    if params["forced"]:
      raise LoweringError("the forced TMA copy has no producer that could issue it", loc=eqn.loc,
                          hint="; ".join(notes) or "drop dispatch=")
    plan = thread_copy(eqn, ctx)
    variant = choose("copy", COPY[1:], eqn, ctx).variant
    params = {**params, "dispatch": variant, **plan.params}
  if eqn.refs[0].type.space is Space.GLOBAL:
    notes.append(f"{eqn.loc.short()}  copy: {params['dispatch']}, {params['vec']} elements an access, by the threads "
                 "that compute; not pipelined")
  eqn = eqn.replace(params=params)
  if params["dispatch"] != "cp_async":
    return [eqn]
  group = {"kind": "cp_async"}
  return [eqn.replace(primitive=ops.copy_async_p),
          Eqn(ops.commit_group_p, (), (), group, eqn.loc),
          Eqn(ops.wait_group_p, (), (), {**group, "n": 0, "read": False}, eqn.loc)]


@select_rules.register(ops.copy_async_p)
def _copy_async(eqn: Eqn, ctx: SelectContext) -> tuple[Eqn, Choice]:
  """The author chose; only whether it is possible is left to say."""
  src, dst = eqn.refs
  storing = (src.type.space, dst.type.space) == (Space.SHARED, Space.GLOBAL)
  tma = Variant("tma", (has_tma, fill_is_zero, functools.partial(_no_tma, proven=False)))
  cp_async = Variant("cp_async", (is_global_to_shared, fill_is_zero, cp_async_fits))
  forced = eqn.params["dispatch"] or ("tma" if eqn.values or storing else None)
  choice = choose("copy_async", (tma, cp_async), eqn, ctx, forced=forced)
  params: dict = {"dispatch": choice.variant}
  if choice.variant == "cp_async":
    plan = thread_copy(eqn, ctx)
    params |= plan.params
  return eqn.replace(params={**eqn.params, **params}), choice


def _no_tma(eqn: Eqn, ctx: SelectContext, *, proven: bool) -> str | None:
  """`proven`: whether it must be certain that TMA may start there; an author may know it."""
  outside, inside = sorted(eqn.refs, key=lambda r: r.type.space is not Space.GLOBAL)
  plan = tma_plan(outside, inside, ctx.layouts[inside.root], ctx.facts)
  storing = eqn.refs[1].type.space is Space.GLOBAL
  return plan if isinstance(plan, str) else start_refusal(outside, ctx.facts, proven=proven, storing=storing)


# ---- loads and stores of values

STORE = (
  Variant("tma", (has_tma, is_not_explicit, is_unmasked, is_not_elected, is_not_ordered, comes_from_wgmma,
                  tma_can_store, staging_fits)),
  Variant("direct"),
)


@select_rules.register(ops.load_p)
def _load(eqn: Eqn, ctx: SelectContext) -> tuple[Eqn, Choice | None]:
  ref = eqn.refs[0]
  if ref.type.space is not Space.GLOBAL:
    return eqn, None
  guard = guard_dims(ref, ctx.facts)
  width = 1
  if eqn.outvars[0].shape and not (eqn.values and isinstance(eqn.values[0], Var) and eqn.values[0].shape):
    width = access_width(ref, ctx.layouts[eqn.outvars[0]], ctx.threads(eqn), guard, ctx.facts)
  return eqn.replace(params={**eqn.params, "guard": guard, "vec": width}), None


@select_rules.register(ops.store_p)
def _store(eqn: Eqn, ctx: SelectContext) -> tuple[Eqn, Choice | None]:
  ref, value = eqn.refs[0], eqn.values[0]
  space = ref.type.space
  if space is Space.FRAGMENT:
    return eqn, None
  scalar = not isinstance(value, Var) or not value.shape
  layout = None if scalar else ctx.layouts[value]  # type: ignore[index]
  if scalar and ref.view.perm:
    layout = coalesced(ref, ctx.warpgroups(eqn))
  params: dict = {} if not scalar else {"layout": layout}
  if space is Space.SHARED:
    params["dispatch"] = "stmatrix" if not scalar and uses_stmatrix(ref, layout, ctx, ctx.threads(eqn)) else "direct"
    return eqn.replace(params={**eqn.params, **params}), None
  choice = choose("store", STORE, eqn, ctx, forced=ctx.options.forced("store"))
  guard = guard_dims(ref, ctx.facts)
  masked = len(eqn.values) > 1 and isinstance(eqn.values[1], Var) and eqn.values[1].shape
  width = 1 if masked or layout is None else access_width(ref, layout, ctx.threads(eqn), guard, ctx.facts)
  params |= {"dispatch": choice.variant, "guard": guard, "vec": width}
  if choice.variant == "tma":
    assert layout is not None
    params["by_columns"] = _rows_refusal(eqn, ctx) is not None
  return eqn.replace(params={**eqn.params, **params}), choice


def stored_by_matrices(eqn: Eqn, ctx: SelectContext) -> Eqn:
  """A store of the scheduler's, into a buffer of its own: by stmatrix where that can."""
  if eqn.primitive is not ops.store_p or eqn.params.get("dispatch") != "direct" or len(eqn.values) != 1:
    return eqn
  ref, value = eqn.refs[0], eqn.values[0]
  tile = isinstance(value, Var) and value.shape and ref.type.space is Space.SHARED and ref.is_whole
  if not tile or not uses_stmatrix(ref, ctx.layouts.get(value), ctx, ctx.threads(eqn)):  # type: ignore[arg-type]
    return eqn
  return eqn.replace(params={**eqn.params, "dispatch": "stmatrix"})


def uses_stmatrix(ref: RefOperand, layout: Layout | None, ctx: SelectContext, threads: int) -> bool:
  """16-bit elements in a fragment whose 8x8 blocks are rows of 16 bytes in shared memory."""
  if ref.type.dtype.itemsize != 2 or layout is None or layout.valid != layout.shape or ctx.target.lacks("sm_90"):
    return False
  place = shared_place(ref, ctx.layouts[ref.root], ctx.facts)
  if not isinstance(place, SharedPlace) or place.alignment(2, ctx.facts) % 16:
    return False
  return stmatrix_rows(shared_bytes(place, layout, threads, 2)) is not None
