"""Rounded operations moved by units in the last place: floats that were rounded move a little, all else stays."""
from __future__ import annotations

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import normal, out
from tests.gpu.corpus_gemm import register_a_kernel
from tiletrace.core.graph import ALL_PRIMITIVES
from tiletrace.lowering.xla.perturb import EXACT, SUMS
from tiletrace.lowering.xla.reference import reference

rng = np.random.default_rng(3)
BF16 = ml_dtypes.bfloat16


def results(call, *inputs, seeds=(None, 1, 2)) -> list[list[np.ndarray]]:
  """As it is, and moved by two seeds."""
  with jax.enable_x64(any(x.dtype.itemsize == 8 for x in inputs)):
    graph = call.trace(*inputs).graph
  return [reference(graph, seed)(inputs) for seed in seeds]


def test_the_exact_operations_and_the_sums_exist():
  names = {p.name for p in ALL_PRIMITIVES} | {"cumprod", "cummax", "cummin"}
  assert names >= EXACT | SUMS


def moves_kernel(x, i, y, z, j):
  y[...] = tt.maximum(-x[...], 0)
  z[...] = x[...].T
  j[...] = i[...] * 3 + 1


def test_integers_copies_and_exact_operations_stay():
  x, i = normal(rng, 16, 32), rng.integers(-9, 9, 64, dtype=np.int32)
  call = tt.tile_call(moves_kernel, out((x.shape, x.dtype), (x.T.shape, x.dtype), (i.shape, i.dtype)), grid=1)
  plain, *moved = results(call, x, i)

  for outputs in moved:
    assert [a.tobytes() for a in outputs] == [a.tobytes() for a in plain]


def add_kernel(x, y, z):
  z[...] = x[...] + y[...]


def divide_kernel(x, y, z):
  z[...] = x[...] / y[...]


@pytest.mark.parametrize(("kernel", "dtype", "ulps"), [
    (add_kernel, np.float32, 8.5), (add_kernel, np.float64, 8.5), (divide_kernel, np.float32, 8.5),
    (divide_kernel, np.float16, 1.5), (divide_kernel, BF16, 1.5)])
def test_a_rounded_result_moves_by_a_few_units_differently_for_each_seed_and_element(kernel, dtype, ulps):
  x, y = (rng.uniform(1, 2, 500).astype(dtype) for _ in range(2))
  call = tt.tile_call(kernel, out((x.shape, dtype)), grid=1)
  (plain,), (a,), (b,) = results(call, x, y)
  apart = (a.astype(np.float64) - plain.astype(np.float64)) / float(ml_dtypes.finfo(dtype).eps) / plain.astype(float)

  assert 0.2 < np.abs(apart).max() <= ulps
  assert (apart > 0).sum() > 20 and (apart < 0).sum() > 20
  assert not np.array_equal(a, b)


@pytest.mark.parametrize("dtype", (np.float16, BF16))
def test_sums_of_narrow_floats_stay(dtype):
  x, y = (normal(rng, 500, dtype=dtype) for _ in range(2))
  for (got,) in results(tt.tile_call(add_kernel, out((x.shape, dtype)), grid=1), x, y):
    np.testing.assert_array_equal(got, x + y)


def test_infinity_and_nan_stay():
  x, y = np.array([np.inf, -np.inf, np.nan, 0], np.float32), np.zeros(4, np.float32)
  for (got,) in results(tt.tile_call(add_kernel, out((x.shape, x.dtype)), grid=1), x, y):
    np.testing.assert_array_equal(got, x)


def test_a_product_moves_where_it_is_accumulated():
  a, b = (normal(rng, 64, n, dtype=BF16) for n in (64, 64))
  call = tt.tile_call(functools.partial(register_a_kernel, bk=64), out(((64, 64), np.float32)), grid=1)
  (plain,), (moved,), _ = results(call, a, b)

  assert (moved != plain).mean() > 0.5
  np.testing.assert_allclose(moved, plain, rtol=3e-6, atol=3e-6 * np.abs(plain).max())
