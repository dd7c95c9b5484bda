"""What an author wrote that the target does not have: refused by name, before anything is chosen."""
from __future__ import annotations

from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import Eqn, TileGraph, walk
from tiletrace.lowering.target import Target

# Other floors are reasons of variants (gemm_async, copy_async), or rows of the instruction table.
_FLOORS = {"alloc_barrier": "sm_90", "fence": "sm_90", "wgmma_wait": "sm_90a"}
_NAMES = {"alloc_barrier": "tt.alloc_barrier", "fence": "tt.fence", "wgmma_wait": "tt.wgmma_wait"}


def check_floors(graph: TileGraph, target: Target) -> None:
  """Refuses clusters, barriers, register budgets and groups that the target has not.

  Raises:
    LoweringError: with what the op needs and the target.
  """
  lacking = target.lacks("sm_90")
  if graph.options.cluster_size > 1 and lacking:
    raise LoweringError(f"{graph.name}: cluster={graph.options.cluster}: {lacking}", loc=graph.loc,
                        hint="drop cluster=")
  for eqn in walk(graph.body):
    what, floor = _floor(eqn)
    reason = target.lacks(floor) if floor is not None else None
    if reason is not None:
      raise LoweringError(f"{what}: {reason}", loc=eqn.loc, hint="write the kernel with tt.copy, tt.gemm and "
                          "tt.pipelined, without roles: the target's own way is found for these")


def _floor(eqn: Eqn) -> tuple[str, str | None]:
  """What an equation is called, and what it needs."""
  name, params = eqn.primitive.name, eqn.params
  if name == "warpgroup" and params["regs"] is not None:
    return f"tt.warpgroup(regs={params['regs']})", "sm_90a"
  if name in ("commit_group", "wait_group") and params["kind"] == "bulk":
    return f"tt.{name}, of TMA's groups", "sm_90"
  return _NAMES.get(name, name), _FLOORS.get(name)
