"""sm_80, sm_86 and sm_89: what their kernels are made of, what is refused by name, numbers, machine code."""
from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu import corpus_gemm
from tests.gpu.corpus import build
from tests.gpu.corpus_gemm import matmul_kernel
from tests.gpu.whole_corpus import CASES as CORPUS
from tests.lowering.kernels import BF16, F32, count, declined, struct, variants
from tests.lowering.simulated import run
from tests.tolerances import assert_close
from tiletrace.core.errors import LoweringError, ResourceError
from tiletrace.ffi import primitive
from tiletrace.kernels import attention_reference, flash_attention, softmax
from tiletrace.kernels.flash_attention import AttentionRule, attention_call, choose_attention_tiling
from tiletrace.lowering import pipeline
from tiletrace.lowering.options import CompileOptions
from tiletrace.lowering.target import SM_80, SM_90A, TARGETS, target_of
from tiletrace.stages import Lowered, compile_image

OLDER = ("sm_80", "sm_86", "sm_89")
MATMUL = dict(bm=64, bn=64, bk=32, num_stages=3, trans_a=False, trans_b=False, policy=None)


def matmul_call(m: int = 128, n: int = 128, *, options: CompileOptions | None = None, warpgroups: int = 1,
                **change) -> tt.TileCall:
  static = MATMUL | change
  return tt.tile_call(functools.partial(matmul_kernel, **static), struct(m, n, dtype=BF16), options=options,
                      grid=(tt.cdiv(m, static["bm"]), tt.cdiv(n, static["bn"])), warpgroups=warpgroups)


def operands(m: int = 128, n: int = 128, k: int = 160) -> list[jax.ShapeDtypeStruct]:
  return [struct(m, k, dtype=BF16), struct(k, n, dtype=BF16)]


def matmul(target: str, **change) -> Lowered:
  return matmul_call(**change).lower(*operands(), target=target)


# ---- which target

def test_the_targets_limits_are_those_of_the_programming_guide():
  assert [TARGETS[name].smem_bytes for name in OLDER] == [163 << 10, 99 << 10, 99 << 10]
  assert all(TARGETS[name].max_cluster == 1 for name in OLDER)


@pytest.mark.parametrize("capability, target", [(75, None), (80, "sm_80"), (86, "sm_86"), (87, "sm_80"), (89, "sm_89"),
                                                (90, "sm_90a"), (100, "sm_89"), (120, "sm_89")])
def test_each_gpu_has_a_target_or_none(capability, target):
  found = target_of(capability)
  assert (found and found.name) == target


@pytest.mark.parametrize("capability, machine", [(None, "sm_80"), (80, "sm_80"), (86, "sm_80"), (90, "sm_90"),
                                                 (100, "sm_100")])
def test_a_program_is_assembled_for_the_gpu_that_is_of_a_later_generation(capability, machine):
  assert SM_80.machine(capability) == machine
  assert SM_90A.machine(capability) == "sm_90a"


def target_in(call: tt.TileCall, **given) -> str:
  return call.lower(*operands(), **given).lowering.target.name


def test_what_names_the_target_in_order(monkeypatch):
  """The argument, the options, TT_TARGET, the GPU, sm_90a."""
  assert target_in(matmul_call()) == "sm_90a"
  monkeypatch.setattr(primitive, "capability", lambda: 89)
  assert target_in(matmul_call()) == "sm_89"
  monkeypatch.setenv("TT_TARGET", "sm_80")
  assert target_in(matmul_call()) == "sm_80"
  optioned = matmul_call(options=CompileOptions(target="sm_86"))
  assert target_in(optioned) == "sm_86"
  assert target_in(optioned, target="sm_90a") == "sm_90a"


def test_a_target_that_does_not_exist_is_refused():
  with pytest.raises(LoweringError, match="no target 'sm_70'") as e:
    matmul("sm_70")
  assert "the targets are sm_90a, sm_80, sm_86, sm_89" in str(e.value)


def test_a_gpu_before_8_0_is_refused(monkeypatch):
  monkeypatch.setattr(primitive, "capability", lambda: 75)
  with pytest.raises(LoweringError, match=r"from compute capability 8\.0 on, this GPU has 7\.5"):
    primitive.default_target()


@pytest.mark.parametrize("capability, machine", [(None, "sm_80"), (90, "sm_90")])
def test_the_image_says_what_it_was_assembled_for(monkeypatch, capability, machine):
  monkeypatch.setattr(primitive, "capability", lambda: capability)
  lowered = matmul("sm_80")
  assert lowered.compile().image.target == machine
  assert compile_image(lowered.program.graph, SM_80, CompileOptions()).target == machine
  assert ".target sm_80\n" in lowered.as_text("ptx")


# ---- what kernels are made of

@pytest.mark.parametrize("target", OLDER)
def test_a_gemm_is_mma_sync_of_ldmatrix_operands_that_cp_async_brought(target):
  lowered = matmul(target)
  assert set(variants(lowered, "gemm")) == {"mma_sync"} and set(variants(lowered, "copy")) == {"cp_async"}
  assert declined(lowered, "gemm")["wgmma_ss"] == f"it needs sm_90a, the target is {target}"
  assert declined(lowered, "copy")["tma"] == f"it needs sm_90, the target is {target}"
  assert declined(lowered, "store")["tma"] == f"it needs sm_90, the target is {target}"
  assert count(lowered, "ldmatrix") and count(lowered, "mma.sync") and count(lowered, "cp.async.cg")
  text = lowered.as_text("ptx")
  assert not [word for word in ("wgmma", "mbarrier", "tensormap", "bulk", "setmaxnreg", "stmatrix", "fence.proxy")
              if word in text]


def test_results_are_staged_without_stmatrix():
  def kernel(x, y):
    x_s = tt.alloc_shared((64, 64), x.dtype)
    acc = tt.alloc_fragment((64, 64), F32)
    tt.copy(x, x_s)
    tt.gemm(x_s, x_s, acc, accumulate=False)
    x_s[...] = acc[...].astype(x.dtype)
    y[...] = x_s[...]

  call = tt.tile_call(kernel, struct(64, 64, dtype=BF16), grid=1)
  x = struct(64, 64, dtype=BF16)
  assert count(call.lower(x), "stmatrix") and not count(call.lower(x, target="sm_89"), "stmatrix")


def test_sums_of_several_elements_at_once_are_sm_90s():
  def kernel(x, y0, y):
    tt.atomic_add(y, x[...])

  call, shapes = tt.tile_call(kernel, struct(64, 64), grid=1, input_output_aliases={1: 0}), [struct(64, 64)] * 2
  assert count(call.lower(*shapes), r"red.relaxed.gpu.global.add.v4.f32")
  older = call.lower(*shapes, target="sm_80")
  assert count(older, r"red.relaxed.gpu.global.add.f32") and not count(older, r"add.v\d.f32")


@pytest.mark.parametrize("warpgroups, policy, bm", [(2, (1, 2), 64), (2, (2, 1), 128), (3, (3, 1), 192), (3, None, 192),
                                                    (6, (2, 3), 128)])
def test_warpgroups_divide_a_product_as_told(warpgroups, policy, bm):
  rng = np.random.default_rng(0)
  case = corpus_gemm.matmul(rng, bm, 96, 40, bm=bm, bn=96, bk=32, warpgroups=warpgroups, policy=policy, to=F32)
  lowered = case.call.lower(*case.inputs, target="sm_80")
  (got,), (want,) = run(lowered, case), case.want
  assert_close(got, want, "gemm", str(policy))


@pytest.mark.parametrize("policy, said", [((3, 2), "3 along the rows, with others beside them, are no power of two"),
                                          ((2, 2), "among 4 warpgroups, 6 compute it")])
def test_divisions_that_warps_have_no_addresses_for_are_refused(policy, said):
  with pytest.raises(LoweringError) as e:
    matmul("sm_80", bm=192, warpgroups=6, policy=policy)
  assert said in str(e.value)


# ---- what is refused

def barrier_kernel(x, y):
  full = tt.alloc_barrier(1, arrivals=1)
  y[...] = x[...]
  full[0].arrive()


def budget_kernel(x, y):
  with tt.warpgroup(0, regs=64):
    y[...] = x[...]


def tma_kernel(x, y):
  x_s = tt.alloc_shared((64, 64), x.dtype)
  with tt.warpgroup(0):
    tt.copy_async(x, x_s, dispatch="tma")
    y[...] = x_s[...]


def group_kernel(x, y):
  x_s = tt.alloc_shared((64, 64), x.dtype)
  acc = tt.alloc_fragment((64, 64), F32)
  tt.copy(x, x_s)
  tt.gemm_async(x_s, x_s, acc)
  y[...] = acc[...].astype(y.dtype)


def forced_kernel(x, y):
  x_s = tt.alloc_shared((64, 64), x.dtype)
  tt.copy(x, x_s, dispatch="tma")
  y[...] = x_s[...]


@pytest.mark.parametrize("kernel, said", [
  (barrier_kernel, "tt.alloc_barrier: it needs sm_90, the target is sm_80"),
  (budget_kernel, "tt.warpgroup(regs=64): it needs sm_90a, the target is sm_80"),
  (tma_kernel, "tma  it needs sm_90, the target is sm_80"),
  (group_kernel, "wgmma_ss  it needs sm_90a, the target is sm_80"),
  (forced_kernel, "tma  it needs sm_90, the target is sm_80")])
def test_what_the_target_has_not_is_refused_at_its_line(kernel, said):
  with pytest.raises(LoweringError) as e:
    lower_for(kernel, "sm_80")
  assert said in str(e.value) and "^^^" in str(e.value)


def lower_for(kernel, target: str, **call) -> Lowered:
  return tt.tile_call(kernel, struct(64, 64, dtype=BF16), grid=call.pop("grid", 1), **call).lower(
      struct(64, 64, dtype=BF16), target=target)


def test_clusters_are_refused():
  def kernel(x, y):
    y[...] = x[...]

  with pytest.raises(LoweringError, match=r"cluster=\(2,\): it needs sm_90, the target is sm_89"):
    lower_for(kernel, "sm_89", grid=(2,), cluster=(2,))


@pytest.mark.parametrize("name, said", [
  ("float8_depths-64", "mma_sync  it needs sm_89, the target is sm_80"),
  ("narrow_casts-e4m3xf32", "'cvt.rn.f16x2.e4m3x2': it needs sm_89, the target is sm_80"),
  ("rows_that_many_programs_add_up-bf16", "atomic add of bf16: it needs sm_90, the target is sm_80")])
def test_dtypes_that_the_target_has_not_are_refused(name, said):
  case = build(name)
  with pytest.raises(LoweringError) as e:
    case.call.lower(*case.inputs, target="sm_80")
  assert said in str(e.value) and "^^^" in str(e.value)


def test_shared_memory_is_the_targets():
  def kernel(x, y):
    x_s = tt.alloc_shared((800, 64), x.dtype)
    tt.copy(x.at[tt.block(0, 800), :], x_s)
    y[...] = x_s[:64, :]

  assert lower_for(kernel, "sm_80").lowering.program.smem_bytes == 102400
  with pytest.raises(ResourceError, match="sm_89 has 101376 for a CTA"):
    lower_for(kernel, "sm_89")


# ---- numbers, and machine code

CASES = ("matmul_forms-nn", "matmul_forms-tt", "matmul_stages-5", "matmul_policies-SQUARE",
         "matmul_rows_tma_cannot_take-33x40x77", "a_operand_in_registers-1", "operands_written_by_threads",
         "two_gemms_in_a_loop", "a_product_of_a_product-2xFULL_ROW", "batches_with_an_epilogue", "ragged_groups-30x70")


@pytest.mark.parametrize("target, name", [
  *(("sm_80", n) for n in CASES), *(("sm_89", n) for n in CASES[1::4]), ("sm_89", "float8_depths-64"),
  ("sm_89", "narrow_casts-e4m3xf32")])
def test_kernels_are_right_and_assemble(target, name):
  case = build(name)
  lowered = case.call.lower(*case.inputs, target=target)
  for machine in (target, lowered.lowering.target.machine(90)):
    cubin = pipeline.assemble(lowered.lowering, machine)
    assert (cubin.spill_stores, cubin.spill_loads) == (0, 0)
  for got, want, kind in zip(run(lowered, case), case.want, case.kinds(), strict=True):
    assert_close(got, want, kind, name)


@pytest.mark.parametrize("target, head_dim", [("sm_80", 64), ("sm_89", 96), ("sm_89", 128)])
def test_attention_copies_ahead_and_keeps_its_probabilities_in_registers(target, head_dim):
  """Blocks of keys before, in and after the loop; P is the second product's operand without a conversion."""
  q = struct(1, 2000, 2, head_dim, dtype=BF16)
  tiling = choose_attention_tiling(head_dim, 2000, target=target)
  call = attention_call(q.shape, q.shape, BF16, tiling, AttentionRule(0.1, right=0))
  lowered = call.lower(q, q, q, None, target=target)
  assert pipeline.assemble(lowered.lowering).spill_stores == 0
  assert pipeline.assemble(lowered.lowering, lowered.lowering.target.machine(90)).spill_stores == 0
  assert "copy 1 iterations ahead: 2 slots of k_s, v_s" in "\n".join(lowered.lowering.program.notes)
  assert "relayout" not in lowered.as_text("schedule")


@pytest.mark.parametrize("target, name", list(zip(itertools.cycle(("sm_80", "sm_89")), list(CORPUS)[::20])))
def test_the_corpus_is_lowered_and_assembled_or_refused_by_name(target, name):
  """Every twentieth kernel."""
  case = build(name)
  try:
    lowered = case.call.lower(*case.inputs, target=target)
  except LoweringError as e:
    assert f"the target is {target}" in str(e)
  else:
    assert pipeline.assemble(lowered.lowering).image[:4] == b"\x7fELF"


def test_attention_is_right(monkeypatch):
  monkeypatch.setenv("TT_TARGET", "sm_80")
  monkeypatch.setenv("TT_BACKEND", "sim")
  q, k, v = (jax.random.normal(jax.random.key(i), (1, 90, 1, 64), jnp.bfloat16) for i in range(3))
  got, want = flash_attention(q, k, v, is_causal=True), attention_reference(q, k, v, is_causal=True)
  np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=2e-2)


@pytest.mark.gpu(least=8)
@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_a_gpu_runs_the_programs(monkeypatch, target):
  """Products, softmax and attention; a GPU of a later generation runs the same PTX, assembled for it."""
  if (primitive.capability() or 0) < int(target.removeprefix("sm_")):
    pytest.skip(f"the GPU is older than {target}")
  monkeypatch.setenv("TT_TARGET", target)
  for name in CASES:
    case = build(name)
    got = jax.tree.leaves(jax.jit(case.call)(*jax.tree.map(jnp.asarray, case.inputs)))
    for g, want, kind in zip(got, case.want, case.kinds(), strict=True):
      assert_close(np.asarray(g), want, kind, name)
  x = jax.random.normal(jax.random.key(0), (40, 777))
  assert_close(np.asarray(softmax(x)), np.asarray(jax.nn.softmax(x)).astype(np.float64), "elementwise", "softmax")
  q, k, v = (jax.random.normal(jax.random.key(i), (2, 200, 2, 64), jnp.bfloat16) for i in range(3))
  got, want = flash_attention(q, k, v, is_causal=True), attention_reference(q, k, v, is_causal=True)
  np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=2e-2)
