"""Exchange between the lanes of a warp (PTX ISA 9.7.9 shfl.sync, 9.7.13 vote, match, redux, elect, bar.warp.sync)."""
from __future__ import annotations

from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.sim.faults import Violation
from tiletrace.sim.machine import Machine
from tiletrace.sim.program import Op
from tiletrace.sim.registers import Constant
from tiletrace.sim.strands import WARP, Strand, ascending, lanes_by_warp
from tiletrace.sim.tables import Act, effect

_ALL = 0xFFFF_FFFF


def _demand_mask(m: Machine, op: Op, threads: np.ndarray, masks: np.ndarray) -> None:
  """The mask names the lanes that execute the instruction, no others (PTX ISA: a wait for lanes that never come)."""
  if masks.shape[0] == 1 and len(threads) % WARP == 0 and int(masks[0]) == _ALL and (
      len(threads) == WARP * (int(threads[-1]) // WARP - int(threads[0]) // WARP + 1)):
    return
  masks = np.broadcast_to(masks, threads.shape)
  for lanes in lanes_by_warp(threads):
    mine = masks[np.searchsorted(threads, lanes)]
    named = int(mine[0])
    here = int((1 << (lanes % WARP)).sum())
    living = int((1 << np.flatnonzero(m.alive[lanes[0] // WARP * WARP:lanes[0] // WARP * WARP + WARP])).sum())
    if (mine != mine[0]).any() or (named & living) != here:
      raise Violation("not uniform", f"the mask {named:#x} of {op.inst.form} names other lanes than the {here:#x} that "
                      "execute it together", threads=lanes)


class _Lanes:
  """Operands of a strand's warps as [warps, 32]; lanes that are not active read as zero."""

  def __init__(self, m: Machine, threads: np.ndarray, at: Any):
    self.at, self.n = at, len(threads)
    self.whole = len(threads) % WARP == 0 and len(threads) == WARP * len(ascending(threads // WARP))
    if not self.whole:
      warps, inverse = np.unique(threads // WARP, return_inverse=True)
      self.shape, self.where = (len(warps), WARP), (inverse, threads % WARP)

  def get(self, row: Any) -> np.ndarray:
    value = row[self.at]
    if len(value) == 1 and self.n > 1:
      value = np.broadcast_to(value, self.n)
    if self.whole:
      return value.reshape(-1, WARP)
    out = np.zeros(self.shape, value.dtype)
    out[self.where] = value
    return out

  def flat(self, value: np.ndarray) -> np.ndarray:
    return value.reshape(-1) if self.whole else value[self.where]

  @property
  def active(self) -> np.ndarray:
    if self.whole:
      return np.ones((self.n // WARP, WARP), bool)
    out = np.zeros(self.shape, bool)
    out[self.where] = True
    return out


@effect(isa.BAR_WARP_SYNC)
def _warp_sync(m: Machine, op: Op) -> Act:
  mask = m.registers.source(op.inst.operands[0], op.inst.form.slots[0])

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    _demand_mask(m, op, threads, mask[at])
    if m.races is not None:
      for lanes in lanes_by_warp(threads):
        m.races.barrier(lanes)
  return act


@effect(isa.ELECT)
def _elect(m: Machine, op: Op) -> Act:
  slot, p = op.inst.form.slots[0], op.inst.operands[0]
  mask = m.registers.source(op.inst.operands[1], op.inst.form.slots[1])

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    _demand_mask(m, op, threads, mask[at])
    chosen = np.zeros(len(threads), bool)
    chosen[np.flatnonzero(np.diff(threads // WARP, prepend=-1))] = True
    m.registers.assign(p, slot, chosen, at)  # type: ignore[arg-type]
  return act


@effect(isa.SHFL, isa.SHFL_P)
def _shuffle(m: Machine, op: Op) -> Act:
  names = [s.name for s in op.inst.form.slots]
  slots, operands = dict(zip(names, op.inst.form.slots)), dict(zip(names, op.inst.operands))
  a, b, c, mask = (m.registers.source(operands[n], slots[n]) for n in ("a", "b", "c", "mask"))
  mode, d, p = op.inst.mods["mode"], operands["d"], operands.get("p")
  assert isinstance(d, Reg)

  fixed = _source_lanes(mode, b[0], c[0]) if isinstance(b, Constant) and isinstance(c, Constant) else None

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    _demand_mask(m, op, threads, mask[at])
    lanes = _Lanes(m, threads, at)
    values = lanes.get(a)
    source, inside = fixed or _source_lanes(mode, lanes.get(b), lanes.get(c))
    if lanes.whole and fixed is not None:
      result = values[:, source[0]]
    else:
      source, inside = np.broadcast_to(source, values.shape), np.broadcast_to(inside, values.shape)
      if not np.take_along_axis(lanes.active, source, 1)[lanes.active].all():
        raise Violation("not uniform", f"{op.inst.form} reads from a lane that does not execute it", threads=threads)
      result = np.take_along_axis(values, source, 1)
    m.registers.assign(d, slots["d"], lanes.flat(result), at)
    if isinstance(p, Reg):
      m.registers.assign(p, slots["p"], lanes.flat(np.broadcast_to(inside, values.shape)), at)
  return act


def _source_lanes(mode: str, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(lane read [.., 32], whether it is in range), from the operands [.., 32] or [1] (PTX ISA 9.7.9, shfl.sync)."""
  lane = np.arange(WARP)
  by, clamp = b.astype(np.int64) & 31, c.astype(np.int64)
  bound, segment = clamp & 31, clamp >> 8 & 31
  most, least = (lane & segment) | (bound & ~segment), lane & segment
  source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": least | (by & ~segment)}[mode]
  inside = source >= most if mode == "up" else source <= most
  return np.atleast_2d(np.where(inside, source, lane)), np.atleast_2d(inside)


@effect(isa.VOTE, isa.VOTE_BALLOT, isa.REDUX, isa.MATCH_ANY)
def _collect(m: Machine, op: Op) -> Act:
  slots, (d, x, m_) = op.inst.form.slots, op.inst.operands
  a, mask = m.registers.source(x, slots[1]), m.registers.source(m_, slots[2])
  collect = _COLLECT[op.inst.row]

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    _demand_mask(m, op, threads, mask[at])
    lanes = _Lanes(m, threads, at)
    result = collect(lanes.get(a), lanes.active, op.inst.mods)
    m.registers.assign(d, slots[0], lanes.flat(np.broadcast_to(result, lanes.active.shape)), at)  # type: ignore[arg-type]
  return act


def _vote(x: np.ndarray, active: np.ndarray, mods: Any) -> np.ndarray:
  every, some = (np.asarray(f) for f in ((x | ~active).all(1, keepdims=True), (x & active).any(1, keepdims=True)))
  return np.asarray({"all": every, "any": some, "uni": every | ~some}[mods["mode"]])


def _ballot(x: np.ndarray, active: np.ndarray, mods: Any) -> np.ndarray:
  bits = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
  return np.where(x & active, bits, np.uint32(0)).sum(1, keepdims=True, dtype=np.uint32)


def _redux(x: np.ndarray, active: np.ndarray, mods: Any) -> np.ndarray:
  own = x.view(np.int32) if mods["type"] == "s32" else x
  info = np.iinfo(own.dtype)
  ufunc, neutral = {"add": (np.add, 0), "min": (np.minimum, info.max), "max": (np.maximum, info.min),
                    "and": (np.bitwise_and, _ALL), "or": (np.bitwise_or, 0), "xor": (np.bitwise_xor, 0)}[mods["op"]]
  filled = np.where(active, own, own.dtype.type(neutral))
  return ufunc.reduce(filled, axis=1, keepdims=True, dtype=own.dtype).view(np.uint32)


def _match(x: np.ndarray, active: np.ndarray, mods: Any) -> np.ndarray:
  bits = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
  same = (x[:, :, None] == x[:, None, :]) & active[:, None, :]
  return np.where(same, bits, np.uint32(0)).sum(2, dtype=np.uint32)


_COLLECT: Any = {isa.VOTE: _vote, isa.VOTE_BALLOT: _ballot, isa.REDUX: _redux, isa.MATCH_ANY: _match}
