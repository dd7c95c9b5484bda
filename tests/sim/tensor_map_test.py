"""Boxes of tensor copies against slices of arrays and against the layouts that the compiler believes in."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tiletrace.ffi.image import TensorMapSpec
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.layouts.tma import tma_boxes
from tiletrace.sim.tensor_map import box, reduction, refusal, shape_refusal, start_refusal

BASE = 0x7F00_0000_1000
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}


def make(shape: tuple[int, ...], box_shape: tuple[int, ...], size: int, swizzle: int = 0, pitch: int = 0,
         offset_bytes: int = 0) -> tuple[TensorMapSpec, np.ndarray]:
  """A map of an array [..., columns], rows `pitch` bytes longer than needed, and its memory of random bytes."""
  strides, stride = [], -(-(shape[-1] * size) // 16) * 16 + pitch
  for extent in shape[-2::-1]:
    strides.append(stride)
    stride *= extent
  spec = TensorMapSpec(0, DTYPES[size], shape[::-1], tuple(strides), box_shape[::-1], swizzle, 0, offset_bytes)
  return spec, np.random.default_rng(size).integers(1, 256, stride + offset_bytes, dtype=np.uint8)


def load(spec: TensorMapSpec, memory: np.ndarray, coords: tuple[int, ...], dst: int, n: int, **kwargs) -> np.ndarray:
  """[n] bytes of shared memory after a load into poison."""
  moves = box(spec, BASE, coords, dst, **kwargs)
  shared = np.full(n, 0xA5, np.uint8)
  for k in range(moves.itemsize):
    source = np.where(moves.inside, moves.addresses - BASE + k, 0)
    shared[moves.shared + k] = np.where(moves.inside, memory[source], 0)
  assert (moves.shared % moves.itemsize == 0).all() and (moves.addresses % moves.itemsize == 0).all()
  assert len(moves.shared) * moves.itemsize == moves.nbytes
  return shared


def element(spec: TensorMapSpec, memory: np.ndarray, index: tuple[int, ...]) -> bytes:
  """The bytes of an element, innermost index first; zeros outside."""
  if not all(0 <= i < d for i, d in zip(index, spec.dims)):
    return bytes(spec.itemsize)
  at = spec.offset_bytes + index[0] * spec.itemsize + sum(i * s for i, s in zip(index[1:], spec.strides))
  return memory[at:at + spec.itemsize].tobytes()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@given(data=st.data())
def test_every_element_of_a_box_comes_from_its_place_or_is_zero(size, data):
  rank = data.draw(st.integers(1, 5))
  shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=rank - 1, max_size=rank - 1))) + (
      data.draw(st.integers(1, 40)),)
  extents = tuple(data.draw(st.lists(st.integers(1, 4), min_size=rank - 1, max_size=rank - 1))) + (
      data.draw(st.integers(1, 2)) * 16 // size,)
  spec, memory = make(shape, extents, size, 0, data.draw(st.sampled_from([0, 16])), data.draw(st.sampled_from([0, 32])))
  coords = tuple(data.draw(st.integers(-5, d + 3)) for d in spec.dims)
  shared = load(spec, memory, coords, 128, 128 + 8192 + 64)

  at = 128
  for index in np.ndindex(extents):
    inner_first = tuple(c + i for c, i in zip(coords, index[::-1]))
    assert shared[at:at + size].tobytes() == element(spec, memory, inner_first), inner_first
    at += size
  assert (shared[at:] == 0xA5).all()


@pytest.mark.parametrize("by_element", [False, True])
def test_entries_are_whole_16_bytes_unless_the_tensor_ends_within(by_element):
  spec, _ = make((20, 60), (8, 32), 2)
  assert box(spec, BASE, (0, 0), 0, by_element=by_element).itemsize == (2 if by_element else 16)
  assert box(spec, BASE, (32, 0), 0, by_element=by_element).itemsize == (2 if by_element else 8)     # 28 are inside
  assert box(spec, BASE, (3, 0), 0, by_element=by_element).itemsize == 2
  assert box(spec, BASE, (-8, 15), 0).inside.sum() == 5 * 3


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rows", [64, 176])
def test_the_boxes_of_a_layout_leave_every_element_where_the_layout_says(bits, swizzle, rows):
  size = bits // 8
  columns = 256 // size
  layout = shared_layout((rows, columns), bits, swizzle, block_bytes=None if swizzle else 64)
  spec, memory = make((rows + 8, columns), (1, 16 // size), size)
  start = 3 * 1024
  shared = np.full(start + layout.extent("off") * size + 1024, 0xA5, np.uint8)
  for part in tma_boxes(layout, bits, (1, 0)):
    spec = TensorMapSpec(0, DTYPES[size], spec.dims, spec.strides, part.box_shape[::-1], swizzle, 0)
    coords = (part.offset[1], part.offset[0] + 4)
    got = load(spec, memory, coords, start + part.smem_offset * size, len(shared))
    shared = np.where(got == 0xA5, shared, got)

  array = memory[4 * spec.strides[0]:][:rows * spec.strides[0]].reshape(rows, -1)[:, :columns * size].copy()
  array = array.view(f"u{size}")
  stored = shared[start:start + layout.extent("off") * size].view(f"u{size}")
  offsets = layout.coordinates("off", np.ogrid[:rows, :columns])
  assert np.array_equal(stored[offsets], array)


@pytest.mark.parametrize("span", [32, 64, 128])
def test_the_swizzle_follows_absolute_addresses(span):
  """A box that starts 128 bytes into the pattern continues it; the XOR is told in 16-byte pieces here."""
  spec, memory = make((8, span // 2), (8, span // 2), 2, span)
  plain, _ = make((8, span // 2), (8, span // 2), 2)
  for dst in (0, 128, 896, 1024 + 256):
    want = load(plain, memory, (0, 0), dst, 4096).reshape(-1, 16)
    moved = np.empty_like(want)
    for piece in range(len(want)):
      moved[piece ^ (piece >> 3 & span // 16 - 1)] = want[piece]
    assert np.array_equal(load(spec, memory, (0, 0), dst, 4096), moved.reshape(-1))


def test_stores_start_inside_the_tensor():
  spec = TensorMapSpec(0, "bfloat16", (256, 8), (512,), (16, 8), 0, 0)
  assert start_refusal(spec, (-8, -1)) is None and start_refusal(spec, (0, 0), storing=True) is None
  assert all("before the tensor" in str(start_refusal(spec, at, storing=True)) for at in ((-8, 0), (0, -1)))


def test_stores_do_not_cross_the_end_of_rows_within_16_bytes():
  """An H200 wrote the rest of the 16 bytes."""
  spec = TensorMapSpec(0, "bfloat16", (70, 8), (144,), (16, 8), 0, 0)
  assert start_refusal(spec, (48, 0), storing=True) is None and start_refusal(spec, (64, 0)) is None
  assert "written whole" in str(start_refusal(spec, (64, 0), storing=True))


def test_rows_narrower_than_the_swizzle_are_refused():
  def reason(columns, swizzle):
    return shape_refusal(TensorMapSpec(0, "bfloat16", (256, 8), (512,), (columns, 8), swizzle, 0))

  assert reason(64, 128) is None and reason(32, 0) is None
  assert "the box is 64 bytes wide" in str(reason(32, 128))


def test_misplaced_copies_are_refused():
  spec, _ = make((8, 32), (8, 32), 2, 64)
  assert refusal(BASE, spec, 256) is None
  assert "no multiple of 128" in str(refusal(BASE, spec, 64))
  assert "no multiple of 16" in str(refusal(BASE + 8, spec, 0))


@pytest.mark.parametrize(("dtype", "column", "taken"), [
  ("float32", 4, True), ("float32", -4, True), ("float32", 3, False), ("bfloat16", 8, True), ("bfloat16", 100, False),
  ("uint8", 32, True), ("uint8", 40, False), ("int64", -1, False), ("int64", 2, True)])
def test_copies_start_at_multiples_of_16_bytes_along_the_innermost_dimension(dtype, column, taken):
  spec = TensorMapSpec(0, dtype, (256, 8), (2048,), (16, 8), 0, 0)
  reason = start_refusal(spec, (column, 5))
  assert reason is None if taken else "no multiple of 16" in str(reason)


@pytest.mark.parametrize(("dtype", "op", "old", "new", "want"), [
    ("float32", "add", [1.5], [2.0], [3.5]), ("int32", "min", [-1], [1], [-1]), ("uint32", "xor", [6], [3], [5]),
    ("uint32", "min", [0xFFFF_FFFF], [1], [1]), ("int64", "max", [-5], [-6], [-5])])
def test_reductions_combine_elements(dtype, op, old, new, want):
  storage = dtype if dtype[0] == "f" else f"u{np.dtype(dtype).itemsize}"
  got = reduction(dtype, op)(*(np.array(x, dtype).view(storage) for x in (old, new)))
  assert got.view(dtype).tolist() == want


@pytest.mark.parametrize(("dtype", "op"), [("float32", "min"), ("uint8", "add"), ("float16", "xor"), ("int64", "add")])
def test_reductions_that_the_isa_lacks_are_refused(dtype, op):
  with pytest.raises(ValueError, match=f"reduces {dtype} by {op}"):
    reduction(dtype, op)
