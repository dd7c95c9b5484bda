from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu import corpus_reduce
from tests.gpu.corpus import CASES, build
from tests.lowering import lockstep
from tests.lowering.kernels import BF16, F32, I32, assemble, lower, notes, struct
from tests.tolerances import assert_close

SIMULATED = [name for name in CASES if name.partition("-")[0] in vars(corpus_reduce)
             and not name.startswith(("attention", "accumulator_sums"))]


@pytest.mark.parametrize("name", SIMULATED)
def test_the_ptx_computes_the_reference_when_its_threads_are_run_in_step(name):
  case = build(name)
  got = lockstep.run(case.call.lower(*case.inputs), case)
  for n, (g, want, kind) in enumerate(zip(got, case.want, case.kinds(), strict=True)):
    assert_close(g, want, kind, f"{name}, output {n}")
