"""Every kernel of the corpus becomes PTX that ptxas takes without spills and without serialised wgmma."""
from __future__ import annotations

import pytest

from tests.gpu.corpus import build
from tests.gpu.whole_corpus import CASES
from tests.lowering.kernels import assemble


@pytest.mark.parametrize("name", CASES)
def test_it_assembles(name: str) -> None:
  case = build(name)
  cubin = assemble(case.call.lower(*case.inputs))
  assert cubin.image[:4] == b"\x7fELF"
  assert (cubin.spill_stores, cubin.spill_loads) == (0, 0)
  assert not [w for w in cubin.warnings if "C75" in w]
