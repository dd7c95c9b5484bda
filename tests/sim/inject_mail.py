"""Faults of scalars that consumers send to their producer through shared memory (see inject.py)."""
from __future__ import annotations

import numpy as np

import tiletrace as tt
from tests.gpu.corpus import Case, f64, normal, out
from tests.gpu.corpus_control import BF16, blocks_by_data_kernel
from tests.sim.inject import DEADLOCK, RACE, fault
from tests.sim.subjects import subject
from tiletrace.lowering.ptx import isa


@subject
def gemm_by_data(rng):
  """Each tile has its own range of blocks, some of them none: the end is sent to the producer; two CTAs."""
  a, b = normal(rng, 640, 320, dtype=BF16), normal(rng, 320, 128, dtype=BF16)
  limits = np.asarray([(0, 0, 1, 0, 0, 0, 3, 4, 0, 0), (5, 0, 4, 0, 1, 0, 3, 5, 0, 2)], np.int32)
  want = np.concatenate([f64(a)[64 * i:64 * i + 64, 64 * lo:64 * hi] @ f64(b)[64 * lo:64 * hi]
                         for i, (lo, hi) in enumerate(limits.T)])
  call = tt.tile_call(blocks_by_data_kernel, out(((640, 128), np.float32)), grid=10, persistent=True)
  return Case(call, (a, b, limits), (want,), "gemm")


@fault("gemm_by_data", RACE, DEADLOCK)
def a_scalar_is_not_waited_for(e):
  """The producer reads the place before the consumers wrote it."""
  wait = e.find(isa.MBARRIER_TRY_WAIT, part="producer")[0]
  e.drop(e.find(isa.BRA, part="producer", after=wait)[0])


@fault("gemm_by_data", RACE)
def a_scalar_is_overwritten_before_it_is_read(e):
  """The consumers do not wait until the producer has read the tile's before."""
  wait = e.find(isa.MBARRIER_TRY_WAIT, part="consumer")[0]
  e.drop(e.find(isa.BRA, part="consumer", after=wait)[0])


@fault("gemm_by_data", DEADLOCK)
def a_scalar_is_not_announced(e):
  """The consumers do not arrive, and the producer waits for ever."""
  e.drop(e.find(isa.MBARRIER_ARRIVE, part="consumer", after=e.find(isa.MBARRIER_TRY_WAIT, part="consumer")[0])[0])


@fault("gemm_by_data", RACE)
def a_scalar_is_announced_before_it_is_there(e):
  """The arrival stands before the store."""
  wait = e.find(isa.MBARRIER_TRY_WAIT, part="consumer")[0]
  arrive = e.find(isa.MBARRIER_ARRIVE, part="consumer", after=wait)[0]
  e.move([arrive], before=e.find(isa.ST_SHARED, part="consumer", after=wait)[0])


@fault("gemm_by_data", DEADLOCK)
def a_scalar_is_never_read(e):
  """The producer does not say that it has read it: the next tile's is not sent."""
  wait = e.find(isa.MBARRIER_TRY_WAIT, part="producer")[0]
  e.drop(e.find(isa.MBARRIER_ARRIVE, part="producer", after=wait)[0])
