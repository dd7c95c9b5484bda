"""Wavefronts of shared memory, by the clock: what `sim.banks` counts is what the loads of warps take on a GPU."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.gpu.agreement import record
from tests.gpu.isa_rows import THREADS, Kernel, Writer
from tiletrace.lowering.ptx import isa
from tiletrace.sim.banks import shared_wavefronts
from tiletrace.sim.tensor_map import swizzle_addresses

LANES = np.arange(32)
LOADS, APART = 24, 4096          # loads of a thread, and the bytes between them: the same banks
ROUNDS = 4                       # the first warms up


@dataclasses.dataclass(frozen=True)
class Pattern:
  """Byte addresses of a warp's lanes below 4096, and the bytes of each."""
  name: str
  addresses: tuple[int, ...]
  nbytes: int

  def __str__(self) -> str:
    return self.name

  @property
  def wavefronts(self) -> int:
    return int(shared_wavefronts(np.array(self.addresses)[None], self.nbytes, loads=True)[0])


def pattern(name: str, addresses: np.ndarray, nbytes: int) -> Pattern:
  return Pattern(name, tuple(map(int, addresses % APART // nbytes * nbytes)), nbytes)


RANDOM = np.random.default_rng(1)
PATTERNS = (
    pattern("one word", 0 * LANES, 4), pattern("consecutive words", 4 * LANES, 4),
    pattern("every other word", 8 * LANES, 4), pattern("every fourth word", 16 * LANES, 4),
    pattern("one bank", 128 * LANES, 4), pattern("halves", 2 * LANES, 2),
    pattern("consecutive pairs", 8 * LANES, 8), pattern("every other pair", 16 * LANES, 8),
    pattern("pairs of one bank", 128 * LANES, 8), pattern("one pair", 0 * LANES, 8),
    pattern("consecutive quads", 16 * LANES, 16), pattern("every other quad", 32 * LANES, 16),
    pattern("quads of one bank", 128 * LANES, 16), pattern("one quad", 0 * LANES, 16),
    pattern("pairs of neighbours", 8 * (LANES // 2), 8), pattern("quads of neighbours", 16 * (LANES // 2), 16),
    pattern("quads of lanes 2 apart", 16 * (LANES // 4 * 2 + LANES % 2), 16),
    pattern("quads of 4", 16 * (LANES // 4), 16),
    pattern("swizzled rows of quads", swizzle_addresses(128 * LANES, 128), 16),
    *(pattern(f"random {n} bytes, {i}", RANDOM.integers(0, APART, 32), n) for n in (4, 8, 16) for i in range(3)),
)


def timed(p: Pattern) -> Kernel:
  """Four warps, one on each scheduler, time their loads: enough in flight to keep the shared memory busy.

  The addresses depend on the first clock, and a store of all that was loaded precedes the second.
  """
  w = Writer(smem=APART * LOADS + APART)
  b = w.b
  offsets = w.load("b32", np.tile(p.addresses, THREADS // 32).astype(np.uint32))
  zero = w.load("b32", np.zeros(THREADS, np.uint32))
  base = b.new(isa.MOV_SYMBOL, w.shared, type="u32")
  own = b.new(isa.MAD_LO, w.tid, 4, base, type="u32")
  for at in range(0, APART * LOADS + APART, 4 * THREADS):
    b(isa.ST_SHARED, b.addr(own, at), zero, type="b32")
  times = []
  words = max(p.nbytes // 4, 1)
  for _ in range(ROUNDS):
    b(isa.BAR_SYNC_ALL, 0)
    before = b.special("clock")
    at = b.new(isa.ADD, b.new(isa.ADD, base, offsets, type="u32"), b.new(isa.AND, before, zero, type="b32"), type="u32")
    total = b.new(isa.MOV, 0, type="b32")
    parts = []
    for i in range(LOADS):
      address = b.addr(at, APART * i)
      if p.nbytes == 2:
        parts.append(b.new(isa.LD_SHARED, address, type="b16"))
      elif words == 1:
        parts.append(b.new(isa.LD_SHARED, address, type="b32"))
      else:
        parts += b.new(isa.LD_SHARED, address, vec=f"v{words}", type="b32")
    for part in parts:
      x = b.new(isa.CVT, part, to="u32", source="u16") if p.nbytes == 2 else part
      total = b.new(isa.XOR, total, x, type="b32")
    b(isa.ST_SHARED, b.addr(own, APART * LOADS), total, type="b32")
    b(isa.BAR_SYNC_ALL, 0)
    times.append(b.new(isa.SUB, b.special("clock"), before, type="u32"))
  for i, t in enumerate(times):
    w.keep(isa.LD_SHARED.form(type="b32"), "u32", t, part=i)
  return w.kernel()


@pytest.mark.parametrize("p", PATTERNS, ids=str)
def test_the_timed_kernels_run_in_the_simulator(p: Pattern):
  kernel = timed(p)
  assert kernel.assemble().image
  kernel.simulate()
  assert 1 <= p.wavefronts <= 32 * max(p.nbytes // 4, 1)


@pytest.mark.gpu
def test_loads_take_a_cycle_for_each_wavefront():
  """Against the loads of one word, which take one each: what is not the loads' own is the same."""
  def cycles(p: Pattern) -> float:
    kernel = timed(p)
    memory = kernel.launch()
    return min(float(r.read(memory).max()) for r in kernel.results[1:])

  loads = LOADS * THREADS // 32
  start = cycles(PATTERNS[1]) - loads
  measured = {p.name: (cycles(p) - start) / loads for p in PATTERNS}
  counted = {p.name: p.wavefronts for p in PATTERNS}
  for name, n in counted.items():
    record("wavefronts of shared memory, in cycles a load", name, False, abs(measured[name] - n), 0.1 * n + 1)
  wrong = {name: (measured[name], counted[name]) for name in counted
           if abs(measured[name] - counted[name]) > 0.1 * counted[name] + 1}
  assert not wrong, f"(measured, counted) cycles a load: {wrong}"
