"""Control flow: what a loop carries and what a branch returns keep one layout; barriers and roles have none."""
from __future__ import annotations

from collections.abc import Iterator

from tiletrace.core.graph import Atom, Eqn, Var
from tiletrace.core.ops import assume, barrier, control, grid, roles, step
from tiletrace.lowering.infer.constraints import Constraint, InferContext, equal, is_distributed, layout_rules


def _pairs(eqn: Eqn, sources: tuple[Atom, ...], targets: tuple[Var, ...]) -> Iterator[Constraint]:
  for source, target in zip(sources, targets, strict=True):
    if is_distributed(source) and is_distributed(target):
      assert isinstance(source, Var)
      yield equal(source, target, eqn)


@layout_rules.register(control.for_loop_p)
def _for_loop(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  body = eqn.blocks[0]
  yield from _pairs(eqn, eqn.values[3:], body.invars[1:])
  yield from _pairs(eqn, body.outs, body.invars[1:])
  yield from _pairs(eqn, body.invars[1:], eqn.outvars)


@layout_rules.register(control.while_loop_p)
def _while_loop(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  condition, body = eqn.blocks
  yield from _pairs(eqn, eqn.values, body.invars)
  yield from _pairs(eqn, body.invars, condition.invars)
  yield from _pairs(eqn, body.outs, body.invars)
  yield from _pairs(eqn, body.invars, eqn.outvars)


@layout_rules.register(control.cond_p, control.switch_p)
def _branches(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  for block in eqn.blocks:
    yield from _pairs(eqn, block.outs, eqn.outvars)


@layout_rules.register(
    assume.assume_p, barrier.alloc_barrier_p, barrier.barrier_wait_p, barrier.barrier_arrive_p,
    barrier.barrier_arrive_expect_tx_p, barrier.fence_p, barrier.sync_p, grid.program_id_p, grid.size_p, grid.cta_id_p,
    grid.num_ctas_p, grid.warpgroup_id_p, grid.lookup_p, roles.warpgroup_p, roles.elect_p,
    step.step_p)
def _nothing(eqn: Eqn, ctx: InferContext) -> Iterator[Constraint]:
  yield from ()
