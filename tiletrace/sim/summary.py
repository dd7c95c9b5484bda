"""What a simulated launch did: instructions by class, FLOPs, bytes by path, bank wavefronts, waits.

These are counts, not times. Beside each other stand the cycles that an SM's tensor cores need for the wgmma, and the
cycles of its shared memory (128 bytes or one wavefront each): whichever is more bounds the kernel from below.
"""
from __future__ import annotations

import collections
import dataclasses
import json
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.sim.banks import SECTOR, global_sectors, shared_wavefronts
from tiletrace.sim.program import Op, Program
from tiletrace.sim.strands import WARP

_PORT = 128                      # bytes of shared memory per cycle and SM
# Dense FLOPs per cycle and SM of a H100 or H200: 989.5 TFLOP/s of bf16 at 1.83 GHz on 132 SMs (NVIDIA H100 datasheet).
_FLOPS_PER_CYCLE = {"tf32": 2048, "f16": 4096, "bf16": 4096, "e4m3": 8192, "e5m2": 8192, "s8": 8192, "u8": 8192}
_ITEM = {"tf32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_CLASSES = {"isa_integer": "integer", "isa_float": "float", "isa_memory": "memory", "isa_async": "asynchronous",
            "isa_mma": "matrix", "isa_control": "control"}
_CLASS = {row: _CLASSES[family.__name__.rpartition(".")[2]] for family in isa.FAMILIES for row in vars(family).values()
          if row in isa.ROWS.values()}


@dataclasses.dataclass(slots=True)
class Counters:
  """Counts of a launch.

  Attributes:
    executed: how many warps ran each instruction, by its index.
    bytes: path -> bytes asked for.
    wavefronts, ideal: of shared memory accesses by threads, as they are and without bank conflicts.
    sectors: of 32 bytes, of global memory accesses by threads.
    conflicts: instruction -> wavefronts beyond the ideal.
    flops: of tensor cores. mma_cycles, operand_bytes: cycles they need, and bytes they read from shared memory.
    waits: instruction -> how often warps had to wait there.
  """
  program: Program
  executed: list[int] = dataclasses.field(default_factory=list)
  bytes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  wavefronts: int = 0
  ideal: int = 0
  sectors: int = 0
  conflicts: collections.Counter[Op] = dataclasses.field(default_factory=collections.Counter)
  flops: int = 0
  mma_cycles: float = 0.0
  operand_bytes: int = 0
  waits: collections.Counter[Op] = dataclasses.field(default_factory=collections.Counter)

  def access(self, op: Op, threads: np.ndarray, addresses: np.ndarray, nbytes: int, shared: bool) -> None:
    """Threads read or write `nbytes` at `addresses` each."""
    reads = op.inst.form.head.startswith("ld")
    self.bytes[f"{'shared' if shared else 'global'} {'to registers' if reads else 'from registers'}"] += (
        nbytes * len(threads))
    by_lane, active = _by_warp(threads, addresses)
    if shared:
      waves = shared_wavefronts(by_lane, nbytes, active, loads=op.inst.form.head.startswith("ld.shared"))
      least = np.maximum(1, -(-active.sum(1) * nbytes // _PORT))
      self.wavefronts += int(waves.sum())
      self.ideal += int(np.minimum(least, waves).sum())
      if (waves > least).any():
        self.conflicts[op] += int((waves - least).clip(0).sum())
    else:
      self.sectors += int(global_sectors(by_lane, nbytes, active).sum())

  def cp_async(self, op: Op, threads: np.ndarray, addresses: np.ndarray, target: np.ndarray, nbytes: int) -> None:
    self.bytes["global to shared by cp.async"] += nbytes * len(threads)
    by_lane, active = _by_warp(threads, target)
    waves = shared_wavefronts(by_lane, nbytes, active)
    self.wavefronts += int(waves.sum())
    self.ideal += int(np.minimum(waves, np.maximum(1, -(-active.sum(1) * nbytes // _PORT))).sum())

  def bulk(self, op: Op, nbytes: int, *, load: bool) -> None:
    self.bytes["global to shared by TMA" if load else "shared to global by TMA"] += nbytes

  def wgmma(self, op: Op, shape: Any, warpgroups: int) -> None:
    flops = 2 * 64 * shape.n * shape.k * warpgroups
    self.flops += flops
    self.mma_cycles += flops / _FLOPS_PER_CYCLE[shape.a]
    rows = shape.n + (64 if any(s.name == "a_desc" for s in op.inst.form.slots) else 0)
    self.operand_bytes += rows * shape.k * _ITEM[shape.a] * warpgroups

  def mma(self, op: Op, warps: int) -> None:
    m, n, k = (int(x) for x in op.inst.mods["shape"][1:].replace("n", "k").split("k"))
    self.flops += 2 * m * n * k * warps
    self.mma_cycles += 2 * m * n * k * warps / _FLOPS_PER_CYCLE[op.inst.mods["a"]]

  def wait(self, op: Op, warps: int) -> None:
    self.waits[op] += warps

  # ---- what is printed

  @property
  def port_cycles(self) -> float:
    """Of shared memory: wavefronts of threads, and what tensor cores and TMA move, 128 bytes a cycle."""
    moved = self.bytes["global to shared by TMA"] + self.bytes["shared to global by TMA"] + self.operand_bytes
    return self.wavefronts + moved / _PORT

  def data(self) -> dict[str, Any]:
    """As plain data."""
    classes: collections.Counter[str] = collections.Counter()
    for op, n in zip(self.program.ops, self.executed):
      classes[_CLASS[op.inst.row]] += n
    return {
        "warp_instructions": dict(classes.most_common()), "flops": self.flops, "bytes": dict(self.bytes.most_common()),
        "shared_wavefronts": self.wavefronts, "shared_wavefronts_without_conflicts": self.ideal,
        "global_sectors": self.sectors, "global_sector_bytes": self.sectors * SECTOR,
        "shared_port_cycles": round(self.port_cycles), "mma_cycles": round(self.mma_cycles),
        "bank_conflicts": [{"ptx_line": op.line, "instruction": op.inst.form.head, "wavefronts": n,
                            "source": _source(op)} for op, n in self.conflicts.most_common(8)],
        "waits": [{"ptx_line": op.line, "instruction": op.inst.form.head, "warps": n, "source": _source(op)}
                  for op, n in self.waits.most_common(8)]}

  def text(self, *, as_json: bool = False) -> str:
    """For people, or as JSON."""
    data = self.data()
    if as_json:
      return json.dumps(data, indent=2)
    out = ["warp instructions: " + ", ".join(f"{k} {n}" for k, n in data["warp_instructions"].items())]
    out += [f"bytes, {path}: {n}" for path, n in data["bytes"].items()]
    if self.wavefronts:
      out.append(f"shared memory by threads: {self.wavefronts} wavefronts, {self.ideal} without bank conflicts")
    if self.sectors:
      out.append(f"global memory by threads: {self.sectors} sectors of {SECTOR} bytes")
    if self.flops:
      out.append(f"tensor cores: {self.flops} FLOPs, {self.mma_cycles:.0f} cycles of an SM; its shared memory: "
                 f"{self.port_cycles:.0f} cycles")
    out += [f"bank conflicts: {c['wavefronts']} more wavefronts by {c['instruction']} at PTX line {c['ptx_line']}"
            f"{_at(c['source'])}" for c in data["bank_conflicts"]]
    out += [f"waits: {w['warps']} warps at {w['instruction']}, PTX line {w['ptx_line']}{_at(w['source'])}"
            for w in data["waits"]]
    return "\n".join(out)


def _by_warp(threads: np.ndarray, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(addresses [warps, 32], which lanes are active)."""
  warps, inverse = np.unique(threads // WARP, return_inverse=True)
  out, active = np.zeros((len(warps), WARP), np.int64), np.zeros((len(warps), WARP), bool)
  out[inverse, threads % WARP], active[inverse, threads % WARP] = addresses, True
  return out, active


def _source(op: Op) -> str | None:
  return None if op.inst.loc is None else op.inst.loc.short()


def _at(source: str | None) -> str:
  return "" if source is None else f" ({source})"
