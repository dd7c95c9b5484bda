"""What a target GPU offers: the limits that passes and errors read, and the rates that reports compare with.

sm_90a is Hopper's: TMA, wgmma, clusters. sm_80, sm_86 and sm_89 have none of these: copies are cp.async, products
mma.sync. Their programs run on every newer GPU as well, assembled for it (`machine`).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping

WARPS = 4                # of a warpgroup


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
  """Limits of one PTX target.

  Attributes:
    name: the `.target` of the PTX text, e.g. "sm_90a".
    compute_capability: of the GPUs that it is made for.
    smem_bytes: dynamic shared memory that one CTA may ask for (CUDA Programming Guide, table of compute capabilities).
    registers: 32-bit registers of one SM, all of which one CTA may hold.
    max_threads: threads of one CTA.
    named_barriers: `bar` resources of one CTA; 0 is the whole CTA's.
    grid_x: largest grid extent along x (y and z are not used).
    max_cluster: CTAs of a cluster that every GPU of the target takes.
    sm_smem_bytes, sm_threads, sm_ctas: what all CTAs of an SM share (CUDA Programming Guide, table of compute
      capabilities).
    reserved_smem_bytes: shared memory that the system takes for each CTA (Hopper Tuning Guide, "Shared Memory").
  """
  name: str
  compute_capability: tuple[int, int]
  smem_bytes: int
  registers: int
  max_threads: int
  named_barriers: int
  grid_x: int
  sm_count: int
  max_cluster: int
  sm_smem_bytes: int
  sm_threads: int
  sm_ctas: int
  reserved_smem_bytes: int

  def lacks(self, floor: str) -> str | None:
    """The reason to decline what only targets from `floor` on have ("sm_90"; "sm_90a": that target alone); else None.

    >>> SM_80.lacks("sm_90"), SM_90A.lacks("sm_90")
    ('it needs sm_90, the target is sm_80', None)
    """
    return None if accepts(self.name, floor) else f"it needs {floor}, the target is {self.name}"

  def machine(self, capability: int | None) -> str:
    """What its programs are assembled for: the GPU, where that is of a later generation; else the target itself.

    Args:
      capability: compute capability of the GPU times ten; None: no GPU is known.
    """
    major, _ = self.compute_capability
    if capability is None or self.name.endswith("a") or capability // 10 <= major:
      return self.name
    return f"sm_{capability}"


def accepts(target: str, floor: str) -> bool:
  """Whether a target has what exists from `floor` on. An "a" feature exists on that very target only."""
  if floor.endswith("a"):
    return target == floor
  return int(target.strip("sm_a")) >= int(floor.strip("sm_"))


def target_of(capability: int) -> Target | None:
  """The target whose programs suit a GPU best; None where none run there.

  Args:
    capability: compute capability times ten. 87 has the shared memory of 80; from 100 on what all have is sm_89's.
  """
  if capability == 90:
    return SM_90A
  if capability < 80:
    return None
  return {80: SM_80, 87: SM_80, 86: SM_86}.get(capability, SM_89)


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
  """Peak rates of a GPU, for rooflines.

  Attributes:
    tensor_flops: dense FLOPs a second of all tensor cores, by dtype of the operands.
    f32_flops: FLOPs a second of the other units, a fused multiply-add counting as two.
    bandwidth: bytes a second of global memory.
  """
  name: str
  tensor_flops: Mapping[str, float]
  f32_flops: float
  bandwidth: float


SM_90A = Target("sm_90a", (9, 0), smem_bytes=232448, registers=65536, max_threads=1024, named_barriers=16,
                grid_x=2**31 - 1, sm_count=132, max_cluster=8, sm_smem_bytes=233472, sm_threads=2048, sm_ctas=32,
                reserved_smem_bytes=1024)
SM_80 = dataclasses.replace(SM_90A, name="sm_80", compute_capability=(8, 0), smem_bytes=166912, sm_count=108,
                            max_cluster=1, sm_smem_bytes=167936)
SM_86 = dataclasses.replace(SM_80, name="sm_86", compute_capability=(8, 6), smem_bytes=101376, sm_count=84,
                            sm_smem_bytes=102400, sm_threads=1536, sm_ctas=16)
SM_89 = dataclasses.replace(SM_86, name="sm_89", compute_capability=(8, 9), sm_count=142, sm_ctas=24)
# NVIDIA H200 Tensor Core GPU datasheet, H200 SXM; its numbers for tensor cores are with sparsity, twice these.
H200 = Device("H200 SXM", {"f32": 494.5e12, "f16": 989.5e12, "bf16": 989.5e12, "f8e4m3": 1979e12, "f8e5m2": 1979e12,
                           "i8": 1979e12, "u8": 1979e12}, f32_flops=67e12, bandwidth=4.8e12)
# NVIDIA A100, A40 and L40S datasheets, without sparsity.
A100 = Device("A100 80GB SXM", {"f32": 156e12, "f16": 312e12, "bf16": 312e12, "i8": 624e12, "u8": 624e12},
              f32_flops=19.5e12, bandwidth=2.039e12)
A40 = Device("A40", {"f32": 74.8e12, "f16": 149.7e12, "bf16": 149.7e12, "i8": 299.3e12, "u8": 299.3e12},
             f32_flops=37.4e12, bandwidth=0.696e12)
L40S = Device("L40S", {"f32": 183e12, "f16": 362e12, "bf16": 362e12, "f8e4m3": 733e12, "f8e5m2": 733e12, "i8": 733e12,
                       "u8": 733e12}, f32_flops=91.6e12, bandwidth=0.864e12)
DEVICES = {"sm_90a": H200, "sm_80": A100, "sm_86": A40, "sm_89": L40S}
TARGETS = {t.name: t for t in (SM_90A, SM_80, SM_86, SM_89)}
