"""Writing level-0 equations: what a person would write with tt functions, as equations."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.graph import Atom, Block, Eqn, Literal, Primitive, RefOperand, Var
from tiletrace.core.ops import barrier, control, elementwise, grid, memory, mma, roles
from tiletrace.core.rules import type_rules
from tiletrace.core.source import Loc
from tiletrace.core.types import Dyn, Extent, RefType, Size, Space, View, whole_view


def i32(n: int) -> Literal:
  return Literal(n, dtypes.i32)


def whole(root: Var) -> RefOperand:
  assert isinstance(root.type, RefType)
  return RefOperand(root, whole_view(root.type.shape), ())


class Builder:
  """Collects equations of one block. Operands may be Python ints, and sizes that the call decides."""

  def __init__(self, loc: Loc):
    self.loc, self.eqns = loc, []

  def bind(self, primitive: Primitive, invars: Sequence[Atom], params: dict[str, Any],
           blocks: tuple[Block, ...] = (), hint: str | None = None) -> tuple[Var, ...]:
    eqn = Eqn(primitive, tuple(invars), (), params, self.loc, blocks)
    outvars = tuple(Var(t, hint) for t in type_rules[primitive](eqn))
    self.eqns.append(eqn.replace(outvars=outvars))
    return outvars

  def append(self, eqn: Eqn) -> None:
    self.eqns.append(eqn)

  def block(self, invars: Sequence[Var] = ()) -> Block:
    return Block(tuple(invars), tuple(self.eqns), ())

  def inner(self) -> Builder:
    return Builder(self.loc)

  # ---- scalars

  def operand(self, x: Atom | Extent) -> Atom:
    if isinstance(x, Size):
      return self.bind(grid.size_p, (), {"size": x})[0]
    return i32(x) if isinstance(x, int) else x

  def op(self, primitive: Primitive, *xs: Atom | Extent) -> Atom:
    return self.bind(primitive, [self.operand(x) for x in xs], {})[0]

  def add(self, x: Atom | Extent, y: Atom | Extent) -> Atom:
    return self.op(elementwise.add_p, x, y)

  def sub(self, x: Atom | Extent, y: Atom | Extent) -> Atom:
    return self.op(elementwise.sub_p, x, y)

  def mul(self, x: Atom | Extent, y: Atom | Extent) -> Atom:
    return self.op(elementwise.mul_p, x, y)

  def floordiv(self, x: Atom | Extent, y: Atom | Extent) -> Atom:
    return self.op(elementwise.floordiv_p, x, y)

  def mod(self, x: Atom | Extent, y: Atom | Extent) -> Atom:
    return self.op(elementwise.mod_p, x, y)

  def select(self, p: Atom, x: Atom | int, y: Atom | int) -> Atom:
    return self.op(elementwise.select_p, p, x, y)

  # ---- memory

  def alloc(self, space: Space, shape: tuple[int, ...], dtype: np.dtype, hint: str, layout: Any = None) -> Var:
    params = {"space": space, "shape": shape, "dtype": dtype, "layout": layout}
    return self.bind(memory.alloc_p, (), params, hint=hint)[0]

  def load(self, ref: RefOperand, fill_value: Any = 0) -> Var:
    return self.bind(memory.load_p, (ref.root, *ref.dyn), {"views": (ref.view,), "fill_value": fill_value})[0]

  def store(self, ref: RefOperand, value: Atom | int, **params: Any) -> None:
    value = i32(value) if isinstance(value, int) else value
    self.bind(memory.store_p, (ref.root, *ref.dyn, value), {"views": (ref.view,), **params})

  def copy_async(self, src: RefOperand, dst: RefOperand, barrier_at: tuple[Atom, Atom] | None, dispatch: str = "tma",
                 multicast: tuple[int, ...] = (), **params: Any) -> None:
    if multicast:
      params["multicast"] = multicast
    self.bind(memory.copy_async_p, (src.root, *src.dyn, dst.root, *dst.dyn, *(barrier_at or ())),
              {"views": (src.view, dst.view), "fill_value": 0, "dispatch": dispatch, **params})

  def part(self, ref: RefOperand, parts: tuple[tuple[Atom | int, int], ...]) -> RefOperand:
    """The part of a view of two dimensions that starts at (offset, ...) and has (..., size)."""
    dims, dyn = list(ref.view.dims), list(ref.dyn)
    for d, (offset, size) in zip(ref.view.perm, parts, strict=True):
      start = dims[d].start
      at = dyn[start.index] if isinstance(start, Dyn) else start
      if isinstance(offset, int) and offset == 0:
        moved = at
      elif isinstance(at, int) and isinstance(offset, int):
        moved = at + offset
      else:
        moved = self.add(at, offset)
      if isinstance(moved, int):
        dims[d] = dataclasses.replace(dims[d], start=moved, size=size)
      else:
        dyn.append(moved)
        dims[d] = dataclasses.replace(dims[d], start=Dyn(len(dyn) - 1), size=size)
    view, used = _compact(View(tuple(dims), ref.view.perm), dyn)
    return RefOperand(ref.root, view, used)

  # ---- barriers and scopes

  def alloc_barrier(self, count: int, arrivals: int, hint: str) -> Var:
    return self.bind(barrier.alloc_barrier_p, (), {"count": count, "arrivals": arrivals}, hint=hint)[0]

  def wait(self, bar: Var, index: Atom | int, phase: Atom | int) -> None:
    self.op_effect(barrier.barrier_wait_p, bar, index, phase)

  def arrive(self, bar: Var, index: Atom | int, count: int, *, cluster: bool = False, each: str | None = None) -> None:
    params = {"cluster": True} if cluster else {"each": each} if each else {}
    self.op_effect(barrier.barrier_arrive_p, bar, index, count=count, **params)

  def wait_groups(self, n: int) -> None:
    """Until n groups of wgmma are in flight at most, or as few as a wait can name."""
    self.bind(mma.wgmma_wait_p, (), {"n": min(n, mma.MAX_PENDING)})

  def arrive_expect_tx(self, bar: Var, index: Atom | int, nbytes: int) -> None:
    self.op_effect(barrier.barrier_arrive_expect_tx_p, bar, index, nbytes=nbytes)

  def op_effect(self, primitive: Primitive, *xs: Atom | int, **params: Any) -> None:
    self.bind(primitive, [i32(x) if isinstance(x, int) else x for x in xs], params)

  def fence(self) -> None:
    self.bind(barrier.fence_p, (), {"kind": "proxy_async_shared"})

  def sync(self, each: str = "scope") -> None:
    self.bind(barrier.sync_p, (), {"each": each})

  def elect(self, body: Block, each: str = "scope") -> None:
    self.bind(roles.elect_p, (), {"each": each}, (body,))

  def role(self, first: int, count: int, regs: int | None, body: Block) -> None:
    self.bind(roles.warpgroup_p, (), {"first": first, "count": count, "regs": regs}, (body,))

  def when(self, pred: Atom, body: Block, *otherwise: Block) -> None:
    self.bind(control.cond_p, (pred,), {}, (body, *otherwise))

  def for_loop(self, lo: Atom | int, hi: Atom | Extent, step: Atom | int, body: Block) -> None:
    operands = [self.operand(x) for x in (lo, hi, step)]
    self.bind(control.for_loop_p, operands, {"kind": "range", "num_stages": 1, "unroll": 1}, (body,))


def eviction(eqn: Eqn) -> dict[str, Any]:
  """The parameter of a copy, load or store that says how long L2 keeps its block, for what takes its place."""
  policy = eqn.params.get("eviction_policy")
  return {} if policy is None else {"eviction_policy": policy}


def _compact(view: View, dyn: list) -> tuple[View, tuple]:
  """Dynamic operands renumbered in the order of their use; unused ones dropped."""
  order: list[int] = []

  def use(x: Any) -> Any:
    if not isinstance(x, Dyn):
      return x
    if x.index not in order:
      order.append(x.index)
    return Dyn(order.index(x.index))

  dims = tuple(dataclasses.replace(d, start=use(d.start), size=use(d.size),
                                   edges=tuple((use(a), use(e)) for a, e in d.edges)) for d in view.dims)
  return View(dims, view.perm), tuple(dyn[i] for i in order)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RingState:
  """Slot and phase of a ring in one role, as tt.PipelineState keeps them: two scalar fragments. Where there is one slot
  the phase alone."""
  slots: int
  slot_ref: Var | None
  phase_ref: Var

  @classmethod
  def make(cls, b: Builder, slots: int, phase: int = 0) -> RingState:
    slot = b.alloc(Space.FRAGMENT, (), dtypes.i32, "slot") if slots > 1 else None
    flag = b.alloc(Space.FRAGMENT, (), dtypes.i32, "phase")
    if slot is not None:
      b.store(whole(slot), 0)
    b.store(whole(flag), phase)
    return cls(slots, slot, flag)

  def slot(self, b: Builder) -> Atom:
    return i32(0) if self.slot_ref is None else b.load(whole(self.slot_ref))

  def phase(self, b: Builder) -> Var:
    return b.load(whole(self.phase_ref))

  def advance(self, b: Builder) -> None:
    """The equations of tt.PipelineState.advance, in its order."""
    if self.slot_ref is None:
      b.store(whole(self.phase_ref), b.op(elementwise.xor_p, b.load(whole(self.phase_ref)), 1))
      return
    slot = b.add(b.load(whole(self.slot_ref)), 1)
    wrapped = b.op(elementwise.eq_p, slot, self.slots)
    phase = b.load(whole(self.phase_ref))
    flipped = b.op(elementwise.xor_p, phase, 1)
    b.store(whole(self.phase_ref), b.select(wrapped, flipped, b.load(whole(self.phase_ref))))
    b.store(whole(self.slot_ref), b.select(wrapped, 0, slot))
