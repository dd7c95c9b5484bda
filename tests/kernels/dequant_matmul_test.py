"""dequant_matmul against float64: every format, groups, tails, few rows; what its tilings cost, what is refused."""
from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.kernels.arrays import compiled
from tests.lowering.kernels import BF16, F16, F32, count, notes, struct, variants
from tests.tolerances import assert_close
from tiletrace.kernels import dequant_matmul, dequant_matmul_reference, pack_weights, quantize_weights
from tiletrace.kernels.dequant_matmul import DequantTiling, choose_dequant_tiling, dequant_matmul_call
from tiletrace.kernels.packed_weights import FORMATS, dequantize_weights, packed_shape, unpack_weights

E2M1 = [s * v for s in (1, -1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def f64(x):
  return np.asarray(x).astype(np.float64)


def numbers(k, n, form, seed=0):
  rng = np.random.default_rng(seed)
  if form == "fp4":
    return rng.choice(np.asarray(E2M1, F32), (k, n))
  return rng.integers(-8, 8, (k, n)) if form == "int4" else rng.integers(-128, 128, (k, n))


def operands(shape, form, group, dtype=BF16, scale_dtype=BF16):
  """(x, q, packed, scales)"""
  m, n, k = shape
  rng = np.random.default_rng(m + n + k)
  x = jnp.asarray(rng.standard_normal((m, k), np.float32).astype(dtype))
  q = numbers(k, n, form)
  scales = jnp.asarray(np.exp(rng.standard_normal((-(-k // group), n))).astype(scale_dtype))
  return x, q, pack_weights(q, format=form), scales


def product(x, q, scales, group, *, rounded=True):
  """Of weights that are rounded to x's dtype; or not, as where the kernel scales what a block of them gives."""
  of = np.repeat(f64(np.asarray(scales).astype(x.dtype)), group, 0)[:len(q)]
  return f64(x) @ (f64((q * of).astype(x.dtype)) if rounded else q * of)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (64, 32), (100, 40), (300, 257)])
def test_packing_keeps_every_number(form, shape: tuple[int, int]):
  k, n = shape
  q = numbers(k, n, form)
  packed = pack_weights(q, format=form)
  assert (packed.dtype, packed.shape) == (np.uint32, packed_shape(k, n, form))
  np.testing.assert_array_equal(unpack_weights(packed, k, n, format=form), q)
  assert packed.nbytes == -(-shape[0] // 64) * 64 * -(-shape[1] // 32) * 32 * (1 if form == "int8" else 0.5)


@pytest.mark.parametrize("form", FORMATS)
def test_quantised_weights_are_near(form):
  w = jax.random.normal(jax.random.key(0), (200, 50))
  packed, scales = quantize_weights(w, format=form, group=64)
  again = dequantize_weights(packed, scales, k=200, group=64, format=form)
  step = {"int4": 0.5, "int8": 0.5, "fp4": 1}[form]             # half the widest gap between two numbers
  assert (np.abs(again - w) <= (step + 0.01) * np.repeat(scales, 64, 0)[:200]).all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("shape", "group"), [((1, 1, 1), 128), ((13, 40, 100), 32), ((70, 257, 300), 64),
                                              ((5, 136, 129), 1000), ((140, 64, 256), 128)])
def test_products_are_those_of_the_scaled_numbers(form, dtype, shape, group):
  x, q, packed, scales = operands(shape, form, group, dtype, BF16 if dtype == F16 else F32)
  want = product(x, q, scales, group)
  options = {"format": form, "group": group}       # the reference one by one: XLA's fusions keep more than 16 bits
  for got in (compiled(dequant_matmul, x, packed, scales, **options),
              dequant_matmul_reference(x, packed, scales, **options)):
    assert got.dtype == dtype
    assert_close(got, want, "gemm")


@pytest.mark.parametrize(("form", "dtype", "shape", "group"), [
  ("int4", BF16, (13, 40, 100), 32), ("int8", BF16, (300, 136, 136), 64), ("fp4", F16, (70, 72, 129), 1000),
  ("int4", F16, (3, 264, 256), 128), ("int8", F16, (9, 33, 64), 64), ("fp4", BF16, (1, 40, 200), 64),
  ("int4", BF16, (16, 40, 1152), 192), ("int4", BF16, (20, 40, 520), 32), ("int8", BF16, (16, 64, 1200), 2000),
  ("int8", BF16, (2, 40, 1027), 32), ("fp4", F16, (16, 72, 640), 32), ("int4", BF16, (8, 136, 1090), 64)])
def test_the_program_multiplies_as_the_formula_says(form, dtype, shape, group):
  x, q, packed, scales = operands(shape, form, group, dtype)
  m, n, k = shape
  call = dequant_matmul_call((m, n), dtype, k=k, group=group, format=form)
  lowered = call.lower(x, packed, scales)
  want = product(x, q, scales, group, rounded=m > 16 or group < 64)
  assert_close(lowered.simulate(x, packed, scales)[0], want, "gemm")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("m", [1, 16, 40, 100, 4096])
def test_every_tiling_assembles_without_spills_and_copies_by_tma(form, m):
  k, n = 512, 4096
  lowered = dequant_matmul_call((m, n), BF16, k=k, format=form).lower(
      struct(m, k, dtype=BF16), struct(*packed_shape(k, n, form), dtype=np.uint32), struct(4, n, dtype=BF16))
  assert lowered.compile().memory_analysis()["spill_stores"] == 0
  assert set(variants(lowered, "copy")) == {"tma"} and "no producer" not in notes(lowered)


@pytest.mark.parametrize(("m", "per_block"), [(1, 8), (8, 8), (9, 16), (16, 16)])
def test_of_few_rows_each_warp_has_blocks_of_its_own_and_nothing_is_rearranged(m, per_block):
  """8 blocks of 64 rows and 32 columns in a slot, one for each of 8 warps; of up to 8 rows w is the left operand, whose
  instruction takes twice the columns. A result of 16 or 8 columns more takes the numbers' offset off, which therefore
  stays in them, and not they but 8 or 16 sums are scaled."""
  k, n = 4096, 4096
  lowered = dequant_matmul_call((m, n), BF16, k=k).lower(
      struct(m, k, dtype=BF16), struct(*packed_shape(k, n, "int4"), dtype=np.uint32), struct(32, n, dtype=BF16))
  assert count(lowered, "mma.sync") == per_block + 4
  assert count(lowered, r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared") == per_block // 4 + (m > 8)  # x, once; scales
  assert count(lowered, "sub.rn.bf16x2") == count(lowered, "mul.rn.bf16x2") == 0
  loop = lowered.as_text("ptx").partition("bar.warp.sync")[2].partition("bra $loop")[0]
  assert len(re.findall(r"mul\.f32|mul\.rn\.f32", loop)) == per_block
  assert "relayout" not in lowered.as_text("layout") and "cluster" not in notes(lowered)


@pytest.mark.parametrize(("m", "n", "form", "group", "tiling"), [
  (1, 4096, "int4", 128, (8, 32, 2, 4, 8)), (16, 4096, "int4", 128, (16, 32, 2, 4, 8)),
  (8, 14336, "fp4", 128, (8, 128, 2, 3, 8)), (16, 14336, "int4", 128, (16, 128, 2, 3, 8)),
  (1, 14336, "int8", 128, (8, 64, 2, 3, 8)), (4, 8192, "int4", 64, (8, 64, 2, 4, 8)),
  (16, 4096, "int4", 192, (16, 32, 2, 4, 6)), (1, 4096, "int4", 192, (16, 32, 2, 4, 6)),
  (64, 4096, "int4", 128, (64, 128, 2, 6, 1)), (256, 4096, "int4", 128, (128, 64, 1, 8, 1)),
  (512, 4096, "int4", 128, (256, 128, 2, 4, 1)), (4096, 4096, "int4", 128, (256, 128, 2, 4, 1))])
def test_tilings_give_every_sm_a_program_where_they_can(m, n, form, group, tiling):
  assert choose_dequant_tiling(m, n, form=form, group=group) == DequantTiling(*tiling)


@pytest.mark.parametrize(("n", "persistent"), [(4096, False), (14336, False), (28672, True)])
def test_few_rows_of_more_columns_than_the_sms_take_at_once_are_one_program_an_sm_after_another(n, persistent):
  call = dequant_matmul_call((1, n), BF16, k=512)
  lowered = call.lower(struct(1, 512, dtype=BF16), struct(*packed_shape(512, n, "int4"), dtype=np.uint32),
                       struct(4, n, dtype=BF16))
  assert lowered.compile().image.persistent == persistent


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("m", "n", "group"), [
  (1, 4096, 32), (8, 14336, 32), (16, 14336, 32), (16, 4096, 192), (8, 4096, 192), (1, 14336, 192), (16, 28672, 64),
  (8, 28672, 1152)])
def test_tilings_of_few_rows_hold_scales_of_any_kind(form, m, n, group):
  """f32 scales of the smallest groups take most of shared memory."""
  k = 1152
  lowered = dequant_matmul_call((m, n), BF16, k=k, format=form, group=group).lower(
      struct(m, k, dtype=BF16), struct(*packed_shape(k, n, form), dtype=np.uint32), struct(k // group, n, dtype=F32))
  found = lowered.compile().memory_analysis()
  assert found["spill_stores"] == 0 and found["registers"] * 3 * 128 <= 1 << 16 and found["smem_bytes"] <= 227 << 10


def test_rows_of_x_that_tma_does_not_take_are_brought_by_the_producers_threads():
  k, n = 1027, 64
  lowered = dequant_matmul_call((16, n), BF16, k=k).lower(
      struct(16, k, dtype=BF16), struct(*packed_shape(k, n, "int4"), dtype=np.uint32), struct(9, n, dtype=BF16))
  assert set(variants(lowered, "copy")) == {"tma", "scalar"} and "ring x_s" in notes(lowered)


@pytest.mark.parametrize(("form", "instruction"), [
  ("int4", "sub.rn.bf16x2"), ("int8", "sub.rn.bf16x2"), ("fp4", "mul.rn.f16x2")])
def test_weights_become_numbers_in_pairs_and_go_from_registers_to_the_tensor_core(form, instruction):
  """A thread has 32 weights of a block of 64 x 128 by 256 threads."""
  k, n = 128, 128
  lowered = dequant_matmul_call((4096, n), BF16, k=k, format=form).lower(
      struct(4096, k, dtype=BF16), struct(*packed_shape(k, n, form), dtype=np.uint32), struct(1, n, dtype=BF16))
  assert set(variants(lowered, "gemm")) == {"wgmma_rs"}
  assert count(lowered, instruction) == count(lowered, "mul.rn.bf16x2") == 16
  assert count(lowered, r"cvt\.rn\.f32") == 0                         # no integer is converted
  assert "relayout" not in lowered.as_text("layout")


@pytest.mark.parametrize("m", [3, 70])
def test_derivatives_of_activations_and_scales_are_those_of_the_reference(m):
  x, _, packed, scales = operands((m, 40, 128), "int4", 64)
  scales = scales / 64         # sines of large numbers differ by the rounding of weights
  pull = [jax.grad(lambda x, s, f=f: jnp.sum(jnp.sin(f(x, packed, s, group=64).astype(F32))), (0, 1))(x, scales)
          for f in (dequant_matmul, dequant_matmul_reference)]
  for got, want in zip(*pull):
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.astype(F32), want.astype(F32), rtol=0.05, atol=0.05 * np.abs(f64(want)).max())


@pytest.mark.parametrize(("call", "message"), [
  (lambda x, p, s: dequant_matmul(x.astype(F32), p, s), r"x is float32\[3, 200\]"),
  (lambda x, p, s: dequant_matmul(x, p, s, group=48), "group=48"),
  (lambda x, p, s: dequant_matmul(x, p, s, group=16), "group=16"),
  (lambda x, p, s: dequant_matmul(x, p, s[:1]), r"scales is bfloat16\[1, 40\]"),
  (lambda x, p, s: dequant_matmul(x, p, s.astype(jnp.int32)), r"scales is int32\[2, 40\]"),
  (lambda x, p, s: dequant_matmul(x, p, s, format="int8"), r"packed is uint32\[4, 2, 256\]"),
  (lambda x, p, s: dequant_matmul(x, p.astype(jnp.int32), s), r"packed is int32\[4, 2, 256\]"),
  (lambda x, p, s: dequant_matmul(x, p, s, format="nf4"),  # type: ignore[arg-type]
   "format is 'nf4'"),
  (lambda x, p, s: pack_weights(x, format="int4"), r"w is bfloat16\[3, 200\], format is 'int4'"),
  (lambda x, p, s: pack_weights(p, format="int8"), r"w is uint32\[4, 2, 256\], format is 'int8'"),
])
def test_operands_that_do_not_fit_are_refused_at_the_callers_line(call, message):
  x, _, packed, scales = operands((3, 40, 200), "int4", 128)
  with pytest.raises(tt.TileTypeError, match=message) as e:
    call(x, packed, scales)
  assert "dequant_matmul_test.py" in str(e.value) and "^" in str(e.value) and "hint:" in str(e.value)
