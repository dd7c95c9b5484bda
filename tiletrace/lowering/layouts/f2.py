"""Linear algebra over F2 on Python integers: a matrix is a sequence of columns, a column is an integer."""
from __future__ import annotations

from collections.abc import Iterable, Sequence


def log2(n: int) -> int:
  """Exponent of a power of two."""
  assert n > 0 and n & (n - 1) == 0, f"{n} is not a power of two"
  return n.bit_length() - 1


def bits_of(x: int) -> list[int]:
  """Positions of the one bits of `x`, lowest first."""
  return [i for i in range(x.bit_length()) if x >> i & 1]


def rank(columns: Iterable[int]) -> int:
  basis: list[int] = []
  for v in columns:
    for b in basis:
      v = min(v, v ^ b)
    if v:
      basis.append(v)
  return len(basis)


def apply(columns: Sequence[int], x: int) -> int:
  """The matrix times the vector `x`."""
  y = 0
  for i in bits_of(x):
    y ^= columns[i]
  return y


def echelon(columns: Sequence[int]) -> tuple[dict[int, tuple[int, int]], list[int]]:
  """Reduced echelon form: pivot bit -> (vector, the columns that sum to it), and a basis of the kernel."""
  pivots: dict[int, tuple[int, int]] = {}
  kernel: list[int] = []
  for i, column in enumerate(columns):
    v, combination = column, 1 << i
    for p, (w, c) in pivots.items():
      if v >> p & 1:
        v, combination = v ^ w, combination ^ c
    if not v:
      kernel.append(combination)
      continue
    p = v.bit_length() - 1
    for q, (w, c) in pivots.items():
      if w >> p & 1:
        pivots[q] = (w ^ v, c ^ combination)
    pivots[p] = (v, combination)
  return pivots, kernel


def kernel(columns: Sequence[int]) -> list[int]:
  """A basis of the inputs that map to zero."""
  return echelon(columns)[1]


def solve(pivots: dict[int, tuple[int, int]], target: int) -> int | None:
  """The combination of columns that sums to `target` (free inputs zero), or None; `pivots` is from `echelon`."""
  combination = 0
  for p, (w, c) in pivots.items():
    if target >> p & 1:
      target, combination = target ^ w, combination ^ c
  return None if target else combination
