"""Each kind of wrong access, barrier or copy, in a kernel of a few instructions, is found where it happens."""
from __future__ import annotations

import numpy as np
import pytest

from tests.sim.small import Outcome, Small
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Addr
from tiletrace.sim.faults import Fault


def only(outcome: Outcome) -> Fault:
  [fault] = outcome.faults
  return fault


# ---- addresses


def test_an_access_past_an_array_names_the_array_and_the_distance():
  k = Small(threads=64)
  k.b.new(isa.LD_GLOBAL, k.b.addr(k.pointer("x"), 16), type="u32")
  fault = only(k.end().run())

  assert fault.kind == "out of bounds"
  assert "0 bytes past the end of x (256 bytes" in fault.text
  assert fault.threads == (60, 61, 62, 63)
  assert len(fault.addresses) == 4


def test_an_access_before_an_array_is_out_of_bounds():
  k = Small()
  k.b(isa.ST_GLOBAL, k.b.addr(k.pointer("y"), -8), 1, type="u32")
  fault = only(k.end().run())

  assert fault.kind == "out of bounds" and fault.threads == (0, 1)
  assert "8 bytes before y" in fault.text


@pytest.mark.parametrize(("threads", "offset"), [((), 0), (tuple(range(28, 32)), 16), (tuple(range(32)), 128)])
def test_shared_memory_ends_where_the_launch_says(threads, offset):
  k = Small(smem=128)
  k.b(isa.ST_SHARED, k.shared(4, offset), k.tid, type="u32")
  faults = k.end().run().faults

  assert [f.threads for f in faults] == ([threads] if threads else [])
  assert all(f.kind == "out of bounds" and "128 bytes from 0x400 to 0x480" in f.text for f in faults)


def test_what_lies_below_the_own_shared_memory_is_out_of_bounds():
  k = Small(smem=128)
  zero = k.b.new(isa.MOV, 0, type="b32")
  k.b(isa.ST_SHARED, k.b.addr(zero), 1, type="u32", pred=k.compare("eq", k.tid, 0))

  assert only(k.end().run()).kind == "out of bounds"


@pytest.mark.parametrize("space", ("shared", "global"))
def test_a_vector_off_its_alignment_is_misaligned(space):
  k = Small(threads=32, smem=1024)
  words = [k.tid] * 2
  if space == "shared":
    k.b(isa.ST_SHARED, k.shared(4), words, type="u32", vec="v2")
  else:
    k.b(isa.ST_GLOBAL, k.b.addr(k.pointer("y")), words, type="u32", vec="v2", pred=k.compare("lt", k.tid, 31))
  fault = only(k.end().run())

  assert fault.kind == "misaligned" and "no multiple of 8" in fault.text
  assert set(fault.threads) <= set(range(1, 32, 2)) and 1 in fault.threads


def test_bytes_that_nobody_wrote_are_found_when_they_are_read():
  k = Small(smem=256)
  k.b(isa.ST_SHARED, k.shared(8), k.tid, type="u32")
  k.sync()
  k.b.new(isa.LD_SHARED, k.shared(8), type="u32", vec="v2")
  fault = only(k.end().run())

  assert fault.kind == "uninitialised shared memory"
  assert fault.threads == tuple(range(32))


def test_a_store_into_an_input_is_found():
  k = Small()
  k.b(isa.ST_GLOBAL, k.b.addr(k.pointer("x")), 1, type="u32")

  assert only(k.end().run()).kind == "write to an input"


@pytest.mark.parametrize("name", ("x", "y"))
def test_a_load_past_the_coherent_cache_is_for_inputs_only(name):
  k = Small()
  k.store(k.b.new(isa.LD_GLOBAL, k.b.addr(k.pointer(name)), type="u32", nc="nc"))

  assert k.end().run().kinds == ([] if name == "x" else ["non-coherent load"])


# ---- races


def exchange(*, synced: bool) -> Outcome:
  k = Small(threads=64, smem=256)
  k.b(isa.ST_SHARED, k.shared(4), k.tid, type="u32")
  if synced:
    k.sync()
  other = k.b.new(isa.XOR, k.tid, 32, type="b32")
  k.store(k.b.new(isa.LD_SHARED, k.b.addr(k.b.new(isa.MAD_LO, other, 4, k.smem, type="u32")), type="u32"))
  return k.end().run()


def test_a_read_of_what_another_warp_writes_needs_a_barrier():
  np.testing.assert_array_equal(exchange(synced=True).y, np.arange(64) ^ 32)
  assert not exchange(synced=True).faults
  assert exchange(synced=False).kinds == ["race"]


def test_two_ctas_that_write_one_place_are_found_unless_they_write_the_same():
  for same in (True, False):
    k = Small(ctas=2)
    base = k.b.new(isa.LD_PARAM, k.b.addr(k.entry.param("y")), type="u64")
    k.b(isa.ST_GLOBAL, k.b.addr(base), 7 if same else k.b.special("ctaid.x"), type="u32",
        pred=k.compare("eq", k.tid, 0))
    assert k.end().run().kinds == ([] if same else ["race between CTAs"])


# ---- named barriers


def test_a_barrier_with_two_counts_is_found():
  k = Small(threads=64)
  other, done = k.b.label("other"), k.b.label("done")
  k.b(isa.BRA, other, pred=k.compare("ge", k.tid, 32))
  k.b(isa.BAR_SYNC, 1, 64)
  k.b(isa.BRA, done)
  k.b.place(other)
  k.b(isa.BAR_SYNC, 1, 96)
  k.b.place(done)
  fault = only(k.end().run())

  assert fault.kind == "barrier count"
  assert "barrier 1 for 96 threads" in fault.text or "a multiple of 32 up to 64" in fault.text


def test_arrivals_without_a_wait_are_left_over_at_the_end():
  k = Small(threads=64)
  k.b(isa.BAR_ARRIVE, 3, 64, pred=k.compare("lt", k.tid, 32))
  fault = only(k.end().run())

  assert fault.kind == "barrier count"
  assert "at the end 32 of 64 threads have come to barrier 3" in fault.text


def test_producers_that_arrive_release_consumers_that_sync():
  k = Small(threads=64, smem=256)
  consumer, done = k.b.label("consumer"), k.b.label("done")
  k.b(isa.BRA, consumer, pred=k.compare("ge", k.tid, 32))
  k.b(isa.ST_SHARED, k.shared(4), k.tid, type="u32")
  k.b(isa.BAR_ARRIVE, 3, 64)
  k.store(0)
  k.b(isa.BRA, done)
  k.b.place(consumer)
  k.b(isa.BAR_SYNC, 3, 64)
  k.store(k.b.new(isa.LD_SHARED, k.shared(4, -128), type="u32"))
  k.b.place(done)
  k.end()
  for seed in range(6):
    got = k.run(seed=seed)
    assert not got.faults, str(got.faults[0])
    np.testing.assert_array_equal(got.y, [0] * 32 + list(range(32)))


# ---- mbarriers


def with_barrier(count: int, threads: int = 32) -> tuple[Small, Addr]:
  k = Small(threads=threads, smem=256)
  bar = k.b.addr(k.smem, 64)
  k.init(bar, count)
  return k, bar


def test_one_arrival_too_many_is_found():
  k, bar = with_barrier(8)
  k.b(isa.MBARRIER_ARRIVE, bar, pred=k.compare("lt", k.tid, 9))
  fault = only(k.end().run())

  assert fault.kind == "barrier count" and fault.addresses == (0x440,)
  assert "9 more arrivals at mbarrier 0x440, phase 0 (parity 0): 0 of 8 arrivals" in fault.text


def test_missing_arrivals_are_found_at_the_end():
  k, bar = with_barrier(8)
  k.b(isa.MBARRIER_ARRIVE, bar, pred=k.compare("lt", k.tid, 5))
  fault = only(k.end().run())

  assert fault.kind == "barrier count" and "at the end: mbarrier 0x440, phase 0 (parity 0): 5 of 8" in fault.text


def test_bytes_that_never_arrive_are_found():
  k, bar = with_barrier(2)
  k.b(isa.MBARRIER_ARRIVE_EXPECT_TX, bar, 128, pred=k.compare("eq", k.tid, 0))
  fault = only(k.end().run())

  assert fault.kind == "transaction bytes" and "128 bytes outstanding" in fault.text


def test_phases_alternate():
  k, bar = with_barrier(32)
  for parity in (0, 1, 0, 1):
    k.b(isa.MBARRIER_ARRIVE, bar)
    k.wait(bar, parity)
  k.store(k.tid)
  for seed in range(4):
    got = (k if seed else k.end()).run(seed=seed)
    assert not got.faults, str(got.faults[0])


def test_a_fresh_mbarrier_lets_parity_1_pass_and_parity_0_wait():
  k, bar = with_barrier(32)
  k.wait(bar, 1)                 # the phase before the first counts as complete
  assert not k.end().run().faults

  k, bar = with_barrier(32)
  k.wait(bar, 0)
  assert k.end().run().kinds == ["deadlock"]


def test_a_wait_with_the_wrong_parity_hangs():
  k, bar = with_barrier(32)
  k.b(isa.MBARRIER_ARRIVE, bar)
  k.wait(bar, 0)
  k.wait(bar, 1)

  assert k.end().run().kinds == ["deadlock"]


def test_data_must_not_overwrite_an_mbarrier_nor_be_read_from_one():
  k, bar = with_barrier(1)
  k.b(isa.ST_SHARED, k.shared(4), 1, type="u32")
  assert only(k.end().run()).kind == "mbarrier"

  k, bar = with_barrier(1)
  k.b.new(isa.LD_SHARED, bar, type="u32")
  assert only(k.end().run()).kind == "uninitialised shared memory"


def test_an_mbarrier_that_is_not_initialised_is_none():
  k = Small(smem=64)
  k.b(isa.MBARRIER_ARRIVE, k.b.addr(k.smem))
  fault = only(k.end().run())

  assert fault.kind == "mbarrier" and "no mbarrier at shared address 0x400" in fault.text


def test_an_initialisation_that_others_need_not_see_is_found():
  k = Small(threads=64, smem=64)
  bar = k.b.addr(k.smem)
  k.b(isa.MBARRIER_INIT, bar, 64, pred=k.compare("eq", k.tid, 0))
  k.b(isa.MBARRIER_ARRIVE, bar)

  assert "mbarrier initialisation not visible" in k.end().run().kinds


# ---- asynchronous copies


def copied(*, wait: bool, sync: bool) -> Outcome:
  k = Small(threads=64, smem=256)
  k.b(isa.CP_ASYNC, k.shared(4), k.b.addr(k.pointer("x")), 4)
  if wait:
    k.b(isa.CP_ASYNC_COMMIT)
    k.b(isa.CP_ASYNC_WAIT_GROUP, 0)
  if sync:
    k.sync()
  k.store(k.b.new(isa.LD_SHARED, k.shared(4), type="u32"))
  return k.end().run(np.arange(100, 164, dtype=np.uint32))


def test_a_thread_reads_its_own_copies_after_a_wait():
  got = copied(wait=True, sync=False)
  assert not got.faults
  np.testing.assert_array_equal(got.y, np.arange(100, 164))


def test_a_barrier_is_no_wait():
  assert set(copied(wait=False, sync=True).kinds) & {"asynchronous write not waited for", "asynchronous at exit"}


def test_a_thread_that_ends_before_its_bulk_store_is_read_is_found():
  found = set()
  for seed in range(8):
    k = Small(threads=32, smem=128)
    k.b(isa.ST_SHARED, k.shared(4), k.tid, type="u32")
    k.b(isa.FENCE_PROXY_ASYNC)
    k.sync()
    skip = k.skip_unless(k.compare("eq", k.tid, 0))
    k.b(isa.BULK_STORE, k.b.addr(k.pointer("y")), k.b.addr(k.smem), 128)
    k.b(isa.BULK_COMMIT)
    k.b.place(skip)
    found |= set(k.end().run(seed=seed).kinds)

  assert found == {"asynchronous at exit"}


def test_a_bulk_copy_is_whole_cells_of_16_bytes():
  k = Small(threads=32, smem=128)
  k.b(isa.ST_SHARED, k.shared(4), k.tid, type="u32")
  k.b(isa.FENCE_PROXY_ASYNC)
  k.sync()
  skip = k.skip_unless(k.compare("eq", k.tid, 0))
  k.b(isa.BULK_STORE, k.b.addr(k.pointer("y")), k.b.addr(k.smem), 120)
  k.b.place(skip)
  fault = only(k.end().run())

  assert fault.kind == "misaligned" and "120 bytes" in fault.text


# ---- exchange in a warp


def test_a_mask_of_lanes_that_are_elsewhere_is_not_uniform():
  k = Small()
  skip = k.skip_unless(k.compare("lt", k.tid, 16))
  k.b.new(isa.SHFL, k.tid, 1, 31, -1, mode="bfly")
  k.b.place(skip)
  fault = only(k.end().run())

  assert fault.kind == "not uniform" and "0xffffffff" in fault.text and "0xffff" in fault.text


def test_the_same_mask_as_the_lanes_is_fine():
  k = Small()
  skip = k.skip_unless(k.compare("lt", k.tid, 16))
  k.store(k.b.new(isa.SHFL, k.tid, 1, 31, 0xFFFF, mode="bfly"))
  k.b.place(skip)
  got = k.end().run()

  assert not got.faults
  np.testing.assert_array_equal(got.y[:16], np.arange(16) ^ 1)


# ---- clusters


def push(*, stays: bool) -> Outcome:
  """Every thread stores its number into the other CTA's shared memory, which reads it after a cluster barrier."""
  k = Small(threads=32, smem=128, ctas=2, cluster=True)
  b, rank = k.b, k.b.special("cluster_ctarank")
  other = b.new(isa.MAPA, k.smem, b.new(isa.XOR, rank, 1, type="b32"))
  b(isa.ST_CLUSTER, b.addr(b.new(isa.MAD_LO, k.tid, 4, other, type="u32")), k.at, type="u32")
  if stays:
    b(isa.CLUSTER_ARRIVE, sem="release", aligned="aligned")
    b(isa.CLUSTER_WAIT, sem="acquire", aligned="aligned")
  k.store(b.new(isa.LD_SHARED, k.shared(4), type="u32") if stays else k.tid)
  return k.end().run()


def test_ctas_of_a_cluster_write_to_each_other_between_cluster_barriers():
  got = push(stays=True)
  assert not got.faults, str(got.faults[0])
  np.testing.assert_array_equal(got.y, np.arange(64) ^ 32)


def test_the_shared_memory_of_a_cta_that_ended_is_gone():
  k = Small(threads=32, smem=128, ctas=2, cluster=True)
  b, rank = k.b, k.b.special("cluster_ctarank")
  first = k.compare("eq", rank, 0)
  b(isa.RET, pred=first)
  zero = b.new(isa.MAPA, k.smem, 0)
  loop, count = b.label("loop"), b.new(isa.MOV, 0, type="b32")
  b.place(loop)                           # long enough for CTA 0 to end
  b(isa.ADD, count, count, 1, type="u32")
  b(isa.BRA, loop, pred=k.compare("lt", count, 100))
  b(isa.ST_CLUSTER, b.addr(zero), 1, type="u32", pred=k.compare("eq", k.tid, 0))
  fault = only(k.end().run())

  assert fault.kind == "out of bounds" and "CTA 0 of the cluster has ended" in fault.text
