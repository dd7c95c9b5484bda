from __future__ import annotations

import random
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tiletrace.lowering.layouts.catalog import wgmma_accumulator
from tiletrace.lowering.layouts.normal import REPLICA, NotALayout, Outer, pack
from tiletrace.lowering.layouts.relation import Layout, build, fit, make


def points(layout: Layout, axes: tuple[str, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
  """Every point by the definition, one `apply` at a time."""
  table = layout.table(axes)
  out = {}
  for p in np.ndindex(*table.shape[:-1]):
    if layout.rank and table[p].min() < 0:
      continue
    out[p] = layout.apply(**{a: layout.start(a) + x for a, x in zip(axes, p)})
  return out


@st.composite
def layouts(draw) -> Layout:
  """A random F2 map of up to 6 register, lane and warp bits, with odd outers above it and copies."""
  rng = random.Random(draw(st.integers(0, 2**31)))
  counts = {"reg": rng.randrange(4), "lane": rng.randrange(3), "warp": rng.randrange(3)}
  widths = [rng.randrange(1, 4), rng.randrange(0, 4)]
  core = {a: [pack([rng.randrange(1 << w) for w in widths]) for _ in range(n)] for a, n in counts.items()}
  outers, shape = [], [1 << w for w in widths]
  for axis in ("reg", "warp"):
    stride = 1 << counts[axis]
    for _ in range(rng.randrange(3)):
      extent, dim = rng.choice((2, 3, 5, 6)), rng.choice((0, 1, REPLICA))
      stride *= rng.choice((1, 1, 2))                      # sometimes a gap
      outers.append(Outer(axis, stride, extent, dim, 0 if dim == REPLICA else shape[dim]))
      stride *= extent
      if dim != REPLICA:
        shape[dim] *= extent
  return build(shape, core, outers)


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_table_is_apply_at_every_point(layout):
  axes = ("reg", "lane", "warp")
  table = layout.table(axes)
  assert table.shape == (*(layout.extent(a) for a in axes), 2)
  for p, index in points(layout, axes).items():
    assert tuple(table[p]) == index


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_injective_surjective_and_kernel_agree_with_counting(layout):
  counts = Counter(points(layout, ("reg", "lane", "warp")).values())
  size = layout.kernel().size

  assert set(counts.values()) == {size}
  assert layout.is_injective() == (size == 1)
  assert layout.is_surjective() == (len(counts) == layout.shape[0] * layout.shape[1])


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_kernel_generators_change_no_element(layout):
  axes = ("reg", "lane", "warp")
  everything = points(layout, axes)
  for generator in layout.kernel().bits:
    move = dict(generator)
    for p, index in everything.items():
      moved = tuple(x ^ move.get(a, 0) for a, x in zip(axes, p))
      assert everything[moved] == index


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_fit_recovers_a_layout_from_its_table(layout):
  axes = ("reg", "lane", "warp")
  table = layout.table(axes)
  several_bits = any(c & c - 1 for _, columns in layout.core for c in columns)
  if table.min() >= 0 and not (several_bits and layout.outers):
    assert fit(axes, layout.shape, table) == layout


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 9))
def test_locate_gives_a_holder_of_the_element(layout, origin):
  layout = layout.with_origin(warp=origin)
  if layout.is_surjective():
    for index in np.ndindex(*layout.shape):
      assert layout.apply(**layout.locate(index)) == index


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_transfer_functions_act_on_the_index(layout):
  axes = ("reg", "lane", "warp")
  before = points(layout, axes)
  swapped, rows = layout.permute((1, 0)), layout.project((1,))
  raised, first = layout.expand_dims(1), layout.restrict("reg")
  assert (swapped.shape, rows.shape, raised.shape) == (layout.shape[::-1], layout.shape[:1],
                                                      (layout.shape[0], 1, layout.shape[1]))
  for p, (i, j) in before.items():
    hw = dict(zip(axes, p))
    assert swapped.apply(**hw) == (j, i)
    assert rows.apply(**hw) == (i,)
    assert raised.apply(**hw) == (i, 0, j)
    if p[1:] == (0, 0):
      assert first.apply(reg=p[0]) == (i, j)


def test_equal_maps_built_differently_are_equal_and_hash_alike():
  whole = build((64, 96), {}, [Outer("reg", 1, 96, 1, 1), Outer("warp", 1, 64, 0, 1)])
  pieces = build((64, 96), {"reg": [pack((0, 1 << i)) for i in range(3)]}, [
    Outer("reg", 24, 4, 1, 24), Outer("warp", 8, 8, 0, 8), Outer("reg", 8, 3, 1, 8), Outer("warp", 1, 8, 0, 1),
    Outer("lane", 1, 1, 0, 1)])

  assert whole == pieces
  assert hash(whole) == hash(pieces)
  assert whole.key() == pieces.key()
  assert whole.outers == (Outer("reg", 32, 3, 1, 32),)


@settings(max_examples=100, deadline=None)
@given(layouts(), st.randoms(use_true_random=False))
def test_splitting_and_shuffling_outers_does_not_change_the_normal_form(layout, rng):
  parts = []
  for axis, columns in layout.core:
    # single-bit columns may be said as outers of extent two
    parts += [Outer(axis, 1 << i, 2, REPLICA if not c else d, c >> 32 * d)
              for i, c in enumerate(columns) for d in ([1] if c >> 32 else [0])]
  simple = all(c & c - 1 == 0 for _, columns in layout.core for c in columns)
  columns = [c for _, cs in layout.core for c in cs if c]
  if not simple or len(set(columns)) != len(columns):
    return
  for o in layout.outers:
    inner = rng.choice([e for e in range(1, o.extent + 1) if o.extent % e == 0])
    parts += [Outer(o.axis, o.stride, inner, o.dim, o.step),
              Outer(o.axis, o.stride * inner, o.extent // inner, o.dim, o.step * inner)]
  rng.shuffle(parts)

  assert build(layout.shape, {}, parts) == layout


def test_an_even_outer_gives_its_factors_of_two_to_the_core():
  layout = build((24,), {"lane": [1, 2]}, [Outer("reg", 1, 6, 0, 4)])

  assert layout.columns("reg") == (4,)
  assert layout.outers == (Outer("reg", 2, 3, 0, 8),)


@pytest.mark.parametrize(("shape", "core", "outers", "reason"), [
  ((8,), {}, [Outer("reg", 1, 4, 0, 1), Outer("reg", 2, 2, 0, 4)], "axis reg: stride 2 of extent 2 overlaps"),
  ((8,), {}, [Outer("reg", 1, 3, 0, 1), Outer("warp", 1, 2, 0, 2)], "step 2 in dimension 0 overlaps"),
  ((96,), {}, [Outer("lane", 1, 3, 0, 1)], "axis lane: extent 3"),
  ((96,), {}, [Outer("lane", 4, 8, 0, 1)], "axis lane: no element for lanes 1 to 3"),
  ((8,), {}, [Outer("reg", 1, 9, 0, 1)], "dimension 0: the layout reaches element 8, the hull ends at 8"),
  ((8,), {"reg": [16]}, [], "axis reg: step 16 leaves dimension 0"),
])
def test_what_is_no_layout_is_refused_with_axis_and_reason(shape, core, outers, reason):
  with pytest.raises(NotALayout, match=reason):
    build(shape, core, outers)


@pytest.mark.parametrize(("extents", "shape", "fn"), [
  ({"reg": 8}, (64,), lambda reg: (reg * reg,)),
  ({"reg": 4, "lane": 4}, (16,), lambda reg, lane: ((reg + lane) % 16,)),
  ({"reg": 4}, (8,), lambda reg: (reg + 1,)),
  ({"reg": 12}, (16,), lambda reg: (reg ^ reg >> 2,)),
])
def test_make_refuses_a_formula_that_is_no_layout(extents, shape, fn):
  with pytest.raises(NotALayout):
    make(extents, shape, fn)


def test_make_finds_odd_factors_below_and_above_powers_of_two():
  layout = make({"reg": 24}, (4, 6), lambda reg: (reg // 6, reg % 6))

  assert [layout.apply(reg=r) for r in range(24)] == [(r // 6, r % 6) for r in range(24)]


def test_wg_counts_four_warps():
  layout = wgmma_accumulator(192, 64, 3)

  assert layout.apply(wg=2, warp=1, lane=5) == layout.apply(warp=9, lane=5) == (128 + 16 + 1, 2)


def test_a_table_of_all_threads_is_fast():
  layout = wgmma_accumulator(192, 256, 3)
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    layout.table()
    seconds.append(time.perf_counter() - start)

  assert min(seconds) < 0.005


def test_an_outer_may_stand_in_a_gap_of_the_core():
  layout = build((64, 96), {"lane": [pack((0, 2)), pack((0, 4)), *(pack((1 << i, 0)) for i in range(3))],
                            "warp": [pack((16, 0)), pack((32, 0))]},
                 [Outer("reg", 1, 12, 1, 8), Outer("reg", 12, 2, 0, 8), Outer("reg", 24, 2, 1, 1)])

  assert layout.is_injective() and layout.is_surjective()
  for index in np.ndindex(64, 96):
    assert layout.apply(**layout.locate(index)) == index


def test_an_outer_that_meets_the_core_is_refused():
  with pytest.raises(NotALayout, match="axis reg: extent 3 with step 8 in dimension 0 meets the bits 0b110111"):
    build((64,), {"lane": [1, 2, 4, 16, 32]}, [Outer("reg", 1, 3, 0, 8)])
