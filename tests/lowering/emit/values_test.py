"""The numbers of compiled kernels: the PTX of the corpus, run on the CPU with all threads in step.

This also finds accesses outside arrays, misaligned ones, and shared memory that warps use without a sync between.
Kernels with a producer warpgroup or wgmma need a GPU (tests/gpu).
"""
from __future__ import annotations

import numpy as np
import pytest

from tests.gpu import corpus_control, corpus_elementwise, corpus_memory
from tests.gpu.corpus import CASES, build
from tests.lowering import lockstep
from tests.tolerances import assert_close

_PIPELINED = ("copies_between_spaces", "pipelined_copies_without_a_gemm", "copies_of_odd_blocks-40",
              "copies_of_odd_blocks-36", "rings_of_small_slots", "copies_of_transposed_views",
              "rings_that_threads_read")
NAMES = [name for name in CASES if not name.startswith(_PIPELINED) and any(
  name.partition("-")[0] in vars(m) for m in (corpus_control, corpus_elementwise, corpus_memory))]


@pytest.mark.parametrize("name", NAMES)
def test_the_ptx_computes_the_reference(name: str) -> None:
  case = build(name)
  got = lockstep.run(case.call.lower(*case.inputs), case)
  assert len(got) == len(case.want)
  for n, (g, want, kind) in enumerate(zip(got, case.want, case.kinds())):
    assert_close(np.asarray(g), want, kind, f"{name}, output {n}")
