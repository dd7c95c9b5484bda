"""prefetch: in runs of bytes that lie side by side (cp.async.bulk.prefetch), or not at all."""
from __future__ import annotations

import dataclasses
import math

from tiletrace.core.graph import Eqn, RefOperand, with_refs
from tiletrace.core.ops.prefetch import prefetch_p
from tiletrace.core.types import Dyn
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.select.context import SelectContext, guard_dims, select_rules
from tiletrace.lowering.strides import divisor, row_major_strides
from tiletrace.lowering.variants import Choice, Variant, choose

_GRAIN = 16                  # bytes; of addresses and sizes: PTX ISA, cp.async.bulk.prefetch
_MOST = 2**20 - _GRAIN       # of one instruction, as ptxas has it


@dataclasses.dataclass(frozen=True, slots=True)
class PrefetchPlan:
  """`starts` is a view of the first element of each run, `nbytes` the bytes of a run."""
  starts: RefOperand
  nbytes: int


def prefetch_plan(ref: RefOperand, facts: Facts) -> PrefetchPlan | str:
  """The longest runs that are provably inside of the array, or why there are none."""
  dims, shape, item = list(ref.view.dims), ref.type.shape, ref.type.dtype.itemsize
  if not all(isinstance(d.size, int) for d in dims):
    return "how much it is, each call decides"
  if 0 in (*(d.size for d in dims), *shape):
    return "there is nothing in it"
  guarded, nbytes = set(guard_dims(ref, facts)), item
  for d in reversed(range(len(dims))):
    dim = dims[d]
    if d in guarded or (dim.stride != 1 and dim.size != 1):
      break
    assert isinstance(dim.size, int)
    if nbytes * dim.size > _MOST:
      if nbytes == item:
        return f"{nbytes * dim.size} bytes lie side by side, an instruction fetches {_MOST} at most"
      break
    nbytes *= dim.size
    dims[d] = dataclasses.replace(dim, size=1)
    if dim.size != shape[d]:           # what lies before and behind it is not of the view
      break
  if nbytes % _GRAIN:
    return f"pieces that are side by side, and provably inside of the array, have {nbytes} bytes, not a multiple of 16"
  for old, new, stride in zip(ref.view.dims, dims, row_major_strides(shape), strict=True):
    start = facts[ref.dyn[old.start.index] if isinstance(old.start, Dyn) else old.start].divisor
    step = new.stride if new.size != 1 else 0              # between runs
    if math.gcd(start, step) * divisor(stride) * item % _GRAIN:
      return "its pieces do not provably start at multiples of 16 bytes"
  return PrefetchPlan(dataclasses.replace(ref, view=dataclasses.replace(ref.view, dims=tuple(dims))), nbytes)


def _lacks(eqn: Eqn, ctx: SelectContext) -> str | None:
  return ctx.target.lacks("sm_90")


def _has_no_runs(eqn: Eqn, ctx: SelectContext) -> str | None:
  plan = prefetch_plan(eqn.refs[0], ctx.facts)
  return plan if isinstance(plan, str) else None


PREFETCH = (Variant("bulk", (_lacks, _has_no_runs)), Variant("none"))


@select_rules.register(prefetch_p)
def _prefetch(eqn: Eqn, ctx: SelectContext) -> tuple[Eqn, Choice | None]:
  choice = choose("prefetch", PREFETCH, eqn, ctx, forced=ctx.options.forced("prefetch"))
  plan = prefetch_plan(eqn.refs[0], ctx.facts)
  if choice.variant == "none" or isinstance(plan, str):
    return eqn.replace(params={**eqn.params, "dispatch": "none"}), choice
  guard = guard_dims(plan.starts, ctx.facts)
  return with_refs(eqn, [plan.starts], dispatch="bulk", nbytes=plan.nbytes, guard=guard), choice
