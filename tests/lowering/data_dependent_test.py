"""Trip counts, branches and addresses that depend on data, around and inside pipelined loops: who computes them, and
the numbers, of the PTX run on the CPU and of the jax ops."""
from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, assemble, lower, notes, struct, variants
from tests.tolerances import assert_close

rng = np.random.default_rng(12)

BK, BLOCKS = 64, 5
TRIPS = ((0, 0), (2, 2), (3, 1), (1, 2), (0, 2), (1, 5), (0, 5))        # (start, stop), with 0, 1 and more trips


def gemm_kernel(a, b, other, limits, c, *, walk, num_stages):
  """Adds the products of blocks k of A and B for each k that `walk` visits."""
  a_s = tt.alloc_shared((64, BK), a.dtype)
  b_s = tt.alloc_shared((BK, 64), b.dtype)
  acc = tt.alloc_fragment((64, 64), F32)
  acc[...] = 0
  lo, hi = limits[tt.program_id(0), 0], limits[tt.program_id(0), 1]

  def add(k: Any, right: Any = b) -> None:
    tt.copy(a.at[:, tt.block(k, BK)], a_s)
    tt.copy(right.at[tt.block(k, BK), :], b_s)
    tt.gemm(a_s, b_s, acc)

  walk(add, functools.partial(tt.pipelined, num_stages=num_stages), lo, hi, limits, b, other)
  c[tt.program_id(0), :, :] = acc[...]


# Each says, in numpy, which blocks it multiplies, of which B.

def plain(add, pipelined, lo, hi, limits, b, other):
  for k in pipelined(lo, hi):
    add(k)


def plain_blocks(lo, hi):
  return [(k, 0) for k in range(lo, hi)]


def branch_inside(add, pipelined, lo, hi, limits, b, other):
  for k in pipelined(lo, hi):
    with tt.when(k % 2 == 0):
      add(k)


def branch_inside_blocks(lo, hi):
  return [(k, 0) for k in range(lo, hi) if k % 2 == 0]


def branches_of_copies(add, pipelined, lo, hi, limits, b, other):
  for k in pipelined(lo, hi):
    with tt.when(k == 1) as w:
      add(k, other)
    with w.otherwise():
      add(k)


def branches_of_copies_blocks(lo, hi):
  return [(k, int(k == 1)) for k in range(lo, hi)]


def cond_index(add, pipelined, lo, hi, limits, b, other):
  for k in pipelined(lo, hi):
    add(tt.cond(k > 1, lambda j: j - 1, lambda j: j, k))


def cond_index_blocks(lo, hi):
  return [(k - 1 if k > 1 else k, 0) for k in range(lo, hi)]


def switch_index(add, pipelined, lo, hi, limits, b, other):
  for k in pipelined(lo, hi):
    add(tt.switch(k, (lambda j: j + 1, lambda j: 0, lambda j: j), k))


def switch_index_blocks(lo, hi):
  return [((k + 1, 0, k)[min(k, 2)], 0) for k in range(lo, hi)]


def while_index(add, pipelined, lo, hi, limits, b, other):
  """Carries a tile too, which the producer does not need."""
  root, _ = tt.while_loop(lambda c: c[0] * c[0] < hi, lambda c: (c[0] + 1, c[1] + 1), (0, tt.zeros((64,), F32)))
  for k in pipelined(lo, hi):
    add(tt.minimum(k, root))


def while_index_blocks(lo, hi):
  root = next(n for n in range(9) if n * n >= hi)
  return [(min(k, root), 0) for k in range(lo, hi)]


def carried_bound(add, pipelined, lo, hi, limits, b, other):
  n, _ = tt.fori_loop(lo, hi, lambda i, c: (c[0] + i % 2, c[1] * 2), (0, tt.zeros((64,), F32)))
  for k in pipelined(n):
    add(k)


def carried_bound_blocks(lo, hi):
  return [(k, 0) for k in range(sum(i % 2 for i in range(lo, hi)))]


def nested(add, pipelined, lo, hi, limits, b, other):
  for i in tt.range(lo, hi):
    for k in pipelined(i, hi):
      add(k)


def nested_blocks(lo, hi):
  return [(k, 0) for i in range(lo, hi) for k in range(i, hi)]


def carrying_loop_around(add, pipelined, lo, hi, limits, b, other):
  def body(i, n):
    for k in pipelined(n, hi):
      add(k)
    return n + i

  tt.fori_loop(lo, hi, body, lo)


def carrying_loop_around_blocks(lo, hi):
  out, n = [], lo
  for i in range(lo, hi):
    out += [(k, 0) for k in range(n, hi)]
    n += i
  return out


def while_around(add, pipelined, lo, hi, limits, b, other):
  def body(i):
    for k in pipelined(i, hi):
      add(k)
    return i + 2

  tt.while_loop(lambda i: i < hi, body, lo)


def while_around_blocks(lo, hi):
  return [(k, 0) for i in range(lo, hi, 2) for k in range(i, hi)]


def branches_around(add, pipelined, lo, hi, limits, b, other):
  def run(right):
    for k in pipelined(lo, hi):
      add(k, right)
    return lo

  n = tt.cond(hi > 2, lambda: run(other), lambda: lo + 1)
  with tt.when(n == lo + 1):
    tt.switch(lo, (lambda: run(b), lambda: run(other)))


def branches_around_blocks(lo, hi):
  return [(k, int(hi > 2 or lo > 0)) for k in range(lo, hi)]


def bound_of_a_tile(add, pipelined, lo, hi, limits, b, other):
  """The largest `stop` of all programs: a reduction, which only the consumers compute."""
  for k in pipelined(lo, tt.minimum(hi, tt.max(limits[:, 1]))):
    add(k)


def index_of_a_tile(add, pipelined, lo, hi, limits, b, other):
  """In a branch: blocks up to one more than the smallest start."""
  with tt.when(hi > lo):
    least = tt.min(limits[:, 0])
    for k in pipelined(lo, hi):
      add(tt.minimum(least + 1, k))


def index_of_a_tile_blocks(lo, hi):
  return [(min(k, 1), 0) for k in range(lo, hi)]


FORMS = {w.__name__: (w, b) for w, b in (
  (plain, plain_blocks), (branch_inside, branch_inside_blocks), (branches_of_copies, branches_of_copies_blocks),
  (cond_index, cond_index_blocks), (switch_index, switch_index_blocks), (while_index, while_index_blocks),
  (carried_bound, carried_bound_blocks), (nested, nested_blocks),
  (carrying_loop_around, carrying_loop_around_blocks), (while_around, while_around_blocks),
  (branches_around, branches_around_blocks), (bound_of_a_tile, plain_blocks),
  (index_of_a_tile, index_of_a_tile_blocks),
)}


def call_of(form: str, *, num_stages: int = 3, **call: Any) -> tt.TileCall:
  kernel = functools.partial(gemm_kernel, walk=FORMS[form][0], num_stages=num_stages)
  return tt.tile_call(kernel, struct(len(TRIPS), 64, 64), grid=len(TRIPS), **call)


def data(columns: int = BK * BLOCKS) -> list[np.ndarray]:
  shapes = ((64, columns), (columns, 64), (columns, 64))
  return [*(rng.standard_normal(s).astype(BF16) for s in shapes), np.asarray(TRIPS, np.int32)]


def reference(form: str, inputs: list[np.ndarray]) -> np.ndarray:
  a, *right = (x.astype(np.float64) for x in inputs[:3])
  out = np.zeros((len(TRIPS), 64, 64))
  for c, (lo, hi) in zip(out, TRIPS):
    for k, which in FORMS[form][1](lo, hi):
      rows = slice(k * BK, (k + 1) * BK)
      c += a[:, rows] @ right[which][rows]
  return out


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_right_and_a_producer_runs_ahead(form: str):
  inputs = data()
  want = reference(form, inputs)
  lowered = call_of(form).lower(*inputs)

  assert "filled by TMA from the producer warpgroup" in notes(lowered)
  assert assemble(lowered).image
  assert_close(lowered.simulate(*inputs)[0], want, "gemm", f"{form}, PTX")
  assert_close(np.asarray(call_of(form, backend="xla")(*inputs)), want, "gemm", f"{form}, jax ops")


@pytest.mark.parametrize(("num_stages", "call"), [
  (1, {}), (2, dict(persistent=True)), (4, dict(persistent=True)), (3, dict(warpgroups=2))])
@pytest.mark.parametrize("form", ["plain", "carrying_loop_around", "index_of_a_tile"])
def test_they_are_right_with_any_number_of_slots_and_in_persistent_kernels(form, num_stages, call):
  inputs = data()
  lowered = call_of(form, num_stages=num_stages, **call).lower(*inputs)
  for seed in range(2):
    assert_close(lowered.simulate(*inputs, seed=seed)[0], reference(form, inputs), "gemm", f"{form}, {call}")


@pytest.mark.parametrize("call", [{}, dict(persistent=True)])
@pytest.mark.parametrize("form", ["plain", "while_index", "index_of_a_tile"])
def test_they_are_right_where_threads_copy(form, call):
  """Rows of a multiple of 4 bytes: TMA cannot take A, and a whole warpgroup produces."""
  inputs = data()
  inputs[0] = inputs[0][:, :-2]
  padded = [np.pad(inputs[0], ((0, 0), (0, 2))), *inputs[1:]]
  lowered = call_of(form, **call).lower(*inputs)

  assert set(variants(lowered, "copy")) == {"tma", "cp_async"}
  assert "filled by cp_async copies, TMA from the producer" in notes(lowered)
  assert_close(lowered.simulate(*inputs)[0], reference(form, padded), "gemm", f"{form}, threads copy")


def test_what_takes_a_tile_is_sent_to_the_producer_through_shared_memory():
  inputs = data()
  once, persistent = (call_of("index_of_a_tile", persistent=p).lower(*inputs) for p in (False, True))

  for lowered in (once, persistent):
    assert "reduce_min is computed by the consumers and sent to the producer" in notes(lowered)
  assert [len(lowered.as_text("schedule").split("alloc_barrier")) - 1 for lowered in (once, persistent)] == [3, 4]


def test_the_producer_is_sent_what_it_uses_not_what_that_is_made_of():
  def kernel(a, b, lens, c):
    a_s, b_s = tt.alloc_shared((64, BK), a.dtype), tt.alloc_shared((BK, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), F32)
    acc[...] = 0
    n = lens[...]                                        # over four warps: a sum is one of four parts
    last = tt.sum(n) - tt.max(n) * 2 + tt.min(n)
    for k in tt.pipelined(last, num_stages=2):
      tt.copy(a.at[:, tt.block(k, BK)], a_s)
      tt.copy(b.at[tt.block(k, BK), :], b_s)
      tt.gemm(a_s, b_s, acc)
    c[...] = acc[...]

  a, b, _, _ = data()
  lens = np.zeros(700, np.int32)
  lens[[3, 333, 666]] = 1, 2, 2
  lowered = lower(kernel, [a, b, lens], struct(64, 64))
  assert notes(lowered).count("computed by the consumers and sent to the producer") == 1
  assert_close(lowered.simulate(a, b, lens)[0], a[:, :BK].astype(np.float64) @ b[:BK].astype(np.float64), "gemm")


def test_what_consumers_compute_in_a_loop_keeps_the_copies_with_them():
  def kernel(a, b, y):
    a_s, b_s = tt.alloc_shared((64, BK), a.dtype), tt.alloc_shared((BK, 64), b.dtype)
    acc, at = tt.alloc_fragment((64, 64), F32), tt.alloc_fragment((), np.int32)
    acc[...], at[...] = 0, 0
    for k in tt.pipelined(BLOCKS, num_stages=3):
      tt.copy(a.at[:, tt.block(at[...], BK)], a_s)
      tt.copy(b.at[tt.block(at[...], BK), :], b_s)
      tt.gemm(a_s, b_s, acc)
      at[...] = tt.max(tt.where(tt.arange(8) < k, tt.arange(8), 0))
    y[...] = acc[...]

  a, b, _, _ = data()
  lowered = lower(kernel, [a, b], struct(64, 64))
  want = sum(a[:, k * BK:(k + 1) * BK].astype(np.float64) @ b[k * BK:(k + 1) * BK].astype(np.float64)
             for k in (0, 0, 0, 1, 2))

  assert "no producer warpgroup: what the copies need at" in notes(lowered)
  assert "is computed by the consumers, in a loop" in notes(lowered)
  assert_close(lowered.simulate(a, b)[0], want, "gemm", "one slot")
