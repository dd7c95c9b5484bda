"""call_jax: what goes through it, what it records, and what it refuses."""
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
  assert "outside of the kernel" in error.hint and "tt.argmax" in error.hint


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


@pytest.mark.parametrize(("fn", "message", "hint"), [
  (lambda x: jnp.take_along_axis(x, x.astype(int), 1), "'gather' has no tile operation", "x, i, axis"),
  (lambda x: x.at[2].set(0.), "'scatter' has no tile operation", "index the reference"),
  (lambda x: jax.lax.dynamic_slice_in_dim(x, jnp.argmax(x), 2), "'dynamic_slice' takes 2 of 6 elements", "tt.ds"),
  (lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, length=99)[0], "'scan' has 99 iterations", "tt.fori_loop"),
  (lambda x: jax.lax.igamma(x, x), "'igamma' has no tile operation", "outside of the kernel"),
  (lambda x: jax.lax.reduce_precision(x, 5, 9), "'reduce_precision' to 5 bits of exponent", "astype"),
  (lambda x: jax.random.normal(jax.random.key(0), x.shape) + x, "'random_seed' has no tile", "tt.random_bits"),
  (lambda x: (jax.debug.print("{}", x), x)[1], "'debug_print' has no tile operation", "tt.debug_print"),
  (lambda x: x if x.sum() > 0 else -x, "asks for a value that is not known while tracing", "jnp.where"),
  (lambda x: x[x > 0], "asks for a value that is not known while tracing", "jnp.where"),
  (lambda x: jnp.nonzero(x)[0], "asks for a value that is not known while tracing", "size="),
  (lambda x: x * float(x[0, 0]), "asks for a value that is not known while tracing", "jnp.where"),
  (lambda x: x + np.arange(8.), "the function closes over an array of shape [1, 8]", "load it"),
])
def test_what_tiles_cannot_do_is_refused_with_the_way_round(fn, message, hint):
  error = refused(fn)
  assert message in error.message
  assert hint in error.hint
