"""Simplification keeps meaning (against the xla backend, on random scalar programs), effects and lines."""
from __future__ import annotations

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.tracing import Out, f32, i32, trace
from tiletrace.core.graph import Literal, walk
from tiletrace.core.ops.barrier import sync
from tiletrace.core.printer import to_text
from tiletrace.core.simplify import simplify
from tiletrace.core.types import Dyn, ViewDim
from tiletrace.core.verify import verify
from tiletrace.lowering.xla.run import run


def names(graph):
  return [e.primitive.name for e in walk(graph.body)]


def simplified(kernel, **arrays):
  graph = verify(trace(kernel, **arrays))
  return verify(simplify(graph))


def stored(expression, *, dtype=jnp.int32):
  """The atom that `expression(i)` becomes, i = program_id(0)."""
  def kernel(y):
    y[0] = expression(tt.program_id(0))

  make = {jnp.int32: i32, jnp.float32: f32}[dtype]
  graph = simplified(kernel, y=Out(make(1)))
  store = graph.body.eqns[-1]
  return store.values[0], graph


@pytest.mark.parametrize("identity", [
  lambda i: i + 0, lambda i: 0 + i, lambda i: i - 0, lambda i: i * 1, lambda i: 1 * i, lambda i: i // 1,
  lambda i: i | 0, lambda i: i ^ 0, lambda i: i << 0, lambda i: i & i, lambda i: tt.minimum(i, i),
  lambda i: tt.where(i > 3, i, i), lambda i: tt.where(tt.where(True, True, i > 0), i, 7), lambda i: tt.full((), i),
  lambda i: i + (i - i)])
def test_identities_leave_the_operand(identity):
  value, graph = stored(identity)
  assert names(graph) == ["program_id", "store"]
  assert value is graph.body.eqns[0].outvars[0]


@pytest.mark.parametrize(("expression", "want"), [
  (lambda i: i * 0, 0), (lambda i: i % 1, 0), (lambda i: i - i, 0), (lambda i: i & 0, 0),
  (lambda i: tt.full((), 7) // 2 + 3, 6), (lambda i: -tt.full((), 7) // 2, -4), (lambda i: -tt.full((), 7) % 3, 2),
  (lambda i: tt.full((), 2**31 - 1) + 1, -2**31), (lambda i: tt.full((), 65536) * 65536, 0),
  (lambda i: tt.cdiv(tt.full((), 1000), 64), 16), (lambda i: tt.full((), 5) << 3, 40),
  (lambda i: tt.where(tt.full((), 5) > 3, 1, i), 1), (lambda i: tt.full((), -9) >> 1, -5)])
def test_integer_constants_fold_as_32_bits(expression, want):
  value, graph = stored(expression)
  assert value == Literal(want, value.type.dtype)
  assert names(graph) == ["store"]


def test_float_constants_fold_in_f32_and_identities_of_floats_are_exact():
  value, _ = stored(lambda i: tt.full((), 0.1) + 0.2, dtype=jnp.float32)
  assert value.value == float(np.float32(0.1) + np.float32(0.2))
  value, graph = stored(lambda i: i.astype(jnp.float32) + 0.0, dtype=jnp.float32)
  assert names(graph) == ["program_id", "cast", "add", "store"]  # -0.0 + 0.0 is 0.0
  value, graph = stored(lambda i: i.astype(jnp.float32) * 0, dtype=jnp.float32)
  assert "mul" in names(graph)  # NaN * 0 is NaN
  value, graph = stored(lambda i: i.astype(jnp.float32) * 1 / 1, dtype=jnp.float32)
  assert names(graph) == ["program_id", "cast", "store"]
  value, graph = stored(lambda i: tt.exp(tt.full((), 1.5)), dtype=jnp.float32)
  assert "exp" in names(graph)  # approximate on the device
  value, _ = stored(lambda i: tt.full((), 1.0) / 0, dtype=jnp.float32)
  assert value.value == math.inf


def test_a_division_by_zero_and_a_cast_out_of_range_are_left_to_the_device():
  _, graph = stored(lambda i: tt.full((), 1) // 0)
  assert "floordiv" in names(graph)
  _, graph = stored(lambda i: tt.full((), 1e20).astype(jnp.int32))
  assert "cast" in names(graph)
  value, _ = stored(lambda i: tt.full((), -2.7).astype(jnp.int32))
  assert value.value == -2


def test_identities_do_not_replace_a_tile_by_the_scalar_that_is_spread():
  def kernel(x, y):
    y[...] = tt.where(x[...] > 0, 1.0, 1.0) * x[...]

  graph = simplified(kernel, x=f32(8), y=Out(f32(8)))
  assert graph.body.eqns[-1].values[0].type.shape == (8,)
  assert "select" in names(graph)


def test_equal_scalar_equations_are_shared_in_a_block_and_inside_it():
  def kernel(y):
    i = tt.program_id(0)
    y[i * 4] = 1
    with tt.when(tt.program_id(0) > 0):
      y[4 * i + 1] = 2
    for k in tt.range(4):
      y[i * 4 + k] = 3
      y[k + i * 4] = 4
    y[i + 1] = 5

  assert names(simplified(kernel, y=Out(i32(64)))) == [
    "program_id", "mul", "store", "gt", "cond", "add", "store", "for_loop", "add", "store", "add", "store", "add",
    "store"]


def test_equations_of_a_branch_are_not_shared_with_what_follows_it():
  def kernel(y):
    i = tt.program_id(0)
    with tt.when(i > 0):
      y[i * 3] = 1
    y[i * 3] = 2

  assert names(simplified(kernel, y=Out(i32(64)))).count("mul") == 2


def test_dead_code_goes_and_loads_of_it_but_no_store_copy_or_order():
  def kernel(x, y):
    s = tt.alloc_shared((8,), x.dtype)
    unused = tt.alloc_shared((8,), x.dtype)
    tt.exp(x[...] + 1)
    tt.copy(x, s)
    sync()
    with tt.when(tt.program_id(0) > 0):
      tt.exp(x[...])
    for _ in tt.range(3):
      tt.exp(x[...])
    tt.fori_loop(0, 3, lambda i, c: c + x[0], 0.0)
    assert unused is not None
    y[...] = s[...]

  assert names(simplified(kernel, x=f32(8), y=Out(f32(8)))) == ["alloc", "copy", "sync", "load", "store"]


def test_empty_roles_stay():
  def kernel(y):
    with tt.warpgroup(0, regs=24):
      tt.program_id(0) + 1

  assert names(simplified(kernel, y=Out(i32(4)))) == ["warpgroup"]


def test_known_branches_are_inlined_and_empty_loops_are_their_initial_values():
  def kernel(y):
    one = tt.full((), 1)
    with tt.when(one == 1) as w:
      y[0] = 5
    with w.otherwise():
      y[1] = 6
    y[2] = tt.cond(one > 1, lambda: tt.full((), 3), lambda: tt.full((), 4))
    y[3] = tt.fori_loop(3, 3, lambda i, c: c + i, 7)
    for k in tt.range(one - 1):
      y[k] = 0

  graph = simplified(kernel, y=Out(i32(8)))
  assert names(graph) == ["store"] * 3
  assert [e.values[0].value for e in graph.body.eqns] == [5, 4, 7]


def test_literal_parts_of_views_become_static_and_edges_that_cut_nothing_go():
  def kernel(x, y):
    zero = tt.full((), 0)
    group = x.at[tt.ds(zero, 6)]
    y[0:4] = group[tt.ds(tt.full((), 1), 4)]
    y[tt.ds(tt.program_id(0) * 0, 4)] = group[tt.ds(tt.program_id(0), 4)]

  graph = simplified(kernel, x=f32(8), y=Out(f32(8)))
  load, store, second, last = [e for e in graph.body.eqns if e.primitive.name in ("load", "store")]
  assert load.params["views"][0].dims == (ViewDim(1, 4),) and len(load.invars) == 1
  assert store.params["views"][0].dims == (ViewDim(0, 4),)
  assert second.params["views"][0].dims == (ViewDim(Dyn(0), 4, edges=((0, 6),)),)
  assert last.params["views"][0].dims == (ViewDim(0, 4),)


def test_lines_stay():
  def kernel(y):
    i = tt.program_id(0) + 0
    y[i] = 3

  first = kernel.__code__.co_firstlineno
  assert [e.loc.line - first for e in simplified(kernel, y=Out(i32(4))).body.eqns] == [1, 2]


def test_simplify_is_idempotent_and_does_not_change_its_argument():
  def kernel(x, y):
    for k in tt.range(tt.cdiv(x.shape[0], 4)):
      y[tt.block(k, 4)] = x[tt.block(k * 1, 4)] * 2

  graph = trace(kernel, x=f32(64), y=Out(f32(64)))
  before = to_text(graph)
  once = simplify(graph)
  assert to_text(simplify(once)) == to_text(once)
  assert to_text(graph) == before


OPS = {
  "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "min": tt.minimum, "max": tt.maximum,
  "div": lambda a, b: a // tt.maximum(b, 1), "mod": lambda a, b: a % tt.maximum(b, 1), "and": lambda a, b: a & b,
  "xor": lambda a, b: a ^ b, "where": lambda a, b: tt.where(a > b, a, b),
  "shift": lambda a, b: a >> tt.minimum(tt.maximum(b, 0), 31),
}


@pytest.mark.parametrize("seed", range(6))
def test_random_scalar_programs_compute_the_same(seed):
  rnd = random.Random(seed)
  n = 40

  def kernel(x, y):
    pool = [x[0], x[1], tt.program_id(0), tt.full((), 4)]
    for k in range(n):
      b = rnd.choice([*pool[-8:], rnd.choice([-3, 0, 1, 2, 7])])
      pool.append(OPS[rnd.choice(list(OPS))](rnd.choice(pool[-8:]), b))
      y[k] = pool[-1]

  graph = trace(kernel, grid=(1,), x=i32(2), y=Out(i32(n)))
  small = verify(simplify(graph))
  assert len(names(small)) < len(names(graph))
  x = np.array([rnd.randrange(-50, 50), rnd.randrange(-50, 50)], np.int32)
  one, two = jax.jit(lambda x: (run(small, x)[0], run(graph, x)[0]))(x)
  np.testing.assert_array_equal(one, two)


def test_a_computed_step_that_is_found_not_to_be_positive_leaves_no_loop():
  def kernel(y):
    for k in tt.range(5, 0, tt.full((), 2, jnp.int32) - 3):
      y[k] = 0

  assert "for_loop" not in names(simplified(kernel, y=Out(i32(8))))
