"""What each memory operation of a scheduled program becomes: instruction, width, bank wavefronts, sectors.

The tables are those that the emitter takes addresses from (lowering/tables.py), so widths and counts are the PTX's.
"""
from __future__ import annotations

import dataclasses
import math

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.graph import Eqn, RefOperand, Var
from tiletrace.core.types import Space
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.indexed import access_groups, index_columns, view_table
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import recognise_swizzle
from tiletrace.lowering.schedule.program import Program
from tiletrace.lowering.shared_views import SharedPlace, shared_place
from tiletrace.lowering.strides import offsets
from tiletrace.lowering.tables import (
  coordinates,
  inside_view,
  matrix_addresses,
  matrix_rows,
  replicated_bits,
  shared_bytes,
  stmatrix_rows,
  widest_groups,
)
from tiletrace.lowering.tma_plan import TmaPlan, tma_plan
from tiletrace.lowering.wgmma_plan import wgmma_plan
from tiletrace.report.sites import WARP, Site
from tiletrace.sim.banks import SECTOR, global_sectors, shared_wavefronts

_PORT = 128     # bytes of shared memory in a wavefront
_ROW = 16       # bytes of a row of ldmatrix and stmatrix


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
  """One side of a memory operation, once through.

  Attributes:
    buffer: its name. space: "shared" or "global". stores: whether it writes there.
    instruction: with the bytes of a thread where it has a width: "ld.shared 16", "stmatrix.x4", "TMA load".
    layout: of the fragment or, of an asynchronous copy, of the shared buffer; None for a scalar.
    elements: of one instruction, in each thread; None where no thread holds them.
    instructions: of all warps together; of TMA: boxes.
    nbytes: that it moves.
    wavefronts, least_wavefronts: cycles of shared memory, and without bank conflicts; None where it is not threads
      that access it, or of global memory.
    sectors, least_sectors: of 32 bytes in global memory, from an aligned start; None of shared memory, of TMA, and
      where indices say which.
  """
  buffer: str
  space: str
  stores: bool
  instruction: str
  layout: Layout | None
  elements: int | None
  instructions: int
  nbytes: int
  wavefronts: int | None = None
  least_wavefronts: int | None = None
  sectors: int | None = None
  least_sectors: int | None = None


class Accesses:
  """Finds the accesses of a program's equations.

  Args:
    names: of variables.
  """

  def __init__(self, program: Program, names: dict[Var, str]):
    self.layouts, self.offsets, self.names = program.layouts, program.offsets, names
    self.facts = Facts(program.graph)

  def of(self, site: Site) -> list[Access]:
    """The accesses of an equation; none where it touches no memory, or in a way that has no table."""
    eqn = site.eqn
    found = {"load": self._load, "store": self._store, "copy": self._copy, "copy_async": self._copy_async,
             "gemm_async": self._gemm, "gather": self._gather, "scatter": self._scatter,
             "gather_copy": self._gather_copy}.get(eqn.primitive.name)
    return found(eqn, site) if found is not None else []

  # ---- by operation

  def _load(self, eqn: Eqn, site: Site) -> list[Access]:
    ref, layout = eqn.refs[0], self.layouts.get(eqn.outvars[0])
    if ref.type.space is Space.SHARED:
      return [self._ldmatrix(ref, layout, site) or self._shared(ref, layout, site, "ld.shared")]
    if ref.type.space is Space.GLOBAL:
      return [self._global(ref, layout, eqn.params["vec"], site, "ld.global")]
    return []

  def _store(self, eqn: Eqn, site: Site) -> list[Access]:
    ref, value = eqn.refs[0], eqn.values[0]
    layout = self.layouts.get(value) if isinstance(value, Var) else None
    layout = layout if layout is not None else eqn.params.get("layout")
    if ref.type.space is Space.SHARED:
      layout = layout if ref.view.perm else None
      if eqn.params["dispatch"] == "stmatrix":
        assert layout is not None
        return [self._stmatrix(ref, layout, site)]
      return [self._shared(ref, layout, site, "st.shared")]
    if ref.type.space is Space.GLOBAL:
      return [self._global(ref, layout, eqn.params["vec"], site, "st.global")]
    return []

  def _copy(self, eqn: Eqn, site: Site) -> list[Access]:
    """By threads, through registers."""
    (src, dst), layout = eqn.refs, eqn.params["layout"]
    sides = []
    for ref, what in ((src, "ld"), (dst, "st")):
      if ref.type.space is Space.SHARED:
        sides.append(self._shared(ref, layout, site, f"{what}.shared"))
      else:
        sides.append(self._global(ref, layout, eqn.params["vec"], site, f"{what}.global"))
    return sides

  def _copy_async(self, eqn: Eqn, site: Site) -> list[Access]:
    src, dst = eqn.refs
    loading = src.type.space is Space.GLOBAL
    outside, inside = (src, dst) if loading else (dst, src)
    if eqn.params["dispatch"] == "tma":
      plan = tma_plan(outside, inside, self.layouts[inside.root], self.facts)
      assert isinstance(plan, TmaPlan), plan
      swizzle = recognise_swizzle(self.layouts[inside.root], inside.type.dtype.itemsize * 8)
      assert swizzle is not None
      multicast = " multicast" if eqn.params.get("multicast") else ""
      times = site.role.count if site.elected == "warpgroup" else 1
      nbytes = math.prod(inside.shape) * inside.type.dtype.itemsize * times
      does = "load" if loading else f"reduction ({eqn.params['reduce']})" if "reduce" in eqn.params else "store"
      what = f"TMA {does}{multicast}, box {'x'.join(map(str, plan.box))}, " + (
          f"{swizzle[0]}-byte swizzle" if swizzle[0] else "no swizzle")
      return [Access(self.names[outside.root], "global", not loading, what, self.layouts[inside.root], None,
                     len(plan.parts) * times, nbytes)]
    layout, vec = eqn.params["layout"], eqn.params["vec"]
    first = _first_of_groups(_flat(src, layout, site.role.threads), vec)
    return [self._global(src, layout, vec, site, "cp.async"), self._cp_async_target(dst, layout, first, vec, site)]

  # At tiles of indices it depends on data which sectors are touched.

  def _gather(self, eqn: Eqn, site: Site) -> list[Access]:
    return [self._indexed(eqn, self.layouts[eqn.outvars[0]], site, "ld.global")[0]]

  def _scatter(self, eqn: Eqn, site: Site) -> list[Access]:
    value = eqn.values[0]
    assert isinstance(value, Var)
    return [self._indexed(eqn, self.layouts[value], site, "st.global")[0]]

  def _gather_copy(self, eqn: Eqn, site: Site) -> list[Access]:
    (index, *_), dst = eqn.values, eqn.refs[1]
    assert isinstance(index, Var)
    layout, vec = self.layouts[index], eqn.params["vec"]
    if eqn.params["dispatch"] != "cp_async":
      return [self._indexed(eqn, layout, site, "ld.global")[0], self._shared(dst, layout, site, "st.shared")]
    access, first = self._indexed(eqn, layout, site, "cp.async")
    return [access, self._cp_async_target(dst, layout, first, vec, site)]

  def _indexed(self, eqn: Eqn, layout: Layout, site: Site, what: str) -> tuple[Access, list[int]]:
    """The access, and the first register of each instruction (emit/indexed_access.py)."""
    ref, vec, dims, threads = eqn.refs[0], eqn.params["vec"], eqn.params["dims"], site.role.threads
    elements, item = coordinates(layout, threads), ref.type.dtype.itemsize
    rank = len(ref.view.perm)
    at = offsets(ref, view_table(elements, rank, dims))
    groups = access_groups(elements, at, index_columns(elements.shape[2], rank, dims), vec)
    assert groups is not None, "the selection chose a width that the registers allow"
    first = [g[0] for g in groups]
    active = inside_view(elements, layout.valid)[:, first] & _acting(site)
    if what != "ld.global":
      active = active & (np.arange(threads)[:, None] & replicated_bits(elements) == 0)
    acting = _by_warp(active)
    return Access(self.names[ref.root], "global", what == "st.global", f"{what} {vec * item}, indexed", layout, vec,
                  int(acting.any(axis=1).sum()), int(active.sum()) * vec * item), first

  def _gemm(self, eqn: Eqn, site: Site) -> list[Access]:
    """What tensor cores read of shared memory: every warpgroup its rows of A and its columns of B."""
    if not eqn.params["dispatch"].startswith("wgmma"):
      return []
    plan = wgmma_plan(eqn, self.layouts[eqn.refs[-1].root], site.role.count)
    *operands, _ = eqn.refs
    out = []
    for i, ref in enumerate(operands):
      if ref.type.space is not Space.SHARED:
        continue
      rows = plan.n if i == len(operands) - 1 else 64
      count = plan.m_blocks * plan.k_steps * site.role.count
      nbytes = rows * plan.depth * ref.type.dtype.itemsize * count
      out.append(Access(self.names[ref.root], "shared", False, f"wgmma m64n{plan.n}k{plan.depth} operand "
                        f"{'B' if i == len(operands) - 1 else 'A'}", self.layouts[ref.root], None, count, nbytes))
    return out

  # ---- shared memory

  def _place(self, ref: RefOperand) -> SharedPlace:
    place = shared_place(ref, self.layouts[ref.root], self.facts)
    assert isinstance(place, SharedPlace), place
    return place

  def _start(self, ref: RefOperand, place: SharedPlace) -> int:
    """The view's first byte, its dynamic part left out: that moves all addresses alike."""
    return self.offsets[ref.root] + place.base * ref.type.dtype.itemsize

  def _shared(self, ref: RefOperand, layout: Layout | None, site: Site, what: str) -> Access:
    item, threads, place = ref.type.dtype.itemsize, site.role.threads, self._place(ref)
    if layout is None:
      table, inside = np.full((threads, 1), place.layout.offset_of(()) * item), np.ones((threads, 1), bool)
    else:
      table = shared_bytes(place, layout, threads, item)
      inside = inside_view(coordinates(layout, threads), ref.view.static_shape)
    size, groups = widest_groups(table, item, inside, place.alignment(item, self.facts))
    first = [g[0] for g in groups]
    return self._in_banks(ref, f"{what} {size}", layout, self._start(ref, place) + table[:, first], size,
                          inside[:, first] & _acting(site), size // item)

  def _stmatrix(self, ref: RefOperand, layout: Layout, site: Site) -> Access:
    place = self._place(ref)
    rows = stmatrix_rows(shared_bytes(place, layout, site.role.threads, ref.type.dtype.itemsize))
    assert rows is not None, "the selection chose stmatrix"
    return self._in_banks(ref, "stmatrix.x4", layout, self._start(ref, place) + rows, _ROW,
                          np.broadcast_to(_acting(site), rows.shape), 16 // ref.type.dtype.itemsize)

  def _ldmatrix(self, ref: RefOperand, layout: Layout | None, site: Site) -> Access | None:
    """Where emit/memory.py takes it: rows of 16 bytes that a plain load would read 4 bytes at a time."""
    item, threads, place = ref.type.dtype.itemsize, site.role.threads, self._place(ref)
    if (layout is None or site.elected is not None or ref.type.dtype == dtypes.bool_
        or place.alignment(item, self.facts) % _ROW):
      return None
    table = shared_bytes(place, layout, threads, item)
    inside = inside_view(coordinates(layout, threads), ref.view.static_shape)
    size, _ = widest_groups(table, item, inside, place.alignment(item, self.facts))
    if size > 4 or not inside.all():
      return None
    for trans in (False, True):
      starts = matrix_rows(table, item, trans=trans)
      if starts is not None:
        num = next(n for n in (4, 2, 1) if starts.shape[2] % n == 0)
        rows = self._start(ref, place) + matrix_addresses(starts, num)
        naming = np.broadcast_to(np.arange(threads)[:, None] % WARP < 8 * num, rows.shape)
        return self._in_banks(ref, f"ldmatrix.x{num}{'.trans' if trans else ''}", layout, rows, _ROW, naming,
                              4 * num // item)
    return None

  def _cp_async_target(self, dst: RefOperand, layout: Layout, first: list[int], vec: int, site: Site) -> Access:
    item, place = dst.type.dtype.itemsize, self._place(dst)
    table = shared_bytes(place, layout, site.role.threads, item)
    return self._in_banks(dst, f"cp.async {vec * item}", layout, self._start(dst, place) + table[:, first], vec * item,
                          self._storing(dst, layout, first, site), vec)

  def _in_banks(self, ref: RefOperand, instruction: str, layout: Layout | None, addresses: np.ndarray, size: int,
                active: np.ndarray, elements: int) -> Access:
    by_warp, acting = _by_warp(addresses), _by_warp(active)
    by_warp, acting = by_warp[acting.any(axis=1)], acting[acting.any(axis=1)]
    waves = shared_wavefronts(by_warp, size, acting, loads=instruction.startswith("ld.shared"))
    nbytes = acting.sum(axis=1) * size
    least = np.minimum(np.maximum(1, -(-nbytes // _PORT)), waves)
    return Access(self.names[ref.root], "shared", not instruction.startswith("ld"), instruction, layout, elements,
                  len(by_warp), int(nbytes.sum()), int(waves.sum()), int(least.sum()))

  # ---- global memory

  def _global(self, ref: RefOperand, layout: Layout | None, vec: int, site: Site, what: str) -> Access:
    item, threads = ref.type.dtype.itemsize, site.role.threads
    flat = _flat(ref, layout, threads)
    first = _first_of_groups(flat, vec)
    if what == "ld.global":
      table = coordinates(layout, threads) if layout is not None else np.zeros((threads, 1, 0), np.int64)
      active = inside_view(table, ref.view.static_shape)[:, first] & _acting(site)
    else:
      active = self._storing(ref, layout, first, site)
    by_warp, acting = _by_warp(flat[:, first]), _by_warp(active)
    by_warp, acting = by_warp[acting.any(axis=1)], acting[acting.any(axis=1)]
    sectors = global_sectors(by_warp, vec * item, acting)
    nbytes = acting.sum(axis=1) * vec * item
    least = np.minimum(-(-nbytes // SECTOR), sectors)
    return Access(self.names[ref.root], "global", what == "st.global", f"{what} {vec * item}", layout, vec,
                  len(by_warp), int(nbytes.sum()), sectors=int(sectors.sum()), least_sectors=int(least.sum()))

  def _storing(self, ref: RefOperand, layout: Layout | None, first: list[int], site: Site) -> np.ndarray:
    """[threads, accesses]: of the threads that hold copies of an element one acts, and none for padding."""
    threads = site.role.threads
    if layout is None:
      only = np.zeros((threads, 1), bool)
      only[0] = True
      return only
    table = coordinates(layout, threads)
    active = inside_view(table, ref.view.static_shape)[:, first] & _acting(site)
    copies = 0 if site.elected else replicated_bits(table)
    return active & (np.arange(threads)[:, None] & copies == 0)


def _flat(ref: RefOperand, layout: Layout | None, threads: int) -> np.ndarray:
  """Bytes of each (thread, register) from the view's start in global memory."""
  if layout is None:
    return np.zeros((threads, 1), np.int64)
  return _offsets(ref, coordinates(layout, threads))


def _offsets(ref: RefOperand, table: np.ndarray) -> np.ndarray:
  """Bytes from a view's start of its elements `table` [threads, registers, rank]."""
  item, shape, table = ref.type.dtype.itemsize, ref.type.shape, table.astype(np.int64)
  scale = [ref.view.dims[p].stride * math.prod(shape[p + 1:]) * item for p in ref.view.perm]
  return (table * np.asarray(scale, np.int64)).sum(-1) if scale else np.zeros(table.shape[:2], np.int64)


def _first_of_groups(flat: np.ndarray, vec: int) -> list[int]:
  """The first register of each access of `vec` elements, as emit/global_access.py groups them."""
  return np.argsort(flat[0] - flat[0, 0], kind="stable").reshape(-1, vec)[:, 0].tolist()


def _acting(site: Site) -> np.ndarray:
  """[threads, 1]: which threads of the role run the equation."""
  thread = np.arange(site.role.threads)[:, None]
  if site.elected == "scope":
    return thread == 0
  return thread % 128 == 0 if site.elected == "warpgroup" else thread >= 0


def _by_warp(table: np.ndarray) -> np.ndarray:
  """[threads, n] as [warps * n, 32]."""
  threads, n = table.shape
  return np.moveaxis(table.reshape(threads // WARP, WARP, n), 1, 2).reshape(-1, WARP)
