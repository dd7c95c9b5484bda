"""Kernels of a few instructions, written with the builder, for tests of the machine."""
from __future__ import annotations

import dataclasses

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.module import Builder, Module, Param
from tiletrace.lowering.ptx.registers import Addr, Label, Reg
from tiletrace.sim.adversary import Adversary
from tiletrace.sim.faults import Fault
from tiletrace.sim.launch import run_launch
from tiletrace.sim.machine import Launch
from tiletrace.sim.memory import Global
from tiletrace.sim.program import Program
from tiletrace.sim.races import Grid
from tiletrace.sim.shadow import Shadow


@dataclasses.dataclass(frozen=True)
class Outcome:
  y: np.ndarray
  faults: tuple[Fault, ...]

  @property
  def kinds(self) -> list[str]:
    return [f.kind for f in self.faults]


class Small:
  """A kernel `f(x, y)` of u32 arrays, one element for each thread of the launch.

  Attributes:
    b: its builder. tid: thread of the CTA. at: thread of the launch.
    smem: the shared address of its dynamic memory, where it has some.
  """

  def __init__(self, threads: int = 32, *, smem: int = 0, ctas: int = 1, cluster: bool = False,
               max_registers: int | None = None):
    self.threads, self.nbytes, self.ctas = threads, smem, ctas
    self.cluster = ctas if cluster else 1
    self.module = Module("sm_90a")
    symbol = self.module.dynamic_shared("smem", align=1024)
    self.entry = self.module.entry("f", [Param("x", "u64"), Param("y", "u64")], threads, min_ctas=1,
                                   cluster=(ctas,) if cluster else None, max_registers=max_registers)
    self.b: Builder = self.entry.builder()
    self.tid = self.b.special("tid.x")
    self.at = self.b.new(isa.MAD_LO, self.b.special("ctaid.x"), threads, self.tid, type="u32")
    self._pointers = {}
    for name in "xy":
      base = self.b.new(isa.LD_PARAM, self.b.addr(self.entry.param(name)), type="u64")
      self._pointers[name] = self.b.new(isa.MAD_WIDE, self.at, 4, base, type="u32")
    self.smem: Reg = self.b.new(isa.MOV_SYMBOL, symbol, type="u32")

  def pointer(self, name: str) -> Reg:
    """The address of this thread's element."""
    return self._pointers[name]

  def load(self) -> Reg:
    """This thread's element of x."""
    return self.b.new(isa.LD_GLOBAL, self.b.addr(self.pointer("x")), type="u32")

  def store(self, value: Reg | int, **guard) -> None:
    """Into this thread's element of y."""
    self.b(isa.ST_GLOBAL, self.b.addr(self.pointer("y")), value, type="u32", **guard)

  def shared(self, scale: int = 4, offset: int = 0) -> Addr:
    """smem + scale * tid + offset."""
    return self.b.addr(self.b.new(isa.MAD_LO, self.tid, scale, self.smem, type="u32"), offset)

  def compare(self, cmp: str, a: Reg, b: Reg | int) -> Reg:
    return self.b.new(isa.SETP, a, b, cmp=cmp, type="u32")

  def sync(self) -> None:
    self.b(isa.BAR_SYNC_ALL, 0)

  def skip_unless(self, predicate: Reg) -> Label:
    """A label to place where those go on for whom the predicate does not hold."""
    label = self.b.label("skip")
    self.b(isa.BRA, label, pred=predicate, negate=True)
    return label

  def wait(self, barrier: Addr, parity: Reg | int) -> None:
    """A loop of try_wait."""
    loop = self.b.label("wait")
    self.b.place(loop)
    done = self.b.new(isa.MBARRIER_TRY_WAIT, barrier, parity)
    self.b(isa.BRA, loop, pred=done, negate=True)

  def init(self, barrier: Addr, count: int) -> None:
    """By thread 0, for everybody."""
    done = self.skip_unless(self.compare("eq", self.tid, 0))
    self.b(isa.MBARRIER_INIT, barrier, count)
    self.b(isa.FENCE_MBARRIER_INIT)
    self.b.place(done)
    self.sync()

  def run(self, x: np.ndarray | None = None, *, seed: int = 0, most_steps: int = 100_000) -> Outcome:
    n = self.threads * self.ctas
    x = np.zeros(n, np.uint32) if x is None else x.view(np.uint32)
    memory = Global({"x": x, "y": np.full(n, 0xFFFF_FFFF, np.uint32)})
    params = {"x": memory.arrays[0].address, "y": memory.arrays[1].address}
    launch = Launch(Program(self.module), memory, params, (), (self.ctas, 1, 1), (self.cluster, 1, 1), self.nbytes,
                    Adversary(seed), most_steps, Grid(),
                    tuple(Shadow(a.address, a.nbytes, grid_wide=True, read_only=i == 0)
                          for i, a in enumerate(memory.arrays)))
    launch.written = frozenset({1})
    run_launch(launch)
    return Outcome(memory.contents(1, (n,), np.dtype(np.uint32)), tuple(launch.findings))

  def end(self) -> Small:
    self.b(isa.RET)
    return self
