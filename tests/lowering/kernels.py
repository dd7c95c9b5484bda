"""Lowers kernels for tests, and the GEMM that many of them vary."""
from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from tiletrace.lowering import pipeline
from tiletrace.lowering.assemble import Cubin
from tiletrace.stages import Lowered

F32, I32, BF16, F16 = np.float32, np.int32, jnp.bfloat16, np.float16


def struct(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def lower(kernel: Any, inputs: list[jax.ShapeDtypeStruct], out: Any, *, grid: Any = 1, options: Any = None,
          static: dict[str, Any] | None = None, **call: Any) -> Lowered:
  kernel = functools.partial(kernel, **static) if static else kernel
  return tt.tile_call(kernel, out, grid=grid, options=options, **call).lower(*inputs)


def assemble(lowered: Lowered) -> Cubin:
  """ptxas: fails on spills and on serialised wgmma."""
  return pipeline.assemble(lowered.lowering)


def variants(lowered: Lowered, op: str) -> list[str]:
  return [c.variant for c in lowered.choices if c.op == op]


def declined(lowered: Lowered, op: str) -> dict[str, str]:
  """variant -> why it was not taken, for the first equation of that op."""
  return dict(next(c for c in lowered.choices if c.op == op).declined)


def count(lowered: Lowered, pattern: str) -> int:
  """Lines of the PTX with an instruction that starts with `pattern`, a regular expression."""
  return len(re.findall(rf"^\s*(?:@!?%\w+ )?{pattern}", lowered.as_text("ptx"), re.MULTILINE))


def notes(lowered: Lowered) -> str:
  return "\n".join(lowered.lowering.program.notes)


def matmul_kernel(a, b, c, *, bm, bn, bk, num_stages, form="nn", policy=None):
  """C = A @ B; A is stored transposed where form[0] is "t", B where form[1] is."""
  i, j = tt.program_id(0), tt.program_id(1)
  a_s = tt.alloc_shared((bk, bm) if form[0] == "t" else (bm, bk), a.dtype)
  b_s = tt.alloc_shared((bn, bk) if form[1] == "t" else (bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[0 if form[0] == "t" else 1], bk), num_stages=num_stages):
    rows, inner, cols = tt.block(i, bm), tt.block(k, bk), tt.block(j, bn)
    tt.copy(a.at[inner, rows] if form[0] == "t" else a.at[rows, inner], a_s)
    tt.copy(b.at[cols, inner] if form[1] == "t" else b.at[inner, cols], b_s)
    tt.gemm(a_s.T if form[0] == "t" else a_s, b_s.T if form[1] == "t" else b_s, acc, policy=policy)
  c[tt.block(i, bm), tt.block(j, bn)] = acc[...].astype(c.dtype)


def matmul(m: int = 1024, n: int = 1024, k: int = 512, *, bm: int = 128, bn: int = 128, bk: int = 64,
           num_stages: int = 3, form: str = "nn", policy: Any = None, dtype: Any = BF16, to: Any = None,
           **call: Any) -> Lowered:
  static = dict(bm=bm, bn=bn, bk=bk, num_stages=num_stages, form=form, policy=policy)
  a = struct(k, m, dtype=dtype) if form[0] == "t" else struct(m, k, dtype=dtype)
  b = struct(n, k, dtype=dtype) if form[1] == "t" else struct(k, n, dtype=dtype)
  call = dict(warpgroups=2) | call
  return lower(matmul_kernel, [a, b], struct(m, n, dtype=to or dtype), static=static,
               grid=(tt.cdiv(m, bm), tt.cdiv(n, bn)), **call)
