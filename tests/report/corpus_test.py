"""The report of kernels of all kinds: what is certain of their accesses is what the simulator counts."""
from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.gpu.corpus import build
from tests.gpu.whole_corpus import CASES
from tiletrace.sim.launch import run


@pytest.mark.parametrize("name", list(CASES)[5::17])
def test_wavefronts_and_flops_of_the_corpus_are_those_of_the_simulator(name: str):
  case = build(name)
  lowered = case.call.lower(*case.inputs)
  report = lowered.report()
  data = report.data

  assert str(report) and report.json()
  certain = all(a["exact"] for o in data["ops"] for a in o["accesses"]) and data["work"]["exact"]
  atomic = any(o["op"].startswith("atomic") for o in data["ops"])       # listed without accesses
  if not certain or atomic or data["occupancy"]["persistent"]:
    return
  inputs = [np.asarray(x) for x in jax.tree.leaves(case.inputs)]
  counters = run(lowered.lowering, inputs, counters=True, races=False).counters
  assert counters is not None
  assert (data["work"]["wavefronts"], data["work"]["least_wavefronts"]) == (counters.wavefronts, counters.ideal)
  if not any(o["variant"] == "mma_sync" for o in data["ops"]):          # its instructions round rows up to 16
    assert data["cost"]["flops"] == counters.flops
