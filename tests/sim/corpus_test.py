"""The corpus (tests/gpu), right as jax ops and on a GPU, in the simulator: right there too, and no faults."""
from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.gpu.corpus import Case, build
from tests.gpu.whole_corpus import CASES
from tests.tolerances import assert_close
from tiletrace.sim.compare import Comparison
from tiletrace.sim.launch import run


def check(name: str, case: Case, seed: int) -> None:
  lowered = case.call.lower(*case.inputs)
  result = run(lowered.lowering, [np.asarray(x) for x in jax.tree.leaves(case.inputs)], seed=seed)

  assert not result.faults, "\n".join(map(str, result.faults))
  for n, (got, want, kind) in enumerate(zip(result.outputs, case.want, case.kinds(), strict=True)):
    assert_close(got, want, kind, f"{name}, output {n}")


@pytest.mark.parametrize("name", CASES)
def test_the_corpus_is_right_and_has_no_faults(name: str):
  check(name, build(name), seed=0)


@pytest.mark.parametrize("name", list(CASES)[::12])
def test_the_corpus_agrees_with_itself_as_jax_ops(name: str):
  """As `tiletrace.check` compares them: nothing is found in right kernels, nor left unjudged."""
  case = build(name)
  lowered = case.call.lower(*case.inputs)
  inputs = [np.asarray(x) for x in jax.tree.leaves(case.inputs)]
  comparison = Comparison(lowered.lowering, lowered.program.graph)
  assert comparison.why_not() is None
  faults, notes = comparison.compare(inputs, [run(lowered.lowering, inputs).outputs])

  assert not faults, str(faults[0])
  assert not [note for note in notes if "not judged" in note]


# Every family that waits for something, under schedules that reorder warps.
@pytest.mark.parametrize("seed", (1, 2, 3))
@pytest.mark.parametrize("name", [n for n in CASES if n.startswith((
  "matmul_forms-", "matmul_warpgroups", "matmul_policies", "tails_by_stages", "tails_by_warpgroups", "columns-33"))])
def test_other_schedules_give_the_same(name: str, seed: int):
  check(name, build(name), seed)
