"""Elementwise operations, shapes and reductions of the xla backend against numpy."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.xla.kernels import call, traced
from tests.tolerances import assert_close
from tiletrace.lowering.xla.run import run

rng = np.random.default_rng(23)
BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS, INTEGERS = ["float32", "float16", "bfloat16"], ["int32", "int8", "uint8", "uint32"]
NUMBERS = FLOATS + INTEGERS
erf = np.vectorize(math.erf, otypes=[np.float64])

# name: (operation, numpy reference, dtypes); the result is correctly rounded ...
EXACT: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[str]]] = {
  "neg": (lambda x, z: -x, lambda x, z: -x, NUMBERS), "abs": (lambda x, z: abs(x), lambda x, z: np.abs(x), NUMBERS),
  "sign": (lambda x, z: tt.sign(x), lambda x, z: np.sign(x), NUMBERS),
  "floor": (lambda x, z: tt.floor(x), lambda x, z: np.floor(x), FLOATS),
  "ceil": (lambda x, z: tt.ceil(x), lambda x, z: np.ceil(x), FLOATS),
  "sqrt": (lambda x, z: tt.sqrt(abs(x)), lambda x, z: np.sqrt(np.abs(x)), FLOATS),
  "invert": (lambda x, z: ~x, lambda x, z: ~x, INTEGERS),
  "add": (tt.add, np.add, NUMBERS), "sub": (tt.subtract, np.subtract, NUMBERS),
  "mul": (tt.multiply, np.multiply, NUMBERS), "div": (tt.divide, np.divide, FLOATS),
  "min": (tt.minimum, np.minimum, NUMBERS), "max": (tt.maximum, np.maximum, NUMBERS),
  "floordiv": (lambda x, z: x // tt.where(z == 0, 3, z), lambda x, z: x // (z + (z == 0) * x.dtype.type(3)), INTEGERS),
  "mod": (lambda x, z: x % tt.where(z == 0, 3, z), lambda x, z: x % (z + (z == 0) * x.dtype.type(3)), INTEGERS),
  "and": (tt.bitwise_and, np.bitwise_and, INTEGERS), "or": (tt.bitwise_or, np.bitwise_or, INTEGERS),
  "xor": (tt.bitwise_xor, np.bitwise_xor, INTEGERS),
  "shl": (lambda x, z: x << (z & 7), lambda x, z: x << (z & 7), INTEGERS),
  "shr": (lambda x, z: x >> (z & 7), lambda x, z: x >> (z & 7), INTEGERS),
  "eq": (tt.equal, np.equal, NUMBERS), "ne": (tt.not_equal, np.not_equal, NUMBERS), "lt": (tt.less, np.less, NUMBERS),
  "le": (tt.less_equal, np.less_equal, NUMBERS), "gt": (tt.greater, np.greater, NUMBERS),
  "ge": (tt.greater_equal, np.greater_equal, NUMBERS),
}
# ... or an approximation of the float64 reference.
CLOSE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
  "exp": (tt.exp, np.exp), "exp2": (tt.exp2, np.exp2), "log": (lambda x: tt.log(abs(x)), lambda x: np.log(np.abs(x))),
  "log2": (lambda x: tt.log2(abs(x)), lambda x: np.log2(np.abs(x))), "erf": (tt.erf, erf),
  "rsqrt": (lambda x: tt.rsqrt(abs(x)), lambda x: 1 / np.sqrt(np.abs(x))), "tanh": (tt.tanh, np.tanh),
  "sigmoid": (tt.sigmoid, lambda x: 1 / (1 + np.exp(-x))), "sin": (tt.sin, np.sin), "cos": (tt.cos, np.cos),
  "power": (lambda x: abs(x) ** 1.5, lambda x: np.abs(x) ** 1.5),
}
shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
few = hypothesis.settings(max_examples=4, deadline=None, database=None, derandomize=True)


def random(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
  r = np.random.default_rng(seed)
  if dtype in INTEGERS:
    info = np.iinfo(dtype)
    return np.asarray(r.integers(info.min, info.max, shape, dtype=dtype, endpoint=True))
  return np.asarray(r.standard_normal(shape) * r.choice([0.1, 1, 3], shape)).astype(dtype)


@pytest.mark.parametrize("dtype", NUMBERS)
@few
@hypothesis.given(shape=shapes, seed=st.integers(0, 99))
def test_rounded_operations_agree_with_numpy_bit_for_bit(dtype, shape, seed):
  ops = {name: op for name, op in EXACT.items() if dtype in op[2]}

  def kernel(x, z, *ys):
    for (fn, _, _), y in zip(ops.values(), ys):
      y[...] = fn(x[...], z[...])

  x, z = random(seed, shape, dtype), random(seed + 1, shape, dtype)
  with np.errstate(over="ignore"):
    want = {name: np.asarray(reference(x, z)) for name, (_, reference, _) in ops.items()}
  got = call(kernel, x, z, out=[(shape, w.dtype) for w in want.values()], grid=(1,))
  for y, (name, w) in zip(got, want.items()):
    assert_close(y, w, "exact", name)


@pytest.mark.parametrize("dtype", FLOATS)
@few
@hypothesis.given(shape=shapes, seed=st.integers(0, 99))
def test_approximate_operations_agree_with_numpy(dtype, shape, seed):
  def kernel(x, *ys):
    for (fn, _), y in zip(CLOSE.values(), ys):
      y[...] = fn(x[...])

  x = random(seed, shape, dtype)
  got = call(kernel, x, out=[(shape, x.dtype)] * len(CLOSE), grid=(1,))
  for y, (name, (_, reference)) in zip(got, CLOSE.items()):
    assert_close(y, reference(x.astype(np.float64)), "elementwise", name)


@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_16_bit_values_are_rounded_after_each_operation(dtype):
  def kernel(x, z, w, y):
    y[...] = ((x[...] + z[...]) * w[...] - x[...]) / (w[...] * w[...] + z[...])

  x, z, w = ((rng.standard_normal((64, 64)) * s).astype(dtype) for s in (1, 1e-2, 3))
  y, = call(kernel, x, z, w, out=(x.shape, dtype), grid=(1,))
  assert_close(y, ((x + z) * w - x) / (w * w + z), "exact")     # numpy rounds after each operation


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", "int32", "int8", "uint8", "bool"])
def test_casts_agree_with_numpy(source):
  def kernel(x, *ys):
    for y in ys:
      y[...] = x[...].astype(y.dtype)

  x = rng.integers(0, 100, (7, 9)).astype(source)               # in every type's range
  targets = list(map(np.dtype, ["float32", "float16", "bfloat16", "int32", "int8", "uint8", "bool"]))
  for y, target in zip(call(kernel, x, out=[(x.shape, t) for t in targets], grid=(1,)), targets):
    assert_close(y, x.astype(target), "exact", target.name)


def test_a_cast_rounds_to_nearest_even_and_truncates_to_integers():
  def kernel(x, *ys):
    for y in ys:
      y[...] = x[...].astype(y.dtype)

  x = (rng.standard_normal(4096) * 100).astype(np.float32)
  targets = [BF16, np.dtype(np.float16), np.dtype(np.int32)]
  for y, target in zip(call(kernel, x, out=[(x.shape, t) for t in targets], grid=(1,)), targets):
    assert_close(y, x.astype(target), "exact")


def test_f16_denormals_are_rounded_and_differentiated():
  def kernel(x, y, z):
    y[...] = x[...].astype(y.dtype)
    z[...] = x[...].astype(y.dtype) * 0.75 + 0.0

  x = np.exp2(rng.uniform(-27, -12, 4096)).astype(np.float32) * rng.choice([-1, 1], 4096).astype(np.float32)
  y, z = call(kernel, x, out=[(x.shape, np.float16)] * 2, grid=(1,))
  assert_close(y, x.astype(np.float16), "exact")
  assert_close(z, x.astype(np.float16) * np.float16(0.75), "exact")
  graph = traced(kernel, [x], [jax.ShapeDtypeStruct(x.shape, np.float16)] * 2, (1,))
  grad = jax.grad(lambda x: run(graph, x)[1].astype(np.float32).sum())(x)
  np.testing.assert_array_equal(grad, np.full(4096, 0.75, np.float32))


def test_special_values_follow_ieee_754():
  def kernel(x, y, z):
    y[...] = tt.maximum(x[...], 0.0)
    z[...] = tt.where(tt.isnan(x[...]), -1.0, x[...] * 0.0)

  x = np.asarray([np.nan, np.inf, -np.inf, -0.0, 1e-30, 3e38], np.float32)
  y, z = call(kernel, x, out=[(x.shape, np.float32)] * 2, grid=(1,))
  np.testing.assert_array_equal(y, np.maximum(x, 0))
  with np.errstate(invalid="ignore"):
    np.testing.assert_array_equal(z, np.where(np.isnan(x), -1, x * 0))


def test_select_takes_scalars_and_tiles_on_every_side():
  def kernel(x, s, y, z, w):
    p = x[...] > s[...]
    y[...] = tt.where(p, x[...], s[...])
    z[...] = tt.where(s[...] > 0, x[...], -x[...])
    w[...] = tt.where(p, 1.0, 2.0)

  x, s = rng.standard_normal((5, 4)).astype(np.float32), np.float32(0.25)
  y, z, w = call(kernel, x, s, out=[(x.shape, np.float32)] * 3, grid=(1,))
  np.testing.assert_array_equal(y, np.where(x > s, x, s))
  np.testing.assert_array_equal(z, x)
  np.testing.assert_array_equal(w, np.where(x > s, 1, 2))


def test_shapes_are_those_of_jnp():
  def kernel(x, a, b, c, d, e):
    v = x[...]
    a[...] = v[:, None, 1:] * tt.broadcast_to(v[:, 2:3][:, None, :], (4, 1, 7))
    b[...] = tt.transpose(v.reshape(2, 2, 8)[:, :, :6].reshape(4, 6))
    c[...] = tt.concatenate([v, v[::2]], axis=0)
    d[...] = v[1] + v[2:, 3][0] + tt.arange(8).astype(np.float32)
    e[...] = tt.full((4, 8), v[0, 0]) + tt.ones((4, 8))

  x = rng.standard_normal((4, 8)).astype(np.float32)
  a, b, c, d, e = call(kernel, x, out=[(s, np.float32) for s in ((4, 1, 7), (6, 4), (6, 8), (8,), (4, 8))], grid=(1,))
  np.testing.assert_array_equal(b, x.reshape(2, 2, 8)[:, :, :6].reshape(4, 6).T)
  np.testing.assert_array_equal(c, np.concatenate([x, x[::2]]))
  np.testing.assert_array_equal(d, (x[1] + x[2, 3]) + np.arange(8, dtype=np.float32))
  np.testing.assert_array_equal(e, np.full((4, 8), x[0, 0] + np.float32(1)))
  np.testing.assert_array_equal(a, (x[:, 1:] * x[:, 2:3])[:, None, :])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("axis", [None, 0, 1, (0, 2)])
def test_reductions_agree_with_numpy(dtype, axis):
  def kernel(x, a, b, c, d):
    v = x[...]
    a[...], b[...], c[...] = tt.sum(v, axis), tt.max(v, axis), tt.min(v, axis)
    d[...] = tt.any(v > 1, axis) & tt.all(v < 9, axis)

  x = (rng.standard_normal((5, 7, 33)) * 3).astype(dtype)
  wide = x.astype(np.float64 if dtype != "int32" else np.int32)
  out = [(wide.sum(axis).shape, x.dtype)] * 3 + [(wide.sum(axis).shape, np.dtype(bool))]
  a, b, c, d = call(kernel, x, out=out, grid=(1,))
  if dtype == "int32":
    np.testing.assert_array_equal(a, wide.sum(axis))
  else:
    assert_close(a, wide.sum(axis), "reduce")
  np.testing.assert_array_equal(b.astype(wide.dtype), wide.max(axis))
  np.testing.assert_array_equal(c.astype(wide.dtype), wide.min(axis))
  np.testing.assert_array_equal(d, (wide > 1).any(axis) & (wide < 9).all(axis))


def softmax_kernel(x, y, *, rows, bn):
  """Online softmax, two passes over rows of any width."""
  n, r = x.shape[1], tt.block(tt.program_id(0), rows)
  m, l = tt.alloc_fragment((rows,), np.float32), tt.alloc_fragment((rows,), np.float32)
  m[...], l[...] = -np.inf, 0
  for k in tt.range(tt.cdiv(n, bn)):
    s = tt.load(x.at[r, tt.block(k, bn)], fill_value=-np.inf).astype(np.float32)
    m_new = tt.maximum(m[...], tt.max(s, axis=1))
    l[...] = l[...] * tt.exp(m[...] - m_new) + tt.sum(tt.exp(s - m_new[:, None]), axis=1)
    m[...] = m_new
  for k in tt.range(tt.cdiv(n, bn)):
    s = x[r, tt.block(k, bn)].astype(np.float32)
    y[r, tt.block(k, bn)] = (tt.exp(s - m[:, None]) / l[:, None]).astype(y.dtype)


@pytest.mark.parametrize(("shape", "rows"), [((10, 100), 4), ((3, 1), 8), ((7, 64), 1)])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_online_softmax_agrees_with_jax(shape, rows, dtype):
  x = (rng.standard_normal(shape) * 4).astype(dtype)
  y, = call(softmax_kernel, x, out=(shape, dtype), grid=(tt.cdiv(shape[0], rows),), rows=rows, bn=32)
  assert_close(y, jax.nn.softmax(jnp.asarray(x, np.float32), axis=1), "reduce")


def test_rms_norm_with_an_aliased_residual():
  def kernel(h, delta, w, h_out, y, *, rows):
    r = tt.block(tt.program_id(0), rows)
    v = h[r, :].astype(np.float32) + delta[r, :].astype(np.float32)
    h_out[r, :] = v.astype(h_out.dtype)
    scale = tt.rsqrt(tt.mean(v * v, axis=1, keepdims=True) + 1e-5)
    y[r, :] = (v * scale * w[None, :].astype(np.float32)).astype(y.dtype)

  h, delta, w = (rng.standard_normal(s).astype(BF16) for s in ((10, 48), (10, 48), (48,)))
  new, y = call(functools.partial(kernel, rows=4), h, delta, w, out=[(h.shape, BF16)] * 2, grid=(3,), aliases={0: 0})
  v = h.astype(np.float64) + delta.astype(np.float64)
  assert_close(new, (h.astype(np.float32) + delta.astype(np.float32)).astype(BF16), "exact")
  assert_close(y, v / np.sqrt((v * v).mean(1, keepdims=True) + 1e-5) * w.astype(np.float64), "reduce")


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_sums_beside_a_reduction_of_8_bits_wrap(dtype):
  """XLA's CPU backend saturates them where the reduction is one of 8 bits."""
  def kernel(x, y):
    v = x[...].astype(y.dtype)
    y[...] = v - tt.max(v, axis=1)[:, None]

  x = rng.integers(-300, 300, (64, 112)).astype(np.int32)
  got = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, dtype), grid=1, backend="xla")(x)
  narrow = x.astype(dtype)
  np.testing.assert_array_equal(got, narrow - narrow.max(1)[:, None])
