"""The race detector: atomics, inputs, several CTAs, and what it costs."""
from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from tiletrace.sim import races
from tiletrace.sim.races import NOTHING, Clock, Grid, RaceDetector
from tiletrace.sim.shadow import Shadow

T = np.arange(128)
ONE, TWO = np.arange(1), np.arange(1, 2)
SMEM = 64 * 1024


def kinds(det: RaceDetector) -> list[str]:
  return [f.kind for f in det.findings]


# --- atomics, inputs, several CTAs

def test_atomics_race_with_plain_accesses_only():
  det = RaceDetector(128, [Shadow(0, SMEM)])
  det.atomic(T, T % 4 * 4, 4, "atom")
  det.atomic(T, T % 2 * 4, 4, "atom again")
  det.strong_read(T, T % 4 * 4, 4, "ld.acquire")
  assert not det.findings

  det.read(T[64:], T[64:] * 0, 4, "plain load")
  assert kinds(det) == [races.RACE]


def test_inputs_cost_nothing_and_take_no_writes():
  out = 1 << 40
  det = RaceDetector(128, [Shadow(out, 1 << 40, read_only=True)])
  det.read(T, out + T * 16, 16, "load")
  det.write(ONE, out + ONE, 16, "store")

  assert kinds(det) == [races.WRITE_TO_INPUT]


def grid_of_two() -> tuple[RaceDetector, RaceDetector]:
  shadow, grid = Shadow(1 << 32, SMEM, grid_wide=True), Grid()
  first, second = (RaceDetector(128, [shadow], cta=i, grid=grid) for i in range(2))
  return first, second


OUT = (1 << 32) + T * 16


def test_two_ctas_on_different_places_do_not_race():
  a, b = grid_of_two()
  for det, at in ((a, OUT), (b, OUT + 2048)):
    det.write(T, at, 16, "store")
    det.read(T, at, 16, "load")

  assert not a.findings + b.findings


@pytest.mark.parametrize("first, second", [("write", "write"), ("write", "read"), ("read", "write")])
def test_two_ctas_on_one_place_race(first, second):
  a, b = grid_of_two()
  getattr(a, first)(T, OUT, 16, "first")
  getattr(b, second)(T, OUT, 16, "second")

  assert [(f.kind, f.where, f.other) for f in b.findings] == [(races.RACE_BETWEEN_CTAS, "second", "first")]


def test_two_ctas_may_read_one_place_or_add_to_it():
  a, b = grid_of_two()
  for det in (a, b):
    det.read(T, OUT, 16, "load")
    det.atomic(T, OUT + 4096, 4, "add")

  assert not a.findings + b.findings


def test_release_and_acquire_at_gpu_scope_order_ctas():
  a, b = grid_of_two()
  a.write(T, OUT, 16, "store")
  a.barrier(T)
  token = a.publish(ONE, wide=True)
  a.write(ONE, OUT[:1] + 4096, 16, "late")
  b.receive(ONE, token, wide=True)
  b.barrier(T)
  b.read(T, OUT, 16, "load")
  b.write(T, OUT, 16, "store after")
  assert not b.findings

  b.read(ONE, OUT[:1] + 4096, 16, "load")
  assert [(f.kind, f.other) for f in b.findings] == [(races.RACE_BETWEEN_CTAS, "late")]


@pytest.mark.parametrize("side", ["release", "acquire"])
def test_a_release_or_acquire_of_one_thread_is_not_one_of_the_others(side):
  """The bar.sync before the release, or after the acquire, is missing."""
  a, b = grid_of_two()
  a.write(T, OUT, 16, "store")
  if side == "acquire":
    a.barrier(T)
  b.receive(ONE, a.publish(ONE, wide=True), wide=True)
  if side == "release":
    b.barrier(T)
  b.read(T, OUT, 16, "load")

  [found] = b.findings
  assert found.kind == races.RACE_BETWEEN_CTAS
  assert found.addresses == tuple(OUT[1:].tolist())


@pytest.mark.parametrize("scopes", [(False, True), (True, False)])
def test_a_scope_of_one_cta_orders_no_others(scopes):
  a, b = grid_of_two()
  a.write(ONE, OUT[:1], 16, "store")
  b.receive(ONE, a.publish(ONE, wide=scopes[0]), wide=scopes[1])
  b.read(ONE, OUT[:1], 16, "load")

  assert kinds(b) == [races.RACE_BETWEEN_CTAS]


def test_order_between_ctas_is_transitive():
  shadow, grid = Shadow(1 << 32, SMEM, grid_wide=True), Grid()
  a, b, c = (RaceDetector(128, [shadow], cta=i, grid=grid) for i in range(3))
  a.write(ONE, OUT[:1], 16, "a")
  b.receive(ONE, a.publish(ONE, wide=True), wide=True)
  b.write(ONE, OUT[1:2], 16, "b")
  token = b.publish(ONE, wide=True)
  c.receive(ONE, token, wide=True)
  c.read(ONE, OUT[:1], 16, "a's")
  c.read(ONE, OUT[1:2], 16, "b's")
  a.receive(TWO, token, wide=True)
  a.read(TWO, OUT[:1], 16, "a's own, by another thread")
  assert not a.findings + c.findings

  c.read(TWO, OUT[1:2], 16, "another thread")
  assert kinds(c) == [races.RACE_BETWEEN_CTAS]


def test_what_a_cta_wrote_stays_known_when_another_has_read_it():
  a, b = grid_of_two()
  a.write(ONE, OUT[:1], 16, "store")
  b.receive(ONE, a.publish(ONE, wide=True), wide=True)
  b.read(ONE, OUT[:1], 16, "ordered")
  b.read(TWO, OUT[:1], 16, "not ordered")

  assert [f.where for f in b.findings] == ["not ordered"]


def test_shared_memory_of_a_cluster_lies_at_the_ranks_addresses():
  det = RaceDetector(256, [Shadow(rank << 24, SMEM) for rank in range(2)])
  det.write(T, T * 16, 16, "own")
  det.write(T + 128, T * 16 + (1 << 24), 16, "own")
  det.read(T, np.where(T % 2, T * 16, T * 16), 16, "own again")
  assert not det.findings

  both = np.concatenate([T[:1], T[:1] + (1 << 24)])
  det.read(np.asarray([1, 129]), both, 16, "other's")
  assert [(f.kind, f.addresses) for f in det.findings] == [(races.RACE, (0,))]


# --- cost

def gemm() -> RaceDetector:
  """384 threads, 4 stages of 128x256x64, K = 2048: TMA, wgmma of two warpgroups, then an epilogue."""
  det = RaceDetector(384, [Shadow(0, 232448)])
  producer, groups = np.arange(1), [np.arange(128, 256), np.arange(256, 384)]
  stage, k = 49152, 32
  a_bytes, b_bytes = np.arange(0, 16384, 16), np.arange(16384, stage, 16)
  empty: list[Clock] = [NOTHING] * 4
  det.barrier(np.arange(384))
  pending: list[list] = [[], []]
  for i in range(k):
    at = i % 4 * stage
    det.acquire(producer, empty[i % 4])
    empty[i % 4] = NOTHING
    full = det.release(producer)
    for box in (a_bytes, b_bytes[:1024], b_bytes[1024:]):
      agent = det.issue(producer, "TMA load")
      det.agent_write(agent, box + at, 16, "tma")
      full = det.merge(full, det.complete(agent))
    for w, threads in enumerate(groups):
      det.acquire(threads, full)
      for step in range(4):
        agent = det.issue(threads, "wgmma")
        det.agent_read(agent, a_bytes[512 * w + step:512 * (w + 1):8] + at, 16, "wgmma")
        det.agent_read(agent, b_bytes[512 * step:512 * (step + 1)] + at, 16, "wgmma")
        pending[w].append((agent, i % 4))
      while len(pending[w]) > 4:
        agent, slot = pending[w].pop(0)
        det.acquire(threads, det.complete(agent))
        if len(pending[w]) % 4 == 0:
          empty[slot] = det.merge(empty[slot], det.release(threads[:1]))
  for threads in groups:
    for _ in range(2):
      places = 4 * stage + (threads - 128) * 16 + np.arange(0, 32768, 4096)[:, None]
      for at in places:
        det.write(threads, at, 16, "stmatrix")
      det.proxy_fence(threads)
      det.barrier(threads)
      agent = det.issue(threads[:1], "TMA store")
      det.agent_read(agent, places.ravel(), 16, "tma store")
      det.acquire(threads[:1], det.complete(agent))
      det.barrier(threads)
  return det


def test_a_gemm_has_no_findings_and_costs_a_fraction_of_a_second():
  begin = time.process_time()
  det = gemm()
  assert time.process_time() - begin < 0.8
  assert not det.findings


def test_a_gemm_takes_few_megabytes():
  tracemalloc.start()
  gemm()
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 32 << 20


def test_a_thousand_threads_cost_milliseconds_for_each_barrier():
  det = RaceDetector(1024, [Shadow(0, 1 << 16)])
  threads = np.arange(1024)
  begin = time.process_time()
  for i in range(20):
    det.write(threads, threads * 4 + i % 2 * 4096, 4, "store")
    det.barrier(threads)
    det.read(threads, threads[::-1] * 4 + i % 2 * 4096, 4, "load")
  assert not det.findings
  assert time.process_time() - begin < 1
