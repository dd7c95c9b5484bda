"""The report of a compilation: choices with reasons, schedule notes, shared memory, registers, FLOPs and bytes."""
from __future__ import annotations

import dataclasses
import json as json_module
import math
from typing import Any

from tiletrace.core.graph import Block, TileGraph
from tiletrace.core.types import RefType
from tiletrace.lowering import pipeline
from tiletrace.lowering.assemble import Cubin
from tiletrace.lowering.facts import Facts


@dataclasses.dataclass(frozen=True)
class Report:
  """`data` is what `report(json=True)` prints."""
  data: dict[str, Any]

  def text(self, json: bool = False) -> str:
    return json_module.dumps(self.data, indent=2) if json else _readable(self.data)

  @staticmethod
  def cost(graph: TileGraph) -> dict[str, int]:
    """FLOPs of the gemms whose trip counts are static, and bytes of every input and output once."""
    programs = math.prod(graph.options.grid)
    nbytes = sum(v.type.nbytes for v in graph.invars if isinstance(v.type, RefType))
    return {"flops": programs * _flops(graph.body, Facts(graph)), "bytes": nbytes}


def _flops(block: Block, facts: Facts) -> int:
  total = 0
  for eqn in block.eqns:
    if eqn.primitive.name in ("gemm", "gemm_async"):
      (k, n), (m, _) = eqn.refs[-2].shape, eqn.refs[-1].shape
      total += 2 * m * n * k
    trips = 1
    if eqn.primitive.name == "for_loop":
      lo, hi, step = (facts[a] for a in eqn.values[:3])
      trips = len(range(lo.hi, hi.lo, step.lo)) if step.lo == step.hi != 0 and abs(hi.lo - lo.hi) < 2**31 else 1
    total += trips * sum(_flops(b, facts) for b in eqn.blocks)
  return total


def make_report(lowering: pipeline.Lowering, cubin: Cubin | None) -> Report:
  """The report of a lowered (and, with a cubin, assembled) kernel."""
  program = lowering.program
  data: dict[str, Any] = {
      "kernel": lowering.graph.name, "source": lowering.graph.loc.short(), "target": lowering.target.name,
      "threads": program.threads, "smem_bytes": program.smem_bytes,
      "choices": [{"op": c.op, "line": c.loc.short(), "variant": c.variant,
                   "declined": [{"variant": n, "reason": r} for n, r in c.declined]}
                  for c in lowering.selected.choices],
      "notes": list(program.notes),
      "shared_memory": [{"buffer": v.hint or "buffer", "type": str(v.type), "offset": o} for v, o in
                        sorted(program.offsets.items(), key=lambda item: item[1])],
      "cost": Report.cost(lowering.graph),
      "seconds": {k: round(s, 6) for k, s in lowering.seconds.items()},
  }
  if cubin is not None:
    data["assembled"] = {"registers": cubin.registers, "spill_stores": cubin.spill_stores,
                         "spill_loads": cubin.spill_loads, "warnings": list(cubin.warnings)}
  return Report(data)


def _readable(d: dict[str, Any]) -> str:
  out = [f"{d['kernel']} ({d['source']}) for {d['target']}: {d['threads']} threads, {d['smem_bytes']} bytes of shared "
         "memory"]
  if d["cost"]["flops"]:
    out.append(f"  {d['cost']['flops'] / 1e9:.3f} GFLOP, {d['cost']['bytes'] / 1e6:.3f} MB of arguments")
  out.append("variants:")
  for c in d["choices"]:
    out.append(f"  {c['line']}  {c['op']}: {c['variant']}")
    out += [f"      not {x['variant']}: {x['reason']}" for x in c["declined"]]
  if d["notes"]:
    out += ["schedule:", *(f"  {n}" for n in d["notes"])]
  if d["shared_memory"]:
    out += ["shared memory:", *(f"  {b['offset']:>8}  {b['buffer']} {b['type']}" for b in d["shared_memory"])]
  if "assembled" in d:
    a = d["assembled"]
    out.append(f"assembled: {a['registers']} registers at entry, {a['spill_stores']} bytes spilled")
    out += [f"  {w}" for w in a["warnings"]]
  return "\n".join(out) + "\n"
