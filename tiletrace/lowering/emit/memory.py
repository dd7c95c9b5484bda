"""Loads and stores of tile values: fragments (registers), shared memory, global memory."""
from __future__ import annotations

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Atom, Eqn, RefOperand, Var
from tiletrace.core.ops import memory as ops
from tiletrace.core.types import Space
from tiletrace.lowering.emit import addressing, narrow, policies
from tiletrace.lowering.emit.context import EmitContext, emit_rules
from tiletrace.lowering.emit.global_access import GlobalAccess
from tiletrace.lowering.emit.shared_access import SharedAccess
from tiletrace.lowering.emit.values import (
  Elements,
  Operand,
  allocate,
  materialise,
  move,
  put,
  register_class,
  spread,
  take,
)
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.tables import coordinates, is_transposed, matrix_addresses, matrix_rows, stmatrix_rows


@emit_rules.register(ops.alloc_p)
def _alloc(ctx: EmitContext, eqn: Eqn) -> None:
  """A fragment gets its registers; a shared buffer was placed by the scheduler."""
  if eqn.params["space"] is Space.FRAGMENT:
    ctx.fresh(eqn.outvars[0], eqn)


@emit_rules.register(ops.load_p)
def _load(ctx: EmitContext, eqn: Eqn) -> None:
  ref, out = eqn.refs[0], eqn.outvars[0]
  if ref.type.space is Space.FRAGMENT:
    elements = _fragment_part(ctx, ref, out)
    if eqn in ctx.copied_loads:
      copy = allocate(ctx.b, elements.dtype, elements.count, eqn.loc)
      move(ctx.b, copy, elements)
      elements = copy
    ctx.bind(out, elements)
  elif ref.type.space is Space.SHARED:
    _load_shared(ctx, eqn)
  else:
    _load_global(ctx, eqn)


@emit_rules.register(ops.store_p)
def _store(ctx: EmitContext, eqn: Eqn) -> None:
  ref = eqn.refs[0]
  if ref.type.space is Space.FRAGMENT:
    _store_fragment(ctx, eqn)
  elif ref.type.space is Space.SHARED:
    _store_shared(ctx, eqn)
  else:
    _store_global(ctx, eqn)


# ---- fragments


def _store_fragment(ctx: EmitContext, eqn: Eqn) -> None:
  (ref,), (value,) = eqn.refs, eqn.values
  whole, x = ctx.read(ref.root), ctx.read(value)
  if ref.is_whole:
    move(ctx.b, whole, x)
    return
  src = coordinates(ctx.layouts[ref.root], ctx.scope.threads)
  if isinstance(value, Var) and value.shape:
    wanted = view_coordinates(ref, coordinates(ctx.layouts[value], ctx.scope.threads))
    put(ctx.b, whole, addressing.register_map(src, wanted, ref.type.shape), x)
    return
  lo = np.asarray([d.start for d in ref.view.dims])
  inside = np.all((src >= lo) & (src < lo + np.asarray([d.size for d in ref.view.dims])), axis=-1)
  kept = np.flatnonzero(inside[0])
  if (inside != inside[0]).any() or any(d.stride != 1 for d in ref.view.dims):
    raise LoweringError("this view does not cut whole registers of every thread", loc=eqn.loc,
                        hint="tt.where(rows < n, value, ref[...]) chooses elements of the whole fragment")
  put(ctx.b, whole, kept.tolist(), stored_value(ctx, value, len(kept)))


def _fragment_part(ctx: EmitContext, ref: RefOperand, out: Var) -> Elements:
  """The registers of a static view of a fragment."""
  whole = ctx.read(ref.root)
  if ref.is_whole:
    return whole
  src = coordinates(ctx.layouts[ref.root], ctx.scope.threads)
  wanted = view_coordinates(ref, coordinates(ctx.layouts[out], ctx.scope.threads))
  return take(ctx.b, whole, addressing.register_map(src, wanted, ref.type.shape))


def view_coordinates(ref: RefOperand, table: np.ndarray) -> np.ndarray:
  """Root indices of a view's elements [..., view rank], for views whose starts are static."""
  out = np.zeros((*table.shape[:-1], len(ref.view.dims)), table.dtype)
  for d, dim in enumerate(ref.view.dims):
    start = dim.start if isinstance(dim.start, int) else 0
    out[..., d] = start
  for i, p in enumerate(ref.view.perm):
    out[..., p] += table[..., i] * ref.view.dims[p].stride
  return out


# ---- shared memory


def _load_shared(ctx: EmitContext, eqn: Eqn) -> None:
  ref, out = eqn.refs[0], eqn.outvars[0]
  access = SharedAccess(ctx, ref, ctx.layouts.get(out))
  holds_bits = ref.type.dtype != dtypes.bool_       # registers hold what memory does; booleans are predicates here
  if holds_bits and access.size <= 4 and access.fill is None and ctx.scope.elected is None and access.starts_at(16):
    for trans in (False, True):
      starts = matrix_rows(access.table, ref.type.dtype.itemsize, trans=trans)
      if starts is not None:
        ctx.bind(out, _ldmatrix(ctx, access, ref.type.dtype, starts, trans))
        return
  ctx.bind(out, collect(ctx, ref.type.dtype, access.count, access.groups, access.size, access.load, eqn, access.fill))


def _ldmatrix(ctx: EmitContext, access: SharedAccess, dtype: np.dtype, starts: np.ndarray, trans: bool) -> Elements:
  words = starts.shape[2]
  num = next(n for n in (4, 2, 1) if words % n == 0)
  regs: list[Operand] = []
  for at in access.rows(matrix_addresses(starts, num)):
    group = ctx.b.regs("f32" if dtype == dtypes.f32 else "b32", num)
    ctx.b(isa.LDMATRIX, group, at, num=f"x{num}", trans="trans" if trans else "")
    regs += group
  return Elements(dtype, access.count, tuple(regs))


def collect(ctx: EmitContext, dtype: np.dtype, count: int, groups: list[list[int]], vec_bytes: int, access, eqn: Eqn,
            fill: Operand | None = None) -> Elements:
  """Loads every group through `access(i, destination registers, type modifiers)` and puts the elements in order."""
  b = ctx.b
  register_class(dtype, eqn.loc)
  if dtype == dtypes.bool_:
    return _collect_flags(ctx, count, groups, access, fill)
  words: list[Operand] = []
  order: list[int] = []
  cls = "f32" if dtype == dtypes.f32 else "b32"
  for i, group in enumerate(groups):
    order += group
    if vec_bytes < 4:
      part = b.reg("b16")
      if fill is not None:
        b(isa.MOV, part, _fill_bits(dtype, fill) & (1 << 8 * vec_bytes) - 1, type="b16")
      access(i, part, {"type": f"b{8 * vec_bytes}"})
      words.append(part)
      continue
    regs = b.regs(cls, vec_bytes // 4)
    if fill is not None:
      for r in regs:
        b(isa.MOV, r, _fill_word(dtype, fill), type=cls)
    vec = {4: "", 8: "v2", 16: "v4"}[vec_bytes]
    access(i, regs if vec else regs[0], {"type": cls, "vec": vec})
    words += regs
  if vec_bytes < 4:
    pairs = [*words, *([words[-1]] if len(words) % 2 else [])]
    words = [b.new(isa.PACK, pairs[i:i + 2], type="b32") for i in range(0, len(pairs), 2)]
  if vec_bytes == 1:  # a byte in each half
    words = [b.new(isa.PRMT, words[i], words[min(i + 1, len(words) - 1)], 0x6420) for i in range(0, len(words), 2)]
  loaded = Elements(dtype, count, tuple(words))
  inverse = np.argsort(order, kind="stable").tolist()
  return loaded if inverse == list(range(count)) else take(b, loaded, inverse)


def _word_type(num_bytes: int) -> dict[str, str]:
  """The access of `num_bytes` bytes as one narrow word, or as 32-bit words."""
  if num_bytes < 4:
    return {"type": f"u{8 * num_bytes}"}
  return {"type": "b32", "vec": {4: "", 8: "v2", 16: "v4"}[num_bytes]}


def _collect_flags(ctx: EmitContext, count: int, groups: list[list[int]], access, fill: Operand | None) -> Elements:
  """Bools are bytes in memory and predicates in registers."""
  b = ctx.b
  flags: list[Operand] = [0] * count
  for i, group in enumerate(groups):
    words = b.regs("b32", max(1, len(group) // 4))
    for w in words if fill is not None else ():
      b(isa.MOV, w, 0x01010101 if fill else 0, type="b32")
    access(i, words if len(words) > 1 else words[0], _word_type(len(group)))
    for k, r in enumerate(group):
      byte = b.new(isa.AND, words[k // 4], 0xFF << 8 * (k % 4), type="b32") if len(group) > 1 else words[0]
      flags[r] = b.new(isa.SETP, byte, 0, cmp="ne", type="b32")
  return Elements(dtypes.bool_, count, tuple(flags))


def _scatter_flags(ctx: EmitContext, value: Elements, groups: list[list[int]], access) -> None:
  b = ctx.b
  for i, group in enumerate(groups):
    words: list[Reg] = []
    for k, r in enumerate(group):
      byte = b.new(isa.SELP, 1 << 8 * (k % 4), 0, value.regs[r], type="b32")
      if k % 4:
        words[-1] = b.new(isa.OR, words[-1], byte, type="b32")
      else:
        words.append(byte)
    access(i, words if len(words) > 1 else words[0], _word_type(len(group)))


def _fill_word(dtype: np.dtype, fill: Operand) -> Operand:
  if dtype == dtypes.f32:
    return float(fill)  # type: ignore[arg-type]
  return _fill_bits(dtype, fill)


def _fill_bits(dtype: np.dtype, fill: Operand) -> int:
  """A register full of an element's bits."""
  return narrow.bits(dtype, fill) * {1: 0x1010101, 2: 0x10001, 4: 1}[dtype.itemsize]


def scatter(ctx: EmitContext, value: Elements, groups: list[list[int]], vec_bytes: int, access) -> None:
  """Stores every group through `access(i, source registers, type modifiers)`."""
  b, dtype = ctx.b, value.dtype
  value = materialise(b, value)
  if dtype == dtypes.bool_:
    _scatter_flags(ctx, value, groups, access)
    return
  ordered = take(b, value, [r for g in groups for r in g])
  cls = "f32" if dtype == dtypes.f32 else "b32"
  if vec_bytes == 2:
    halves = [h for r in ordered.regs for h in b.new(isa.UNPACK, r, type="b32")][:len(groups)]
    for i, half in enumerate(halves):
      access(i, half, {"type": "b16"})
    return
  if vec_bytes == 1:
    for i in range(len(groups)):
      word, byte = ordered.regs[i // 4], i % 4
      access(i, b.new(isa.SHR, word, 8 * byte, type="u32") if byte else word, {"type": "b8"})
    return
  words, vec = vec_bytes // 4, {4: "", 8: "v2", 16: "v4"}[vec_bytes]
  for i in range(len(groups)):
    regs = list(ordered.regs[i * words:(i + 1) * words])
    access(i, regs if vec else regs[0], {"type": cls, "vec": vec})


def stored_value(ctx: EmitContext, value: Atom, count: int) -> Elements:
  x = ctx.read(value)
  return spread(ctx.b, x, count) if x.count == 1 and count != 1 else x


def _store_shared(ctx: EmitContext, eqn: Eqn) -> None:
  ref = eqn.refs[0]
  (value,) = eqn.values
  access = SharedAccess(ctx, ref, ctx.value_layout(eqn, value) if ref.view.perm else None)
  elements = stored_value(ctx, value, access.count)
  if eqn.params["dispatch"] == "stmatrix":
    _stmatrix(ctx, access, elements)
  else:
    scatter(ctx, elements, access.groups, access.size, access.store)


def _stmatrix(ctx: EmitContext, access: SharedAccess, elements: Elements) -> None:
  rows = stmatrix_rows(access.table)
  assert rows is not None, "the selection chose stmatrix"
  trans = "trans" if is_transposed(access.table) else ""
  for g, at in enumerate(access.rows(rows)):
    ctx.b(isa.STMATRIX, at, list(elements.regs[4 * g:4 * g + 4]), num="x4", trans=trans)


# ---- global memory


def _load_global(ctx: EmitContext, eqn: Eqn) -> None:
  ref, out = eqn.refs[0], eqn.outvars[0]
  access = GlobalAccess(ctx, ref, eqn.params["guard"], ctx.layouts.get(out))
  vec_bytes, groups = access.groups(eqn.params["vec"])
  mask = ctx.read(eqn.values[0]) if eqn.values else None
  guarded = mask is not None or access.may_overhang
  fill = eqn.params["fill_value"] if guarded else None
  hints = access.cache_hints(vec_bytes)

  def load(i: int, regs, kind) -> None:
    address, pred = access.at(groups[i][0])
    pred = access.both(pred, mask_of(mask, groups[i]))
    policies.access(ctx, eqn, isa.LD_GLOBAL, regs, address, pred=pred, **hints, **kind)

  ctx.bind(out, collect(ctx, ref.type.dtype, access.count, groups, vec_bytes, load, eqn, fill))


def _store_global(ctx: EmitContext, eqn: Eqn) -> None:
  ref = eqn.refs[0]
  value, *masks = eqn.values
  access = GlobalAccess(ctx, ref, eqn.params["guard"], ctx.value_layout(eqn, value), storing=True)
  vec_bytes, groups = access.groups(eqn.params["vec"])
  mask = ctx.read(masks[0]) if masks else None

  def store(i: int, regs, kind) -> None:
    address, pred = access.at(groups[i][0])
    pred = access.both(pred, mask_of(mask, groups[i]))
    policies.access(ctx, eqn, isa.ST_GLOBAL, address, regs, pred=pred, **kind)

  scatter(ctx, stored_value(ctx, value, access.count), groups, vec_bytes, store)


def mask_of(mask: Elements | None, group: list[int]) -> Operand | None:
  if mask is None:
    return None
  if mask.count == 1:
    return mask.regs[0]
  assert len(group) == 1, "a masked access is made element by element"
  return mask.regs[group[0]]

