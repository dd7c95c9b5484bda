"""Two CTAs that hand data over through global memory: what orders them, and what is missing where they race."""
from __future__ import annotations

import numpy as np
import pytest

from tests.sim.small import Outcome, Small
from tiletrace.lowering.ptx import isa

THREADS = 64
WAYS = {"release and acquire": ("release", "acquire"), "fences": ("relaxed", "relaxed")}


def hand_over(way: str, *, without: str = "", scope: str = "gpu", seed: int = 0) -> Outcome:
  """CTA 0 stores y[tid] and sets a flag; CTA 1 waits for it and copies y[tid] + 1 to its own part.

  Args:
    without: "release fence", "acquire fence", "sync before" or "sync after": left out.
    scope: of everything strong.
  """
  k = Small(threads=THREADS, ctas=2)
  b, (release, acquire) = k.b, WAYS[way]
  data = b.new(isa.MAD_WIDE, k.tid, 4, b.new(isa.LD_PARAM, b.addr(k.entry.param("y")), type="u64"), type="u32")
  flag = b.addr(b.new(isa.LD_PARAM, b.addr(k.entry.param("y")), type="u64"), 4 * THREADS)      # of CTA 1, thread 0
  first, leads = k.compare("eq", b.special("ctaid.x"), 0), k.compare("eq", k.tid, 0)
  reader, end, waited, loop = (b.label(name) for name in ("reader", "end", "waited", "loop"))
  b(isa.BRA, reader, pred=first, negate=True)
  b(isa.ST_GLOBAL, b.addr(data), b.new(isa.ADD, k.tid, 7, type="u32"), type="u32")
  if without != "sync before":
    k.sync()
  b(isa.BRA, end, pred=leads, negate=True)
  if way == "fences" and without != "release fence":
    b(isa.FENCE, sem="acq_rel", scope=scope)
  b(isa.ST_SYNC, flag, 1, sem=release, scope=scope, type="u32")
  b(isa.BRA, end)
  b.place(reader)
  b(isa.BRA, waited, pred=leads, negate=True)
  b.place(loop)
  seen = b.new(isa.LD_SYNC, flag, sem=acquire, scope=scope, type="u32")
  b(isa.BRA, loop, pred=k.compare("ne", seen, 1))
  if way == "fences" and without != "acquire fence":
    b(isa.FENCE, sem="acq_rel", scope=scope)
  b.place(waited)
  if without != "sync after":
    k.sync()
  b(isa.BRA, end, pred=leads)
  k.store(b.new(isa.ADD, b.new(isa.LD_GLOBAL, b.addr(data), type="u32"), 1, type="u32"))
  b.place(end)
  return k.end().run(seed=seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", WAYS)
def test_a_flag_orders_two_ctas(way, seed):
  got = hand_over(way, seed=seed)

  assert not got.faults, str(got.faults[0])
  np.testing.assert_array_equal(got.y[THREADS + 1:], np.arange(1, THREADS) + 8)


@pytest.mark.parametrize("way, without", [
  ("fences", "release fence"), ("fences", "acquire fence"),
  *((way, sync) for way in WAYS for sync in ("sync before", "sync after"))])
def test_what_is_missing_is_a_race_between_ctas(way, without):
  found = [hand_over(way, without=without, seed=seed).kinds for seed in range(4)]

  assert ["race between CTAs"] in found, found
  assert all(set(kinds) <= {"race between CTAs"} for kinds in found)


@pytest.mark.parametrize("way", WAYS)
def test_the_scope_of_a_cta_does_not_reach_the_other(way):
  assert hand_over(way, scope="cta").kinds == ["race between CTAs"]
