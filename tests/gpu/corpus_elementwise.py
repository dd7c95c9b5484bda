"""Cases: elementwise operations, casts and shapes of values."""
from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import tiletrace as tt
from tests.gpu.corpus import Case, case, f64, normal, out

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "i32": np.int32, "bool": np.bool_}
_erf = np.vectorize(math.erf)

UNARY = {  # name -> (on tiles, on float64), of positive and negative floats
  "exp": (tt.exp, np.exp), "exp2": (tt.exp2, np.exp2), "tanh": (tt.tanh, np.tanh), "erf": (tt.erf, _erf),
  "sigmoid": (tt.sigmoid, lambda x: 1 / (1 + np.exp(-x))), "silu": (tt.silu, lambda x: x / (1 + np.exp(-x))),
  "neg": (lambda x: -x, np.negative), "abs": (tt.abs, np.abs), "sign": (tt.sign, np.sign),
  "floor": (tt.floor, np.floor), "ceil": (tt.ceil, np.ceil), "square": (tt.square, np.square),
  "cube": (lambda x: x ** 3, lambda x: x ** 3),
  "clip": (lambda x: tt.clip(x, -0.5, 0.75), lambda x: np.clip(x, -.5, .75)),
}
POSITIVE = {
  "log": (tt.log, np.log), "log2": (tt.log2, np.log2), "sqrt": (tt.sqrt, np.sqrt),
  "rsqrt": (tt.rsqrt, lambda x: 1 / np.sqrt(x)), "reciprocal": (lambda x: 1 / x, lambda x: 1 / x),
  "root": (lambda x: x ** 0.5, np.sqrt),
}
BINARY = {
  "add": (tt.add, np.add), "subtract": (tt.subtract, np.subtract), "multiply": (tt.multiply, np.multiply),
  "minimum": (tt.minimum, np.minimum), "maximum": (tt.maximum, np.maximum),
}
COMPARISONS = {
  "equal": (tt.equal, np.equal), "not_equal": (tt.not_equal, np.not_equal), "less": (tt.less, np.less),
  "less_equal": (tt.less_equal, np.less_equal), "greater": (tt.greater, np.greater),
  "greater_equal": (tt.greater_equal, np.greater_equal),
}


def each_kernel(*refs, functions, block):
  """o[k] = functions[k](*inputs), all of them of one shape."""
  *xs, o = refs
  r = tt.block(tt.program_id(0), block)
  values = [x[r] for x in xs]
  for k, f in enumerate(functions):
    o[k, r] = f(*values).astype(o.dtype)


def each(functions, xs, dtype, kind, block=128) -> Case:
  """`functions`: (on tiles, on float64 or exact) pairs."""
  n = len(xs[0])
  call = tt.tile_call(functools.partial(each_kernel, functions=tuple(f for f, _ in functions), block=block),
                      out(((len(functions), n), dtype)), grid=tt.cdiv(n, block))
  exact = np.dtype(dtype).kind not in "fV"
  inputs = xs if exact else [f64(x) for x in xs]
  with np.errstate(all="ignore"):
    want = np.stack([g(*inputs) for _, g in functions])
  return Case(call, tuple(xs), (want.astype(dtype) if exact else want,), kind)


@case(dtype=("f32", "bf16", "f16"))
def unary(rng, dtype):
  return each(list(UNARY.values()), [normal(rng, 200, dtype=DTYPES[dtype])], DTYPES[dtype], "elementwise")


@case(dtype=("f32", "bf16", "f16"))
def positive(rng, dtype):
  x = np.exp(normal(rng, 77)).astype(DTYPES[dtype])
  return each(list(POSITIVE.values()), [x], DTYPES[dtype], "elementwise")


@case(dtype=("f32", "bf16", "f16", "i32"))
def binary(rng, dtype):
  x, y = ((normal(rng, 301) * 50).astype(DTYPES[dtype]) for _ in range(2))
  kind = "exact" if dtype == "i32" else "elementwise"
  return each(list(BINARY.values()), [x, y], DTYPES[dtype], kind)


@case(dtype=("f32", "bf16", "f16", "i32"))
def comparisons(rng, dtype):
  x, y = (np.round(normal(rng, 99) * 2).astype(DTYPES[dtype]) for _ in range(2))
  if dtype != "i32":
    x[3], y[5], x[7], y[7] = (np.nan,) * 4
  return each(list(COMPARISONS.values()), [x, y], np.bool_, "exact")


@case(dtype=("f32", "bf16", "f16"))
def nan_goes_through_minimum_and_maximum(rng, dtype):
  x, y = (normal(rng, 64).astype(DTYPES[dtype]) for _ in range(2))
  x[3], y[5], x[7], y[7], x[9], y[9] = np.nan, np.nan, np.nan, np.nan, np.inf, -np.inf
  return each([BINARY["minimum"], BINARY["maximum"], (lambda x, y: tt.where(tt.isnan(x), y, x),
                                                      lambda x, y: np.where(np.isnan(x), y, x))],
              [x, y], DTYPES[dtype], "elementwise")


@case
def integers(rng):
  x = rng.integers(-1000, 1000, 333, dtype=np.int32)
  y = rng.integers(1, 40, 333, dtype=np.int32) * rng.choice([-1, 1], 333).astype(np.int32)
  functions = [
    (lambda x, y: x // y, np.floor_divide), (lambda x, y: x % y, np.mod), (lambda x, y: x & y, np.bitwise_and),
    (lambda x, y: x | y, np.bitwise_or), (lambda x, y: x ^ y, np.bitwise_xor), (lambda x, y: ~x, lambda x, y: ~x),
    (lambda x, y: x << (y & 7), lambda x, y: x << (y & 7)), (lambda x, y: x >> (y & 7), lambda x, y: x >> (y & 7)),
    (lambda x, y: x // 8, lambda x, y: x // 8), (lambda x, y: x % 8, lambda x, y: x % 8),
    (lambda x, y: x // 7, lambda x, y: x // 7), (lambda x, y: x % -7, lambda x, y: x % -7),
    (lambda x, y: 1000 // y, lambda x, y: 1000 // y), (lambda x, y: 2 ** 31 - 1 - x, lambda x, y: 2 ** 31 - 1 - x),
    (lambda x, y: tt.abs(x) + tt.sign(y), lambda x, y: np.abs(x) + np.sign(y)), (lambda x, y: -x, lambda x, y: -x),
    (lambda x, y: tt.where(x > y, x, y) * 3, lambda x, y: np.maximum(x, y) * 3),
    (lambda x, y: x ** 3, lambda x, y: x ** 3),
    (lambda x, y: tt.cdiv(x, 16), lambda x, y: -(-x // 16)),
  ]
  return each(functions, [x, y], np.int32, "exact")


@case(dtype=("f32", "bf16"))
def floats_divided_downwards(rng, dtype):
  """Multiples of the divisor, and what lies beside them; constants, of which XLA takes the reciprocal."""
  x = rng.integers(-120, 120, 300).astype(DTYPES[dtype])
  y = (rng.integers(1, 40, 300) * rng.choice([-0.5, 0.5], 300)).astype(DTYPES[dtype])
  y[:3] = np.inf, -np.inf, np.inf
  functions = [
    (lambda x, y: x // y, np.floor_divide), (lambda x, y: x % y, np.mod), (lambda x, y: x // 7, lambda x, y: x // 7),
    (lambda x, y: x % 7, lambda x, y: x % 7), (lambda x, y: x % -3.5, lambda x, y: x % -3.5),
    (lambda x, y: x // -3.5, lambda x, y: x // -3.5), (lambda x, y: 91 // y, lambda x, y: 91 // y),
  ]
  return each(functions, [x, y], DTYPES[dtype], "elementwise")


@case
def unsigned(rng):
  x, y = rng.integers(0, 2**32, 130, dtype=np.uint32), rng.integers(1, 2**31, 130, dtype=np.uint32)
  functions = [
    (lambda x, y: x // y, np.floor_divide), (lambda x, y: x % y, np.mod), (lambda x, y: x >> 3, lambda x, y: x >> 3),
    (lambda x, y: x + y, np.add), (lambda x, y: x * y, np.multiply), (tt.minimum, np.minimum), (tt.maximum, np.maximum),
    (lambda x, y: tt.where(x > y, x, y), np.maximum), (lambda x, y: x // 16, lambda x, y: x // 16),
  ]
  return each(functions, [x, y], np.uint32, "exact")


@case
def booleans(rng):
  x, y = (normal(rng, 100) > 0 for _ in range(2))
  functions = [
    (lambda x, y: x & y, np.logical_and), (lambda x, y: x | y, np.logical_or), (lambda x, y: x ^ y, np.logical_xor),
    (lambda x, y: ~x, lambda x, y: ~x), (tt.logical_and, np.logical_and), (tt.logical_or, np.logical_or),
    (tt.minimum, np.logical_and), (tt.maximum, np.logical_or), (tt.equal, np.equal), (tt.not_equal, np.not_equal),
    (lambda x, y: tt.where(x, y, x), lambda x, y: np.where(x, y, x)), (lambda x, y: tt.logical_not(y), lambda x, y: ~y),
  ]
  return each(functions, [x, y], np.bool_, "exact")


@case
def booleans_from_bytes_count(rng):
  x, y = (normal(rng, 100) > 0 for _ in range(2))
  return each([(lambda x, y: x.astype(np.int32) + y, lambda x, y: x.astype(np.int32) + y),
               (lambda x, y: tt.where(x, 3, y), lambda x, y: np.where(x, 3, y.astype(np.int32)))], [x, y], np.int32,
              "exact")


@case(dtype=("f32", "bf16", "f16", "i32", "bool"))
def casts(rng, dtype):
  """To each dtype and back to f32, which holds every value exactly."""
  x = (normal(rng, 145) * 20).astype(DTYPES[dtype])
  if dtype == "i32":
    x[:4] = 2**31 - 1, -2**31, 16777217, -16777217
  to = [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.bool_]

  def reference(d):
    def cast(v):
      v = v.astype(np.float32) if v.dtype == ml_dtypes.bfloat16 else v
      with np.errstate(over="ignore"):
        # int -> 16 bit goes through f32 on every backend; the double rounding is within the tolerance of the dtype
        v = v.astype(np.float32) if np.dtype(d).itemsize == 2 else v
        return v.astype(d).astype(np.float32)
    return cast

  functions = [(lambda v, d=d: v.astype(d), reference(d)) for d in to]
  made = each(functions, [x], np.float32, "exact")
  return Case(made.call, made.inputs, (np.stack([g(x) for _, g in functions]),), "exact")


@case
def exponentials_far_out(rng):
  x = np.concatenate([rng.uniform(-86, 88.7, 120), [88.72, 88.73, 89, 95, 104, 128, np.inf, -np.inf, 0, -120, -300]])
  x = x.astype(np.float32)
  functions = [(tt.exp, np.exp), (tt.sigmoid, lambda v: 1 / (1 + np.exp(-v))), (tt.tanh, np.tanh)]
  made = each(functions, [x], np.float32, "relative")
  with np.errstate(over="ignore", under="ignore"):
    return Case(made.call, made.inputs, (made.want[0].astype(np.float32),), "relative")


@case
def logarithms_near_one(rng):
  x = (1 + rng.uniform(-0.4, 0.5, 200) * 10.0 ** rng.integers(-6, 0, 200)).astype(np.float32)
  x[:3] = 1, 0.5, 2
  return each([POSITIVE["log"], POSITIVE["log2"]], [x], np.float32, "relative")


def axpy_kernel(alpha, x, n, y, last):
  r = tt.block(tt.program_id(0), 64)
  a = alpha[...]
  y[r] = x[r] * a + tt.exp(a) * n[...].astype(jnp.float32)
  last[...] = a * 2 + x[n[...]]


@case
def scalars(rng):
  alpha, x, n = np.float32(rng.standard_normal()), normal(rng, 200), np.int32(17)
  call = tt.tile_call(axpy_kernel, out(((200,), np.float32), ((), np.float32)), grid=4)
  a = f64(alpha)
  return Case(call, (alpha, x, n), (f64(x) * a + np.exp(a) * 17, a * 2 + f64(x)[17]), "elementwise")


def broadcast_kernel(x, row, col, y, z):
  r, c = tt.block(tt.program_id(0), 16), tt.block(tt.program_id(1), 32)
  y[r, c] = (x[r, c] - row[r][:, None]) * col[None, c] + col[c][None, :]
  z[r, c] = tt.broadcast_to(row[r, None], (16, 32))


@case
def broadcasts(rng):
  x, row, col = normal(rng, 33, 70), normal(rng, 33), normal(rng, 70)
  call = tt.tile_call(broadcast_kernel, out(((33, 70), np.float32), ((33, 70), np.float32)), grid=(3, 3))
  want = (f64(x) - f64(row)[:, None]) * f64(col) + f64(col)
  return Case(call, (x, row, col), (want, np.broadcast_to(f64(row)[:, None], (33, 70))), "elementwise")


def iota_kernel(y, z):
  i = tt.program_id(0)
  rows, cols = i * 16 + tt.arange(16), tt.arange(2, 50, 3)
  y[tt.block(i, 16), :] = rows[:, None] * 1000 + cols[None, :]
  z[tt.block(i, 16), :] = rows[:, None] >= cols[None, :]


@case
def index_arithmetic(rng):
  call = tt.tile_call(iota_kernel, out(((40, 16), np.int32), ((40, 16), np.bool_)), grid=3)
  rows, cols = np.arange(40, dtype=np.int32)[:, None], np.arange(2, 50, 3, dtype=np.int32)[None, :]
  return Case(call, (), (rows * 1000 + cols, rows >= cols), "exact")


def transpose_kernel(x, y):
  i, j = tt.program_id(0), tt.program_id(1)
  y[tt.block(j, 32), tt.block(i, 16)] = tt.transpose(x[tt.block(i, 16), tt.block(j, 32)])


@case(dtype=("f32", "bf16", "bool"))
def transposes_of_values(rng, dtype):
  x = normal(rng, 50, 70) > 0 if dtype == "bool" else normal(rng, 50, 70, dtype=DTYPES[dtype])
  call = tt.tile_call(transpose_kernel, out(((70, 50), DTYPES[dtype])), grid=(4, 3))
  return Case(call, (x,), (x.T,), "exact")


@case(warpgroups=(2, 3, 7))
def many_warpgroups(rng, warpgroups):
  x, row, col = normal(rng, 33, 70), normal(rng, 33), normal(rng, 70)
  call = tt.tile_call(broadcast_kernel, out(((33, 70), np.float32), ((33, 70), np.float32)), grid=(3, 3),
                      warpgroups=warpgroups)
  want = (f64(x) - f64(row)[:, None]) * f64(col) + f64(col)
  return Case(call, (x, row, col), (want, np.broadcast_to(f64(row)[:, None], (33, 70))), "elementwise")


def pieces_kernel(x, y, z):
  v = x[...]
  y[...] = v[4:12, :] * 2
  z[...] = tt.reshape(v[3:4, :], (1, 64, 1))


@case
def slices_and_reshapes_of_values(rng):
  x = normal(rng, 16, 64)
  call = tt.tile_call(pieces_kernel, out(((8, 64), np.float32), ((1, 64, 1), np.float32)), grid=1)
  return Case(call, (x,), (f64(x)[4:12] * 2, f64(x)[3].reshape(1, 64, 1)), "elementwise")


def shared_reshape_kernel(x, y):
  s = tt.alloc_shared((64,), x.dtype)
  s[...] = x[...]
  y[...] = s[...][None, :] + s[...][:, None]


@case
def one_vector_on_both_axes(rng):
  x = normal(rng, 64)
  call = tt.tile_call(shared_reshape_kernel, out(((64, 64), np.float32)), grid=1)
  return Case(call, (x,), (f64(x)[None, :] + f64(x)[:, None],), "elementwise")


def gelu_kernel(x, b, y):
  r, c = tt.block(tt.program_id(0), 8), tt.block(tt.program_id(1), 128)
  v = x[r, c].astype(jnp.float32) + b[None, c].astype(jnp.float32)
  y[r, c] = tt.call_jax(lambda v: 0.5 * v * (1 + jnp.tanh(0.7978845608 * (v + 0.044715 * v ** 3))), v).astype(y.dtype)


@case
def jax_functions(rng):
  x, b = normal(rng, 20, 300, dtype=ml_dtypes.bfloat16), normal(rng, 300, dtype=ml_dtypes.bfloat16)
  call = tt.tile_call(gelu_kernel, out(((20, 300), ml_dtypes.bfloat16)), grid=(3, 3))
  v = f64(x) + f64(b)
  return Case(call, (x, b), (0.5 * v * (1 + np.tanh(0.7978845608 * (v + 0.044715 * v ** 3))),), "elementwise")


def any_slices_kernel(x, w, y, z):
  v = tt.exp(x[...])
  y[...] = v[3:20, 5:38] * w[1:18][:, None] + v[10:27, 0:33]
  z[...] = v[1::3, ::2]


@case(warpgroups=(1, 3))
def any_slices_of_values(rng, warpgroups):
  x, w = normal(rng, 33, 64), normal(rng, 20)
  call = tt.tile_call(any_slices_kernel, out(((17, 33), np.float32), ((11, 32), np.float32)), grid=1,
                      warpgroups=warpgroups)
  v = np.exp(f64(x))
  return Case(call, (x, w), (v[3:20, 5:38] * f64(w)[1:18, None] + v[10:27, :33], v[1::3, ::2]), "elementwise")


def any_reshapes_kernel(x, row, y, z):
  v = x[...] * row[...][:, None]
  y[...] = tt.reshape(v, (64, 8, 8)) + 1
  z[...] = tt.reshape(tt.transpose(v), (4096,)) * 2


@case
def any_reshapes_of_values(rng):
  x, row = normal(rng, 64, 64), normal(rng, 64)
  call = tt.tile_call(any_reshapes_kernel, out(((64, 8, 8), np.float32), ((4096,), np.float32)), grid=1)
  v = f64(x) * f64(row)[:, None]
  return Case(call, (x, row), (v.reshape(64, 8, 8) + 1, v.T.reshape(4096) * 2), "elementwise")
