"""Kernels of single instructions, and the two machines that run them: the simulator and a GPU.

A kernel of one CTA, or of one cluster, reads each thread's operands from its first argument, executes instructions one
after another, and writes what each leaves to its second.
"""
from __future__ import annotations

import dataclasses

import numpy as np

from tests.gpu.worker import in_worker, launched
from tiletrace.ffi.image import KernelImage, Param, TensorMapSpec
from tiletrace.lowering.assemble import AssembleOptions, Cubin, assemble
from tiletrace.lowering.ptx import Module, isa
from tiletrace.lowering.ptx.instr import Form
from tiletrace.lowering.ptx.module import Builder, Param as ModuleParam
from tiletrace.lowering.ptx.registers import Addr, Reg
from tiletrace.sim.adversary import Adversary
from tiletrace.sim.launch import run_launch
from tiletrace.sim.machine import Launch
from tiletrace.sim.memory import Global
from tiletrace.sim.program import Program
from tiletrace.sim.races import Grid
from tiletrace.sim.shadow import Shadow

THREADS = 128
BYTES = {"pred": 4, "b16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8}
DTYPES = {"pred": np.uint32, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "f32": np.float32, "f64": np.float64}
_ACCESS = {"pred": "b32", "b16": "b16", "b32": "b32", "b64": "b64", "f32": "f32", "f64": "f64"}


@dataclasses.dataclass(frozen=True)
class Result:
  """Where a kernel leaves one result.

  Attributes:
    form: whose. type: of the slot. cls: of the register.
    offset: its bytes in the output.
    sources: [THREADS] registers of each source operand, in print order; literals as numbers.
    part: which of the instruction's results it is.
    count: how many registers.
  """
  form: Form
  type: str
  cls: str
  offset: int
  sources: tuple = ()
  part: int = 0
  count: int = THREADS

  def read(self, memory: np.ndarray) -> np.ndarray:
    """[count] registers of the class from the kernel's second argument."""
    return memory[self.offset:self.offset + self.count * BYTES[self.cls]].view(DTYPES[self.cls])


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A module of one kernel.

  Attributes:
    inputs: bytes of the first argument. nbytes: of the second. smem: bytes of shared memory.
    results: what the second then holds.
    maps: tensor maps of the arguments (operand 0 and 1), the further parameters.
    ctas: of the cluster.
  """
  module: Module
  inputs: np.ndarray
  nbytes: int
  smem: int
  results: tuple[Result, ...]
  maps: tuple[TensorMapSpec, ...] = ()
  ctas: int = 1

  def simulate(self, seed: int = 0) -> np.ndarray:
    """The output bytes; a fault or a race fails the test. `seed` is of what the hardware leaves open."""
    memory = Global({"inputs": self.inputs, "outputs": np.full(self.nbytes, 0xFF, np.uint8)})
    (entry,) = self.module.entries
    values = [*(a.address for a in memory.arrays), *range(len(self.maps))]
    params = {p.name: value for p, value in zip(entry.params, values, strict=True)}
    extent = (self.ctas, 1, 1)
    run = Launch(Program(self.module, entry), memory, params, self.maps, extent, extent, self.smem, Adversary(seed),
                 most_steps=10**6)
    run.grid_order = Grid()
    run.shadows = tuple(Shadow(a.address, -(-a.nbytes // 16) * 16, grid_wide=True, read_only=i == 0)
                        for i, a in enumerate(memory.arrays))
    run_launch(run)
    assert not run.findings, str(run.findings[0])
    return memory.contents(1, (self.nbytes,), np.dtype(np.uint8))

  def assemble(self) -> Cubin:
    return assemble(self.module.render(), "sm_90a", AssembleOptions(allow_spills=True))

  def launch(self) -> np.ndarray:
    """The output bytes of the GPU; what fails there fails the test, not the tests after it."""
    params: tuple[Param, ...] = (("operand", 0), ("operand", 1), *(("tensormap", i) for i in range(len(self.maps))))
    image = KernelImage(name=self.module.entries[0].name, cubin=self.assemble().image, grid=(self.ctas, 1, 1),
                        block=THREADS, cluster=(self.ctas, 1, 1) if self.ctas > 1 else None, smem_bytes=self.smem,
                        params=params, tensor_maps=self.maps, persistent=False, source="isa_rows.py:1",
                        fingerprint="isa_rows")
    return in_worker(launched, image, self.inputs, self.nbytes)


class Writer:
  """Builds a kernel: operands by slot, results by slot."""

  def __init__(self, smem: int = 0, maps: int = 0, ctas: int = 1, min_ctas: int | None = None):
    self.module = Module("sm_90a")
    self.smem = smem
    self.shared = self.module.dynamic_shared("smem", align=1024) if smem else None
    params = [("inputs", "u64"), ("outputs", "u64"), *((f"map{i}", "tensormap") for i in range(maps))]
    entry = self.module.entry("forms", [ModuleParam(*p) for p in params], THREADS,
                              cluster=(ctas,) if ctas > 1 else None, min_ctas=min_ctas)
    self.ctas, self.threads = ctas, ctas * THREADS
    self.maps: list[TensorMapSpec] = []
    self.b: Builder = entry.builder()
    self.tid = self.b.special("tid.x")
    place = self.tid if ctas == 1 else self.b.new(isa.MAD_LO, self.b.special("ctaid.x"), THREADS, self.tid, type="u32")
    self._bases = {}
    for name in ("inputs", "outputs"):
      pointer = self.b.new(isa.LD_PARAM, self.b.addr(entry.param(name)), type="u64")
      for size in (2, 4, 8, 16):
        self._bases[name, size] = self.b.new(isa.MAD_WIDE, place, size, pointer, type="u32")
    self.pieces: list[np.ndarray] = []
    self.at = 0
    self.out = 0
    self.results: list[Result] = []
    self._known: dict[tuple, Reg] = {}

  def tensor_map(self, spec: TensorMapSpec) -> Reg:
    """The next map's generic address."""
    symbol = self.b.entry.param(f"map{len(self.maps)}")
    self.maps.append(spec)
    return self.b.new(isa.CVTA, self.b.new(isa.MOV_SYMBOL, symbol, type="u64"), space="param")

  def address(self, name: str, size: int, offset: int) -> Addr:
    """Byte `offset` + `size` times the thread (of all CTAs) of an argument."""
    return self.b.addr(self._bases[name, size], offset)

  def data(self, values: np.ndarray) -> int:
    """Places bytes in the input, aligned to 16; their offset."""
    start = self.at
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    self.pieces.append(np.pad(flat, (0, -len(flat) % 16)))
    self.at += len(self.pieces[-1])
    return start

  def load(self, cls: str, values: np.ndarray) -> Reg:
    """A register of a class that holds [threads] values; equal values are loaded once."""
    key = (cls, values.tobytes())
    if key in self._known:
      return self._known[key]
    offset = self.data(values.astype(DTYPES[cls]))
    memory = self.address("inputs", BYTES[cls], offset)
    if cls == "pred":
      loaded = self.b.new(isa.LD_GLOBAL, memory, type="b32")
      reg = self.b.new(isa.SETP, loaded, 0, cmp="ne", type="b32")
    else:
      reg = self.b.reg(cls)
      self.b(isa.LD_GLOBAL, reg, memory, type=_ACCESS[cls])
    self._known[key] = reg
    return reg

  def space(self, nbytes: int) -> int:
    """Offset of so many bytes of output."""
    start = self.out
    self.out += -(-nbytes // 16) * 16
    return start

  def keep(self, form: Form, type_: str, reg: Reg, sources: tuple = (), part: int = 0) -> None:
    """Stores a register as a result."""
    offset = self.space(8 * self.threads)
    memory = self.address("outputs", BYTES[reg.cls], offset)
    if reg.cls == "pred":
      self.b(isa.ST_GLOBAL, memory, self.b.new(isa.SELP, 1, 0, reg, type="b32"), type="b32")
    else:
      self.b(isa.ST_GLOBAL, memory, reg, type=_ACCESS[reg.cls])
    self.results.append(Result(form, type_, reg.cls, offset, sources, part, self.threads))

  def keep_region(self, form: Form, offset: int, words: int) -> None:
    """`words` words of each thread, which are in the output already, as one result."""
    self.results.append(Result(form, "b32", "b32", offset, part=-1, count=words * self.threads))

  def kernel(self) -> Kernel:
    """The finished kernel."""
    self.b(isa.RET)
    return Kernel(self.module, np.concatenate(self.pieces or [np.zeros(16, np.uint8)]), max(self.out, 16), self.smem,
                  tuple(self.results), tuple(self.maps), self.ctas)
