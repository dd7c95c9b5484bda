"""gemm: wgmma with both operands in shared memory, or A in registers; mma.sync where wgmma has no such shape."""
from __future__ import annotations

import math

from tiletrace.core import dtypes
from tiletrace.core.graph import Eqn, Var, walk
from tiletrace.core.ops import mma as ops
from tiletrace.core.ops.memory import load_p
from tiletrace.core.types import Space, TileType
from tiletrace.lowering.mma_plan import mma_plan
from tiletrace.lowering.select.context import SelectContext, select_rules
from tiletrace.lowering.variants import Choice, Variant, choose
from tiletrace.lowering.wgmma_plan import WgmmaPlan, best_partition, shape_of


def has_wgmma(eqn: Eqn, ctx: SelectContext) -> str | None:
  return ctx.target.lacks("sm_90a")


def has_its_operands(eqn: Eqn, ctx: SelectContext) -> str | None:
  return ctx.target.lacks("sm_89") if eqn.refs[-2].type.dtype in (dtypes.f8e4m3, dtypes.f8e5m2) else None


def has_a_partition(eqn: Eqn, ctx: SelectContext) -> str | None:
  plan = best_partition(eqn, ctx.warpgroups(eqn))
  return plan if isinstance(plan, str) else None


def accumulator_fits(eqn: Eqn, ctx: SelectContext) -> str | None:
  """A thread has 255 registers; an accumulator of 256 leaves none (ptxas C7511)."""
  plan = best_partition(eqn, ctx.warpgroups(eqn))
  if isinstance(plan, WgmmaPlan) and plan.total_registers > 208:
    return (f"the accumulator takes {plan.total_registers} registers of each thread, of 255: "
            f"split it over more than {math.prod(plan.grid)} warpgroups")
  return None


def a_is_shared(eqn: Eqn, ctx: SelectContext) -> str | None:
  if eqn.params["a_in"] == "ref" and eqn.refs[0].type.space is Space.SHARED:
    return None
  return "A is in registers"


def is_no_explicit_group(eqn: Eqn, ctx: SelectContext) -> str | None:
  return "gemm_async commits a wgmma group" if eqn.primitive is ops.gemm_async_p else None


def policy_is_for_warps(eqn: Eqn, ctx: SelectContext) -> str | None:
  policy = eqn.params["policy"]
  if not isinstance(policy, tuple):
    return None
  if not has_wgmma(eqn, ctx):
    return f"policy={policy} divides acc among warpgroups, mma.sync among warps"
  count = ctx.warpgroups(eqn)
  if math.prod(policy) != count:
    return f"policy={policy} divides acc among {math.prod(policy)} warpgroups, {count} compute it"
  rows, columns = policy
  return f"policy={policy}: {rows} along the rows, with others beside them, are no power of two" if (
    rows & (rows - 1) and columns > 1) else None


def padding_of_k_is_zero(eqn: Eqn, ctx: SelectContext) -> str | None:
  """Loads from shared memory fill what lies past k with zeros."""
  depth = 32 // eqn.refs[-2].type.dtype.itemsize
  in_registers = eqn.params["a_in"] == "value" or eqn.refs[0].type.space is Space.FRAGMENT
  if in_registers and shape_of(eqn)[2] % depth:
    return f"K = {shape_of(eqn)[2]} is not a multiple of {depth}, and A is in registers, whose padding is not zero"
  return None


def warps_hold_the_accumulator(eqn: Eqn, ctx: SelectContext) -> str | None:
  plan = mma_plan(shape_of(eqn), eqn.refs[-2].type.dtype.itemsize, 4 * ctx.warpgroups(eqn), eqn.params["policy"])
  if plan.fragment_registers > 208:
    return f"the accumulator takes {plan.fragment_registers} registers of each thread, of 255"
  return None


GEMM = (
  Variant("wgmma_ss", (has_wgmma, has_a_partition, accumulator_fits, a_is_shared)),
  Variant("wgmma_rs", (has_wgmma, has_a_partition, accumulator_fits)),
  Variant("mma_sync", (has_its_operands, is_no_explicit_group, policy_is_for_warps, padding_of_k_is_zero,
                       warps_hold_the_accumulator)),
)


@select_rules.register(ops.gemm_p, ops.gemm_async_p)
def select_gemm(eqn: Eqn, ctx: SelectContext) -> tuple[Eqn, Choice]:
  forced = eqn.params.get("dispatch") or ctx.options.forced("gemm")
  choice = choose("gemm", GEMM, eqn, ctx, forced=forced)
  return eqn.replace(params={**eqn.params, "dispatch": choice.variant}), choice


def policy_of(eqn: Eqn, ctx: SelectContext) -> str | tuple[int, int]:
  """How the warps of a gemm by mma.sync divide it: as the author says. Without wgmma it is by rows alone, unless there
  are too few, where A of some gemm is in registers, as that of a product of a product is: so no warp needs another's
  part of it."""
  policy, gemms = eqn.params["policy"], (e for e in walk(ctx.graph.body) if e.primitive is ops.gemm_p)
  if policy == "square" and has_wgmma(eqn, ctx) and any(a_is_shared(e, ctx) for e in gemms):
    return "full_row" if shape_of(eqn)[0] % (64 * ctx.warpgroups(eqn)) == 0 else policy
  return policy


def as_mma_sync(eqn: Eqn, policy: str | tuple[int, int]) -> list[Eqn]:
  """A gemm as loads of both operands and the product of the two values."""
  *a_ref, b, acc = eqn.refs
  accumulate, *values = eqn.values
  eqns: list[Eqn] = []
  for ref in (*a_ref, b):
    out = Var(TileType(ref.shape, ref.type.dtype))
    eqns.append(Eqn(load_p, (ref.root, *ref.dyn), (out,), {"views": (ref.view,), "fill_value": 0}, eqn.loc))
    values.append(out)
  params = {"views": (acc.view,), "policy": policy}
  return [*eqns, Eqn(ops.mma_sync_p, (acc.root, *acc.dyn, accumulate, *values), (), params, eqn.loc)]
