"""The rules of the race detector, one by one."""
from __future__ import annotations

import numpy as np
import pytest

from tiletrace.sim import races
from tiletrace.sim.races import NOTHING, Clock, RaceDetector
from tiletrace.sim.shadow import Shadow

T = np.arange(128)
ONE, TWO = np.arange(1), np.arange(1, 2)
SMEM = 64 * 1024


@pytest.fixture
def det() -> RaceDetector:
  return RaceDetector(128, [Shadow(0, SMEM)])


def kinds(det: RaceDetector) -> list[str]:
  return [f.kind for f in det.findings]


def tma(det: RaceDetector, thread: np.ndarray, addresses: np.ndarray, nbytes: int = 16, where: str = "tma") -> Clock:
  """A load that writes shared memory; what it releases when it is complete."""
  agent = det.issue(thread, "TMA load")
  det.agent_write(agent, addresses, nbytes, where)
  return det.complete(agent)


# --- threads

def test_a_store_and_a_load_of_another_thread_race(det):
  det.write(T, T * 16, 16, "store")
  det.read(T, T[::-1] * 16, 16, "load")

  [found] = det.findings
  assert (found.kind, found.where, found.other) == (races.RACE, "load", "store")
  assert found.addresses == tuple(range(0, 2048, 16))
  assert found.threads == tuple(range(128))


def test_bar_sync_orders_its_threads(det):
  det.write(T, T * 16, 16, "store")
  det.barrier(T)
  det.read(T, T[::-1] * 16, 16, "load")
  det.barrier(T)
  det.write(T, (T * 16 + 512) % 2048, 16, "store again")

  assert not det.findings


def test_a_barrier_orders_nobody_else(det):
  det.write(T, T * 16, 16, "store")
  det.barrier(T[:64])
  det.read(T[64:], T[:64] * 16, 16, "load")

  assert kinds(det) == [races.RACE]


def test_what_follows_a_barrier_is_not_ordered_by_it(det):
  det.barrier(T)
  det.write(ONE, ONE, 16, "store")
  det.read(TWO, ONE, 16, "load")

  assert kinds(det) == [races.RACE]


def test_order_is_transitive_across_barriers_of_different_warps(det):
  det.write(ONE, ONE, 16, "store")
  det.barrier(T[:64])
  det.barrier(T[32:96])
  det.read(np.asarray([95]), ONE, 16, "load")

  assert not det.findings


def test_a_store_races_with_an_unordered_read_before_it(det):
  det.read(ONE, ONE, 16, "load")
  det.write(TWO, ONE, 16, "store")

  [found] = det.findings
  assert (found.kind, found.where, found.other, found.others) == (races.RACE, "store", "load", (0,))


@pytest.mark.parametrize("unsynced", [0, 5, 127])
def test_a_store_must_be_ordered_after_every_reader(det, unsynced):
  """Many threads read one place; the writer has met all of them but one."""
  det.read(T, np.zeros_like(T), 16, "load")
  det.barrier(np.setdiff1d(T, [unsynced]))
  writer = 64
  det.write(np.asarray([writer]), ONE, 16, "store")

  [found] = det.findings
  assert (found.kind, found.others) == (races.RACE, (unsynced,))


def test_a_store_ordered_after_every_reader_is_fine(det):
  det.read(T, np.zeros_like(T), 16, "load")
  det.read(T, np.zeros_like(T), 16, "load again")
  det.barrier(T)
  det.write(TWO, ONE, 16, "store")
  det.barrier(T)
  det.read(T, np.zeros_like(T), 16, "after")

  assert not det.findings


def test_readers_never_race(det):
  det.write(ONE, ONE, 16, "store")
  det.barrier(T)
  for _ in range(3):
    det.read(T, np.zeros_like(T), 16, "load")

  assert not det.findings


def test_two_lanes_of_one_store_on_one_place_race(det):
  det.write(T, T // 2 * 16, 16, "store")

  [found] = det.findings
  assert (found.kind, found.where, found.other) == (races.RACE, "store", "store")


def test_equal_values_may_be_written_to_one_place_unordered(det):
  """Copies of a replicated tile: the second half of the threads stores what the first half has stored."""
  half, same = T[:64], np.zeros(64, bool)
  det.write(half, half // 2 * 16, 16, "store", changed=~same, lost=same)
  det.write(T[64:], half // 2 * 16, 16, "same store", changed=same, lost=same)
  assert not det.findings

  det.write(half, half // 2 * 16 + 8192, 16, "two values", changed=~same, lost=half % 2 == 0)
  assert [f.where for f in det.findings] == ["two values"]
  det.write(T[64:], half // 2 * 16, 16, "other store", changed=half < 3, lost=same)
  assert [(f.where, f.addresses) for f in det.findings[1:]] == [("other store", (0, 16))]


def test_a_store_of_what_is_there_still_races_with_loads(det):
  det.write(ONE, ONE, 16, "store", changed=np.asarray([False]))
  det.read(TWO, ONE, 16, "load")

  assert kinds(det) == [races.RACE]


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8])
def test_neighbours_within_16_bytes_are_different_places(det, nbytes):
  det.write(T, T * 16, 16, "wide")
  det.barrier(T)
  det.write(T, T * nbytes, nbytes, "narrow")
  det.read(T, T * nbytes, nbytes, "own")
  assert not det.findings

  det.read(T, (T ^ 1) * nbytes, nbytes, "neighbour")
  assert kinds(det) == [races.RACE]
  assert det.findings[0].nbytes == nbytes


def test_narrow_accesses_keep_what_wide_ones_did(det):
  det.read(T, T // 2 * 16, 16, "wide load")             # two readers each
  det.write(T, T * 4 + 8192, 4, "narrow")               # granules of 4 bytes from here on
  det.write(ONE, np.asarray([4]), 4, "store")

  [found] = det.findings
  assert (found.where, found.other, found.others) == ("store", "wide load", (1,))


def test_one_finding_for_each_pair_of_places(det):
  for _ in range(5):
    det.write(ONE, ONE, 16, "store")
    det.read(TWO, ONE, 16, "load")

  assert sorted((f.where, f.other) for f in det.findings) == [("load", "store"), ("store", "load")]


# --- mbarriers: release and acquire

def test_an_mbarrier_orders_arrivals_before_waits(det):
  phase = NOTHING
  det.write(T[:64], T[:64] * 16, 16, "store")
  for warp in (T[:32], T[32:64]):
    phase = det.merge(phase, det.release(warp))
  det.acquire(T[64:], phase)
  det.read(T[64:], T[:64] * 16, 16, "load")

  assert not det.findings


def test_an_arrival_releases_only_what_came_before_it(det):
  phase = det.release(ONE)
  det.write(ONE, ONE, 16, "late")
  det.acquire(TWO, phase)
  det.read(TWO, ONE, 16, "load")

  assert kinds(det) == [races.RACE]


def test_an_arrival_that_is_missing_is_a_race_with_its_thread_only(det):
  det.write(T[:64], T[:64] * 16, 16, "store")
  det.acquire(T[64:], det.release(T[:63]))
  det.read(T[64:], T[:64] * 16, 16, "load")

  [found] = det.findings
  assert found.others == (63,)


# --- proxies

def issue_read(det: RaceDetector, thread: np.ndarray = ONE) -> None:
  agent = det.issue(thread, "TMA store")
  det.agent_read(agent, T * 16, 16, "tma store")


@pytest.mark.parametrize("fence", ["none", "before the barrier", "after the barrier", "before the stores"])
def test_generic_stores_need_a_proxy_fence_before_tma_reads_them(det, fence):
  if fence == "before the stores":
    det.proxy_fence(T)
  det.write(T, T * 16, 16, "store")
  if fence == "before the barrier":
    det.proxy_fence(T)
  det.barrier(T)
  if fence == "after the barrier":
    det.proxy_fence(ONE)
  issue_read(det)

  right = fence in ("before the barrier", "after the barrier")
  assert kinds(det) == ([] if right else [races.MISSING_PROXY_FENCE])


def test_a_proxy_fence_orders_nothing(det):
  det.write(T, T * 16, 16, "store")
  det.proxy_fence(T)
  issue_read(det)

  assert kinds(det) == [races.RACE]


def test_a_fence_of_one_thread_is_not_a_fence_of_the_others(det):
  det.write(T, T * 16, 16, "store")
  det.proxy_fence(T[:32])
  det.barrier(T)
  issue_read(det)

  [found] = det.findings
  assert found.kind == races.MISSING_PROXY_FENCE
  assert found.others == tuple(range(32, 128))


@pytest.mark.parametrize("fence", ["shared", "global", ""])
@pytest.mark.parametrize("space", ["shared", "global"])
def test_a_fence_is_for_the_space_that_it_names(fence, space):
  det = RaceDetector(128, [Shadow(0, SMEM), Shadow(1 << 32, SMEM, grid_wide=True)])
  at = T * 16 + (1 << 32) * (space == "global")
  for again in range(2):
    det.write(T, at, 16, f"store {again}")
    det.proxy_fence(T, fence)
    det.barrier(T)
    done = det.issue(ONE, "TMA load")
    det.agent_read(done, at, 16, f"load {again}")
    det.acquire(T, det.complete(done))

  assert kinds(det) == ([] if fence in ("", space) else [races.MISSING_PROXY_FENCE] * 2)


def test_fences_travel_through_mbarriers(det):
  det.write(T[:64], T[:64] * 16, 16, "store")
  det.proxy_fence(T[:64])
  det.acquire(T[64:], det.release(T[:64]))
  agent = det.issue(T[64:], "wgmma")
  det.agent_read(agent, T[:64] * 16, 16, "wgmma")

  assert not det.findings


def test_generic_stores_need_a_proxy_fence_before_tma_overwrites_them(det):
  det.write(T, T * 16, 16, "zeros")
  det.barrier(T)
  tma(det, ONE, T * 16)

  assert kinds(det) == [races.MISSING_PROXY_FENCE]


@pytest.mark.parametrize("fence", ["none", "before the loads", "by some", "before the barrier", "after the barrier"])
def test_generic_loads_need_a_proxy_fence_before_tma_overwrites_them(det, fence):
  if fence == "before the loads":
    det.proxy_fence(T)
  det.read(T, T * 16, 16, "load")
  if fence in ("by some", "before the barrier"):
    det.proxy_fence(T[:32] if fence == "by some" else T)
  det.barrier(T)
  if fence == "after the barrier":
    det.proxy_fence(ONE)
  tma(det, ONE, T * 16)

  if fence in ("before the barrier", "after the barrier"):
    assert not det.findings
  else:
    [found] = det.findings
    assert (found.kind, found.where, found.other) == (races.MISSING_PROXY_FENCE, "tma", "load")
    assert found.others == tuple(range(32, 128) if fence == "by some" else range(128))


def test_a_proxy_fence_does_not_order_loads_before_what_overwrites_them(det):
  det.read(T[64:], T[64:] * 16, 16, "load")
  det.proxy_fence(T)
  tma(det, ONE, T * 16)

  assert kinds(det) == [races.RACE]


@pytest.mark.parametrize("unfenced", [0, 5, 127])
def test_every_reader_of_a_place_must_be_fenced_before_tma_overwrites_it(det, unfenced):
  det.read(T, np.zeros_like(T), 16, "load")
  det.proxy_fence(np.setdiff1d(T, [unfenced]))
  det.barrier(T)
  tma(det, ONE, np.zeros(1, int))

  [found] = det.findings
  assert (found.kind, found.others) == (races.MISSING_PROXY_FENCE, (unfenced,))


def test_an_asynchronous_read_does_not_stand_for_generic_ones_before_it(det):
  """Threads load from a slot, wgmma reads it later and is waited for: the loads still need the fence."""
  det.read(T, T * 16, 16, "load")
  det.barrier(T)
  agent = det.issue(T, "wgmma")
  det.agent_read(agent, T * 16, 16, "wgmma")
  det.acquire(T, det.complete(agent))
  tma(det, ONE, T * 16)

  assert kinds(det) == [races.MISSING_PROXY_FENCE]


def test_asynchronous_reads_that_were_waited_for_need_no_fence_before_tma_overwrites(det):
  agent = det.issue(T, "wgmma")
  det.agent_read(agent, T * 16, 16, "wgmma")
  det.acquire(T, det.complete(agent))
  tma(det, ONE, T * 16)

  assert not det.findings


def test_cp_async_is_of_the_generic_proxy_and_may_overwrite_what_was_loaded_without_a_fence(det):
  det.read(T, T * 16, 16, "load")
  det.barrier(T)
  det.copy_async(T, T[::-1] * 16, 16, "cp.async")

  assert not det.findings


# --- asynchronous operations

def test_a_load_that_tma_has_not_delivered(det):
  done = tma(det, ONE, T * 16)
  det.read(TWO, ONE, 16, "early")
  assert [(f.kind, f.other) for f in det.findings] == [(races.NOT_WAITED_FOR, "tma")]

  det.acquire(T[64:], done)
  det.read(T[64:], T[64:] * 16, 16, "waited")
  assert len(det.findings) == 1


def test_waiting_for_another_tma_is_not_enough(det):
  first, second = tma(det, ONE, T * 16), tma(det, ONE, T * 16 + 4096)
  det.acquire(TWO, second)
  det.read(TWO, TWO * 16, 16, "wrong slot")
  assert kinds(det) == [races.NOT_WAITED_FOR]

  det.acquire(TWO, first)
  det.read(TWO, TWO * 16 + 32, 16, "right slot")
  assert len(det.findings) == 1


def test_tma_to_wgmma_needs_the_wait_of_every_warp_and_no_fence(det):
  done = tma(det, ONE, T * 16)
  det.acquire(T[:96], done)
  det.agent_read(det.issue(T, "wgmma"), T * 16, 16, "three warps waited")
  assert kinds(det) == [races.NOT_WAITED_FOR]

  det.acquire(T, done)
  det.agent_read(det.issue(T, "wgmma"), T * 16, 16, "all waited")
  assert len(det.findings) == 1


@pytest.mark.parametrize("by", ["the producer's TMA", "a store"])
def test_a_slot_overwritten_while_wgmma_reads_it(det, by):
  agent = det.issue(T, "wgmma")
  det.agent_read(agent, T * 16, 16, "wgmma")
  if by == "a store":
    det.write(ONE, ONE, 16, "store")
  else:
    tma(det, ONE, T * 16)

  [found] = det.findings
  assert (found.kind, found.other, found.others) == (races.OVERWRITTEN_WHILE_READ, "wgmma", tuple(range(128)))


def test_a_slot_may_be_overwritten_when_wgmma_is_done(det):
  agent = det.issue(T[:64], "wgmma")
  det.agent_read(agent, T * 16, 16, "wgmma")
  det.acquire(ONE, det.complete(agent))                    # wait_group of the leader, who arrives for all
  det.acquire(np.asarray([100]), det.release(ONE))
  tma(det, np.asarray([100]), T * 16)

  assert not det.findings


def test_completion_alone_is_not_knowledge(det):
  """The operation may be complete in this schedule: nobody has made sure of it."""
  agent = det.issue(T[:64], "wgmma")
  det.agent_read(agent, T * 16, 16, "wgmma")
  det.complete(agent)
  det.write(ONE, ONE, 16, "store")

  assert kinds(det) == [races.OVERWRITTEN_WHILE_READ]


def test_a_store_after_issue_conflicts_although_the_thread_issued_it(det):
  det.write(ONE, ONE, 16, "store")
  det.proxy_fence(ONE)
  agent = det.issue(ONE, "TMA store")
  det.agent_read(agent, ONE, 16, "tma store")
  assert not det.findings

  det.write(ONE, ONE, 16, "too early")
  assert kinds(det) == [races.OVERWRITTEN_WHILE_READ]


def test_reads_and_writes_of_a_tma_store_complete_apart():
  det = RaceDetector(128, [Shadow(0, SMEM), Shadow(1 << 32, SMEM)])
  out = (1 << 32) + T * 16
  reading, writing = det.issue(ONE, "TMA store"), det.issue(ONE, "TMA store")
  det.agent_read(reading, T * 16, 16, "tma store")
  det.agent_write(writing, out, 16, "tma store")
  det.acquire(ONE, det.complete(reading))                  # wait_group.read
  det.write(ONE, ONE, 16, "reuse")
  assert not det.findings

  det.read(ONE, out[:1], 16, "read back")
  assert kinds(det) == [races.NOT_WAITED_FOR]


def test_an_operation_does_not_race_with_itself(det):
  agent = det.issue(ONE, "TMA load")
  for _ in range(2):
    det.agent_read(agent, T * 16, 16, "read")
    det.agent_write(agent, T * 16, 16, "write")

  assert not det.findings


def test_elements_of_a_box_in_any_order_cover_whole_granules(det):
  """A box of 2-byte elements, as tensor maps give it, leaves granules at 16 bytes."""
  elements = np.random.default_rng(0).permutation(np.arange(0, 2048, 2))
  done = tma(det, ONE, elements, 2)
  det.acquire(T, done)
  det.read(T, T * 16, 16, "load")

  assert not det.findings
  assert det._memories[0].granule == 16


def test_a_box_that_ends_within_16_bytes_leaves_the_rest_alone(det):
  det.write(T[64:], T[64:] * 4, 4, "store")
  done = tma(det, ONE, np.arange(0, 4, 2), 2)
  tma(det, ONE, np.arange(6, 12, 2), 2)
  det.acquire(T, done)
  det.read(ONE, ONE, 4, "load")
  det.write(ONE, np.asarray([4]), 2, "between")
  det.read(TWO, np.asarray([12]), 4, "behind")

  assert not det.findings


def test_clocks_of_finished_operations_are_used_again(det):
  slots = 4
  clocks = [NOTHING] * slots
  for i in range(1000):
    det.acquire(T, clocks[i % slots])
    clocks[i % slots] = tma(det, ONE, T * 16 + i % slots * 2048)

  assert not det.findings
  assert det.width <= 128 + slots


def test_a_clock_that_is_used_again_does_not_vouch_for_others(det):
  """Thread 0 knows its first operation done; thread 1 knows neither, then only the second on the same column."""
  first = tma(det, ONE, ONE)
  det.acquire(ONE, first)
  second = tma(det, ONE, ONE + 16)
  det.read(TWO, ONE + 16, 16, "early")
  assert kinds(det) == [races.NOT_WAITED_FOR]

  det.acquire(TWO, second)
  det.read(TWO, ONE + 16, 16, "waited")
  det.read(TWO, ONE, 16, "earlier one")
  assert len(det.findings) == 1


# --- cp.async

def test_a_thread_sees_its_own_cp_async_after_the_wait_only(det):
  det.copy_async(T, T * 16, 16, "cp.async")
  marks = det.copy_mark(T)
  det.read(T, T * 16, 16, "early")
  assert kinds(det) == [races.NOT_WAITED_FOR]

  det.copy_wait(T, marks)
  det.read(T, T * 16, 16, "waited")
  assert len(det.findings) == 1


def test_cp_async_groups_are_waited_for_in_order(det):
  marks = []
  for stage in range(3):
    det.copy_async(T, T * 16 + 2048 * stage, 16, f"stage {stage}")
    marks.append(det.copy_mark(T))
  det.copy_wait(T, marks[1])
  det.barrier(T)
  for stage in range(3):
    det.read(T, T[::-1] * 16 + 2048 * stage, 16, f"load {stage}")

  assert [(f.kind, f.other) for f in det.findings] == [(races.NOT_WAITED_FOR, "stage 2")]


def test_cp_async_needs_a_proxy_fence_before_wgmma(det):
  for fenced in (False, True):
    det.copy_async(T, T * 16 + 2048 * fenced, 16, "cp.async")
    det.copy_wait(T, det.copy_mark(T))
    if fenced:
      det.proxy_fence(T)
    det.barrier(T)
    det.agent_read(det.issue(T, "wgmma"), T * 16 + 2048 * fenced, 16, f"fenced={fenced}")

  assert [(f.kind, f.where) for f in det.findings] == [(races.MISSING_PROXY_FENCE, "fenced=False")]


def test_an_mbarrier_that_tracks_cp_async_releases_the_copies(det):
  det.copy_async(T[:64], T[:64] * 16, 16, "cp.async")
  clock = det.copy_clock(T[:64], det.copy_mark(T[:64]))
  det.copy_async(T[:64], T[:64] * 16 + 4096, 16, "later")
  det.acquire(T[64:], clock)
  det.read(T[64:], T[:64] * 16, 16, "load")
  assert not det.findings

  det.read(T[64:], T[:64] * 16 + 4096, 16, "load")
  assert [(f.kind, f.other) for f in det.findings] == [(races.NOT_WAITED_FOR, "later")]


# --- mbarriers themselves

@pytest.mark.parametrize("fence", [False, True])
@pytest.mark.parametrize("barrier", [False, True])
def test_an_mbarrier_is_visible_after_a_fence_and_a_barrier(det, fence, barrier):
  det.mbarrier_init(0, 0, "init")
  if fence:
    det.mbarrier_fence(ONE)
  if barrier:
    det.barrier(T)
  det.mbarrier_complete(det.issue(TWO, "TMA load"), 0, "tma")
  assert kinds(det) == ([] if fence and barrier else [races.BARRIER_NOT_VISIBLE])

  det.mbarrier_use(T[64:], 0, "wait")
  assert [f.where for f in det.findings if f.where == "wait"] == ([] if barrier else ["wait"])


def test_the_fence_of_mbarriers_is_no_fence_for_data(det):
  det.write(T, T * 16, 16, "store")
  det.mbarrier_fence(T)
  det.barrier(T)
  issue_read(det)

  assert kinds(det) == [races.MISSING_PROXY_FENCE]


def test_where_bytes_were_written_last(det):
  det.write(T, T * 16, 16, "first")
  tma(det, ONE, T[:4] * 16)
  det.read(T, T * 16, 16, "load")

  assert det.writers(T * 16, 16) == ["first", "tma"]
  assert det.writers(T[:4] * 16, 16) == ["tma"]
  assert det.writers(T * 16 + 8192, 16) == []
