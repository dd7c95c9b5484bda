"""Every kernel of the corpus becomes PTX that ptxas takes without spills and without serialised wgmma: those that are
simulated in tests/sim/corpus_test.py, the others here."""
from __future__ import annotations

import pytest

from tests.gpu.corpus import build
from tests.gpu.corpus_kernels import FULL
from tests.gpu.whole_corpus import CASES
from tests.lowering.kernels import assemble
from tiletrace.stages import Lowered

# Rows that fill a GPU are hundreds or thousands of programs alike: those of one width are simulated.
LONG = [n for n in CASES if n.endswith(tuple(f"-{rows}x{width}" for rows, width in FULL if width != 8192))]


def check_cubin(lowered: Lowered) -> None:
  cubin = assemble(lowered)
  assert cubin.image[:4] == b"\x7fELF"
  assert (cubin.spill_stores, cubin.spill_loads) == (0, 0)
  assert not [w for w in cubin.warnings if "C75" in w]


@pytest.mark.parametrize("name", LONG)
def test_it_assembles(name: str) -> None:
  case = build(name)
  check_cubin(case.call.lower(*case.inputs))
