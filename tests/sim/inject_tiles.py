"""Faults of programs that CTAs take when they are free, and of their way through shared memory (see inject.py)."""
from __future__ import annotations

import numpy as np

import tiletrace as tt
from tests.gpu.corpus import Case, f64, normal, out
from tests.gpu.corpus_control import ragged_sums_kernel
from tests.gpu.corpus_gemm import matmul
from tests.sim.inject import DEADLOCK, RACE, fault
from tests.sim.subjects import subject
from tiletrace.lowering.ptx import isa


@subject
def taken_gemm(rng):
  """One thread of the producer asks; eight tiles of one block for two CTAs: the producer comes round to a place while
  the consumers are two tiles behind."""
  return matmul(rng, 512, 128, 64, bn=64, num_stages=2, persistent="dynamic")


@subject
def taken_gemm_by_cp_async(rng):
  """A whole warpgroup produces, and one thread of it asks."""
  return matmul(rng, 200, 70, 130, bm=64, bn=64, num_stages=2, warpgroups=1, persistent="dynamic")


@subject
def taken_sums(rng):
  """No producer: one thread asks, and tells the others at the end of the program."""
  x, n = normal(rng, 9, 96), np.asarray([3, 0, 8, 1, 1, 9, 2], np.int32)
  call = tt.tile_call(ragged_sums_kernel, out(((7, 96), np.float32)), grid=7, persistent="dynamic")
  return Case(call, (x, n), (np.stack([f64(x)[:k].sum(0) for k in n]),), "reduce")


def _told(e, part):
  """The wait, in a role, for the place of the next program: the last one of the role's loop."""
  return e.find(isa.MBARRIER_TRY_WAIT, part=part)[-1]


@fault("taken_gemm", RACE)
def the_next_program_is_not_waited_for(e):
  """The consumers read the place before the producer wrote it."""
  e.drop(e.find(isa.BRA, part="consumer", after=_told(e, "consumer"))[0])


@fault("taken_gemm", RACE)
def the_next_program_is_told_before_it_is_there(e):
  """The arrival stands before the store."""
  store = e.find(isa.ST_SHARED, part="producer")[-1]
  arrive = e.find(isa.MBARRIER_ARRIVE, part="producer", after=store)[0]
  e.move([e.definition(e.get(arrive, "bar").base, arrive), arrive], before=store)


@fault("taken_gemm", DEADLOCK)
def the_next_program_is_not_told(e):
  """The consumers wait for ever."""
  e.drop(e.find(isa.MBARRIER_ARRIVE, part="producer")[-1])


@fault("taken_gemm", DEADLOCK)
def the_next_program_is_never_read(e):
  """The consumers do not say that they have read a place, and the producer comes round to it."""
  e.drop(e.find(isa.MBARRIER_ARRIVE, part="consumer", after=_told(e, "consumer"))[0])


@fault("taken_sums", RACE)
def the_others_do_not_wait_for_the_thread_that_asks(e):
  """No sync between the store of the next program and the loads."""
  e.drop(e.find(isa.BAR_SYNC_ALL)[-1])
