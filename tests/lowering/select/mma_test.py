"""Which gemms wgmma takes, how it splits them, and what it refuses."""
from __future__ import annotations

import jax.numpy as jnp
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, assemble, count, declined, lower, matmul, struct, variants
from tiletrace.core.errors import LoweringError, ResourceError, TileTraceError
from tiletrace.lowering.options import CompileOptions


@pytest.mark.parametrize(("bm", "bn", "warpgroups", "policy", "shape", "blocks"), [
  (128, 128, 2, None, "m64n128k16", 1), (128, 256, 2, None, "m64n256k16", 1), (64, 256, 1, None, "m64n256k16", 1),
  (64, 256, 2, None, "m64n128k16", 1), (128, 64, 1, None, "m64n64k16", 2), (192, 96, 3, None, "m64n96k16", 1),
  (128, 128, 2, tt.FULL_COL, "m64n64k16", 2), (256, 128, 2, tt.FULL_ROW, "m64n128k16", 2),
  (128, 176, 2, tt.SQUARE, "m64n176k16", 1), (64, 24, 3, tt.FULL_COL, "m64n8k16", 1),
])
def test_the_partition_follows_the_policy(bm, bn, warpgroups, policy, shape, blocks):
  lowered = matmul(n=bn * 2, m=bm * 2, bm=bm, bn=bn, warpgroups=warpgroups, policy=policy)
  assert variants(lowered, "gemm") == ["wgmma_ss"]
  of_shape = count(lowered, rf"wgmma.mma_async.sync.aligned.{shape}")
  assert of_shape == count(lowered, "wgmma.mma_async") == blocks * 64 // 16


@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
def test_transposed_operands_are_a_bit_of_the_instruction(form):
  text = matmul(form=form).as_text("ptx")
  line = next(x for x in text.splitlines() if "wgmma.mma_async" in x)
  bits = line.rstrip(" ;\n").split(",")[-2:]
  assert [int(x) for x in bits] == [int(form[0] == "t"), int(form[1] == "n")]  # B is K-major where it is stored [N, K]


@pytest.mark.parametrize(("change", "said"), [
  (dict(bm=96), "rows split over 2 warpgroups: each must hold a multiple of 64 rows, M = 96 gives 48"),
  (dict(bn=264), "N = 264 gives an instruction 264 columns; legal are the multiples of 8 from 8 to 256"),
  (dict(bn=12), "N = 12 gives an instruction 12 columns; legal are the multiples of 8 from 8 to 256"),
  (dict(bn=24, policy=tt.FULL_COL), "columns split over 2 warpgroups: N = 24 gives an instruction 12 columns; legal"),
  (dict(bk=24), "K = 24 is not a multiple of 16"),
])
def test_a_partition_that_is_not_legal_is_refused_naming_the_legal(change, said):
  with pytest.raises(LoweringError) as e:
    matmul(n=528, options=CompileOptions(force=(("gemm", "wgmma_ss"),)), **change)
  assert said in str(e.value)
  assert "tt.gemm(a_s" in str(e.value) and "^^^^^^^" in str(e.value)


def test_dtypes_that_wgmma_has_not_are_refused():
  with pytest.raises(TileTraceError) as e:
    matmul(dtype=F32)
  assert "gemm" in str(e.value) and "f32" in str(e.value)


def test_an_accumulator_that_leaves_no_registers_is_refused():
  with pytest.raises(TileTraceError) as e:
    matmul(bm=128, bn=256, warpgroups=1)
  assert "256 registers of each thread, of 255" in str(e.value)
  assert "split it over more than 1 warpgroups" in str(e.value)


def register_kernel(a, b, c):
  a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 32), b.dtype)
  acc = tt.alloc_fragment((64, 32), jnp.float32)
  tt.copy(a, a_s)
  tt.copy(b, b_s)
  tt.gemm(a_s[...] * 2, b_s, acc, accumulate=False)
  c[...] = acc[...]


def test_a_value_is_the_operand_in_registers():
  lowered = lower(register_kernel, [struct(64, 64, dtype=BF16), struct(64, 32, dtype=BF16)], struct(64, 32))
  assert variants(lowered, "gemm") == ["wgmma_rs"]
  assert declined(lowered, "gemm") == {"wgmma_ss": "A is in registers"}
  assemble(lowered)


def test_a_forced_gemm_that_does_not_fit_is_refused():
  with pytest.raises(LoweringError, match="the forced variant of 'gemm' declines"):
    lower(register_kernel, [struct(64, 64, dtype=BF16), struct(64, 32, dtype=BF16)], struct(64, 32),
          options=CompileOptions(force=(("gemm", "wgmma_ss"),)))


def test_a_variant_that_does_not_exist_is_refused_naming_those_that_do():
  with pytest.raises(LoweringError) as e:
    lower(register_kernel, [struct(64, 64, dtype=BF16), struct(64, 32, dtype=BF16)], struct(64, 32),
          options=CompileOptions(force=(("gemm", "wmma"),)))
  assert "'gemm' has no variant 'wmma'" in str(e.value)
  assert "wgmma_ss, wgmma_rs, mma_sync" in str(e.value)


def test_rings_that_do_not_fit_name_every_buffer():
  with pytest.raises(ResourceError) as e:
    matmul(bn=256, num_stages=6)
  said = str(e.value)
  assert "bytes of shared memory, sm_90a has 232448 for a CTA" in said
  assert "98304  a_s" in said and "196608  b_s" in said and "barriers" in said
  assert "num_stages" in said


def test_buffers_that_do_not_fit_are_refused_on_every_backend():
  def kernel(x, y):
    s = tt.alloc_shared((256, 256), F32)
    t = tt.alloc_shared((64, 64), F32)
    s[:64, :64] = x[...]
    t[...] = s[:64, :64]
    y[...] = t[...]

  with pytest.raises(ResourceError) as e:
    tt.tile_call(kernel, struct(64, 64), grid=1, backend="xla").trace(struct(64, 64))
  said = str(e.value)
  assert "kernel needs 278528 bytes of shared memory, a CTA has 232448" in said
  assert "262144  s Ref<shared>{f32[256,256]}" in said and "16384  t" in said
  assert "s = tt.alloc_shared((256, 256), F32)" in said and "^^^" in said


def test_fragments_that_do_not_fit_are_refused_with_the_sum():
  def kernel(x, y):
    p = tt.alloc_fragment((128, 128), F32)
    q = tt.alloc_fragment((128, 256), F32)
    p[...], q[...] = x[:, :128], x[:, 128:]
    for k in tt.range(3):
      p[...] += k
      q[...] *= k
    y[:, :128], y[:, 128:] = p[...], q[...]

  with pytest.raises(ResourceError) as e:
    lower(kernel, [struct(128, 384)], struct(128, 384))
  said = str(e.value)
  assert "384 registers of each thread, of 255" in said
  assert "128  p Ref" in said and "256  q Ref" in said
