"""softmax against float64, jax.nn.softmax with masks, and derivatives."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.kernels.arrays import bernoulli, compiled, normal
from tests.tolerances import assert_close
from tiletrace.kernels import softmax, softmax_reference

random = functools.partial(normal, scale=3)


def exact(x, axis=-1):
  x = np.asarray(x).astype(np.float64)
  e = np.exp(x - x.max(axis, keepdims=True))
  return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("shape", [(7,), (5, 1), (3, 229), (2, 3, 96), (2, 20001), (1, 65536)])
def test_softmax_of_any_shape_and_dtype(shape, dtype):
  x = random(0, *shape, dtype=dtype)
  kind = "reduce" if dtype == jnp.float16 else "elementwise"      # small results are subnormal there
  assert_close(jax.jit(softmax)(x), exact(x), kind)


@pytest.mark.parametrize("axis", [0, 1, -2, 3, (1, 2), (3, 0), (0, 1, 2, 3)])
def test_softmax_over_any_axes(axis):
  x = random(0, 3, 40, 5, 7)
  assert_close(compiled(softmax, x, axis=axis), exact(x, axis), "elementwise")


@pytest.mark.parametrize("n", [33, 777, 20480])
def test_masked_softmax_is_that_of_jax(n):
  """Also where a row sees nothing, and where it sees nothing in the part that is read first."""
  x = random(0, 4, n)
  mask = np.array(bernoulli(1, 0.3, 4, n))
  mask[1], mask[2, :n - 3] = False, False
  got = compiled(softmax, x, where=mask)
  np.testing.assert_allclose(got, compiled(jax.nn.softmax, x, where=mask), rtol=2e-5, atol=1e-7)
  assert (np.asarray(got)[~mask] == 0).all()


def test_a_mask_broadcasts():
  x, mask = random(0, 2, 3, 50), jnp.arange(50) % 3 == 0
  column = jnp.asarray([[True], [False], [True]])
  for options in ({"where": mask}, {"where": column, "axis": 1}):
    got, want = (compiled(f, x, **options) for f in (softmax, jax.nn.softmax))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


MASKS = [  # the shapes of x and of a mask, axis
    ((3, 4, 5, 33), (5, 33), -1), ((3, 4, 50, 33), (3, 1, 50, 33), -1), ((3, 4, 5, 33), (3, 1, 1, 33), -1),
    ((3, 4, 5, 33), (1, 4, 1, 33), -1), ((3, 4, 5, 33), (3, 1, 5, 1), -1), ((3, 4, 5, 33), (), -1),
    ((2, 3, 2, 5, 40), (2, 1, 2, 1, 40), -1), ((5, 8, 1, 700), (5, 1, 1, 700), -1), ((3, 4, 5, 33), (4, 1, 33), 1),
    ((3, 4, 5, 33), (3, 1, 1, 33), (0, 3)), ((3, 4, 5, 33), (3, 1, 5, 1), (0, 3)), ((2, 2, 3, 20480), (3, 20480), -1),
    ((7, 300), (7, 1), -1)]


@pytest.mark.parametrize(("shape", "mask_shape", "axis"), MASKS, ids=str)
def test_a_mask_that_broadcasts_is_read_as_it_is(shape, mask_shape, axis):
  x = random(0, *shape)
  mask = bernoulli(1, 0.4, *mask_shape)
  f = jax.jit(lambda x, mask: softmax(x, axis, where=mask))
  np.testing.assert_allclose(f(x, mask), compiled(softmax_reference, x, axis=axis, where=mask), rtol=1e-5, atol=1e-7)
  (call,) = kernel_calls(jax.make_jaxpr(f)(x, mask).jaxpr)
  mixed = mask_shape == (3, 1, 5, 1) and axis == (0, 3)    # differs along one of two axes: made as large as both
  assert call.invars[1].aval.size == (33 if mixed else 1) * mask.size


@pytest.mark.parametrize("mask_shape", [(5, 33), (3, 1, 1, 33)], ids=str)
def test_derivatives_with_a_mask_that_broadcasts(mask_shape):
  x, w = random(0, 3, 4, 5, 33), random(2, 3, 4, 5, 33)
  mask = bernoulli(1, 0.4, *mask_shape)
  got, want = (jax.jit(jax.grad(lambda x, f=f: jnp.vdot(f(x, where=mask), w)))(x) for f in (softmax, softmax_reference))
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)


def kernel_calls(jaxpr):
  """The kernels that a jaxpr, the jaxprs in it included, calls."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "tile_call":
      yield eqn
    for key in ("jaxpr", "call_jaxpr") if eqn.primitive.name != "tile_call" else ():
      if key in eqn.params:
        yield from kernel_calls(getattr(eqn.params[key], "jaxpr", eqn.params[key]))


def test_under_vmap_one_mask_for_all_examples_stays_one():
  x, mask = random(0, 6, 4, 50, 33), bernoulli(1, 0.4, 50, 33)
  f = jax.vmap(lambda x, mask: softmax(x, where=mask), in_axes=(0, None))
  np.testing.assert_allclose(jax.jit(f)(x, mask), compiled(softmax_reference, x, where=mask), rtol=1e-5, atol=1e-7)
  (call,) = kernel_calls(jax.make_jaxpr(f)(x, mask).jaxpr)
  assert call.invars[1].aval.size == mask.size


@pytest.mark.parametrize("n", [33, 20480])
def test_nan_and_infinity_are_those_of_jax(n):
  x = np.array(random(0, 5, n))
  x[0, 3], x[1], x[2, 5], x[3, :7] = np.nan, -np.inf, np.inf, -np.inf
  np.testing.assert_allclose(compiled(softmax, x), compiled(jax.nn.softmax, x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n", [33, 20480])
def test_derivatives_are_those_of_the_reference(n):
  x, w = random(0, 4, n), random(1, 4, n)
  mask = bernoulli(2, 0.5, 4, n)

  def gradient(f, **kwargs):
    return jax.jit(jax.grad(lambda x: jnp.vdot(f(x, **kwargs), w)))(x)

  for kwargs in ({}, {"where": mask}, {"axis": 0}):
    got, want = gradient(softmax, **kwargs), gradient(softmax_reference, **kwargs)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)


def test_a_second_derivative():
  x, w = random(0, 3, 20), random(1, 3, 20)

  def curvature(f):
    return jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(lambda x: jnp.vdot(f(x), w))(x), w)))(x)

  np.testing.assert_allclose(curvature(softmax), curvature(softmax_reference), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("call", "message"), [
  (lambda x: softmax(x, 2), "axis=2 of an array of rank 2"),
  (lambda x: softmax(x, (1, -1)), r"axis=\(1, -1\)"),
  (lambda x: softmax(x, where=x), "where is float32"),
  (lambda x: softmax(x, where=jnp.ones(3, bool)), "where has the shape"),
  (lambda x: softmax(x.astype(int)), "x is int32"),
])
def test_arguments_that_do_not_fit_are_refused(call, message):
  with pytest.raises(tt.TileTypeError, match=message):
    call(random(0, 4, 96))
