"""What a CTA has: shared memory by buffer, registers by role, threads. Too much is an error with the sum."""
from __future__ import annotations

from tiletrace.core.errors import ResourceError
from tiletrace.core.graph import TileGraph, Var, walk
from tiletrace.core.ops.memory import load_p
from tiletrace.core.ops.mma import mma_sync_p
from tiletrace.core.types import BarrierType, Extent, RefType, Space
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import recognise_swizzle
from tiletrace.lowering.layouts.tma import ALIGNMENT
from tiletrace.lowering.ownership import role_sizes
from tiletrace.lowering.target import Target
from tiletrace.lowering.wgmma_plan import wgmma_plan
from tiletrace.lowering.words import num_words

BARRIER_BYTES = 8
PRODUCER_REGISTERS = 24
_BESIDE_ACCUMULATOR = 26  # registers that an instruction with an accumulator of 128 needs beside it (ptxas 13.0: 154)
_COPYING_REGISTERS = (136, 88, 80, 56)  # of a producer whose threads copy: most of them are loads in flight
BESIDE_FRAGMENTS = 48                    # of a consumer
_MAX_CONSUMER_REGISTERS = 240


def register_budget(consumers: int, registers: int, copies_beside: int | None = None) -> tuple[int, int] | None:
  """(producer, consumer) registers per thread, or None where every thread gets what it can use at launch.

  setmaxnreg moves registers between warpgroups in units of 8; all of them together hold what the CTA got at launch, and
  24 is what an idle producer needs (PTX ISA, setmaxnreg).

  Args:
    registers: what a CTA may hold.
    copies_beside: where the producer's threads copy themselves, the registers of a consumer's fragments.
  """
  entry = registers // 128 // (consumers + 1) // 8 * 8
  if consumers < 2 or entry <= PRODUCER_REGISTERS:
    return None
  pool = entry * (consumers + 1)

  def left(producer: int) -> int:
    return min(_MAX_CONSUMER_REGISTERS, (pool - producer) // consumers // 8 * 8)

  if copies_beside is None:
    producer = PRODUCER_REGISTERS
    each = left(producer)
    producer = min(pool - consumers * each, 32) if consumers == 3 else producer
  else:
    fitting = (p for p in _COPYING_REGISTERS if p <= entry <= left(p) and left(p) >= copies_beside + BESIDE_FRAGMENTS)
    producer = next(fitting, min(entry, _COPYING_REGISTERS[-1]))
    each = left(producer)
  assert producer <= entry <= each and producer + consumers * each <= pool, (consumers, producer, each)
  return producer, each


def fragment_registers(graph: TileGraph, layouts: dict[Var, Layout]) -> int:
  """Registers of a thread that the fragments of a graph take together."""
  return sum(registers_of(v, layouts) for e in walk(graph.body) for v in e.outvars
             if v in layouts and isinstance(v.type, RefType) and v.type.space is Space.FRAGMENT)


def registers_of(var: Var, layouts: dict[Var, Layout]) -> int:
  """Of a thread, for its part of a fragment or value."""
  return num_words(var.dtype, layouts[var].extent("reg"))


def part_of(registers: int | None) -> int:
  """Registers of one of the two parts of a copy that are in flight, beside its addresses; None: without a budget."""
  return 64 if registers is None else (registers - 24) // 2


def place_buffers(graph: TileGraph, layouts: dict[Var, Layout], target: Target) -> tuple[dict[Var, int], int]:
  """(byte offset of each shared buffer and barrier array, bytes in all). Buffers with the widest alignment come first.

  Raises:
    ResourceError: they do not fit, with every buffer's size.
  """
  buffers, barriers = [], []
  for eqn in walk(graph.body):
    if eqn.primitive.name == "alloc" and eqn.params["space"] is Space.SHARED:
      buffers.append((eqn.outvars[0], eqn.loc))
    elif eqn.primitive.name == "alloc_barrier":
      barriers.append(eqn.outvars[0])
  offsets: dict[Var, int] = {}
  at = 0
  for var, _ in sorted(buffers, key=lambda item: -_alignment(item[0], layouts)):
    align = _alignment(var, layouts)
    at = -(-at // align) * align
    offsets[var] = at
    at += buffer_bytes(var, layouts)
  at = -(-at // BARRIER_BYTES) * BARRIER_BYTES
  for var in barriers:
    assert isinstance(var.type, BarrierType)
    offsets[var] = at
    at += BARRIER_BYTES * var.type.count
  if at > target.smem_bytes:
    lines = [f"    {buffer_bytes(v, layouts):>8}  {v.hint or 'buffer'} {v.type} at {loc.short()}" for v, loc in buffers]
    count = sum(v.type.count for v in barriers)  # type: ignore[union-attr]
    lines += [f"    {BARRIER_BYTES * count:>8}  {count} barriers"] if count else []
    raise ResourceError(f"{graph.name} needs {at} bytes of shared memory, {target.name} has {target.smem_bytes} for a "
                        "CTA:\n" + "\n".join(lines), loc=buffers[-1][1] if buffers else graph.loc,
                        hint="take smaller blocks, or a smaller num_stages")
  return offsets, at


def buffer_bytes(var: Var, layouts: dict[Var, Layout]) -> int:
  assert isinstance(var.type, RefType)
  return layouts[var].extent("off") * var.type.dtype.itemsize


def _alignment(var: Var, layouts: dict[Var, Layout]) -> int:
  assert isinstance(var.type, RefType)
  if len(var.type.shape) < 2:
    return 128
  found = recognise_swizzle(layouts[var], max(8, var.type.dtype.itemsize * 8))
  return ALIGNMENT[found[0]] if found is not None else 1024


def check_registers(graph: TileGraph, layouts: dict[Var, Layout], budget: int) -> None:
  """A fragment that alone exceeds a thread's registers is refused, before ptxas spills it.

  Raises:
    ResourceError: with the registers of each fragment.
  """
  sizes = []
  by_parts = {v for e in walk(graph.body) if e.primitive is mma_sync_p for v in e.values}     # each when it is needed
  for eqn in walk(graph.body):
    for var in eqn.outvars if eqn.primitive is not load_p or eqn.outvars[0] not in by_parts else ():
      if var in layouts and not (isinstance(var.type, RefType) and var.type.space is Space.SHARED):
        sizes.append((registers_of(var, layouts), var, eqn.loc))
  fragments = [s for s in sizes if isinstance(s[1].type, RefType)]
  worst = max(sizes, key=lambda s: s[0], default=None)
  total = sum(s[0] for s in fragments)
  if worst is None or (worst[0] <= budget and total <= budget):
    return
  lines = [f"    {n:>6}  {v.hint or 'a value'} {v.type} at {loc.short()}" for n, v, loc in
           (fragments if total > budget else [worst])]
  raise ResourceError(f"{graph.name} needs {max(total, worst[0])} registers of each thread, of {budget}:\n"
                      + "\n".join(lines), loc=worst[2],
                      hint="take smaller tiles, more warpgroups=, or loop over blocks of the tile")


def check_instructions(graph: TileGraph, layouts: dict[Var, Layout], threads: int, registers: int) -> None:
  """ptxas allocates within the registers that a thread has at entry, whatever setmaxnreg adds (C7602).

  Args:
    registers: what a CTA may hold.
  Raises:
    ResourceError: a wgmma whose accumulator leaves too few of them.
  """
  entry = min(255, registers // threads // 8 * 8)
  sizes = role_sizes(graph)
  for eqn in walk(graph.body):
    if eqn.primitive.name != "gemm_async":
      continue
    plan = wgmma_plan(eqn, layouts[eqn.refs[-1].root], sizes[eqn])
    if plan.acc_registers + _BESIDE_ACCUMULATOR > entry:
      widest = (entry - _BESIDE_ACCUMULATOR) * 64 // plan.acc_bits // 8 * 8
      raise ResourceError(f"a gemm {plan.n} columns wide holds {plan.acc_registers} accumulator registers, and "
                          f"{threads} threads have {entry} each at entry", loc=eqn.loc,
                          hint=f"at most {widest} columns a warpgroup, or fewer warpgroups=")


def check_launch(graph: TileGraph, threads: int, total: Extent, target: Target) -> None:
  """The grid and the CTA fit the hardware. A call checks the grid that it decides."""
  if threads > target.max_threads:
    raise ResourceError(f"{graph.name}: warpgroups={graph.options.warpgroups} needs {threads} threads with its "
                        f"producer, a CTA has at most {target.max_threads}", loc=graph.loc,
                        hint="at most 7 warpgroups beside a producer")
  if isinstance(total, int) and total > target.grid_x:
    raise ResourceError(f"{graph.name}: grid {graph.options.grid} has {total} programs, the hardware takes "
                        f"{target.grid_x}", loc=graph.loc, hint="take larger blocks, or loop in the kernel")
