"""Reductions that a loop accumulates: the threads' parts are joined after it, where nothing else asks for the total."""
from __future__ import annotations

import functools
import re

import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import Case
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F32, I32, assemble, lower, struct
from tests.tolerances import assert_close
from tiletrace.stages import Lowered

OPS = {"sum": (tt.add, np.sum, 0), "max": (tt.maximum, np.max, -np.inf), "min": (tt.minimum, np.min, np.inf),
       "prod": (tt.multiply, np.prod, 1)}


def in_loops(lowered: Lowered, instruction: str) -> int:
  """How often an instruction stands between a label and a branch back to it."""
  lines = lowered.as_text("ptx").splitlines()
  labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
  inside: set[int] = set()
  for i, line in enumerate(lines):
    branch = re.search(r"bra(?:\.uni)? (\$\w+);", line)
    if branch and labels[branch[1]] < i:
      inside.update(range(labels[branch[1]], i))
  assert inside
  return sum(instruction in lines[i] for i in inside)


def exchanges(lowered: Lowered) -> int:
  return sum(in_loops(lowered, what) for what in ("shfl.sync.bfly", "redux", "vote", "bar.sync", "st.shared"))


def run(call: tt.TileCall, *inputs: np.ndarray) -> tuple[Lowered, list[np.ndarray]]:
  lowered = call.lower(*inputs)
  return lowered, simulated.run(lowered, Case(call, inputs, (), "exact"))


def fragment_kernel(x, start, y, *, name, axis, keepdims, block):
  combine = OPS[name][0]
  total = tt.alloc_fragment(y.shape, y.dtype)
  total[...] = start[...]
  for k in tt.range(tt.cdiv(x.shape[axis], block)):
    at = (slice(None), tt.block(k, block)) if axis else (tt.block(k, block), slice(None))
    v = tt.load(x.at[at], fill_value=OPS[name][2])
    total[...] = combine(total[...], getattr(tt, name)(v * 1.0, axis=axis, keepdims=keepdims))
  y[...] = total[...]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("shape", "axis", "block"), [
  ((1, 5000), 1, 1024), ((4, 700), 1, 128), ((3, 229), 1, 100), ((16, 96), 1, 33), ((500, 24), 0, 64)], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_a_total_in_a_fragment_crosses_threads_once_after_the_loop(name, shape, axis, block, keepdims):
  rng = np.random.default_rng(3)
  x = (1 + rng.normal(0, 0.05, shape)).astype(F32)
  kept = x.sum(axis, keepdims=keepdims).shape
  start = (1 + rng.random(kept)).astype(F32)
  kernel = functools.partial(fragment_kernel, name=name, axis=axis, keepdims=keepdims, block=block)
  lowered, (got,) = run(tt.tile_call(kernel, struct(*kept), grid=1), x, start)
  wide = x.astype(np.float64)
  joined = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[name]
  assert_close(got, joined(start.astype(np.float64), OPS[name][1](wide, axis, keepdims=keepdims)), "reduce")
  assert exchanges(lowered) == 0
  if axis == 1:                                            # columns lie in one thread or another, as the layout has it
    assert "accumulates its own part" in lowered.as_text("schedule")
    assert "shfl.sync.bfly" in lowered.as_text("ptx")


@pytest.mark.parametrize("dtype", [I32, np.uint32], ids=["i32", "u32"])
def test_a_total_that_the_loop_carries_is_joined_after_it(dtype):
  def kernel(x, y, z):
    def body(k, carry):
      v = x[:, tt.block(k, 256)]
      return carry[0] + tt.sum(v, axis=1), tt.maximum(tt.max(v, axis=1), carry[1])

    start = tt.full((2,), 7, dtype), tt.full((2,), 5, dtype)
    y[...], z[...] = tt.fori_loop(0, tt.cdiv(x.shape[1], 256), body, start)

  x = np.random.default_rng(1).integers(0, 2**31, (2, 1000)).astype(dtype)
  lowered, (total, top) = run(tt.tile_call(kernel, (struct(2, dtype=dtype),) * 2, grid=1), x)
  np.testing.assert_array_equal(total, x.sum(1, dtype=dtype) + dtype(7))
  np.testing.assert_array_equal(top, np.maximum(x.max(1), 5))
  assert exchanges(lowered) == 0 and lowered.as_text("schedule").count("accumulates its own part") == 2


def test_a_scalar_total_and_the_bools_of_any_and_all_are_joined_after_the_loop():
  def kernel(x, total, some, every):
    s = tt.alloc_fragment((), F32)
    a, b = tt.alloc_fragment((2,), np.bool_), tt.alloc_fragment((2,), np.bool_)
    s[...], a[...], b[...] = 0, False, True
    for k in tt.range(tt.cdiv(x.shape[1], 128)):
      v = tt.load(x.at[:, tt.block(k, 128)], fill_value=1)
      s[...] += tt.sum(v)
      a[...] = a[...] | tt.any(v > 3, axis=1)
      b[...] = tt.all(v > 0, axis=1) & b[...]
    total[...], some[...], every[...] = s[...], a[...], b[...]

  x = np.random.default_rng(1).random((2, 500)).astype(F32) + 0.5
  x[1, 77] = 4
  x[0, 400] = -1
  out = struct(), struct(2, dtype=np.bool_), struct(2, dtype=np.bool_)
  lowered, (total, some, every) = run(tt.tile_call(kernel, out, grid=1), x)
  assert_close(total, x.astype(np.float64).sum() + 2 * 12, "reduce")
  assert some.tolist() == [False, True] and every.tolist() == [False, True]
  assert exchanges(lowered) == 0


def test_nan_and_the_rows_of_a_loop_without_iterations_come_through():
  def kernel(x, n, y):
    top = tt.alloc_fragment((2,), F32)
    top[...] = -3
    for k in tt.range(n[...]):
      top[...] = tt.maximum(top[...], tt.max(x[:, tt.block(k, 128)], axis=1))
    y[...] = top[...]

  x = np.zeros((2, 512), F32)
  x[1, 300] = np.nan
  call = tt.tile_call(kernel, struct(2), grid=1)
  assert run(call, x, np.int32(0))[1][0].tolist() == [-3, -3]
  np.testing.assert_array_equal(run(call, x, np.int32(4))[1][0], [0, np.nan])


def test_of_nested_loops_the_outermost_is_left_before_threads_meet():
  def kernel(x, y):
    total = tt.alloc_fragment((1,), F32)
    total[...] = 0
    for i in tt.range(4):
      for k in tt.range(3):
        total[...] += tt.sum(x[tt.ds(i, 1), tt.block(k, 512)], axis=1)
    y[...] = total[...]

  x = np.random.default_rng(1).normal(size=(4, 1400)).astype(F32)
  lowered, (got,) = run(tt.tile_call(kernel, struct(1), grid=1), x)
  np.testing.assert_allclose(got[0], x.astype(np.float64).sum(), rtol=1e-5, atol=1e-4)
  assert exchanges(lowered) == 0


def test_a_layout_of_three_warpgroups_and_a_persistent_kernel_are_no_exception():
  def kernel(x, y):
    total = tt.alloc_fragment((1,), F32)
    total[...] = 0
    for k in tt.range(tt.cdiv(x.shape[1], 768)):
      total[...] += tt.sum(x[tt.ds(tt.program_id(0), 1), tt.block(k, 768)], axis=1)
    y[tt.ds(tt.program_id(0), 1)] = total[...]

  x = np.random.default_rng(1).normal(size=(7, 2000)).astype(F32)
  call = tt.tile_call(kernel, struct(7), grid=7, warpgroups=3, persistent=True)
  lowered, (got,) = run(call, x)                  # 192 threads have all of a row, the others copies
  np.testing.assert_allclose(got, x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-4)
  assert "accumulates its own part, of 192" in lowered.as_text("schedule")


def used_in_the_loop(total, v, y):
  total[...] += tt.sum(v, axis=1)
  y[...] = total[...]


def another_op(total, v, y):
  total[...] += tt.max(v, axis=1)


def a_function_of_the_reduction(total, v, y):
  total[...] += tt.sqrt(tt.sum(v, axis=1))


def a_reduction_with_two_uses(total, v, y):
  s = tt.sum(v, axis=1)
  total[...] += s
  y[...] = s


def a_total_scaled_after_the_sum(total, v, y):
  total[...] = (total[...] + tt.sum(v, axis=1)) * 0.5


def a_branch(total, v, y):
  with tt.when(tt.sum(v) > 0):
    total[...] += tt.sum(v, axis=1)


@pytest.mark.parametrize("body", [used_in_the_loop, another_op, a_function_of_the_reduction, a_reduction_with_two_uses,
                                  a_total_scaled_after_the_sum, a_branch], ids=lambda f: f.__name__)
def test_a_total_that_something_else_asks_for_is_complete_in_every_iteration(body):
  def kernel(x, y, z):
    total = tt.alloc_fragment((2,), F32)
    total[...] = 0
    for k in tt.range(4):
      body(total, x[:, tt.block(k, 128)], y)
    y[...], z[...] = total[...], 0

  x = np.random.default_rng(1).random((2, 512)).astype(F32)
  call = tt.tile_call(kernel, (struct(2), struct(2)), grid=1)
  lowered, (got, _) = run(call, x)
  assert exchanges(lowered) > 0
  np.testing.assert_allclose(got, call(x)[0], rtol=1e-5)


@pytest.mark.parametrize("factor", ["rows", "literal"])
@pytest.mark.parametrize("trips", [0, 1, 5])
def test_a_sum_that_is_rescaled_first_stays_apart_too(factor, trips):
  def kernel(x, start, n, y):
    total, top = tt.alloc_fragment((4,), F32), tt.alloc_fragment((4,), F32)
    total[...], top[...] = start[...], 0
    for k in tt.range(n[0]):
      v = x[:, tt.block(k, 128)]
      by = tt.exp(top[...] - 1) if factor == "rows" else 0.5
      top[...] = tt.minimum(top[...], tt.max(v, axis=1))
      total[...] = total[...] * by + tt.sum(v, axis=1)
    y[...] = total[...]

  x, start = np.random.default_rng(1).random((4, 640)).astype(F32), np.asarray([3, -2, 0, 1], F32)
  n = np.asarray([trips], np.int32)
  call = tt.tile_call(kernel, struct(4), grid=1)
  lowered, (got,) = run(call, x, start, n)
  assert "accumulates its own part" in lowered.as_text("schedule")
  np.testing.assert_allclose(got, call(x, start, n), rtol=1e-5)


def test_sums_of_16_bits_keep_their_rounding():
  def kernel(x, y):
    total = tt.alloc_fragment((2,), BF16)
    total[...] = 0
    for k in tt.range(4):
      total[...] += tt.sum(x[:, tt.block(k, 128)], axis=1)
    y[...] = total[...]

  assert exchanges(lower(kernel, [struct(2, 512, dtype=BF16)], struct(2, dtype=BF16))) > 0


def test_row_sums_of_an_accumulator_in_a_pipelined_loop_meet_after_it():
  def kernel(a, b, y):
    a_s, b_s = tt.alloc_shared((128, 64), BF16), tt.alloc_shared((64, 96), BF16)
    s, total = tt.alloc_fragment((128, 96), F32), tt.alloc_fragment((128,), F32)
    total[...] = 0
    for k in tt.pipelined(tt.cdiv(a.shape[1], 64), num_stages=2):
      tt.copy(a.at[:, tt.block(k, 64)], a_s)
      tt.copy(b.at[tt.block(k, 64), :], b_s)
      tt.gemm(a_s, b_s, s, accumulate=False)
      total[...] += tt.sum(tt.maximum(s[...], 0), axis=1)
    y[...] = total[...]

  lowered = lower(kernel, [struct(128, 512, dtype=BF16), struct(512, 96, dtype=BF16)], struct(128), warpgroups=2)
  assert in_loops(lowered, "shfl.sync.bfly") == 0
  assert lowered.as_text("ptx").count("shfl.sync.bfly") == 2 * 2     # of two rows a thread, which four lanes share
  assert assemble(lowered).image
