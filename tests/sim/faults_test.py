"""Every injected fault is found and named by the simulator; the same modules without faults have none."""
from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.sim import inject_cluster  # noqa: F401  (it registers)
from tests.sim.inject import FAULTS, WRONG_RESULT, Fault
from tests.sim.subjects import SUBJECTS, case, lowered, with_module
from tests.tolerances import assert_close
from tiletrace.sim.faults import KINDS
from tiletrace.sim.launch import Result, run
from tiletrace.sim.program import SimulatorInputError
from tiletrace.stages import Lowered

SEEDS = (0, 1, 2)            # of schedules: a fault must show in one of them
CLEAN_SEEDS = range(6)
MOST_STEPS = 100_000         # ten times what the longest subject takes


def simulate(kernel: Lowered, name: str, seed: int) -> Result:
  return run(kernel.lowering, [np.asarray(x) for x in case(name).inputs], seed=seed, most_steps=MOST_STEPS)


def is_right(result: Result, name: str) -> bool:
  subject = case(name)
  try:
    for got, want, kind in zip(result.outputs, subject.want, subject.kinds(), strict=True):
      assert_close(got, want, kind)
  except AssertionError:
    return False
  return True


@functools.cache
def found(fault: Fault) -> tuple[str, ...]:
  """What is found under the first seed that finds anything, in order; or "wrong result"."""
  kernel = with_module(fault.subject, fault.module())
  for seed in SEEDS:
    result = simulate(kernel, fault.subject, seed)
    if result.faults:
      return tuple(dict.fromkeys(f.kind for f in result.faults))
    if not is_right(result, fault.subject):
      return (WRONG_RESULT,)
  return ()


@pytest.mark.parametrize("seed", CLEAN_SEEDS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_without_a_fault_nothing_is_found_and_the_result_is_right(name, seed):
  result = simulate(lowered(name), name, seed)

  assert not result.faults, "\n".join(map(str, result.faults))
  assert is_right(result, name)
  assert result.steps < MOST_STEPS / 5


@pytest.mark.parametrize("name", [f.name for f in FAULTS.values() if f.kinds])
def test_the_fault_is_found_and_named(name):
  fault = FAULTS[name]

  assert found(fault)[:1] and found(fault)[0] in fault.kinds, found(fault)


@pytest.mark.parametrize("name", [f.name for f in FAULTS.values() if f.lint])
def test_what_the_lint_sees_does_not_run(name):
  fault = FAULTS[name]
  with pytest.raises(SimulatorInputError, match=f"lint: {fault.lint}"):
    simulate(with_module(fault.subject, fault.module()), fault.subject, 0)


def test_the_kinds_are_the_simulators():
  assert {k for f in FAULTS.values() for k in f.kinds} <= {*KINDS, WRONG_RESULT}


def test_most_faults_are_named_by_more_than_a_wrong_result():
  assert sum(found(f) == (WRONG_RESULT,) for f in FAULTS.values() if f.kinds) <= 3


def test_a_finding_says_where():
  """The kernel, both instructions with their Python lines, threads and addresses."""
  fault = FAULTS["staged_results_are_not_fenced"]
  [first, *_] = simulate(with_module(fault.subject, fault.module()), fault.subject, 0).faults

  assert first.kernel == "matmul_kernel"
  assert first.place is not None and "cp.async.bulk.tensor" in first.place.text
  assert first.other is not None and "stmatrix" in first.other.text
  assert all(p.loc is not None and "matmul_kernel" in str(p.loc) for p in (first.place, first.other))
  assert first.threads and first.addresses
