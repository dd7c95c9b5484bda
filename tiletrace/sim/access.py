"""Loads, stores and atomics (PTX ISA 9.7.9, 9.7.13)."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Addr, Symbol
from tiletrace.sim import numerics
from tiletrace.sim.control import PARAM_SPAN, PARAM_START, PARAM_WINDOW, parameter_address
from tiletrace.sim.faults import Violation
from tiletrace.sim.machine import Machine
from tiletrace.sim.mbarriers import clustered, local, mbarriers, shared_addresses, window
from tiletrace.sim.memory import Bytes
from tiletrace.sim.order import global_order
from tiletrace.sim.program import Op
from tiletrace.sim.registers import literal
from tiletrace.sim.storage import STORAGE, resize, width
from tiletrace.sim.strands import Strand
from tiletrace.sim.tables import Act, effect

# threads, at -> offsets in the flat memory, addresses as the race detector counts them
Locate = Callable[[np.ndarray, Any], tuple[np.ndarray, np.ndarray]]


def _locate_shared(m: Machine, op: Op, name: str, nbytes: int, *, cluster: bool) -> Locate:
  i = [s.name for s in op.inst.form.slots].index(name)
  row, offset = shared_addresses(m, op.inst.operands[i], op.inst.form.slots[i])

  def locate(threads: np.ndarray, at: Any) -> tuple[np.ndarray, np.ndarray]:
    if cluster:
      offsets = clustered(m, window(row, offset, threads, at), threads)
      m.shared.check(offsets % m.shared.span, nbytes, nbytes, threads)
    else:
      addresses = local(m, row, offset, threads, at)
      m.shared.check(addresses, nbytes, nbytes, threads)
      offsets = addresses + m.shared_start[at] if m.ctas > 1 else addresses
    return offsets, offsets
  return locate


def global_addresses(m: Machine, op: Op, name: str) -> Callable[[np.ndarray, Any], np.ndarray]:
  """int64 addresses of an operand, [n]."""
  i = [s.name for s in op.inst.form.slots].index(name)
  x = op.inst.operands[i]
  assert isinstance(x, Addr) and not isinstance(x.base, Symbol), op
  row, offset = m.registers.source(x.base, op.inst.form.slots[i]), x.offset

  def addresses(threads: np.ndarray, at: Any) -> np.ndarray:
    value = row[at].view(np.int64) + offset
    return value if len(value) == len(threads) else np.broadcast_to(value, threads.shape)
  return addresses


def _locate_global(m: Machine, op: Op, name: str, nbytes: int) -> Locate:
  find, memory = global_addresses(m, op, name), m.memory

  def locate(threads: np.ndarray, at: Any) -> tuple[np.ndarray, np.ndarray]:
    addresses = find(threads, at)
    return memory.offsets(addresses, nbytes, nbytes, threads), addresses
  return locate


def _space(op: Op) -> str:
  head = op.inst.form.head
  return "cluster" if ".shared::cluster" in head else "shared" if ".shared" in head else "global"


def _locator(m: Machine, op: Op, name: str, nbytes: int) -> Locate:
  space = _space(op)
  if space == "global":
    return _locate_global(m, op, name, nbytes)
  return _locate_shared(m, op, name, nbytes, cluster=space == "cluster")


# ---- loads and stores


@effect(isa.LD_GLOBAL, isa.LD_GLOBAL_HINT, isa.LD_SHARED, isa.LD_CLUSTER, isa.LD_SYNC)
def _load(m: Machine, op: Op) -> Act:
  slot, d = op.inst.form.slots[0], op.inst.operands[0]
  regs = d if isinstance(d, tuple) else (d,)
  size = width(slot.type) // 8
  nbytes = size * len(regs)
  locate, shared = _locator(m, op, "a", nbytes), _space(op) != "global"
  memory = m.shared if shared else m.memory
  rows = [m.registers.row(r) for r in regs]  # type: ignore[arg-type]
  classes = [r.cls for r in regs]  # type: ignore[union-attr]
  strong, order = op.inst.row is isa.LD_SYNC, global_order(m)
  constant = bool(op.inst.mods.get("nc"))

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    offsets, addresses = locate(threads, at)
    if shared:
      m.shared.check_valid(offsets, nbytes, threads)
    elif constant:
      _demand_constant(m, threads, addresses)
    if m.races is not None:
      (m.races.strong_read if strong else m.races.read)(threads, addresses, nbytes, op)
    for k, (row, cls) in enumerate(zip(rows, classes)):
      row[at] = resize(memory.load(offsets + k * size if k else offsets, size), slot.type, cls)
    if strong:
      order.reads(threads, addresses, op.inst.mods["sem"], op.inst.mods["scope"])
    if m.counters is not None:
      m.counters.access(op, threads, addresses, nbytes, shared)
  return act


def _demand_constant(m: Machine, threads: np.ndarray, addresses: np.ndarray) -> None:
  """ld.global.nc is for memory that nobody writes as long as the kernel runs (PTX ISA 9.7.9, ld.global.nc)."""
  array = m.memory.array_at(int(addresses[0]))
  if array in m.launch.written:
    raise Violation("non-coherent load", f"ld.global.nc from {m.memory.arrays[array].name}, which the kernel writes",
                    threads=threads, addresses=addresses)


@effect(isa.ST_GLOBAL, isa.ST_GLOBAL_HINT, isa.ST_SHARED, isa.ST_CLUSTER, isa.ST_SYNC)
def _store(m: Machine, op: Op) -> Act:
  slot, x = op.inst.form.slots[1], op.inst.operands[1]
  size = width(slot.type) // 8
  values: list[Any] = []
  for r in x if isinstance(x, tuple) else (x,):
    if isinstance(r, int | float):
      bits = literal(r, np.dtype(STORAGE[slot.classes[0]])).reshape(1)
      values.append(bits.view(f"u{bits.itemsize}").astype(f"u{size}"))
    else:
      row = m.registers.row(r)  # type: ignore[arg-type]
      values.append(row.view(f"u{size}")[::row.itemsize // size])
  nbytes = size * len(values)
  locate, shared = _locator(m, op, "a", nbytes), _space(op) != "global"
  memory, bars = m.shared if shared else m.memory, mbarriers(m)
  strong, order = op.inst.row is isa.ST_SYNC, global_order(m)
  constant = [isinstance(r, int | float) for r in (x if isinstance(x, tuple) else (x,))]

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    offsets, addresses = locate(threads, at)
    if shared:
      bars.check_store(offsets, nbytes)
      m.shared.mark(offsets, nbytes)
    now = [value if constant[k] else value[at] for k, value in enumerate(values)]
    places = [offsets + k * size if k else offsets for k in range(len(now))]
    changed = differs(memory, places, size, now) if m.races is not None else None
    for place, value in zip(places, now):
      memory.store(place, size, value)
    if m.races is not None:
      if strong:
        m.races.atomic(threads, addresses, nbytes, op)
      else:
        m.races.write(threads, addresses, nbytes, op, changed=changed, lost=differs(memory, places, size, now))
    if strong:
      order.write(threads, addresses, op.inst.mods["sem"], op.inst.mods["scope"])
    if m.counters is not None:
      m.counters.access(op, threads, addresses, nbytes, shared)
    if strong:
      m.changed = True
  return act


def differs(memory: Bytes, places: list[np.ndarray], size: int, values: list[np.ndarray]) -> np.ndarray:
  """bool [threads]: whether the memory holds something else than these values."""
  out = memory.load(places[0], size) != values[0]
  for place, value in zip(places[1:], values[1:]):
    out |= memory.load(place, size) != value
  return out


@effect(isa.LD_PARAM)
def _load_param(m: Machine, op: Op) -> Act:
  slot, d, x = op.inst.form.slots[0], op.inst.operands[0], op.inst.operands[1]
  assert isinstance(x, Addr)
  regs, size = d if isinstance(d, tuple) else (d,), width(slot.type) // 8
  entry = m.program.entry
  content = np.zeros(PARAM_SPAN * len(entry.params), np.uint8)
  for i, p in enumerate(entry.params):
    value = m.launch.params[p.name]
    content[PARAM_SPAN * i:PARAM_SPAN * i + 8] = list((value & (1 << 64) - 1).to_bytes(8, "little"))

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    if isinstance(x.base, Symbol):
      addresses = np.array([parameter_address(m, x.base.name) + x.offset])
    else:
      addresses = m.registers.source(x.base, op.inst.form.slots[1])[at].astype(np.int64) + x.offset
    start = addresses - PARAM_START
    if (start < 0).any() or (start + size * len(regs) > len(content)).any():
      raise Violation("out of bounds", f"parameters end at {PARAM_START + len(content):#x}", addresses=addresses)
    for k, r in enumerate(regs):
      picked = np.ascontiguousarray(content[start[:, None] + k * size + np.arange(size)]).view(f"u{size}")[:, 0]
      m.registers.row(r)[at] = resize(picked, slot.type, r.cls)  # type: ignore[arg-type, union-attr]
  return act


def tensor_map_at(m: Machine, address: int) -> int:
  """The index of the tensor map parameter whose generic address this is.

  Raises:
    Violation: there is none.
  """
  index, rest = divmod(address - PARAM_WINDOW - PARAM_START, PARAM_SPAN)
  params = m.program.entry.params
  if rest or not 0 <= index < len(params) or params[index].type != "tensormap":
    raise Violation("descriptor", f"there is no tensor map at {address:#x}", addresses=[address])
  return m.launch.params[params[index].name]


# ---- atomics: threads one after another, in their order


def _operation(op: Op) -> tuple[Callable[..., np.ndarray], str]:
  """(old, b[, c]) -> new, on arrays of one element in unsigned storage; and the type."""
  mods = op.inst.mods
  type_ = mods.get("type", "f32")
  name = mods.get("op", "add")
  if op.inst.row is isa.ATOM_CAS:
    return lambda old, b, c: np.where(old == b, c, old), type_
  if name == "exch":
    return lambda old, b: b, type_
  if name == "inc":
    return lambda old, b: np.where(old >= b, np.uint32(0), old + np.uint32(1)), type_
  if name == "dec":
    return lambda old, b: np.where((old == 0) | (old > b), b, old - np.uint32(1)), type_
  row, extra = {"add": (isa.ADD, {}), "min": (isa.MIN, {}), "max": (isa.MAX, {}), "and": (isa.AND, {}),
                "or": (isa.OR, {}), "xor": (isa.XOR, {})}[name]
  if type_[-2:] == "16" or type_.endswith("x2"):
    extra = {"rnd": "rn"}
  unit = numerics.unit(row.form(type=type_, **extra))
  assert unit is not None
  return unit, type_  # type: ignore[return-value]


@effect(isa.ATOM, isa.ATOM_CAS, isa.ATOM_HALF, isa.RED, isa.RED_HALF, isa.RED_VECTOR)
def _atomic(m: Machine, op: Op) -> Act:
  slots, operands = op.inst.form.slots, op.inst.operands
  operate, type_ = _operation(op)
  b_slot = next(s for s in slots if s.name == "b")
  b = m.registers.sources(operands[slots.index(b_slot)], b_slot)
  c = [m.registers.source(x, s) for s, x in zip(slots, operands) if s.name == "c"]
  d = next(((s, x) for s, x in zip(slots, operands) if s.writes), None)
  size = {"f16x2": 4, "bf16x2": 4}.get(type_) or width(type_) // 8
  locate, shared = _locator(m, op, "a", size * len(b)), _space(op) != "global"
  memory, dtype = m.shared if shared else m.memory, np.dtype(STORAGE[b_slot.classes[0]])
  sem, scope, order = op.inst.mods["sem"], op.inst.mods["scope"], global_order(m)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    offsets, addresses = locate(threads, at)
    if shared:
      m.shared.check_valid(offsets, size * len(b), threads)
    if m.races is not None:
      m.races.atomic(threads, addresses, size * len(b), op)
    order.write(threads, addresses, sem, scope)
    old = np.zeros(len(threads), dtype)
    operands_ = [np.broadcast_to(x[at], threads.shape) for x in (*b, *c)]
    for i in range(len(threads)):
      for k in range(len(b)):
        where = offsets[i:i + 1] + k * size
        before = memory.load(where, size).view(dtype)
        extra = [operands_[-1][i:i + 1]] if c else []
        after = operate(before, operands_[k][i:i + 1], *extra)
        memory.store(where, size, after.astype(dtype, copy=False).view(f"u{size}"))
        old[i] = before[0]
    if d is not None:
      m.registers.assign(d[1], d[0], old, at)  # type: ignore[arg-type]
    order.reads(threads, addresses, sem, scope)
    m.changed = True
    if m.counters is not None:
      m.counters.access(op, threads, addresses, size * len(b), shared)
  return act
