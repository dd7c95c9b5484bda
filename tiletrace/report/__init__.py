"""The report of a compilation: for each operation how it is made and why not better, and what the kernel costs.

Every number is derived from what was compiled: the scheduled program and its layouts, and what ptxas said.
"""
from __future__ import annotations

import collections
import dataclasses
import json as json_module
from collections.abc import Iterable, Mapping
from typing import Any

from tiletrace.core.graph import walk
from tiletrace.core.source import Loc
from tiletrace.core.specialise import specialise
from tiletrace.core.types import Space, TileType
from tiletrace.lowering import pipeline
from tiletrace.lowering.assemble import Cubin
from tiletrace.lowering.facts import Facts
from tiletrace.report.accesses import Access, Accesses
from tiletrace.report.conversions import conversions
from tiletrace.report.legend import Legend
from tiletrace.report.residency import occupancy, registers, shared_memory
from tiletrace.report.sites import Site, sites
from tiletrace.report.synchronisation import mbarriers, ordering
from tiletrace.report.text import readable
from tiletrace.report.work import roofline, work


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Report:
  """What was decided and what it costs. `str()` is for people, `json()` and `data` are for programs.

  `"stmatrix" in report` asks the text. docs/explanations.md has the fields.
  """
  data: dict[str, Any]

  def __str__(self) -> str:
    return readable(self.data)

  __repr__ = __str__

  def __contains__(self, text: str) -> bool:
    return text in str(self)

  def json(self) -> str:
    """`data`, in the JSON format."""
    return json_module.dumps(self.data, indent=2)


_STANDS_FOR = {"mma_sync": "gemm"}      # what a variant makes of an operation


def cost(lowering: pipeline.Lowering, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
  """FLOPs of the gemms, where an abstract number of trips counts for the fewest that are possible, and bytes of every
  input and output once; of dynamic shapes at one call's `sizes`."""
  if sizes:
    lowering = _at(lowering, sizes)
  found = work(lowering.graph, len(lowering.hidden))
  return {"flops": found.flops, "bytes": found.nbytes}


def make_report(lowering: pipeline.Lowering, cubin: Cubin | None, sizes: Mapping[str, int] | None = None) -> Report:
  """The report of a lowered (and, with a cubin, assembled) kernel; of dynamic shapes at one call's `sizes`."""
  if sizes:
    lowering = _at(lowering, sizes)
  program, graph = lowering.program, lowering.graph
  places = list(sites(program.graph.body, Facts(program.graph), program.threads, tiles=bool(graph.options.persistent)))
  layouts = Legend(lowering)
  found, fills, ops = work(graph, len(lowering.hidden)), occupancy(lowering, cubin), _ops(lowering, places, layouts)
  data: dict[str, Any] = {
      "kernel": graph.name, "source": graph.loc.short(), "target": lowering.target.name,
      "grid": list(graph.options.grid), "threads": program.threads, "smem_bytes": program.smem_bytes,
      "ops": ops,
      "conversions": [{**c, "from": layouts.name(have), "to": layouts.name(want)}
                      for c, have, want in conversions(lowering.selected)],
      "layouts": layouts.data(),
      "notes": list(program.notes),
      "mbarriers": mbarriers(program, places), "ordering": ordering(places),
      "shared_memory": shared_memory(lowering, places),
      "registers": registers(lowering, places, cubin), "occupancy": fills,
      "cost": cost(lowering),
      "work": {"tensor_flops": found.tensor_flops, "other_flops": found.other_flops, "bytes": found.nbytes,
               "exact": found.exact, **_traffic(ops, fills["programs"])},
      "roofline": roofline(found, lowering.target, fills["programs"]),
      "seconds": {k: round(s, 6) for k, s in lowering.seconds.items()},
  }
  if cubin is not None:
    data["assembled"] = {"registers": cubin.registers, "spill_stores": cubin.spill_stores,
                         "spill_loads": cubin.spill_loads, "warnings": list(cubin.warnings)}
  return Report(data)


def _at(lowering: pipeline.Lowering, sizes: Mapping[str, int]) -> pipeline.Lowering:
  """The lowering with a call's sizes in its graphs."""
  program, selected = (dataclasses.replace(x, graph=specialise(x.graph, sizes))
                       for x in (lowering.program, lowering.selected))
  return dataclasses.replace(lowering, graph=specialise(lowering.graph, sizes), program=program, selected=selected)


def _traffic(ops: Iterable[dict[str, Any]], programs: int) -> dict[str, int]:
  """What all programs ask global memory for, in bytes, and wavefronts of their threads in shared memory: of what runs
  in every program, branches and loops whose trips are not known left out."""
  total: collections.Counter[str] = collections.Counter()
  for op in ops:
    for a in filter(lambda a: a["exact"], op["accesses"]):
      times = op["count"] * a["count"] * a["trips"] * programs
      if a["space"] == "global":
        total["stored_bytes" if a["stores"] else "loaded_bytes"] += times * a["nbytes"]
      elif a["wavefronts"] is not None:
        total["wavefronts"] += times * a["wavefronts"]
        total["least_wavefronts"] += times * a["least_wavefronts"]
  return {k: total[k] for k in ("loaded_bytes", "stored_bytes", "wavefronts", "least_wavefronts")}


class _Became:
  """What the operations of the traced kernel became in the scheduled program, by their place."""

  def __init__(self, lowering: pipeline.Lowering, places: Iterable[Site], layouts: Legend):
    self._layouts = layouts
    accesses = Accesses(lowering.program, layouts.variables)
    self._of: dict[Loc, collections.Counter[tuple[Access, str, int, bool]]] = {}
    for s in places:
      for a in accesses.of(s):
        self._of.setdefault(s.eqn.loc, collections.Counter())[a, str(s.role), s.trips, s.exact] += 1

  def take(self, loc: Loc) -> list[dict[str, Any]]:
    """The accesses of an operation, told once; alike ones are counted."""
    found = self._of.pop(loc, None) or {}
    return [{**{f.name: getattr(a, f.name) for f in dataclasses.fields(a)},
             "layout": None if a.layout is None else self._layouts.name(a.layout),
             "role": role, "trips": trips, "exact": exact, "count": n} for (a, role, trips, exact), n in found.items()]

  def rest(self) -> list[tuple[Loc, list[dict[str, Any]]]]:
    return [(loc, self.take(loc)) for loc in list(self._of)]


def _ops(lowering: pipeline.Lowering, places: Iterable[Site], layouts: Legend) -> list[dict[str, Any]]:
  """Every operation of the kernel on tiles, in program order, with its variant and what it became; then what the
  scheduler added without one."""
  selected, became = lowering.selected, _Became(lowering, places, layouts)
  choices = {(c.loc, c.op): c for c in selected.choices}
  out: list[dict[str, Any]] = []

  def add(op: str, loc: Loc, layout: str | None = None) -> None:
    op = _STANDS_FOR.get(op, op)
    choice = choices.pop((loc, op if (loc, op) in choices else op.removesuffix("_async")), None)
    out.append({"op": op, "line": loc.short(), "variant": choice.variant if choice is not None else None,
                "declined": [{"variant": v, "reason": r} for v, r in (choice.declined if choice is not None else ())],
                "layout": layout, "accesses": became.take(loc)})

  for eqn in walk(selected.graph.body):
    held = [selected.layouts[v] for v in eqn.outvars if v in selected.layouts and isinstance(v.type, TileType)]
    if held or any(r.type.space is not Space.FRAGMENT for r in eqn.refs):
      add(eqn.primitive.name, eqn.loc, layouts.name(held[0]) if held else None)
  for loc, op in list(choices):
    add(op, loc)
  for loc, accesses in became.rest():
    out.append({"op": "schedule", "line": loc.short(), "variant": None, "declined": [], "layout": None,
                "accesses": accesses})
  return _counted(out)


def _counted(ops: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Operations that are alike, as of a loop that Python unrolled, are one with a count."""
  count: collections.Counter[str] = collections.Counter()
  first: dict[str, dict[str, Any]] = {}
  for op in ops:
    key = json_module.dumps(op)
    first.setdefault(key, op)
    count[key] += 1
  return [{**op, "count": count[key]} for key, op in first.items()]
