"""Ends of threads, special registers, addresses, register budgets, and hints without an effect."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg, Special, Symbol
from tiletrace.sim.faults import Violation
from tiletrace.sim.machine import Machine
from tiletrace.sim.memory import RESERVED
from tiletrace.sim.program import Op
from tiletrace.sim.registers import Constant, Row
from tiletrace.sim.strands import WARP, Strand, ascending
from tiletrace.sim.tables import Act, effect

# Generic addresses of the windows of the other state spaces. Global addresses are generic ones as they are.
PARAM_WINDOW = 0x1000_0000_0000
SHARED_WINDOW = 0x2000_0000_0000
PARAM_SPAN = 128                # bytes kept for each parameter
PARAM_START = 0x210             # where the driver puts the first (constant bank 0 on sm_90)
_UNIT = 8                       # registers that setmaxnreg moves at a time
WARPGROUP = 128


def parameter_address(machine: Machine, name: str) -> int:
  """In the window of .param."""
  return PARAM_START + PARAM_SPAN * [p.name for p in machine.program.entry.params].index(name)


def symbol_address(machine: Machine, symbol: Symbol) -> int:
  """In the window of the symbol's space. Static shared variables come first, the dynamic one last."""
  if symbol.space == "param":
    return parameter_address(machine, symbol.name)
  if symbol.space == "global":
    return next(a.address for a in machine.memory.arrays if a.name == symbol.name)
  at, found = RESERVED, None
  for variable in sorted(machine.program.module.shared, key=lambda s: s.nbytes is None):
    at = -(-at // variable.align) * variable.align
    if variable.name == symbol.name:
      found = at
    at += variable.nbytes or 0
  assert found is not None, symbol
  return found


def symbol_row(machine: Machine, symbol: Symbol, dtype: Any) -> Row:
  """The symbol's address in each thread; in shared memory it has the CTA's rank in the cluster above bit 23."""
  address = np.array([symbol_address(machine, symbol)], dtype)
  if symbol.space != "shared" or machine.ctas == 1:
    return Constant(address)
  return address + (machine.rank << 24).astype(dtype)


@effect(isa.RET, isa.EXIT)
def _ret(m: Machine, op: Op) -> Act:
  return lambda s, threads, at: m.end(s, threads)


@effect(isa.TRAP)
def _trap(m: Machine, op: Op) -> Act:
  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    raise Violation("trap", "the kernel executed trap", threads=threads)
  return act


@effect(isa.NANOSLEEP, isa.GRIDDEPCONTROL, isa.PREFETCH, isa.PREFETCH_TENSORMAP, isa.TMA_PREFETCH)
def _hint(m: Machine, op: Op) -> Act:
  return lambda s, threads, at: None


def _assign(m: Machine, op: Op, value: Callable[[Any], np.ndarray]) -> Act:
  """d = value(at)."""
  slot, d = op.inst.form.slots[0], op.inst.operands[0]
  assert isinstance(d, Reg)

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    m.registers.assign(d, slot, value(at), at)
  return act


def _storage(m: Machine, op: Op) -> np.dtype:
  row, _ = m.registers.destination(op.inst.operands[0], op.inst.form.slots[0])  # type: ignore[arg-type]
  return row.dtype


@effect(isa.MOV_SREG)
def _special(m: Machine, op: Op) -> Act:
  special = op.inst.operands[1]
  assert isinstance(special, Special)
  row, dtype = m.special[special.name], _storage(m, op)
  if special.name in ("clock", "clock64", "globaltimer"):
    return _assign(m, op, lambda at: np.array([m.launch.steps]).astype(dtype))
  return _assign(m, op, lambda at: row[at].astype(dtype))


@effect(isa.MOV_SYMBOL)
def _symbol(m: Machine, op: Op) -> Act:
  symbol = op.inst.operands[1]
  assert isinstance(symbol, Symbol)
  row = symbol_row(m, symbol, _storage(m, op))
  return _assign(m, op, lambda at: row[at])


@effect(isa.CVTA, isa.CVTA_TO)
def _cvta(m: Machine, op: Op) -> Act:
  window = np.uint64({"param": PARAM_WINDOW, "shared": SHARED_WINDOW}.get(op.inst.mods["space"], 0))
  source = m.registers.source(op.inst.operands[1], op.inst.form.slots[1])
  if op.inst.row is isa.CVTA:
    return _assign(m, op, lambda at: source[at] + window)
  return _assign(m, op, lambda at: source[at] - window)


@effect(isa.MAPA)
def _mapa(m: Machine, op: Op) -> Act:
  a, rank = (m.registers.source(x, s) for x, s in zip(op.inst.operands[1:], op.inst.form.slots[1:]))

  def value(at: Any) -> np.ndarray:
    ranks = rank[at]
    if (ranks >= m.ctas).any():
      raise Violation("out of bounds", f"mapa names CTA {int(ranks.max())} of a cluster of {m.ctas}")
    return (a[at] & np.uint32(0xFF_FFFF)) | ranks << np.uint32(24)
  return _assign(m, op, value)


@effect(isa.CREATEPOLICY)
def _policy(m: Machine, op: Op) -> Act:
  value = np.array([0x12F0_0000_0000_0000], np.uint64)      # opaque
  return _assign(m, op, lambda at: value)


@effect(isa.ACTIVEMASK)
def _activemask(m: Machine, op: Op) -> Act:
  slot, d = op.inst.form.slots[0], op.inst.operands[0]

  def act(s: Strand, threads: np.ndarray, at: Any) -> None:
    lanes = np.uint64(1) << (threads % WARP).astype(np.uint64)
    masks = np.zeros(m.threads // WARP, np.uint64)
    np.add.at(masks, threads // WARP, lanes)
    m.registers.assign(d, slot, masks[threads // WARP].astype(np.uint32), at)  # type: ignore[arg-type]
  return act


# ---- setmaxnreg


class RegisterPool:
  """The registers of one SM as the CTAs of a cluster got them: each CTA's own pool, and what each warp holds."""

  def __init__(self, m: Machine):
    self.machine = m
    entry = m.program.entry
    most = 65536 // (entry.threads * (entry.min_ctas or 1)) // _UNIT * _UNIT
    self.at_entry = min(255, entry.max_registers or most, most) // _UNIT * _UNIT
    self.warps = m.threads // WARP
    m.on_start.append(self.reset)

  def reset(self) -> None:
    self.held = np.full(self.warps, self.at_entry)
    self.free = np.zeros(self.machine.ctas, int)

  def change(self, warpgroup: int, n: int) -> bool:
    """Whether the warpgroup has `n` registers for each thread now; False: it waits for others to release some."""
    warps = slice(4 * warpgroup, 4 * warpgroup + 4)
    cta = warpgroup * WARPGROUP // self.machine.cta_threads
    more = int((n - self.held[warps]).sum()) * WARP
    if more > self.free[cta]:
      return False
    self.free[cta] -= more
    self.held[warps] = n
    self.machine.changed = True
    return True


class _PoolWait:
  kind = "register budget"       # of a deadlock with such a wait

  def __init__(self, pool: RegisterPool, warpgroup: int, n: int):
    self.pool, self.warpgroup, self.n = pool, warpgroup, n

  def ready(self) -> bool:
    cta = self.warpgroup * WARPGROUP // self.pool.machine.cta_threads
    need = int((self.n - self.pool.held[4 * self.warpgroup:4 * self.warpgroup + 4]).sum()) * WARP
    return need <= self.pool.free[cta]

  def describe(self) -> str:
    held = int(self.pool.held[4 * self.warpgroup])
    cta = self.warpgroup * WARPGROUP // self.pool.machine.cta_threads
    return (f"{self.n} registers for each thread of warpgroup {self.warpgroup} (it has {held}; {self.pool.free[cta]} "
            f"registers of the CTA are free, {(self.n - held) * WARPGROUP} are needed: another role must release them)")


@effect(isa.SETMAXNREG)
def _setmaxnreg(m: Machine, op: Op) -> Act:
  pool = m.unit(RegisterPool)
  n, up = op.inst.operands[0], op.inst.mods["dir"] == "inc"
  assert isinstance(n, int)

  def act(s: Strand, threads: np.ndarray, at: Any) -> bool | None:
    m.demand_converged(s, threads, "setmaxnreg")
    if not rendezvous(m, s, threads):
      return True
    waiting = []
    for warpgroup in ascending(threads // WARPGROUP).tolist():
      held = int(pool.held[4 * warpgroup])
      if (up and n < held) or (not up and n > held):
        raise Violation("register budget", f"setmaxnreg.{op.inst.mods['dir']} {n}, but warpgroup {warpgroup} has "
                        f"{held} registers for each thread", threads=threads[threads // WARPGROUP == warpgroup])
      if not pool.change(warpgroup, n):
        waiting.append(warpgroup)
    if not waiting:
      return None
    for warpgroup in waiting:
      m.block(Strand(s.pc, threads[threads // WARPGROUP == warpgroup]), _PoolWait(pool, warpgroup, n))
    rest = threads[~np.isin(threads // WARPGROUP, waiting)]
    if len(rest):
      m.ready.append(Strand(s.pc + 1, rest))
    return True
  return act


# ---- warps of a warpgroup meet


class _Meeting:
  """Warps wait until all four of their warpgroup stand at one instruction."""

  def __init__(self, m: Machine, pc: int, warpgroups: list[int]):
    self.machine, self.pc, self.warpgroups = m, pc, warpgroups

  def ready(self) -> bool:
    here = {int(w) for s, c in self.machine.blocked if isinstance(c, _Meeting) and s.pc == self.pc for w in s.warps}
    here |= {int(w) for s in self.machine.ready if s.pc == self.pc and s.whole for w in s.warps}
    return all(4 * g + i in here for g in self.warpgroups for i in range(4))

  def describe(self) -> str:
    return f"the other warps of warpgroup {', '.join(map(str, self.warpgroups))} to come to this instruction"


def rendezvous(m: Machine, s: Strand, threads: np.ndarray) -> bool:
  """Whether the strand holds whole warpgroups only. If not, those that are not whole wait, and the rest is put back."""
  warps = s.warps
  if len(warps) % 4 == 0 and len(threads) == WARP * len(warps) and (warps[::4] % 4 == 0).all() and (
      warps[3::4] == warps[::4] + 3).all():
    return True
  groups, counts = np.unique(warps // 4, return_counts=True)
  for group in groups[counts < 4].tolist():
    m.block(Strand(s.pc, threads[threads // WARPGROUP == group]), _Meeting(m, s.pc, [group]))
  m.changed = True
  rest = threads[np.isin(threads // WARPGROUP, groups[counts == 4])]
  if len(rest):
    m.ready.append(Strand(s.pc, rest))
  return False
