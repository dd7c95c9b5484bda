"""Elementwise operations. Floats below 32 bits are computed in f32 and rounded after each operation, as on the GPU."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tiletrace.core.dtypes import bf16, f16, f32, is_float
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.ops import elementwise as ops
from tiletrace.core.types import TileType
from tiletrace.lowering.xla.machine import Machine, xla_rules


def _shift_right(x: jax.Array, n: jax.Array) -> jax.Array:
  return (lax.shift_right_arithmetic if x.dtype.kind == "i" else lax.shift_right_logical)(x, n)


def _abs(x: jax.Array) -> jax.Array:
  return x if x.dtype.kind == "u" else lax.abs(x)


_FUNCTIONS: dict[Primitive, Callable[..., Any]] = {
  ops.add_p: lax.add, ops.sub_p: lax.sub, ops.mul_p: lax.mul, ops.div_p: lax.div, ops.neg_p: lax.neg,
  ops.floordiv_p: jnp.floor_divide, ops.mod_p: jnp.remainder, ops.pow_p: lax.pow, ops.abs_p: _abs,
  ops.min_p: lax.min, ops.max_p: lax.max, ops.sign_p: lax.sign, ops.floor_p: lax.floor, ops.ceil_p: lax.ceil,
  ops.and_p: lax.bitwise_and, ops.or_p: lax.bitwise_or, ops.xor_p: lax.bitwise_xor, ops.not_p: lax.bitwise_not,
  ops.shift_left_p: lax.shift_left, ops.shift_right_p: _shift_right,
  ops.eq_p: lax.eq, ops.ne_p: lax.ne, ops.lt_p: lax.lt, ops.le_p: lax.le, ops.gt_p: lax.gt, ops.ge_p: lax.ge,
  ops.select_p: lax.select, ops.isnan_p: lambda x: lax.ne(x, x),
  ops.exp_p: lax.exp, ops.exp2_p: lax.exp2, ops.log_p: lax.log,
  ops.log2_p: jnp.log2, ops.sqrt_p: lax.sqrt,
  ops.rsqrt_p: lax.rsqrt, ops.tanh_p: lax.tanh, ops.logistic_p: lax.logistic, ops.erf_p: lax.erf,
  ops.sin_p: lax.sin, ops.cos_p: lax.cos,
  ops.exp_approx_p: lax.exp, ops.exp2_approx_p: lax.exp2, ops.log_approx_p: lax.log, ops.log2_approx_p: jnp.log2,
  ops.sqrt_approx_p: lax.sqrt, ops.tanh_approx_p: lax.tanh,
  ops.logistic_approx_p: lax.logistic, ops.sin_approx_p: lax.sin, ops.cos_approx_p: lax.cos,
}


def is_narrow(dtype: np.dtype) -> bool:
  return is_float(dtype) and dtype.itemsize < 4


def _operand(x: jax.Array | np.ndarray, shape: tuple[int, ...]) -> jax.Array:
  x = x.astype(f32) if is_narrow(np.dtype(x.dtype)) else x
  return lax.broadcast(x, shape) if x.shape != shape else x  # type: ignore[return-value]


def convert(x: jax.Array, dtype: np.dtype) -> jax.Array:
  """The cast, with the rounding to 16 bits that XLA would otherwise be free to leave out between two operations."""
  if dtype not in (bf16, f16) or x.dtype == dtype:
    return lax.convert_element_type(x, dtype)
  return _rounded(lax.convert_element_type(x, f32), dtype).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
  """f32 values rounded to those of `dtype`."""
  if dtype == bf16:
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
  # reduce_precision flushes f16's denormals, the multiples of 2^-24 below 2^-14
  denormal = lax.round(x * np.float32(2**24), lax.RoundingMethod.TO_NEAREST_EVEN) * np.float32(2**-24)
  normal = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
  return lax.select(lax.abs(x) < np.float32(2**-14), denormal, normal)


@_rounded.defjvp
def _rounded_jvp(dtype: np.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
  return _rounded(*primals, dtype), tangents[0]


def register(primitive: Primitive, fn: Callable[..., Any]) -> None:
  @xla_rules.register(primitive)
  def rule(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
    out = eqn.outvars[0].type
    assert isinstance(out, TileType)
    return [convert(fn(*(_operand(m.read(x), out.shape) for x in eqn.values)), out.dtype)]


for _primitive, _fn in _FUNCTIONS.items():
  register(_primitive, _fn)


@xla_rules.register(ops.cast_p)
def _cast(m: Machine, eqn: Eqn) -> Sequence[jax.Array]:
  return [convert(jnp.asarray(m.read(eqn.values[0])), eqn.params["dtype"])]
