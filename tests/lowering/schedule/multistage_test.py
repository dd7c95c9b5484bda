"""Pipelined loops on targets without TMA: the threads that compute copy ahead of themselves."""
from __future__ import annotations

import functools

import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus_gemm import matmul
from tests.lowering.kernels import BF16, F32, I32, count, struct
from tests.sim.edit import Edit
from tests.tolerances import assert_close
from tiletrace.lowering.ptx import isa
from tiletrace.sim.launch import run
from tiletrace.stages import Lowered


def kernel(x, y, *, trips, stages):
  """y = sum of x's blocks."""
  x_s = tt.alloc_shared((64, 64), x.dtype)
  total = tt.alloc_fragment((64, 64), F32)
  total[...] = 0
  for k in tt.pipelined(trips, num_stages=stages):
    tt.copy(x.at[tt.block(k, 64), :], x_s)
    total[...] = total[...] + x_s[...].astype(F32)
  y[...] = total[...]


def lowered_sum(trips: int, stages: int, *, body=kernel, inputs=(), target: str = "sm_80", **call) -> Lowered:
  static = functools.partial(body, trips=trips, stages=stages)
  return tt.tile_call(static, struct(64, 64), grid=1, name="sums", **call).lower(
    struct(max(1, 64 * trips), 64, dtype=BF16), *inputs, target=target)


def ints(rng: np.random.Generator, *shape: int) -> np.ndarray:
  return rng.integers(-8, 8, shape).astype(BF16)


def notes(lowered: Lowered) -> str:
  return "\n".join(lowered.lowering.program.notes)


def check(lowered: Lowered, inputs: list[np.ndarray], want: np.ndarray, seed: int = 0) -> None:
  result = run(lowered.lowering, inputs, seed=seed)
  assert not result.faults, "\n".join(map(str, result.faults))
  np.testing.assert_array_equal(result.outputs[0], want)


def blocks(x: np.ndarray) -> np.ndarray:
  return x.astype(np.float64).reshape(-1, 64, 64)


# ---- the shape of the program

def test_an_iteration_waits_once_syncs_once_and_copies_ahead():
  lowered = lowered_sum(9, 4)
  text = lowered.as_text("schedule")
  before, inside = text.split("for_loop")
  assert "x_s Ref<shared>{bf16[4,64,64]}" in text and "copy 3 iterations ahead: 4 slots of x_s" in notes(lowered)
  assert before.count("copy_async") == before.count("commit_group") == 3 and " sync[" not in before
  body = inside[:inside.index("yield")]
  assert (body.count("wait_group[kind=cp_async n=2"), body.count(" sync["), body.count("commit_group")) == (1, 1, 1)
  assert " sync[" not in inside[inside.index("yield"):]


def test_with_one_stage_each_copy_is_waited_for():
  lowered = lowered_sum(9, 1)
  assert "x_s Ref<shared>{bf16[64,64]}" in lowered.as_text("schedule") and "not pipelined" in notes(lowered)


def test_stages_that_do_not_fit_are_fewer_and_said():
  def wide(x, y):
    x_s = tt.alloc_shared((128, 128), x.dtype)
    total = tt.alloc_fragment((128, 128), F32)
    total[...] = 0
    for k in tt.pipelined(9, num_stages=6):
      tt.copy(x.at[tt.block(k, 128), :], x_s)
      total[...] = total[...] + x_s[...].astype(F32)
    y[...] = total[...]

  call = tt.tile_call(wide, struct(128, 128), grid=1, warpgroups=2)
  lowered = call.lower(struct(9 * 128, 128, dtype=BF16), target="sm_89")
  assert lowered.lowering.program.smem_bytes == 3 * 128 * 128 * 2
  assert "3 stages instead of 6: more do not fit in the 101376 bytes of sm_89" in notes(lowered)


# ---- numbers

@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("trips", [0, 1, 2, 4, 7])
def test_any_number_of_iterations(trips, stages):
  x = ints(np.random.default_rng(trips), max(1, 64 * trips), 64)
  check(lowered_sum(trips, stages), [x], blocks(x).sum(0) if trips else np.zeros((64, 64)), seed=trips)


def counted(x, n, y, *, trips, stages):
  """As many blocks as an array says, from the one that it says, each from where a table says."""
  x_s = tt.alloc_shared((64, 64), x.dtype)
  total = tt.alloc_fragment((64, 64), F32)
  total[...] = 0
  for k in tt.pipelined(n[0], n[1], num_stages=stages):
    page = n[2 + k]
    tt.copy(x.at[tt.block(page, 64), :], x_s)
    total[...] = total[...] + x_s[...].astype(F32)
  y[...] = total[...]


@pytest.mark.parametrize("span", [(0, 0), (0, 1), (1, 3), (2, 5), (0, 5)])
def test_bounds_and_places_that_arrays_give(span):
  rng = np.random.default_rng(1)
  x, table = ints(rng, 5 * 64, 64), rng.permutation(5).astype(I32)
  lowered = lowered_sum(5, 3, body=counted, inputs=(struct(7, dtype=I32),))
  assert "copy 2 iterations ahead" in notes(lowered)
  want = sum((blocks(x)[p] for p in table[slice(*span)]), np.zeros((64, 64)))
  check(lowered, [x, np.asarray([*span, *table], I32)], want)


def nested(x, y, *, trips, stages):
  """The same blocks twice: the slots are filled again while some threads may still read them."""
  x_s = tt.alloc_shared((64, 64), x.dtype)
  total = tt.alloc_fragment((64, 64), F32)
  total[...] = 0
  for _ in tt.range(2):
    for k in tt.pipelined(trips, num_stages=stages):
      tt.copy(x.at[tt.block(k, 64), :], x_s)
      total[...] = total[...] + x_s[...].T.astype(F32)
  y[...] = total[...]


@pytest.mark.parametrize("seed", range(3))
def test_a_loop_in_a_loop(seed):
  x = ints(np.random.default_rng(seed), 3 * 64, 64)
  check(lowered_sum(3, 3, body=nested), [x], 2 * blocks(x).sum(0).T, seed)


def one_after_another(x, y, *, trips, stages):
  x_s = tt.alloc_shared((64, 64), x.dtype)
  total = tt.alloc_fragment((64, 64), F32)
  total[...] = 0
  for k in tt.pipelined(trips, num_stages=stages):
    tt.copy(x.at[tt.block(k, 64), :], x_s)
    total[...] = total[...] + x_s[...].T.astype(F32)
  for k in tt.pipelined(trips, num_stages=2):
    tt.copy(x.at[tt.block(k, 64), :], x_s)
    total[...] = total[...] + x_s[...].astype(F32)
  y[...] = total[...]


def test_two_loops_that_fill_one_buffer():
  x = ints(np.random.default_rng(0), 3 * 64, 64)
  check(lowered_sum(3, 4, body=one_after_another), [x], blocks(x).sum(0) + blocks(x).sum(0).T)


def peeled(x, y, *, trips, stages):
  """The first block before the loop, and the last once more after it."""
  x_s = tt.alloc_shared((64, 64), x.dtype)
  total = tt.alloc_fragment((64, 64), F32)
  tt.copy(x.at[:64, :], x_s)
  total[...] = x_s[...].T.astype(F32)
  for k in tt.pipelined(1, trips, num_stages=stages):
    tt.copy(x.at[tt.block(k, 64), :], x_s)
    total[...] = total[...] + x_s[...].T.astype(F32)
  tt.copy(x.at[tt.block(trips - 1, 64), :], x_s)
  y[...] = total[...] + x_s[...].T.astype(F32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("trips", [2, 3, 6])
def test_blocks_before_and_after_the_loop(trips, seed):
  x = ints(np.random.default_rng(seed), trips * 64, 64)
  lowered = lowered_sum(trips, 3, body=peeled)
  assert "copy 2 iterations ahead: 3 slots of x_s" in notes(lowered)
  check(lowered, [x], (blocks(x).sum(0) + blocks(x)[-1]).T, seed)


def filled(x, y, *, trips, stages):
  """Copies that cp.async cannot make: past the edge there are ones."""
  x_s = tt.alloc_shared((64, 64), x.dtype)
  total = tt.alloc_fragment((64, 64), F32)
  total[...] = 0
  for k in tt.pipelined(trips + 1, num_stages=stages):
    tt.copy(x.at[tt.block(k, 64), :], x_s, fill_value=1)
    total[...] = total[...] + x_s[...].astype(F32)
  y[...] = total[...]


def test_copies_through_registers_run_ahead_too():
  x = ints(np.random.default_rng(0), 3 * 64, 64)
  lowered = lowered_sum(3, 3, body=filled)
  assert "copy 2 iterations ahead" in notes(lowered) and not count(lowered, "cp.async.cg")
  check(lowered, [x], blocks(x).sum(0) + 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_persistent_product_under_any_schedule(seed):
  case = matmul(np.random.default_rng(seed), 130, 100, 72, bm=64, bn=64, bk=32, form="tt", persistent=True,
                warpgroups=1)
  result = run(case.call.lower(*case.inputs, target="sm_80").lowering, list(case.inputs), seed=seed, num_sms=2)
  assert not result.faults, "\n".join(map(str, result.faults))
  assert_close(result.outputs[0], case.want[0], "gemm")


# ---- buffers that stay one slot

def kept(x, y, *, trips, stages):
  x_s = tt.alloc_shared((64, 64), x.dtype)
  total = tt.alloc_fragment((64, 64), F32)
  total[...] = 0
  for k in tt.pipelined(trips, num_stages=stages):
    with tt.when(k % 2 == 0):
      tt.copy(x.at[tt.block(k, 64), :], x_s)
    total[...] = total[...] + x_s[...].astype(F32)
  y[...] = total[...]


def changed(x, y, *, trips, stages):
  x_s = tt.alloc_shared((64, 64), x.dtype)
  total = tt.alloc_fragment((64, 64), F32)
  total[...] = 0
  for k in tt.pipelined(trips, num_stages=stages):
    tt.copy(x.at[tt.block(k, 64), :], x_s)
    x_s[...] = x_s[...] * 2
    total[...] = total[...] + x_s[...].T.astype(F32)
  y[...] = total[...]


def followed(x, y, *, trips, stages):
  """Where the next block is stands in this one."""
  x_s = tt.alloc_shared((64, 64), x.dtype)
  total, at = tt.alloc_fragment((64, 64), F32), tt.alloc_fragment((), I32)
  total[...] = 0
  at[...] = 0
  for _ in tt.pipelined(trips, num_stages=stages):
    tt.copy(x.at[tt.block(at[...], 64), :], x_s)
    total[...] = total[...] + x_s[...].astype(F32)
    at[...] = (at[...] + 2) % 3
  y[...] = total[...]


@pytest.mark.parametrize("body, said, want", [
  (kept, "x_s", lambda x: 2 * x[0] + x[2]),
  (changed, "x_s is one slot: the kernel changes what is in it", lambda x: 2 * x.sum(0).T),
  (followed, "is computed at multistage_test.py", lambda x: x.sum(0))])
def test_what_cannot_run_ahead_is_one_slot_with_a_reason(body, said, want):
  x = ints(np.random.default_rng(0), 3 * 64, 64)
  lowered = lowered_sum(3, 3, body=body)
  assert "iterations ahead" not in notes(lowered) and said in notes(lowered)
  check(lowered, [x], want(blocks(x)))


# ---- faults: each wait, sync and group is needed

def transposed(x, y, *, trips, stages):
  x_s = tt.alloc_shared((64, 64), x.dtype)
  total = tt.alloc_fragment((64, 64), F32)
  total[...] = 0
  for k in tt.pipelined(trips, num_stages=stages):
    tt.copy(x.at[tt.block(k, 64), :], x_s)
    total[...] = total[...] + x_s[...].T.astype(F32)
  y[...] = total[...]


def drop_the_sync(edit: Edit) -> None:
  edit.drop(edit.find(isa.BAR_SYNC_ALL)[0])


def drop_the_wait(edit: Edit) -> None:
  edit.drop(edit.find(isa.CP_ASYNC_WAIT_GROUP)[0])


def wait_for_one_less(edit: Edit) -> None:
  edit.change(edit.find(isa.CP_ASYNC_WAIT_GROUP)[0], n=2)


def drop_the_group(edit: Edit) -> None:
  edit.drop(edit.find(isa.CP_ASYNC_COMMIT)[-1])


@pytest.mark.parametrize("fault", [drop_the_sync, drop_the_wait, wait_for_one_less, drop_the_group])
def test_the_simulator_sees_what_is_missing(fault):
  x = ints(np.random.default_rng(0), 6 * 64, 64)
  lowered = lowered_sum(6, 3, body=transposed)
  fault(Edit(lowered.lowering.emitted.module))
  assert run(lowered.lowering, [x]).faults
