"""Products that wgmma has no shape for: mma.sync with its reasons, what it loads with, what it refuses."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F16, F32, assemble, count, declined, lower, struct, variants
from tests.lowering.select.mma_dtypes_test import E4M3, I8, I32, product
from tests.tolerances import assert_close
from tiletrace.core.errors import LoweringError
from tiletrace.lowering import mma_plan
from tiletrace.lowering.options import CompileOptions

FORCED = CompileOptions(force=(("gemm", "mma_sync"),))


@pytest.mark.parametrize(("change", "why"), [
  (dict(bm=16, warpgroups=1), "rows split over 1 warpgroup: each must hold a multiple of 64 rows, M = 16 gives 16"),
  (dict(bm=96), "rows split over 2 warpgroups: each must hold a multiple of 64 rows, M = 96 gives 48"),
  (dict(bk=24), "K = 24 is not a multiple of 16: pad both operands with zeros to 32"),
  (dict(bn=12), "N = 12 gives an instruction 12 columns; legal are the multiples of 8 from 8 to 256"),
])
def test_shapes_that_wgmma_has_not_go_to_mma_sync_with_the_reason(change, why):
  lowered = product(BF16, BF16, **change)
  assert variants(lowered, "gemm") == ["mma_sync"] and why in declined(lowered, "gemm")["wgmma_ss"]
  assert count(lowered, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") > 0 == count(lowered, "wgmma")
  assemble(lowered)


@pytest.mark.parametrize(("a", "b", "acc", "instruction"), [
  (BF16, BF16, F32, "m16n8k16.row.col.f32.bf16.bf16.f32"), (np.float16, np.float16, np.float16, "m16n8k16.row.col.f16"),
  (E4M3, jnp.float8_e5m2, F32, "m16n8k32.row.col.f32.e4m3.e5m2.f32"), (I8, np.uint8, I32, "m16n8k32.row.col.s32.s8.u8"),
  (F32, F32, F32, "m16n8k8.row.col.f32.tf32.tf32.f32"),
], ids=lambda x: x if isinstance(x, str) else np.dtype(x).name)
def test_operands_of_every_dtype_come_by_ldmatrix(a, b, acc, instruction):
  lowered = product(a, b, acc, bm=32, warpgroups=1)
  assert count(lowered, rf"mma.sync.aligned.{instruction}") == count(lowered, "mma.sync") == 16
  assert count(lowered, "ldmatrix.sync.aligned.m8n8.x4.shared.b16") == 12 and count(lowered, "ld.shared") == 0
  assemble(lowered)


def test_an_operand_that_is_contiguous_along_n_is_transposed_by_ldmatrix():
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((32, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((32, 64), F32)
    tt.copy(a, a_s)
    tt.copy(b, b_s)
    tt.gemm(a_s, b_s, acc, accumulate=False)
    c[...] = acc[...]

  lowered = lower(kernel, [struct(32, 64, dtype=BF16), struct(64, 64, dtype=BF16)], struct(32, 64))
  assert count(lowered, "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16") == 4
  assert count(lowered, "ldmatrix.sync.aligned.m8n8.x4.shared.b16") == 8
  assemble(lowered)


@pytest.mark.parametrize(("change", "said"), [
  (dict(bk=24, registers=True), "K = 24 is not a multiple of 16, and A is in registers, whose padding is not zero"),
  (dict(policy=(2, 1)), "policy=(2, 1) divides acc among warpgroups, mma.sync among warps"),
  (dict(bm=256, bn=256), "the accumulator takes 256 registers of each thread, of 255"),
])
def test_what_mma_sync_does_not_take_is_refused(change, said):
  with pytest.raises(LoweringError) as e:
    product(BF16, BF16, options=FORCED, **change)
  assert said in str(e.value)


def of_values_kernel(x, w, y, *, bk, policy, form):
  x_s = tt.alloc_shared((x.shape[0], bk), x.dtype)
  acc = tt.alloc_fragment(y.shape, F32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(x.shape[1], bk), num_stages=2):
    tt.copy(x.at[:, tt.block(k, bk)], x_s)
    b = w[:, tt.block(k, bk)].astype(x.dtype).T if form == "t" else w[tt.block(k, bk), :].astype(x.dtype)
    tt.gemm(x_s if form != "value" else x_s[...] * 2, b, acc, policy=policy)
  y[...] = acc[...]


@pytest.mark.parametrize("policy", [None, "full_col"])
@pytest.mark.parametrize("form", ["n", "t", "value"])
@pytest.mark.parametrize(("dtype", "shape"), [(BF16, (16, 32, 96)), (F16, (5, 72, 100)), (BF16, (40, 24, 64))])
def test_the_right_operand_may_be_a_value(policy, form, dtype, shape):
  m, n, k = shape
  rng = np.random.default_rng(0)
  x = rng.standard_normal((m, k)).astype(dtype)
  w = rng.integers(-8, 8, (n, k) if form == "t" else (k, n), np.int8)
  kernel = functools.partial(of_values_kernel, bk=32, policy=policy, form=form)
  call = tt.tile_call(kernel, struct(m, n), grid=1)
  lowered = call.lower(x, w)
  assemble(lowered)
  want = x.astype(np.float64) @ (w.T if form == "t" else w).astype(np.float64) * (2 if form == "value" else 1)
  assert_close(lowered.simulate(x, w)[0], want, "gemm")
  assert_close(np.asarray(jax.jit(call)(x, w)), want, "gemm")
  flops = lowered.report().data["work"]["tensor_flops"]
  assert flops == {"bf16" if dtype == BF16 else "f16": 2 * m * n * -(-k // 32) * 32}


def side_by_side_kernel(x, w, y, *, form, policy):
  """y is the sum of the products x[s] w[s]."""
  s, m, n = (x.shape[0], x.shape[1], w.shape[2])
  x_s = tt.alloc_shared(x.shape, x.dtype)
  acc = tt.alloc_fragment((s, m, n), F32)
  tt.copy(x, x_s)
  for i in range(2):
    a = x_s if form == "ref" else x_s[...]
    tt.gemm(a, w[...].astype(x.dtype), acc, accumulate=i > 0, policy=policy)
  y[...] = tt.sum(acc[...], axis=0)


@pytest.mark.parametrize("form", ["ref", "value"])
@pytest.mark.parametrize(("shape", "dtype", "warpgroups", "policy", "batch", "warps"), [
  ((8, 16, 32, 64), BF16, 2, None, (1, 8), (1, 1, 1)), ((8, 5, 24, 16), F16, 1, None, (2, 4), (1, 1, 1)),
  ((2, 40, 8, 32), BF16, 1, None, (1, 2), (2, 1, 1)), ((6, 16, 64, 16), BF16, 2, "full_col", (3, 2), (1, 4, 1)),
  ((1, 32, 16, 32), F16, 1, None, (1, 1), (2, 2, 1)), ((3, 16, 8, 16), BF16, 1, None, (3, 1), (1, 1, 4))])
def test_products_side_by_side_are_divided_among_the_warps_first(form, shape, dtype, warpgroups, policy, batch, warps):
  s, m, n, k = shape
  rng = np.random.default_rng(0)
  x, w = rng.standard_normal((s, m, k)).astype(dtype), rng.integers(-8, 8, (s, k, n), np.int8)
  kernel = functools.partial(side_by_side_kernel, form=form, policy=policy)
  call = tt.tile_call(kernel, struct(m, n), grid=1, warpgroups=warpgroups)
  lowered = call.lower(x, w)
  assemble(lowered)
  want = 2 * (x.astype(np.float64) @ w.astype(np.float64)).sum(0)
  assert_close(lowered.simulate(x, w)[0], want, "gemm")
  assert_close(np.asarray(jax.jit(call)(x, w)), want, "gemm")
  assert lowered.report().data["work"]["tensor_flops"] == {"bf16" if dtype == BF16 else "f16": 4 * s * m * n * k}
  plan = mma_plan.mma_plan((m, n, k), 2, 4 * warpgroups, policy or "square", s)
  assert (plan.batch, plan.warps) == (batch, warps)


@pytest.mark.parametrize(("change", "said"), [
  (dict(bk=24), "and its K = 24 is not a multiple of 16"),
  (dict(policy=(1, 1)), "which mma.sync alone multiplies"),
])
def test_a_right_operand_in_registers_that_mma_sync_does_not_take_is_refused(change, said):
  kernel = functools.partial(of_values_kernel, **(dict(bk=32, policy=None, form="n") | change))
  with pytest.raises(tt.TileTypeError) as e:
    lower(kernel, [struct(16, 96, dtype=BF16), struct(96, 32, dtype=np.int8)], struct(16, 32))
  assert said in str(e.value) and "mma_sync_test.py" in str(e.value) and "^" in str(e.value)


def test_an_asynchronous_gemm_is_no_mma_sync():
  def kernel(a, b, c):
    with tt.warpgroup(0):
      a_s, b_s = tt.alloc_shared((32, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
      acc = tt.alloc_fragment((32, 64), F32)
      tt.gemm_async(a_s, b_s, acc)
      tt.wgmma_wait(0)
      c[...] = acc[...]

  with pytest.raises(LoweringError, match="gemm_async commits a wgmma group"):
    lower(kernel, [struct(32, 64, dtype=BF16), struct(64, 64, dtype=BF16)], struct(32, 64))


@pytest.mark.parametrize("shape", [(16, 8, 16), (1, 256, 64), (128, 8, 32), (48, 40, 24), (96, 104, 16)])
@pytest.mark.parametrize("warps", [4, 8, 12])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_fragments_of_a_plan_cover_every_element_where_the_instruction_needs_it(shape, warps, itemsize):
  """Against the definition: C's element is the sum over the k of A and B that one warp's instructions hold."""
  plan = mma_plan.mma_plan(shape, itemsize, warps, "square")
  assert np.prod(plan.warps) == warps
  a, b, c = (f(plan).table(("warp", "lane", "reg")) for f in (
    mma_plan.a_layout, mma_plan.b_layout, mma_plan.accumulator_layout))
  m, n, k = shape
  held = {tuple(x) for x in c.reshape(-1, 2).tolist()}
  assert {(i, j) for i in range(m) for j in range(n)} <= held
  for w in range(len(c)):
    rows, columns = (set(t[w].reshape(-1, 2)[:, d].tolist()) for t, d in ((a, 0), (b, 1)))
    assert {tuple(x) for x in c[w].reshape(-1, 2).tolist()} == {(i, j) for i in rows for j in columns}
    assert set(a[w].reshape(-1, 2)[:, 1].tolist()) == set(b[w].reshape(-1, 2)[:, 0].tolist()) >= set(range(k))


def test_policies_split_the_rows_or_the_columns_alone():
  shape = (64, 64, 16)
  assert mma_plan.mma_plan(shape, 2, 4, "full_row").warps == (4, 1, 1)
  assert mma_plan.mma_plan(shape, 2, 4, "full_col").warps == (1, 4, 1)
  assert mma_plan.mma_plan(shape, 2, 4, "square").warps == (2, 2, 1)
  assert mma_plan.mma_plan((16, 8, 16), 2, 8, "square").warps == (1, 1, 8)


@pytest.mark.parametrize("form", ["nn", "nt"])
def test_an_accumulator_may_be_overwritten_or_not_by_a_scalar(form):
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((16, 32), a.dtype), tt.alloc_shared(b.shape, b.dtype)
    acc = tt.alloc_fragment((16, 24), F32)
    tt.copy(a, a_s)
    tt.copy(b, b_s)
    acc[...] = 5
    for i in tt.range(4):
      tt.gemm(a_s, b_s if form == "nn" else b_s.T, acc, accumulate=i % 3 != 1)
    tt.gemm(a_s[...] * 2, b_s if form == "nn" else b_s.T, acc)
    c[...] = acc[...]

  rng = np.random.default_rng(8)
  a, b = rng.standard_normal((16, 32)).astype(BF16), rng.standard_normal((32, 24)).astype(BF16)
  want = 5 * (a.astype(np.float64) @ b.astype(np.float64))
  stored = b if form == "nn" else np.ascontiguousarray(b.T)
  for backend in ("xla", "sim"):
    got = tt.tile_call(functools.partial(kernel), struct(16, 24), grid=1, backend=backend)(a, stored)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-4)
