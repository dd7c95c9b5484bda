"""Launches of traced kernels: what goes in, what comes out, what is said where it doesn't fit, how long it takes."""
from __future__ import annotations

import functools
import json
import pathlib
import re
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from examples.matmul_relu import matmul_relu_kernel
from tests.tolerances import assert_close
from tiletrace.core.errors import SimulationError
from tiletrace.sim import launch
from tiletrace.sim.faults import KINDS, to_json
from tiletrace.sim.program import SimulatorInputError

rng = np.random.default_rng(7)


def struct(*shape: int, dtype=np.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def halves_kernel(x, y, z):
  r = tt.block(tt.program_id(0), 64)
  y[r] = x[r] * 2
  with tt.when(tt.program_id(0) == 0):
    z[r] = x[r] + 1


HALVES = tt.tile_call(halves_kernel, (struct(100), struct(100)), grid=(2,))


def gemm(m: int, n: int, k: int, **options):
  kernel = functools.partial(matmul_relu_kernel, bm=128, bn=256, bk=64, num_stages=4)
  call = tt.tile_call(kernel, struct(m, n, dtype=jnp.bfloat16), grid=(tt.cdiv(m, 128), tt.cdiv(n, 256)), warpgroups=2,
                      raster=8, persistent=True, **options)
  a, b = (rng.standard_normal(s).astype(jnp.bfloat16) for s in ((m, k), (k, n)))
  return call, a, b


def test_simulate_gives_the_results_in_order_and_nan_where_nothing_was_written():
  x = rng.standard_normal(100).astype(np.float32)
  y, z = HALVES.trace(x).lower().simulate(x)

  np.testing.assert_array_equal(y, x * 2)
  np.testing.assert_array_equal(z[:64], x[:64] + 1)
  assert np.isnan(z[64:]).all()


def test_arguments_of_another_shape_or_dtype_are_refused():
  lowered = HALVES.lower(struct(100))
  for wrong in (np.zeros(99, np.float32), np.zeros(100, np.int32)):
    with pytest.raises(SimulatorInputError, match=r"halves_kernel was lowered for \(float32\[100\]\), got .*TT510"):
      lowered.simulate(wrong)


def test_an_output_in_place_starts_with_the_input():
  def add_kernel(x, y):
    r = tt.block(tt.program_id(0), 32)
    y[r] = y[r] + 1 if x is y else x[r]

  x = rng.standard_normal(70).astype(np.float32)
  call = tt.tile_call(add_kernel, struct(70), grid=(3,), input_output_aliases={0: 0})

  np.testing.assert_array_equal(call.lower(x).simulate(x)[0], x + 1)


@pytest.mark.parametrize("num_sms", (1, 3, 100))
def test_persistent_ctas_share_the_tiles_whatever_their_number(num_sms):
  call, a, b = gemm(300, 600, 96)
  want = np.maximum(a.astype(np.float64) @ b.astype(np.float64), 0)

  assert_close(call.lower(a, b).simulate(a, b, num_sms=num_sms)[0], want, "gemm")


def test_no_programs_and_no_elements_are_legal():
  empty = tt.tile_call(halves_kernel, (struct(0), struct(0)), grid=(0,))
  x = np.zeros(0, np.float32)

  assert [y.shape for y in empty.lower(x).simulate(x)] == [(0,), (0,)]


def test_one_cta_of_the_gemm_takes_less_than_three_seconds_and_little_memory():
  call, a, b = gemm(128, 256, 512)
  lowered = call.lower(a, b)
  began = time.perf_counter()
  (got,) = lowered.simulate(a, b)
  seconds = time.perf_counter() - began

  assert_close(got, np.maximum(a.astype(np.float64) @ b.astype(np.float64), 0), "gemm")
  assert seconds < 3
  tracemalloc.start()
  lowered.simulate(a, b)
  assert tracemalloc.get_traced_memory()[1] < 200 << 20
  tracemalloc.stop()


# ---- level 0, where the author can be wrong


def staged_kernel(x, y, *, waits, expects):
  """One tile through shared memory by TMA."""
  s = tt.alloc_shared((32, 64), x.dtype)
  full = tt.alloc_barrier(1, arrivals=1)
  with tt.warpgroup(0):
    with tt.elect():
      full[0].arrive_expect_tx(s.nbytes if expects else 2 * s.nbytes)
      tt.copy_async(x.at[:, :], s, barrier=full[0], dispatch="tma")
    if waits:
      full[0].wait(0)
    else:
      tt.sync()
    y[...] = s[...]


def staged(**static):
  call = tt.tile_call(functools.partial(staged_kernel, **static), struct(32, 64), grid=1, warpgroups=1)
  x = rng.standard_normal((32, 64)).astype(np.float32)
  return call.lower(x), x


def test_explicit_kernels_run():
  lowered, x = staged(waits=True, expects=True)
  np.testing.assert_array_equal(lowered.simulate(x)[0], x)


def test_a_missing_wait_is_an_error_with_both_python_lines():
  lowered, x = staged(waits=False, expects=True)
  with pytest.raises(SimulationError) as e:
    lowered.simulate(x)

  text = str(e.value)
  assert e.value.code == "TT500" and e.value.faults[0].kind == "asynchronous write not waited for"
  assert "y[...] = s[...]" in text and "tt.copy_async(x.at[:, :], s, barrier=full[0], dispatch=\"tma\")" in text
  assert "^^^^" in text and "PTX line" in text and "kernel staged_kernel, CTA 0" in text and "threads" in text


def test_every_kind_of_fault_is_documented():
  page = (pathlib.Path(__file__).parents[2] / "docs/simulator.md").read_text()
  assert re.findall(r"^\| `([^`]+)` \| (.*) \|$", page, re.MULTILINE) == list(KINDS.items())


def test_faults_are_data_too():
  lowered, x = staged(waits=False, expects=True)
  faults = launch.run(lowered.lowering, [x]).faults
  [first, *_] = json.loads(to_json(faults))

  assert first["kind"] in KINDS and first["kernel"] == "staged_kernel" and first["cta"] == 0
  assert first["place"]["python"]["file"] == __file__
  assert first["place"]["ptx_line"] > 0 and first["other"]["instruction"].startswith("cp.async.bulk.tensor")
  assert first["threads"] and first["addresses"]


# ---- counts


def test_a_copy_counts_its_bytes():
  def copy_kernel(x, y):
    r = tt.block(tt.program_id(0), 1024)
    y[r] = x[r]

  x = rng.standard_normal(4096).astype(np.float32)
  counters = launch.run(tt.tile_call(copy_kernel, struct(4096), grid=4).lower(x).lowering, [x], counters=True).counters

  assert counters is not None
  assert counters.bytes == {"global to registers": 4 * 4096, "global from registers": 4 * 4096}
  assert counters.sectors == 2 * 4 * 4096 // 32
  assert counters.data()["warp_instructions"]["memory"] > 0


def test_a_gemm_counts_its_flops_and_what_moves():
  call, a, b = gemm(256, 512, 128)
  counters = launch.run(call.lower(a, b).lowering, [a, b], counters=True).counters

  assert counters is not None
  data = counters.data()
  assert data["flops"] == 2 * 256 * 512 * 128
  assert data["mma_cycles"] == data["flops"] // 4096
  assert data["bytes"]["global to shared by TMA"] == 4 * (128 + 256) * 128 * 2       # 2 x 2 tiles
  assert data["bytes"]["shared to global by TMA"] == 256 * 512 * 2
  assert data["shared_wavefronts"] == data["shared_wavefronts_without_conflicts"]
  assert any("try_wait" in w["instruction"] and w["source"].startswith("matmul_relu.py:") for w in data["waits"])
  assert f"{data['flops']} FLOPs" in counters.text()
