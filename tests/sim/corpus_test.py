"""The corpus (tests/gpu), right as jax ops and on a GPU, assembled and in the simulator: right there too, no faults."""
from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.gpu.corpus import SIZED, build
from tests.gpu.whole_corpus import CASES
from tests.lowering.emit.corpus_test import LONG, check_cubin
from tests.tolerances import assert_close
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Form, Instr
from tiletrace.sim.compare import Comparison
from tiletrace.sim.launch import run
from tiletrace.stages import Lowered

NAMES = [n for n in CASES if n not in LONG]
# They wait for something: warps in other orders give the same.
WAITING = tuple(n for n in NAMES if n.startswith((
  "matmul_forms-", "matmul_warpgroups", "matmul_policies", "tails_by_stages", "tails_by_warpgroups", "columns-33")))
COMPARED = set(NAMES[::12])


@pytest.mark.parametrize("name", NAMES)
def test_the_corpus_assembles_is_right_and_has_no_faults(name: str):
  """Every twelfth also against itself as jax ops, as `tiletrace.check` compares: nothing is found in right kernels, nor
  left unjudged."""
  case = build(name)
  lowered = case.call.lower(*case.inputs)
  check_cubin(lowered)
  if name in SIZED:
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


def _instructions(lowered: Lowered) -> list[Form | Instr]:
  """With divisions for what those by a power of two become: how many tiles a row has is the size's."""
  [entry] = lowered.lowering.emitted.module.entries
  divisions = {isa.DIV: isa.DIV, isa.SHR: isa.DIV, isa.REM: isa.REM, isa.AND: isa.REM}
  return [divisions.get(inst.row, inst.form) for inst in entry.instructions()]


def _seeds(name: str) -> tuple[int, ...]:
  """Of one more order; neighbours, which differ in one parameter, have different ones."""
  return (1 + WAITING.index(name) % 3,) if name in WAITING else ()
