"""mma.sync, ldmatrix, stmatrix, movmatrix on the machine (PTX ISA 9.7.14)."""
from __future__ import annotations

from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.sim import mma
from tiletrace.sim.access import differs
from tiletrace.sim.machine import Machine
from tiletrace.sim.mbarriers import local, mbarriers, shared_addresses
from tiletrace.sim.program import Op
from tiletrace.sim.storage import STORAGE
from tiletrace.sim.strands import WARP, Strand
from tiletrace.sim.tables import Act, effect

_ROW = 16      # bytes of a row of an 8 x 8 matrix of 16-bit elements


def _rows(m: Machine, regs: Any) -> list[np.ndarray]:
  return [m.registers.row(r) for r in (regs if isinstance(regs, tuple) else (regs,))]


def _read(rows: list[np.ndarray], at: Any, dtype: Any = None) -> np.ndarray:
  """[registers, threads]."""
  out = np.stack([row[at] for row in rows])
  return out if dtype is None else out.view(dtype)


def _matrix_rows(m: Machine, op: Op, row: Any, offset: int, num: int, threads: np.ndarray, at: Any
                 ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(addresses [32 w] in the CTA, which lanes name a row, their threads), after checks."""
  addresses = local(m, row, offset, threads, at)
  naming = threads % WARP < 8 * num
  m.shared.check(addresses[naming], _ROW, _ROW, threads[naming])
  return addresses, naming, threads[naming]


@effect(isa.LDMATRIX)
def _ldmatrix(m: Machine, op: Op) -> Act:
  num, trans = int(op.inst.mods["num"][1:]), bool(op.inst.mods["trans"])
  targets = _rows(m, op.inst.operands[0])
  row, offset = shared_addresses(m, op.inst.operands[1], op.inst.form.slots[1])

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    m.demand_converged(s, threads, "ldmatrix")
    addresses, naming, who = _matrix_rows(m, op, row, offset, num, threads, at)
    start = m.shared_start[at]
    lines = (addresses + start)[naming]
    m.shared.check_valid(lines, _ROW, who)
    if m.races is not None:
      m.races.read(who, lines, _ROW, op)
    halves = mma.element_addresses(addresses + start, num, trans)
    for target, where in zip(targets, halves):
      low, high = (m.shared.load(where[:, i], 2).astype(np.uint32) for i in range(2))
      target[at] = (low | high << np.uint32(16)).view(target.dtype)
    if m.counters is not None:
      m.counters.access(op, who, lines, _ROW, True)
  return act


@effect(isa.STMATRIX)
def _stmatrix(m: Machine, op: Op) -> Act:
  num, trans = int(op.inst.mods["num"][1:]), bool(op.inst.mods["trans"])
  row, offset = shared_addresses(m, op.inst.operands[0], op.inst.form.slots[0])
  sources, bars = [r.view(np.uint32) for r in _rows(m, op.inst.operands[1])], mbarriers(m)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    m.demand_converged(s, threads, "stmatrix")
    addresses, naming, who = _matrix_rows(m, op, row, offset, num, threads, at)
    start = m.shared_start[at]
    lines = (addresses + start)[naming]
    bars.check_store(lines, _ROW)
    m.shared.mark(lines, _ROW)
    whole = [(mma.transpose(x[at]) if trans else x[at]).reshape(-1, 8, 4) for x in sources]
    now = list(np.stack(whole, axis=1).reshape(-1, 4).T)         # of each row that a lane names, its four words
    places = [lines + 4 * i for i in range(4)]
    changed = differs(m.shared, places, 4, now) if m.races is not None else None
    for place, value in zip(places, now):
      m.shared.store(place, 4, value)
    if m.races is not None:
      m.races.write(who, lines, _ROW, op, changed=changed, lost=differs(m.shared, places, 4, now))
    if m.counters is not None:
      m.counters.access(op, who, lines, _ROW, True)
  return act


@effect(isa.MOVMATRIX)
def _movmatrix(m: Machine, op: Op) -> Act:
  d, a = (x for x in op.inst.operands)
  assert isinstance(d, Reg) and isinstance(a, Reg)
  source, target = m.registers.row(a).view(np.uint32), m.registers.row(d)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    m.demand_converged(s, threads, "movmatrix")
    target[at] = mma.transpose(source[at]).view(target.dtype)
  return act


@effect(isa.MMA, isa.MMA_TF32, isa.MMA_F8, isa.MMA_S8)
def _mma(m: Machine, op: Op) -> Act:
  d, a, b, c = (_rows(m, x) for x in op.inst.operands)
  dtype = np.dtype(STORAGE["f32" if op.inst.mods["d"] == "f32" else "b32"])

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    m.demand_converged(s, threads, "mma.sync")
    result = mma.multiply(op.inst.mods, _read(a, at, np.uint32), _read(b, at, np.uint32), _read(c, at, dtype))
    for target, value in zip(d, result):
      target[at] = value.view(target.dtype)
    if m.counters is not None:
      m.counters.mma(op, len(threads) // WARP)
  return act
