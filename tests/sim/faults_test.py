"""Every injected fault is found and named by the simulator; the same modules without faults have none."""
from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.sim import inject_cluster, inject_mail, inject_tiles  # noqa: F401  (they register)
from tests.sim.inject import FAULTS, WRONG_RESULT, Fault
from tests.sim.subjects import SUBJECTS, case, lowered, with_module
from tests.tolerances import assert_close
from tiletrace.sim.compare import Comparison
from tiletrace.sim.faults import KINDS, Fault as Finding
from tiletrace.sim.launch import Result, run
from tiletrace.sim.program import SimulatorInputError
from tiletrace.stages import Lowered

SEEDS = (0, 1, 2)            # of schedules: a fault must show in one of them
CLEAN_SEEDS = range(6)
MOST_STEPS = 100_000         # ten times what the longest subject takes


def simulate(kernel: Lowered, name: str, seed: int, *, first_only: bool = False) -> Result:
  return run(kernel.lowering, [np.asarray(x) for x in case(name).inputs], seed=seed, most_steps=MOST_STEPS,
             first_only=first_only)


def is_right(result: Result, name: str) -> bool:
  subject = case(name)
  try:
    for got, want, kind in zip(result.outputs, subject.want, subject.kinds(), strict=True):
      assert_close(got, want, kind)
  except AssertionError:
    return False
  return True


def compared(kernel: Lowered, result: Result, name: str) -> list[Finding]:
  """What the comparison with the kernel as jax ops finds."""
  faults, notes = Comparison(kernel.lowering, kernel.program.graph).compare(
      [np.asarray(x) for x in case(name).inputs], [result.outputs])
  assert not notes
  return faults


@functools.cache
def findings(fault: Fault) -> tuple[Finding, ...]:
  """What `tiletrace.check` finds under the first seed that finds anything."""
  kernel = with_module(fault.subject, fault.module())
  for seed in SEEDS:
    result = simulate(kernel, fault.subject, seed)
    if result.faults:
      return result.faults
    if not is_right(result, fault.subject):
      return tuple(compared(kernel, result, fault.subject))
  return ()


def found(fault: Fault) -> tuple[str, ...]:
  """The kinds, in order."""
  return tuple(dict.fromkeys(f.kind for f in findings(fault)))


@pytest.mark.parametrize("seed", CLEAN_SEEDS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_without_a_fault_nothing_is_found_and_the_result_is_right(name, seed):
  result = simulate(lowered(name), name, seed)

  assert not result.faults, "\n".join(map(str, result.faults))
  assert is_right(result, name)
  assert seed or not compared(lowered(name), result, name)
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
  assert {k for f in FAULTS.values() for k in f.kinds} <= {*KINDS}


def test_most_faults_are_named_by_more_than_a_wrong_result():
  assert sum(found(f) == (WRONG_RESULT,) for f in FAULTS.values() if f.kinds) <= 3


@pytest.mark.parametrize("name", [f.name for f in FAULTS.values() if WRONG_RESULT in f.kinds])
def test_a_wrong_result_says_which_elements_and_where_they_are_stored(name):
  [first] = findings(FAULTS[name])
  [want] = case(FAULTS[name].subject).want
  assert first.difference is not None and first.place is not None and first.place.loc is not None

  found = first.difference
  assert (found.output, found.dtype, found.shape) == ("c", "bfloat16", want.shape)
  assert found.count > want.size / 4 and found.error > 1
  assert abs(found.want - want[found.first]) <= found.bound < abs(found.got - want[found.first])
  assert f"{found.count} of {want.size} elements of c" in str(first) and "(kernel matmul_kernel)" in str(first)
  assert "c[tt.block(i, bm), tt.block(j, bn)] = " in str(first) and first.place.text.startswith("cp.async.bulk.tensor")


def test_a_finding_says_where():
  """The kernel, both instructions with their Python lines, threads and addresses."""
  fault = FAULTS["staged_results_are_not_fenced"]
  [first, *_] = simulate(with_module(fault.subject, fault.module()), fault.subject, 0).faults

  assert first.kernel == "matmul_kernel"
  assert first.place is not None and "cp.async.bulk.tensor" in first.place.text
  assert first.other is not None and "stmatrix" in first.other.text
  assert all(p.loc is not None and "matmul_kernel" in str(p.loc) for p in (first.place, first.other))
  assert first.threads and first.addresses
