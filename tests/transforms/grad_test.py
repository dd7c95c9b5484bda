"""Derivatives of kernels: vjp=, vjp="xla", custom_vjp around a wrapper; alone and under the other transformations."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.transforms.kernels import like, matmul_call, normal, scale_rows
from tiletrace.core.errors import TileTypeError

X, S = normal(0, 6, 5), normal(1, 6)
XS = normal(2, 3, 6, 5)


def reference(x, s):
  return x * s[:, None]


@jax.custom_vjp
def wrapped(x, s):
  return scale_rows(x, s, vjp=None)


wrapped.defvjp(lambda x, s: (wrapped(x, s), (x, s)),
               lambda saved, dy: (wrapped(dy, saved[1]), jnp.sum(saved[0] * dy, 1)))

FORMS = {"vjp=function": scale_rows, 'vjp="xla"': functools.partial(scale_rows, vjp="xla"), "custom_vjp": wrapped}


def gradients(f: Callable[..., jax.Array]) -> Callable[..., Any]:
  return jax.grad(lambda x, s: jnp.sum(jnp.sin(f(x, s))), (0, 1))


def times_three(f):
  return lambda x, s: jax.lax.scan(lambda c, _: (f(c, s), None), x, None, length=3)[0]


def either(f):
  return lambda x, s: jax.lax.cond(x.sum() < 1e6, f, lambda x, s: x, x, s)


def over_examples(f):
  return jax.vmap(f, in_axes=(0, None))


TRANSFORMS: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "grad": (gradients, X),
    "jit of grad": (lambda f: jax.jit(gradients(f)), X),
    "grad of jit": (lambda f: gradients(jax.jit(f)), X),
    "vmap of grad": (lambda f: over_examples(gradients(f)), XS),
    "grad of vmap": (lambda f: gradients(over_examples(f)), XS),
    "grad of remat": (lambda f: jax.jit(gradients(jax.checkpoint(f))), X),
    "grad of scan": (lambda f: gradients(times_three(f)), X),
    "grad of cond": (lambda f: gradients(either(f)), X),
    "jacobian": (jax.jacrev, X),
    "grad of grad": (lambda f: jax.grad(lambda x, s: sum(jnp.sum(g**2) for g in gradients(f)(x, s)), (0, 1)), X),
}


ALSO = {'vjp="xla"': ("grad", "vmap of grad", "grad of vmap", "grad of scan"), "custom_vjp": ("grad", "grad of vmap")}


@pytest.mark.parametrize(("form", "transform"), [
    (form, transform) for form in FORMS for transform in ALSO.get(form, TRANSFORMS)])
def test_derivatives_are_those_of_the_jnp_function(form, transform):
  apply, x = TRANSFORMS[transform]
  got, want = apply(FORMS[form])(x, S), apply(reference)(x, S)
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert g.dtype == w.dtype
    np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def test_vjp_of_a_matmul_gets_kernels_of_its_own():
  def backward(inputs, outputs, cotangents):
    (a, b), dc = inputs, cotangents
    return matmul_call(*a.shape, bm=32)(dc, b.T), matmul_call(*b.shape, bm=32)(a.T, dc)

  a, b = normal(0, 40, 24, dtype=jnp.bfloat16), normal(1, 24, 56, dtype=jnp.bfloat16)
  call = matmul_call(40, 56, bm=32, vjp=backward)
  da, db = jax.jit(jax.grad(lambda a, b: call(a, b).astype(jnp.float32).sum(), (0, 1)))(a, b)
  ones = np.ones((40, 56))
  for got, want in ((da, ones @ b.astype(np.float64).T), (db, a.astype(np.float64).T @ ones)):
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-7, atol=1e-2)


def test_vjp_function_gets_trees_and_none_stands_for_zero():
  seen = []

  def kernel(tree, bias, scale, y, z):
    y[...] = tree["a"][...] * scale[...]
    z[...] = tree["b"][...] if bias is None else tree["b"][...] + bias[...]

  def backward(inputs, outputs, cotangents):
    seen.append((jax.tree.structure(inputs), jax.tree.structure(outputs), jax.tree.structure(cotangents)))
    _, bias, scale = inputs
    dy, dz = cotangents
    return {"a": dy * scale, "b": dz}, None if bias is None else dz, None

  tree = {"a": X, "b": X + 1}
  call = tt.tile_call(kernel, (like(X), like(X)), grid=(1,), vjp=backward)
  loss = lambda tree, bias, scale: sum(jnp.sum(v**2) for v in call(tree, bias, scale))
  scale = np.float32(3)
  d_tree, d_scale = jax.grad(loss, (0, 2))(tree, None, scale)
  np.testing.assert_allclose(d_tree["a"], 2 * X * 9, rtol=1e-6)
  np.testing.assert_allclose(d_tree["b"], 2 * (X + 1), rtol=1e-6)
  assert d_scale == 0                # the rule said None
  np.testing.assert_allclose(jax.grad(loss, 1)(tree, X, scale), 2 * (2 * X + 1), rtol=1e-6)
  args = jax.tree.structure((tree, None, scale))
  assert seen[0] == (args, jax.tree.structure((0, 0)), jax.tree.structure((0, 0)))


@pytest.mark.parametrize("vjp", [lambda inputs, outputs, dy: (dy * inputs[1], None), "xla"], ids=["function", "xla"])
def test_integer_operands_may_stand_beside_differentiated_ones(vjp):
  def kernel(x, n, y):
    y[...] = x[...] * n[...].astype(jnp.float32)

  n = np.random.default_rng(3).integers(-9, 9, X.shape).astype(np.int32)
  call = tt.tile_call(kernel, like(X), grid=(1,), vjp=vjp)
  np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: call(x, n).sum()))(X), n.astype(np.float32))
  with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
    jax.grad(lambda n: call(X, n).sum())(n)


@pytest.mark.parametrize(("found", "what"), [(lambda dy: dy, "returned \\w*Array\\w*|returned \\w*Tracer for 2 inputs"),
                                             (lambda dy: (dy,), "returned 1 cotangents for 2 inputs")])
def test_a_vjp_that_returns_something_else_is_refused_by_name(found, what):
  def backward(inputs, outputs, dy):
    return found(dy)

  with pytest.raises(TileTypeError, match=f"vjp of scale_rows {what}") as refused:
    gradients(functools.partial(scale_rows, vjp=backward))(X, S)
  assert refused.value.loc is not None and refused.value.loc.line == backward.__code__.co_firstlineno


@pytest.mark.parametrize("derivative", [
    lambda f, x: jax.grad(lambda x: f(x).sum())(x), lambda f, x: jax.jvp(f, (x,), (x,)), jax.linearize,
    lambda f, x: jax.linear_transpose(f, x)(x), lambda f, x: jax.grad(lambda x: jax.vmap(f)(x[None]).sum())(x)],
    ids=["grad", "jvp", "linearize", "linear_transpose", "grad of vmap"])
def test_without_a_rule_every_derivative_is_refused_with_the_kernel_s_name_and_line(derivative):
  with pytest.raises(NotImplementedError, match=r"'scale_rows' \(kernels\.py:\d+\) has no derivative: give tile_call"):
    derivative(lambda x: scale_rows(x, S, vjp=None), X)


def test_vjp_with_aliases_is_refused():
  with pytest.raises(TileTypeError, match="vjp= with input_output_aliases"):
    tt.tile_call(lambda x, y: None, like(X), grid=(1,), input_output_aliases={0: 0}, vjp="xla", name="kernel")


def test_differentiating_for_cuda_lowers_to_kernels_only():
  text = jax.jit(gradients(scale_rows)).trace(X, S).lower(lowering_platforms=("cuda",)).as_text()
  assert text.count('kernel = "scale_rows"') == 1     # forward and backward are equal calls: one function
  assert "stablehlo.while" not in text
