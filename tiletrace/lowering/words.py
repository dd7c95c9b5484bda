"""How elements share the 32-bit registers of a thread: four of 8 bits, two of 16 bits, one of anything else."""
from __future__ import annotations

import numpy as np

from tiletrace.core import dtypes


def per_word(dtype: np.dtype) -> int:
  """Elements in one register, the first in its low bits. A bool is a predicate, which holds one."""
  return 1 if dtype == dtypes.bool_ else max(1, 4 // dtype.itemsize)


def num_words(dtype: np.dtype, count: int) -> int:
  """Registers that hold `count` elements; the upper parts of the last may be unused."""
  return -(-count // per_word(dtype))
