"""How rows are cut, and the machine code that comes of it."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import count, struct
from tiletrace.kernels.layer_norm import layer_norm_call
from tiletrace.kernels.rms_norm import rms_norm_call, rms_norm_kernel, rms_norm_reference
from tiletrace.kernels.rows import plan_rows, ring_of_rows, rows_of_pairs
from tiletrace.kernels.softmax import softmax_backward_call, softmax_call

BF16, F32 = jnp.bfloat16, np.float32
WIDE = ((16384, 8192), (65536, 4096), (8192, 16384), (32768, 1024))
NARROW = tuple((-(-(32 << 20) // n), n) for n in (96, 160, 192, 256, 320, 384, 512, 640, 1000))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("arrays", [1, 2, 3])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (1, 65536), (7, 3), (40, 777), (100_000, 1), *WIDE, *NARROW])
def test_programs_cover_the_rows(shape, arrays, dtype):
  plan = plan_rows(shape, np.dtype(dtype), arrays)
  assert plan.grid == tt.cdiv(shape[0], plan.rows) and 1 <= plan.warpgroups <= 8
  assert plan.columns >= shape[1] or plan.rows == 1
  assert plan.ctas_per_sm * plan.warpgroups * 128 <= 2048


def in_flight(compiled, arrays: int) -> int:
  """Bytes on the way to an SM while all its CTAs load."""
  threads = compiled.lowered.lowering.program.threads
  ctas = min(65536 // (tt.align_to(compiled.memory_analysis()["registers"], 8) * threads), 2048 // threads)
  loads = count(compiled.lowered, r"ld\.global\.nc\.v4")
  assert loads and loads == count(compiled.lowered, r"st\.global\.v4") * arrays
  return ctas * threads * 16 * loads


@pytest.mark.parametrize("shape", WIDE + NARROW)
def test_48_kilobytes_are_in_flight_on_an_sm(shape):
  x = struct(*shape, dtype=BF16)
  one = [rms_norm_call(shape, BF16).lower(x, None, None, None), softmax_call(shape, BF16).lower(x, None),
         layer_norm_call(shape, BF16).lower(x, None, None)]
  two = [softmax_backward_call(shape, BF16).lower(x, x)]
  if rows_of_pairs(shape, np.dtype(BF16), 2) or ring_of_rows(shape, np.dtype(BF16), 2) is None:
    two.append(rms_norm_call(shape, BF16, gate=True).lower(x, None, None, x))
  for lowered in one:
    assert in_flight(lowered.compile(), 1) >= 48 << 10, lowered.program.name
  for lowered in two:
    assert in_flight(lowered.compile(), 2) >= 48 << 10, lowered.program.name


@pytest.mark.parametrize("arrays, dtype, shape", [
  (2, np.float16, (8192, 16384)), (3, BF16, (4096, 8192)), (2, F32, (4096, 12288))])
def test_rows_that_would_take_the_registers_of_an_sm_come_by_tma_through_a_ring(arrays, dtype, shape):
  plan = ring_of_rows(shape, np.dtype(dtype), arrays)
  assert plan is not None and plan.num_stages >= 2
  x = struct(*shape, dtype=dtype)
  lowered = rms_norm_call(shape, dtype, gate=True, residual=arrays == 3).lower(x, None, x if arrays == 3 else None, x)
  assert [c.variant for c in lowered.choices if c.op == "copy"] == ["tma"] * arrays
  nbytes = arrays * shape[1] * np.dtype(dtype).itemsize
  assert lowered.compile().memory_analysis()["smem_bytes"] >= plan.num_stages * nbytes


@pytest.mark.parametrize("n", [8200, 10240, 12296, 16384])
@pytest.mark.parametrize("gamma", [None, BF16, F32])
def test_long_rows_with_a_gate_stay_in_registers_as_pairs(n, gamma):
  assert rows_of_pairs((8192, n), np.dtype(BF16), 2) is not None
  x, v = struct(8192, n, dtype=BF16), None if gamma is None else struct(n, dtype=gamma)
  compiled = rms_norm_call((8192, n), BF16, gate=True, silu=True).lower(x, v, None, x).compile()
  assert compiled.memory_analysis()["spill_stores"] == 0 and compiled.memory_analysis()["registers"] <= 64


@pytest.mark.parametrize("residual", [False, True])
def test_rows_through_a_ring_are_normalised_like_others(residual):
  m, n = 11, 1024
  x, gate, more = (jax.random.normal(jax.random.key(i), (m, n), BF16) for i in range(3))
  like = struct(m, n, dtype=BF16)
  call = tt.tile_call(
      functools.partial(rms_norm_kernel, rows=1, columns=n, eps=1e-6, silu=False, num_stages=3),
      (like, like) if residual else like, grid=m, warpgroups=4, persistent=True, backend="sim")
  got = call(x, None, more if residual else None, gate)
  want = rms_norm_reference(x, gate=gate, residual=more if residual else None)
  for y, z in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(z, np.float32), rtol=1e-2, atol=1e-2)


def test_a_ring_is_for_rows_that_tma_and_shared_memory_take():
  for shape in ((8192, 16380), (8192, 65536), (16, 16384), (8192, 4096)):
    assert ring_of_rows(shape, np.dtype(BF16), 2) is None


@pytest.mark.parametrize("shape", WIDE)
def test_rows_that_divide_take_no_predicates_and_one_barrier_at_most(shape):
  x, v = struct(*shape, dtype=BF16), struct(shape[1], dtype=BF16)
  lowered = rms_norm_call(shape, BF16).lower(x, v, None, None)
  text = lowered.as_text("ptx")
  assert not [line for line in text.splitlines() if line.strip().startswith("@") and ".global" in line]
  assert count(lowered, r"bar\.sync") <= 1


def test_loads_of_rows_stand_before_the_first_use():
  x = struct(16384, 8192, dtype=BF16)
  lowered = rms_norm_call(x.shape, BF16, gate=True).lower(x, None, None, x)
  lines = [line.split()[0] for line in lowered.as_text("ptx").splitlines() if line.startswith("  ")]
  loads = [i for i, op in enumerate(lines) if op.startswith("ld.global")]
  first = next(i for i, op in enumerate(lines) if op.startswith("shfl.sync.bfly"))
  assert len(loads) == 4 and loads[-1] < first


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("n", [7, 96, 777, 1000, 5120, 12432, 16384, 24576, 65536])
def test_nothing_spills(n, dtype):
  shape = max(4096, 2**24 // n), n
  x, v = struct(*shape, dtype=dtype), struct(n)
  for lowered in (rms_norm_call(shape, dtype, residual=True, gate=True, silu=True).lower(x, v, x, x),
                  rms_norm_call(shape, dtype, silu=True).lower(x, v, None, None),
                  rms_norm_call(shape, dtype, gate=True).lower(x, v, None, x),
                  layer_norm_call(shape, dtype).lower(x, v, v),
                  softmax_call(shape, dtype).lower(x, struct(*shape, dtype=bool))):
    assert lowered.compile().memory_analysis()["spill_stores"] == 0


def test_the_narrow_plan_is_for_many_rows_only():
  many, few = (plan_rows((m, 4096), np.dtype(BF16)) for m in (65536, 4))
  assert few.warpgroups > many.warpgroups


def test_the_trace_is_cached():
  call = rms_norm_call((40, 320), jnp.dtype(BF16))
  x = jax.ShapeDtypeStruct((40, 320), BF16)
  again = rms_norm_call((40, 320), jnp.dtype(BF16))
  assert call.trace(x, None, None, None).program is again.trace(x, None, None, None).program
