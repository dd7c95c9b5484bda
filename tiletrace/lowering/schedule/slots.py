"""The slots of a ring: what they lie in, who touches them, how they are released."""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import Atom, Block, Eqn, Var
from tiletrace.core.ops import control, mma
from tiletrace.lowering.schedule.asynchrony import accesses
from tiletrace.lowering.schedule.builder import Builder
from tiletrace.lowering.schedule.rings import Ring
from tiletrace.lowering.target import WARPS


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RingResources:
  """What a ring became: buffers with a leading slot dimension, and its two barrier arrays.

  `multicast`: copy -> axes of the grid along which the cluster's CTAs share it. A slot of a shared ring is free when
  the consumers of all CTAs have read theirs.
  `by_warps`: threads read the slots themselves: each warp releases what it has read, and waits for no other.
  """
  ring: Ring
  buffers: dict[Var, Var]
  full: Var
  empty: Var
  multicast: dict[Eqn, tuple[int, ...]] = dataclasses.field(default_factory=dict)
  by_warps: bool = False

  def release(self, b: Builder, slot: Atom, arrivals: int) -> None:
    if self.by_warps:
      b.arrive(self.empty, slot, arrivals * WARPS, each="warp")
    else:
      b.arrive(self.empty, slot, arrivals, cluster=bool(self.multicast))


def touched_by_threads(eqn: Eqn, ring: Ring) -> bool:
  """Whether an equation, blocks included, reads the ring other than by wgmma, or changes what is in its slot; but for
  branches that change a slot last, which end with a fence and a sync of their own (syncs.py)."""
  if any(eqn in s.copies for s in ring.segments):
    return False
  buffers = set(ring.buffers)
  if eqn.blocks:
    return any(touched_in(b, ring) and not (eqn.primitive is control.cond_p and _changed_last(b, buffers))
               for b in eqn.blocks)
  reads, writes = accesses(eqn)
  return eqn.primitive is not mma.gemm_p and bool((reads | writes) & buffers)


def touched_in(block: Block, ring: Ring) -> bool:
  """Whether threads read a ring's slots themselves, or change what is in them before others use it."""
  return any(touched_by_threads(e, ring) for e in block.eqns)


def _changed_last(block: Block, buffers: set[Var]) -> bool:
  """The last of the block's own accesses to the buffers by threads is a write."""
  for eqn in reversed(block.eqns):
    reads, writes = accesses(eqn)
    if (reads | writes) & buffers:
      return not eqn.blocks and eqn.primitive is not mma.gemm_p and bool(writes & buffers)
  return False
