"""Programs that CTAs take when they are free, on a GPU: launches at the same time, in graphs, one after another."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import out
from tests.gpu.corpus_control import ragged_sums_kernel
from tiletrace.ffi import launch
from tiletrace.ffi.primitive import default_target

pytestmark = pytest.mark.gpu

PROGRAMS = 3000
rng = np.random.default_rng(8)


@pytest.fixture(scope="module")
def sums() -> tuple[tt.TileCall, np.ndarray, np.ndarray, np.ndarray]:
  """(the call, x, n, its result): small integers, so that sums are exact."""
  x, n = rng.integers(-8, 9, (400, 96)).astype(np.float32), rng.integers(0, 401, PROGRAMS, dtype=np.int32)
  upto = np.concatenate([np.zeros((1, 96), np.float32), np.cumsum(x, axis=0)])
  call = tt.tile_call(ragged_sums_kernel, out(((PROGRAMS, 96), np.float32)), grid=PROGRAMS, persistent="dynamic")
  return call, x, n, upto[n]


def test_many_calls_in_one_jit_each_take_all_programs(sums):
  call, x, n, want = sums

  @jax.jit
  def f(x, n):
    total = jnp.zeros_like(want)
    for i in range(12):                     # enough for XLA to build a command buffer
      total += call(x * (i + 1), n)
    return jax.lax.scan(lambda c, _: (c + call(x, n), None), total, None, length=5)[0]

  for factor in (1, 2, 3):
    np.testing.assert_array_equal(f(factor * x, n), factor * want * (12 * 13 // 2 + 5))


def test_launches_of_one_kernel_on_two_streams_do_not_meet(sums):
  call, x, n, want = sums
  launcher = launch.Launcher(call.trace(x, n).program.image(default_target()))
  flags = launch.cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
  streams = [launch.cuda.cuStreamCreate(flags)[1] for _ in range(2)]
  a, b = launch.upload(x), launch.upload(n)
  results = [(stream, launch.empty(want.shape, want.dtype)) for _ in range(10) for stream in streams]
  launch.synchronize()
  for stream, result in results:
    launcher(a.pointer, b.pointer, result.pointer, stream=int(stream))
  for _, result in results:
    np.testing.assert_array_equal(result.download(), want)
  for stream in streams:
    launch.cuda.cuStreamDestroy(stream)


def test_a_graph_of_launches_runs_again_and_again(sums):
  call, x, n, want = sums
  launcher = launch.Launcher(call.trace(x, n).program.image(default_target()))
  a, b = launch.upload(x), launch.upload(n)
  results = [launch.empty(want.shape, want.dtype) for _ in range(3)]
  graph = launch.Graph(lambda stream: [launcher(a.pointer, b.pointer, r.pointer, stream=stream) for r in results])
  for factor in (1, -2):
    a.write(factor * x)
    for r in results:
      r.fill(0xFF)
    graph()
    graph.synchronize()
    for r in results:
      np.testing.assert_array_equal(r.download(), factor * want)
