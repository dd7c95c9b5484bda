"""scaled_matmul against float64: every scaling, tails, what its tilings cost, what is refused."""
from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.kernels.arrays import compiled
from tests.lowering.kernels import BF16, F32, struct, variants
from tests.tolerances import assert_close
from tiletrace.core.graph import walk
from tiletrace.kernels import scaled_matmul, scaled_matmul_reference
from tiletrace.kernels.scaled_matmul import scaled_matmul_call

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SCALINGS = ("tensor", "row", "block")


def f64(x):
  return np.asarray(x).astype(np.float64)


def operands(scaling, m, n, k, dtypes=(E4M3, E4M3)):
  rng = np.random.default_rng(m + n + k)
  x, w = (jnp.asarray(rng.standard_normal(s, np.float32).astype(t)) for s, t in zip(((m, k), (n, k)), dtypes))
  blocks = -(-k // 128)
  shapes = {"tensor": ((), ()), "row": ((m,), (n,)), "block": ((m, blocks), (-(-n // 128), blocks))}[scaling]
  return x, w, *(jnp.asarray(np.exp(rng.standard_normal(s)).astype(np.float32)) for s in shapes)


def dequantised(x, scale, scaling, rows):
  """`rows`: that share a scale of a block."""
  scale = f64(scale)
  if scaling == "block":
    scale = np.repeat(np.repeat(scale, rows, 0)[:x.shape[0]], 128, 1)[:, :x.shape[1]]
  return f64(x) * (scale[:, None] if scaling == "row" else scale)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (50, 40, 72), (130, 257, 300), (64, 384, 256)])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3", "mixed"])
def test_products_are_those_of_the_scaled_numbers(scaling, shape, dtypes):
  x, w, of_x, of_w = operands(scaling, *shape, dtypes)
  want = dequantised(x, of_x, scaling, 1) @ dequantised(w, of_w, scaling, 128).T
  for function, to in itertools.product((scaled_matmul, scaled_matmul_reference), (BF16, F32)):
    got = compiled(function, x, w, of_x, of_w, out_dtype=to)
    assert got.dtype == to
    assert_close(got, want, "gemm")


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8])
def test_any_number_of_blocks_of_k_is_added_once(scaling, blocks):
  m, n, k = 200, 136, 128 * blocks - 16
  x, w, of_x, of_w = operands(scaling, m, n, k)
  of_x = of_x.T if scaling == "block" else of_x
  lowered = scaled_matmul_call((m, n), F32, k=k, scaling=scaling).lower(x, w, of_x, of_w)
  want = dequantised(x, of_x.T, scaling, 1) @ dequantised(w, of_w, scaling, 128).T
  for num_sms in (1, 4):
    assert_close(lowered.simulate(x, w, of_x, of_w, num_sms=num_sms)[0], want, "gemm")


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("m", "n", "k"), [(130, 257, 900), (4097, 130, 1024), (65, 4097, 4095), (3, 136, 513)])
def test_rows_that_tma_does_not_take_leave_registers_for_the_sums(scaling, m, n, k):
  """Threads of the producer copy them, or the scales; all 8 blocks of 900 could else be two loops' bodies."""
  blocks = -(-k // 128)
  of_x, of_w = {"tensor": ((), ()), "row": ((m,), (n,)), "block": ((blocks, m), (-(-n // 128), blocks))}[scaling]
  lowered = scaled_matmul_call((m, n), BF16, k=k, scaling=scaling).lower(
      struct(m, k, dtype=E4M3), struct(n, k, dtype=E4M3), struct(*of_x), struct(*of_w))
  assert lowered.compile().memory_analysis()["spill_stores"] == 0


@pytest.mark.parametrize(("blocks", "by_tma"), [(16, True), (15, False), (47, False), (48, True)])
def test_scales_of_w_come_through_the_ring_where_tma_takes_their_rows(blocks, by_tma):
  m, n, k = 256, 128, 128 * blocks
  lowered = scaled_matmul_call((m, n), BF16, k=k, scaling="block").lower(
      struct(m, k, dtype=E4M3), struct(n, k, dtype=E4M3), struct(blocks, m), struct(1, blocks))
  assert {c.variant for c in lowered.choices if c.op == "copy"} == {"tma"}
  body = lowered.lowering.program.graph.body
  loads = [e for e in walk(body) if e.primitive.name == "load" and e.refs[0].root.hint == "w_scale"]
  copies = [e for e in walk(body) if e.primitive.name == "copy_async" and e.refs[0].root.hint == "w_scale"]
  assert (bool(loads), bool(copies)) == (not by_tma, by_tma)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("blocks", "unroll"), [(16, 4), (15, 1), (17, 2), (18, 2), (47, 4), (1, 1), (2, 2)])
def test_a_block_is_multiplied_while_the_one_before_it_is_added(scaling, blocks, unroll):
  m, n, k = 8192, 8192, 128 * blocks
  of_x, of_w = {"tensor": ((), ()), "row": ((m,), (n,)), "block": ((blocks, m), (64, blocks))}[scaling]
  lowered = scaled_matmul_call((m, n), BF16, k=k, scaling=scaling).lower(
      struct(m, k, dtype=E4M3), struct(n, k, dtype=E4M3), struct(*of_x), struct(*of_w))
  loops = [e.blocks[0] for e in walk(lowered.lowering.program.graph.body) if e.primitive.name == "for_loop"]
  bodies = [[(e.primitive.name, e.params.get("n")) for e in b.eqns if e.primitive.name in ("gemm_async", "wgmma_wait")]
            for b in loops]
  waits = [[("gemm_async", None)] * 2, *[[("wgmma_wait", 1), ("gemm_async", None)]] * (unroll - 2), [("wgmma_wait", 1)]]
  want = [*itertools.chain(*waits), ("wgmma_wait", 0)] if unroll > 1 else [("gemm_async", None), ("wgmma_wait", 0)]
  assert any(b[-len(want):] == want for b in bodies)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_sums_may_stay_in_the_tensor_core(scaling):
  x, w, of_x, of_w = operands(scaling, 50, 40, 400)
  want = dequantised(x, of_x, scaling, 1) @ dequantised(w, of_w, scaling, 128).T
  assert_close(scaled_matmul(x, w, of_x, of_w, fast=True, out_dtype=F32), want, "f8_gemm")


@pytest.mark.parametrize(("scaling", "fast"), [("tensor", False), ("tensor", True), ("row", False), ("row", True),
                                               ("block", False)])
@pytest.mark.parametrize("shape", [(8192, 8192), (60, 4096), (1000, 776)])
def test_every_tiling_assembles_without_spills_and_copies_by_tma(scaling, fast, shape):
  (m, n), k = shape, 512
  of_x, of_w = {"tensor": ((), ()), "row": ((m,), (n,)), "block": ((4, m), (-(-n // 128), 4))}[scaling]
  lowered = scaled_matmul_call(shape, BF16, k=k, scaling=scaling, fast=fast).lower(
      struct(m, k, dtype=E4M3), struct(n, k, dtype=E4M3), struct(*of_x), struct(*of_w))
  assert lowered.compile().memory_analysis()["spill_stores"] == 0
  assert set(variants(lowered, "copy")) == {"tma"} and variants(lowered, "store") == ["tma"]


@pytest.mark.parametrize(("call", "message"), [
  (lambda x, w, a, b: scaled_matmul(x.astype(BF16), w, a, b), r"x is bfloat16\[40, 200\]"),
  (lambda x, w, a, b: scaled_matmul(x[None], w, a, b), r"x is float8_e4m3fn\[1, 40, 200\]"),
  (lambda x, w, a, b: scaled_matmul(x, w.T, a, b), "different inner extents"),
  (lambda x, w, a, b: scaled_matmul(x, w, a, b.T), r"x_scale is float32\[40, 2\], w_scale float32\[2, 1\]"),
  (lambda x, w, a, b: scaled_matmul(x, w, a.astype(BF16), b), r"x_scale is bfloat16\[40, 2\]"),
  (lambda x, w, a, b: scaled_matmul(x, w, a, b, fast=True), "fast=True with a scale for each block of 128"),
])
def test_operands_that_do_not_fit_are_refused(call, message):
  with pytest.raises(tt.TileTypeError, match=message):
    call(*operands("block", 40, 100, 200))
