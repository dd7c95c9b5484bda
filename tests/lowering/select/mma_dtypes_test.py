"""Products of 8-bit, f32 and f16 operands: the instruction taken, what is refused and the remedy it names."""
from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus_narrow import product_kernel
from tests.lowering.kernels import BF16, F16, F32, I32, assemble, count, lower, matmul_kernel, struct, variants
from tiletrace.core.errors import LayoutError, LoweringError, TileTraceError
from tiletrace.lowering.options import CompileOptions

E4M3, E5M2, I8, U8 = jnp.float8_e4m3fn, jnp.float8_e5m2, np.int8, np.uint8


def product(a, b, acc=F32, *, bm=128, bn=64, bk=None, registers=False, policy=None, warpgroups=2, options=None):
  bk = bk or 128 // np.dtype(a).itemsize
  kernel = functools.partial(product_kernel, bm=bm, bn=bn, bk=bk, acc=acc, registers=registers, policy=policy)
  return lower(kernel, [struct(2 * bm, 4 * bk, dtype=a), struct(2 * bn, 4 * bk, dtype=b)],
               struct(2 * bm, 2 * bn, dtype=acc), grid=(2, 2), warpgroups=warpgroups, options=options)


@pytest.mark.parametrize(("a", "b", "acc", "instruction"), [
  (E4M3, E5M2, F32, "m64n64k32.f32.e4m3.e5m2"), (E5M2, E5M2, F32, "m64n64k32.f32.e5m2.e5m2"),
  (I8, U8, I32, "m64n64k32.s32.s8.u8"), (F32, F32, F32, "m64n64k8.f32.tf32.tf32"),
  (F16, F16, F16, "m64n64k16.f16.f16.f16"), (F16, F16, F32, "m64n64k16.f32.f16.f16"),
  (BF16, BF16, F32, "m64n64k16.f32.bf16.bf16"),
], ids=lambda x: x if isinstance(x, str) else np.dtype(x).name)
@pytest.mark.parametrize("registers", [False, True])
def test_dtypes_choose_the_instruction(a, b, acc, instruction, registers):
  lowered = product(a, b, acc, registers=registers)
  assert variants(lowered, "gemm") == ["wgmma_rs" if registers else "wgmma_ss"]
  assert count(lowered, f"wgmma.mma_async.sync.aligned.{instruction}") == count(lowered, "wgmma.mma_async") == 4
  assemble(lowered)


def nn_kernel(a, b, c):
  """Both operands as they are stored: b is [k, n]."""
  a_s = tt.alloc_shared((128, 64), a.dtype)
  b_s = tt.alloc_shared((64, 64), b.dtype)
  acc = tt.alloc_fragment((128, 64), F32)
  tt.copy(a, a_s)
  tt.copy(b, b_s)
  tt.gemm(a_s, b_s, acc, accumulate=False, precision="tf32" if a.dtype == F32 else None)
  c[...] = acc[...]


@pytest.mark.parametrize(("dtype", "name"), [(E4M3, "f8e4m3"), (F32, "f32")])
def test_an_operand_that_is_contiguous_along_n_is_refused_with_the_remedy(dtype, name):
  with pytest.raises(LayoutError) as e:
    lower(nn_kernel, [struct(128, 64, dtype=dtype), struct(64, 64, dtype=dtype)], struct(128, 64))
  said = str(e.value)
  assert f"gemm reads B of {name} along k only, for wgmma transposes nothing but 16-bit types" in said
  assert "the array copied to b_s is contiguous along n" in said and "b_s is allocated at" in said
  assert "store the array as [n, k], allocate the buffer so, and pass b_s.T" in said and "tt.gemm(a_s, b_s" in said
  assert 'or dispatch="mma_sync", which gathers the operand element by element' in said


def test_a_left_operand_that_is_contiguous_along_m_is_refused():
  def kernel(a, b, c):
    a_s = tt.alloc_shared((64, 128), a.dtype)
    b_s = tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((128, 64), F32)
    tt.copy(a, a_s)
    tt.copy(b, b_s)
    tt.gemm(a_s.T, b_s.T, acc, accumulate=False)
    c[...] = acc[...]

  with pytest.raises(LayoutError, match=r"gemm reads A of f8e5m2 along k only.* is contiguous along m") as e:
    lower(kernel, [struct(64, 128, dtype=E5M2), struct(64, 64, dtype=E5M2)], struct(128, 64))
  assert "store the array as [m, k], allocate the buffer so, and pass a_s" in str(e.value)


def test_what_threads_write_lies_as_the_gemm_needs_it():
  """No copy says which dimension is contiguous: b_s is [k, n], and k is."""
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 32), a.dtype)
    acc = tt.alloc_fragment((64, 32), F32)
    tt.copy(a, a_s)
    b_s[...] = b[...].astype(a.dtype)
    tt.gemm(a_s, b_s, acc, accumulate=False)
    c[...] = acc[...]

  rng = np.random.default_rng(5)
  a, b = rng.standard_normal((64, 64)).astype(E4M3), rng.standard_normal((64, 32)).astype(np.float32)
  assemble(lower(kernel, [struct(64, 64, dtype=E4M3), struct(64, 32)], struct(64, 32)))
  got = tt.tile_call(kernel, struct(64, 32), grid=1, backend="sim")(a, b)
  want = a.astype(np.float64) @ np.asarray(jnp.asarray(b).astype(E4M3)).astype(np.float64)
  np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("change", "said"), [
  (dict(bn=40), "N = 40 gives an instruction 40 columns; legal are 8, 24 and the multiples of 16 from 16 to 256"),
  (dict(bk=48), "K = 48 is not a multiple of 32: pad both operands with zeros to 64"),
  (dict(policy=(2, 2)), "policy=(2, 2) divides acc among 4 warpgroups, 2 compute it"),
  (dict(policy=(3, 2), warpgroups=6, bm=192), "where both are split, the rows are split over a power of two"),
  (dict(policy=(2, 2), warpgroups=4, bm=64), "rows split over 2 warpgroups, columns split over 2 warpgroups: each must "
                                              "hold a multiple of 64 rows, M = 64 gives 32"),
])
def test_shapes_of_integers_that_are_not_legal_are_refused(change, said):
  with pytest.raises(LoweringError) as e:
    product(I8, I8, I32, options=CompileOptions(force=(("gemm", "wgmma_ss"),)), **change)
  assert said in str(e.value)


def test_f32_operands_need_a_word_that_tf32_will_do():
  with pytest.raises(TileTraceError) as e:
    lower(functools.partial(matmul_kernel, bm=64, bn=64, bk=32, num_stages=2),
          [struct(64, 64), struct(64, 64)], struct(64, 64), grid=(1, 1))
  assert "a and b are f32, and tensor cores multiply 11 bits of each (tf32)" in str(e.value)
  assert 'precision="tf32" where that will do' in str(e.value)


def parts_kernel(a, b, c, *, start):
  a_s = tt.alloc_shared(a.shape, a.dtype)
  b_s = tt.alloc_shared(b.shape, b.dtype)
  acc = tt.alloc_fragment((64, 64), F32)
  tt.copy(a, a_s)
  tt.copy(b, b_s)
  for k in tt.range(2):
    inner = start(k)
    tt.gemm(a_s.at[:, inner], b_s.at[inner, :], acc)
  c[...] = acc[...]


@pytest.mark.parametrize(("start", "said"), [
  (lambda k: slice(4, 20), "a part at (0, 4) starts within 16 bytes"),
  (lambda k: tt.ds(4 * k, 16), "the start along dimension 1 is not provably a multiple of 16 bytes and of 8 rows"),
])
def test_parts_that_start_where_no_instruction_can_are_refused(start, said):
  kernel = functools.partial(parts_kernel, start=start)
  with pytest.raises(LayoutError) as e:
    lower(kernel, [struct(64, 64, dtype=BF16), struct(64, 64, dtype=BF16)], struct(64, 64))
  assert said in str(e.value) and "a gemm's parts start at multiples of 8 rows" in str(e.value)


@pytest.mark.parametrize(("dtype", "acc", "widths"), [
  (BF16, F32, (24, 40, 112, 176, 232)), (E4M3, F32, (24, 40, 112, 200, 248)), (I8, I32, (8, 24, 48, 112, 240)),
], ids=["bf16", "e4m3", "i8"])
def test_any_legal_width_is_one_instruction(dtype, acc, widths):
  depth = 32 // np.dtype(dtype).itemsize
  for n in widths:
    lowered = product(dtype, dtype, acc, bn=n)
    assert count(lowered, rf"wgmma.mma_async.sync.aligned.m64n{n}k{depth}") == count(lowered, "wgmma.mma_async") == 4
    assemble(lowered)
