"""Faults of clusters: multicast, arrivals at other CTAs' barriers, the cluster's own barrier (see inject.py)."""
from __future__ import annotations

from tests.gpu.corpus_gemm import matmul
from tests.sim.inject import DEADLOCK, NOT_WAITED, OVERWRITTEN, WRONG_RESULT, fault
from tests.sim.subjects import subject
from tiletrace.lowering.ptx import isa


@subject
def gemm_of_clusters(rng):
  """Two CTAs with one tile of B: each loads half of it for both, and releases its slots in both."""
  return matmul(rng, 512, 128, 320, bn=128, cluster=(2, 1))


@fault("gemm_of_clusters", DEADLOCK)
def multicast_reaches_one_cta_only(e):
  """The mask names the first CTA; the bytes that the second one expects go nowhere."""
  load = e.find(isa.TMA_LOAD_MULTICAST)[0]
  e.change(e.definition(e.get(load, "mask"), load), a=1)


@fault("gemm_of_clusters", NOT_WAITED)
def both_ctas_fill_the_same_half(e):
  """The destination does not depend on the rank: two copies in flight write the same bytes."""
  load = e.find(isa.TMA_LOAD_MULTICAST)[0]
  e.change(e.definition(e.get(load, "dst").base, load), b=0)


@fault("gemm_of_clusters", WRONG_RESULT)
def both_ctas_load_the_same_half(e):
  """The coordinate does not depend on the rank."""
  load = e.find(isa.TMA_LOAD_MULTICAST)[0]
  e.change(e.definition(e.get(load, "coords")[0], load), b=0)


@fault("gemm_of_clusters", NOT_WAITED)
def the_bytes_of_the_other_cta_are_not_expected(e):
  """Each CTA expects what it loads itself, not what it gets."""
  [arrive] = e.find(isa.MBARRIER_ARRIVE_EXPECT_TX)
  e.change(arrive, tx=e.get(arrive, "tx") - 64 * 64 * 2)


@fault("gemm_of_clusters", "barrier count", OVERWRITTEN)
def empty_counts_the_own_consumers_only(e):
  """A slot is filled in both CTAs when the consumers of either have released it."""
  for init in e.find(isa.MBARRIER_INIT, where=lambda i: e.get(i, "count") == 4):
    e.change(init, count=2)


@fault("gemm_of_clusters", OVERWRITTEN, NOT_WAITED)
def slots_are_released_in_the_own_cta_only(e):
  """All arrivals go to the own barrier: the count is right, the other CTA's consumers are not waited for."""
  rank = next(i for i in e.find(isa.MOV_SREG) if str(e.get(i, "a")) == "%cluster_ctarank")
  for mapa in e.find(isa.MAPA):
    e.change(mapa, rank=e.get(rank, "d"))


@fault("gemm_of_clusters", "mbarrier initialisation not visible")
def the_cluster_starts_without_its_barrier(e):
  """A CTA copies to its neighbour and arrives there before that one has initialised its mbarriers."""
  e.replace(e.find(isa.CLUSTER_ARRIVE)[0], isa.BAR_SYNC_ALL, 0)
  e.drop(e.find(isa.CLUSTER_WAIT)[0])


@fault("gemm_of_clusters", "out of bounds")
def the_cluster_ends_without_its_barrier(e):
  """A CTA ends while its neighbour still arrives at its mbarriers."""
  e.drop(e.find(isa.CLUSTER_ARRIVE)[-1], e.find(isa.CLUSTER_WAIT)[-1])
