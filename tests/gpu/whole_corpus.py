"""All cases, in the order of their modules: each registers its own."""
from __future__ import annotations

from tests.gpu import (  # noqa: F401
  corpus_control,
  corpus_elementwise,
  corpus_gemm,
  corpus_indexed,
  corpus_kernels,
  corpus_memory,
  corpus_narrow,
  corpus_reduce,
  corpus_tails,
)
from tests.gpu.corpus import CASES

__all__ = ["CASES"]
