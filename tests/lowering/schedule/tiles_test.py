"""Programs that CTAs take when they are free: each runs once, whatever takes it, in every form of kernel."""
from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.data_dependent_test import call_of, data, reference
from tests.lowering.kernels import BF16, F32, I32, assemble, count, lower, matmul_kernel, notes, struct
from tests.tolerances import assert_close
from tiletrace.core.graph import walk
from tiletrace.lowering.schedule.balance import program_costs

rng = np.random.default_rng(17)
SMS = (1, 2, 3)


def normal(*shape, dtype=F32):
  return rng.standard_normal(shape).astype(dtype)


def f64(x):
  return np.asarray(x).astype(np.float64)


# --- with a producer

def gemm(m, n, k, *, bm=128, bn=128, num_stages=3, dtype=BF16, **call):
  """The call, and its operands."""
  kernel = functools.partial(matmul_kernel, bm=bm, bn=bn, bk=64, num_stages=num_stages)
  call = {"raster": 2, "warpgroups": 2, "persistent": "dynamic", **call}
  made = tt.tile_call(kernel, struct(m, n, dtype=dtype), grid=(tt.cdiv(m, bm), tt.cdiv(n, bn)), **call)
  return made, normal(m, k, dtype=BF16), normal(k, n, dtype=BF16)


@pytest.mark.parametrize("shape", [(128, 128, 128), (256, 128, 192), (384, 384, 256), (400, 328, 200)], ids=str)
@pytest.mark.parametrize("sms", SMS)
def test_a_gemm_with_a_deferred_epilogue(shape, sms):
  """One program, as many as CTAs, more, and tiles over the edges."""
  call, a, b = gemm(*shape)
  lowered = call.lower(a, b)

  assert ("the epilogue is deferred" in notes(lowered)) == (shape[2] >= 128)
  assert_close(lowered.simulate(a, b, num_sms=sms, seed=sms)[0], f64(a) @ f64(b), "gemm")


@pytest.mark.parametrize("call", [dict(warpgroups=1), dict(dtype=F32), dict(num_stages=1), dict(num_stages=5, bn=64)],
                         ids=str)
def test_gemms_of_other_roles_rings_and_results(call):
  call, a, b = gemm(384, 256, 192, **call)
  lowered = call.lower(a, b)

  assert assemble(lowered).spill_stores == 0
  assert_close(lowered.simulate(a, b, num_sms=3)[0], f64(a) @ f64(b), "gemm")


def test_the_code_assembles_without_a_warning_and_asks_with_one_atomic():
  kernel = functools.partial(matmul_kernel, bm=128, bn=256, bk=64, num_stages=4)
  a = struct(4096, 4096, dtype=BF16)
  lowered = lower(kernel, [a, a], a, grid=(32, 16), warpgroups=2, raster=16, persistent="dynamic")
  cubin = assemble(lowered)

  assert cubin.spill_stores == cubin.spill_loads == 0 and not cubin.warnings
  assert count(lowered, r"atom\.") == 1 and count(lowered, r"red\.") == 0


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("form", ["plain", "carrying_loop_around", "index_of_a_tile", "while_index"])
def test_trip_counts_and_scalars_of_the_data(form, num_stages):
  """Ragged loops, some of no trips; in `index_of_a_tile` the consumers send a scalar to the producer."""
  inputs = data()
  lowered = call_of(form, num_stages=num_stages, persistent="dynamic").lower(*inputs)

  assert "filled by TMA from the producer warpgroup" in notes(lowered)
  assert ("sent to the producer" in notes(lowered)) == (form == "index_of_a_tile")
  assert assemble(lowered).image
  for sms in SMS:
    assert_close(lowered.simulate(*inputs, num_sms=sms, seed=sms)[0], reference(form, inputs), "gemm", form)


@pytest.mark.parametrize("form", ["plain", "while_index", "index_of_a_tile"])
def test_a_whole_warpgroup_that_copies_asks_with_one_thread(form):
  """Rows of a multiple of 4 bytes: TMA cannot take A."""
  inputs = data()
  inputs[0] = inputs[0][:, :-2]
  padded = [np.pad(inputs[0], ((0, 0), (0, 2))), *inputs[1:]]
  lowered = call_of(form, persistent="dynamic").lower(*inputs)

  assert "filled by cp_async copies, TMA from the producer" in notes(lowered)
  assert assemble(lowered).image
  for sms in SMS:
    assert_close(lowered.simulate(*inputs, num_sms=sms)[0], reference(form, padded), "gemm", form)


# --- without

def rows_kernel(x, n, total, top, *, columns=96):
  """Of the first n[i] rows of x: their sum and, in columns of which there are fewer than threads, their maxima."""
  i = tt.program_id(0)
  acc, most = tt.alloc_fragment((columns,), F32), tt.alloc_fragment((columns,), F32)
  acc[...], most[...] = 0, -1e30
  for k in tt.range(n[i]):
    acc[...] += x[k, :]
    most[...] = tt.maximum(most[...], x[k, :])
  total[i, :], top[i, :] = acc[...], most[...]


def rows(programs, **call):
  """(the call, inputs, results): two results, ragged loops."""
  x, n = normal(20, 96), rng.integers(0, 20, programs).astype(I32)
  want = [np.stack([f64(x)[:k].sum(0) for k in n]), np.stack([f64(x)[:k].max(0, initial=-1e30) for k in n])]
  out = struct(programs, 96), struct(programs, 96)
  return tt.tile_call(rows_kernel, out, grid=programs, **{"persistent": "dynamic", **call}), (x, n), want


@pytest.mark.parametrize("programs", [1, 2, 3, 13])
@pytest.mark.parametrize("warpgroups", [1, 2])
def test_kernels_without_a_producer(programs, warpgroups):
  call, inputs, want = rows(programs, warpgroups=warpgroups)
  lowered = call.lower(*inputs)

  assert assemble(lowered).image
  for sms in SMS:
    for got, w in zip(lowered.simulate(*inputs, num_sms=sms, seed=sms), want, strict=True):
      assert_close(got, w, "reduce")


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_targets_without_roles(target):
  """Threads copy ahead, in several stages."""
  call, a, b = gemm(256, 192, 192, warpgroups=1, bm=64, bn=64, options=tt.CompileOptions(target=target))
  lowered = call.lower(a, b)

  assert "copy 2 iterations ahead" in notes(lowered) and assemble(lowered).image
  assert_close(lowered.simulate(a, b, num_sms=2)[0], f64(a) @ f64(b), "gemm")


def test_a_result_in_place():
  def kernel(x, y):
    i = tt.program_id(0)
    y[tt.block(i, 64)] = 2 * x[tt.block(i, 64)]

  x = normal(640)
  call = tt.tile_call(kernel, struct(640), grid=10, persistent="dynamic", input_output_aliases={0: 0}, backend="sim")
  np.testing.assert_array_equal(jax.jit(call)(x), 2 * x)


# --- who takes what

def who_kernel(x, n, y, who):
  i = tt.program_id(0)
  acc = tt.alloc_fragment((128,), F32)
  acc[...] = 0
  for k in tt.range(n[i]):
    acc[...] += x[k % 4, :]
  y[i, :], who[i] = acc[...], tt.cta_id()


@pytest.mark.parametrize("persistent", ["dynamic", True])
def test_while_one_cta_has_a_long_program_the_other_takes_the_rest(persistent):
  """The static loop gives each of two CTAs half of the programs."""
  programs = 41
  x, n = normal(4, 128), np.full(programs, 3, np.int32)
  n[0] = 6000
  call = tt.tile_call(who_kernel, (struct(programs, 128), struct(programs, dtype=I32)), grid=programs,
                      persistent=persistent)
  y, who = call.lower(x, n).simulate(x, n, num_sms=2)

  want = np.stack([f64(x)[np.arange(k) % 4].sum(0) for k in n])
  np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3)
  assert who[0] == 0 and who[1] == 1 and set(who) <= {0, 1}
  others = int((who[1:] == 1).sum())
  assert others > programs * 3 // 4 if persistent == "dynamic" else others == programs // 2


def test_programs_of_known_lengths_are_taken_the_longest_first():
  def kernel(x, y):
    acc = tt.alloc_fragment((64,), F32)
    acc[...] = 0
    for k in tt.range(tt.program_id(0) // 2 + 1):
      acc[...] += x[tt.block(k, 64)]
    y[tt.program_id(0), :] = acc[...]

  n = 150
  x = normal(64 * n)
  lowered = lower(kernel, [x], struct(n, 64), grid=n, persistent="dynamic")
  (table,) = [e for e in walk(lowered.lowering.program.graph.body) if e.primitive.name == "lookup"]
  order = table.params["values"]
  costs = program_costs(lowered.program.graph.body, lowered.program.graph.options)

  assert costs is not None and sorted(order) == list(range(n))
  assert order[:4] == (148, 149, 146, 147) and (np.diff(costs[list(order)]) <= 0).all()
  assert "takes its next program when it is free: the longest first, by a table" in str(lowered.report())
  want = np.cumsum(f64(x).reshape(n, 64), axis=0)[np.arange(n) // 2]
  for sms in SMS:
    assert_close(lowered.simulate(x, num_sms=sms)[0], want, "reduce")


def test_the_report_says_that_programs_are_taken():
  call, inputs, _ = rows(300)
  text = str(call.lower(*inputs).report())

  assert "each CTA takes its next program when it is free: in the order of the raster" in text
  assert "300 programs on 300 persistent CTAs, each taken when one is free" in text
  assert "grid=(300,) warpgroups=1 persistent=dynamic" in call.trace(*inputs).as_text()
  assert "programs_taken" not in call.trace(*inputs).as_text()


# --- within jax

def test_calls_one_after_another_each_begin_at_the_first_program():
  call, inputs, want = rows(7, backend="sim")
  compiled = jax.jit(call).lower(*inputs).compile()
  for _ in range(2):
    assert_close(compiled(*inputs)[0], want[0], "reduce")
  assert_close(call(*inputs)[1], want[1], "reduce")

  def step(carry, n):
    total, _ = call(inputs[0], n)
    return carry + total, total

  ns = jnp.stack([inputs[1], inputs[1][::-1]])
  last, each = jax.jit(lambda ns: jax.lax.scan(step, jnp.zeros((7, 96)), ns))(ns)
  assert_close(each[0], want[0], "reduce")
  assert_close(each[1], want[0][::-1], "reduce")
  assert_close(last, want[0] + want[0][::-1], "reduce")


def test_under_vmap_the_programs_of_all_examples_are_taken():
  call, (x, n), want = rows(5, backend="sim")
  xs = np.stack([x, 2 * x, -x])
  total, _ = jax.jit(jax.vmap(call, in_axes=(0, None)))(xs, n)
  for got, factor in zip(total, (1, 2, -1), strict=True):
    assert_close(got, factor * want[0], "reduce")


@pytest.mark.parametrize("shape", [(64, 64, 64), (200, 136, 96), (390, 264, 256)], ids=str)
def test_one_kernel_of_dynamic_shapes(shape):
  m, n, k = shape
  kernel = functools.partial(matmul_kernel, bm=64, bn=64, bk=64, num_stages=3)

  def product(a, b):
    grid = (tt.cdiv(a.shape[0], 64), tt.cdiv(b.shape[1], 64))
    return tt.tile_call(kernel, struct(a.shape[0], b.shape[1], dtype=BF16), grid=grid, persistent="dynamic",
                        raster=2, dynamic_shapes=("m, 8*k", "8*k, 8*n", "m, 8*n"), backend="sim")(a, b)

  a, b = normal(m, k, dtype=BF16), normal(k, n, dtype=BF16)
  assert_close(jax.jit(product)(a, b), f64(a) @ f64(b), "gemm")


def test_with_debugging_and_profiling(capsys):
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), F32)
    acc[...] = 0
    with tt.profile("tile"):
      for k in tt.pipelined(3, num_stages=2):
        tt.copy(a.at[tt.block(tt.program_id(0), 64), tt.block(k, 64)], a_s)
        tt.copy(b.at[tt.block(k, 64), :], b_s)
        tt.gemm(a_s, b_s, acc)
    tt.debug_print("of {}", tt.program_id(0))
    c[tt.block(tt.program_id(0), 64), :] = acc[...]

  a, b = normal(320, 192, dtype=BF16), normal(192, 64, dtype=BF16)
  call = tt.tile_call(kernel, struct(320, 64), grid=5, persistent="dynamic", backend="sim",
                      options=tt.CompileOptions(debug=True, profile=True))
  lowered = call.lower(a, b)

  assert [n for n in lowered.lowering.graph.arg_names if n not in "abc"] == [
      "debug_ring", "profile_records", "programs_taken"] * 2
  assert assemble(lowered).image
  capsys.readouterr()
  assert_close(call(a, b), f64(a) @ f64(b), "gemm")
  said = capsys.readouterr().out
  assert sorted(re.findall(r"program \((\d),\): of (\d)", said)) == [(str(i), str(i)) for i in range(5)]


def test_the_number_of_a_program_is_known_to_be_one():
  """No bounds are checked that are not with a static loop."""
  def kernel(x, y):
    r = tt.block(tt.program_id(0), 256)
    y[r, :] = x[r, :] + 1

  for persistent in (True, "dynamic"):
    lowered = lower(kernel, [struct(76800, 8)], struct(76800, 8), grid=300, persistent=persistent)
    assert count(lowered, r"(ld|st)\.global") > 0
    assert not re.search(r"@!?%p\d+ (ld|st)\.global", lowered.as_text("ptx"))


def test_other_kernels_are_as_they_were():
  """Nothing is asked, and no argument is added, where programs are not taken."""
  for persistent in (False, True):
    call, a, b = gemm(384, 384, 256, persistent=persistent)
    lowered = call.lower(a, b)
    assert lowered.lowering.hidden == () and count(lowered, "atom") == 0
    assert lowered.lowering.graph.arg_names == ("a", "b", "c")
