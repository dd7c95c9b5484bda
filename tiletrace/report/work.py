"""What a kernel computes and moves: FLOPs, bytes, and the roofline of its target."""
from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

from tiletrace.core.dtypes import is_float, short_name
from tiletrace.core.graph import Eqn, TileGraph
from tiletrace.core.ops import elementwise, transcendental
from tiletrace.core.ops.cumulative import CUMULATIVE
from tiletrace.core.ops.reduce import REDUCTIONS
from tiletrace.core.types import RefType, TileType
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.target import DEVICES, Device, Target
from tiletrace.report.sites import WARPGROUP, sites

# One FLOP an element of the result; of what reads its operand once, one an element of the operand.
_BY_RESULT = frozenset((*elementwise.ARITHMETIC, *elementwise.FLOAT, *elementwise.APPROXIMATE, *transcendental.FLOAT))
_BY_OPERAND = frozenset((*REDUCTIONS, *CUMULATIVE))
_GEMMS = ("gemm", "gemm_async", "mma_sync")


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
  """What a launch does at least.

  Attributes:
    tensor_flops: of the matrix products, by dtype of their operands: whole tiles, padding included.
    other_flops: one for each element of an arithmetic operation on floats, whatever its instructions are.
    nbytes: every input read and every output written once; a result in place is both.
    exact: whether all trip counts are known; else the fewest count.
  """
  tensor_flops: dict[str, int]
  other_flops: int
  nbytes: int
  exact: bool

  @property
  def flops(self) -> int:
    return sum(self.tensor_flops.values())


def work(graph: TileGraph, hidden: int = 0) -> Work:
  """The work of a traced kernel, of whose inputs and outputs the last `hidden` are not the user's."""
  tensor: collections.Counter[str] = collections.Counter()
  other, exact = 0, True
  for site in sites(graph.body, Facts(graph), WARPGROUP * graph.options.warpgroups):
    eqn, count = site.eqn, site.trips
    if eqn.primitive.name in _GEMMS:
      shape, b = eqn.refs[-1].shape, eqn.values[2] if eqn.primitive.name == "mma_sync" else eqn.refs[-2]
      tensor[short_name(b.type.dtype)] += 2 * math.prod(shape) * b.shape[-2] * count  # type: ignore[union-attr]
      exact &= site.exact
    elif flops := _other_flops(eqn):
      other += flops * count
      exact &= site.exact
  programs = math.prod(graph.options.grid)
  own = (*graph.invars[:graph.num_inputs - hidden], *graph.outputs[:len(graph.outputs) - hidden])
  nbytes = sum(v.type.nbytes for v in own if isinstance(v.type, RefType))
  return Work({k: programs * n for k, n in tensor.items()}, programs * other, nbytes, exact)


def _other_flops(eqn: Eqn) -> int:
  counted = eqn.values[0] if eqn.primitive in _BY_OPERAND else eqn.outvars[0] if eqn.primitive in _BY_RESULT else None
  if counted is None or not isinstance(counted.type, TileType) or not is_float(counted.type.dtype):
    return 0
  return counted.type.size


def roofline(found: Work, target: Target, programs: int) -> dict[str, Any]:
  """The least time that a target's GPU needs for the work: for each resource, and which one bounds it.

  A program runs on one SM, so fewer programs than SMs have their part of the FLOPs only.
  """
  device = DEVICES[target.name]
  used = min(1.0, max(programs, 1) / target.sm_count)
  seconds = {
      "tensor cores": sum(n / device.tensor_flops[t] for t, n in found.tensor_flops.items()) / used,
      "other units": found.other_flops / device.f32_flops / used,
      "global memory": found.nbytes / device.bandwidth}
  bound = max(seconds, key=lambda k: seconds[k])
  flops = found.flops + found.other_flops
  return {"device": device.name, "seconds": seconds, "bound": bound if seconds[bound] else None,
          "at_least_seconds": seconds[bound], "flops_per_byte": flops / found.nbytes if found.nbytes else None,
          "ridge_flops_per_byte": _peak(found, device) / device.bandwidth, "sms_used": used}


def _peak(found: Work, device: Device) -> float:
  """FLOPs a second of the units that do most of the work."""
  if found.tensor_flops:
    return device.tensor_flops[max(found.tensor_flops, key=lambda t: found.tensor_flops[t])]
  return device.f32_flops
