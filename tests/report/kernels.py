"""The kernels whose reports the tests read, each with operands."""
from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, I32, lower, matmul, struct
from tiletrace.layout import S, lane, reg, warp
from tiletrace.lowering.layouts.fragment import blocked
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.options import CompileOptions
from tiletrace.stages import Lowered


@dataclasses.dataclass(frozen=True)
class Subject:
  lowered: Lowered
  inputs: tuple[np.ndarray, ...]


def _array(rng: np.random.Generator, *shape: int, dtype: Any = BF16) -> np.ndarray:
  return rng.standard_normal(shape).astype(dtype)


def softmax_kernel(x, y, *, rows):
  r = tt.block(tt.program_id(0), rows)
  v = x[r, :].astype(jnp.float32)
  e = tt.exp(v - tt.max(v, axis=1, keepdims=True))
  y[r, :] = (e / tt.sum(e, axis=1, keepdims=True)).astype(y.dtype)


def relayout_kernel(a, b, y):
  """The accumulator of a gemm meets a fragment whose layout is fixed by the author."""
  a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
  tt.copy(a, a_s)
  tt.copy(b, b_s)
  acc = tt.alloc_fragment((64, 64), jnp.float32)
  mine = tt.alloc_fragment((64, 64), jnp.bfloat16, layout=blocked((64, 64), 16, 4))
  tt.gemm(a_s, b_s, acc, accumulate=False)
  mine[...] = (acc[...] * 2 + 1).astype(jnp.bfloat16)
  y[...] = mine[...]


def columns_kernel(x, y):
  """A lane for each row of 128 bytes: the worst that banks can do."""
  s = tt.alloc_shared((32, 32), x.dtype, layout=shared_layout((32, 32), 32, 0))
  tt.copy(x, s)
  mine = tt.alloc_fragment((32, 32), x.dtype, layout=S[(32, (4, 8)):(1 @ lane, (1 @ warp, 1 @ reg))].layout((32, 32)))
  mine[...] = s[...]
  y[...] = mine[...]


def rows_kernel(x, y, *, columns):
  """Rows of odd length, brought by cp.async or through registers."""
  s = tt.alloc_shared((8, columns), x.dtype)
  tt.copy(x.at[tt.block(tt.program_id(0), 8), :], s)
  y[tt.block(tt.program_id(0), 8), :] = s[...] * 2


def gather_kernel(x, idx, y, *, shared):
  r = tt.block(tt.program_id(0), 16)
  if shared:
    s = tt.alloc_shared((16, x.shape[1]), x.dtype)
    tt.copy(x.at[idx[r], :], s)
    y[r, :] = s[...]
  else:
    y[idx[r], :] = x[idx[r], :]


def mma_sync() -> Subject:
  return gemm(64, 64, 64, bm=64, bn=64, bk=32, warpgroups=1, options=CompileOptions(force=(("gemm", "mma_sync"),)))


def gather(shared: bool, columns: int = 64) -> Subject:
  rng, x = np.random.default_rng(8), struct(64, columns)
  return Subject(lower(gather_kernel, [x, struct(64, dtype=I32)], x, grid=4, static={"shared": shared}),
                 (_array(rng, 64, columns, dtype=F32), rng.permutation(64).astype(I32)))


def gemm(m: int = 256, n: int = 128, k: int = 192, **call: Any) -> Subject:
  rng = np.random.default_rng(1)
  return Subject(matmul(m, n, k, **call), (_array(rng, m, k), _array(rng, k, n)))


def softmax(rows: int = 4, columns: int = 512, **call: Any) -> Subject:
  x = struct(4 * rows, columns, dtype=BF16)
  return Subject(lower(softmax_kernel, [x], x, grid=4, static={"rows": rows}, **call),
                 (_array(np.random.default_rng(2), 4 * rows, columns),))


def relayout() -> Subject:
  x, rng = struct(64, 64, dtype=BF16), np.random.default_rng(3)
  return Subject(lower(relayout_kernel, [x, x], x), (_array(rng, 64, 64), _array(rng, 64, 64)))


def columns() -> Subject:
  return Subject(lower(columns_kernel, [struct(32, 32)], struct(32, 32)),
                 (_array(np.random.default_rng(4), 32, 32, dtype=F32),))


def rows(columns: int = 36) -> Subject:
  x = struct(32, columns)
  return Subject(lower(rows_kernel, [x], x, grid=4, static={"columns": columns}),
                 (_array(np.random.default_rng(5), 32, columns, dtype=F32),))


SUBJECTS = {"gemm": gemm, "one_warpgroup": lambda: gemm(bm=64, warpgroups=1), "softmax": softmax,
            "wide_rows": lambda: softmax(rows=1, columns=1008, warpgroups=2), "relayout": relayout,
            "columns": columns, "rows": rows, "odd_rows": lambda: rows(35), "mma_sync": mma_sync,
            "gather": lambda: gather(False), "gather_copy": lambda: gather(True),
            "odd_gather_copy": lambda: gather(True, 35)}


LANES = (S[(4, 32):(1 @ warp, 1 @ lane)], S[(4, (2, 16)):(1 @ warp, (1 @ lane, 2 @ lane))])
REGISTERS = (S[((4, 32), 4):((1 @ warp, 1 @ lane), 1 @ reg)],
             S[((4, 32), (2, 2)):((1 @ warp, 1 @ lane), (1 @ reg, 2 @ reg))])


def converted(layouts: Any, dtype: Any = F32) -> Subject:
  """A value that is loaded in one layout and stored in another."""
  shape = (4, 32) if layouts is LANES else (128, 4)

  def kernel(x, y):
    first, second = (tt.alloc_fragment(shape, dtype, layout=s.layout(shape)) for s in layouts)
    first[...] = x[...]
    second[...] = first[...]
    y[...] = second[...]

  return Subject(lower(kernel, [struct(*shape, dtype=dtype)], struct(*shape, dtype=dtype)),
                 (_array(np.random.default_rng(6), *shape, dtype=dtype),))


def one_after_the_other() -> Subject:
  """Two buffers of 16 KiB, of which the first has been read when the second is written."""
  def kernel(x, y):
    for k in range(2):
      s = tt.alloc_shared((64, 64), x.dtype)
      s[...] = x[k] + 1
      y[k] = s[...].T

  x = struct(2, 64, 64)
  return Subject(lower(kernel, [x], x), (_array(np.random.default_rng(7), 2, 64, 64, dtype=F32),))
