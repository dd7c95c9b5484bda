from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tiletrace.core.errors import LayoutError
from tiletrace.layout import R, S, cta, lane, off, reg, stage, warp, wg
from tiletrace.lowering.layouts import catalog
from tiletrace.lowering.layouts.fragment import blocked, row_of
from tiletrace.lowering.layouts.notation import parse
from tiletrace.lowering.layouts.relation import build
from tiletrace.lowering.layouts.shared import SWIZZLES, shared_layout

WORKED = S[(8, 2, 4, 2):(4@lane, 1@warp, 1@lane, 1@reg)] + R[2:4@warp] + 5@warp


def test_the_worked_example_places_element_57():
  layout = WORKED.layout((8, 16))

  assert layout.apply(lane=12, warp=6, reg=1) == layout.apply(lane=12, warp=10, reg=1) == (3, 9)
  assert layout.locate((3, 9)) == {"lane": 12, "warp": 6, "reg": 1}
  assert layout.apply(lane=0, warp=5) == layout.apply(lane=0, warp=9) == (0, 0)
  assert layout.apply(lane=31, warp=6, reg=1) == (7, 15)
  assert layout.kernel().size == 2


def test_warps_that_a_replica_skips_hold_nothing():
  layout = WORKED.layout((8, 16))

  assert (layout.start("warp"), layout.extent("warp")) == (5, 6)
  with pytest.raises(AssertionError, match="warp=7 holds no element"):
    layout.apply(warp=7)


def test_nested_extents_need_no_shape():
  nested = S[(8, (2, 4, 2)):(4@lane, (1@warp, 1@lane, 1@reg))] + R[2:4@warp] + 5@warp
  assert nested.layout() == WORKED.layout((8, 16))


def test_wg_is_four_warps():
  assert (S[(3, 64):(1@wg, 1@reg)] + R[(4, 32):(1@warp, 1@lane)]).layout() == (
    S[(3, 64):(4@warp, 1@reg)] + R[(4, 32):(1@warp, 1@lane)]).layout()


def test_an_accumulator_can_be_written_by_hand():
  written = S[((3, 4, 2, 8), (12, 4, 2)):((1@wg, 1@warp, 2@reg, 4@lane), (4@reg, 1@lane, 1@reg))]
  assert written.layout((192, 96)) == catalog.wgmma_accumulator(192, 96, 3)


def test_a_ring_of_swizzled_tiles_can_be_written_by_hand():
  written = (S[(64, (4, 64)):(64@off, (4096@off, 1@off))] + R[3:1@stage]).swizzle(3, 3)
  assert written.layout() == shared_layout((64, 256), 16, 128, stages=3)


LAYOUTS = [
  WORKED.layout((8, 16)), *(catalog.wgmma_accumulator(64, n) for n in range(8, 257, 8)),
  catalog.wgmma_accumulator(384, 176, 3), catalog.wgmma_accumulator(128, 96, 3, "n"),
  *(catalog.wgmma_a_fragment(64, 96, b, 1) for b in (8, 16, 32)), catalog.mma_m16n8k16_a(), catalog.mma_m16n8k16_b(),
  catalog.mma_m16n8k16_c().with_origin(warp=3, lane=0), catalog.matrix_fragment(4, trans=True),
  *(shared_layout((64, 192), 16, s, stages=n) for s in SWIZZLES for n in (1, 3, 5)),
  *(shared_layout((176, 64), b, 64, order=(0, 1)) for b in (8, 16, 32)), shared_layout((12, 40), 16, 128),
  *(blocked(s, 16, w) for s in [(), (1,), (7,), (7, 33), (3, 5, 7), (64, 96), (100, 229)] for w in (1, 4, 12)),
  row_of(catalog.wgmma_accumulator(192, 24, 3), 1), shared_layout((), 32, 0, stages=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_printed_notation_reads_back_as_the_same_layout(layout):
  assert parse(str(layout)) == layout


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 70), max_size=3), st.sampled_from([8, 16, 32]), st.sampled_from([1, 4, 8, 12]))
def test_blocked_layouts_of_any_shape_read_back(shape, bits, warps):
  layout = blocked(shape, bits, warps)
  assert parse(str(layout)) == layout


def test_a_map_without_notation_prints_its_columns():
  mixed = build((4, 4), {"reg": [1, 3], "lane": [1 << 32, 2 << 32]})
  assert str(mixed) == "linear((4, 4), reg=[(1, 0), (3, 0)], lane=[(0, 1), (0, 2)])"
  half = catalog.wgmma_accumulator(64, 8).restrict("reg")
  assert str(half).startswith("linear((64, 8), reg=[(0, 1), (8, 0)]")


@pytest.mark.parametrize(("written", "shape", "reason"), [
  (lambda: S[(96, 2):(1@lane, 1@reg)], None, "axis lane: extent 3 with stride 32"),
  (lambda: S[(3, 8):(8@lane, 1@lane)], None, "axis lane: extent 3 with stride 8 is not made of powers of two"),
  (lambda: S[(64, 2):(1@lane, 1@reg)], None, "axis lane: 64 lanes are named, a warp has 32"),
  (lambda: S[(2, 8):(16@lane, 1@reg)], None, "axis lane: no element for lanes 1 to 15"),
  (lambda: S[(8, 4):(1@reg, 1@reg)], None, "axis reg: stride 1 of extent 8 overlaps"),
  (lambda: S[(8, 4):(1@reg, 0@lane)], None, "dimension 1: extent 4 with stride 0@lane puts several elements"),
  (lambda: S[(8, 4):(1@reg, 1@warp)] + R[2:2@warp], None, "axis warp: stride 2 of extent 2 overlaps"),
  (lambda: S[8:1], None, "stride 1 of extent 8 names no axis"),
  (lambda: S[(8, 4):1@reg], None, "differ in structure"),
  (lambda: S[(8, (2, 2)):(1@reg, 8@reg)], None, "differ in structure"),
  (lambda: S[0:1@reg], None, "extent 0 is not a positive integer"),
  (lambda: S[8, 4], None, "has no strides"),
  (lambda: S[8:1@reg] + 5, None, "5 cannot be added to a layout"),
  (lambda: S[8:1@reg] + -1@warp, None, "offset -1@warp is negative"),
  (lambda: S[8:1.5@reg], None, "stride 1.5 on axis reg is not an integer"),
  (lambda: S[(8, 2, 4):(1@reg, 1@lane, 8@reg)], (4, 16), "do not multiply to 4, dimension 0 of the tile"),
  (lambda: S[(8, 2, 4):(1@reg, 1@lane, 8@reg)], (8, 2), "has 64 elements, the tile"),
  (lambda: S[(8, (2, 2)):(1@reg, (8@reg, 1@lane))], (8, 8), "has extents"),
  (lambda: S[64:1@off].swizzle(3, 4), None, "axis off: swizzle(3, 4) needs 10 bits of offset, the layout has 6"),
])
def test_bad_notation_is_refused_with_axis_and_reason(written, shape, reason):
  with pytest.raises(LayoutError) as e:
    written().layout(shape)
  assert reason in str(e.value)


@pytest.mark.parametrize(("text", "reason"), [
  ("S[", "never closed"),
  ("S[4:1@foo]", "'foo' is not S[...]"),
  ("print(4)", "'print(4)' is not"),
  ("R[4:1@warp]", "has no S[...]"),
  ("S[4:1@reg] * 2", "is not"),
  ("__import__('os')", "is not"),
])
def test_text_that_is_no_notation_is_refused(text, reason):
  with pytest.raises(LayoutError) as e:
    parse(text)
  assert reason in str(e.value)


def test_the_axes_are_those_of_the_relation():
  axes = (reg, lane, warp, wg, cta, off, stage)
  assert " ".join(str(a) for a in axes) == "reg lane warp wg cta off stage"
