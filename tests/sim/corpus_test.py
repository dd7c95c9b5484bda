"""The corpus (tests/gpu), right as jax ops and on a GPU, assembled and in the simulator: right there too, no faults."""
from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.gpu.corpus import build
from tests.gpu.whole_corpus import CASES
from tests.lowering.emit.corpus_test import LONG, check_cubin
from tests.tolerances import assert_close
from tiletrace.lowering.ptx.instr import Form
from tiletrace.sim.compare import Comparison
from tiletrace.sim.launch import run
from tiletrace.stages import Lowered

NAMES = [n for n in CASES if n not in LONG]
# They wait for something: warps in other orders give the same.
WAITING = tuple(n for n in NAMES if n.startswith((
  "matmul_forms-", "matmul_warpgroups", "matmul_policies", "tails_by_stages", "tails_by_warpgroups", "columns-33")))
COMPARED = set(NAMES[::12])
# What fills a GPU, or is more than it has SMs, is run as fewer programs of the same instructions: two SMs have several
# each.
SMALL = {n for n in NAMES if n.endswith("-260x8192") or n.startswith((
  "trip_counts_by_data-persistent", "ragged_sums_that_take_their_programs-300",
  "matmul_that_takes_its_tiles-700", "matmul_by_threads_that_takes_its_tiles", "rows_of_a_persistent_kernel"))}


@pytest.mark.parametrize("name", NAMES)
def test_the_corpus_assembles_is_right_and_has_no_faults(name: str):
  """Every twelfth also against itself as jax ops, as `tiletrace.check` compares: nothing is found in right kernels, nor
  left unjudged."""
  case = build(name)
  lowered = case.call.lower(*case.inputs)
  check_cubin(lowered)
  if name in SMALL:
    case, full = build(name, small=True), lowered
    lowered = case.call.lower(*case.inputs)
    assert _instructions(lowered) == _instructions(full)
  inputs = [np.asarray(x) for x in jax.tree.leaves(case.inputs)]
  runs = [run(lowered.lowering, inputs, seed=seed) for seed in (0, *_seeds(name))]
  for result in runs:
    assert not result.faults, "\n".join(map(str, result.faults))
    for n, (got, want, kind) in enumerate(zip(result.outputs, case.want, case.kinds(), strict=True)):
      assert_close(got, want, kind, f"{name}, output {n}")
  if name in COMPARED:
    comparison = Comparison(lowered.lowering, lowered.program.graph)
    assert comparison.why_not() is None
    faults, notes = comparison.compare(inputs, [runs[0].outputs])
    assert not faults, str(faults[0])
    assert not [note for note in notes if "not judged" in note]


def _instructions(lowered: Lowered) -> list[Form]:
  [entry] = lowered.lowering.emitted.module.entries
  return [inst.form for inst in entry.instructions()]


def _seeds(name: str) -> tuple[int, ...]:
  """Of one more order; neighbours, which differ in one parameter, have different ones."""
  return (1 + WAITING.index(name) % 3,) if name in WAITING else ()
