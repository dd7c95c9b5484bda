"""Results against the same kernel as jax ops: what counts as a difference, what is not judged."""
from __future__ import annotations

import functools
import json

import jax
import ml_dtypes
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import normal, out
from tests.gpu.corpus_gemm import matmul
from tiletrace.sim import compare
from tiletrace.sim.compare import Comparison, difference, kind_of, unwritten
from tiletrace.sim.faults import Difference
from tiletrace.sim.launch import run
from tiletrace.sim.tolerances import tolerance

rng = np.random.default_rng(11)
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def found(*args) -> Difference:
  result = difference(*args)
  assert result is not None
  return result


@pytest.mark.parametrize("kind", ("elementwise", "reduce", "gemm"))
@pytest.mark.parametrize("dtype", (np.float64, F32, np.float16, BF16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
def test_floats_may_be_twice_the_tolerance_apart(dtype, kind):
  want = rng.uniform(1, 4, (5, 7)).astype(dtype)
  relative, by_largest = tolerance(dtype, kind)
  wide = want.astype(np.float64)
  apart = 2 * (relative * wide + by_largest * wide.max())
  near, far = ((wide + factor * apart).astype(dtype) for factor in (0.4, 3))

  assert difference("y", near, want, kind) is None
  assert found("y", far, want, kind).count == want.size


def test_a_difference_has_the_first_index_both_values_and_the_greatest_error():
  want = normal(rng, 4, 6, 8)
  got = want.copy()
  got[1, 5, 2] += 0.5
  got[3, 0, 7] -= 2
  d = found("y", got, want, "gemm")

  assert (d.output, d.shape, d.dtype, d.count, d.first) == ("y", (4, 6, 8), "float32", 2, (1, 5, 2))
  assert (d.got, d.want) == (got[1, 5, 2], want[1, 5, 2])
  assert d.error == pytest.approx(2, rel=1e-6) and 0 < d.bound < 1e-3
  assert str(d).startswith("2 of 192 elements of y, float32[4,6,8], differ; the first is [1, 5, 2]: ")


def test_nan_differs_from_every_number_and_is_text_in_json():
  want = normal(rng, 9)
  for other in (np.nan, np.inf):
    got = want.copy()
    got[4] = other
    for a, b in ((got, want), (want, got)):
      d = found("y", a, b, "gemm")
      assert (d.count, d.first, d.error) == (1, (4,), np.inf)
      assert str(other) in json.loads(json.dumps(d.data(), allow_nan=False)).values()


def test_infinities_of_one_sign_are_equal():
  x = np.array([np.inf, -np.inf, 1], np.float32)
  assert difference("y", x, x, "exact") is None
  assert found("y", -x, x, "gemm").count == 3


@pytest.mark.parametrize("dtype", (np.int8, np.uint8, np.int32, np.uint64, np.bool_))
def test_integers_and_bools_are_equal_or_wrong(dtype):
  want = rng.integers(0, 2, 50).astype(dtype)
  got = want.copy()
  got[7] = not want[7]

  assert difference("y", want, want, "gemm") is None
  assert (found("y", got, want, "gemm").count, found("y", got, want, "gemm").first) == (1, (7,))


def halves_kernel(x, y, z, flags):
  r = tt.block(tt.program_id(0), 64)
  y[r] = x[r] * 2
  with tt.when(tt.program_id(0) == 0):
    z[r] = x[r].astype(np.int32)
    flags[r] = x[r] > 0


def test_elements_that_neither_wrote_are_not_compared():
  x = normal(rng, 100)
  call = tt.tile_call(halves_kernel, out((x.shape, F32), (x.shape, np.int32), (x.shape, np.bool_)), grid=2)
  lowered = call.lower(x)
  outputs = run(lowered.lowering, [x]).outputs
  faults, notes = Comparison(lowered.lowering, lowered.program.graph).compare([x], [outputs])

  assert not faults
  assert notes == [f"36 of 100 elements of {name} are not compared: unwritten in both" for name in ("z", "flags")]
  assert not unwritten(outputs[0], x * 2).any()


def test_what_one_of_them_did_not_write_differs():
  want = normal(rng, 10)
  assert found("y", np.full_like(want, np.nan), want, "gemm").count == 10
  assert found("y", np.full(10, -1, np.int32), np.arange(10, dtype=np.int32), "exact").count == 10


# ---- kinds


def scale_kernel(x, y):
  y[...] = x[...] * 2


def copy_kernel(x, y):
  y[...] = x[...]


def rounded_kernel(x, y):
  y[...] = tt.maximum(tt.floor(x[...]).astype(BF16), 0).astype(F32)


def sum_kernel(x, y):
  y[...] = tt.sum(x[...], keepdims=True)


@pytest.mark.parametrize(("kernel", "dtype", "kind"), [
    (scale_kernel, F32, "elementwise"), (scale_kernel, np.int32, "exact"), (copy_kernel, F32, "exact"),
    (sum_kernel, F32, "reduce"), (sum_kernel, np.int32, "exact"), (rounded_kernel, F32, "exact")])
def test_a_kernel_is_of_the_kind_of_its_least_accurate_operation(kernel, dtype, kind):
  n = 1 if kernel is sum_kernel else 64
  call = tt.tile_call(kernel, out(((n,), dtype)), grid=1)
  assert kind_of(call.trace(jax.ShapeDtypeStruct((64,), dtype)).graph) == kind


def test_a_kernel_with_a_product_is_one():
  case = matmul(rng, 64, 64, 64, bn=64)
  assert kind_of(case.call.trace(*case.inputs).graph) == "gemm"


# ---- what is not judged


def residue_kernel(x, y, z):
  z[...] = x[...] * x[...] - y[...]


def levels_kernel(x, y, *, scale):
  y[...] = tt.floor(tt.exp(x[...]) * scale).astype(np.int32)


def comparison(kernel, result, *inputs) -> Comparison:
  lowered = tt.tile_call(kernel, out(result), grid=1).lower(*inputs)
  return Comparison(lowered.lowering, lowered.program.graph)


def test_what_cancels_to_rounding_errors_is_not_judged_unless_it_is_far_off():
  x = normal(rng, 256)
  y = x * x
  rounded, contracted = np.zeros_like(x), (x.astype(np.float64) ** 2 - y).astype(np.float32)      # both are right
  assert contracted.any()
  c = comparison(residue_kernel, (x.shape, F32), x, y)
  faults, [note] = c.compare([x, y], [[rounded], [contracted]])           # XLA makes one of them
  assert not faults
  assert "are not judged: rounding alone changes as many by as much" in note

  [fault], _ = c.compare([x, y], [[np.roll(x, 1)]])
  assert fault.kind == "wrong result" and fault.difference and fault.difference.output == "z"


def test_values_that_round_the_other_way_are_not_judged_unless_they_are_many():
  x = np.sort(rng.uniform(-1, 1, 4096)).astype(np.float32)
  scale = 3000.0
  exact = np.exp(x.astype(np.float64)) * scale
  want = np.floor(exact).astype(np.int32)
  edges = np.flatnonzero(np.abs(exact - np.round(exact)) < 3e-4)
  assert 1 < len(edges) < 20
  got = want.copy()
  got[edges[0]] += 1 if exact[edges[0]] < np.round(exact[edges[0]]) else -1
  c = comparison(functools.partial(levels_kernel, scale=scale), (x.shape, np.int32), x)
  faults, _ = c.compare([x], [[got]])
  assert not faults

  [fault], _ = c.compare([x], [[want + (np.arange(4096) % 8 == 0)]])
  assert fault.difference and fault.difference.count > 500


def test_a_launch_of_too_many_elements_is_not_compared(monkeypatch):
  x = normal(rng, 256)
  c = comparison(scale_kernel, (x.shape, F32), x)
  assert c.why_not() is None
  monkeypatch.setattr(compare, "MOST_ELEMENTS", 511)
  assert c.why_not() == "results are not compared: 512 elements of operands and results, the limit is 511"


# ---- where


def twice_kernel(x, y):
  y[tt.ds(0, 32)] = x[tt.ds(0, 32)]
  y[tt.ds(32, 32)] = x[tt.ds(32, 32)]


def test_all_lines_that_store_an_output_are_named():
  x = normal(rng, 64)
  [fault], _ = comparison(twice_kernel, (x.shape, F32), x).compare([x], [[-x]])

  line = twice_kernel.__code__.co_firstlineno
  assert f"; stored at compare_test.py:{line + 1}, compare_test.py:{line + 2} (kernel twice_kernel)" in str(fault)
  assert fault.place and "st.global" in fault.place.text and fault.place.loc and fault.place.loc.line == line + 1
  assert fault.data()["cta"] is None and fault.data()["difference"]["count"] == 64
