"""Evaluates what an emitter wrote for f32 registers, by the simulator's units: many values at once, no jumps back."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Inst, Slot
from tiletrace.lowering.ptx.module import Builder, Module, Param
from tiletrace.lowering.ptx.registers import Label, Reg
from tiletrace.sim import numerics
from tiletrace.sim.storage import STORAGE, resize


def evaluate(f: Callable[..., Reg], *args: np.ndarray) -> np.ndarray:
  """f(builder, *registers) for the arrays in those registers; f32 arrays of one length."""
  b = Module("sm_90a").entry("straight", [Param("x", "u64")], 32).builder()
  values = {b.reg("f32"): np.asarray(a, np.float32) for a in args}
  out = f(b, *values)
  with np.errstate(all="ignore"):
    _Run(b, values, len(args[0])).all()
  return values[out]


class _Run:
  def __init__(self, b: Builder, values: dict[Reg, np.ndarray], n: int):
    self.body, self.values, self.n = b.entry.body, values, n
    self.active, self.away = np.ones(n, bool), {}

  def all(self) -> None:
    for inst in self.body:
      if isinstance(inst, Label):
        self.active = self.active | self.away.pop(inst)
      elif isinstance(inst, Inst):
        self.jump(inst) if inst.row is isa.BRA else self.compute(inst)
    assert not self.away and self.active.all()

  def jump(self, inst: Inst) -> None:
    assert inst.pred is not None
    gone = self.active & (self.values[inst.pred] ^ inst.negate)
    self.away[inst.operands[0]] = gone
    self.active = self.active & ~gone

  def compute(self, inst: Inst) -> None:
    pairs = [(s, x) for s, xs in zip(inst.form.slots, inst.operands) for x in (xs if isinstance(xs, tuple) else (xs,))]
    unit = numerics.unit(inst.form)
    assert unit is not None, inst
    got = unit(*[self.read(s, x) for s, x in pairs if s.role != "dst"])
    destinations = [(s, x) for s, x in pairs if s.role == "dst"]
    for (slot, reg), value in zip(destinations, got if isinstance(got, tuple) else (got,), strict=True):
      assert isinstance(reg, Reg)
      value = np.broadcast_to(resize(value, slot.type, reg.cls), self.n)
      self.values[reg] = np.where(self.active, value, self.values[reg]) if reg in self.values else value

  def read(self, slot: Slot, x: Any) -> Any:
    if isinstance(x, Reg):
      return resize(self.values[x], slot.type, slot.classes[0])
    if slot.kind == "int":
      return x
    storage = np.dtype(STORAGE[slot.classes[0]])
    if isinstance(x, float):
      return np.array([x], storage if storage.kind == "f" else np.float32).view(storage)
    return np.array([x & (1 << 8 * storage.itemsize) - 1], storage)
