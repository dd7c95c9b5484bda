"""Tensor copies in the simulator and on a GPU: swizzles, edges, places off the swizzle's period, reductions."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.gpu.isa_row_kernels import CELL, memory_values, seed_of
from tests.gpu.isa_rows import THREADS, Kernel, Writer
from tests.gpu.isa_rows_test import compare
from tests.sim.tensor_map_test import BASE, load
from tiletrace.ffi.image import TensorMapSpec
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.sim.tensor_map import box, reduction

REGION = 16 * 1024               # of shared memory, for the box; the mbarrier lies behind it
_PIECE = CELL * THREADS
POISON = 0x5A5A_5A5A


@dataclasses.dataclass(frozen=True)
class Copies:
  """Copies between one tensor and shared memory.

  Attributes:
    dims, box: outermost first. swizzle: in bytes.
    places: (coordinates outermost first, shared byte offset) of each copy.
  """
  dtype: str
  dims: tuple[int, ...]
  box: tuple[int, ...]
  swizzle: int
  places: tuple[tuple[tuple[int, ...], int], ...]

  def __str__(self) -> str:
    return f"{self.dtype}-{'x'.join(map(str, self.dims))}-box{'x'.join(map(str, self.box))}-swizzle{self.swizzle}"

  def spec(self, operand: int, offset: int) -> TensorMapSpec:
    size = {"float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int64": 8, "uint64": 8}
    strides, stride = [], -(-self.dims[-1] * size[self.dtype] // 16) * 16
    for extent in self.dims[-2::-1]:
      strides.append(stride)
      stride *= extent
    return TensorMapSpec(operand, self.dtype, self.dims[::-1], tuple(strides), self.box[::-1], self.swizzle, 0, offset)

  def nbytes(self) -> int:
    spec = self.spec(0, 0)
    return (spec.strides[-1] if spec.strides else -(-spec.dims[0] * spec.itemsize // 16) * 16) * (
        spec.dims[-1] if spec.strides else 1)


INSIDE, EDGES = ((0, 0), 0), (((-3, -8), 0), ((30, 40), 1024), ((60, 104), 2048), ((5, 64), 4096))
CASES = (
    *(Copies("bfloat16", (64, 128), (16, s // 2), s, (INSIDE, *EDGES)) for s in (32, 64, 128)),
    Copies("bfloat16", (64, 128), (16, 64), 0, (INSIDE, *EDGES)),
    Copies("float32", (37, 100), (8, 32), 128, (INSIDE, ((35, 92), 1024), ((-9, 0), 2048), ((2, -4), 4096))),
    Copies("uint8", (40, 200), (8, 128), 128, (INSIDE, ((33, 144), 1024), ((0, -16), 2048), ((7, 192), 4096))),
    Copies("int64", (20, 30), (4, 8), 64, (INSIDE, ((18, 24), 512), ((-1, -2), 1024))),
    Copies("bfloat16", (1000,), (64,), 0, (((8,), 0), ((992,), 1024), ((-24,), 2048))),
    Copies("bfloat16", (5, 6, 70), (2, 3, 64), 128, (((0, 0, 0), 0), ((4, 4, 8), 1024), ((-1, 2, -8), 2048))),
    Copies("float32", (3, 4, 5, 6, 16), (2, 1, 2, 3, 4), 0, (((0, 0, 0, 0, 0), 0), ((2, 3, 4, 5, 12), 1024),
                                                             ((-1, 1, 1, -1, 4), 4096))),
    # Off the swizzle's period of 8 * span bytes: the pattern goes by the address.
    *(Copies("bfloat16", (64, 128), (16, s // 2), s, ((INSIDE[0], 128), ((3, 8), 4096 + 384), ((9, 0), 8192 + 896)))
      for s in (32, 64, 128)),
)

# Stores start inside of the tensor.


def _crosses_ragged_end(case: Copies, coords: tuple[int, ...]) -> bool:
  """Over the end of rows that end within 16 bytes."""
  spec = case.spec(1, 0)
  return bool(spec.dims[0] * spec.itemsize % 16) and coords[-1] + spec.box[0] > spec.dims[0]


STORES = tuple(dataclasses.replace(c, places=tuple(
  p for p in c.places if min(p[0]) >= 0 and not _crosses_ragged_end(c, p[0]))) for c in CASES)


class Issuer:
  """What every kernel here needs: a filled region, thread 0, an mbarrier and its phases."""

  def __init__(self, case: Copies):
    self.w = w = Writer(smem=REGION + 1024, maps=1)
    self.b = w.b
    self.case = case
    self.base = w.b.new(isa.MOV_SYMBOL, w.shared, type="u32")
    self.own = w.b.new(isa.MAD_LO, w.tid, CELL, self.base, type="u32")
    self.bar = w.b.addr(self.base, REGION)
    self.first: Reg = w.b.new(isa.SETP, w.tid, 0, cmp="eq", type="u32")
    w.b(isa.MBARRIER_INIT, self.bar, 1, pred=self.first)
    w.b(isa.FENCE_MBARRIER_INIT)
    w.b(isa.BAR_SYNC_ALL, 0)
    self.phase = 0

  def fill(self, words: np.ndarray | None) -> None:
    """Every thread writes the region: poison, or [REGION / 4] words; the async proxy then sees it."""
    self.b(isa.BAR_SYNC_ALL, 0)
    offset = 0 if words is None else self.w.data(words)
    for at in range(0, REGION, _PIECE):
      piece = [POISON] * 4 if words is None else self.b.new(
          isa.LD_GLOBAL, self.w.address("inputs", CELL, offset + at), vec="v4", type="b32")
      self.b(isa.ST_SHARED, self.b.addr(self.own, at), piece, vec="v4", type="b32")
    self.b(isa.FENCE_PROXY_ASYNC)
    self.b(isa.BAR_SYNC_ALL, 0)

  def wait(self) -> None:
    """Until the mbarrier's phase ends."""
    again = self.b.label("again")
    self.b.place(again)
    done = self.b.new(isa.MBARRIER_TRY_WAIT, self.bar, self.phase)
    self.b(isa.BRA, again, pred=done, negate=True)
    self.phase ^= 1

  def keep_shared(self, form) -> None:
    region = self.w.space(REGION)
    for at in range(0, REGION, _PIECE):
      piece = self.b.new(isa.LD_SHARED, self.b.addr(self.own, at), vec="v4", type="b32")
      self.b(isa.ST_GLOBAL, self.w.address("outputs", CELL, region + at), piece, vec="v4", type="b32")
    self.w.keep_region(form, region, REGION // (4 * THREADS))


def loads(case: Copies) -> tuple[Kernel, np.ndarray]:
  """Loads each place into a poisoned region; and the tensor's memory."""
  i = Issuer(case)
  w, b = i.w, i.b
  memory = np.random.default_rng(seed_of(str(case))).integers(1, 256, case.nbytes() + 64, dtype=np.uint8)
  map_ = w.tensor_map(case.spec(0, w.data(memory)))
  policy = b.new(isa.CREATEPOLICY, 1.0, l2="L2::evict_first")
  for n, (coords, dst) in enumerate(case.places):
    row, hint = (isa.TMA_LOAD_HINT, [policy]) if n % 2 else (isa.TMA_LOAD, [])
    form = row.form(dim=f"{len(case.dims)}d")
    i.fill(None)
    b(isa.MBARRIER_ARRIVE_EXPECT_TX, i.bar, int(np.prod(case.box)) * w.maps[0].itemsize, pred=i.first)
    b(form, b.addr(i.base, dst), map_, list(coords[::-1]), i.bar, *hint, pred=i.first)
    i.wait()
    i.keep_shared(form)
  return w.kernel(), memory


def stores(case: Copies, op: str = "") -> tuple[Kernel, int, np.ndarray, np.ndarray]:
  """Stores (or reduces) each place into one tensor; with the tensor's offset in the output, its bytes before, and
  the region [REGION] of shared memory that every copy reads."""
  i = Issuer(case)
  w, b = i.w, i.b
  name = seed_of(str(case) + op)
  type_ = {"float32": "f32", "float16": "f16x2", "bfloat16": "bf16x2"}.get(case.dtype, "b32")
  cls = "f32" if type_ == "f32" else "b32"

  def words(nbytes: int, seed: int) -> np.ndarray:
    return np.concatenate([memory_values(type_, cls, seed + k) for k in range(-(-nbytes // (4 * THREADS)))])

  total = -(-case.nbytes() // _PIECE) * _PIECE
  before, region = words(total, name), words(REGION, name + 1000)
  start, offset = w.space(total), w.data(before)
  for at in range(0, total, _PIECE):
    piece = b.new(isa.LD_GLOBAL, w.address("inputs", CELL, offset + at), vec="v4", type="b32")
    b(isa.ST_GLOBAL, w.address("outputs", CELL, start + at), piece, vec="v4", type="b32")
  map_ = w.tensor_map(case.spec(1, start))
  i.fill(region)
  row, mods = (isa.TMA_REDUCE, {"op": op}) if op else (isa.TMA_STORE, {})
  form = row.form(dim=f"{len(case.dims)}d", **mods)
  for coords, src in case.places:
    b(form, map_, list(coords[::-1]), b.addr(i.base, src), pred=i.first)
    b(isa.BULK_COMMIT, pred=i.first)
    b(isa.BULK_WAIT, 0, pred=i.first)
  w.keep_region(form, start, total // (4 * THREADS))
  return w.kernel(), start, before.view(np.uint8), region.view(np.uint8)


REDUCTIONS = [(dtype, op) for dtype, ops in (
    ("float32", "add"), ("float16", "add min max"), ("bfloat16", "add min max"), ("int32", "add min max and or xor"),
    ("uint32", "add min max"), ("uint64", "add min max xor"), ("int64", "min max")) for op in ops.split()]


def reducing(dtype: str) -> Copies:
  size = {"float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 8)
  places = INSIDE, ((15, 16 // size), 512), ((4, 128 // size - 16 // size), 1024)
  return Copies(dtype, (20, 128 // size), (8, 64 // size), 64, places)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loads_in_the_simulator_fill_what_the_tensor_map_says(case: Copies):
  kernel, memory = loads(case)
  out = kernel.simulate()
  assert kernel.assemble().image
  spec = case.spec(0, 0)
  for n, (coords, dst) in enumerate(case.places):
    # The machine's dynamic shared memory starts at a multiple of 1024, so that offsets and addresses swizzle alike.
    got = out[n * REGION:(n + 1) * REGION]
    filled = load(spec, memory, coords[::-1], dst, REGION)
    moves = box(spec, BASE, coords[::-1], dst)
    touched = np.zeros(REGION, bool)
    touched[(moves.shared[:, None] + np.arange(moves.itemsize)).reshape(-1)] = True
    assert np.array_equal(got, np.where(touched, filled, POISON & 0xFF))


@pytest.mark.parametrize("case", STORES, ids=str)
def test_stores_in_the_simulator_change_what_lies_inside_the_tensor(case: Copies):
  kernel, start, before, region = stores(case)
  out = kernel.simulate()
  assert kernel.assemble().image
  want = before.copy()
  for coords, src in case.places:
    moves = box(case.spec(1, 0), 0, coords[::-1], src, by_element=True)
    for k in range(moves.itemsize):
      want[moves.addresses[moves.inside] + k] = region[moves.shared[moves.inside] + k]
  assert np.array_equal(out[start:start + len(want)], want)


@pytest.mark.parametrize("op", ["", "add"])
@pytest.mark.parametrize("column", [1, 3, -1, 90])
def test_copies_that_start_off_16_bytes_are_found(column: int, op: str):
  """A GPU ends them with an illegal instruction."""
  case = Copies("float32", (37, 100), (8, 32), 128, (((0, column), 0),))
  with pytest.raises(AssertionError, match="misaligned: the innermost coordinate"):
    stores(case, op)[0].simulate()
  with pytest.raises(AssertionError, match="misaligned: the innermost coordinate"):
    loads(case)[0].simulate()


@pytest.mark.parametrize("op", ["", "add"])
def test_stores_across_the_end_of_rows_within_16_bytes_are_found(op: str):
  """A GPU writes the rest of the 16 bytes."""
  case = Copies("float32", (40, 50), (8, 32), 128, (((0, 32), 0),))
  with pytest.raises(AssertionError, match="misaligned: a store or reduction across the end of rows of 200 bytes"):
    stores(case, op)[0].simulate()


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reductions_in_the_simulator_combine_what_lies_inside_the_tensor(dtype: str, op: str):
  case = reducing(dtype)
  kernel, start, before, region = stores(case, op)
  out = kernel.simulate()
  assert kernel.assemble().image
  storage = "f4" if dtype == "float32" else f"u{case.spec(1, 0).itemsize}"
  want, source = before.copy().view(storage), region.view(storage)
  for coords, src in case.places:
    moves = box(case.spec(1, 0), 0, coords[::-1], src, by_element=True)
    at, taken = (x[moves.inside] // moves.itemsize for x in (moves.addresses, moves.shared))
    want[at] = reduction(dtype, op)(want[at], source[taken])
  assert np.array_equal(out[start:start + want.nbytes], want.view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loads_do_what_the_gpu_does(case: Copies):
  compare(loads(case)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("case", STORES, ids=str)
def test_stores_do_what_the_gpu_does(case: Copies):
  compare(stores(case)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reductions_do_what_the_gpu_does(dtype: str, op: str):
  compare(stores(reducing(dtype), op)[0])
