"""Layouts that the author writes at an allocation: taken, converted to, or refused with the reason."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tiletrace as tt
from tiletrace.layout import S, lane, off, reg, warp

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
ROWS = S[(4, 16, 2, 32):(1@warp, 2@lane, 1@lane, 1@reg)]


def _lower(layout, *, shared=False):
  def kernel(x, y):
    alloc = tt.alloc_shared if shared else tt.alloc_fragment
    mine = alloc((64, 64), jnp.float32, layout=layout)
    mine[...] = x[...]
    y[...] = mine[...] * 2

  return tt.tile_call(kernel, X, grid=1).lower(X)


def test_a_fragment_has_the_layout_that_was_written():
  lowered = _lower(ROWS)

  layouts = lowered.lowering.program.layouts
  (fragment,) = (v for v in layouts if v.hint == "mine")
  assert layouts[fragment] == ROWS.layout((64, 64))
  assert lowered.compile().memory_analysis()["spill_stores"] == 0


def test_a_shared_buffer_has_the_layout_that_was_written():
  columns_first = S[(64, 64):(1@off, 64@off)]
  lowered = _lower(columns_first, shared=True)

  layouts = lowered.lowering.program.layouts
  (buffer,) = (v for v in layouts if v.hint == "mine")
  assert layouts[buffer].offset_of((1, 0)) == 1 and layouts[buffer].offset_of((0, 1)) == 64


@pytest.mark.parametrize(("layout", "shared", "message"), [
    (S[(32, 64):(2@lane, 1@reg)], False, "layout= of mine"),
    (S[(64, 64):(64@off, 1@off)], False, "lies over lane, reg, warp"),
    (ROWS, True, "lies over off"),
    (object(), False, "which is no layout"),
])
def test_a_layout_that_does_not_fit_is_refused_at_the_allocation(layout, shared, message):
  with pytest.raises((tt.LayoutError, tt.TileTypeError)) as raised:
    _lower(layout, shared=shared)
  assert message in str(raised.value) and "mine = alloc(" in str(raised.value)
