from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tiletrace.lowering.layouts.address import (
  address_map,
  address_refusal,
  matrix_plan,
  matrix_x,
  vector_width,
  wavefronts,
)
from tiletrace.lowering.layouts.catalog import matrix_addresses, matrix_fragment, wgmma_accumulator
from tiletrace.lowering.layouts.fragment import blocked
from tiletrace.lowering.layouts.normal import Outer, pack
from tiletrace.lowering.layouts.relation import Layout, build
from tiletrace.lowering.layouts.shared import SWIZZLES, shared_layout

AXES = ("reg", "lane", "warp")


@st.composite
def fragments(draw) -> Layout:
  """A random fragment of 64 x 64 (or 64 x 192): bits dealt at random, low column bits often in registers, copies."""
  rng = random.Random(draw(st.integers(0, 2**31)))
  bits = [(0, 1 << i) for i in range(6)] + [(1 << i, 0) for i in range(6)]
  rng.shuffle(bits)
  low = [(0, 1 << i) for i in range(rng.randrange(4))]
  bits = low + [b for b in bits if b not in low]
  lane = rng.randrange(len(low), 8)
  core = {"reg": bits[:lane], "lane": bits[lane:lane + 5], "warp": bits[lane + 5:]}
  core["lane"] += [(0, 0)] * (5 - len(core["lane"]))
  outers = [Outer("reg", 1 << lane, 3, 1, 64)] if rng.random() < 0.3 else []
  return build((64, 192 if outers else 64), {a: [pack(b) for b in c] for a, c in core.items()}, outers)


tiles = st.tuples(st.sampled_from([8, 16, 32]), st.sampled_from(SWIZZLES), st.booleans())


def tile(shape: tuple[int, int], spec: tuple[int, int, bool]) -> Layout:
  bits, swizzle, row_major = spec
  return shared_layout(shape, bits, swizzle, order=(1, 0) if row_major else (0, 1))


def offsets(frag: Layout, shared: Layout) -> np.ndarray:
  """Offsets [reg, lane, warp] by the definition."""
  return shared.coordinates("off", np.moveaxis(frag.table(AXES), -1, 0))


@settings(max_examples=60, deadline=None)
@given(fragments(), tiles)
def test_address_map_is_the_composition_at_every_point(frag, spec):
  shared = tile(frag.shape, spec)
  amap = address_map(frag, shared)
  expected = offsets(frag, shared)
  parts = np.array([[amap.thread_part(lane=l, warp=w) for w in range(expected.shape[2])] for l in range(32)])

  for reg, (xor, add) in enumerate(amap.split()):
    assert np.array_equal((parts ^ xor) + add, expected[reg])
    assert add % amap.span & amap.thread_mask == 0


@pytest.mark.parametrize(("frag", "shape", "swizzle"), [
  (wgmma_accumulator(192, 96, 3), (192, 96), 64), (wgmma_accumulator(192, 256, 3), (192, 256), 128),
  (wgmma_accumulator(64, 528, 3, "n"), (64, 528), 32), (wgmma_accumulator(320, 24, 5), (320, 24), 0),
  (wgmma_accumulator(64, 176), (64, 176), 32), (blocked((96, 96), 16, 12), (96, 96), 64),
  (blocked((7, 33), 16, 4), (7, 33), 0), (blocked((100, 229), 16, 4), (100, 229), 128)], ids=str)
def test_odd_extents_and_warp_counts_have_exact_addresses(frag, shape, swizzle):
  shared = shared_layout(shape, 16, swizzle)
  amap = address_map(frag, shared)
  table = frag.table(AXES)

  valid = (table < np.array(frag.valid)).all(-1)
  for reg, lane, warp in np.argwhere(valid)[::37]:
    index = tuple(table[reg, lane, warp])
    assert amap.offset(int(reg), lane=int(lane), warp=int(warp)) == shared.offset_of(index)


def test_a_fragment_can_be_addressed_inside_a_larger_tile():
  frag, shared = wgmma_accumulator(64, 64), shared_layout((3, 128, 256), 16, 128)
  amap = address_map(frag, shared, at=(2, 64, 128), dims=(1, 2))

  for reg, lane, warp in [(0, 0, 0), (9, 17, 3), (31, 31, 2)]:
    i, j = frag.apply(reg=reg, lane=lane, warp=warp)
    assert amap.offset(reg, lane=lane, warp=warp) == shared.offset_of((2, 64 + i, 128 + j))


def test_registers_of_an_accumulator_share_eight_address_registers():
  amap = address_map(wgmma_accumulator(128, 256, 2), shared_layout((128, 256), 16, 128))

  assert sorted({xor for xor, _ in amap.split()}) == [8 * i for i in range(8)]
  assert not amap.thread_outers


@settings(max_examples=100, deadline=None)
@given(fragments(), tiles)
def test_vector_width_is_the_widest_aligned_run(frag, spec):
  bits = spec[0]
  shared = tile(frag.shape, spec)
  held = offsets(frag, shared)

  threads = held.reshape(len(held), -1)
  order = np.argsort(threads, axis=0)
  ascending = np.take_along_axis(threads, order, axis=0)

  def fits(vec: int) -> bool:
    if len(held) % vec:
      return False
    runs = ascending.reshape(-1, vec, threads.shape[1])
    if not (runs == runs[:, :1] + np.arange(vec)[:, None]).all() or (runs[:, 0] % vec).any():
      return False
    # one instruction serves a warp: the same registers in the same order in every thread
    return len({frozenset(map(tuple, o.reshape(-1, vec).tolist())) for o in order.T}) == 1

  widest = max(v for v in (1, 2, 4, 8, 16) if v * bits <= 128 and fits(v))
  amap = address_map(frag, shared)
  assert vector_width(amap, bits) == widest
  for group in amap.vectors(widest):
    run = held[list(group)]
    assert (run == run[0] + np.arange(widest)[:, None, None]).all() and (run[0] % widest == 0).all()


@settings(max_examples=150, deadline=None)
@given(fragments(), tiles)
def test_wavefronts_equal_counting_words_in_banks(frag, spec):
  bits = spec[0]
  shared = tile(frag.shape, spec)
  amap = address_map(frag, shared)
  vec = vector_width(amap, bits)
  width = vec * bits // 8
  lanes = {16: 8, 8: 16}.get(width, 32)
  held = offsets(frag, shared)

  for reg in (group[0] for group in amap.vectors(vec)[:4]):
    for warp in range(held.shape[2]):
      total = 0
      for phase in range(0, 32, lanes):
        words = {(int(o) * bits // 8 + b) // 4 for o in held[reg, phase:phase + lanes, warp] for b in range(width)}
        total += max(sum(w % 32 == bank for w in words) for bank in range(32))
      assert wavefronts(amap, vec, bits) == total


@pytest.mark.parametrize(("swizzle", "cycles"), [(0, 8), (32, 1), (64, 1), (128, 1)])
def test_conflicts_of_an_accumulator_in_each_swizzle(swizzle, cycles):
  amap = address_map(wgmma_accumulator(64, 64), shared_layout((64, 64), 16, swizzle))
  plan = matrix_plan(amap, 16)

  assert wavefronts(amap, 2, 16) == cycles
  assert plan is not None and plan.x == 4 and plan.wavefronts(16) == 4 * cycles


def stmatrix(memory: dict[int, object], values: np.ndarray, plan, warp: int, bits: int, load: bool) -> None:
  """Runs the plan's instructions by the ISA's words: lane 8m + r names row r of matrix m; see `matrix_fragment`."""
  unit, row = 32 // bits, 128 // bits
  frag, rows = matrix_fragment(plan.x, trans=plan.trans), matrix_addresses(plan.x)
  for i, group in enumerate(plan.groups):
    base = {rows.apply(lane=l): plan.address.offset(i, lane=l, warp=warp) for l in range(8 * plan.x)}
    assert all(b % row == 0 for b in base.values())
    for lane in range(32):
      for m, word in enumerate(group):
        for e, reg in enumerate(word):
          if plan.trans:
            _, r, c = frag.apply(reg=2 * m + e, lane=lane)
            at = base[m, r] + c
          else:
            at = base[m, lane // 4] + unit * (lane % 4) + e
          if load:
            values[reg, lane, warp] = memory[at]
          else:
            memory[at] = values[reg, lane, warp]


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize(("m", "n", "warpgroups", "x"), [
  (64, 64, 1, 4), (192, 96, 3, 4), (64, 24, 1, 2), (64, 176, 1, 4), (64, 8, 1, 2)])
def test_stmatrix_plan_writes_each_element_to_its_offset(bits, swizzle, m, n, warpgroups, x):
  frag = wgmma_accumulator(m, n, warpgroups)
  shared = shared_layout((m, n), bits, swizzle)
  amap = address_map(frag, shared)
  if bits != 16:                  # the accumulator pairs columns: that is a 32-bit word of 16-bit elements only
    assert matrix_x(amap, bits) == 0
    return
  plan = matrix_plan(amap, bits)
  assert plan is not None and plan.x == x == matrix_x(amap, bits)
  held = offsets(frag, shared)
  memory: dict[int, object] = {}
  values = np.random.default_rng(n).permutation(held.size).reshape(held.shape)
  for warp in range(held.shape[2]):
    stmatrix(memory, values, plan, warp, bits, load=False)

  assert memory == dict(zip(held.ravel().tolist(), values.ravel().tolist()))


@pytest.mark.parametrize(("bits", "k"), [(8, 64), (32, 32), (16, 64)])
def test_ldmatrix_plan_reads_a_fragments_of_every_width(bits, k):
  from_isa = {8: 4, 16: 2, 32: 1}[bits]
  frag = build((64, k), {
    "reg": [pack((0, 1 << i)) for i in range(from_isa.bit_length() - 1)] + [pack((8, 0))] + [
      pack((0, 4 * from_isa << i)) for i in range((k // (4 * from_isa)).bit_length() - 1)],
    "lane": [pack((0, from_isa)), pack((0, 2 * from_isa)), *(pack((1 << i, 0)) for i in range(3))],
    "warp": [pack((16, 0)), pack((32, 0))]})
  shared = shared_layout((64, k), bits, 64)
  plan = matrix_plan(address_map(frag, shared), bits)

  assert plan is not None and plan.x == 4
  held = offsets(frag, shared)
  memory = {o: 7 * o + 1 for o in range(shared.extent("off"))}
  values = np.zeros(held.shape, np.int64)
  for warp in range(4):
    stmatrix(memory, values, plan, warp, bits, load=True)
  assert np.array_equal(values, 7 * held + 1)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("n", [64, 192])
def test_transposed_stmatrix_plan_writes_a_column_major_tile(swizzle, n):
  frag = wgmma_accumulator(64, n)
  shared = shared_layout((64, n), 16, swizzle, order=(0, 1))
  amap = address_map(frag, shared)
  plan = matrix_plan(amap, 16, trans=True)

  assert matrix_x(amap, 16) == 0
  assert plan is not None and plan.x == 4
  held = offsets(frag, shared)
  memory: dict[int, object] = {}
  values = np.random.default_rng(3).permutation(held.size).reshape(held.shape)
  for warp in range(4):
    stmatrix(memory, values, plan, warp, 16, load=False)
  assert memory == dict(zip(held.ravel().tolist(), values.ravel().tolist()))


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([32, 64, 128]), st.booleans())
def test_any_deal_of_the_outer_bits_gives_a_right_matrix_plan(rng, swizzle, trans):
  rest = [(0, 8 << i) for i in range(3)] + [(1 << i, 0) for i in range(3, 6)]
  rng.shuffle(rest)
  inner, rows = [(0, 1), (0, 2), (0, 4)], [(1, 0), (2, 0), (4, 0)]
  word, lanes = (inner[0], inner[1:] + rows) if not trans else (rows[0], rows[1:] + inner)
  frag = build((64, 64), {"reg": [pack(b) for b in (word, *rest[:4])], "lane": [pack(b) for b in lanes],
                          "warp": [pack(b) for b in rest[4:]]})
  shared = shared_layout((64, 64), 16, swizzle)
  plan = matrix_plan(address_map(frag, shared), 16, trans)

  assert plan is not None and plan.x == 4
  held = offsets(frag, shared)
  memory: dict[int, object] = {}
  for warp in range(held.shape[2]):
    stmatrix(memory, held, plan, warp, 16, load=False)
  assert len(memory) == 64 * 64
  assert all(at == value for at, value in memory.items())


def test_an_address_that_is_not_affine_is_declined_with_the_reason():
  frag = blocked((100, 229), 16, 12)                  # rows warp + 12*reg, which the swizzle takes modulo eight
  shared = shared_layout((100, 229), 16, 128)

  assert "not affine" in str(address_refusal(frag, shared))
  assert address_refusal(wgmma_accumulator(64, 64), shared_layout((64, 64), 16, 128)) is None


def test_a_fragment_of_another_shape_has_no_matrix_plan():
  assert matrix_x(address_map(blocked((64, 64), 16, 4), shared_layout((64, 64), 16, 128)), 16) == 0
