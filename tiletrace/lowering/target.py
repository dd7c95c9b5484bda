"""What a target GPU offers: the limits that passes and errors read."""
from __future__ import annotations

import dataclasses


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


SM_90A = Target("sm_90a", (9, 0), smem_bytes=232448, registers=65536, max_threads=1024, named_barriers=16,
                grid_x=2**31 - 1, sm_count=132, max_cluster=8)
TARGETS = {t.name: t for t in (SM_90A,)}
