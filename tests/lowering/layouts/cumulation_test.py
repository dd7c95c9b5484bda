from __future__ import annotations

import math

import numpy as np
import pytest

from tiletrace.lowering.layouts.catalog import wgmma_accumulator
from tiletrace.lowering.layouts.cumulation import cumulation, digits
from tiletrace.lowering.layouts.fragment import blocked, drop_copies
from tiletrace.lowering.layouts.normal import FIELD
from tiletrace.lowering.layouts.relation import Layout, build
from tiletrace.lowering.tables import coordinates

LAYOUTS = {f"blocked {s} in {w} warps": blocked(s, 32, w) for s in ((7,), (1, 8192), (3, 229), (33, 40), (2, 100, 5))
           for w in (1, 4, 12)} | {"accumulator": wgmma_accumulator(64, 96), "two": wgmma_accumulator(128, 64)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_digits_of_an_axis_are_its_index_in_every_thread(name):
  layout = LAYOUTS[name]
  unique = drop_copies(layout)[0]
  table = unique.table(("warp", "lane", "reg"))
  warp, lane, reg = np.ogrid[tuple(slice(0, n) for n in table.shape[:3])]
  at: dict[str, np.ndarray] = {"warp": warp, "lane": lane, "reg": reg}
  for dim in range(layout.rank):
    found = digits(layout, dim)
    assert found is not None and math.prod(d.extent for d in found) == layout.shape[dim]
    index = sum((at[d.axis] // d.stride % d.extent * d.step for d in found), np.zeros((1, 1, 1), np.int64))
    np.testing.assert_array_equal(np.broadcast_to(index, table.shape[:3]), table[..., dim])


@pytest.mark.parametrize("name", LAYOUTS)
def test_totals_lie_where_the_blocks_do_and_are_gathered_in_one_warp(name):
  layout = LAYOUTS[name]
  for dim in range(layout.rank):
    plan = cumulation(layout, dim)
    if plan.totals is None or plan.gathered is None:
      assert "warp" not in [d.axis for d in digits(layout, dim) or ()]
      continue
    blocks, totals = (coordinates(l, 32 * layout.extent("warp")).copy() for l in (layout, plan.totals))
    blocks[..., dim] //= plan.block
    for mine, have in zip(blocks[::37].tolist(), totals[::37].tolist(), strict=True):
      assert {tuple(x) for x in mine} == {tuple(x) for x in have}
    assert plan.gathered.valid == plan.totals.valid and plan.gathered.is_surjective()
    assert plan.gathered.extent("warp") == layout.extent("warp")
    assert "warp" not in [d.axis for d in digits(plan.gathered, dim) or ()]


def test_an_index_that_two_dimensions_share_has_no_digits():
  mixed: Layout = build((2, 2), {"reg": [1], "lane": [1 | 1 << FIELD]})
  assert digits(mixed, 1) is None
  assert digits(build((2, 2), {"reg": [1], "lane": [1 << FIELD]}), 1) is not None
