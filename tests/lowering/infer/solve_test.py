"""Layouts spread from anchors; what disagrees is converted and reported, or refused with both ends."""
from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, assemble, count, lower, matmul, notes, struct
from tiletrace.core.errors import LayoutError, LoweringError
from tiletrace.core.graph import walk
from tiletrace.lowering.layouts.catalog import wgmma_a_fragment, wgmma_accumulator
from tiletrace.lowering.layouts.shared import recognise_swizzle
from tiletrace.lowering.tables import coordinates


def relayouts(lowered):
  return [e for e in walk(lowered.lowering.laid_out.graph.body) if e.primitive.name == "relayout"]


def layout_of(lowered, name):
  """The layout of the fragment or value that was assigned to `name`."""
  found = [lay for v, lay in lowered.lowering.laid_out.layouts.items() if v.hint == name]
  assert len(set(found)) == 1, name
  return found[0]


def test_the_accumulator_has_the_layout_of_the_instruction_and_its_epilogue_follows():
  lowered = matmul(bm=128, bn=96)
  assert layout_of(lowered, "acc") == wgmma_accumulator(128, 96, 2, "m")
  assert not relayouts(lowered)


def test_a_chain_of_elementwise_ops_has_one_layout():
  def kernel(x, y):
    r = tt.block(tt.program_id(0), 64)
    y[r, :] = tt.exp(x[r, :] * 2 + 1) - x[r, :]

  lowered = lower(kernel, [struct(256, 64)], struct(256, 64), grid=4)
  assert not relayouts(lowered)
  values = {lay for v, lay in lowered.lowering.laid_out.layouts.items()}
  assert len(values) == 1


def test_row_statistics_follow_the_tile_that_uses_them():
  def kernel(x, row, y):
    y[...] = x[...] * row[...][:, None]

  lowered = lower(kernel, [struct(64, 64), struct(64)], struct(64, 64))
  assert not relayouts(lowered)
  assert count(lowered, "st.shared") == 0


def test_one_vector_on_both_axes_is_loaded_once_and_converted_once():
  def kernel(x, y):
    v = tt.exp(x[...])
    y[...] = v[None, :] + v[:, None]

  lowered = lower(kernel, [struct(64)], struct(64, 64))
  assert len(relayouts(lowered)) == 1
  assert "relayout of f32[64] by" in notes(lowered)
  assert re.search(r"solve_test.py:\d+", notes(lowered))
  assert count(lowered, "ex2") == count(lower(kernel, [struct(64)], struct(64, 64)), "ex2")
  assemble(lowered)


def test_a_value_that_becomes_a_gemm_operand_is_converted_where_its_layout_differs():
  def kernel(a, b, c):
    b_s = tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), jnp.float32)
    tt.copy(b, b_s)
    x = a[...]
    tt.gemm(x * 2, b_s, acc, accumulate=False)
    c[...] = acc[...] + x.astype(jnp.float32)

  lowered = lower(kernel, [struct(64, 64, dtype=BF16)] * 2, struct(64, 64))
  found = {id(lay): lay for lay in lowered.lowering.laid_out.layouts.values()}
  assert wgmma_a_fragment(64, 64, 16, 1) in found.values()
  assemble(lowered)


def test_two_gemms_that_want_two_layouts_of_one_fragment_name_both_lines():
  def kernel(a, b, c):
    a_s = tt.alloc_shared((128, 64), a.dtype)
    b_s = tt.alloc_shared((64, 128), b.dtype)
    acc = tt.alloc_fragment((128, 128), jnp.float32)
    tt.copy(a, a_s)
    tt.copy(b, b_s)
    tt.gemm(a_s, b_s, acc, accumulate=False, policy=tt.FULL_ROW)
    tt.gemm(a_s, b_s, acc, policy=tt.FULL_COL)
    c[...] = acc[...]

  with pytest.raises(LayoutError) as e:
    lower(kernel, [struct(128, 64, dtype=BF16), struct(64, 128, dtype=BF16)], struct(128, 128), warpgroups=2)
  said = str(e.value)
  assert "acc must have two layouts" in said
  assert "policy=tt.FULL_COL" in said and "the first is wanted at" in said
  assert "use two fragments" in said


def test_carried_tiles_keep_one_layout():
  def kernel(x, y):
    y[...] = tt.fori_loop(0, 4, lambda i, c: c * 2 + x[...], x[...])

  lowered = lower(kernel, [struct(64, 64)], struct(64, 64))
  assert not relayouts(lowered)
  assemble(lowered)


@pytest.mark.parametrize(("bn", "swizzle"), [(128, 128), (96, 64), (176, 32), (24, 0)])
def test_shared_operands_have_the_widest_swizzle_that_divides_their_rows(bn, swizzle):
  lowered = matmul(n=2 * bn, bn=bn)
  layouts = {v.hint: lay for v, lay in lowered.lowering.laid_out.layouts.items() if v.hint in ("a_s", "b_s")}
  assert recognise_swizzle(layouts["a_s"], 16)[0] == 128
  assert recognise_swizzle(layouts["b_s"], 16)[0] == swizzle


def test_coalesced_accesses_take_whole_sectors():
  def kernel(x, y):
    y[...] = x[...] + 1

  lowered = lower(kernel, [struct(64, 128)], struct(64, 128))
  layout = next(iter(lowered.lowering.laid_out.layouts.values()))
  table = coordinates(layout, 128)
  flat = table[..., 0] * 128 + table[..., 1]
  for warp in flat.reshape(4, 32, -1, 4).transpose(0, 2, 1, 3).reshape(-1, 128):
    sectors = np.unique(warp // 8)                              # of 32 bytes
    assert len(sectors) == 128 // 8


def test_views_of_fragments_cut_whole_registers_or_are_refused_with_the_layout():
  def kernel(x, y, *, start):
    f = tt.alloc_fragment((64, 64), F32)
    f[...] = x[...]
    y[...] = f[start:start + 8, :]

  assemble(lower(kernel, [struct(64, 64)], struct(8, 64), static={"start": 8}))
  with pytest.raises(LayoutError) as e:
    lower(kernel, [struct(64, 64)], struct(8, 64), static={"start": 3})
  assert "does not cut whole registers of every thread" in str(e.value)
  assert "f[start:start + 8, :]" in str(e.value) and "layout is" in str(e.value)


def test_a_value_of_no_elements_is_refused_where_it_would_need_registers():
  def kernel(x, y):
    rest = x[...][3:3]
    y[...] = tt.fori_loop(0, 3, lambda i, c: (c[0] + tt.sum(c[1]), c[1]), (x[...], rest))[0]

  with pytest.raises(LoweringError, match="a value of no elements has no registers") as e:
    lower(kernel, [struct(8, 4)], struct(8, 4))
  assert "rest = x[...][3:3]" in str(e.value)
