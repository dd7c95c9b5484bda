"""Runs PTX on the CPU, all threads of a CTA in step: arithmetic, shuffles, shared and global memory, uniform branches.

It checks what a GPU leaves unsaid: within one interval between two `bar.sync 0`, no warp reads or overwrites a byte of
shared memory that another wrote, and no access leaves its array. No TMA, wgmma, mbarriers or named barriers.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tests.gpu.corpus import Case
from tiletrace.lowering.ptx.instr import Inst
from tiletrace.lowering.ptx.registers import Addr, Label, Reg, Special, Symbol
from tiletrace.stages import Lowered

_TYPES: dict[str, Any] = {
  "b8": np.uint8, "u8": np.uint8, "b16": np.uint16, "u16": np.uint16, "f16": np.float16, "b32": np.uint32,
  "u32": np.uint32, "s32": np.int32, "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
  "pred": np.bool_,
}
_COMPARE: dict[str, Callable] = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
                                 "gt": np.greater, "ge": np.greater_equal, "neu": np.not_equal,
                                 "gtu": lambda x, y: ~(x <= y),
                                 "nan": lambda x, y: np.isnan(x) | np.isnan(y)}
_BINARY: dict[str, Callable] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and,
                                "or": np.bitwise_or, "xor": np.bitwise_xor, "max": np.maximum, "min": np.minimum,
                                "rem": np.fmod, "copysign": lambda x, y: np.copysign(y, x)}
_UNARY: dict[str, Callable] = {"neg": np.negative, "abs": np.abs, "ex2": np.exp2, "rcp": lambda x: 1 / x,
                               "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt, "lg2": np.log2}
_POISON = 0xA5
_GUARD = 512  # bytes between arrays
_CTAS = 3     # that a persistent kernel is launched with


def run(lowered: Lowered, case: Case) -> list[np.ndarray]:
  """The outputs of a case's kernel; elements that nobody writes are poison."""
  graph = lowered.lowering.graph
  roots = list(dict.fromkeys(graph.invars))
  data: dict[Any, np.ndarray] = {}
  for var, x in zip(graph.invars, jax.tree.leaves(case.inputs)):
    data[var] = np.array(x)
  for var in graph.invars[graph.num_inputs:]:
    data.setdefault(var, np.frombuffer(bytes([_POISON]) * (math.prod(var.shape) * var.dtype.itemsize),
                                       np.uint8).view(var.dtype).reshape(var.shape))
  starts, at = [], _GUARD
  for var in roots:
    starts.append(at)
    at += -(-data[var].nbytes // 256) * 256 + _GUARD
  memory, legal = np.full(at, _POISON, np.uint8), np.zeros(at, bool)
  for var, start in zip(roots, starts, strict=True):
    flat = np.ascontiguousarray(data[var]).reshape(-1).view(np.uint8)
    memory[start:start + flat.size], legal[start:start + flat.size] = flat, True
  ctas = math.prod(graph.options.grid)
  ctas = min(ctas, _CTAS) if graph.options.persistent else ctas
  for cta in range(ctas):
    _Cta(lowered, memory, legal, starts, cta, ctas).run()
  out = []
  for var in graph.invars[graph.num_inputs:]:
    start = starts[roots.index(var)]
    nbytes = math.prod(var.shape) * var.dtype.itemsize
    out.append(memory[start:start + nbytes].copy().view(var.dtype).reshape(var.shape))
  return out


def global_accesses(lowered: Lowered, cta: int) -> list[tuple[set[int], set[int]]]:
  """For each array, the byte offsets that one program loads from and stores to, without any memory being there."""
  starts = [(i + 1) << 44 for i in range(len(lowered.lowering.emitted.module.entries[0].params))]
  programs = math.prod(lowered.lowering.graph.options.grid)
  run = _Addresses(lowered, np.zeros(0, np.uint8), np.zeros(0, bool), starts, cta, programs)
  run.run()
  return [tuple({a - start for a in seen if 0 <= a - start + (1 << 43) < 1 << 44} for seen in (run.loads, run.stores))
          for start in starts]


class _Cta:
  def __init__(self, lowered: Lowered, memory: np.ndarray, legal: np.ndarray, starts: list[int], cta: int, ctas: int):
    (self.entry,) = lowered.lowering.emitted.module.entries
    self.threads, self.memory, self.legal = self.entry.threads, memory, legal
    self.params = {p.name: start for p, start in zip(self.entry.params, starts, strict=True)}
    self.special = {"tid.x": np.arange(self.threads, dtype=np.uint32), "ctaid.x": cta, "nctaid.x": ctas}
    self.regs: dict[Reg, np.ndarray] = {}
    self.shared = np.full(max(1, lowered.lowering.program.smem_bytes), _POISON, np.uint8)
    self.written_by = np.zeros(self.shared.size, np.int64)  # since the last sync: warp + 1
    self.read_by = np.zeros(self.shared.size, np.int64)     # a bit for each warp

  def run(self) -> None:
    body = self.entry.body
    labels = {item: i for i, item in enumerate(body) if isinstance(item, Label)}
    at = 0
    with np.errstate(all="ignore"):
      while True:
        item = body[at]
        at += 1
        if not isinstance(item, Inst):
          continue
        active = self._active(item)
        if item.form.head == "ret":
          return
        if item.form.head.startswith("bra"):
          assert active.all() or not active.any(), "a branch that is not uniform"
          at = labels[item.operands[0]] if active.all() else at  # type: ignore[index]
        else:
          self._execute(item, active)

  def _active(self, inst: Inst) -> np.ndarray:
    if inst.pred is None:
      return np.ones(self.threads, bool)
    return self.regs[inst.pred] ^ inst.negate

  def read(self, x: Any, type_: str) -> np.ndarray:
    dtype = _TYPES[type_]
    if isinstance(x, Reg):
      value = self.regs[x]
      return value.view(dtype) if value.dtype.itemsize == np.dtype(dtype).itemsize else value.astype(dtype)
    if isinstance(x, Special):
      return np.broadcast_to(np.asarray(self.special[x.name], dtype), self.threads)
    if isinstance(x, Symbol):
      return np.zeros(self.threads, dtype)  # shared memory starts at 0
    literal = np.asarray([x]).astype(dtype) if dtype in (np.float32, np.bool_) else np.asarray(
      [int(x) % (1 << 8 * np.dtype(dtype).itemsize)]).astype(np.dtype(dtype))
    return np.broadcast_to(literal, self.threads)

  def write(self, reg: Reg, value: np.ndarray, active: np.ndarray) -> None:
    own = _TYPES[reg.cls]
    if value.dtype != own:
      value = value.view(own) if value.dtype.itemsize == np.dtype(own).itemsize else value.astype(own)
    old = self.regs.get(reg)
    self.regs[reg] = value.copy() if active.all() else np.where(active, value, old if old is not None else value)

  def _execute(self, inst: Inst, active: np.ndarray) -> None:
    name, mods, ops = inst.form.head.split(".")[0], inst.mods, inst.operands
    if name == "cp":
      self._copy_async(inst, active)
    elif name == "stmatrix":
      self._store_matrices(inst, active)
    elif name in ("ld", "st", "cvta"):
      self._memory(inst, active)
    elif name == "bar":
      assert inst.form.head == "bar.sync" and active.all()
      self.written_by[:], self.read_by[:] = 0, 0
    elif name == "cvt":
      self._convert(inst, active)
    elif name == "mov" and any(isinstance(x, tuple) for x in ops):
      self._halves(ops, active)
    else:
      self.write(ops[0], self._value(inst, name, mods.get("type", ""), ops[1:]), active)  # type: ignore[arg-type]

  def _value(self, inst: Inst, name: str, kind: str, ops: tuple) -> np.ndarray:
    if name == "mov":
      return self.read(ops[0], kind or "pred")
    if name == "setp":
      return _COMPARE[inst.mods["cmp"]](self.read(ops[0], kind), self.read(ops[1], kind))
    if name == "selp":
      return np.where(self.regs[ops[2]], self.read(ops[0], kind), self.read(ops[1], kind))
    if name in ("redux", "vote"):
      return self._whole_warp(inst, *ops)
    if name == "prmt":
      return self._permute(*ops)
    if name == "shfl":
      return self._shuffle(inst.mods["mode"], *ops)
    if name in ("shl", "shr"):
      x, by = self.read(ops[0], kind), self.read(ops[1], "u32")
      return (x << by if name == "shl" else x >> by.astype(x.dtype)).astype(x.dtype)
    if name == "not":
      return ~self.read(ops[0], kind)
    if name in ("mad", "fma"):
      wide = "wide" in inst.form.head
      x, y = (self.read(o, kind).astype(np.int64 if wide else _TYPES[kind]) for o in ops[:2])
      z = self.read(ops[2], "s64" if wide else kind)
      return x * y + z
    if name == "div":
      x, y = self.read(ops[0], kind or "f32"), self.read(ops[1], kind or "f32")
      return x / y if x.dtype == np.float32 else (np.trunc(x.astype(np.float64) / y)).astype(x.dtype)
    if name in _UNARY:
      return _UNARY[name](self.read(ops[0], kind or "f32"))
    return _BINARY[name](self.read(ops[0], kind), self.read(ops[1], kind))

  def _shuffle(self, mode: str, x: Any, by: Any, clamp: Any, mask: Any) -> np.ndarray:
    assert (clamp, mask) == (31, -1) and isinstance(by, int)
    lanes = self.read(x, "b32").reshape(-1, 32)
    source = np.arange(32) ^ by if mode == "bfly" else np.full(32, by)
    return lanes[:, source].reshape(-1)

  def _whole_warp(self, inst: Inst, x: Any, mask: Any) -> np.ndarray:
    assert mask == -1
    lanes = self.read(x, inst.mods.get("type", "pred")).reshape(-1, 32)
    reduce = {"any": np.any, "all": np.all, "add": np.sum, "max": np.max, "min": np.min}[
      inst.mods.get("mode") or inst.mods["op"]]
    return np.repeat(reduce(lanes, axis=1).astype(lanes.dtype), 32)

  def _permute(self, x: Any, y: Any, selector: int) -> np.ndarray:
    source = np.concatenate([self.read(v, "b32").copy().view(np.uint8).reshape(-1, 4) for v in (x, y)], axis=1)
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    return np.ascontiguousarray(source[:, chosen]).view(np.uint32)[:, 0]

  def _convert(self, inst: Inst, active: np.ndarray) -> None:
    d, *ops = inst.operands
    assert isinstance(d, Reg)
    to, source = inst.mods["to"], inst.mods.get("source", "f32")
    if to in ("f16x2", "bf16x2"):
      high, low = (self._narrow(self.read(o, "f32"), to) for o in ops)
      self.write(d, high.astype(np.uint32) << 16 | low, active)
    elif source == "f32" and to[0] in "su":                     # saturates; NaN gives 0
      limits, x = np.iinfo(_TYPES[to]), np.trunc(self.read(ops[0], source).astype(np.float64))
      self.write(d, np.clip(np.nan_to_num(x, nan=0.0), limits.min, limits.max).astype(_TYPES[to]), active)
    else:
      rounded = {"rmi": np.floor, "rpi": np.ceil}.get(inst.mods.get("rnd", ""), np.asarray)
      self.write(d, rounded(self.read(ops[0], source)).astype(_TYPES[to]), active)

  def _narrow(self, x: np.ndarray, to: str) -> np.ndarray:
    dtype = np.float16 if to == "f16x2" else jax.numpy.bfloat16
    return x.astype(dtype).view(np.uint16).astype(np.uint32)

  def _halves(self, ops: tuple, active: np.ndarray) -> None:
    d, x = ops
    if isinstance(d, tuple):
      word = self.read(x, "b32")
      self.write(d[0], (word & 0xFFFF).astype(np.uint16), active)
      self.write(d[1], (word >> 16).astype(np.uint16), active)
    else:
      self.write(d, self.read(x[0], "b16").astype(np.uint32) | self.read(x[1], "b16").astype(np.uint32) << 16, active)

  def _store_matrices(self, inst: Inst, active: np.ndarray) -> None:
    """8x8 matrices of 16 bits: lane 8 m + r has the address of row r of matrix m, and elements 2 (l % 4) and next of
    row l / 4 of each (PTX ISA, stmatrix)."""
    where, regs = inst.operands
    assert isinstance(where, Addr) and isinstance(regs, tuple) and active.all() and ".trans" not in inst.form.head
    start = (self.read(where.base, "s32").astype(np.int64) + where.offset).reshape(-1, 4, 8)
    assert not (start[:, :len(regs)] % 16).any(), f"{inst} is not aligned"
    lane = np.arange(self.threads) % 32
    for m, reg in enumerate(regs):
      at = start[np.arange(self.threads) // 32, m, lane // 4] + lane % 4 * 4
      at = at[:, None] + np.arange(4)
      self._checked(True, at, active, False)[at] = self.read(reg, "b32").copy().view(np.uint8).reshape(-1, 4)

  def _copy_async(self, inst: Inst, active: np.ndarray) -> None:
    """cp.async, as if it were done at once."""
    if not inst.form.head.startswith(("cp.async.ca", "cp.async.cg")):
      return                                                    # the end of a group, or a wait for one
    target, source, size, *rest = inst.operands
    assert isinstance(target, Addr) and isinstance(source, Addr) and isinstance(size, int)
    kept = self.read(rest[0], "u32").astype(np.int64) if rest else np.full(self.threads, size)
    to, of = (self.read(x.base, t).astype(np.int64) + x.offset for x, t in ((target, "s32"), (source, "s64")))
    assert not (to[active] % size).any() and not (of[active & (kept > 0)] % size).any(), f"{inst} is not aligned"
    for k in range(size):
      here = active & (k < kept)
      value = np.zeros(self.threads, np.uint8)
      value[here] = self._checked(False, of[here][:, None] + k, here, True)[of[here] + k]
      self._checked(True, to[active][:, None] + k, active, False)[to[active] + k] = value[active]

  def _memory(self, inst: Inst, active: np.ndarray) -> None:
    head, ops = inst.form.head, inst.operands
    if head.startswith("cvta"):
      self.write(ops[0], self.read(ops[1], "u64"), active)  # type: ignore[arg-type]
      return
    if head.startswith("ld.param"):
      where = ops[1]
      assert isinstance(where, Addr) and isinstance(where.base, Symbol)
      self.write(ops[0], np.full(self.threads, self.params[where.base.name], np.uint64), active)  # type: ignore[arg-type]
      return
    loading = head.startswith("ld")
    regs, where = (ops[0], ops[1]) if loading else (ops[1], ops[0])
    assert isinstance(where, Addr)
    dtype = np.dtype(_TYPES[inst.mods["type"]])
    regs = regs if isinstance(regs, tuple) else (regs,)
    start = self.read(where.base, "s64" if isinstance(where.base, Reg) and where.base.cls == "b64" else "s32")
    start = start.astype(np.int64) + where.offset
    assert not (start[active] % (dtype.itemsize * len(regs))).any(), f"{inst} is not aligned"
    for k, reg in enumerate(regs):
      at = start[active][:, None] + k * dtype.itemsize + np.arange(dtype.itemsize)
      memory = self._checked(".shared" in head, at, active, loading)
      if loading:
        value = np.zeros(self.threads, dtype)
        value[active] = np.ascontiguousarray(memory[at]).view(dtype)[:, 0]
        self.write(reg, value, active)  # type: ignore[arg-type]
      else:
        memory[at] = self.read(reg, inst.mods["type"])[active].copy().view(np.uint8).reshape(-1, dtype.itemsize)

  def _checked(self, shared: bool, at: np.ndarray, active: np.ndarray, loading: bool) -> np.ndarray:
    """The memory, after the accesses are known to be legal."""
    if not shared:
      assert self.legal[at].all(), "an access outside every array"
      return self.memory
    warp = np.broadcast_to((np.flatnonzero(active) // 32)[:, None], at.shape)
    other = (self.written_by[at] != 0) & (self.written_by[at] != warp + 1)
    assert not other.any() or not loading, "a read of what another warp writes, without a sync between"
    if loading:
      np.bitwise_or.at(self.read_by, at, 1 << warp)
    else:
      assert not (self.read_by[at] & ~(1 << warp)).any(), "a write to what another warp reads, without a sync between"
      self.written_by[at] = warp + 1
    return self.shared


class _Addresses(_Cta):
  """Notes the global addresses instead of accessing them; what is loaded is 0."""

  def __init__(self, *args: Any):
    super().__init__(*args)
    self.loads: set[int] = set()
    self.stores: set[int] = set()

  def _memory(self, inst: Inst, active: np.ndarray) -> None:
    if ".global" not in inst.form.head or inst.form.head.startswith("cvta"):
      super()._memory(inst, active)
      return
    loading = inst.form.head.startswith("ld")
    regs, where = inst.operands if loading else inst.operands[::-1]
    assert isinstance(where, Addr)
    size = np.dtype(_TYPES[inst.mods["type"]]).itemsize * (len(regs) if isinstance(regs, tuple) else 1)
    start = self.read(where.base, "s64")[active] + where.offset
    (self.loads if loading else self.stores).update((start[:, None] + np.arange(size)).reshape(-1).tolist())
    for reg in (regs if isinstance(regs, tuple) else (regs,)) if loading else ():
      self.write(reg, np.zeros(self.threads, _TYPES[inst.mods["type"]]), active)
