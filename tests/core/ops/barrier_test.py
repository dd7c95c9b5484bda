from __future__ import annotations

import numpy as np
import pytest

import tiletrace as tt
from tests.tracing import Out, f32, i32, trace
from tiletrace.core.graph import walk
from tiletrace.lowering.xla.run import run


def uses(kernel, warpgroups=3):
  graph = trace(kernel, x=f32(4), warpgroups=warpgroups)
  return [e for e in walk(graph.body) if e.primitive.name.startswith("barrier")]


def test_operands_are_barrier_index_and_phase():
  def kernel(x):
    full = tt.alloc_barrier(4, arrivals=2)
    full[tt.program_id(0) % 4].wait(tt.program_id(1) & 1)
    full[3].arrive_expect_tx(1024)

  wait, expect = uses(kernel)
  assert str(wait.values[0].type) == "Barrier[4]{arrivals=2}" and wait.values[0].hint == "full"
  assert [v.type.shape for v in wait.values[1:]] == [(), ()]
  assert expect.values[1].value == 3 and expect.params == {"nbytes": 1024}


@pytest.mark.parametrize(("scope", "count"), [
  (lambda: tt.warpgroup(range(1, 3)), 2), (lambda: tt.warpgroup(0), 1), (lambda: tt.elect(), 1),
  (lambda: tt.elect(each="warpgroup"), 3), (None, 3)])
def test_arrive_counts_one_for_each_warpgroup_or_elected_thread(scope, count):
  def kernel(x):
    bar = tt.alloc_barrier(arrivals=count)
    if scope is None:
      bar[0].arrive()
      return
    with scope():
      bar[0].arrive()

  assert uses(kernel)[0].params == {"count": count}


def test_arrive_takes_another_count():
  def kernel(x):
    tt.alloc_barrier(arrivals=7)[0].arrive(count=7)

  assert uses(kernel)[0].params == {"count": 7}


@pytest.mark.parametrize(("use", "error", "message"), [
  (lambda b: b[4], tt.TileIndexError, "barrier 4 of 4"), (lambda b: b[-1], tt.TileIndexError, "barrier -1 of 4"),
  (lambda b: b[0.5], tt.TileTypeError, "barrier index must be an integer, got 0.5"),
  (lambda b: b.wait(0), tt.TileAttributeError, "a barrier array has no attribute 'wait'"),
  (lambda b: b[0].wait(0.0), tt.TileTypeError, "wait: phase must be an integer, got 0.0"),
  (lambda b: b[0].arrive(count=0), tt.TileTypeError, "arrive: count must be a positive Python int, got 0"),
  (lambda b: b[0].arrive_expect_tx(2**20), tt.TileTypeError, "a barrier counts to 1048575"),
  (lambda b: b[0].arrive_expect_tx(tt.program_id(0)), tt.TileTypeError,
   r"arrive_expect_tx: nbytes must be a positive Python int, got i32\[\]"),
  (lambda b: list(b), tt.TileTypeError, "a barrier array is not a sequence"),
  (lambda b: tt.alloc_barrier(0, arrivals=1), tt.TileTypeError, "alloc_barrier: count must be a positive Python int"),
  (lambda b: tt.alloc_barrier(1, arrivals=2**20), tt.TileTypeError, "a barrier counts to 1048575"),
  (lambda b: tt.fence("generic"), tt.TileTypeError, "fence: kind is 'generic'"),
  (lambda b: tt.sync(each="warp"), tt.TileTypeError, "sync: each is 'warp'")])
def test_barrier_arguments_are_checked(use, error, message):
  with pytest.raises(error, match=message):
    uses(lambda x: use(tt.alloc_barrier(4, arrivals=1)))


def test_pipeline_state_goes_round_in_a_traced_loop():
  def kernel(y):
    state = tt.PipelineState(3, phase=1)
    for n in tt.range(8):
      y[n] = state.slot * 10 + state.phase
      state.advance()

  got = np.asarray(run(trace(kernel, grid=(1,), y=Out(i32(8))))[0])
  np.testing.assert_array_equal(got, [1, 11, 21, 0, 10, 20, 1, 11])


@pytest.mark.parametrize(("make", "message"), [
  (lambda: tt.PipelineState(0), "num_stages is 0"), (lambda: tt.PipelineState(2, phase=2), "phase is 2")])
def test_pipeline_state_arguments_are_checked(make, message):
  with pytest.raises(tt.TileTypeError, match=message):
    trace(lambda x: make(), x=f32(4))
