"""Stores of accumulators through shared memory: chunks of columns, stmatrix, TMA, while the next tile loads."""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import Block, Eqn, RefOperand, Var
from tiletrace.core.ops import grid, memory, shape as shape_ops
from tiletrace.core.types import Dyn, Space, View, ViewDim
from tiletrace.lowering.infer.shape import chunk_layout, cut_registers
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.schedule.builder import Builder, eviction
from tiletrace.lowering.shared_views import stack

COLUMNS = 64  # of a chunk: 128 bytes of 16-bit elements, one row of the swizzle


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Staging:
  """The buffer through which tiles of one shape leave: `chunks` of [rows, 64]; `by_columns`: one of each warpgroup."""
  buffer: Var
  rows: int
  chunks: int
  by_columns: bool = False


def staged_stores(block: Block) -> list[Eqn]:
  out = []
  for eqn in block.eqns:
    if eqn.primitive is memory.store_p and eqn.params.get("dispatch") == "tma":
      out.append(eqn)
    for inner in eqn.blocks:
      out += staged_stores(inner)
  return out


def make_staging(b: Builder, store: Eqn, chunks: int, layouts: dict[Var, Layout], rows: int | None = None) -> Staging:
  """`rows`: of the tile, that leave at a time; all by default."""
  rows = store.refs[0].shape[0] if rows is None else rows
  dtype = store.refs[0].type.dtype
  buffer = b.alloc(Space.SHARED, (chunks, rows, COLUMNS), dtype, "staging", memory.Swizzle(128))
  layouts[buffer] = stack(shared_layout((rows, COLUMNS), dtype.itemsize * 8, 128), chunks, dtype.itemsize * 8)
  return Staging(buffer, rows, chunks, store.params["by_columns"])


def can_leave_apart(store: Eqn, rows: int, layouts: dict[Var, Layout]) -> bool:
  """Whether every `rows` rows of what is stored by columns are whole registers of each thread: all 8 of a matrix that
  stmatrix stores, at least."""
  value = store.values[0]
  assert isinstance(value, Var)
  return rows % 8 == 0 and cut_registers(layouts[value], (0, 0), (rows, value.shape[1])) is not None


def expand_store(store: Eqn, staging: Staging, warpgroups: int, layouts: dict[Var, Layout]) -> list[Eqn]:
  """The store in level-0 form.

  Each warpgroup stages and sends its own rows: waits until its earlier stores have been read, writes a few chunks,
  makes them visible to the asynchronous proxy, and one of its threads starts the stores.
  """
  b = Builder(store.loc)
  ref, value = store.refs[0], store.values[0]
  assert isinstance(value, Var)
  if staging.by_columns:
    _by_columns(b, store, value, staging, layouts)
    return b.eqns
  rows, columns = ref.shape
  band = rows // warpgroups
  for first in range(0, columns, COLUMNS * staging.chunks):
    count = min(staging.chunks, (columns - first) // COLUMNS)
    _wait_until_read(b)
    for c in range(count):
      part = _columns(b, value, first + c * COLUMNS, layouts)
      b.store(RefOperand(staging.buffer, _chunk(staging, c), ()), part, dispatch="stmatrix")
    b.fence()
    b.sync("warpgroup")
    send = b.inner()
    row: list = []
    if warpgroups > 1:
      wg = b.bind(grid.warpgroup_id_p, (), {})[0]
      row = [b.mul(wg, band)]
    for c in range(count):
      _send(send, store, staging, c, first + c * COLUMNS, row, band)
    send.bind(memory.commit_group_p, (), {"kind": "bulk"})
    b.elect(send.block(), "warpgroup")
  return b.eqns


def _by_columns(b: Builder, store: Eqn, value: Var, staging: Staging, layouts: dict[Var, Layout]) -> None:
  """Some rows at a time, each warpgroup its own chunk of columns."""
  ref = store.refs[0]
  (rows, columns), buffer, step = ref.shape, staging.buffer, staging.rows
  for first in range(0, rows, step):
    _wait_until_read(b)
    part = _slice(b, value, (first, 0), (first + step, columns), layouts)
    split = b.bind(shape_ops.reshape_p, (part,), {"shape": (step, staging.chunks, COLUMNS)})[0]
    chunks = b.bind(shape_ops.transpose_p, (split,), {"permutation": (1, 0, 2)})[0]
    layout = chunk_layout(layouts[part], staging.chunks)
    assert layout is not None, "the selection found it"
    layouts[chunks], layouts[split] = layout, layout.permute((1, 0, 2))
    whole = View(tuple(ViewDim(0, n) for n in (staging.chunks, step, COLUMNS)), (0, 1, 2))
    b.store(RefOperand(buffer, whole, ()), chunks, dispatch="stmatrix")
    b.fence()
    b.sync("warpgroup")
    send = b.inner()
    wg = b.bind(grid.warpgroup_id_p, (), {})[0]
    source = View((ViewDim(Dyn(0), 1, squeezed=True), ViewDim(0, step), ViewDim(0, COLUMNS)), (1, 2))
    target = send.part(ref, ((first, step), (b.mul(wg, COLUMNS), COLUMNS)))
    send.copy_async(RefOperand(buffer, source, (wg,)), target, None, **eviction(store))
    send.bind(memory.commit_group_p, (), {"kind": "bulk"})
    b.elect(send.block(), "warpgroup")


def _wait_until_read(b: Builder) -> None:
  """What the warpgroup stored before has left its part of the staging buffer."""
  drain = b.inner()
  drain.bind(memory.wait_group_p, (), {"kind": "bulk", "n": 0, "read": True})
  b.elect(drain.block(), "warpgroup")
  b.sync("warpgroup")


def drain_stores(b: Builder) -> None:
  """Before the CTA ends its shared memory must have been read."""
  inner = b.inner()
  inner.bind(memory.wait_group_p, (), {"kind": "bulk", "n": 0, "read": True})
  b.elect(inner.block(), "warpgroup")


def _columns(b: Builder, value: Var, start: int, layouts: dict[Var, Layout]) -> Var:
  rows = value.type.shape[0]  # type: ignore[union-attr]
  return _slice(b, value, (0, start), (rows, start + COLUMNS), layouts)


def _slice(b: Builder, value: Var, lo: tuple[int, int], hi: tuple[int, int], layouts: dict[Var, Layout]) -> Var:
  part = b.bind(shape_ops.slice_p, (value,), {"start": lo, "limit": hi, "strides": (1, 1)})[0]
  layout = cut_registers(layouts[value], lo, hi)
  assert layout is not None, "64 columns, or all rows of 8, are whole registers of an accumulator"
  layouts[part] = layout
  return part


def _chunk(staging: Staging, c: int) -> View:
  return View((ViewDim(c, 1, squeezed=True), ViewDim(0, staging.rows), ViewDim(0, COLUMNS)), (1, 2))


def _send(b: Builder, store: Eqn, staging: Staging, c: int, column: int, row: list, band: int) -> None:
  """One chunk of this warpgroup's rows: shared [band, 64] to global."""
  source_dims = (ViewDim(c, 1, squeezed=True), ViewDim(Dyn(0) if row else 0, band), ViewDim(0, COLUMNS))
  source = RefOperand(staging.buffer, View(source_dims, (1, 2)), tuple(row))
  target = b.part(store.refs[0], ((row[0] if row else 0, band), (column, COLUMNS)))
  b.copy_async(source, target, None, **eviction(store))
