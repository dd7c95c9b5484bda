from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tiletrace.lowering.layouts.catalog import wgmma_a_fragment, wgmma_accumulator
from tiletrace.lowering.layouts.fragment import blocked, row_of
from tiletrace.lowering.layouts.normal import REPLICA, Outer, pack
from tiletrace.lowering.layouts.relation import Layout, build
from tiletrace.lowering.layouts.relayout import ShufflePlan, classify, register_permutation, shuffle_plan

AXES = ("reg", "lane", "warp")
LANES = np.arange(32)


def labels(layout: Layout) -> np.ndarray:
  """[reg, lane, warp] -> a label of the element."""
  return np.ravel_multi_index(tuple(np.moveaxis(layout.table(AXES), -1, 0)), layout.shape)


def odd(mask: int) -> np.ndarray:
  return np.array([(int(lane) & mask).bit_count() % 2 for lane in LANES], bool)[None, :, None]


def run(plan: ShufflePlan, held: np.ndarray, registers: int) -> np.ndarray:
  """Executes a plan lane by lane on [reg, lane, warp] data, as the generated code would."""
  words = held.reshape(-1, plan.pack, *held.shape[1:])
  out = np.full((registers // plan.pack, plan.pack, *held.shape[1:]), -1)
  base = np.array([np.bitwise_xor.reduce([c for i, c in enumerate(plan.lane_columns) if lane >> i & 1] or [0])
                   for lane in LANES])
  for source, target in plan.repeats:
    block = words[source:source + plan.sources]
    for lane_mask, reg_mask in plan.send_swaps:
      block = np.where(odd(lane_mask)[:, None], block[np.arange(len(block)) ^ reg_mask], block)
    received = np.empty((len(plan.steps), *block.shape[1:]), block.dtype)
    for step in plan.steps:
      served = base ^ step.lane
      assert len(set(served)) == 32
      received[step.receive] = block[step.send][:, served]
    for lane_mask, reg_mask in plan.receive_swaps:
      received = np.where(odd(lane_mask)[:, None], received[np.arange(len(received)) ^ reg_mask], received)
    out[target:target + len(received)] = received
  return out.reshape(registers, *held.shape[1:])


def check_shuffle(src: Layout, dst: Layout, pack_: int = 1) -> ShufflePlan:
  plan = shuffle_plan(src, dst, pack_)
  assert plan is not None
  assert np.array_equal(run(plan, labels(src), dst.extent("reg")), labels(dst))
  return plan


@st.composite
def warp_local(draw) -> tuple[Layout, Layout]:
  """A source, and the same with its register and lane bits mixed by a random invertible matrix."""
  src = draw(st.sampled_from([wgmma_accumulator(64, 64), wgmma_accumulator(64, 96), wgmma_accumulator(192, 40, 3),
                              wgmma_accumulator(64, 8), wgmma_a_fragment(64, 64, 8)]))
  rng = draw(st.randoms(use_true_random=False))
  columns = [*src.columns("reg"), *src.columns("lane")]
  count = len(src.columns("reg"))
  rng.shuffle(columns)
  for _ in range(rng.randrange(8)):
    i, j = rng.sample(range(len(columns)), 2)
    columns[i] ^= columns[j]
  core = {"reg": columns[:count], "lane": columns[count:], "warp": src.columns("warp")}
  return src, build(src.shape, core, src.outers)


@settings(max_examples=200, deadline=None)
@given(warp_local())
def test_shuffle_plans_move_every_element_to_its_place(pair):
  src, dst = pair
  assert classify(src, dst) in ("shuffle", "registers", "same")
  plan = check_shuffle(src, dst)
  assert plan.shuffles == dst.extent("reg")


@settings(max_examples=60, deadline=None)
@given(warp_local(), st.randoms(use_true_random=False))
def test_register_permutations_are_found_whatever_the_order(pair, rng):
  src, _ = pair
  columns = list(src.columns("reg"))
  rng.shuffle(columns)
  dst = build(src.shape, {**dict(src.core), "reg": columns}, src.outers)
  permutation = register_permutation(src, dst)

  assert permutation is not None
  assert np.array_equal(labels(src)[list(permutation)], labels(dst))
  assert classify(src, dst) == ("same" if src == dst else "registers")


def test_registers_serve_a_destination_with_other_outers():
  src = wgmma_accumulator(64, 96)
  dst = build((64, 96), {"lane": src.columns("lane"), "warp": src.columns("warp"), "reg": []}, [
    Outer("reg", 1, 12, 1, 8), Outer("reg", 12, 2, 0, 8), Outer("reg", 24, 2, 1, 1)])
  permutation = register_permutation(src, dst)

  assert classify(src, dst) == "registers"
  assert permutation is not None
  assert np.array_equal(labels(src)[list(permutation)], labels(dst))


def test_padding_need_not_match():
  src, dst = wgmma_accumulator(64, 96).with_valid((64, 90)), wgmma_accumulator(64, 128).with_valid((64, 90))

  assert classify(src, dst) == "registers"
  assert classify(dst, src) == "registers"


def test_an_fp8_a_fragment_takes_one_shuffle_for_two_packed_halves():
  src, dst = wgmma_accumulator(64, 96), wgmma_a_fragment(64, 96, 8)
  plan = check_shuffle(src, dst, 2)

  assert plan.shuffles == 24
  assert (len(plan.send_swaps), len(plan.receive_swaps)) == (1, 1)
  assert plan.cost == 24 * 3
  check_shuffle(src, dst)


def test_packing_that_separates_neighbours_has_no_plan():
  src = wgmma_accumulator(64, 64)
  columns = list(src.columns("reg"))
  dst = build(src.shape, {**dict(src.core), "reg": columns[1:] + columns[:1]})

  assert shuffle_plan(src, dst, 2) is None
  check_shuffle(src, dst)


def test_a_copy_in_the_own_lane_is_read_rather_than_another():
  src = row_of(wgmma_accumulator(64, 64), 1)                           # four lanes hold each row
  lanes = list(src.columns("lane"))
  dst = build((64,), {"reg": [lanes[2]], "lane": [0, 0, *src.columns("reg"), *lanes[3:]], "warp": src.columns("warp")})

  assert classify(src, dst) == "shuffle"
  check_shuffle(src, dst)


def test_copies_in_every_warp_keep_a_conversion_inside_the_warp():
  src = build((256,), {"reg": [1, 2, 4], "lane": [8 << i for i in range(5)], "warp": [0, 0]})
  dst = build((256,), {"reg": [1], "lane": [2 << i for i in range(5)], "warp": [64, 128]})
  spread = build((256,), {"reg": [32, 64, 128], "lane": [1 << i for i in range(5)], "warp": [0, 0]})

  assert classify(src, spread) == "shuffle"
  check_shuffle(src, spread)
  assert classify(src, dst) == "shared"       # each warp wants another part, which its own lanes hold: not yet planned
  assert classify(dst, src) == "shared"


@pytest.mark.parametrize(("src", "dst"), [
  (wgmma_accumulator(64, 64), blocked((64, 64), 16, 4)),
  (wgmma_accumulator(128, 64, 2), wgmma_accumulator(128, 64, 2, "n")),
  (wgmma_accumulator(128, 64, 1), wgmma_accumulator(128, 64, 2)),
  (blocked((100,), 16, 4), blocked((100,), 16, 12)),
], ids=str)
def test_data_that_crosses_warps_goes_through_shared_memory(src, dst):
  assert classify(src, dst) == "shared"


def test_layouts_with_another_origin_are_apart():
  layout = wgmma_accumulator(64, 64)
  assert classify(layout, layout.with_origin(warp=4)) == "shared"


def test_copies_of_the_destination_are_filled_too():
  src = wgmma_accumulator(64, 16)
  dst = src.repeat("reg", 3, REPLICA)
  permutation = register_permutation(src, dst)

  assert permutation is not None
  assert np.array_equal(labels(src)[list(permutation)], labels(dst))
  assert pack((0, 1)) == src.columns("reg")[0]
