"""tt.assume: what the compiler takes from it, where that holds, and what is refused."""
from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, I32, assemble, declined, lower, struct, variants
from tests.tracing import Out, array, trace
from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError
from tiletrace.core.graph import Var, walk
from tiletrace.core.simplify import simplify
from tiletrace.lowering.facts import Fact, Facts

rng = np.random.default_rng(4)


def facts_of(body, **arrays) -> tuple[Facts, dict[str, Var]]:
  """The facts of a kernel `body(n, y)` with n: i32[8], and the variables of the scalars that it returns by name."""
  found = {}

  def kernel(n, y):
    found.update(body(n, y))
    y[0] = 0

  graph = trace(kernel, grid=(1,), n=array(dtypes.i32, 8), y=Out(array(dtypes.i32, 8)))
  return Facts(graph), {k: v.var for k, v in found.items()}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("relation", ["<", "<=", ">", ">=", "=="])
def test_comparisons_bound_both_sides(relation, swapped):
  compare = {"<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
             "==": lambda a, b: a == b}[relation]

  def body(n, y):
    a, b = n[0], n[1]
    tt.assume((a >= 3) & (a <= 9) & (b >= 5) & (b <= 7))
    tt.assume(compare(b, a) if swapped else compare(a, b))
    return dict(a=a, b=b)

  facts, names = facts_of(body)
  pairs = [(a, b) for a, b in itertools.product(range(3, 10), range(5, 8)) if compare(*((b, a) if swapped else (a, b)))]
  for name, values in zip(("a", "b"), zip(*pairs)):
    fact = facts[names[name]]
    assert fact.lo <= min(values) and max(values) <= fact.hi             # sound
    assert (fact.lo, fact.hi) == (min(values), max(values)), (relation, name)      # and no weaker than it may be


def test_multiples_are_divisors_and_several_of_them_their_least_common_multiple():
  def body(n, y):
    a = n[0]
    tt.assume(a % 8 == 0)
    tt.assume((a % 12 == 0) & (a >= 0))
    return dict(a=a, twice=a * 2, sum=a + 6)

  facts, v = facts_of(body)
  assert facts[v["a"]] == Fact(0, 2**31 - 1, 24)
  assert (facts[v["twice"]].divisor % 16, facts[v["sum"]].divisor % 2) == (0, 0)


def test_it_holds_for_what_is_computed_before_it_too():
  def body(n, y):
    a = n[0]
    b = a + 1
    tt.assume((a >= 0) & (a < 5))
    return dict(b=b)

  facts, v = facts_of(body)
  assert facts[v["b"]] == Fact(1, 5, 1)


def test_in_a_branch_it_says_nothing_outside():
  def body(n, y):
    a, found = n[0], {}
    with tt.when(a < 100):
      before = a + 1
      tt.assume((a >= 0) & (a < 5))
      found.update(inner=a + 1, before=before)
    return dict(found, a=a, after=a + 1)

  facts, v = facts_of(body)
  assert facts[v["inner"]] == Fact(1, 5, 1)
  assert facts[v["a"]] == facts[v["after"]] == Fact()


def test_a_contradiction_changes_nothing():
  def body(n, y):
    i = tt.program_id(0)
    tt.assume(i > 7)
    return dict(i=i)

  facts, v = facts_of(body)
  assert facts[v["i"]] == Fact(0, 0, 1)


def test_it_survives_simplification_and_makes_no_code():
  def kernel(n, y, *, told):
    a = n[0]
    if told:
      tt.assume(a * 3 < 100)
    y[0] = a

  assert [e.primitive.name for e in walk(simplify(trace(
    lambda n, y: kernel(n, y, told=True), n=array(dtypes.i32, 8), y=Out(array(dtypes.i32, 8)))).body)][-2:] == [
      "assume", "store"]
  told, plain = (lower(kernel, [struct(8, dtype=I32)], struct(8, dtype=I32), static={"told": t}) for t in (True, False))
  assert assemble(told).registers == assemble(plain).registers


def aligned_kernel(x, at, y, *, told):
  s = tt.alloc_shared((64, 64), x.dtype)
  acc = tt.alloc_fragment((64, 64), F32)
  acc[...] = 0
  for k in tt.pipelined(at.shape[0], num_stages=2):
    start = at[k]
    if told:
      tt.assume(start % 8 == 0)
    tt.copy(x.at[:, tt.ds(start, 64)], s)
    acc[...] += s[...].astype(F32)
  y[...] = acc[...]


def test_a_multiple_of_16_bytes_makes_a_copy_tma():
  inputs = [struct(64, 512, dtype=BF16), struct(5, dtype=I32)]
  told, plain = (lower(aligned_kernel, inputs, struct(64, 64), static={"told": t}) for t in (True, False))

  assert (variants(told, "copy"), "tma" in variants(plain, "copy")) == (["tma"], False)
  assert "16" in declined(plain, "copy")["tma"]
  x, at = rng.standard_normal((64, 512)).astype(BF16), np.asarray([0, 8, 256, 448, 480], np.int32)
  padded = np.pad(x.astype(np.float64), ((0, 0), (0, 64)))
  want = sum(padded[:, a:a + 64] for a in at)
  for lowered in (told, plain):
    np.testing.assert_allclose(lowered.simulate(x, at)[0], want, rtol=1e-5, atol=1e-5)
  assert assemble(told).image


def test_a_bound_makes_a_bounds_check_superfluous():
  def kernel(x, at, y, *, told):
    i = at[0]
    if told:
      tt.assume((i >= 0) & (i < 8))
    y[...] = x[tt.block(i, 128)]

  inputs = [struct(1024), struct(1, dtype=I32)]
  told, plain = (lower(kernel, inputs, struct(128), static={"told": t}) for t in (True, False))
  assert [bool(re.search(r"@%\w+ ld\.global\S*v4", low.as_text("ptx"))) for low in (told, plain)] == [False, True]
  x, at = rng.standard_normal(1024).astype(np.float32), np.asarray([7], np.int32)
  np.testing.assert_array_equal(told.simulate(x, at)[0], x[896:])


def test_jax_ops_ignore_it():
  def kernel(x, y):
    tt.assume(x[0] > 5)
    y[...] = x[...]

  x = np.arange(4, dtype=np.int32)
  np.testing.assert_array_equal(tt.tile_call(kernel, struct(4, dtype=I32), grid=1, backend="xla")(x), x)


@pytest.mark.parametrize(("make", "says"), [
  (lambda n: n[...] > 0, r"tt.assume takes a scalar condition, got bool\[8\]"),
  (lambda n: n[0], "tt.assume takes a bool, got i32"), (lambda n: False, "tt.assume: the condition is False"),
  (lambda n: 1, "tt.assume takes a bool, got 1")])
def test_other_conditions_are_refused_at_their_line(make, says):
  def kernel(n, y):
    tt.assume(make(n))

  with pytest.raises(TileTypeError, match=says) as info:
    trace(kernel, n=array(dtypes.i32, 8), y=Out(array(dtypes.i32, 8)))
  assert "tt.assume(make(n))" in str(info.value)
