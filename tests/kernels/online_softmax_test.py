"""OnlineSoftmax: what blocks before are multiplied with, as the GPU computes it."""
from __future__ import annotations

import functools

import numpy as np

import tiletrace as tt
from tests.lowering.kernels import struct
from tiletrace.core.graph import walk
from tiletrace.kernels.online_softmax import OnlineSoftmax


def blocks_kernel(x, y):
  softmax = OnlineSoftmax(64, 0.1803368801111204)
  softmax.start()
  for j in tt.range(x.shape[1] // 64):
    weights, alpha = softmax.weights(x[:, tt.block(j, 64)])
    y[:, tt.block(j, 64)] = weights * alpha[:, None]


def lowered():
  return tt.tile_call(blocks_kernel, struct(64, 256), grid=1).lower(struct(64, 256))


def test_the_factor_of_a_row_whose_base_stays_is_the_power_of_a_difference_which_is_zero():
  """Of products it would not be: ptxas makes an FMA of one of them, which then is not rounded as the other is."""
  graph = lowered().lowering.program.graph
  made = {v: e for e in walk(graph.body) for v in e.outvars}
  powers = [e for e in walk(graph.body) if e.primitive.name.startswith("exp2") and e.outvars[0].shape == (64,)]
  assert powers
  for power in powers:
    product = made[power.values[0]]
    assert product.primitive.name == "mul" and "sub" in {made[v].primitive.name for v in product.values if v in made}


def test_factors_are_exactly_one_until_a_maximum_has_grown_by_two_to_the_eighth():
  x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32) * 8
  x[7, 70] = 5000
  (got,) = lowered().simulate(x)
  want = np.exp2((x.astype(np.float64) - x[:, :64].max(1, keepdims=True)) * 0.1803368801111204)
  want[:, :64], want[7] = 0, 0                              # nothing was before; what was is forgotten
  np.testing.assert_allclose(got, want, rtol=2e-6)


def test_sums_are_the_same_where_they_are_left_to_add():
  def kernel(x, y, *, apart):
    softmax = OnlineSoftmax(64, 0.1803368801111204)
    softmax.start()
    for j in tt.range(x.shape[1] // 64):
      weights, alpha = softmax.weights(x[:, tt.block(j, 64)], add=not apart)
      if apart:
        softmax.add(weights, alpha)
    y[:] = softmax.log2_sum()

  x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32) * 30
  got = [tt.tile_call(functools.partial(kernel, apart=apart), struct(64), grid=1).lower(struct(64, 256)).simulate(x)[0]
         for apart in (False, True)]
  assert np.array_equal(got[0], got[1])
  np.testing.assert_allclose(got[0], np.log2(np.exp2(x.astype(np.float64) * 0.1803368801111204).sum(1)), rtol=1e-5)
