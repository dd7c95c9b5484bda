"""Faults that other kernel languages for JAX had in the field, as tests: each must not come back here.

What has a home elsewhere: 3, grids in cache keys, in compose_test.py, with aliases (9), shard_map (8) and x64; 6,
chained matrix products by one to four warpgroups, in tests/gpu/corpus_gemm.py; 7, wide and nested batches, in
vmap_test.py; 8, derivatives, in grad_test.py; 10, orders of import, in tests/ffi/library_test.py, and an exported
program in processes_test.py.
"""
from __future__ import annotations

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.transforms.kernels import like, normal, scale_rows


def run(function, out, *arrays, grid=(1,), **options):
  def kernel(*refs):
    *inputs, result = refs
    result[...] = function(*(r[...] for r in inputs))

  return np.asarray(tt.tile_call(kernel, out, grid=grid, **options)(*arrays))


# --- 1: integer division with program ids and negatives

@pytest.mark.parametrize("divisor", [3, -3, 4, 1])
def test_division_of_program_ids_and_negatives_floors(divisor):
  def kernel(quotient, remainder, blocks):
    i = tt.program_id(0)
    n = (i - 5) * 7
    quotient[i], remainder[i], blocks[i] = n // divisor, n % divisor, tt.cdiv(n, abs(divisor))

  out = jax.ShapeDtypeStruct((12,), np.int32)
  got = tt.tile_call(kernel, (out, out, out), grid=(12,))()
  n = (np.arange(12) - 5) * 7
  for g, want in zip(got, (n // divisor, n % divisor, -(-n // abs(divisor))), strict=True):
    np.testing.assert_array_equal(g, want)


# --- 2: casts, sign and abs at the edges

def test_casts_of_negative_floats_truncate_and_abs_and_sign_keep_nan_and_zero():
  x = np.asarray([-2.7, -1.0, -0.5, -0.0, 0.0, 0.5, 2.7, 1e6, -1e6], np.float32)
  out = jax.ShapeDtypeStruct(x.shape, np.int32)
  np.testing.assert_array_equal(run(lambda v: v.astype(jnp.int32), out, x), x.astype(np.int32))
  edges = np.asarray([np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, -1.5], np.float32)
  for ours, theirs in ((tt.abs, jnp.abs), (tt.sign, jnp.sign)):
    got, want = run(ours, like(edges), edges), np.asarray(theirs(edges))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[2:]), np.signbit(want[2:]))


# --- 4: reductions along every axis, with and without the axis kept

@pytest.mark.parametrize("size", [1, 7, 33, 64, 100])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_reductions_along_axes_have_jnp_s_shapes_and_values(rank, size):
  shape = {1: (size,), 2: (3, size), 3: (3, size, 2)}[rank]
  axes = [*range(rank), *((0, k) for k in range(1, rank)), None]
  cases = [(ours, theirs, axis, keepdims) for ours, theirs in ((tt.sum, np.sum), (tt.max, np.max))
           for axis in axes for keepdims in (False, True)]

  def kernel(x, *results):
    for (ours, _, axis, keepdims), result in zip(cases, results, strict=True):
      result[...] = ours(x[...], axis=axis, keepdims=keepdims)

  x = normal(size, *shape)
  wanted = [np.asarray(theirs(x, axis=axis, keepdims=keepdims)) for _, theirs, axis, keepdims in cases]
  for got, want in zip(tt.tile_call(kernel, tuple(map(like, wanted)), grid=(1,))(x), wanted, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# --- 5: masked and uneven accesses, out of bounds on either side

@pytest.mark.parametrize("n", [1, 5, 8, 13])
def test_blocks_over_both_ends_read_the_fill_and_write_nothing(n):
  def kernel(x, y):
    i = tt.program_id(0)
    block = tt.ds((i - 1) * 4 - 2, 4)
    y[block] = tt.load(x.at[block], fill_value=7.0, mask=tt.arange(4) != 1) + 1.0

  x = normal(n, n)
  got = tt.tile_call(kernel, like(x), grid=(tt.cdiv(n, 4) + 3,))(x)
  masked = (np.arange(n) + 2) % 4 == 1
  np.testing.assert_array_equal(got, np.where(masked, np.float32(7), x) + np.float32(1))


# --- 10: cold starts

def test_first_call_from_two_threads_compiles_and_is_right():
  script = """
import threading, numpy as np, jax, tiletrace as tt
from tests.transforms.kernels import scale_rows, normal
x, s = normal(0, 6, 5), normal(1, 6)
found = []
threads = [threading.Thread(target=lambda: found.append(np.asarray(scale_rows(x, s)))) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(found) == 4 and all((f == x * s[:, None]).all() for f in found)
print("right")
"""
  done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_a_program_from_jax_s_persistent_cache_is_right_in_a_new_process(tmp_path):
  script = """
import numpy as np, jax, jax.monitoring
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
from tests.transforms.kernels import scale_rows, normal
x, s = normal(0, 6, 5), normal(1, 6)
np.testing.assert_array_equal(jax.jit(scale_rows)(x, s), x * s[:, None])
print(len(hits))
"""
  environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu",
                 "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
  hits = []
  for _ in range(2):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    hits.append(int(done.stdout))
  assert hits[0] == 0 < hits[1]


def test_traces_of_two_threads_do_not_mix():
  shapes = [(n, 5) for n in range(2, 10)]
  found: dict[tuple[int, int], np.ndarray] = {}

  def work(shape):
    found[shape] = np.asarray(jax.jit(scale_rows)(normal(1, *shape), normal(2, shape[0])))

  threads = [threading.Thread(target=work, args=(s,)) for s in shapes]
  for t in threads:
    t.start()
  for t in threads:
    t.join()
  for s in shapes:
    np.testing.assert_array_equal(found[s], normal(1, *s) * normal(2, s[0])[:, None])
