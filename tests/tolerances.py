"""How far a result may be from a float64 reference: one table, by dtype and kind of computation.

Kinds:
  exact: integers, copies, casts, a single rounded operation: bit for bit.
  elementwise: a chain of a few elementwise operations, rounded once at the end.
  reduce: a sum or mean of up to some thousand elements, accumulated in f32.
  relative: one approximate operation, judged element by element however small.
  gemm: a matrix product of 16-bit or 8-bit operands, accumulated in f32.
"""
from __future__ import annotations

import ml_dtypes
import numpy as np

# (relative to the element, relative to the largest element of the reference)
_TABLE: dict[str, dict[str, tuple[float, float]]] = {
  "float32": {"relative": (4e-6, 0.0), "elementwise": (4e-6, 1e-7), "reduce": (1e-5, 1e-6), "gemm": (1e-5, 1e-5)},
  "float16": {"elementwise": (2**-10, 2**-24), "reduce": (2**-9, 2**-14), "gemm": (2**-9, 2**-12)},
  "bfloat16": {"elementwise": (2**-7, 1e-7), "reduce": (2**-7, 2**-12), "gemm": (2**-7, 2**-10)},
}


def tolerance(dtype: object, kind: str) -> tuple[float, float]:
  """(relative to the element, relative to the largest element)."""
  return (0.0, 0.0) if kind == "exact" else _TABLE[np.dtype(dtype).name][kind]


def assert_close(got: object, want: object, kind: str, what: str = "") -> None:
  """`got` has the dtype that is judged; `want` is the reference, float64 or exact. NaN equals NaN only."""
  got, want = np.asarray(got), np.asarray(want)
  assert got.shape == want.shape, (got.shape, want.shape)
  if kind == "exact":
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
  rtol, by_largest = tolerance(got.dtype, kind)
  if got.dtype == ml_dtypes.bfloat16 or got.dtype.kind == "f":
    got, want = got.astype(np.float64), want.astype(np.float64)
  finite = np.abs(want[np.isfinite(want)]) if want.dtype.kind == "f" else np.zeros(0)
  np.testing.assert_allclose(got, want, rtol=rtol, atol=by_largest * finite.max(initial=0.0), err_msg=what)
