"""Level 1 to level 0: roles, rings, barriers, asynchronous gemms, the tile loop, and where everything lies.

The result is what an author could have written with tt.warpgroup, tt.alloc_barrier and tt.copy_async; written by hand,
it passes through here unchanged.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set

from tiletrace.core.errors import ResourceError
from tiletrace.core.graph import Block, Eqn, TileGraph, Var, expand_block, walk
from tiletrace.core.ops import memory
from tiletrace.core.simplify import simplify
from tiletrace.core.types import RefType, Space
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.hazards import unordered
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.options import CompileOptions
from tiletrace.lowering.ownership import is_explicit
from tiletrace.lowering.schedule.asynchrony import elide_zero_stores, shared_registers
from tiletrace.lowering.schedule.atomics import AtomicLowering
from tiletrace.lowering.schedule.balance import balanced_order, longest_first
from tiletrace.lowering.schedule.builder import Builder, RingState
from tiletrace.lowering.schedule.checker import check_program
from tiletrace.lowering.schedule.consumer import Consumer
from tiletrace.lowering.schedule.cumulative import CumulativeLowering
from tiletrace.lowering.schedule.deferral import Deferred, defer_epilogue
from tiletrace.lowering.schedule.epilogue import (
  Staging,
  can_leave_apart,
  drain_stores,
  expand_store,
  make_staging,
  staged_stores,
)
from tiletrace.lowering.schedule.grid import lower_ids, place_on_grid
from tiletrace.lowering.schedule.late import LateReductions
from tiletrace.lowering.schedule.leading import take_leading
from tiletrace.lowering.schedule.mail import Mailbox, Phase, send_all
from tiletrace.lowering.schedule.multicast import shared_copies
from tiletrace.lowering.schedule.multistage import Multistage, find_ahead, fitting_stages
from tiletrace.lowering.schedule.producer import Producer, copied_from_written, ring_slice
from tiletrace.lowering.schedule.program import Program
from tiletrace.lowering.schedule.reductions import ReductionLowering
from tiletrace.lowering.schedule.relayouts import RelayoutLowering
from tiletrace.lowering.schedule.resources import (
  BESIDE_FRAGMENTS,
  buffer_bytes,
  check_instructions,
  check_launch,
  check_registers,
  fragment_registers,
  part_of,
  place_buffers,
  register_budget,
  registers_of,
)
from tiletrace.lowering.schedule.rings import Ring, changed_buffers, find_rings, is_tma, uses_outside_segments
from tiletrace.lowering.schedule.slice import Slice, written_arrays
from tiletrace.lowering.schedule.slots import RingResources, touched_in
from tiletrace.lowering.schedule.split_operands import SplitOperands
from tiletrace.lowering.schedule.syncs import place_syncs
from tiletrace.lowering.schedule.tiles import Alone, Consuming, Handover, Producing, Taking
from tiletrace.lowering.schedule.unit_factors import UnitFactors
from tiletrace.lowering.select.memory import ThreadCopy, stored_by_matrices, thread_copy
from tiletrace.lowering.select.select import Selected, context, demote_copies
from tiletrace.lowering.shared_views import stack
from tiletrace.lowering.target import WARPS, Target

WARPGROUP = 128
Expand = Callable[[Block], Block]


def schedule(selected: Selected, target: Target, options: CompileOptions) -> Program:
  """Schedules a selected graph.

  Raises:
    ResourceError: shared memory, registers, threads or the grid exceed the target's.
    ScheduleError: the checker refutes a barrier, phase or wait.
  """
  graph, layouts, notes = selected.graph, dict(selected.layouts), []
  if is_explicit(graph):
    threads = WARPGROUP * max(e.params["first"] + e.params["count"] for e in walk(graph.body)
                              if e.primitive.name == "warpgroup")
    body = demote_copies(graph.body, context(graph, layouts, target, options), notes)      # nobody else makes them
    graph = lower_ids(graph.replace(body=_exchanges(body, layouts, notes, 1, syncs=True)))
  else:
    first, graph = take_leading(graph)
    graph, threads = _Scheduler(graph, layouts, target, options, notes).run()
    graph = graph.replace(body=dataclasses.replace(graph.body, eqns=(*first, *graph.body.eqns)))
  graph = simplify(graph.replace(body=expand_block(graph.body, _plain_loop)))
  total = math.prod(graph.options.grid)
  check_launch(graph, threads, total, target)
  check_registers(graph, layouts, 255)
  check_instructions(graph, layouts, threads, target.registers // options.ctas_per_sm)
  offsets, smem = place_buffers(graph, layouts, target)
  unproven = check_program(graph)
  assert is_explicit(selected.graph) or not unproven, unproven
  notes += unproven
  return Program(graph, layouts, offsets, target, threads, smem, tuple(notes))


def _exchanges(body: Block, layouts: dict[Var, Layout], notes: list[str], warpgroups: int, *,
               syncs: bool = False) -> Block:
  """What crosses threads, or warps in reductions and cumulative sums, goes through shared memory; if it can, after the
  loop that it stands in."""
  late = LateReductions(layouts)
  body = late.block(body)
  notes += late.notes
  if not syncs:
    split = SplitOperands(layouts, warpgroups)
    body = split.body(body)
    body = dataclasses.replace(body, eqns=(*split.scratch, *body.eqns))
    notes += split.notes
  for kind in (RelayoutLowering, ReductionLowering, CumulativeLowering, AtomicLowering):
    lowering = kind(layouts, syncs=syncs)
    body = lowering.block(body)
    body = dataclasses.replace(body, eqns=(*lowering.scratch, *body.eqns))
    notes += lowering.notes
  return body


class _Scheduler:
  """One kernel without roles of its own."""

  def __init__(self, graph: TileGraph, layouts: dict[Var, Layout], target: Target, options: CompileOptions,
               notes: list[str]):
    self.graph, self.layouts, self.target, self.options, self.notes = graph, layouts, target, options, notes
    self.registers = target.registers // options.ctas_per_sm       # of a CTA
    self.facts = Facts(graph)
    self.unordered = unordered(graph, self.facts)
    self.allocs: list[Eqn] = []
    self.order: tuple[int, ...] | None = None

  def run(self) -> tuple[TileGraph, int]:
    """(the level-0 graph, threads of a CTA)."""
    body = _exchanges(self.graph.body, self.layouts, self.notes, self.graph.options.warpgroups)
    # Rings are found last: they name equations, and rewriting a block would make others of them.
    body, self.allocs = _split_allocs(elide_zero_stores(body, self.facts.certainly_runs))
    graph = self.graph.replace(body=body)
    self.order = self._order(graph)
    if self.target.lacks("sm_90"):
      return self._multistage(graph)
    rings, notes = find_rings(graph, self._fillable)
    refusal = self._refusal(graph, rings)
    if refusal is not None and any(r.by_threads for r in rings):
      self.notes.append(f"only TMA copies go to a producer: {refusal}")
      rings, notes = find_rings(graph, lambda buffer: False)
      refusal = self._refusal(graph, rings)
    self.notes += notes
    if rings and refusal is None:
      return self._specialised(graph, rings)
    if rings:
      self.notes.append(f"no producer warpgroup: {refusal}")
    return self._single(graph)

  def _order(self, graph: TileGraph) -> tuple[int, ...] | None:
    """Of a persistent kernel's programs; None is the raster's."""
    if not graph.options.persistent:
      return None
    if graph.options.takes_tiles:
      order = longest_first(graph.body, graph.options, self.target.sm_count)
      known = "in the order of the raster" if order is None else "the longest first, by a table"
      self.notes.append(f"each CTA takes its next program when it is free: {known}")
      return order
    order = balanced_order(graph.body, graph.options, self.target.sm_count)
    if order is not None:
      self.notes.append(f"programs differ in length: each goes to the CTA that is free first, by a table for "
                        f"{self.target.sm_count} CTAs")
    return order

  def _fillable(self, buffer: Var) -> bool:
    """Slots of whole 128 bytes stay aligned for the widest access."""
    return buffer_bytes(buffer, self.layouts) % 128 == 0

  def _refusal(self, graph: TileGraph, rings: list[Ring]) -> str | None:
    """Why the copies do not go to a producer."""
    outside = uses_outside_segments(graph, rings)
    if outside:
      var, eqn = next(iter(outside.items()))
      return f"{var.hint or 'a buffer'} is used at {eqn.loc.short()}, where no copy in the same block reaches"
    return copied_from_written(graph, rings) or ring_slice(graph, rings).refusal

  # ---- a producer and its consumers

  def _specialised(self, graph: TileGraph, rings: list[Ring]) -> tuple[TileGraph, int]:
    consumers = graph.options.warpgroups
    head = Builder(graph.loc)
    ring_vars = {v for r in rings for v in r.buffers}
    shared = shared_copies(graph, rings, self.layouts, self.facts, written_arrays(graph))
    self.notes += shared.refusals
    resources = [self._resources(head, r, consumers, shared.axes) for r in rings]
    own = self._place_allocs(head, ring_vars)
    sliced = ring_slice(graph, rings)
    handover = self._handover(head, max(r.slots for r in rings))
    mail = [Mailbox.make(head, v, self.layouts, repeats=bool(graph.options.persistent)) for v in sliced.sent]
    self.notes += [f"{e.loc.short()}  {v.hint or e.primitive} is computed by the consumers and sent to the producer"
                   for v, e in sliced.sent.items()]
    expand, staging = self._epilogue(head, graph.body, consumers)
    beside = fragment_registers(graph, self.layouts) if any(r.by_threads for r in rings) else None
    budget = register_budget(consumers, self.registers, beside)
    plans = self._plans(graph, rings, part_of(budget[0] if budget else None))
    head.role(0, 1, budget[0] if budget else None, self._producer(graph, sliced, resources, plans, mail,
                                                                           handover))
    fits = self._fits(graph, budget[1] if budget else None)
    work = self._consumers(graph, resources, own, expand, staging, mail, fits, handover)
    head.role(1, consumers, budget[1] if budget else None, work)
    self._report(resources)
    return graph.replace(body=dataclasses.replace(graph.body, eqns=tuple(head.eqns))), WARPGROUP * (1 + consumers)

  def _resources(self, head: Builder, ring: Ring, consumers: int,
                 shared: dict[Eqn, tuple[int, ...]]) -> RingResources:
    buffers = {v: self._stacked(head, v, ring.slots) for v in ring.buffers}
    full = head.alloc_barrier(ring.slots, ring.by_tma + ring.by_threads, "full")
    multicast = {c: shared[c] for s in ring.segments for c in s.copies if c in shared}
    by_warps = not multicast and touched_in(self.graph.body, ring)
    readers = consumers * (self.graph.options.cluster_size if multicast else WARPS if by_warps else 1)
    empty = head.alloc_barrier(ring.slots, readers, "empty")
    return RingResources(ring, buffers, full, empty, multicast, by_warps)

  def _plans(self, graph: TileGraph, rings: list[Ring], part: int) -> dict[Eqn, ThreadCopy]:
    """How one warpgroup makes each copy into the rings that TMA does not make."""
    ctx = dataclasses.replace(context(graph, self.layouts, self.target, self.options), warpgroups=lambda eqn: 1)
    copies = [c for r in rings for s in r.segments for c in s.copies if not is_tma(c)]
    return {c: dataclasses.replace(thread_copy(c, ctx), part=part) for c in copies}

  def _producer(self, graph: TileGraph, sliced: Slice, resources: list[RingResources], plans: dict[Eqn, ThreadCopy],
                mail: list[Mailbox], handover: Handover | None) -> Block:
    """Ring states, then the sliced kernel on the grid: one elected thread where TMA makes all copies, else the whole
    warpgroup. It starts with phase 1: slots are empty."""
    b = Builder(graph.loc)
    states = {r: RingState.make(b, r.ring.slots, phase=1) for r in resources}
    phases = {box.value: (box, Phase.make(b, box, 0)) for box in mail}
    work = Producer(resources, states, plans, phases).block(sliced)
    b.eqns += self._on_grid(work, handover and Producing(handover, by_warpgroup=bool(plans))).eqns
    if plans:
      return b.block()
    role = Builder(graph.loc)
    role.elect(b.block())
    return role.block()

  def _fits(self, graph: TileGraph, budget: int | None) -> Callable[[list[Var]], bool]:
    """Whether a consumer's registers (`budget`, or what the launch leaves) hold operands beside the fragments."""
    most = budget or min(255, self.registers // (WARPGROUP * graph.options.warpgroups))
    fragments = fragment_registers(graph, self.layouts)
    return lambda operands: fragments + sum(registers_of(v, self.layouts) for v in operands) + BESIDE_FRAGMENTS <= most

  def _consumers(self, graph: TileGraph, resources: list[RingResources], own: set[Var], expand: Expand,
                 staging: Staging | None, mail: list[Mailbox], fits: Callable[[list[Var]], bool],
                 handover: Handover | None) -> Block:
    b = Builder(graph.loc)
    fragments = [e for e in graph.body.eqns if e.primitive is memory.alloc_p]
    body = dataclasses.replace(graph.body, eqns=tuple(e for e in graph.body.eqns if e not in set(fragments)))
    b.eqns += fragments
    states = {r: RingState.make(b, r.ring.slots) for r in resources}
    rewriter = Consumer(resources, states, graph.options.warpgroups, self.facts, fits, shared_registers(body))
    changed = changed_buffers(graph.body)
    slots = {new for r in resources for old, new in r.buffers.items() if old in changed}
    refills = {r.full: set(r.buffers.values()) for r in resources if r.ring.slots == 1}
    work = self._ordered(expand(self._rescaled(rewriter.block(body))), graph, own, slots, refills)
    work = send_all(work, {box.value: (box, Phase.make(b, box, 1)) for box in mail})
    self.notes += rewriter.notes
    by_threads = any(r.ring.by_threads for r in resources)      # their producer takes the registers that deferral needs
    deferred = self._defer(work) if staging is not None and graph.options.persistent and not by_threads else None
    if deferred is not None:
      b.eqns += deferred.setup
      work = deferred.work
    b.eqns += self._on_grid(work, handover and Consuming(handover)).eqns
    if deferred is not None:
      b.eqns += deferred.last
    if staging is not None:
      drain_stores(b)
    return b.block()

  def _rescaled(self, work: Block) -> Block:
    factors = UnitFactors(self.layouts)
    work = factors.body(work)
    self.notes += factors.notes
    return work

  def _on_grid(self, work: Block, taking: Taking | None) -> Block:
    return place_on_grid(work, self.graph.options, Builder(self.graph.loc), self.order, taking)

  def _handover(self, head: Builder, slots: int | None = None) -> Handover | None:
    """How a CTA's threads learn which program comes next, where they take programs; `slots`: of a producer's rings."""
    return Handover.make(head, self.graph, self.layouts, slots) if self.graph.options.takes_tiles else None

  def _defer(self, work: Block) -> Deferred | None:
    found = defer_epilogue(work, self.layouts, self.facts, fragment_registers(self.graph, self.layouts))
    if isinstance(found, Deferred):
      self.notes.append("the epilogue is deferred: a tile is stored with the next tile's first k-blocks in flight")
      return found
    self.notes.append(f"the epilogue is not deferred: {found}")
    return None

  def _place_allocs(self, head: Builder, rings: set[Var]) -> set[Var]:
    """Allocates the shared buffers that are no rings; returns them."""
    allocs = [a for a in self.allocs if a.outvars[0] not in rings]
    head.eqns += allocs
    return {a.outvars[0] for a in allocs}

  def _ordered(self, work: Block, graph: TileGraph, own: set[Var], slots: Set[Var] = frozenset(),
               refills: Mapping[Var, Set[Var]] | None = None) -> Block:
    """The copies that are left are made by the threads of this role; syncs and fences order what threads touch.

    Args:
      slots: rings that consumers change.
      refills: which rings' one slot a barrier says is full.
    """
    ctx = context(graph, self.layouts, self.target, self.options)
    work = expand_block(demote_copies(work, ctx, self.notes), lambda e: (stored_by_matrices(e, ctx),))
    return place_syncs(work, own | self.unordered, repeats=bool(graph.options.persistent), slots=slots,
                       refills=refills)

  def _epilogue(self, head: Builder, body: Block, consumers: int) -> tuple[Expand, Staging | None]:
    """How to expand the body's staged stores; the staging buffer takes the largest power of two of chunks that fits."""
    stores = staged_stores(body)
    if not stores:
      return (lambda block: block), None
    first = stores[0]
    rows, columns = first.refs[0].shape
    dtype = first.refs[0].type.dtype
    alike = [s for s in stores if s.refs[0].shape == (rows, columns) and s.refs[0].type.dtype == dtype
             and s.params["by_columns"] == first.params["by_columns"]]
    by_columns = first.params["by_columns"]
    chunks = columns // 64 if by_columns else 1

    def room(chunks: int, rows: int) -> bool:
      b, layouts = Builder(first.loc), dict(self.layouts)
      make_staging(b, first, chunks, layouts, rows)
      return self._allocs_fit([*head.eqns, *b.eqns], layouts)

    while by_columns and not room(chunks, rows) and can_leave_apart(first, rows // 2, self.layouts):
      rows //= 2
    while not by_columns and (columns // 64) % (chunks * 2) == 0 and room(chunks * 2, rows):
      chunks *= 2
    if not room(chunks, rows):
      self.notes.append("the epilogue stores directly: no shared memory is left for staging")
      return (lambda block: expand_block(block, lambda e: [_direct(e)] if e in stores else [e])), None
    staging = make_staging(head, first, chunks, self.layouts, rows)
    expand = set(alike)
    return (lambda block: expand_block(block, lambda e: expand_store(e, staging, consumers, self.layouts) if e in expand
                               else [_direct(e)] if e in stores else [e])), staging

  def _allocs_fit(self, allocs: Sequence[Eqn], layouts: dict[Var, Layout]) -> bool:
    try:
      place_buffers(self.graph.replace(body=Block((), tuple(allocs), ())), layouts, self.target)
    except ResourceError:
      return False
    return True

  def _report(self, resources: list[RingResources]) -> None:
    for resource in resources:
      r = resource.ring
      copies = dict.fromkeys(c.params["dispatch"] for s in r.segments for c in s.copies)
      by = ", ".join("TMA" if c == "tma" else f"{c} copies" for c in copies)
      self.notes.append(f"ring {r.name}: {r.slots} slots of {r.nbytes} bytes, filled by {by} from the producer "
                        "warpgroup")
      self.notes += [f"the copy at {c.loc.short()} is multicast along the cluster's axes {axes}"
                     for c, axes in resource.multicast.items()]

  # ---- all threads do everything

  def _multistage(self, graph: TileGraph) -> tuple[TileGraph, int]:
    """No producer: the threads that compute copy ahead, as many stages as fit."""
    rings, notes = find_rings(graph, self._fillable, least=1)
    ahead, refusals = find_ahead(graph, rings)
    self.notes += notes + refusals
    slots: dict[Var, Var] = {}

    def fits(stages: int) -> bool:
      slots.clear()
      head = Builder(graph.loc)
      for v in dict.fromkeys(v for a in ahead for v in a.buffers):
        depth = min(stages, max(a.stages for a in ahead if v in a.buffers))
        slots[v] = self._stacked(head, v, depth)
      self.allocs = [a for a in allocs if a.outvars[0] not in slots] + head.eqns
      head.eqns = self.allocs
      return self._allocs_fit(head.eqns, self.layouts)

    allocs = self.allocs
    stages = fitting_stages(ahead, fits)
    if stages == 1:
      self.allocs, ahead = allocs, []
    for a in ahead:
      kept = min(stages, a.stages)
      self.notes.append(f"{a.loop.loc.short()}  the threads copy {kept - 1} iterations ahead: {kept} slots of "
                        f"{', '.join(v.hint or 'buffer' for v in a.buffers)}")
      if kept < a.stages:
        self.notes.append(f"{a.loop.loc.short()}  {kept} stages instead of {a.stages}: more do not fit in the "
                          f"{self.target.smem_bytes} bytes of {self.target.name}")
    body = Multistage(ahead, slots, stages, self.facts).block(graph.body) if ahead else graph.body
    return self._single(graph.replace(body=body))

  def _stacked(self, head: Builder, v: Var, slots: int) -> Var:
    """A buffer with a leading dimension of slots, allocated."""
    assert isinstance(v.type, RefType)
    new = head.alloc(Space.SHARED, (slots, *v.type.shape), v.type.dtype, v.hint or "buffer")
    self.layouts[new] = stack(self.layouts[v], slots, v.type.dtype.itemsize * 8)
    return new

  def _single(self, graph: TileGraph) -> tuple[TileGraph, int]:
    """No producer: copies run in the threads that compute, one slot each, but for those that run ahead."""
    head = Builder(graph.loc)
    own = self._place_allocs(head, set())
    handover = self._handover(head)
    expand, staging = self._epilogue(head, graph.body, graph.options.warpgroups)
    rewriter = Consumer([], {}, graph.options.warpgroups, self.facts, self._fits(graph, None),
                        shared_registers(graph.body))
    work = self._ordered(expand(self._rescaled(rewriter.block(graph.body))), graph, own)
    head.eqns += self._on_grid(work, handover and Alone(handover)).eqns
    if staging is not None:
      drain_stores(head)
    eqns = tuple(head.eqns)
    return graph.replace(body=dataclasses.replace(graph.body, eqns=eqns)), WARPGROUP * graph.options.warpgroups


def _split_allocs(block: Block) -> tuple[Block, list[Eqn]]:
  """Takes the shared allocations out of a block and those inside it."""
  found: list[Eqn] = []

  def take(eqn: Eqn) -> list[Eqn]:
    if eqn.primitive is memory.alloc_p and eqn.params["space"] is Space.SHARED:
      found.append(eqn)
      return []
    return [eqn]

  return expand_block(block, take), found


def _plain_loop(eqn: Eqn) -> list[Eqn]:
  """A pipelined loop has become an ordinary one."""
  if eqn.params.get("kind") != "pipelined":
    return [eqn]
  return [eqn.replace(params={**eqn.params, "kind": "range", "num_stages": 1})]


def _direct(store: Eqn) -> Eqn:
  return store.replace(params={**store.params, "dispatch": "direct"})
