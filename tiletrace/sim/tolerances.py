"""How far a result may be from another one: one table, by dtype and kind of computation.

Kinds:
  exact: integers, copies, casts, a single rounded operation: bit for bit.
  elementwise: a chain of a few elementwise operations, rounded once at the end.
  reduce: a sum or mean of up to some thousand elements, accumulated in f32.
  relative: one approximate operation, judged element by element however small.
  gemm: a matrix product, accumulated in f32.
  f8_gemm: one of 8-bit floats, whose sums keep about 14 bits in the tensor core.
  f16_gemm: one accumulated in f16.

A bound has two parts. The first is relative to the element: the rounding at the end (1 unit in the last place of an
8-bit or 16-bit type; dozens of an f32, for approximate instructions). The second is relative to the largest element of
the array and stands for what is lost in between, where sums cancel: it grows with their length, from elementwise to
gemm.
"""
from __future__ import annotations

import numpy as np

# (relative to the element, relative to the largest element of the reference)
_TABLE: dict[str, dict[str, tuple[float, float]]] = {
  "float64": {"elementwise": (1e-14, 1e-16), "reduce": (1e-14, 1e-15), "gemm": (1e-14, 1e-14),
              "f16_gemm": (2**-8, 2**-8)},
  "float32": {"relative": (4e-6, 0.0), "elementwise": (4e-6, 1e-7), "reduce": (1e-5, 1e-6), "gemm": (1e-5, 1e-5),
              "f8_gemm": (2**-9, 2**-10), "f16_gemm": (2**-8, 2**-8)},
  "float16": {"elementwise": (2**-10, 2**-24), "reduce": (2**-9, 2**-14), "gemm": (2**-9, 2**-12),
              "f16_gemm": (2**-8, 2**-8)},
  "bfloat16": {"elementwise": (2**-7, 1e-7), "reduce": (2**-7, 2**-12), "gemm": (2**-7, 2**-10),
               "f8_gemm": (2**-7, 2**-9), "f16_gemm": (2**-7, 2**-8)},
  "float8_e4m3fn": dict.fromkeys(("elementwise", "reduce", "gemm"), (2**-3, 2**-17)) | {"f16_gemm": (2**-3, 2**-8)},
  "float8_e5m2": dict.fromkeys(("elementwise", "reduce", "gemm"), (2**-2, 2**-31)) | {"f16_gemm": (2**-2, 2**-8)},
}


def tolerance(dtype: object, kind: str) -> tuple[float, float]:
  """(relative to the element, relative to the largest element of the reference)."""
  return (0.0, 0.0) if kind == "exact" else _TABLE[np.dtype(dtype).name][kind]  # type: ignore[arg-type]


def bounds(want: np.ndarray, dtype: np.dtype, kind: str) -> np.ndarray:
  """How far each element of a reference lets a result of `dtype` be from it; float64."""
  size = np.abs(want.astype(np.float64))
  relative, by_largest = tolerance(dtype, kind)
  finite = np.isfinite(size)
  return relative * np.where(finite, size, 0.0) + by_largest * size[finite].max(initial=0.0)
