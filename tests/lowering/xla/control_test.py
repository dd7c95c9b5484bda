"""Loops and branches of the xla backend, over values and references."""
from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tiletrace as tt
from tests.lowering.xla.kernels import call, traced
from tiletrace.lowering.xla import run as backend

rng = np.random.default_rng(3)


@pytest.fixture(params=["in order", "side by side"], autouse=True)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
  if request.param == "in order":
    monkeypatch.setattr(backend, "_SIDE_BY_SIDE_BYTES", 0)


@pytest.mark.parametrize(("start", "stop", "step"), [
  (0, 5, 1), (2, 9, 3), (2, 8, 3), (5, 5, 1), (7, 2, 1), (9, 2, -2), (3, -4, -1), (2, 5, -1)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_range_runs_as_in_python(start, stop, step, dynamic):
  def kernel(b, y):
    i = tt.program_id(0)
    lo, hi = (b[0], b[1]) if dynamic else (start, stop)
    s = tt.alloc_fragment((), np.int32)
    s[...] = i
    for k in tt.range(lo, hi, step):
      s[...] = s[...] * 3 + k
    y[i] = s[...]

  y, = call(kernel, np.asarray([start, stop], np.int32), out=((3,), np.int32), grid=(3,))
  want = np.arange(3, dtype=np.int32)
  for k in range(start, stop, step):
    want = want * 3 + np.int32(k)
  np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("step", [2, 1, 0, -1, -2**31])
def test_a_computed_step_that_is_not_positive_makes_no_iterations(step):
  def kernel(b, y):
    s = tt.alloc_fragment((), np.int32)
    s[...] = 7
    for k in tt.range(b[0], b[1], b[2]):
      s[...] = s[...] * 3 + k
    for _ in tt.range(5, 0, b[2]):
      s[...] = -99
    y[...] = s[...]

  y, = call(kernel, np.asarray([1, 6, step], np.int32), out=((), np.int32), grid=(1,))
  want = 7
  for k in range(1, 6, step) if step > 0 else ():
    want = want * 3 + k
  assert y == want


def test_loops_may_have_another_length_in_each_program():
  def kernel(n, x, y):
    i = tt.program_id(0)
    s = tt.alloc_fragment((4,), np.float32)
    s[...] = 0
    for k in tt.range(n[i]):
      for _ in tt.range(k):
        s[...] += x[i, :]
    y[i, :] = s[...]

  n, x = np.asarray([0, 1, 5, 3], np.int32), rng.integers(1, 9, (4, 4)).astype(np.float32)
  y, = call(kernel, n, x, out=((4, 4), np.float32), grid=(4,))
  np.testing.assert_array_equal(y, x * (n * (n - 1) // 2)[:, None])


def test_fori_loop_carries_a_tree():
  def kernel(x, y, z):
    i = tt.program_id(0)

    def body(k, carry):
      a, d = carry
      return a + x[i, :] * k.astype(np.float32), {"n": d["n"] + k, "m": tt.maximum(d["m"], a)}

    a, d = tt.fori_loop(1, 5, body, (x[i, :], {"n": 0, "m": tt.zeros((4,), np.float32)}))
    y[i, :] = a + d["m"]
    z[i] = d["n"]

  x = rng.integers(1, 9, (3, 4)).astype(np.float32)
  y, z = call(kernel, x, out=[((3, 4), np.float32), ((3,), np.int32)], grid=(3,))
  np.testing.assert_array_equal(y, x * 11 + x * 7)
  np.testing.assert_array_equal(z, [10, 10, 10])


def test_while_loop_reads_references_that_its_body_writes():
  def kernel(x, y, z):
    i = tt.program_id(0)
    r = tt.alloc_fragment((), np.int32)
    r[...] = x[i]

    def body(n):
      r[...] = tt.where(r[...] % 2 == 0, r[...] // 2, 3 * r[...] + 1)
      return n + 1

    y[i] = tt.while_loop(lambda n: (r[...] != 1) & (n < 100), body, 0)
    z[i] = r[...]

  def steps(n: int) -> int:
    return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

  x = np.asarray([6, 1, 7, 27 - 2], np.int32)
  y, z = call(kernel, x, out=[((4,), np.int32)] * 2, grid=(4,))
  np.testing.assert_array_equal(y, [steps(int(n)) for n in x])
  np.testing.assert_array_equal(z, 1)


def test_when_and_otherwise_write_one_or_the_other():
  def kernel(x, y):
    i = tt.program_id(0)
    with tt.when(x[i] > 0) as w:
      y[i] = x[i] * 2
    with w.otherwise():
      with tt.when(x[i] < -1):
        y[i] = 0.0

  x = np.asarray([1.5, -0.5, -3, 2], np.float32)
  y, = call(kernel, x, out=((4,), np.float32), grid=(4,))
  np.testing.assert_array_equal(y, [3, np.nan, 0, 4])


def test_cond_and_switch_give_values():
  def kernel(x, y, z):
    i = tt.program_id(0)
    v = x[i, :]
    y[i, :] = tt.cond(i > 1, lambda: v * 2, lambda: -v)
    z[i, :] = tt.switch(i - 1, [lambda: v + 1, lambda: v * v])  # clamped to a branch that exists

  x = rng.integers(-9, 9, (4, 5)).astype(np.float32)
  y, z = call(kernel, x, out=[((4, 5), np.float32)] * 2, grid=(4,))
  np.testing.assert_array_equal(y, np.where(np.arange(4)[:, None] > 1, x * 2, -x))
  np.testing.assert_array_equal(z, np.where(np.arange(4)[:, None] > 1, x * x, x + 1))


def test_a_buffer_in_a_loop_is_poison_in_each_iteration():
  def kernel(y):
    for k in tt.range(3):
      r = tt.alloc_fragment((2,), np.float32)
      with tt.when(k == 1):
        r[...] = 1.0
      y[k, :] = r[...]

  y, = call(kernel, out=((3, 2), np.float32), grid=(1,))
  np.testing.assert_array_equal(y, [[np.nan] * 2, [1, 1], [np.nan] * 2])


def test_every_construct_runs_under_shard_map():
  def kernel(x, n, y):
    i = tt.program_id(0)
    r, c = tt.alloc_fragment((4,), np.float32), tt.alloc_fragment((), np.int32)
    r[...] = 0
    c[...] = 0
    for k in tt.range(n[0]):
      with tt.when(k > 0) as w:
        r[...] = tt.where(k == 1, 5.0, r[...])
      with w.otherwise():
        r[...] = x[i, :]
      c[...] += 1
    m = tt.while_loop(lambda m: m < 3, lambda m: m + 1, 0)
    v = tt.fori_loop(0, m, lambda k, v: v + 1, tt.zeros((4,), np.float32))
    y[i, :] = tt.cond(i == 0, lambda: v + r[...], lambda: v * c[...]) + tt.switch(i, [lambda: v, lambda: v * 0])

  mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  x, n = rng.standard_normal((6, 4)).astype(np.float32), np.asarray([4, 4], np.int32)
  graph = traced(kernel, [x[:3], n[:1]], [x[:3]], (3,))
  for x_spec, n_spec in ((P("d"), P()), (P(), P("d"))):         # operands that vary differently
    fn = jax.shard_map(lambda x, n: backend.run(graph, x, n)[0], mesh=mesh, in_specs=(x_spec, n_spec), out_specs=P("d"))
    y = jax.jit(fn)(x if x_spec else x[:3], n if n_spec else n[:1])
    np.testing.assert_array_equal(y, [[11] * 4, [12] * 4, [12] * 4] * 2)
