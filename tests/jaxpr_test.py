"""call_jax: jax.numpy functions as tile operations, run by the xla backend and compared with themselves."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.xla.kernels import call, traced
from tests.tolerances import assert_close
from tiletrace.core.errors import TileTypeError
from tiletrace.core.graph import walk
from tiletrace.jaxpr import call_jax

rng = np.random.default_rng(5)
X = (rng.standard_normal((6, 8)) * 3).astype(np.float32)


def apply_kernel(x, y, *, fn, dtype=None):
  y[...] = call_jax(fn, x[...]).astype(y.dtype)


@jax.custom_jvp
def cube(x):
  return x * x * x


cube.defjvp(lambda primals, tangents: (cube(*primals), tangents[0]))

FLOAT_FUNCTIONS = {
  "gelu": jax.nn.gelu, "gelu_exact": functools.partial(jax.nn.gelu, approximate=False), "relu": jax.nn.relu,
  "silu": jax.nn.silu, "softplus": jax.nn.softplus, "leaky_relu": jax.nn.leaky_relu, "mish": jax.nn.mish,
  "elu": jax.nn.elu, "selu": jax.nn.selu, "sigmoid": jax.nn.sigmoid, "relu6": jax.nn.relu6, "softmax": jax.nn.softmax,
  "log_softmax": jax.nn.log_softmax, "log_sigmoid": jax.nn.log_sigmoid, "soft_sign": jax.nn.soft_sign,
  "standardize": jax.nn.standardize, "custom_jvp": cube, "jit": jax.jit(lambda x: jnp.sin(x) + jax.jit(jnp.cos)(x)),
  "checkpoint": jax.checkpoint(lambda x: jnp.tanh(x) * x), "clip": lambda x: jnp.clip(x, -1, 1),
  "powers": lambda x: x**2 + x**3 - x**-2 + jnp.abs(x)**0.5, "log1p": lambda x: jnp.log1p(jnp.abs(x) * 1e-4),
  "expm1": lambda x: jnp.expm1(x * 1e-4) + jnp.expm1(x), "floor": lambda x: jnp.floor(x) + jnp.ceil(x * 2),
  "round": jnp.round, "where": lambda x: jnp.where(x > 0, x, -2 * x), "isfinite": lambda x: jnp.isfinite(1 / x) * x,
  "stop_gradient": jax.lax.stop_gradient, "square": jnp.square, "rsqrt": lambda x: jax.lax.rsqrt(x * x + 1),
  "cumsum": lambda x: jnp.cumsum(x, 1) + jax.lax.cumsum(x, 0, reverse=True),
  "cummax": lambda x: jax.lax.cummax(x, 1) + jax.lax.cummin(x, 0, reverse=True) + jnp.cumprod(x, 1),
  "log2": lambda x: jnp.log2(jnp.abs(x) + 1), "argmax": lambda x: x + jnp.argmax(x, 1)[:, None] - jnp.argmin(x, 0),
  "exp2": jnp.exp2, "tan": lambda x: jnp.tan(x / 4), "erf": lambda x: jax.scipy.special.erf(x),
  "sign": lambda x: jnp.sign(x) * x, "maximum": lambda x: jnp.maximum(x, 1) + jnp.minimum(x, x[:, :1]),
  "reshape": lambda x: (x.reshape(4, 12).T * 2).T.reshape(6, 8), "slice": lambda x: jnp.concatenate([x[:2], x[2:]]),
  "reductions": lambda x: x - x.max(1, keepdims=True) + x.min() + x.sum(0) + x.mean(),
  "iota": lambda x: x + jnp.arange(8) + jax.lax.broadcasted_iota(jnp.int32, (6, 8), 0),
  "squeeze": lambda x: x + x[:1].squeeze(0), "any": lambda x: jnp.where(jnp.any(x > 8) | jnp.all(x < 9), x, 0 * x),
  "select": lambda x: jax.lax.select_n((x.astype(jnp.int32) % 3 + 3) % 3, x, 2 * x, 3 * x),
}


@pytest.mark.parametrize("name", FLOAT_FUNCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_function_of_tiles_gives_what_it_gives_of_arrays(name, dtype):
  fn, x = FLOAT_FUNCTIONS[name], X.astype(dtype)
  want = jax.jit(fn)(x)
  y, = call(apply_kernel, x, out=(want.shape, want.dtype), grid=(1,), fn=fn)
  if dtype is np.float32:
    assert_close(y, want, "reduce")
  else:                                                         # XLA may keep f32 between 16-bit operations
    np.testing.assert_allclose(y.astype(np.float64), np.asarray(want, np.float64), rtol=2**-5, atol=2**-6 * 3)


INTEGER_FUNCTIONS = {
  "floor_divide": lambda x: x // 3 + x // -2, "mod": lambda x: x % 3 - x % -5, "rem": lambda x: jax.lax.rem(x, 4),
  "div": lambda x: jax.lax.div(x, 3), "bits": lambda x: (x & 6) | (x ^ 3) + ~x, "shift": lambda x: (x << 2) + (x >> 1),
  "compare": lambda x: (x > 1).astype(jnp.int32) - (x != 2), "power": lambda x: x**3, "clip": lambda x: x.clip(0, 4),
}


@pytest.mark.parametrize("name", INTEGER_FUNCTIONS)
def test_integers_divide_and_shift_as_in_jnp(name):
  fn, x = INTEGER_FUNCTIONS[name], rng.integers(-20, 20, (5, 8), dtype=np.int32)
  y, = call(apply_kernel, x, out=(x.shape, np.int32), grid=(1,), fn=fn)
  np.testing.assert_array_equal(y, fn(x))


@pytest.mark.parametrize(("fn", "low", "high"), [
  (jnp.log1p, 1e-8, 1e6), (lambda x: jnp.log1p(-x), 1e-8, 0.999),
  (jnp.expm1, 1e-8, 80), (lambda x: jnp.expm1(-x), 1e-8, 80),
  (jax.scipy.special.erfc, 1e-3, 9), (lambda x: jax.scipy.special.erfc(-x), 1e-3, 9)])
def test_formulas_keep_the_relative_accuracy_of_f32(fn, low, high):
  x = np.exp(rng.uniform(np.log(low), np.log(high), (64, 64))).astype(np.float32)
  y, = call(apply_kernel, x, out=(x.shape, np.float32), grid=(1,), fn=fn)
  with jax.enable_x64(True):
    want = np.asarray(fn(x.astype(np.float64)))
  np.testing.assert_allclose(y, want, rtol=4e-6)


def test_trees_numbers_and_static_arguments_pass_through():
  def fn(tree, factor, *, mode):
    assert mode == "wide"
    return {"sum": tree["a"] * factor + tree["b"][0], "product": (tree["a"] * tree["b"][0] + 1,)}

  def kernel(a, b, y, z):
    out = call_jax(fn, {"a": a[...], "b": [b[...], None]}, 2.5, mode="wide")
    y[...], z[...] = out["sum"], out["product"][0]

  a, b = X.astype(jnp.bfloat16), X[::-1].astype(jnp.bfloat16)
  y, z = call(kernel, a, b, out=[(X.shape, a.dtype)] * 2, grid=(1,))   # bf16: a Python number is weak
  want = fn({"a": a, "b": [b, None]}, 2.5, mode="wide")
  np.testing.assert_allclose(y.astype(np.float32), want["sum"].astype(np.float32), rtol=2**-6, atol=2**-6)
  np.testing.assert_allclose(z.astype(np.float32), want["product"][0].astype(np.float32), rtol=2**-6, atol=2**-6)


def test_it_records_tile_operations_and_no_dead_ones():
  graph = traced(apply_kernel, [X], [X], (1,), fn=lambda x: (jnp.sort(x), jnp.exp(x) * 2)[1])
  assert [str(e.primitive) for e in walk(graph.body)] == ["load", "exp", "mul", "store"]


def test_nothing_becomes_64_bits_wide_under_x64():
  with jax.enable_x64(True):
    graph = traced(apply_kernel, [X], [X], (1,), fn=lambda x: x + jnp.sum(x > 0) + jnp.arange(8))
  assert {v.type.dtype.itemsize for e in walk(graph.body) for v in e.outvars} <= {1, 4}


def test_a_result_may_be_a_constant():
  def kernel(x, y):
    y[...] = call_jax(lambda x: (x, 2.5), x[...])[1]

  y, = call(kernel, X, out=(X.shape, np.float32), grid=(1,))
  np.testing.assert_array_equal(y, np.full(X.shape, 2.5))


# --- refusals

def refused(fn, *args):
  def kernel(x, y):
    y[...] = call_jax(fn, x[...], *args)

  with pytest.raises(TileTypeError) as e:
    traced(kernel, [X], [X], (1,))
  assert "y[...] = call_jax(fn, x[...], *args)" in str(e.value)
  return e.value


def test_an_unsupported_primitive_is_named_with_the_function_and_the_line():
  error = refused(functools.partial(jnp.sort, descending=True))
  assert error.message == "call_jax(sort): the jax primitive 'sort' has no tile operation"
  assert "tt functions" in error.hint


def test_a_matrix_product_points_to_gemm():
  error = refused(lambda x: x @ x.T)
  assert "call_jax(<lambda>): the jax primitive 'dot_general'" in error.message
  assert "tt.gemm" in error.hint


def test_a_closure_over_an_array_is_refused():
  w = jnp.asarray(X)
  assert "the function closes over an array of shape [6, 8]" in refused(lambda x: x * w).message


def test_a_closure_over_a_tracer_is_refused():
  def outer(s):
    refused(lambda x: x * s)
    return s

  jax.jit(outer)(1.5)


def test_an_array_argument_is_refused():
  assert "is a JAX array (float32[6,8]) from outside the kernel" in refused(lambda x, w: x * w, jnp.asarray(X)).message


def test_a_reference_argument_asks_for_a_load():
  def kernel(x, y):
    y[...] = call_jax(jnp.exp, x)

  with pytest.raises(TileTypeError, match=r"call_jax\(exp\): x is a reference, not a value") as e:
    traced(kernel, [X], [X], (1,))
  assert "did you mean x[...]?" in str(e.value)


def test_it_works_in_a_loop_whose_body_is_recorded_twice():
  def kernel(x, y):
    acc = tt.alloc_fragment((6, 8), np.float32)
    acc[...] = 0
    for k in tt.range(3):
      acc[...] += call_jax(lambda v, k: jax.nn.relu(v) * k, x[...], k)
    y[...] = acc[...]

  y, = call(kernel, X, out=(X.shape, np.float32), grid=(1,))
  assert_close(y, np.maximum(X, 0) * 3, "elementwise")


@pytest.mark.parametrize("fn", [
  lambda x: jnp.stack(x, 1), jnp.column_stack, lambda x: jax.lax.reshape(x, (4, 6), (1, 0)),
  lambda x: jax.lax.reshape(x[:, :4], (4, 4), (1, 0))])
def test_a_reshape_may_take_its_dimensions_in_another_order(fn):
  x = np.arange(24, dtype=np.float32).reshape(4, 6)
  want = np.asarray(fn(x))

  def kernel(x, y):
    y[...] = tt.call_jax(fn, x[...])

  np.testing.assert_array_equal(tt.tile_call(kernel, jax.ShapeDtypeStruct(want.shape, x.dtype), grid=1)(x), want)


def test_a_reduction_of_bits_is_of_bool_only():
  def kernel(x, y):
    y[...] = tt.call_jax(lambda v: jax.lax.reduce_or(v, (0,)), x[...])

  with pytest.raises(TileTypeError, match="'reduce_or' combines the bits of i32"):
    tt.tile_call(kernel, jax.ShapeDtypeStruct((4,), np.int32), grid=1)(np.ones((3, 4), np.int32))
