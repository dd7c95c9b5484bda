from __future__ import annotations

from tiletrace.lowering.layouts.catalog import mma_m16n8k16_c, wgmma_accumulator
from tiletrace.lowering.layouts.draw import draw
from tiletrace.lowering.layouts.fragment import blocked, row_of
from tiletrace.lowering.layouts.shared import shared_layout


def test_a_fragment_shows_thread_and_register():
  assert draw(mma_m16n8k16_c(), rows=2) == """\
T0:0 T0:1 T1:0 T1:1 T2:0 T2:1 T3:0 T3:1
T4:0 T4:1 T5:0 T5:1 T6:0 T6:1 T7:0 T7:1
..."""


def test_a_shared_tile_shows_offsets():
  assert draw(shared_layout((8, 16), 32, 64), rows=3, columns=9) == """\
 0  1  2  3  4  5  6  7  8 ...
16 17 18 19 20 21 22 23 24 ...
36 37 38 39 32 33 34 35 44 ...
..."""


def test_copies_and_padding_are_marked():
  assert draw(row_of(wgmma_accumulator(64, 64), 1), columns=3) == "T0:0+ T4:0+ T8:0+ ..."
  assert draw(blocked((2, 3), 32, 1)).splitlines()[0] == "T0:0+ T1:0+ T2:0+     ."
  assert draw(blocked((), 32, 1)) == "T0:0+"
