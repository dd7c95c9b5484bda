"""What a target GPU offers: the limits that passes and errors read, and the rates that reports compare with."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
  """Limits of one PTX target.

  Attributes:
    name: the `.target` of the PTX text, e.g. "sm_90a".
    compute_capability: (major, minor) that the device must have exactly ("a" targets) or at least.
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
# NVIDIA H200 Tensor Core GPU datasheet, H200 SXM; its numbers for tensor cores are with sparsity, twice these.
H200 = Device("H200 SXM", {"f32": 494.5e12, "f16": 989.5e12, "bf16": 989.5e12, "f8e4m3": 1979e12, "f8e5m2": 1979e12,
                           "i8": 1979e12, "u8": 1979e12}, f32_flops=67e12, bandwidth=4.8e12)
DEVICES = {"sm_90a": H200}
TARGETS = {t.name: t for t in (SM_90A,)}
