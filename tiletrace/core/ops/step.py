"""tt.step: the two steps of an iteration that a pipelined loop runs one iteration apart."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.errors import ControlFlowError
from tiletrace.core.graph import Block, Eqn, Primitive, Var, walk
from tiletrace.core.ops.control import block_effects
from tiletrace.core.ops.memory import copy_p
from tiletrace.core.ops.mma import gemm_p
from tiletrace.core.rules import effect_rules, effects, type_rules
from tiletrace.core.scopes import Branch
from tiletrace.core.source import Loc, user_loc
from tiletrace.core.trace import Scope, bind
from tiletrace.core.types import Space, TileType, Type

step_p = Primitive("step")      # params: index

_LOOP = "tt.pipelined"


@type_rules.register(step_p)
def _no_results(eqn: Eqn) -> tuple[Type, ...]:
  return ()


effect_rules.register(step_p)(block_effects)


# What one iteration apart means.

@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
  """One iteration: what both steps compute from the index, step 0, step 1; of the iteration before, step 1 comes
  before `first[at]`."""
  shared: tuple[Eqn, ...]
  first: tuple[Eqn, ...]
  at: int
  second: tuple[Eqn, ...]


def plan(body: Block, loc: Loc) -> Plan | None:
  """How a loop's steps are run one iteration apart; None for a loop without steps.

  Args:
    loc: the loop's line.
  Raises:
    ControlFlowError: they are not steps 0 and 1, there is something beside them, or they need each other's results in
      another order.
  """
  steps = [e for e in body.eqns if e.primitive is step_p]
  if not steps:
    return None
  if [e.params["index"] for e in steps] != [0, 1]:
    found = ", ".join(str(e.params["index"]) for e in steps)
    raise ControlFlowError(f"the steps of this loop are {found}", loc=steps[-1].loc, also=("the loop is at", loc),
                           hint="`with tt.step(0):`, then `with tt.step(1):`, once each")
  written = _touched(body.eqns)[1]
  shared = tuple(e for e in body.eqns if e.primitive is not step_p)
  for eqn in shared:
    reads, writes = _touched([eqn])
    constant = not writes and all(v.type.space is Space.GLOBAL and v not in written for v in reads)  # type: ignore
    if not constant or (effects(eqn) and not reads) or eqn.blocks:
      raise ControlFlowError(f"'{eqn.primitive}' stands beside the steps of the loop: it would belong to no iteration",
                             loc=eqn.loc, also=("the loop is at", loc),
                             hint="beside the steps may stand what both compute from the index, nothing else")
  first, second = _copies_moved(steps[0].blocks[0].eqns, steps[1].blocks[0].eqns)
  return Plan(shared, first, _place(first, second), second)


def _touched(eqns: Iterable[Eqn]) -> tuple[set[Var], set[Var]]:
  """(references read, references written), blocks included."""
  reads: set[Var] = set()
  writes: set[Var] = set()
  for eqn in eqns:
    for e in (eqn, *(i for b in eqn.blocks for i in walk(b))):
      for effect in effects(e) if not e.blocks else ():
        if isinstance(effect, RefEffect):
          (reads if effect.access is Access.READ else writes).add(e.refs[effect.operand].root)
  return reads, writes


def _meet(x: Eqn, y: Eqn) -> bool:
  """Their order matters."""
  (reads, writes), (others, changed) = _touched([x]), _touched([y])
  return bool(writes & (others | changed) or reads & changed)


def _copies_moved(first: tuple[Eqn, ...], second: tuple[Eqn, ...]) -> tuple[tuple[Eqn, ...], tuple[Eqn, ...]]:
  """A copy of step 0 into a buffer that only step 1 uses is made by step 1: copies run ahead of both."""
  moved: list[Eqn] = []
  for eqn in first:
    if eqn.primitive is copy_p and eqn.refs[0].type.space is Space.GLOBAL and eqn.refs[1].type.space is Space.SHARED:
      buffer, source = eqn.refs[1].root, eqn.refs[0].root
      others = [e for e in first if e is not eqn]
      if buffer not in set().union(*_touched(others)) and source not in _touched([*others, *second])[1]:
        moved.append(eqn)
  needed = {a for eqn in moved for a in eqn.invars}
  scalars: list[Eqn] = []
  for eqn in reversed(first):
    if needed & set(eqn.outvars) and not effects(eqn):
      scalars.insert(0, eqn)
      needed |= set(eqn.invars)
  return tuple(e for e in first if e not in moved), (*scalars, *moved, *second)


def _place(first: tuple[Eqn, ...], second: tuple[Eqn, ...]) -> int:
  """Where step 1 of the iteration before stands in step 0: when gemms are issued, before one of them is waited for, and
  before anything that step 1 has to come before."""
  products: set[Var] = set()
  for i, eqn in enumerate(first):
    other = next((e for e in second if _meet(eqn, e)), None)
    if other is not None and not any(map(_takes_time, first[:i])):
      raise ControlFlowError(
          "step 0 cannot start before step 1 of the iteration before: they use the same reference, and one writes it",
          loc=eqn.loc, also=("step 1 uses it at", other.loc),
          hint="step 0 begins with a gemm into a reference that step 1 does not touch; what it hands to step 1 it "
               "writes after that")
    if other is not None or (eqn.primitive is not gemm_p and products & set().union(*_touched([eqn]))):
      return i
    if eqn.primitive is gemm_p:
      products.add(eqn.refs[-1].root)
  return len(first)


def _takes_time(eqn: Eqn) -> bool:
  """Is worth to begin earlier; copies run ahead in any case."""
  return eqn.primitive is gemm_p or bool(eqn.blocks) or any(
      isinstance(v.type, TileType) and v.type.shape for v in eqn.outvars)


# The statement.

def _check(body: Block, loc: Loc) -> None:
  plan(body, loc)


class Step(Branch):
  """What tt.step returns."""
  whatever = "in every iteration"

  def __init__(self, index: int):
    super().__init__("tt.step")
    self.index = index

  def begin(self) -> None:
    scope = self.trace.scope
    if scope.what != _LOOP:
      where = f"in {scope}" if scope.loc is not None else "in no loop"
      self.trace.fail(ControlFlowError(f"tt.step stands {where}", loc=self.loc,
                                       hint=f"it stands directly in the body of a {_LOOP} loop"))
    scope.params["at_end"] = _check

  def end(self, scope: Scope) -> None:
    bind(step_p, (), {"index": self.index}, (scope.block(),), loc=self.loc)


def step(index: int) -> Step:
  """A step of an iteration: `with tt.step(0):`, then `with tt.step(1):`, directly in a tt.pipelined loop.

  The result is that of running step 0, then step 1, in each iteration. On the GPU step 0 of an iteration runs together
  with step 1 of the one before: the first iteration's step 0 comes before the loop, the last one's step 1 after it. In
  attention a block's logits are so computed during the product of the weights and values of the block before.

  Args:
    index: 0 or 1.
  Raises:
    ControlFlowError: the steps stand elsewhere or are not these two; or step 0 cannot start before step 1 of the
      iteration before has run: it begins with what that reads or writes.

  Example:
    >>> def kernel(x, y):
    ...   s = tt.alloc_shared((64,), x.dtype)
    ...   part, total = tt.alloc_fragment((64,), x.dtype), tt.alloc_fragment((64,), x.dtype)
    ...   total[...] = 0
    ...   for k in tt.pipelined(4, num_stages=2):
    ...     with tt.step(0):
    ...       tt.copy(x.at[tt.block(k, 64)], s)
    ...       part[...] = s[...] * 2
    ...     with tt.step(1):
    ...       total[...] += part[...]
    ...   y[...] = tt.sum(total[...], keepdims=True)
    >>> x = jnp.arange(256.)
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((1,), x.dtype), grid=1)(x)
    Array([65280.], dtype=float32)
  """
  if isinstance(index, bool) or index not in (0, 1):
    raise ControlFlowError(f"tt.step({index!r}): the steps are 0 and 1", loc=user_loc())
  return Step(index)
