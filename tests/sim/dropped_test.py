"""Every single synchronisation of the subjects' modules is needed, or it is known why not.

Each barrier, fence, arrival, wait, commit and setmaxnreg is left out alone. Either the simulator finds the fault, or
the instruction is in `REDUNDANT`. A new survivor is a fault that the simulator misses, or code that the compiler need
not emit.
"""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sim import inject_cluster, inject_mail, inject_tiles  # noqa: F401  (their subjects)
from tests.sim.edit import Edit
from tests.sim.faults_test import SEEDS, is_right, simulate
from tests.sim.subjects import SUBJECTS, module_copy, with_module
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Inst

SYNCHRONISING = (
    isa.BAR_SYNC, isa.BAR_SYNC_ALL, isa.BAR_ARRIVE, isa.BAR_WARP_SYNC, isa.FENCE_PROXY_ASYNC, isa.FENCE_MBARRIER_INIT,
    isa.MBARRIER_INIT, isa.MBARRIER_ARRIVE, isa.MBARRIER_ARRIVE_COUNT, isa.MBARRIER_ARRIVE_EXPECT_TX,
    isa.MBARRIER_ARRIVE_CLUSTER, isa.CLUSTER_ARRIVE, isa.CLUSTER_WAIT, isa.WGMMA_FENCE, isa.WGMMA_COMMIT,
    isa.WGMMA_WAIT, isa.BULK_COMMIT, isa.BULK_WAIT, isa.CP_ASYNC_COMMIT, isa.CP_ASYNC_WAIT_GROUP,
    isa.CP_ASYNC_MBARRIER_ARRIVE, isa.SETMAXNREG)

# Either fence makes the initialisation of mbarriers visible to TMA.
_INIT = {"fence.mbarrier_init.release.cluster 0", "fence.proxy.async 0"}
# Without it the consumers keep what they have, which nothing but ptxas can tell to be too little.
_REGISTERS = {"setmaxnreg 1"}
# The staging buffer's first use waits for stores that only a persistent kernel has made before.
_FIRST_STAGING = {"cp.async.bulk.wait_group 0", "bar.sync 1"}
REDUNDANT: dict[str, set[str]] = {
    # the last arrival: no push follows
    "gemm": {*_INIT, *_REGISTERS, *_FIRST_STAGING, "mbarrier.arrive 1"},
    # the peeled first iteration waits for one group of one; its successors' fences follow no write of a register
    "persistent_gemm": {*_INIT, *_REGISTERS, "wgmma.wait_group.sync.aligned 0", "wgmma.fence.sync.aligned 1",
                        "wgmma.fence.sync.aligned 2"},
    "gemm_by_data": _INIT,
    # one block a tile: the first iteration is the last
    "taken_gemm": {*_INIT, *_REGISTERS, "wgmma.wait_group.sync.aligned 0", "mbarrier.arrive 1"},
    # a tile has more blocks than the ring has slots: one that is free says that the tile before last was read, too
    "taken_gemm_by_cp_async": {*_INIT, "mbarrier wait 1"},
    "gemm_of_clusters": {*_INIT, *_REGISTERS, "cp.async.bulk.wait_group 0", "bar.sync 0",
                         "mbarrier.arrive.shared::cluster.b64 1"},
    "gemm_by_cp_async": {*_INIT, *_REGISTERS, "mbarrier.arrive 3"},
    "gemm_from_registers": {*_INIT, "mbarrier.arrive 2"},
    # the first push finds its slot free, and the last pops, after the loop, free theirs for nobody
    "attention": {*_INIT, *_REGISTERS, *_FIRST_STAGING, "mbarrier wait 0", "mbarrier.arrive 2", "mbarrier.arrive 3"},
    # the wait for wgmma already keeps the next stores behind its reads
    "gemm_of_written_operands": {"bar.sync 0"},
}


def synchronisations(e: Edit) -> Iterator[tuple[str, Inst]]:
  """(opcode and which of them, the instruction); for a wait for an mbarrier the branch back to it."""
  counts: dict[str, int] = {}
  before = None
  for inst in e.part("all"):
    waits = before is not None and before.row is isa.MBARRIER_TRY_WAIT and inst.row is isa.BRA
    if waits or inst.row in SYNCHRONISING:
      opcode = "mbarrier wait" if waits else inst.row.opcode
      counts[opcode] = counts.get(opcode, -1) + 1
      yield f"{opcode} {counts[opcode]}", inst
    before = inst


def is_found(subject: str, which: str) -> bool:
  """Whether leaving it out is found under any seed."""
  module = module_copy(subject)
  e = Edit(module)
  e.drop(dict(synchronisations(e))[which])
  kernel = with_module(subject, module)
  results = (simulate(kernel, subject, seed, first_only=True) for seed in SEEDS)
  return any(r.faults or not is_right(r, subject) for r in results)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_is_left_out_is_found(subject):
  every = [which for which, _ in synchronisations(Edit(module_copy(subject)))]

  assert {which for which in every if not is_found(subject, which)} == REDUNDANT.get(subject, set())


def test_what_is_called_redundant_is_there():
  for subject, names in REDUNDANT.items():
    assert names <= {which for which, _ in synchronisations(Edit(module_copy(subject)))}
