"""The PTX of the kernels over rows, run in step on the CPU."""
from __future__ import annotations

import pytest

from tests.gpu import corpus_kernels
from tests.gpu.corpus import CASES, build
from tests.lowering import lockstep
from tests.tolerances import assert_close

FULL = tuple("x".join(map(str, shape)) for shape in corpus_kernels.FULL)
NAMES = [name for name in CASES if name.startswith(("rms_norm", "layer_norm-", "softmax_")) and not name.endswith(FULL)]
NAMES = [name for name in NAMES if not name.startswith("rms_norm_silu")]        # a case of another corpus


@pytest.mark.parametrize("name", NAMES)
def test_ptx_gives_what_the_reference_gives(name):
  case = build(name)
  for got, want, kind in zip(lockstep.run(case.call.lower(*case.inputs), case), case.want, case.kinds(), strict=True):
    assert_close(got, want, kind, name)
