"""Elementwise operations, casts and literals: every operation with every dtype, and the instructions they become."""
from __future__ import annotations

import operator

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import Case
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F16, F32, I32, assemble, count, lower, struct
from tiletrace.core.errors import LoweringError

U32, BOOL, E4M3, E5M2 = np.uint32, np.bool_, jnp.float8_e4m3fn, jnp.float8_e5m2
FLOATS, INTEGERS = (F32, BF16, F16, E4M3, E5M2), (I32, U32, np.int8, np.uint8, np.int16, np.uint16)
NUMBERS = (*FLOATS, *INTEGERS)
DTYPES = (*NUMBERS, BOOL)
OPS = {  # name -> (function, dtypes, operands)
  **{f.__name__: (f, NUMBERS, 2) for f in (tt.add, tt.subtract, tt.multiply, tt.minimum, tt.maximum, tt.equal, tt.less,
                                           tt.not_equal, tt.less_equal, tt.greater, tt.greater_equal)},
  **{f.__name__: (f, FLOATS, 1) for f in (tt.exp, tt.exp2, tt.log, tt.log2, tt.sqrt, tt.rsqrt, tt.tanh, tt.sigmoid,
                                          tt.silu, tt.erf, tt.floor, tt.ceil, tt.isnan)},
  **{f.__name__: (f, NUMBERS, 1) for f in (tt.abs, tt.sign, tt.negative, tt.square)},
  **{f.__name__: (f, (*INTEGERS, BOOL), 2) for f in (tt.bitwise_and, tt.bitwise_or, tt.bitwise_xor)},
  **{f.__name__: (f, INTEGERS, 2) for f in (tt.left_shift, tt.right_shift)},
  "divide": (tt.divide, FLOATS, 2), "floor_divide": (operator.floordiv, NUMBERS, 2), "mod": (operator.mod, NUMBERS, 2),
  "invert": (tt.invert, (*INTEGERS, BOOL), 1), "logical_not": (tt.logical_not, (*NUMBERS, BOOL), 1),
  "power": (lambda x: x ** 5, NUMBERS, 1), "root": (lambda x: x ** 0.5, FLOATS, 1),
  "inverse": (lambda x: x ** -2, FLOATS, 1), "where": (lambda x, y: tt.where(x == y, x, y), (*NUMBERS, BOOL), 2),
  "clip": (lambda x: tt.clip(x, 1, 3), NUMBERS, 1), "and": (lambda x, y: tt.logical_and(x, y), (*NUMBERS, BOOL), 2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("n", [5, 512])
def test_every_operation_assembles(dtype, n):
  """One, and four, elements a thread; tiles, literals and scalars."""
  functions = [(f, args) for f, dtypes, args in OPS.values() if dtype in dtypes]

  def kernel(x, y, s, o):
    a, b, c = x[...], y[...], s[...]
    for k, (f, args) in enumerate(functions):
      o[k, :] = f(*(a, b)[:args]).astype(o.dtype)
      o[k, :] = (f(a, c) if args == 2 else f(c).astype(o.dtype) + tt.zeros((n,), o.dtype)).astype(o.dtype)
      if args == 2:
        o[k, :] = f(True if dtype == BOOL else 3, a).astype(o.dtype)

  x = struct(n, dtype=dtype)
  assemble(lower(kernel, [x, x, struct(dtype=dtype)], struct(len(functions), n)))


def cast_kernel(*refs):
  *xs, o = refs
  for k, x in enumerate(xs):
    o[k, :] = x[...].astype(o.dtype)
    o[k, 0] = x[3].astype(o.dtype)


@pytest.mark.parametrize("to", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_cast_assembles(to):
  lowered = lower(cast_kernel, [struct(300, dtype=d) for d in DTYPES], struct(len(DTYPES), 300, dtype=to))
  assert assemble(lowered).registers < 128


# Ties, the largest numbers of e4m3 (448) and e5m2 (57344) and what is just too large for them, subnormals, NaN.
EDGES = np.array([447, 448, 456, 463.9, 464, 464.1, 480, 1e6, np.inf, -np.inf, -470, np.nan, 57344, 61439, 61440, 65536,
                  -61440, 2**-10, 2**-11, 2**-16, 1.01 * 2**-17, 300, -300, 127.5, 128, -129, 0, 255.5, 33000], F32)


@pytest.mark.parametrize("to", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("n", [5, 200])
def test_casts_are_those_of_jax(to, n):
  """Also where a number is too large: e4m3 gives NaN, e5m2 infinity, an integer its nearest."""
  numbers = np.concatenate([EDGES, 20 * np.random.default_rng(0).standard_normal(200, F32)])[-n if n < 200 else 0:][:n]
  xs = [np.asarray(jnp.asarray(numbers).astype(d)) for d in DTYPES]
  call = tt.tile_call(cast_kernel, struct(len(DTYPES), n, dtype=to), grid=1, backend="sim")
  wide = [x.astype(F32) if x.dtype.kind in "iu" else x for x in xs]        # XLA without optimization rounds them twice
  want = np.stack([np.asarray(jnp.asarray(x if np.dtype(to).kind in "iu" else w).astype(to)) for x, w in zip(xs, wide)])
  want[:, 0] = want[:, 3]
  np.testing.assert_array_equal(np.asarray(call(*xs)).astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_a_literal_is_stored_as_the_number_that_it_is(dtype):
  def kernel(x, y):
    y[...] = x[...]
    y[1] = True if dtype == BOOL else 1
    y[2:40] = False if dtype == BOOL else 3

  x = np.arange(60).astype(dtype)
  y = np.asarray(tt.tile_call(kernel, struct(60, dtype=dtype), grid=1, backend="sim")(x))
  want = x.copy()
  want[1], want[2:40] = 1, 0 if dtype == BOOL else 3
  np.testing.assert_array_equal(y.view(np.uint8), want.view(np.uint8))


def ptx(f, dtype=F32, n=128):
  def kernel(x, y):
    y[...] = f(x[...])

  return lower(kernel, [struct(n, dtype=dtype)], struct(n, dtype=dtype))


def test_equal_elements_of_a_broadcast_row_are_computed_once():
  def kernel(x, row, y):
    y[...] = x[...] + tt.exp(row[...])[:, None]

  lowered = lower(kernel, [struct(16, 256), struct(16)], struct(16, 256))
  assert count(lowered, "add.f32") == 32                        # elements a thread
  assert count(lowered, "ex2.approx") <= 16                     # rows that a thread holds, not elements


@pytest.mark.parametrize(("f", "instruction"), [
  (lambda x: x // 8, "shr.s32"), (lambda x: x % 8, "and.b32"), (lambda x: x // 7, "div.s32"),
])
def test_division_by_a_literal_power_of_two_is_a_shift_or_a_mask(f, instruction):
  lowered = ptx(f, I32)
  assert count(lowered, instruction) >= 1
  assert (count(lowered, "div") == 0) == (instruction != "div.s32")


def test_bf16_is_computed_in_f32_and_packed_in_pairs():
  lowered = ptx(lambda x: tt.exp(x), BF16, n=1024)
  assert count(lowered, "ex2") >= 8
  assert count(lowered, "cvt.rn.bf16x2.f32") >= 4


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("f", [operator.add, operator.sub, operator.mul])
def test_sums_and_products_of_16_bits_are_made_in_pairs_with_the_bits_of_f32_rounded_once(f, dtype):
  name = {operator.add: "add", operator.sub: "sub", operator.mul: "mul"}[f]
  rng = np.random.default_rng(0)
  x, y = rng.integers(0, 2**16, (2, 4096), np.uint16).view(dtype)      # infinities, NaNs and subnormal numbers, too
  lowered = ptx(lambda x: f(x, x), dtype, n=1024)
  assert count(lowered, f"{name}.rn.{'bf16x2' if dtype == BF16 else 'f16x2'}") == 4 and count(lowered, r"cvt\.") == 0

  def kernel(x, y, o):
    o[...] = f(x[...], y[...])

  call = tt.tile_call(kernel, struct(4096, dtype=dtype), grid=1)
  lowered = call.lower(x, y)
  assemble(lowered)
  (got,) = simulated.run(lowered, Case(call, (x, y), (), "exact"))
  with np.errstate(all="ignore"):
    want = f(x.astype(F32), y.astype(F32)).astype(dtype)
  finite = ~np.isnan(want.astype(F32))
  np.testing.assert_array_equal(got.view(np.uint16)[finite], want.view(np.uint16)[finite])
  assert np.isnan(got[~finite].astype(F32)).all()


def test_min_and_max_keep_nan():
  assert count(ptx(lambda x: tt.maximum(x, 0)), "max.NaN.f32") == 4       # elements a thread


@pytest.mark.parametrize(("f", "dtype", "said"), [
  (lambda x: x.astype(np.int64), np.int64, "i64 values have no registers on the GPU yet"),
])
def test_what_has_no_form_yet_is_refused_with_its_line(f, dtype, said):
  with pytest.raises(LoweringError) as e:
    ptx(f, dtype)
  assert said in str(e.value)
  assert "elementwise_test.py" in str(e.value) and "hint:" in str(e.value)


@pytest.mark.parametrize("dtype", [F32, np.int8, BF16])
@pytest.mark.parametrize(("shape", "parts", "axis"), [((32, 128), 3, 0), ((512, 1), 2, 1), ((64, 64), 4, 0)])
def test_values_that_each_thread_has_its_share_of_are_joined_in_registers(dtype, shape, parts, axis):
  def kernel(*refs):
    *xs, y = refs
    y[...] = tt.concatenate([x[...] for x in xs], axis=axis)

  rng = np.random.default_rng(0)
  xs = [rng.integers(-99, 99, shape).astype(dtype) for _ in range(parts)]
  want = np.concatenate(xs, axis)
  lowered = lower(kernel, [struct(*shape, dtype=dtype)] * parts, struct(*want.shape, dtype=dtype))
  np.testing.assert_array_equal(lowered.simulate(*xs)[0], want)
  assert count(lowered, r"st\.shared") == 0


@pytest.mark.parametrize(("dtype", "shapes", "axis"), [
  (F32, [(128,), (128,)], 0), (BF16, [(3, 5), (3, 8), (3, 1)], 1), (np.bool_, [(2, 32), (7, 32)], 0)])
def test_values_that_lie_in_different_threads_are_joined_in_shared_memory(dtype, shapes, axis):
  def kernel(*refs):
    *xs, y = refs
    y[...] = tt.concatenate([x[...] for x in xs], axis=axis)

  rng = np.random.default_rng(0)
  xs = [rng.integers(0, 99, shape).astype(dtype) for shape in shapes]
  want = np.concatenate(xs, axis)
  lowered = lower(kernel, [struct(*s, dtype=dtype) for s in shapes], struct(*want.shape, dtype=dtype))
  np.testing.assert_array_equal(lowered.simulate(*xs)[0], want)
  assert "made through shared memory" in str(lowered.report())
  assemble(lowered)


def test_jax_functions_become_tile_operations():
  lowered = ptx(lambda x: tt.call_jax(lambda v: jnp.tanh(v) * jnp.where(v > 0, v, 0.1 * v), x))
  assert count(lowered, "ex2.approx") == 4 and count(lowered, "selp.f32") >= 4
  assemble(lowered)


@pytest.mark.parametrize("f", [lambda i: i.astype(F32), lambda i: tt.exp2(i.astype(F32)) > 2, lambda i: i.astype(BOOL),
                               lambda i: i.astype(U32) * 3, lambda i: (i > 1).astype(F32)])
@pytest.mark.parametrize("n", [2, 4])
def test_a_thread_that_has_several_numbers_converts_each(f, n):
  """One thread has all elements of a short iota, which are literals there."""
  def kernel(y):
    y[...] = f(tt.arange(n)).astype(y.dtype)

  call = tt.tile_call(kernel, struct(n, dtype=F32), grid=1)
  (got,) = simulated.run(call.lower(), Case(call, (), (), "exact"))
  np.testing.assert_array_equal(got, np.asarray(call()))
