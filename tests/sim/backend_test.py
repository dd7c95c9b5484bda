"""backend="sim" is a jax operation like any other: in jit, vmap, scan, under derivatives, and by TT_BACKEND."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tiletrace import kernels

rng = np.random.default_rng(11)
X = rng.standard_normal((3, 70)).astype(np.float32)


def scale_kernel(x, s, y):
  r = tt.block(tt.program_id(0), 32)
  y[r] = x[r] * s[...]


def scale(x, s, backend="sim", vjp=None):
  return tt.tile_call(scale_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(tt.cdiv(x.shape[0], 32),),
                      backend=backend, vjp=vjp)(x, s)


def test_in_jit_and_eagerly():
  s = jnp.float32(3)
  np.testing.assert_array_equal(jax.jit(scale)(X[0], s), X[0] * 3)
  np.testing.assert_array_equal(scale(X[0], s), X[0] * 3)


def test_under_vmap():
  s = jnp.arange(1, 4, dtype=jnp.float32)
  np.testing.assert_array_equal(jax.vmap(scale)(X, s), X * np.asarray(s)[:, None])


def test_in_scan():
  def body(x, s):
    y = scale(x, s)
    return y, y[0]
  last, firsts = jax.jit(lambda x: jax.lax.scan(body, x, jnp.full(4, 2, jnp.float32)))(X[0])
  np.testing.assert_array_equal(last, X[0] * 16)
  np.testing.assert_array_equal(firsts, X[0, 0] * 2 ** np.arange(1, 5, dtype=np.float32))


def test_with_the_derivative_of_the_jax_program():
  got = jax.grad(lambda x, s: scale(x, s, vjp="xla").sum(), argnums=(0, 1))(X[0], jnp.float32(3))
  np.testing.assert_array_equal(got[0], np.full(70, 3, np.float32))
  np.testing.assert_allclose(got[1], X[0].sum(), rtol=1e-5)


def test_a_fault_ends_the_computation_with_its_text():
  def race_kernel(x, y):
    y[0] = x[tt.program_id(0)]

  call = tt.tile_call(race_kernel, jax.ShapeDtypeStruct((1,), np.float32), grid=(3,), backend="sim")
  with pytest.raises(Exception, match="race between CTAs"):
    jax.jit(call)(X[0]).block_until_ready()


def test_the_variable_is_for_kernels_that_name_no_backend(monkeypatch):
  monkeypatch.setenv("TT_BACKEND", "sim")
  x = jnp.asarray(rng.standard_normal((6, 100)), jnp.float32)
  text = str(jax.jit(kernels.softmax).lower(x).as_text())
  assert "callback" in text
  want = np.asarray(jax.nn.softmax(x, axis=-1))
  np.testing.assert_allclose(kernels.softmax(x), want, rtol=1e-5)
  monkeypatch.setenv("TT_BACKEND", "xla")
  assert "callback" not in str(jax.jit(lambda x: kernels.softmax(x)).lower(x).as_text())


def test_the_hint_names_the_backends():
  with pytest.raises(tt.TileTypeError, match='None, "xla" or "sim"'):
    scale(X[0], jnp.float32(1), backend="cuda")
