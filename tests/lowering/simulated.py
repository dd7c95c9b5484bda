"""Runs lowered kernels in the simulator, for tests of what other parts of the compiler make."""
from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from tests.gpu.corpus import Case
from tiletrace.sim.adversary import Adversary
from tiletrace.sim.launch import run as simulate
from tiletrace.sim.machine import Launch, Machine
from tiletrace.sim.memory import Global
from tiletrace.sim.program import Program
from tiletrace.stages import Lowered

_CTAS = 3     # that a persistent kernel is launched with


def run(lowered: Lowered, case: Case) -> list[np.ndarray]:
  """The outputs of a case's kernel; any fault fails."""
  result = simulate(lowered.lowering, [np.asarray(x) for x in jax.tree.leaves(case.inputs)], num_sms=_CTAS)
  assert not result.faults, "\n".join(map(str, result.faults))
  return list(result.outputs)


class _Unbacked(Global):
  """Arrays far apart without any memory: notes which bytes are accessed; what is loaded is 0."""

  def __init__(self, count: int):
    super().__init__({})
    self.starts = [(i + 1) << 44 for i in range(count)]
    self.loads: set[int] = set()
    self.stores: set[int] = set()

  def offsets(self, addresses: np.ndarray, nbytes: int, alignment: int, threads: np.ndarray | Sequence[int]
              ) -> np.ndarray:
    assert not (addresses % alignment).any()
    return addresses

  def load(self, offsets: np.ndarray, size: int) -> np.ndarray:
    self.loads.update((offsets[:, None] + np.arange(size)).reshape(-1).tolist())
    return np.zeros(len(offsets), f"u{size}")

  def store(self, offsets: np.ndarray, size: int, values: np.ndarray) -> None:
    self.stores.update((offsets[:, None] + np.arange(size)).reshape(-1).tolist())


def global_accesses(lowered: Lowered, cta: int) -> list[tuple[set[int], set[int]]]:
  """For each array, the byte offsets that one program loads from and stores to, without any memory being there."""
  (entry,) = lowered.lowering.emitted.module.entries
  memory = _Unbacked(len(entry.params))
  programs = math.prod(lowered.lowering.graph.options.grid)
  launch = Launch(Program(lowered.lowering.emitted.module, entry), memory,
                  {p.name: start for p, start in zip(entry.params, memory.starts, strict=True)}, (), (programs, 1, 1),
                  (1, 1, 1), lowered.lowering.program.smem_bytes, Adversary(0), 10**6)
  machine = Machine(launch)
  machine.start(cta)
  with np.errstate(all="ignore"):
    while machine.step() == "ran":
      pass
  def within(seen: set[int], start: int) -> set[int]:
    return {a - start for a in seen if 0 <= a - start + (1 << 43) < 1 << 44}
  return [(within(memory.loads, start), within(memory.stores, start)) for start in memory.starts]
