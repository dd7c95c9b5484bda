"""jax's functions as tile operations, as jax ops and in the simulator."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special

from tests.jaxpr.together import Table, check
from tests.lowering.xla.kernels import call
from tests.tolerances import assert_close
from tiletrace.jaxpr import call_jax

rng = np.random.default_rng(6)
X, Y = (rng.standard_normal((2, 4, 8)) * 2).astype(np.float32)
I = rng.integers(-20, 20, (4, 8), dtype=np.int32)
J = rng.integers(1, 7, (4, 8), dtype=np.int32)
B, C = X > 0, Y > 0
V, W = X[0], Y[0]
M = rng.standard_normal((8, 8)).astype(np.float32)
P = rng.uniform(0.05, 0.95, (4, 8)).astype(np.float32)
H, G = X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)
K = np.array([2], np.int32)
BYTES = I.astype(np.int8)
U = rng.integers(0, 2**32, (64, 32), dtype=np.uint32) | np.uint32(2**31 + 5)

def apply_kernel(x, y, *, fn):
  y[...] = call_jax(fn, x[...]).astype(y.dtype)


SHAPES: Table = {
  "rev": (lambda x: lax.rev(x, (0, 1)), X), "flip": (lambda x: jnp.flip(x[:, 1:6], 1), X), "fliplr": (jnp.fliplr, B),
  "rot90": (jnp.rot90, X), "pad": (lambda x: jnp.pad(x, ((1, 2), (0, 3)), constant_values=2), X),
  "pad bools": (lambda x: jnp.pad(x, 1), B), "pad edge": (lambda x: jnp.pad(x, 2, mode="edge"), I),
  "pad reflect": (lambda x: jnp.pad(x, 2, mode="reflect"), X), "pad wrap": (lambda x: jnp.pad(x, 2, mode="wrap"), X),
  "pad less": (lambda x: lax.pad(x, 0., ((-1, -1, 0), (2, -3, 0))), X),
  "pad between": (lambda x: lax.pad(x, 7., ((0, 0, 0), (0, 1, 1))), X),
  "dynamic_slice": (lambda x: lax.dynamic_slice(x, (1, 2), (2, 3)), X),
  "clamped": (lambda x: lax.dynamic_slice(x, (9, -3), (2, 3)), X),
  "one row": (lambda x, k: lax.dynamic_index_in_dim(x, k[0], 0), X, K),
  "one element": (lambda x, k: lax.dynamic_slice(x, (k[0], k[0] + 9), (1, 1)), I, K),
  "indexed": (lambda x, k: x[k[0]] + x[-1] + x[1:3].sum(0), X, K),
  "dynamic_update_slice": (lambda x, y: lax.dynamic_update_slice(x, y[:2, :3], (1, 2)), X, Y),
  "update one": (lambda x, y, k: lax.dynamic_update_slice(x, y[:1, :3], (k[0], 5)), X, Y, K),
  "split": (lambda x: lax.split(x, (3, 5), 1), X), "unstack": (lambda x: lax.unstack(x, axis=0), X),
  "stack": (lambda x, y: jnp.stack([x, y], 1), X, Y), "stack bools": (lambda x, y: jnp.stack([x, y], -1), B, C),
  "tile": (lambda x: jnp.tile(x, (2, 3)), X), "roll": (lambda x: jnp.roll(x, (1, -3), (0, 1)), X),
  "concatenate": (lambda x: jnp.concatenate([x, x[:, :3], jnp.zeros((4, 5))], 1), X),
  "block": (lambda x: jnp.block([[x, -x], [x * 2, x]]), X), "diff": (lambda x: jnp.diff(x, n=2), X),
  "gradient": (lambda x: jnp.gradient(x, axis=1), X), "ediff1d": (jnp.ediff1d, V), "triu": (jnp.triu, M),
  "tril": (lambda m: jnp.tril(m, 1) + jnp.eye(8), M), "vander": (lambda v: jnp.vander(v[:4], 3), V),
  "meshgrid": (jnp.meshgrid, V, W), "of a number": (lambda x: x + jnp.flip(3) + jnp.tile(2, ()) + jnp.sum(1), X),
  "delete": (lambda x: jnp.delete(x, 1, axis=1), X),
}

PRODUCTS: Table = {
  "outer": (jnp.outer, V, W), "dot": (jnp.dot, V, W), "vdot": (jnp.vdot, X, Y), "matvec": (jnp.matmul, X, V),
  "vecmat": (jnp.matmul, V, M), "rows": (lambda x, y: jnp.einsum("ij,ij->i", x, y), X, Y),
  "scaled": (lambda x, v: jnp.einsum("ij,j->ij", x, v), X, V), "kron": (jnp.kron, V, W),
  "outer of batches": (lambda x, y: jnp.einsum("bi,bj->bij", x[:, :2], y), X, Y), "of bf16": (jnp.matmul, H, G[0]),
  "of bools": (jnp.dot, B, C[0]),
  "of integers": (jnp.dot, I, J[0]), "of bytes": (lambda x, y: lax.dot(x, y, preferred_element_type=jnp.int32),
                                                  BYTES, BYTES[0]),
  "cross": (lambda x: jnp.cross(x[:, :3], x[:, 3:6]), X), "one column": (jnp.matmul, X, M[:, :1]),
  "norm": (lambda x: jnp.linalg.norm(x, axis=1) + jnp.linalg.norm(x, 1, axis=1), X), "vecdot": (jnp.vecdot, X, Y),
}

BITS: Table = {
  "shift_right_logical": (lambda x, n: lax.shift_right_logical(x, n * 6), I, J),
  "shifts of all bits": (lambda x, n: lax.shift_left(x, n * 8) + lax.shift_right_arithmetic(x, n * 8), I, J),
  "shifts of bytes": (lambda x: (lax.shift_right_logical(x, jnp.int8(2)), lax.shift_left(x, jnp.int8(9))), BYTES),
  "arithmetic of unsigned": (lambda x: lax.shift_right_arithmetic(x, jnp.uint32(3)), I.astype(np.uint32)),
  "right_shift": (jnp.right_shift, I.astype(np.uint32), J.astype(np.uint32)), "power": (jnp.power, I, J),
  "mulhi": (lambda x, y: lax.mulhi(x * 123456789, y * 987654321), I, J),
  "mulhi of 16 bits": (lambda x, y: lax.mulhi(x * 1234, y * 9876), I.astype(np.uint16), J.astype(np.uint16)),
  "nextafter": (jnp.nextafter, X, Y), "nextafter of zero": (lambda x, y: jnp.nextafter(x * 0, y), X, Y),
  "nextafter of bf16": (jnp.nextafter, H, G), "nextafter itself": (lambda x: jnp.nextafter(x, x), X),
  "nextafter of nan": (lambda x, y: jnp.nextafter(jnp.where(x > 0, x, jnp.nan), y), X, Y),
  "spacing": (jnp.spacing, X), "frexp": (jnp.frexp, X), "ldexp": (jnp.ldexp, X, J), "bits": (jnp.bitwise_count, I),
  "bools": (lambda x, y: (x < y, x <= y, x > y, x >= y, jnp.maximum(x, y), jnp.minimum(x, y)), B, C),
  "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), X), "gcd": (jnp.gcd, I, J), "lcm": (jnp.lcm, I, J),
  "packbits": (jnp.packbits, B),
}

REDUCTIONS: Table = {
  "bits": (lambda x: (lax.reduce_and(x, (1,)), lax.reduce_or(x, (0,)), lax.reduce_xor(x, (0, 1))), I),
  "bits of bytes": (lambda x: (lax.reduce_and(x, (0,)), lax.reduce_or(x, (1,)), lax.reduce_xor(x, (1,))), BYTES),
  "bits across warps": (lambda x: (lax.reduce_and(x, (0, 1)), lax.reduce_xor(x, (0,))), U),
  "bitwise": (lambda x: jnp.bitwise_xor.reduce(x, axis=1), I), "reduce_xor": (lambda x: lax.reduce_xor(x, (1,)), B),
  "all of": (lambda x: lax.reduce_and(x, (0,)), B),
  "std": (lambda x: jnp.std(x, 1, ddof=1) + jnp.var(x, 1), X), "nanmean": (lambda x: jnp.nanmean(x, 1), X),
  "average": (lambda x, w: jnp.average(x, 1, weights=abs(w)), X, V), "ptp": (lambda x: jnp.ptp(x, 1), X),
  "logsumexp": (lambda x: jax.nn.logsumexp(x, 1, keepdims=True), X), "trapezoid": (jnp.trapezoid, X),
  "logsumexp b": (lambda x, y: special.logsumexp(x, 1, b=abs(y)), X, Y),
  "trace": (lambda m: jnp.sum(m * jnp.eye(8)), M),
  "cumlogsumexp": (lambda x: lax.cumlogsumexp(x * 50, 1), X), "cumprod": (lambda x: jnp.cumprod(x, 0), X),
  "cumlogsumexp back": (lambda x: lax.cumlogsumexp(x, 0, reverse=True), X),
  "cumlogsumexp of nothing": (lambda x: lax.cumlogsumexp(jnp.where(x > 1, -jnp.inf, x), 1), X),
  "softmax where": (lambda x: jax.nn.softmax(x, 1, where=x < 1), X), "softmax": (lambda x: jax.nn.softmax(x, 0), X),
  "log_softmax": (jax.nn.log_softmax, X), "standardize": (lambda x: jax.nn.standardize(x, 0), X),
  "glu": (jax.nn.glu, X), "glu of columns": (lambda x: jax.nn.glu(x, 0), X),
  "one_hot": (lambda i: jax.nn.one_hot(i[0], 8), J),
}

ACTIVATIONS: Table = {
  name: (getattr(jax.nn, name), X) for name in (
    "celu", "elu", "gelu", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh", "identity", "leaky_relu",
    "log_sigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "soft_sign", "softplus", "sparse_plus",
    "sparse_sigmoid", "squareplus", "swish", "tanh")} | {"log1mexp": (jax.nn.log1mexp, P)}

CONTROL: Table = {
  "select": (lambda x: jnp.select([x > 1, x < 0], [x, -x], 5.), X), "select_n": (
    lambda i, x, y: lax.select_n(i % 3, x, y, -x), J, X, Y),
  "piecewise": (lambda x: jnp.piecewise(x, [x < 0, x >= 0], [lambda v: -v, lambda v: v * 2]), X),
  "scan": (lambda x: lax.scan(lambda c, r: (c * .5 + r, c + r), x[0], x), X),
  "scan back": (lambda x: lax.scan(lambda c, r: (c * .5 + r, c.sum()), x[0], x, reverse=True), X),
  "map": (lambda x: lax.map(lambda r: r * r.sum(), x), X), "fori": (
    lambda x: lax.fori_loop(0, 5, lambda i, c: c * .5 + i, x), X),
  "while": (lambda x: lax.while_loop(lambda c: jnp.max(c) < 100, lambda c: c * 2, abs(x) + 1), X),
  "cond": (lambda x: lax.cond(x.sum() > 0, lambda v: v, lambda v: -v, x), X), "known cond": (
    lambda x: lax.cond(True, lambda v: v + 1, lambda v: -v, x), X),
  "switch": (lambda x, k: lax.switch(k[0] + 5, [lambda v: v, lambda v: -v, lambda v: 2 * v], x), X, K),
  "associative_scan": (lambda x: lax.associative_scan(jnp.add, x, axis=1), X),
  "polyval": (lambda x: jnp.polyval(np.array([1, 2, 3], np.float32), x), X), "known sum": (
    lambda x: x * jnp.asarray(np.array([1, 2], np.float32)).sum(), X),
  "known zeros": (lambda x: x + np.zeros((4, 8), np.float32) - np.full((1, 8), 3., np.float32), X),
  "barrier": (lambda x, y: lax.optimization_barrier((x, y)), X, Y),
  "grad": (lambda x: jax.grad(lambda v: jax.nn.silu(v).sum())(x), X), "vmap": (jax.vmap(jax.nn.softmax), X),
}

SPECIAL: Table = {
  "erfinv": (lambda p: special.erfinv(2 * p - 1), P), "ndtri": (special.ndtri, P), "entr": (special.entr, P),
  "gammaln": (special.gammaln, X), "digamma": (special.digamma, P),
  "betaln": (lambda x, y: special.betaln(abs(x), abs(y)), X, Y),
  "xlogy": (special.xlogy, P, P), "xlog1py": (special.xlog1py, X, P), "logit": (special.logit, P),
  "expit": (special.expit, X), "ndtr": (special.ndtr, X), "log_ndtr": (special.log_ndtr, X),
  "rel_entr": (lambda p, x: special.rel_entr(p, abs(x)), P, X), "factorial": (special.factorial, J),
  "kl_div": (lambda p, x: special.kl_div(p, abs(x)), P, X), "gamma": (special.gamma, P),
  "log1mexp": (lambda p: jnp.log(-jnp.expm1(-p)), P),
}


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

INTEGER_FUNCTIONS = {
  "floor_divide": lambda x: x // 3 + x // -2, "mod": lambda x: x % 3 - x % -5, "rem": lambda x: jax.lax.rem(x, 4),
  "div": lambda x: jax.lax.div(x, 3), "bits": lambda x: (x & 6) | (x ^ 3) + ~x, "shift": lambda x: (x << 2) + (x >> 1),
  "compare": lambda x: (x > 1).astype(jnp.int32) - (x != 2), "power": lambda x: x**3, "clip": lambda x: x.clip(0, 4),
}


def _as_floats(name, got, want):
  """XLA may keep f32 between 16-bit operations."""
  if want.dtype == np.float32:
    assert_close(got, want, "reduce", name)
  else:
    got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=2**-5, atol=2**-6 * 3, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_functions_of_floats_give_what_they_give_of_arrays(dtype):
  x = (rng.standard_normal((6, 8)) * 3).astype(np.float32).astype(dtype)
  check({name: (fn, x) for name, fn in FLOAT_FUNCTIONS.items()}, "xla", _as_floats)


def test_integers_divide_and_shift_as_in_jnp():
  x = rng.integers(-20, 20, (5, 8), dtype=np.int32)
  check({name: (fn, x) for name, fn in INTEGER_FUNCTIONS.items()}, "xla")


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


@pytest.mark.parametrize("backend", ["xla", "sim"])
@pytest.mark.parametrize("table", [SHAPES, PRODUCTS, BITS, REDUCTIONS, ACTIVATIONS, CONTROL], ids=[
  "shapes", "products", "bits", "reductions", "activations", "control"])
def test_functions_of_tiles_give_what_they_give_of_arrays(table, backend):
  if backend == "sim":
    table = {name: row for name, row in table.items() if name != "pad between"}
  check(table, backend)


@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_special_functions_keep_the_accuracy_of_f32(backend):
  def close(name, got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6, err_msg=name)

  check(SPECIAL, backend, close)


@pytest.mark.parametrize(("shape", "dtype"), [((1000,), jnp.bfloat16), ((16, 64), np.float32), ((33, 2), np.int8)])
def test_any_extents_are_reversed_padded_and_joined(shape, dtype):
  x, y = rng.integers(-50, 50, (2, *shape)).astype(dtype)
  check({"flip": (jnp.flip, x), "flip rows": (lambda x: jnp.flip(x, -1), x), "roll": (lambda x: jnp.roll(x, 1, 0), x),
         "concatenate": (lambda x, y: jnp.concatenate([x, y, x[:1]]), x, y),
         "pad": (lambda x: jnp.pad(x, 1), x)}, "sim")
