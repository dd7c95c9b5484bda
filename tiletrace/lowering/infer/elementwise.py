"""Elementwise ops: operands and result have one layout. So have words and their parts, which share registers."""
from __future__ import annotations

from collections.abc import Iterator

from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops import elementwise, transcendental
from tiletrace.core.rules import type_rules
from tiletrace.lowering.infer.constraints import (
  Constraint,
  InferContext,
  Relates,
  equal,
  is_distributed,
  layout_rules,
)
from tiletrace.lowering.layouts.fragment import join_registers, split_registers


def pointwise(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  (out,) = eqn.outvars
  for a in eqn.values:
    if is_distributed(a):
      assert isinstance(a, Var)
      yield equal(a, out, eqn)


for _ops in (elementwise, transcendental):
  layout_rules.register(*(p for name, p in vars(_ops).items() if name.endswith("_p") and p in type_rules and (
    p is not transcendental.bitcast_p)))(pointwise)


@layout_rules.register(transcendental.bitcast_p)
def _bitcast(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  """Parts of a word are neighbours in one register, the last dimension."""
  (x,), (out,) = eqn.values, eqn.outvars
  size, to = x.dtype.itemsize, out.dtype.itemsize
  if size == to:
    yield from pointwise(eqn, ctx)
    return
  assert isinstance(x, Var)
  parts = max(size, to) // min(size, to)
  if size > to:
    yield Relates(x, out, eqn, lambda l: split_registers(l, parts), lambda l: join_registers(l, parts))
  else:
    yield Relates(x, out, eqn, lambda l: join_registers(l, parts), lambda l: split_registers(l, parts))
