"""Bulk copies: with tensor maps and without; their completion on mbarriers and in groups (PTX ISA 9.7.9)."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Addr
from tiletrace.sim import tensor_map
from tiletrace.sim.access import global_addresses, tensor_map_at
from tiletrace.sim.faults import Violation
from tiletrace.sim.machine import Machine
from tiletrace.sim.mbarriers import Mbarrier, clustered, local, mbarriers, shared_addresses, value_of, window
from tiletrace.sim.program import Op
from tiletrace.sim.strands import Strand
from tiletrace.sim.tables import Act, effect
from tiletrace.sim.tensor_map import Box


@dataclasses.dataclass(slots=True, eq=False)
class Load:
  """Bytes on their way into shared memory, counted on mbarriers.

  Attributes:
    source: the memory read, and offsets in it [n]. targets: offsets in shared memory [n] of each destination CTA.
    inside: which entries are read; the others become zero.
    data: the entries, once they were read.
  """
  machine: Machine
  op: Op
  thread: int
  source: Any
  offsets: np.ndarray
  inside: np.ndarray
  itemsize: int
  nbytes: int
  targets: list[np.ndarray]
  bars: list[Mbarrier]
  agent: Any
  eager: bool
  data: np.ndarray | None = None

  def read(self) -> None:
    data = np.zeros(len(self.offsets), f"u{self.itemsize}" if self.itemsize < 16 else np.dtype((np.void, 16)))
    if self.inside.all():
      data = self.source.load(self.offsets, self.itemsize)
    elif self.inside.any():
      data[self.inside] = self.source.load(self.offsets[self.inside], self.itemsize)
    self.data = data

  def complete(self) -> None:
    if self.data is None:
      self.read()
    assert self.data is not None
    races = self.machine.races
    for target, bar in zip(self.targets, self.bars):
      self.machine.shared.store(target, self.itemsize, self.data)
      if races is not None:
        bar.release(races.complete(self.agent))
      bar.complete_tx(self.nbytes)

  def describe(self) -> str:
    bars = ", ".join(map(str, self.bars))
    return f"a copy of {self.nbytes} bytes into shared memory by PTX line {self.op.line}, which completes on {bars}"


class _Issuer:
  """Starts loads: what all kinds of them have in common."""

  def __init__(self, m: Machine, op: Op):
    self.machine, self.op, self.bars = m, op, mbarriers(m)
    _groups(m)
    slots = op.inst.form.slots
    names = [s.name for s in slots]
    self.target = shared_addresses(m, op.inst.operands[names.index("dst")], slots[names.index("dst")])
    self.bar = shared_addresses(m, op.inst.operands[names.index("bar")], slots[names.index("bar")])

  def start(self, thread: int, source: Any, offsets: np.ndarray, addresses: np.ndarray, inside: np.ndarray,
            itemsize: int, nbytes: int, targets: list[np.ndarray], bar_offsets: list[int], kind: str) -> None:
    m = self.machine
    bars = [self.bars.find(b) for b in bar_offsets]
    for bar in bars:
      bar.sites[self.op] = None
    agent = None
    for target in targets:
      self.bars.check_store(target, itemsize)
      m.shared.mark(target, itemsize)
    if m.races is not None:
      agent = m.races.issue(np.array([thread]), kind)
      for b in bar_offsets:
        m.races.mbarrier_complete(agent, b, self.op)
      if inside.any():
        m.races.agent_read(agent, addresses[inside], itemsize, self.op)
      for target in targets:
        m.races.agent_write(agent, target, itemsize, self.op)
    load = Load(m, self.op, thread, source, offsets, inside, itemsize, nbytes, targets, bars, agent,
                m.adversary.eager())
    if m.adversary.early():
      load.read()
    m.events.append(load)
    if m.counters is not None:
      m.counters.bulk(self.op, nbytes, load=True)


def _cta_local(m: Machine, address: np.ndarray, thread: int) -> tuple[int, int]:
  """(address in its CTA, offset of that CTA) of a shared::cluster address."""
  offset = int(clustered(m, address, np.array([thread]))[0])
  return offset % m.shared.span, offset - offset % m.shared.span


def _coordinates(m: Machine, op: Op) -> list[Any]:
  i = [s.name for s in op.inst.form.slots].index("coords")
  return m.registers.sources(op.inst.operands[i], op.inst.form.slots[i])


def _box(m: Machine, address: int, coords: list[int], dst: int, *, storing: bool = False,
         by_element: bool = False) -> tuple[Any, Box]:
  spec = m.launch.tensor_maps[tensor_map_at(m, address)]
  start = m.memory.arrays[spec.operand].address
  refused = tensor_map.refusal(start, spec, dst)
  if refused is not None:
    raise Violation("misaligned", refused, addresses=[dst])
  if len(coords) != len(spec.dims):
    raise Violation("descriptor", f"{len(coords)} coordinates for a tensor map of {len(spec.dims)} dimensions")
  if (unknown := tensor_map.shape_refusal(spec)) is not None:
    raise Violation("descriptor", unknown)
  if (refused := tensor_map.start_refusal(spec, coords, storing=storing)) is not None:
    raise Violation("misaligned", refused, addresses=[dst])
  return spec, tensor_map.box(spec, start, coords, dst, by_element=by_element)


def _each_thread(op: Op, m: Machine, threads: np.ndarray, coords: list[Any], maps: Any
                 ) -> Iterator[tuple[int, list[int], int]]:
  for t in threads.tolist():
    at = slice(t, t + 1)
    yield t, [int(c[at].view(np.int32)[0]) for c in coords], int(maps[at][0])


@effect(isa.TMA_LOAD, isa.TMA_LOAD_HINT, isa.TMA_LOAD_MULTICAST, isa.TMA_LOAD_MULTICAST_HINT)
def _tma_load(m: Machine, op: Op) -> Act:
  issuer, coords, names = _Issuer(m, op), _coordinates(m, op), [s.name for s in op.inst.form.slots]
  maps = m.registers.source(op.inst.operands[names.index("map")], op.inst.form.slots[names.index("map")])
  mask = (m.registers.source(op.inst.operands[names.index("mask")], op.inst.form.slots[names.index("mask")])
          if "mask" in names else None)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for t, where, address in _each_thread(op, m, threads, coords, maps):
      one, only = slice(t, t + 1), np.array([t])
      dst, start = _cta_local(m, window(*issuer.target, only, one), t)
      bar, bar_start = _cta_local(m, window(*issuer.bar, only, one), t)
      m.shared.check(np.array([bar]), 8, 8, only)
      spec, box = _box(m, address, where, dst)
      m.swizzles[op] = spec.swizzle
      m.shared.check(np.array([box.shared.min(), box.shared.max()]), box.itemsize, 1, [t])
      offsets = box.addresses - (m.memory.arrays[0].address - m.memory.arrays[0].offset)
      if mask is None:
        ranks = [start // m.shared.span]
        bars = [bar_start + bar]
      else:
        bits = int(mask[one][0])
        ranks = [r for r in range(16) if bits >> r & 1]
        if not ranks or ranks[-1] >= m.ctas:
          raise Violation("out of bounds", f"multicast mask {bits:#x} in a cluster of {m.ctas}", threads=[t])
        bars = [r * m.shared.span + bar for r in ranks]
      targets = [box.shared + r * m.shared.span for r in ranks]
      issuer.start(t, m.memory, offsets, box.addresses, box.inside, box.itemsize, box.nbytes, targets, bars, "TMA load")
  return act


@effect(isa.BULK_LOAD, isa.BULK_TO_CLUSTER)
def _bulk_load(m: Machine, op: Op) -> Act:
  issuer, from_global = _Issuer(m, op), op.inst.row is isa.BULK_LOAD
  names = [s.name for s in op.inst.form.slots]
  size, find = value_of(m, op, "size"), global_addresses(m, op, "src") if from_global else None
  source = None if from_global else shared_addresses(m, op.inst.operands[names.index("src")],
                                                     op.inst.form.slots[names.index("src")])

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for t in threads.tolist():
      one, only, n = slice(t, t + 1), np.array([t]), _bulk_size(size, t)
      dst, start = _cta_local(m, window(*issuer.target, only, one), t)
      bar, bar_start = _cta_local(m, window(*issuer.bar, only, one), t)
      m.shared.check(np.array([dst]), n, 1, only)
      _demand_16(dst, t)
      k = np.arange(0, n, 16)
      if find is not None:
        addresses = find(only, one) + k
        _demand_16(int(addresses[0]), t)
        offsets, memory = m.memory.offsets(addresses, 16, 16, np.full(len(k), t)), m.memory
      else:
        assert source is not None
        own = local(m, *source, only, one)
        m.shared.check(own, n, 16, only)
        offsets = own + m.shared_start[t] + k
        addresses, memory = offsets, m.shared
        m.shared.check_valid(offsets, 16, np.full(len(k), t))
      issuer.start(t, memory, offsets, addresses, np.ones(len(k), bool), 16, n, [start + dst + k], [bar_start + bar],
                   "bulk load")
  return act


@effect(isa.BULK_PREFETCH)
def _bulk_prefetch(m: Machine, op: Op) -> Act:
  """Moves nothing; but what it asks for are bytes of an array."""
  size, find = value_of(m, op, "size"), global_addresses(m, op, "src")

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for t in threads.tolist():
      start = int(find(np.array([t]), slice(t, t + 1))[0])
      _demand_16(start, t)
      addresses = np.arange(start, start + _bulk_size(size, t), 16)
      m.memory.offsets(addresses, 16, 16, np.full(len(addresses), t))
  return act


def _bulk_size(row: Any, thread: int) -> int:
  n = int(row[slice(thread, thread + 1)][0])
  if n % 16 or not 0 < n < 2**20:
    raise Violation("misaligned", f"a bulk copy of {n} bytes: multiples of 16 below 2**20 are allowed",
                    threads=[thread])
  return n


def _demand_16(address: int, thread: int) -> None:
  if address % 16:
    raise Violation("misaligned", f"address {address:#x} of a bulk copy is no multiple of 16", threads=[thread],
                    addresses=[address])


# ---- stores, which complete in groups of the thread that issued them


@dataclasses.dataclass(slots=True, eq=False)
class Store:
  """Bytes on their way from shared to global memory.

  Attributes:
    source, target: offsets [n] in shared and global memory.
    combine: (old, new) -> what a reduction leaves; None stores.
    reader, writer: the race detector's agents.
  """
  machine: Machine
  op: Op
  source: np.ndarray
  target: np.ndarray
  itemsize: int
  combine: Callable[[np.ndarray, np.ndarray], np.ndarray] | None
  reader: Any
  writer: Any
  eager: bool
  data: np.ndarray | None = None
  written: bool = False

  def read(self) -> None:
    if self.data is None:
      self.data = self.machine.shared.load(self.source, self.itemsize)

  def write(self) -> None:
    if self.written:
      return
    self.read()
    self.written = True
    data = self.data
    assert data is not None
    if self.combine is not None:
      data = self.combine(self.machine.memory.load(self.target, self.itemsize), data)
    self.machine.memory.store(self.target, self.itemsize, data)

  def complete(self) -> None:
    self.write()

  def describe(self) -> str:
    return f"a copy of {len(self.source) * self.itemsize} bytes to global memory by PTX line {self.op.line}"


class Groups:
  """Bulk groups of each thread.

  Attributes:
    open: stores since the thread's last commit. closed: its groups, oldest first.
  """

  def __init__(self, m: Machine):
    self.machine = m
    m.on_start.append(self.reset)
    m.on_exit.append(self.leave)
    self.reset()

  def reset(self) -> None:
    self.open: dict[int, list[Store]] = {}
    self.closed: dict[int, list[list[Store]]] = {}

  def add(self, thread: int, store: Store) -> None:
    self.open.setdefault(thread, []).append(store)
    self.machine.events.append(store)

  def wait(self, thread: int, n: int, read_only: bool) -> None:
    """All groups but the newest n are read, or done."""
    groups = self.closed.get(thread, [])
    races = self.machine.races
    for group in groups[:max(0, len(groups) - n)]:
      for store in group:
        if read_only:
          store.read()
        else:
          self._finish(store)
        if races is not None:
          for agent in (store.reader,) if read_only else (store.reader, store.writer):
            races.acquire(np.array([thread]), races.complete(agent))
    if not read_only:
      del groups[:max(0, len(groups) - n)]

  def _finish(self, store: Store) -> None:
    if store in self.machine.events:
      self.machine.events.remove(store)
    store.write()

  def leave(self, threads: np.ndarray) -> None:
    """A thread may end before its stores are written, not before shared memory is read."""
    m = self.machine
    for t in threads.tolist():
      for store in [*self.open.get(t, []), *(s for g in self.closed.get(t, []) for s in g)]:
        if store.data is None:
          raise Violation("asynchronous at exit", "a copy from shared memory that nobody waited for: its source may be "
                          "gone before it is read", threads=[t], other=store.op)
    left = m.alive.copy()
    left[threads] = False
    for cta in np.unique(m.rank[threads]).tolist():
      mine = slice(cta * m.cta_threads, (cta + 1) * m.cta_threads)
      if not left[mine].any():
        self._cta_ends(cta)

  def _cta_ends(self, cta: int) -> None:
    m = self.machine
    for event in m.events:
      if isinstance(event, Load) and any(int(x[0]) // m.shared.span == cta for x in event.targets):
        raise Violation("asynchronous at exit", f"the CTA ends before this is done: {event.describe()}",
                        threads=[event.thread], other=event.op)


def _groups(m: Machine) -> Groups:
  return m.unit(Groups)


def _start_store(m: Machine, op: Op, thread: int, source: np.ndarray, target: np.ndarray, addresses: np.ndarray,
                 itemsize: int, combine: Any) -> None:
  reader = writer = None
  if m.races is not None:
    who = np.array([thread])
    reader, writer = m.races.issue(who, "bulk read"), m.races.issue(who, "bulk write")
    m.races.agent_read(reader, source, itemsize, op)
    if len(addresses):
      m.races.agent_write(writer, addresses, itemsize, op, atomic=combine is not None)
  store = Store(m, op, source[:0], target, itemsize, combine, reader, writer, m.adversary.eager())
  store.source = source
  if m.adversary.early():
    store.read()
  _groups(m).add(thread, store)
  if m.counters is not None:
    m.counters.bulk(op, len(source) * itemsize, load=False)


@effect(isa.TMA_STORE, isa.TMA_STORE_HINT, isa.TMA_REDUCE)
def _tma_store(m: Machine, op: Op) -> Act:
  coords, names = _coordinates(m, op), [s.name for s in op.inst.form.slots]
  maps = m.registers.source(op.inst.operands[names.index("map")], op.inst.form.slots[names.index("map")])
  row = shared_addresses(m, op.inst.operands[names.index("src")], op.inst.form.slots[names.index("src")])
  reduces = op.inst.row is isa.TMA_REDUCE
  _groups(m)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for t, where, address in _each_thread(op, m, threads, coords, maps):
      src = int(local(m, *row, np.array([t]), slice(t, t + 1))[0])
      spec, box = _box(m, address, where, src, storing=True, by_element=reduces)
      m.shared.check(np.array([box.shared.min(), box.shared.max()]), box.itemsize, 1, [t])
      source = box.shared[box.inside] + m.shared_start[t]
      m.shared.check_valid(source, box.itemsize, [t])
      addresses = box.addresses[box.inside]
      target = addresses - (m.memory.arrays[0].address - m.memory.arrays[0].offset)
      _start_store(m, op, t, source, target, addresses, box.itemsize, _combine(spec, op) if reduces else None)
  return act


def _combine(spec: Any, op: Op) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
  try:
    unit = tensor_map.reduction(spec.dtype, op.inst.mods["op"])
  except ValueError as e:
    raise Violation("descriptor", str(e)) from None
  if spec.dtype != "float32":
    return unit  # type: ignore[return-value]
  return lambda old, new: unit(old.view(np.float32), new.view(np.float32)).view(np.uint32)  # type: ignore[union-attr]


@effect(isa.BULK_STORE)
def _bulk_store(m: Machine, op: Op) -> Act:
  slots, operands = op.inst.form.slots, op.inst.operands
  assert isinstance(operands[1], Addr)
  find, row = global_addresses(m, op, "dst"), shared_addresses(m, operands[1], slots[1])
  size = value_of(m, op, "size")
  _groups(m)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for t in threads.tolist():
      only, one, n = np.array([t]), slice(t, t + 1), _bulk_size(size, t)
      src = local(m, *row, only, one)
      m.shared.check(src, n, 16, only)
      k = np.arange(0, n, 16)
      addresses = find(only, one) + k
      _demand_16(int(addresses[0]), t)
      target = m.memory.offsets(addresses, 16, 16, np.full(len(k), t))
      source = src + m.shared_start[t] + k
      m.shared.check_valid(source, 16, [t])
      _start_store(m, op, t, source, target, addresses, 16, None)
  return act


@effect(isa.BULK_COMMIT)
def _bulk_commit(m: Machine, op: Op) -> Act:
  groups = _groups(m)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for t in threads.tolist():
      groups.closed.setdefault(t, []).append(groups.open.pop(t, []))
  return act


@effect(isa.BULK_WAIT)
def _bulk_wait(m: Machine, op: Op) -> Act:
  groups, n, read_only = _groups(m), op.inst.operands[0], bool(op.inst.mods["read"])
  assert isinstance(n, int)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    for t in threads.tolist():
      groups.wait(t, n, read_only)
  return act
