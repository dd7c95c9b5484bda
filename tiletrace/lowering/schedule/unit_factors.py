"""An accumulator times a factor for each row: warps whose factors are all one leave it as it is.

In an online softmax a row's factor is one wherever its maximum has not grown, which is most of the time, and the
accumulator has many registers for each factor. Times one is the identity, whatever the element.
"""
from __future__ import annotations

import dataclasses
from collections import Counter

from tiletrace.core.graph import Block, Eqn, Literal, Var, walk
from tiletrace.core.ops import elementwise, mma
from tiletrace.core.ops.memory import load_p, store_p
from tiletrace.core.ops.reduce import warp_any_p
from tiletrace.core.ops.shape import broadcast_in_dim_p
from tiletrace.core.rules import effects
from tiletrace.core.types import Space
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.schedule.asynchrony import accesses
from tiletrace.lowering.schedule.builder import Builder

_LEAST_REGISTERS = 16         # of an accumulator for each factor that a thread holds


class UnitFactors:
  """Rewrites blocks of level-0 equations.

  Attributes:
    notes: the report.
  """

  def __init__(self, layouts: dict[Var, Layout]):
    self.layouts = layouts
    self.notes: list[str] = []
    self._accumulators: set[Var] = set()

  def body(self, block: Block) -> Block:
    self._accumulators = {e.refs[-1].root for e in walk(block) if e.primitive is mma.gemm_async_p}
    return self.block(block)

  def block(self, block: Block) -> Block:
    made = {v: e for e in block.eqns for v in e.outvars}
    uses = Counter(a for e in walk(block) for a in (*e.invars, *(o for b in e.blocks for o in b.outs))
                   if isinstance(a, Var))
    uses.update(a for a in block.outs if isinstance(a, Var))
    found = {e: r for e in block.eqns if (r := self._rescaling(e, made, uses)) is not None and
             _stays(block, r[0], e)}
    replaced: dict[Eqn, list[Eqn]] = {}
    for stores in self._together(block, found):
      eqns = [e for store in stores for e in (*found[store][:2], store)]
      replaced |= {e: [] for e in eqns} | {stores[-1]: self._guarded(eqns, found[stores[-1]][2])}
      self.notes += [f"{found[s][1].loc.short()}  warps whose factors are all one do not rescale" for s in stores]
    return dataclasses.replace(block, eqns=tuple(
        e.replace(blocks=tuple(map(self.block, e.blocks))) if e.blocks and eqn is e else e
        for eqn in block.eqns for e in replaced.get(eqn, [eqn])))

  def _together(self, block: Block, found: dict[Eqn, tuple[Eqn, Eqn, Var]]) -> list[list[Eqn]]:
    """Stores of accumulators that one branch is for: their factors are the same, and nothing but values lies between.

    A branch costs a vote, and a jump over some hundred instructions.
    """
    groups: list[list[Eqn]] = []
    parts = {e for store, (load, product, _) in found.items() for e in (load, product, store)}
    open_ = False
    for eqn in block.eqns:
      if eqn in found:
        if open_ and found[groups[-1][-1]][2] is found[eqn][2]:
          groups[-1].append(eqn)
        else:
          groups.append([eqn])
        open_ = True
      elif eqn.blocks or (effects(eqn) and eqn not in parts):
        open_ = False
    return groups

  def _rescaling(self, store: Eqn, made: dict[Var, Eqn], uses: Counter) -> tuple[Eqn, Eqn, Var] | None:
    """(load, product, the factors before they were broadcast) of `acc[...] = acc[...] * factor`."""
    if store.primitive is not store_p or store.refs[0].root not in self._accumulators:
      return None
    product = made.get(store.values[0]) if isinstance(store.values[0], Var) else None
    if product is None or product.primitive is not elementwise.mul_p or uses[store.values[0]] != 1:  # type: ignore[index]
      return None
    for x, f in (product.values, product.values[::-1]):
      load = made.get(x) if isinstance(x, Var) else None
      if isinstance(x, Var) and load is not None and load.primitive is load_p and uses[x] == 1 and isinstance(f, Var):
        factor = _source(f, made)
        if load.refs[0] == store.refs[0] and load.refs[0].type.space is Space.FRAGMENT and self._pays(x, factor):
          return load, product, factor
    return None

  def _pays(self, product: Var, factor: Var) -> bool:
    few = 1 if not factor.shape else self.layouts[factor].extent("reg")
    return self.layouts[product].extent("reg") >= _LEAST_REGISTERS * few

  def _guarded(self, eqns: list[Eqn], factor: Var) -> list[Eqn]:
    b = Builder(eqns[1].loc)
    (differs,) = b.bind(elementwise.ne_p, (factor, Literal(1.0, factor.dtype)), {})
    if factor in self.layouts:
      self.layouts[differs] = self.layouts[factor]
    (some,) = b.bind(warp_any_p, (differs,), {})
    b.when(some, Block((), tuple(eqns), ()))
    return b.eqns


def _stays(block: Block, load: Eqn, store: Eqn) -> bool:
  """Nothing writes the accumulator between the load and the store, to whose place the load moves."""
  between = block.eqns[block.eqns.index(load) + 1:block.eqns.index(store)]
  return not any(store.refs[0].root in accesses(e)[1] for e in between)


def _source(factor: Var, made: dict[Var, Eqn]) -> Var:
  """Before it was broadcast."""
  while factor in made and made[factor].primitive is broadcast_in_dim_p and isinstance(made[factor].values[0], Var):
    factor = made[factor].values[0]  # type: ignore[assignment]
  return factor
