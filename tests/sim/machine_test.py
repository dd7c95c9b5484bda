"""Strands diverge and meet again; whatever waits for ever is reported with what it waits for."""
from __future__ import annotations

import numpy as np
import pytest

from tests.sim.small import Small
from tiletrace.lowering.ptx import isa

SEEDS = range(6)
rng = np.random.default_rng(5)


def collatz() -> Small:
  """Steps to 1, with a branch in a loop of as many rounds as each thread needs."""
  k = Small(threads=64)
  b, n, steps = k.b, k.load(), k.b.reg("b32")
  b(isa.MOV, steps, 0, type="b32")
  loop, even, next_, done = (b.label(x) for x in ("loop", "even", "next", "done"))
  b.place(loop)
  b(isa.BRA, done, pred=k.compare("le", n, 1))
  b(isa.BRA, even, pred=k.compare("eq", b.new(isa.AND, n, 1, type="b32"), 0))
  b(isa.MAD_LO, n, n, 3, 1, type="u32")
  b(isa.BRA, next_)
  b.place(even)
  b(isa.SHR, n, n, 1, type="u32")
  b.place(next_)
  b(isa.ADD, steps, steps, 1, type="u32")
  b(isa.BRA, loop)
  b.place(done)
  # all lanes are together again: a shuffle of the whole warp
  b(isa.ADD, steps, steps, b.new(isa.SHFL, steps, 1, 31, -1, mode="bfly"), type="u32")
  k.store(steps)
  return k.end()


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_with_ways_of_their_own_meet_again(seed):
  x = rng.integers(1, 40, 64).astype(np.uint32)
  def steps(n: int) -> int:
    return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)
  want = np.array([steps(int(n)) for n in x], np.uint32)
  got = collatz().run(x, seed=seed)

  assert not got.faults
  np.testing.assert_array_equal(got.y, want + want[np.arange(64) ^ 1])


def test_lanes_that_end_early_are_not_waited_for():
  k = Small(threads=64)
  skip = k.skip_unless(k.compare("lt", k.b.new(isa.AND, k.tid, 31, type="b32"), 7))
  k.store(1)
  k.b(isa.RET)
  k.b.place(skip)
  k.store(2)
  got = k.end().run()

  assert not got.faults
  np.testing.assert_array_equal(got.y, np.where(np.arange(64) % 32 < 7, 1, 2))


def test_one_thread_may_wait_for_another_lane_of_its_warp():
  """Diverged lanes make progress independently, as on Volta and later."""
  k = Small(threads=32, smem=64)
  bar = k.b.addr(k.smem)
  k.init(bar, 1)
  other, join = k.b.label("other"), k.b.label("join")
  k.b(isa.BRA, other, pred=k.compare("eq", k.tid, 9))
  k.wait(bar, 0)
  k.b(isa.BRA, join)
  k.b.place(other)
  k.b(isa.MBARRIER_ARRIVE, bar)
  k.b.place(join)
  k.store(k.tid)
  for seed in SEEDS:
    got = k.run(seed=seed) if seed else k.end().run(seed=seed)
    assert not got.faults, str(got.faults[0])
    np.testing.assert_array_equal(got.y, np.arange(32))


def test_a_barrier_in_one_way_of_a_branch_is_not_uniform():
  k = Small()
  skip = k.skip_unless(k.compare("lt", k.tid, 16))
  k.sync()
  k.b.place(skip)
  [fault] = k.end().run().faults

  assert fault.kind == "not uniform"
  assert fault.threads == tuple(range(16))
  assert "16 of 32 lanes of warp 0" in fault.text


def test_a_register_that_some_lanes_have_not_written_is_found_where_it_is_read():
  k = Small()
  value = k.b.reg("b32")
  k.b(isa.MOV, value, 7, type="b32", pred=k.compare("lt", k.tid, 20))
  k.store(value)
  [fault] = k.end().run().faults

  assert fault.kind == "uninitialised register"
  assert fault.threads == tuple(range(20, 32))
  assert fault.place is not None and "st.global" in fault.place.text


def test_a_deadlock_says_who_waits_for_what_and_what_would_release_it():
  k = Small(threads=64, smem=64)
  bar = k.b.addr(k.smem, 8)
  k.init(bar, 2)
  skip = k.skip_unless(k.compare("ge", k.tid, 32))
  k.wait(bar, 0)
  k.b.place(skip)
  k.sync()
  [fault] = k.end().run().faults

  assert fault.kind == "deadlock"
  text = str(fault)
  assert "all 64 living threads wait" in text
  assert "threads 32-63" in text and "mbarrier 0x408, phase 0 (parity 0): 0 of 2 arrivals" in text
  assert "nothing has arrived at it so far" in text
  assert "threads 0-31" in text and "barrier 0: 32 of 64 threads have come (0-31)" in text


def test_a_kernel_that_never_ends_is_stopped_with_the_state_of_every_warp():
  k = Small(threads=64)
  loop = k.b.label("loop")
  k.b.place(loop)
  k.b(isa.BRA, loop, pred=k.compare("ge", k.tid, 32))
  k.sync()
  [fault] = k.end().run(most_steps=500).faults

  assert fault.kind == "step limit"
  assert any("threads 32-63" in line and "runs" in line for line in fault.warps)
  assert any("threads 0-31" in line and "waits for barrier 0" in line for line in fault.warps)


def test_trap_ends_the_run():
  k = Small()
  k.b(isa.TRAP, pred=k.compare("eq", k.tid, 3))
  [fault] = k.end().run().faults

  assert (fault.kind, fault.threads) == ("trap", (3,))


def test_a_cta_that_waits_for_a_later_one_is_not_stuck():
  """CTAs that cannot go on, or spin, make room for others, as long as there are SMs."""
  k = Small(ctas=3)
  flag = k.b.new(isa.LD_PARAM, k.b.addr(k.entry.param("y")), type="u64")
  first = k.compare("eq", k.b.special("ctaid.x"), 0)
  other, done, loop = k.b.label("other"), k.b.label("done"), k.b.label("loop")
  k.b(isa.BRA, other, pred=first, negate=True)
  k.b.place(loop)
  seen = k.b.new(isa.LD_SYNC, k.b.addr(flag, 4 * 64), sem="acquire", scope="gpu", type="u32")
  k.b(isa.BRA, loop, pred=k.compare("eq", seen, 0xFFFF_FFFF))
  k.store(seen)
  k.b(isa.BRA, done)
  k.b.place(other)
  k.b(isa.ST_SYNC, k.b.addr(k.pointer("y")), 5, sem="release", scope="gpu", type="u32")
  k.b.place(done)
  got = k.end().run()

  assert not got.faults, str(got.faults[0])
  np.testing.assert_array_equal(got.y, 5)


def test_one_seed_is_one_run():
  x = rng.integers(1, 40, 64).astype(np.uint32)
  for seed in SEEDS:
    one, two = (collatz().run(x, seed=seed) for _ in range(2))
    np.testing.assert_array_equal(one.y, two.y)


# ---- register budgets


def budget(take: int, give: int) -> list[str]:
  k = Small(threads=384)
  consumer = k.b.label("consumer")
  k.b(isa.BRA, consumer, pred=k.compare("ge", k.tid, 128))
  k.b(isa.SETMAXNREG, give, dir="dec")
  k.b(isa.RET)
  k.b.place(consumer)
  k.b(isa.SETMAXNREG, take, dir="inc")
  return k.end().run().kinds


def test_registers_that_another_role_releases_are_there():
  assert budget(240, 24) == []
  assert budget(232, 40) == []


def test_registers_that_nobody_has_are_waited_for_in_vain():
  assert budget(240, 40) == ["register budget"]        # hangs on an H200


def test_setmaxnreg_in_the_wrong_direction_is_found():
  assert budget(160, 24) == ["register budget"]        # the launch gave 168
