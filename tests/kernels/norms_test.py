"""rms_norm and layer_norm against float64, and their derivatives against those of the references."""
from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.kernels.arrays import compiled, normal
from tests.tolerances import assert_close
from tiletrace.kernels import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference, softmax

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
SHAPES = [(320,), (5, 1), (3, 7), (2, 777), (2, 3, 2, 4, 96), (9, 1000), (2, 20001), (0, 64), (1, 65536)]


def f64(x):
  return np.asarray(x).astype(np.float64)


def silu(x):
  return x / (1 + np.exp(-x))


def exact(x, gamma=None, residual=None, gate=None, use_silu=False, eps=1e-6):
  h = f64(x) + (0 if residual is None else f64(residual))
  y = h / np.sqrt((h * h).mean(-1, keepdims=True) + eps) * (1 if gamma is None else f64(gamma))
  y = silu(y) if use_silu else y
  return y * (1 if gate is None else silu(f64(gate))), h


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_of_any_shape(shape):
  x, gamma = normal(0, *shape, dtype=jnp.bfloat16), normal(1, shape[-1])
  y = jax.jit(rms_norm)(x, gamma)
  assert y.dtype == x.dtype and y.shape == x.shape
  assert_close(y, exact(x, gamma)[0], "elementwise")


@pytest.mark.parametrize("shape", [(3, 0), (0, 0), (0, 8), (2, 0, 5)])
def test_what_has_no_elements_is_returned_with_its_shape(shape):
  x, gamma = jnp.ones(shape, jnp.bfloat16), jnp.ones(shape[-1])
  y, h = jax.jit(lambda x, g: rms_norm(x, g, residual=x))(x, gamma)
  assert {(o.shape, o.dtype) for o in (y, h, layer_norm(x, gamma), softmax(x), softmax(x, 0))} == {(shape, x.dtype)}
  assert (jax.grad(lambda g: rms_norm(x, g).sum().astype(jnp.float32))(gamma) == 0).all()


@pytest.mark.parametrize(("gamma", "residual", "gate", "use_silu"), list(itertools.product((False, True), repeat=4)))
def test_rms_norm_with_what_stands_around_it(gamma, residual, gate, use_silu):
  for n in (96, 20480):
    x = normal(0, 3, n, dtype=jnp.float16)
    g, r, q = normal(1, n, dtype=jnp.bfloat16), normal(2, 3, n), normal(3, 3, n, dtype=jnp.bfloat16)
    g, r, q = g if gamma else None, r if residual else None, q if gate else None
    got = rms_norm(x, g, residual=r, gate=q, silu=use_silu, eps=1e-2)
    want = exact(x, g, r, q, use_silu, 1e-2)
    for a, b in zip(got if residual else (got,), want, strict=False):
      assert a.dtype == x.dtype
      assert_close(a, b, "elementwise")


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_every_dtype(dtype):
  x = normal(0, 4, 640, dtype=dtype) * 2
  assert_close(rms_norm(x), exact(x)[0], "elementwise")
  gamma, beta = normal(1, 640, dtype=dtype), normal(2, 640, dtype=dtype)
  d = f64(x) - f64(x).mean(-1, keepdims=True)
  want = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * f64(gamma) + f64(beta)
  assert_close(layer_norm(x, gamma, beta), want, "reduce")


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_of_any_shape(shape):
  x = normal(0, *shape) + 30
  gamma, beta = normal(1, shape[-1]), normal(2, shape[-1])
  d = f64(x) - f64(x).mean(-1, keepdims=True)
  want = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-3) * f64(gamma) + f64(beta)
  np.testing.assert_allclose(jax.jit(layer_norm, static_argnames="eps")(x, gamma, beta, eps=1e-3), want, rtol=1e-4,
                             atol=1e-4)


@pytest.mark.parametrize("n", [33, 20480])
def test_derivatives_are_those_of_the_references(n):
  x, r, g, w = (normal(i, 5, n) for i in range(4))
  gamma, beta = normal(5, n), normal(6, n)

  def rms(f):
    return lambda x, gamma, r, g: sum(jnp.vdot(o, w) for o in f(x, gamma, residual=r, gate=g, silu=True))

  def layer(f):
    return lambda x, gamma, beta: jnp.vdot(f(x, gamma, beta), w)

  def plain(f):
    return lambda x, gamma: jnp.vdot(f(x, gamma, eps=1e-2), w)

  for loss, ours, reference, args in ((rms, rms_norm, rms_norm_reference, (x, gamma, r, g)),
                                      (plain, rms_norm, rms_norm_reference, (x, gamma)),
                                      (plain, rms_norm, rms_norm_reference, (x, None)),
                                      (layer, layer_norm, layer_norm_reference, (x, gamma, beta))):
    where = tuple(i for i, a in enumerate(args) if a is not None)
    got, want = (jax.jit(jax.grad(loss(f), where))(*args) for f in (ours, reference))
    for a, b in zip(got, want, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5 * float(np.abs(b).max()))


def test_rms_norm_under_vmap_is_rms_norm():
  x, gamma = normal(0, 3, 5, 96), normal(1, 96)
  got = jax.vmap(rms_norm, (0, None))(x, gamma)
  np.testing.assert_allclose(got, compiled(rms_norm_reference, x, gamma), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("call", "message"), [
  (lambda x: rms_norm(x, jnp.ones(7)), r"gamma has the shape \(7\), x ends in 96"),
  (lambda x: rms_norm(x, gate=x[0]), r"gate has the shape \(96\), x \(4, 96\)"),
  (lambda x: rms_norm(x, residual=x.astype(int)), r"residual is int32\[4, 96\]"),
  (lambda x: rms_norm(x[0, 0]), "x is a scalar"),
  (lambda x: layer_norm(x, None, jnp.ones((96, 1))), r"beta has the shape \(96, 1\)"),
])
def test_operands_that_do_not_fit_are_named_at_the_callers_line(call, message):
  with pytest.raises(tt.TileTypeError, match=message) as info:
    call(normal(0, 4, 96))
  assert "norms_test.py" in str(info.value)
