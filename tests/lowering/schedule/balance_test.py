"""Persistent kernels whose programs differ in length: each program runs once, on the CTA that is free first."""
from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import tiletrace as tt
from tests.lowering.kernels import lower, struct
from tiletrace.core.graph import walk
from tiletrace.lowering.schedule.balance import balanced_order, longest_first, program_costs

F32, BF16 = jnp.float32, jnp.bfloat16


def triangle_kernel(x, y, *, reverse=False):
  """y[i] = the sum of the blocks of x up to i."""
  i = tt.program_id(0)
  if reverse:
    i = tt.num_programs(0) - 1 - i
  total = tt.alloc_fragment((64,), F32)
  total[...] = 0
  for k in tt.range(i + 1):
    total[...] += x[tt.block(k, 64)]
  y[i, :] = total[...]


def traced(n, kernel=triangle_kernel, **options):
  x = struct(64 * n)
  return tt.tile_call(kernel, struct(n, 64), grid=n, **options).trace(x).graph


@given(st.integers(5, 60), st.integers(1, 9))
def test_every_program_has_one_place(n, sms):
  graph = traced(n)
  order = balanced_order(graph.body, graph.options, sms)
  if n <= sms:
    assert order is None
    return
  assert order is not None and len(order) % sms == 0
  assert sorted(p for p in order if p < n) == list(range(n)) and set(order) <= set(range(n + 1))


@given(st.integers(5, 60), st.integers(1, 9), st.booleans())
def test_where_programs_are_taken_the_longest_are_first(n, sms, reverse):
  graph = traced(n, functools.partial(triangle_kernel, reverse=reverse))
  order = longest_first(graph.body, graph.options, sms)
  assert order == (None if n <= sms else tuple(range(n) if reverse else reversed(range(n))))


def test_costs_follow_the_trip_counts():
  graph = traced(10)
  costs = program_costs(graph.body, graph.options)
  assert costs is not None
  steps = np.diff(costs)
  assert (steps > 0).all() and np.allclose(steps, steps[0])


def test_no_cta_works_longer_than_the_last_program_past_the_mean():
  """Graham's bound for list scheduling."""
  graph = traced(200)
  costs, order = program_costs(graph.body, graph.options), balanced_order(graph.body, graph.options, 13)
  assert costs is not None and order is not None
  loads = [sum(costs[p] for p in order[cta::13] if p < 200) for cta in range(13)]
  assert max(loads) <= costs.sum() / 13 + costs.max()


def test_programs_of_one_length_and_lengths_from_data_keep_the_raster():
  def even(x, y):
    y[tt.program_id(0), :] = x[:64]

  def by_data(x, n, y):
    total = tt.alloc_fragment((64,), F32)
    total[...] = 0
    for k in tt.range(n[tt.program_id(0)]):
      total[...] += x[tt.block(k, 64)]
    y[tt.program_id(0), :] = total[...]

  graph = traced(40, even)
  assert balanced_order(graph.body, graph.options, 4) is None
  graph = tt.tile_call(by_data, struct(40, 64), grid=40).trace(struct(2560), struct(40, dtype=jnp.int32)).graph
  assert program_costs(graph.body, graph.options) is None


@pytest.mark.parametrize("reverse", [False, True])
def test_a_persistent_kernel_takes_its_programs_from_a_table(reverse):
  n = 150
  x = np.random.default_rng(0).random(64 * n).astype(np.float32)
  call = tt.tile_call(functools.partial(triangle_kernel, reverse=reverse), struct(n, 64), grid=n, persistent=True)
  lowered = call.lower(x)
  (table,) = [e for e in walk(lowered.lowering.program.graph.body) if e.primitive.name == "lookup"]
  assert len(table.params["values"]) == 2 * 132
  assert ".global .align 4 .s32 table0[264]" in lowered.as_text("ptx")
  assert "free first" in str(lowered.report())
  want = np.cumsum(x.reshape(n, 64).astype(np.float64), axis=0)
  for sms in (1, 5, 132):
    (got,) = lowered.simulate(x, num_sms=sms)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_lookup_reads_a_table_of_python_ints():
  def kernel(x, y):
    with tt.warpgroup(0):
      y[...] = x[tt.block(tt.lookup([3, 0, 2, 1], tt.cta_id()), 64)]

  x = np.arange(256, dtype=np.float32)
  lowered = lower(kernel, [struct(256)], struct(64), grid=1)
  (got,) = lowered.simulate(x)
  np.testing.assert_array_equal(got, x[192:])


def test_lookup_wants_python_ints():
  def kernel(x, y):
    with tt.warpgroup(0):
      y[...] = x[tt.block(tt.lookup([1.5], tt.cta_id()), 64)]

  with pytest.raises(tt.TileTypeError, match="32-bit Python ints"):
    lower(kernel, [struct(256)], struct(64), grid=1)
