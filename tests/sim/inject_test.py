"""Injected faults change the module, and leave it a module that ptxas takes unless the lint sees the fault already."""
from __future__ import annotations

import pytest

from tests.sim import inject_cluster, inject_mail, inject_tiles  # noqa: F401  (they register)
from tests.sim.inject import FAULTS, NoSuchPlace
from tests.sim.subjects import SUBJECTS, lowered, module_copy
from tiletrace.lowering.assemble import AssembleOptions, run_ptxas
from tiletrace.lowering.ptx.lint import lint

FLAGS = ("-O0", *[f for f in AssembleOptions().flags("sm_90a") if f != "-O3"])


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_copied_module_is_the_subject(name):
  assert module_copy(name).render() == lowered(name).as_text("ptx")


@pytest.mark.parametrize("name", FAULTS)
def test_the_module_is_changed_and_assembles(name):
  fault = FAULTS[name]
  module = fault.module()
  text = module.render()
  assert text != lowered(fault.subject).as_text("ptx")

  found = {f.kind for f in lint(module) if not f.warning}
  assert found == ({fault.lint} if fault.lint else set())
  assert run_ptxas(text, FLAGS).image[:4] == b"\x7fELF"


def test_the_subject_is_left_as_it_was():
  before = lowered("gemm").as_text("ptx")
  FAULTS["full_is_not_waited_for"].module()
  assert lowered("gemm").lowering.emitted.module.render() == before


def test_a_module_without_the_place_is_refused():
  fault = FAULTS["staged_results_are_not_fenced"]
  with pytest.raises(NoSuchPlace, match="no producer and consumers"):
    type(fault)(fault.name, "tails", fault.kinds, fault.lint, fault.apply).module()


def test_every_fault_is_described_and_there_are_enough():
  assert all(f.apply.__doc__ for f in FAULTS.values())
  assert all(bool(f.kinds) != bool(f.lint) for f in FAULTS.values())
  assert len(FAULTS) >= 24
