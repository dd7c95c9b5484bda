from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tiletrace.lowering.layouts.catalog import wgmma_accumulator
from tiletrace.lowering.layouts.fragment import blocked, drop_copies, fragment_view, reduction, row_of, thread_partials
from tiletrace.lowering.layouts.normal import REPLICA
from tiletrace.lowering.layouts.relation import Layout

AXES = ("reg", "lane", "warp")
ODD = [(7,), (33,), (96,), (100,), (229,), (1000,), (), (1,), (7, 33), (64, 96), (100, 229), (3, 1000), (64, 1),
       (2, 3, 5), (176, 24), (96, 80)]


def indices(layout: Layout) -> list[tuple[int, ...]]:
  table = layout.table(AXES)
  return [tuple(int(v) for v in table[p]) for p in np.ndindex(*table.shape[:-1])]


@pytest.mark.parametrize("shape", ODD)
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("warps", [1, 4, 12])
def test_blocked_holds_every_valid_element_as_often_as_its_copies_say(shape, bits, warps):
  layout = blocked(shape, bits, warps)
  counts = Counter(indices(layout))

  assert layout.valid == shape
  assert all(h >= v for h, v in zip(layout.shape, shape))
  assert layout.extent("lane") == 32 and layout.extent("warp") == warps
  assert all(counts[x] == layout.kernel().size for x in np.ndindex(*shape))
  assert layout.is_surjective()


@pytest.mark.parametrize("shape", ODD)
def test_blocked_copies_only_across_threads(shape):
  layout = blocked(shape, 16, 4)
  assert drop_copies(layout)[0] == layout


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=3), st.sampled_from([8, 16, 32]),
       st.sampled_from([1, 2, 4, 8, 12]), st.randoms(use_true_random=False))
def test_blocked_pads_a_dimension_to_less_than_twice_what_it_or_the_threads_need(shape, bits, warps, rng):
  order = list(range(len(shape)))
  rng.shuffle(order)
  layout = blocked(shape, bits, warps, order=order)

  threads = 32 * warps
  padded = np.prod(layout.shape)
  assert layout.extent("reg") * threads == padded * layout.kernel().size
  assert all(h < 2 * max(v, threads) for h, v in zip(layout.shape, shape))


def test_blocked_puts_16_bytes_in_a_thread_and_lanes_side_by_side():
  layout = blocked((64, 256), 16, 4)

  assert [layout.apply(reg=r) for r in range(8)] == [(0, j) for j in range(8)]
  assert [layout.apply(lane=l) for l in range(32)] == [(0, 8 * l) for l in range(32)]
  assert [layout.apply(warp=w) for w in range(4)] == [(w, 0) for w in range(4)]
  assert layout.extent("reg") == 64 * 256 // 128


def test_blocked_follows_the_order_of_the_dimensions():
  assert blocked((256, 64), 16, 4, order=(0, 1)) == blocked((64, 256), 16, 4).permute((1, 0))


def test_blocked_96_columns_use_an_outer_and_not_a_hull():
  layout = blocked((64, 96), 16, 4)

  assert layout.shape == (64, 96)
  assert layout.extent("reg") == 48


def test_blocked_takes_a_given_vector_width():
  assert blocked((64, 256), 16, 4, vec=2).apply(lane=1) == (0, 2)


REDUCED = [wgmma_accumulator(64, 64), wgmma_accumulator(192, 96, 3), wgmma_accumulator(128, 40, 1),
           wgmma_accumulator(64, 192, 3, "n"), blocked((7, 33), 32, 4), blocked((100, 229), 16, 12),
           blocked((7,), 32, 4)]


@pytest.mark.parametrize("layout", REDUCED, ids=str)
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_reduction_plan_sums_each_valid_element_once(layout, dims):
  if layout.rank <= max(dims):
    dims = (0,)
  rng = np.random.default_rng(len(dims))
  data = np.zeros(layout.shape, np.int64)
  data[tuple(slice(0, v) for v in layout.valid)] = rng.integers(1, 2**40, layout.valid)
  plan = reduction(layout, dims)

  values = data[tuple(np.moveaxis(layout.table(AXES), -1, 0))]
  partial = np.stack([values[list(group)].sum(0) for group in plan.registers])
  lanes = np.arange(32)
  for mask in plan.lanes:
    partial = partial + partial[:, lanes ^ mask]
  kept = [d for d in range(layout.rank) if d not in dims]
  index = plan.layout.table(AXES)
  expected = data.sum(dims)[tuple(np.moveaxis(index, -1, 0))] if kept else np.broadcast_to(data.sum(), index.shape[:-1])
  for group in plan.warps:
    total = partial[:, :, list(group)].sum(-1)
    for warp in group:
      assert np.array_equal(total, expected[:, :, warp])
  assert plan.layout.valid == tuple(layout.valid[d] for d in kept)


@pytest.mark.parametrize("layout", REDUCED, ids=str)
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_what_threads_have_of_a_sum_adds_up_to_it_and_copies_are_one_part(layout, dims):
  if layout.rank <= max(dims):
    dims = (0,)
  parts, plan = thread_partials(layout, dims), reduction(layout, dims)
  if parts is None:
    assert not plan.lanes and max(map(len, plan.warps)) == 1
    return
  data = np.zeros(layout.shape, np.int64)
  data[tuple(slice(0, v) for v in layout.valid)] = np.random.default_rng(2).integers(1, 2**40, layout.valid)
  values = data[tuple(np.moveaxis(layout.table(AXES), -1, 0))]
  mine = np.stack([values[list(group)].sum(0) for group in plan.registers])
  index = tuple(np.moveaxis(parts.table(AXES), -1, 0))
  assert index[0].shape == mine.shape
  found = np.full(parts.shape, -1)
  found[index] = mine
  assert (found[index] == mine).all() and (found >= 0).all()
  kept = tuple(v for d, v in enumerate(layout.valid) if d not in dims)
  assert parts.valid == (parts.shape[0], *kept)
  assert np.array_equal(found.sum(0), data.sum(dims))


def test_a_row_sum_of_an_accumulator_is_two_registers_and_two_shuffles():
  plan = reduction(wgmma_accumulator(64, 64), (1,))

  assert [len(g) for g in plan.registers] == [16, 16]
  assert plan.lanes == (1, 2)
  assert plan.warps == ((0,), (1,), (2,), (3,))


def test_row_of_an_accumulator_is_copied_to_four_lanes():
  rows = row_of(wgmma_accumulator(64, 256), 1)

  assert (rows.shape, rows.extent("reg"), rows.kernel().size) == ((64,), 2, 4)
  assert rows.kernel().masks("lane") == (1, 2)


def test_drop_copies_renumbers_the_registers():
  layout = wgmma_accumulator(64, 24).project((1,)).repeat("reg", 5, REPLICA)
  smaller, to_new = drop_copies(layout)

  assert smaller.extent("reg") == 2
  for reg, new in enumerate(to_new):
    for lane in range(32):
      assert layout.apply(reg=reg, lane=lane, warp=3) == smaller.apply(reg=new, lane=lane, warp=3)


@pytest.mark.parametrize(("starts", "sizes"), [((0, 64), (64, 64)), ((0, 8), (64, 8)), ((0, 16), (64, 72)),
                                               ((0, 0), (64, 96))])
def test_a_view_of_whole_registers_is_the_fragment_of_the_box(starts, sizes):
  whole = wgmma_accumulator(64, 128).with_origin(warp=4)
  found = fragment_view(whole, starts, sizes)

  assert found is not None
  part, registers = found
  assert part.shape == sizes and part.origin == whole.origin
  for new, old in enumerate(registers):
    for lane in range(32):
      i, j = whole.apply(reg=old, lane=lane, warp=6)
      assert part.apply(reg=new, lane=lane, warp=6) == (i - starts[0], j - starts[1])


@pytest.mark.parametrize(("starts", "sizes"), [((0, 4), (64, 8)), ((16, 0), (16, 128)), ((0, 0), (32, 128))])
def test_a_view_that_cuts_threads_apart_is_none(starts, sizes):
  assert fragment_view(wgmma_accumulator(64, 128), starts, sizes) is None
