"""A CTA may not end, and its shared memory with it, before its neighbours are done there: in any schedule."""
from __future__ import annotations

import numpy as np
import pytest

from tests.sim.small import Outcome, Small
from tiletrace.lowering.ptx import isa


def push(barriers: tuple[str, ...], seed: int) -> Outcome:
  """Each CTA stores into its neighbour's shared memory, and then meets it at cluster barriers.

  Args:
    barriers: "both" for an arrival and a wait, "arrive" where only the first of both is made by CTA 1.
  """
  k = Small(threads=32, smem=128, ctas=2, cluster=True)
  b, rank = k.b, k.b.special("cluster_ctarank")
  other = b.new(isa.MAPA, k.smem, b.new(isa.XOR, rank, 1, type="b32"))
  b(isa.ST_CLUSTER, b.addr(b.new(isa.MAD_LO, k.tid, 4, other, type="u32")), k.at, type="u32")
  end = b.label("end")
  for barrier in barriers:
    b(isa.CLUSTER_ARRIVE, sem="release", aligned="aligned")
    if barrier == "arrive":
      b(isa.BRA, end, pred=k.compare("eq", rank, 1))
    b(isa.CLUSTER_WAIT, sem="acquire", aligned="aligned")
  b.place(end)
  return k.end().run(seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_cluster_barrier_keeps_shared_memory_until_all_are_done(seed):
  assert not push(("both",), seed).faults


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("barriers", [(), ("arrive",)])
def test_without_it_a_cta_may_end_too_early(barriers, seed):
  [fault] = push(barriers, seed).faults

  assert fault.kind == "out of bounds"
  assert "ended" in fault.text or "may end" in fault.text


@pytest.mark.parametrize("seed", range(4))
def test_what_a_cta_does_to_itself_needs_no_barrier(seed):
  k = Small(threads=32, smem=128, ctas=2, cluster=True)
  own = k.b.new(isa.MAPA, k.smem, k.b.special("cluster_ctarank"))
  k.b(isa.ST_CLUSTER, k.b.addr(k.b.new(isa.MAD_LO, k.tid, 4, own, type="u32")), k.at, type="u32")
  k.store(k.b.new(isa.LD_SHARED, k.shared(4), type="u32"))
  got = k.end().run(seed=seed)

  assert not got.faults, str(got.faults[0])
  np.testing.assert_array_equal(got.y, np.arange(64))
