"""Exponentials, roots and the like of floats, by jnp's names: the primitives are those of elementwise.

`approximate=True` is one instruction of a GPU, or two; the error is that of PTX ISA 9.7.3. Elsewhere nothing changes.
"""
from __future__ import annotations

import math
from typing import Any

from tiletrace.core.ops.elementwise import (
  cos_approx_p,
  cos_p,
  erf_p,
  exp2_approx_p,
  exp2_p,
  exp_approx_p,
  exp_p,
  log2_approx_p,
  log2_p,
  log_approx_p,
  log_p,
  logistic_approx_p,
  logistic_p,
  multiply,
  of_floats,
  rsqrt_p,
  sin_approx_p,
  sin_p,
  sqrt_approx_p,
  sqrt_p,
  tanh_approx_p,
  tanh_p,
)


def exp(x: Any, *, approximate: bool = False) -> Any:
  """e ** x; integers become f32.

  Args:
    approximate: ex2.approx of x log2(e), whose relative error is about |x| * 2**-24.

  Example:
    >>> tt.exp(0.)
    1.0
  """
  return of_floats(exp_approx_p if approximate else exp_p, "exp", math.exp, x)


def exp2(x: Any, *, approximate: bool = False) -> Any:
  """2 ** x.

  Args:
    approximate: results below 2**-126 are zero: one instruction of a GPU (PTX ISA, ex2.approx.ftz) instead of four.

  Example:
    >>> tt.exp2(10.)
    1024.0
  """
  return of_floats(exp2_approx_p if approximate else exp2_p, "exp2", lambda v: 2.0 ** v, x)


def log(x: Any, *, approximate: bool = False) -> Any:
  """The natural logarithm.

  Args:
    approximate: lg2.approx, whose absolute error is 2**-22 near 1.

  Example:
    >>> tt.log(1.)
    0.0
  """
  return of_floats(log_approx_p if approximate else log_p, "log", math.log, x)


def log2(x: Any, *, approximate: bool = False) -> Any:
  """The logarithm to base 2.

  Args:
    approximate: lg2.approx, whose absolute error is 2**-22 near 1.

  Example:
    >>> tt.log2(8.)
    3.0
  """
  return of_floats(log2_approx_p if approximate else log2_p, "log2", math.log2, x)


def sqrt(x: Any, *, approximate: bool = False) -> Any:
  """The square root.

  Args:
    approximate: sqrt.approx, whose relative error is 2**-23.

  Example:
    >>> tt.sqrt(2.25)
    1.5
  """
  return of_floats(sqrt_approx_p if approximate else sqrt_p, "sqrt", math.sqrt, x)


def rsqrt(x: Any) -> Any:
  """1 / sqrt(x).

  >>> tt.rsqrt(4.)
  0.5
  """
  return of_floats(rsqrt_p, "rsqrt", lambda v: 1 / math.sqrt(v), x)


def tanh(x: Any, *, approximate: bool = False) -> Any:
  """The hyperbolic tangent.

  Args:
    approximate: tanh.approx, whose relative error is 2**-11.

  Example:
    >>> tt.tanh(0.)
    0.0
  """
  return of_floats(tanh_approx_p if approximate else tanh_p, "tanh", math.tanh, x)


def sigmoid(x: Any, *, approximate: bool = False) -> Any:
  """1 / (1 + exp(-x)), also under jax.lax's name `logistic`.

  Args:
    approximate: by ex2.approx and rcp.approx, whose relative error is about |x| * 2**-24; subnormal results are 0.

  Example:
    >>> tt.sigmoid(0.)
    0.5
  """
  primitive = logistic_approx_p if approximate else logistic_p
  return of_floats(primitive, "sigmoid", lambda v: 0.5 * math.tanh(0.5 * v) + 0.5, x)


logistic = sigmoid


def silu(x: Any, *, approximate: bool = False) -> Any:
  """x * sigmoid(x); `approximate` as in `sigmoid`.

  >>> tt.silu(0.)
  0.0
  """
  return multiply(x, sigmoid(x, approximate=approximate))


def erf(x: Any) -> Any:
  """The error function.

  >>> tt.erf(0.)
  0.0
  """
  return of_floats(erf_p, "erf", math.erf, x)


def sin(x: Any, *, approximate: bool = False) -> Any:
  """The sine of x in radians.

  Args:
    approximate: sin.approx, whose absolute error is 2**-20.5 within 2 pi and grows with |x|.

  Example:
    >>> tt.sin(0.)
    0.0
  """
  return of_floats(sin_approx_p if approximate else sin_p, "sin", math.sin, x)


def cos(x: Any, *, approximate: bool = False) -> Any:
  """The cosine of x in radians.

  Args:
    approximate: cos.approx, whose absolute error is 2**-20.5 within 2 pi and grows with |x|.

  Example:
    >>> tt.cos(0.)
    1.0
  """
  return of_floats(cos_approx_p if approximate else cos_p, "cos", math.cos, x)
