"""Syncs and fences for memory that threads write and read themselves, from the order of effects."""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Set

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Block, Eqn, Var, walk
from tiletrace.core.ops.barrier import barrier_wait_p, sync_p
from tiletrace.core.ops.mma import gemm_async_p, wgmma_wait_p
from tiletrace.core.rules import effects
from tiletrace.core.source import Loc
from tiletrace.lowering.schedule.builder import Builder


@dataclasses.dataclass(slots=True)
class _State:
  """Since the last sync: buffers that threads wrote, and buffers that were read. `unfenced`: written by ordinary
  stores, not yet visible to wgmma and TMA. `flying`: what each wgmma group reads that nobody has waited for, oldest
  first: no sync says that another warpgroup's is complete. `slots`: of rings, the buffers of which branches sync
  themselves."""
  written: set[Var]
  read: set[Var]
  unfenced: set[Var]
  slots: Set[Var]
  refills: Mapping[Var, Set[Var]] = dataclasses.field(default_factory=dict)
  flying: list[set[Var]] = dataclasses.field(default_factory=list)

  def copy(self) -> _State:
    return _State(set(self.written), set(self.read), set(self.unfenced), self.slots, self.refills,
                  list(map(set, self.flying)))

  def join(self, other: _State) -> None:
    self.written |= other.written
    self.read |= other.read
    self.unfenced |= other.unfenced
    newest = itertools.zip_longest(reversed(self.flying), reversed(other.flying), fillvalue=frozenset())
    self.flying = [set(mine | others) for mine, others in newest][::-1]

  def synced(self) -> None:
    self.written.clear()
    self.read.clear()

  def refilled(self, barrier: Var) -> None:
    """All threads released the slot, each after what it did there, before the producer filled it."""
    for touched in (self.written, self.read, self.unfenced):
      touched -= self.refills.get(barrier, frozenset())

  def wait(self, n: int) -> None:
    """All groups but the newest `n` are complete: from here on a sync says so."""
    done = max(0, len(self.flying) - n)
    self.read.update(*self.flying[:done])
    del self.flying[:done]


_ASYNC_READERS = frozenset({"gemm", "gemm_async"})


def place_syncs(block: Block, buffers: set[Var], *, repeats: bool, slots: Set[Var] = frozenset(),
                refills: Mapping[Var, Set[Var]] | None = None) -> Block:
  """The block with `fence` and `sync` before each access that another thread's access must precede.

  Args:
    block: a role's program. Reads by wgmma are complete at the wait that stands before the next write; the sync that
      tells the other warpgroups stands between the two. Copies that run ahead (multistage.py) have their syncs, which
      count for the others, too.
    repeats: the block is the body of a tile loop: what comes first in it follows what comes last.
    buffers: the shared buffers and global arrays to order; rings and staging buffers keep order by their own barriers.
    slots: rings that consumers change, too. A branch that does so syncs at its end, and nobody who does not take it.
    refills: the barrier of a ring of one slot that says that it is full -> its buffers.
  """
  buffers = buffers | slots
  if not buffers:
    return block
  state = _State(set(), set(), set(), slots, refills or {})
  if repeats:
    _block(block, buffers, state)
  return _block(block, buffers, state)


def _block(block: Block, buffers: set[Var], state: _State) -> Block:
  out: list[Eqn] = []
  for eqn in block.eqns:
    if eqn.blocks:
      out.append(_nested(eqn, buffers, state))
      continue
    if eqn.primitive is sync_p and eqn.params["each"] == "scope":
      state.synced()
    if eqn.primitive is barrier_wait_p:
      state.refilled(eqn.values[0])  # type: ignore[arg-type]
    if eqn.primitive is wgmma_wait_p:
      state.wait(eqn.params["n"])
    reads, writes = _touched(eqn, buffers) if not eqn.params.get("ahead") else (set(), set())
    late = bool(reads & state.written or writes & (state.written | state.read))
    b = Builder(eqn.loc)
    if eqn.primitive.name in _ASYNC_READERS and reads & state.unfenced:
      b.fence()
      state.unfenced.clear()
      late = True
    if late:
      b.sync()
      state.synced()
    out += b.eqns
    out.append(eqn)
    if eqn.primitive is gemm_async_p:
      state.flying.append(reads)
    else:
      state.read |= reads
    state.written |= writes
    state.unfenced |= writes
  return dataclasses.replace(block, eqns=tuple(out))


def _nested(eqn: Eqn, buffers: set[Var], state: _State) -> Eqn:
  """Branches start from the same state; a loop's body also from its own end."""
  loops = eqn.primitive.name in ("for_loop", "while_loop")
  if loops:
    ahead = state.copy()
    for inner in eqn.blocks:
      _block(inner, buffers, ahead)
    state.join(ahead)
  blocks, after = [], state.copy()
  for inner in eqn.blocks:
    branch = state if loops else state.copy()
    block = _block(inner, buffers, branch)
    if not loops and (branch.written | branch.unfenced) & branch.slots & _written_in(inner, branch.slots):
      block = _synced(block, branch, eqn.loc)
    blocks.append(block)
    after.join(branch)
  state.join(after)
  return eqn.replace(blocks=tuple(blocks))


def _written_in(block: Block, buffers: Set[Var]) -> set[Var]:
  """What equations of the block itself write: a branch that only comes after a write has nothing to sync for, and
  warps may go through it apart (unit_factors.py)."""
  return {v for e in walk(block) if not e.blocks for v in _touched(e, set(buffers))[1]}


def _synced(block: Block, state: _State, loc: Loc) -> Block:
  b = Builder(loc)
  if state.unfenced:
    b.fence()
  b.sync()
  state.synced()
  state.unfenced.clear()
  return dataclasses.replace(block, eqns=(*block.eqns, *b.eqns))


def _touched(eqn: Eqn, buffers: set[Var]) -> tuple[set[Var], set[Var]]:
  reads: set[Var] = set()
  writes: set[Var] = set()
  for effect in effects(eqn):
    if isinstance(effect, RefEffect):
      ref = eqn.refs[effect.operand]
      if ref.root in buffers:
        (reads if effect.access is Access.READ else writes).add(ref.root)
  return reads, writes
