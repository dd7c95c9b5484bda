"""Asynchronous gemms: where each group is issued, and the completion point before the first access that conflicts.

`wgmma_wait(n)` counts groups issued in the same straight line, or, where nothing but wgmma touches the accumulators in
a loop, one iteration's groups: ptxas keeps only those asynchronous (C7514 otherwise).
"""
from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Set

from tiletrace.core import dtypes
from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Atom, Block, Eqn, Literal, Var, walk
from tiletrace.core.ops import mma
from tiletrace.core.ops.elementwise import cast_p, gt_p
from tiletrace.core.ops.memory import load_p, store_p
from tiletrace.core.rules import effects, type_rules
from tiletrace.core.types import RefType, Space
from tiletrace.lowering.wgmma_plan import register_operand

# Results may share registers with operands.
RENAMES = frozenset({"broadcast_in_dim", "slice", "transpose", "reshape", "concatenate", "relayout", "own_columns",
                     "cast", "bitcast", "select", "abs", "pow",
                     "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
                     "reduce_xor", "reduce_partial", "reduce_thread",
                     "cumsum", "cumprod", "cummax", "cummin", "cumulative_partial", "cumulative_before",
                     "cumulative_join"})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pending:
  """A group in flight: what it writes and reads in registers and shared memory.

  Attributes:
    a_value: A, where it is a value.
    registers: what may lie in A's registers, where it lies in some. Nobody may even read these before the wait (PTX
      ISA, wgmma.mma_async).
  """
  acc: Var
  a_value: Var | None
  registers: Set[Var]
  shared: frozenset[Var]


def pending_of(gemm: Eqn, sharing: Mapping[Var, Set[Var]]) -> Pending:
  refs, a = gemm.refs, register_operand(gemm)
  return Pending(refs[-1].root, a if gemm.params["a_in"] == "value" else None,
                 set() if a is None else sharing.get(a, {a}),
                 frozenset(r.root for r in refs if r.type.space is Space.SHARED))


def shared_registers(body: Block) -> dict[Var, set[Var]]:
  """What may lie in the same registers as a fragment or a value: its loads, and what only names its registers anew."""
  found: dict[Var, set[Var]] = {}
  for eqn in walk(body):
    sources: list[Atom] = []
    if eqn.primitive is load_p and eqn.refs[0].type.space is Space.FRAGMENT:
      sources = [eqn.refs[0].root]
    elif eqn.primitive.name in RENAMES:
      sources = [v for v in eqn.values if v.dtype.itemsize == eqn.outvars[0].dtype.itemsize]
    for v in sources:
      if isinstance(v, Var):
        ours, theirs = (found.setdefault(x, {x}) for x in (v, eqn.outvars[0]))
        if ours is not theirs:
          ours |= theirs
          found.update(dict.fromkeys(theirs, ours))
  return found


def gemms_in(block: Block) -> list[Eqn]:
  return [e for e in walk(block) if e.primitive is mma.gemm_p]


def accesses(eqn: Eqn) -> tuple[set[Var], set[Var]]:
  """(references read, references written) by an equation with its blocks."""
  reads: set[Var] = set()
  writes: set[Var] = set()
  for e in (eqn, *(i for b in eqn.blocks for i in walk(b))):
    for effect in effects(e) if not e.blocks else ():
      if isinstance(effect, RefEffect):
        (reads if effect.access is Access.READ else writes).add(e.refs[effect.operand].root)
  return reads, writes


def _names(eqn: Eqn) -> Iterator[Atom]:
  """What an equation takes and makes, blocks included."""
  for e in (eqn, *(i for b in eqn.blocks for i in walk(b))):
    yield from (*e.invars, *e.outvars)
    for block in e.blocks:
      yield from block.outs


def conflicts(eqn: Eqn, group: Pending) -> bool:
  """The equation needs the group to be complete. Another gemm of the same A, or into the same accumulator, does not."""
  if eqn.primitive is mma.gemm_p:
    return (eqn.params["a_in"] == "ref" and eqn.refs[0].root is group.acc) or eqn.refs[-1].root in group.registers
  reads, writes = accesses(eqn)
  if group.acc in reads | writes or (group.registers and not group.registers.isdisjoint(_names(eqn))):
    return True
  return bool(group.shared & writes) or (bool(eqn.blocks) and any(gemms_in(b) for b in eqn.blocks))


def sink_casts(block: Block) -> tuple[Block, dict[Eqn, Eqn]]:
  """Moves the cast of what is stored into a gemm's A fragment to right before the store.

  ptxas may give the cast's result the registers of A, which a group in flight still reads (C7513): the wait before the
  store has to stand before the cast.

  Returns:
    the block, and for each such cast its store.
  """
  fragments = {g.refs[0].root for g in block.eqns if g.primitive is mma.gemm_p and g.params["a_in"] == "ref" and (
      g.refs[0].type.space is Space.FRAGMENT)}
  made = {v: e for e in block.eqns for v in e.outvars}
  uses = Counter(a for e in walk(block) for a in e.invars if isinstance(a, Var))
  uses.update(a for a in block.outs if isinstance(a, Var))
  sunk: dict[Eqn, Eqn] = {}
  for store in block.eqns:
    if store.primitive is store_p and store.refs[0].root in fragments and isinstance(store.values[0], Var):
      cast = made.get(store.values[0])
      if cast is not None and cast.primitive is cast_p and uses[store.values[0]] == 1:
        sunk[cast] = store
  if not sunk:
    return block, sunk
  before = {store: cast for cast, store in sunk.items()}
  eqns = tuple(e for eqn in block.eqns if eqn not in sunk for e in ((before[eqn], eqn) if eqn in before else (eqn,)))
  return dataclasses.replace(block, eqns=eqns), sunk


def stays_in_flight(loop: Eqn, pushes: Set[Eqn]) -> bool:
  """Only wgmma touches the accumulators in the loop, and only the producer (`pushes`) rewrites what the gemms read: a
  group may be pending over the back edge, and the wait counts iterations."""
  body, step = loop.blocks[0], loop.values[2]
  if not isinstance(step, Literal) or step.value < 0:  # type: ignore[operator]
    return False
  gemms = [e for e in body.eqns if e.primitive is mma.gemm_p]
  if not gemms or len(gemms) != len(gemms_in(body)):
    return False
  accs = {g.refs[-1].root for g in gemms}
  shared = {r.root for g in gemms for r in g.refs if r.type.space is Space.SHARED}
  if any(register_operand(g) is not None for g in gemms):
    return False
  for eqn in body.eqns:
    if eqn.primitive is mma.gemm_p:
      continue
    reads, writes = accesses(eqn)
    if accs & (reads | writes):
      return False
    if shared & writes and eqn not in pushes:
      return False
  return True


def is_zero_store(eqn: Eqn, acc: Var) -> bool:
  """acc[...] = 0"""
  if eqn.primitive.name != "store" or len(eqn.values) != 1:
    return False
  if eqn.refs[0].root is not acc or not eqn.refs[0].is_whole:
    return False
  value = eqn.values[0]
  return isinstance(value, Literal) and value.value == 0


def elide_zero_stores(block: Block, positive_trips) -> Block:
  """`acc[...] = 0` before a loop whose first touch of acc is an accumulating gemm becomes `accumulate = index > first`.

  The first wgmma then overwrites (scale-d = 0). Only where the loop certainly runs.
  """
  eqns = [e.replace(blocks=tuple(elide_zero_stores(b, positive_trips) for b in e.blocks)) if e.blocks else e
          for e in block.eqns]
  for i, store in enumerate(eqns):
    acc = store.refs[0].root if store.primitive.name == "store" and store.refs else None
    if acc is None or not _is_fragment(acc) or not is_zero_store(store, acc):
      continue
    j = next((j for j in range(i + 1, len(eqns)) if acc in set().union(*accesses(eqns[j]))), None)
    if j is None:
      continue
    replaced = _overwriting(eqns[j], acc, positive_trips)
    if replaced is not None:
      eqns[j] = replaced
      eqns[i] = None  # type: ignore[call-overload]
  return dataclasses.replace(block, eqns=tuple(e for e in eqns if e is not None))


def _overwriting(eqn: Eqn, acc: Var, positive_trips) -> Eqn | None:
  """The equation with its gemm into acc overwriting the first time; None where that is not all that happens first."""
  if eqn.primitive is mma.gemm_p:
    return _with_accumulate(eqn, None) if _accumulates(eqn) else None
  if eqn.primitive.name != "for_loop" or not positive_trips(eqn):
    return None
  body = eqn.blocks[0]
  touching = [e for e in body.eqns if acc in set().union(*accesses(e))]
  if len(touching) != 1 or touching[0].primitive is not mma.gemm_p or not _accumulates(touching[0]):
    return None
  gemm = touching[0]
  index, lo = body.invars[0], eqn.values[0]
  new = _first_iteration(index, lo, gemm)
  at = body.eqns.index(gemm)
  eqns = (*body.eqns[:at], new, _with_accumulate(gemm, new.outvars[0]), *body.eqns[at + 1:])
  return eqn.replace(blocks=(dataclasses.replace(body, eqns=eqns),))


def _accumulates(gemm: Eqn) -> bool:
  value = gemm.values[0]
  return isinstance(value, Literal) and value.value is True


def _first_iteration(index: Var, lo, gemm: Eqn) -> Eqn:
  eqn = Eqn(gt_p, (index, lo), (), {}, gemm.loc)
  return eqn.replace(outvars=tuple(map(Var, type_rules[gt_p](eqn))))


def _with_accumulate(gemm: Eqn, value: Var | None) -> Eqn:
  first = len(gemm.invars) - len(gemm.values)
  new = value if value is not None else Literal(False, dtypes.bool_)
  return gemm.replace(invars=(*gemm.invars[:first], new, *gemm.invars[first + 1:]))


def _is_fragment(v: Var) -> bool:
  return isinstance(v.type, RefType) and v.type.space is Space.FRAGMENT
