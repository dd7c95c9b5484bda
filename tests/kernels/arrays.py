"""Operands and references of the kernels' tests. jnp's operations one by one are one compilation each: operands are
numpy's, and what is compared is compiled whole."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, dtype: Any = jnp.float32, scale: float = 1) -> jax.Array:
  return jnp.asarray((scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype))


def bernoulli(seed: int, p: float, *shape: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).random(shape) < p)


def compiled(fn: Callable[..., Any], *operands: Any, **options: Any) -> Any:
  """fn(*operands, **options) under jit; the options are constants."""
  return jax.jit(functools.partial(fn, **options))(*operands)
