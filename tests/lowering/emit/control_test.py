"""Loops, branches and snapshots in registers: the instructions that carry them."""
from __future__ import annotations

import re

import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import F32, assemble, count, lower, struct


def test_a_loop_that_certainly_runs_is_tested_at_its_end_only():
  def kernel(x, n, y):
    acc = tt.alloc_fragment((128,), F32)
    acc[...] = 0
    for k in tt.range(8 if static else n[...]):
      acc[...] += x[k, :]
    y[...] = acc[...]

  static = True
  inputs = [struct(8, 128), struct(dtype="int32")]
  assert count(lower(kernel, inputs, struct(128), name="certain"), "bra") == 1
  static = False
  assert count(lower(kernel, inputs, struct(128), name="maybe"), "bra") == 2


def test_a_computed_step_that_is_not_positive_makes_no_iterations():
  """Known to be positive, as tt.num_ctas() is, a step is not looked at."""
  def kernel(b, y):
    step = b[tt.program_id(0)]
    s = tt.alloc_fragment((), np.int32)
    s[...] = 7
    for k in tt.range(1, 6, step):
      s[...] = s[...] * 3 + k
    for _ in tt.range(3, 0, step):
      s[...] = -99
    y[tt.program_id(0)] = s[...]

  def known(b, y):
    for k in tt.range(tt.program_id(0), 5, tt.maximum(b[0], 1)):
      y[k] = k

  steps = np.asarray([2, 1, 0, -1, -2**31, 2**30], np.int32)
  lowered = lower(kernel, [struct(6, dtype="int32")], struct(6, dtype="int32"), grid=6)
  want = []
  for step in steps.tolist():
    s = 7
    for k in range(1, 6, step) if step > 0 else ():
      s = s * 3 + k
    want.append(s)
  np.testing.assert_array_equal(lowered.simulate(steps)[0], want)
  assemble(lowered)
  assert count(lower(known, [struct(6, dtype="int32")], struct(6, dtype="int32")), "bra") == 2


def test_a_fragment_keeps_its_registers_and_a_snapshot_copies_only_where_it_outlives_a_write():
  def kernel(x, y, *, late):
    acc = tt.alloc_fragment((128,), F32)
    acc[...] = x[...]
    old = acc[...]
    if not late:
      y[0, :] = old
    acc[...] = acc[...] * 2
    if late:
      y[0, :] = old
    y[1, :] = acc[...]

  early, late = (lower(kernel, [struct(128)], struct(2, 128), static={"late": v}) for v in (False, True))
  assert count(late, "mov.f32") == count(early, "mov.f32") + 4                        # elements a thread


def test_swapped_carries_go_through_spare_registers():
  def kernel(x, y):
    a, b = tt.fori_loop(0, 5, lambda i, c: (c[1], c[0] + i), (x[0, :], x[1, :]))
    y[0, :], y[1, :] = a, b

  text = lower(kernel, [struct(2, 128)], struct(2, 128)).as_text("ptx")
  body = text[text.index("loop"):]
  moves = re.findall(r"mov\.f32 (%f\d+), (%f\d+);", body)
  targets = [d for d, _ in moves]
  assert len(targets) == len(set(targets)) >= 3                  # a copy, then both carries: none overwritten early
  written: set[str] = set()
  for d, s in moves:
    assert s not in written or s not in {m[1] for m in moves if m[0] in written}
    written.add(d)


def test_branches_assign_one_set_of_registers():
  def kernel(x, y):
    v = x[...]
    y[...] = tt.cond(tt.program_id(0) == 0, lambda: v * 2, lambda: v - 1)

  lowered = lower(kernel, [struct(128)], struct(128), grid=2)
  assert count(lowered, "bra") == 2
  assert len(set(re.findall(r"mov\.f32 (%f\d+),", lowered.as_text("ptx")))) == 4       # elements a thread


def test_a_switch_compares_with_each_case_but_the_last():
  def kernel(x, y):
    v = x[...]
    y[...] = tt.switch(tt.program_id(0), (lambda: v, lambda: v * v, lambda: -v, lambda: v + 1))

  lowered = lower(kernel, [struct(128)], struct(128), grid=4)
  assert count(lowered, "setp.gt.s32") == 3
  assemble(lowered)


def test_scalars_are_stored_by_one_thread():
  def kernel(x, y):
    y[tt.program_id(0)] = x[tt.program_id(0)] * 2

  lowered = lower(kernel, [struct(64)], struct(64), grid=64)
  assert re.search(r"setp\.eq\.s32 (%p\d+), (%r\d+), 0;[^@]*@\1 st\.global", lowered.as_text("ptx"), re.DOTALL)


def test_copies_of_an_element_are_stored_once():
  """16 elements of 128 threads: only the threads whose other bits are zero store."""
  def kernel(x, y):
    y[...] = x[...]

  text = lower(kernel, [struct(16)], struct(16)).as_text("ptx")
  found = re.search(r"and\.b32 (%r\d+), %r\d+, (\d+);\s+setp\.eq\.s32 (%p\d+), \1, 0;[^@]*@\3 st\.global", text)
  assert int(found.group(2)) == 127 & ~3                         # four threads of four elements each


@pytest.mark.parametrize(("trips", "unroll", "copies", "loops"), [
  (6, 6, 6, 0), (6, 4, 3, 1), (7, 2, 1, 1), (6, 1, 1, 1)])
def test_a_loop_of_known_trips_is_unrolled_by_the_most_that_divides_them(trips, unroll, copies, loops):
  def kernel(x, y):
    s = tt.alloc_fragment((128,), F32)
    s[...] = 0
    for i in tt.range(1, 1 + 2 * trips, 2, unroll=unroll):
      s[...] = s[...] * 0.5 + tt.exp2(x[i])
    y[...] = s[...]

  x = np.random.default_rng(0).standard_normal((20, 128), np.float32)
  call = tt.tile_call(kernel, struct(128), grid=1)
  lowered = call.lower(x)
  assemble(lowered)
  assert (count(lowered, "ex2"), count(lowered, "bra")) == (4 * copies, loops)        # elements a thread
  want = np.zeros(128)
  for i in range(1, 1 + 2 * trips, 2):
    want = want * 0.5 + np.exp2(x[i].astype(np.float64))
  np.testing.assert_allclose(lowered.simulate(x)[0], want, rtol=1e-6)
