"""Arguments of the ready-made kernels that are no arrays: what is taken, and what is refused where it is given."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiletrace import kernels
from tiletrace.core.errors import TileTypeError
from tiletrace.kernels.arguments import check_elementwise, float_dtype, number, whole

BF16 = jnp.bfloat16
X, W, Q = jnp.ones((4, 64), BF16), jnp.ones((64, 32), BF16), jnp.ones((1, 8, 2, 64), BF16)
CACHED = (Q[:, :1], Q, Q, jnp.asarray([3], jnp.int32))
PACKED = (Q[0], Q[0], Q[0], jnp.asarray([0, 8], jnp.int32), jnp.asarray([0, 8], jnp.int32))

REFUSED = [
    (kernels.rms_norm, (X,), {"eps": "x"}, "rms_norm: eps='x'"),
    (kernels.rms_norm, ("x",), {}, "rms_norm: x is 'x'"),
    (kernels.layer_norm, (X,), {"beta": "x"}, "layer_norm: beta is 'x'"),
    (kernels.layer_norm, (X,), {"eps": None}, "layer_norm: eps=None"),
    (kernels.softmax, (X,), {"axis": "a"}, "softmax: axis='a'"),
    (kernels.softmax, (X,), {"axis": 1.0}, "softmax: axis=1.0"),
    (kernels.matmul, (X, W), {"activation": "relu"}, "matmul: activation='relu'"),
    (kernels.matmul, (X, W), {"activation": jnp.sum}, "activation=sum is no function of single elements"),
    (kernels.matmul, (X, W), {"out_dtype": "x"}, "matmul: out_dtype='x'"),
    (kernels.matmul, (X, W), {"out_dtype": jnp.int32}, "matmul: out_dtype="),
    (kernels.grouped_matmul, (X, W[None], jnp.asarray([4])), {"out_dtype": bool}, "grouped_matmul: out_dtype="),
    (kernels.flash_attention, (Q, Q, Q), {"scale": "x"}, "flash_attention: scale='x'"),
    (kernels.flash_attention, (Q, Q, Q), {"query_offset": 1.5}, "flash_attention: query_offset=1.5"),
    (kernels.flash_attention, (Q, Q, Q), {"local_window_size": "x"}, "flash_attention: local_window_size='x'"),
    (kernels.flash_attention, (Q, Q, Q), {"local_window_size": (1, 2, 3)}, r"local_window_size=\(1, 2, 3\)"),
    (kernels.flash_attention, (Q, Q, Q), {"score": jax.nn.softmax}, "score=softmax is no function of single elements"),
    (kernels.flash_attention, (Q, Q, Q), {"key_value_seq_lengths": [8]}, r"key_value_seq_lengths is list\[1\]"),
    (kernels.flash_attention_packed, PACKED, {"max_query_length": 0}, "flash_attention_packed: max_query_length=0"),
    (kernels.flash_attention_packed, PACKED, {"max_query_length": 8, "query_offset": "x"},
     "flash_attention_packed: query_offset='x'"),
    (kernels.flash_decode, CACHED, {"scale": "x"}, "flash_decode: scale='x'"),
    (kernels.flash_decode, CACHED, {"scale": -1}, "flash_decode: scale=-1"),
    (kernels.linear_attention, (Q, Q, Q), {"scale": "x"}, "linear_attention: scale='x'"),
    (kernels.quantize_weights, ("x",), {}, "quantize_weights: w is 'x'"),
    (kernels.quantize_weights, (W,), {"group": 0}, "quantize_weights: group=0"),
]


@pytest.mark.parametrize(("function", "args", "kwargs", "message"), REFUSED,
                         ids=[f"{f.__name__}-{','.join(k) or 'x'}" for f, _, k, _ in REFUSED])
def test_an_argument_of_another_kind_is_named_on_the_line_that_gives_it(function, args, kwargs, message):
  with pytest.raises(TileTypeError, match=message) as e:
    function(*args, **kwargs)
  assert "arguments_test.py" in str(e.value) and "hint: " in str(e.value)


def test_a_number_that_jit_traces_is_refused_with_the_way_to_keep_it():
  with pytest.raises(TileTypeError, match=r"rms_norm: eps is traced(.*\n)*.*static_argnames="):
    jax.jit(kernels.rms_norm)(X, eps=1e-6)
  assert jax.jit(kernels.rms_norm, static_argnames="eps")(X, eps=1e-6).shape == X.shape


@pytest.mark.parametrize("value", [3, 2.5, np.float32(0.25), jnp.float32(0.5), np.int64(3)])
def test_numbers_of_python_and_numpy_are_numbers(value):
  assert number("f", "x", value) == float(value) and isinstance(number("f", "x", value), float)


@pytest.mark.parametrize("value", [True, "3", None, float("nan"), float("inf"), [1], 1j])
def test_what_is_no_finite_number_is_none(value):
  with pytest.raises(TileTypeError, match="f: x="):
    number("f", "x", value)


def test_whole_numbers_and_dtypes_are_what_they_say():
  assert whole("f", "x", np.int64(3), least=3) == 3 and float_dtype("f", "d", None, BF16) == BF16
  for wrong in (True, 2.0, 2):
    with pytest.raises(TileTypeError, match="of 3 or more"):
      whole("f", "x", wrong, least=3)


@pytest.mark.parametrize("f", [
    jax.nn.relu, jax.nn.gelu, jax.nn.silu, jnp.tanh, jnp.square, jax.nn.softplus, jax.jit(jax.nn.elu), abs, None,
    lambda s: 30 * jnp.tanh(s / 30), lambda s: jnp.where(s > 0, s, 0.1 * s), functools.partial(jnp.power, 2.0),
    jax.checkpoint(jnp.sin), lambda s: jax.lax.cond(True, jnp.sin, jnp.cos, s)])
def test_functions_of_single_elements_are_taken(f):
  check_elementwise("f", "score", f)
  x = jnp.linspace(0.1, 2, 6).reshape(2, 3)
  assert f is None or jnp.allclose(f(x), jax.vmap(jax.vmap(f))(x))


@pytest.mark.parametrize("f", [
    jnp.sum, jax.nn.softmax, jnp.cumsum, jnp.sort, jnp.transpose, jnp.ravel, jnp.linalg.norm, jax.jit(jax.nn.softmax),
    lambda s: s[0], lambda s: s - s.mean(-1, keepdims=True), lambda s: jnp.roll(s, 1, -1), lambda s: s[::-1],
    lambda s: s * jnp.arange(s.shape[-1]), lambda s: s @ s.T @ s, lambda s: (s, s)])
def test_functions_of_places_or_of_several_elements_are_refused(f):
  with pytest.raises(TileTypeError, match="no function of single elements"):
    check_elementwise("f", "score", f)
