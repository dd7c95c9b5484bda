"""What is known of integer scalars, against every value they take."""
from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

import tiletrace as tt
from tests.tracing import Out, f32, i32, trace
from tiletrace.core.graph import walk
from tiletrace.lowering.facts import _RULES, Fact, Facts, constant

_PYTHON = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
           "floordiv": lambda x, y: x // y, "mod": lambda x, y: x % y, "min": min, "max": max}


def _values(fact: Fact) -> list[int]:
  if fact.divisor == 0:
    return [0]
  return [x for x in range(fact.lo, fact.hi + 1) if x % fact.divisor == 0]


def _holds(fact: Fact, value: int) -> bool:
  return fact.lo <= value <= fact.hi and (value == 0 if fact.divisor == 0 else value % fact.divisor == 0)


@pytest.mark.parametrize("name", _PYTHON)
def test_facts_hold_for_every_result(name):
  rng = np.random.default_rng(3)
  ranges = [Fact(int(lo), int(lo + n), int(d)) for lo, n, d in zip(
    rng.integers(-40, 40, 12), rng.integers(0, 40, 12), rng.integers(1, 9, 12))]
  ranges += [constant(x) for x in (0, 1, 8, 12, 16)]
  for x, y in itertools.product(ranges, ranges):
    if name in ("floordiv", "mod") and y.lo <= 0:
      continue
    out = _RULES[name](x, y)
    for a, b in itertools.product(_values(x), _values(y)):
      assert _holds(out, _PYTHON[name](a, b)), (name, x, y, a, b, out)


def test_a_result_that_may_wrap_keeps_only_powers_of_two():
  x = Fact(0, 2**31 - 1, 12)
  assert x + x == Fact(-2**31, 2**31 - 1, 4)
  assert constant(2**20) * constant(3 * 2**12) == Fact(-2**31, 2**31 - 1, 2**32 & -2**32)


def _facts(kernel, grid):
  x = jax.ShapeDtypeStruct((1024,), np.float32)
  graph = tt.tile_call(kernel, x, grid=grid).trace(x).graph
  return graph, Facts(graph)


def test_program_ids_and_loop_indices_have_their_ranges():
  def kernel(x, y):
    i = tt.program_id(1)
    for k in tt.range(4, 20, 4):
      y[k + i] = x[k]

  graph, facts = _facts(kernel, (3, 5))
  program = next(e for e in graph.body.eqns if e.primitive.name == "program_id")
  loop = next(e for e in graph.body.eqns if e.primitive.name == "for_loop")
  assert facts[program.outvars[0]] == Fact(0, 4, 1)
  assert facts[loop.blocks[0].invars[0]] == Fact(4, 19, 4)
  total = next(e for e in walk(graph.body) if e.primitive.name == "add")
  assert facts[total.outvars[0]] == Fact(4, 23, 1)


def test_sizes_and_dynamic_grids_have_the_bounds_that_calls_check():
  def kernel(x, y):
    i = tt.program_id(0)
    y[i] = x[i] * x.shape[0]

  x = jax.ShapeDtypeStruct((1024,), np.float32)
  graph = tt.tile_call(kernel, x, grid=4, dynamic_shapes=("8*n", "8*n")).trace(x).graph
  facts, made = Facts(graph), {e.primitive.name: e.outvars[0] for e in graph.body.eqns if e.outvars}
  assert facts[made["program_id"]] == Fact(0, 2**22 - 1, 1)
  assert facts[made["size"]] == Fact(8, 2**30, 8)


def test_nothing_is_known_of_what_is_loaded_or_runs_downwards():
  def kernel(x, y):
    for k in tt.range(20, 0, -1):
      y[k] = x[k]

  graph, facts = _facts(kernel, 1)
  loop = next(e for e in graph.body.eqns if e.primitive.name == "for_loop")
  assert facts[loop.blocks[0].invars[0]] == Fact()


def test_the_difference_of_sums_that_share_a_term_does_not_depend_on_it():
  def kernel(n, x, y):
    start = n[...] + 3
    y[...] = x[start + tt.program_id(0) % 3] + x[n[...]]

  graph = trace(kernel, n=i32(), x=f32(100), y=Out(f32()))
  facts = Facts(graph)
  start, far = (e.outvars[0] for e in graph.body.eqns if e.primitive.name == "add" and e.outvars[0].dtype == np.int32)
  assert facts.difference(far, start) == Fact(0, 2) and facts.difference(start, far) == Fact(-2, 0)
  assert facts.difference(start, start).lo == facts.difference(start, start).hi == 0 and facts[far].lo < -(2**30)
