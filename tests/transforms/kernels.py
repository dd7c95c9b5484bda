"""Kernels that the tests of jax's transformations share, as functions of arrays."""
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def like(x: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def scale_rows_kernel(x, s, y, *, rows):
  r = tt.block(tt.program_id(0), rows)
  y[r, :] = (x[r, :].astype(jnp.float32) * s[r, None]).astype(y.dtype)


def scale_rows_bwd(inputs, outputs, cotangents):
  (x, s), dy = inputs, cotangents
  return scale_rows(dy, s), jnp.sum(x.astype(jnp.float32) * dy.astype(jnp.float32), axis=1)


def scale_rows(x, s, *, rows=4, vjp=scale_rows_bwd, **options):
  """x[m, n] * s[m, None]."""
  return tt.tile_call(functools.partial(scale_rows_kernel, rows=rows), like(x), grid=(tt.cdiv(x.shape[0], rows),),
                      name="scale_rows", vjp=vjp, **options)(x, s)


def matmul_kernel(a, b, c, *, bm, bn, bk):
  i, j = tt.program_id(0), tt.program_id(1)
  a_s = tt.alloc_shared((bm, bk), a.dtype)
  b_s = tt.alloc_shared((bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], bk), num_stages=2):
    tt.copy(a.at[tt.block(i, bm), tt.block(k, bk)], a_s)
    tt.copy(b.at[tt.block(k, bk), tt.block(j, bn)], b_s)
    tt.gemm(a_s, b_s, acc)
  c[tt.block(i, bm), tt.block(j, bn)] = acc[...].astype(c.dtype)


def matmul_call(m, n, dtype=jnp.bfloat16, *, bm=64, bn=64, bk=32, **options):
  return tt.tile_call(functools.partial(matmul_kernel, bm=bm, bn=bn, bk=bk), jax.ShapeDtypeStruct((m, n), dtype),
                      grid=(tt.cdiv(m, bm), tt.cdiv(n, bn)), **options)


def matmul(a, b, **options):
  """a[m, k] @ b[k, n] in bf16."""
  return matmul_call(a.shape[0], b.shape[1], a.dtype, **options)(a, b)


def add_in_place_kernel(h, delta, h_out, norm, *, rows):
  """h += delta, then reads what it wrote."""
  r = tt.block(tt.program_id(0), rows)
  h_out[r, :] = h[r, :] + delta[r, :]
  norm[r, :] = h[r, :] * 2.0


def add_in_place(h, delta, *, rows=4):
  """(h + delta, 2 * (h + delta)); the first is h's own memory."""
  return tt.tile_call(functools.partial(add_in_place_kernel, rows=rows), (like(h), like(h)),
                      grid=(tt.cdiv(h.shape[0], rows),), input_output_aliases={0: 0})(h, delta)
