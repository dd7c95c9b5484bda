"""matmul against float64: epilogues, transposes, leading dimensions, tails, derivatives; what its tiles cost."""
from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.kernels.arrays import normal
from tests.lowering.kernels import struct, variants
from tests.tolerances import assert_close
from tiletrace.kernels import matmul, matmul_reference
from tiletrace.kernels.matmul import choose_tiling, matmul_call

BF16 = jnp.bfloat16
FORMS = ("nn", "nt", "tn", "tt")


random = functools.partial(normal, dtype=BF16)


def f64(x):
  return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (50, 40, 72), (130, 257, 65), (3, 700, 0)])
def test_products_of_any_size(shape, dtype):
  m, n, k = shape
  a, b = random(0, m, k, dtype=dtype), random(1, k, n, dtype=dtype)
  assert_close(jax.jit(matmul)(a, b), f64(a) @ f64(b), "gemm")
  assert_close(matmul(a, b, out_dtype=jnp.float32), f64(a) @ f64(b), "gemm")


@pytest.mark.parametrize(("form", "activation"), list(itertools.product(FORMS, (None, jax.nn.gelu))))
def test_every_form_and_its_derivatives(form, activation):
  a = random(0, *((72, 50) if form[0] == "t" else (50, 72)))
  b = random(1, *((40, 72) if form[1] == "t" else (72, 40)))
  bias, w = random(2, 40, dtype=jnp.float32), random(3, 50, 40, dtype=jnp.float32)

  def run(f):
    def loss(a, b, bias):
      y = f(a, b, bias, activation=activation, transpose_a=form[0] == "t", transpose_b=form[1] == "t")
      return jnp.vdot(y.astype(jnp.float32), w), y
    return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(a, b, bias))

  for got, want in zip(run(matmul), run(matmul_reference), strict=True):
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_allclose(f64(got), f64(want), rtol=2e-2, atol=1e-2 * np.abs(f64(want)).max())


def test_leading_dimensions_of_a_are_rows():
  a, b, bias = random(0, 2, 3, 5, 64), random(1, 64, 24), random(2, 24)
  got = matmul(a, b, bias, activation=jax.nn.relu)
  assert got.shape == (2, 3, 5, 24)
  assert_close(got, np.maximum(f64(a) @ f64(b) + f64(bias), 0), "gemm")


@pytest.mark.parametrize("activation", [None, jax.nn.relu, jax.nn.gelu, jax.nn.silu])
@pytest.mark.parametrize("shape", [(8192, 8192), (256, 8192), (64, 4096), (300, 64), (1000, 776), (777, 333)])
def test_every_tiling_assembles_without_spills(shape, activation):
  m, n = shape
  lowered = matmul_call(shape, BF16, k=512, activation=activation).lower(
      struct(m, 512, dtype=BF16), struct(512, n, dtype=BF16), struct(n))
  assert lowered.compile().memory_analysis()["spill_stores"] == 0
  assert variants(lowered, "store") == ["tma" if n % 8 == 0 else "direct"]


def test_small_products_take_small_tiles():
  grids = [matmul_call(shape, BF16, k=512).options.grid for shape in ((8192, 8192), (512, 512), (64, 4096))]
  assert grids == [(64, 32), (8, 8), (1, 64)]


def test_programs_are_persistent_where_there_are_more_of_them_than_sms():
  found = [matmul_call(shape, BF16, k=512).options for shape in ((2048, 2048), (4096, 4096), (1024, 1024))]
  assert [(o.grid, o.persistent) for o in found] == [((16, 8), False), ((32, 16), True), ((16, 8), False)]


def test_tiles_of_one_wave_have_a_deeper_ring():
  stages = [(t.bm, t.bn, t.num_stages) for t in (choose_tiling(m, n, 512) for m, n in (
    (256, 8192), (1024, 1024), (64, 7168), (2048, 2048)))]
  assert stages == [(128, 128, 6), (64, 128, 8), (64, 64, 8), (128, 256, 4)]
  many, unaligned, bytes_ = choose_tiling(8192, 8192, 512, plain=False), choose_tiling(256, 8191, 512), choose_tiling(
    256, 8192, 512, itemsize=1)
  assert [(t.bm, t.bn, t.num_stages) for t in (many, unaligned, bytes_)] == 3 * [(128, 128, 4)]


def test_l2_gets_no_more_of_a_row_of_b_than_a_tile_reads():
  found = {(m, form): matmul_call((m, 4096), BF16, k=512, form=form).compile_options.l2_promotion
           for m in (64, 4096) for form in FORMS}
  assert found == {(m, form): 128 if m == 64 and form[1] == "n" else 256 for m in (64, 4096) for form in FORMS}


@pytest.mark.parametrize(("call", "message"), [
  (lambda a, b: matmul(a, b.T), r"different inner extents"),
  (lambda a, b: matmul(a, b.astype(jnp.float16)), r"a is bfloat16\[20, 64\], b float16\[64, 24\]"),
  (lambda a, b: matmul(a[None], b, transpose_a=True), "has rank 2"),
  (lambda a, b: matmul(a.astype(jnp.float32), b), "a is float32"),
  (lambda a, b: matmul(a, b, jnp.ones(20)), "bias has the shape"),
])
def test_operands_that_do_not_fit_are_refused(call, message):
  with pytest.raises(tt.TileTypeError, match=message):
    call(random(0, 20, 64), random(1, 64, 24))
