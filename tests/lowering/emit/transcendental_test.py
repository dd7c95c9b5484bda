"""jnp's functions in compiled kernels: each with each dtype assembles; numbers in the simulator and as jax ops."""
from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax import lax

import tiletrace as tt
from tests.gpu.corpus import Case
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F16, F32, I32, assemble, count, lower, struct
from tests.tolerances import assert_close

U32 = np.uint32
UNARY = (tt.sin, tt.cos, tt.tan, tt.asin, tt.acos, tt.atan, tt.sinh, tt.cosh, tt.asinh, tt.acosh, tt.atanh, tt.expm1,
         tt.log1p, tt.log10, tt.cbrt, tt.erfc, tt.round, tt.trunc, tt.isinf, tt.isfinite, tt.reciprocal, tt.signbit)
BINARY = (tt.atan2, tt.power, tt.hypot, tt.fmod, tt.logaddexp, tt.copysign)
_NUMPY = {"sigmoid": lambda x: 1 / (1 + np.exp(-x)), "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
          "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "round_": np.round, "atan2": np.arctan2,
          "erfc": np.vectorize(math.erfc, otypes=[np.float64])}
rng = np.random.default_rng(31)


def reference(f):
  return _NUMPY.get(f.__name__) or getattr(np, f.__name__)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("fs", [UNARY[:7], UNARY[7:14], UNARY[14:], BINARY], ids=("trig", "exp", "rest", "binary"))
def test_a_function_agrees_with_numpy_in_the_simulator_and_as_jax_ops(dtype, fs):
  def kernel(x, y, o):
    for k, f in enumerate(fs):
      v = x[...] if fs is BINARY or f not in (tt.acosh, tt.log10) else tt.abs(x[...]) + 1
      o[k, :] = (f(v, y[...]) if fs is BINARY else f(v)).astype(o.dtype)

  x, y = (rng.standard_normal(300).astype(dtype) for _ in range(2))
  x[:4] = np.array([0, np.inf, 0.5, 100])
  if fs is BINARY:
    x[:4], y = np.abs(x[:4]), np.copysign(np.abs(y) + np.asarray(2, dtype), y)    # quotients that lose few bits
    y[:4] = np.abs(y[:4])
  call = tt.tile_call(kernel, struct(len(fs), 300, dtype=dtype), grid=1)
  lowered = call.lower(x, y)
  assemble(lowered)
  (got,) = simulated.run(lowered, Case(call, (x, y), (), "elementwise"))
  jax_ops = np.asarray(jax.jit(call)(x, y))
  wide, other = x.astype(np.float64), y.astype(np.float64)
  for k, f in enumerate(fs):
    one = np.abs(x) + np.asarray(1, dtype) if f in (tt.acosh, tt.log10) else x
    with np.errstate(all="ignore"):
      want = reference(f)(wide, other) if fs is BINARY else reference(f)(one.astype(np.float64))
      want = want.astype(dtype)                                  # where f64 overflows later
    for who in (got, jax_ops):
      assert_close(who[k], want, "elementwise", f.__name__)


def test_powers_with_literal_exponents_are_products():
  def kernel(x, o):
    o[...] = x[...] ** 5 + tt.power(x[...], 0.5)

  lowered = lower(kernel, [struct(128)], struct(128))
  assert count(lowered, "mul.f64") == 0 and count(lowered, "sqrt.rn") == 4


@pytest.mark.parametrize("dtype", [I32, U32, np.int8, np.uint8, np.int16, np.uint16], ids=lambda d: np.dtype(d).name)
def test_functions_of_bits_are_exact(dtype):
  info = np.iinfo(dtype)
  x = rng.integers(info.min, info.max, 200, dtype=dtype, endpoint=True)
  x[:5] = [0, 1, info.max, info.min, 7]

  def kernel(x, o):
    o[0, :] = tt.population_count(x[...])
    o[1, :] = tt.clz(x[...])

  call = tt.tile_call(kernel, struct(2, 200, dtype=dtype), grid=1)
  lowered = call.lower(x)
  assemble(lowered)
  (got,) = simulated.run(lowered, Case(call, (x,), (), "exact"))
  want = np.stack([np.asarray(f(x)) for f in (lax.population_count, lax.clz)])
  np.testing.assert_array_equal(got, want)
  np.testing.assert_array_equal(jax.jit(call)(x), want)


@pytest.mark.parametrize(("source", "to"), [(F32, I32), (I32, F32), (U32, I32), (F16, BF16), (BF16, np.int16),
                                            (np.uint16, F16), (np.int8, np.uint8), (F32, U32)])
def test_bits_keep_their_value(source, to):
  bits = np.dtype(source).itemsize * 8
  x = rng.integers(0, 2**bits, 77, dtype=f"u{bits // 8}").view(source)

  def kernel(x, s, o):
    o[0, :] = tt.bitcast_convert_type(x[...], to)
    o[1, :] = tt.bitcast_convert_type(s[...], to) + tt.zeros((77,), to) if np.dtype(to).kind in "iu" else o[0, :]

  call = tt.tile_call(kernel, struct(2, 77, dtype=to), grid=1)
  lowered = call.lower(x, x[0])
  assemble(lowered)
  (got,) = simulated.run(lowered, Case(call, (x, x[0]), (), "exact"))
  raw = f"u{bits // 8}"
  np.testing.assert_array_equal(got[0].view(raw), x.view(raw))
  np.testing.assert_array_equal(np.asarray(jax.jit(call)(x, x[0]))[0].view(raw), x.view(raw))


@pytest.mark.parametrize(("source", "to"), [(U32, BF16), (F32, np.uint16), (I32, np.uint8), (np.uint16, np.int8)])
def test_parts_of_a_word_are_a_new_last_dimension_and_become_the_word_again(source, to):
  bits = np.dtype(source).itemsize * 8
  x = rng.integers(0, 2**bits, (30, 8), dtype=f"u{bits // 8}").view(source)
  parts = np.dtype(source).itemsize // np.dtype(to).itemsize

  def kernel(x, o, again):
    v = tt.bitcast_convert_type(x[...], to)
    o[...] = v
    again[...] = tt.bitcast_convert_type(v, source)

  call = tt.tile_call(kernel, (struct(30, 8, parts, dtype=to), struct(30, 8, dtype=source)), grid=1)
  lowered = call.lower(x)
  assemble(lowered)
  want = (np.asarray(lax.bitcast_convert_type(x, to)), x)
  for got in (simulated.run(lowered, Case(call, (x,), (), "exact")), jax.jit(call)(x)):
    for a, b in zip(got, want, strict=True):
      np.testing.assert_array_equal(np.asarray(a).view(np.uint8), b.view(np.uint8))


APPROXIMATE = {  # function -> its instruction
  tt.exp: "ex2.approx.ftz.f32", tt.exp2: "ex2.approx.ftz.f32", tt.log: "lg2.approx.ftz.f32",
  tt.log2: "lg2.approx.ftz.f32", tt.sqrt: "sqrt.approx.ftz.f32", tt.tanh: "tanh.approx.f32",
  tt.sin: "sin.approx.ftz.f32", tt.cos: "cos.approx.ftz.f32", tt.sigmoid: "rcp.approx.ftz.f32"}


def test_an_approximate_function_is_one_instruction_and_a_scale():
  def kernel(x, y):
    for k, f in enumerate(APPROXIMATE):
      y[k, :] = f(x[...], approximate=True)

  x = rng.uniform(0.1, 3, 128).astype(F32)
  call = tt.tile_call(kernel, struct(len(APPROXIMATE), 128), grid=1)
  lowered = call.lower(x)
  assemble(lowered)
  assert {i: count(lowered, i) for i in APPROXIMATE.values()} == {
    i: 4 * (list(APPROXIMATE.values()).count(i) + (i == APPROXIMATE[tt.exp])) for i in APPROXIMATE.values()}
  assert count(lowered, "mul") == 4 * 3 and count(lowered, "fma") == 0
  (got,) = simulated.run(lowered, Case(call, (x,), (), "elementwise"))
  want = np.stack([reference(f)(x.astype(np.float64)) for f in APPROXIMATE])
  np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
  assert_close(jax.jit(call)(x), want, "elementwise")


def test_a_function_of_one_row_is_computed_once():
  def kernel(x, row, y):
    y[...] = x[...] + tt.sin(row[...])[:, None]

  lowered = lower(kernel, [struct(16, 256), struct(16)], struct(16, 256))
  assert count(lowered, "bra") <= 16


@pytest.mark.parametrize("to", [I32, U32, F32])
def test_the_bits_of_numbers_that_are_literals(to):
  def kernel(y, z):
    y[...] = tt.bitcast_convert_type(tt.full((100, 8), 1 if to == F32 else 1., I32 if to == F32 else F32), to)
    z[...] = tt.bitcast_convert_type(tt.arange(4), to)

  call = tt.tile_call(kernel, (struct(100, 8, dtype=to), struct(4, dtype=to)), grid=1)
  for got, want in zip(simulated.run(call.lower(), Case(call, (), (), "exact")), call(), strict=True):
    np.testing.assert_array_equal(got, np.asarray(want))
