"""Where the threads of a scheduled program wait for each other, for copies and for tensor cores."""
from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from tiletrace.core.graph import Var
from tiletrace.core.types import BarrierType
from tiletrace.lowering.schedule.program import Program
from tiletrace.report.sites import Site

_ON_BARRIERS = {"barrier_wait": "waits", "barrier_arrive": "arrives", "barrier_arrive_expect_tx": "expects"}
_ORDERING = ("sync", "fence", "wgmma_wait", "wait_group", "commit_group")


def mbarriers(program: Program, places: Sequence[Site]) -> list[dict[str, Any]]:
  """Every array of mbarriers: how many, arrivals of a phase, and who waits, arrives or expects bytes where."""
  found: dict[Var, dict[str, Any]] = {}
  for s in places:
    name = s.eqn.primitive.name
    if name == "alloc_barrier":
      (var,) = s.eqn.outvars
      assert isinstance(var.type, BarrierType)
      found[var] = {"barrier": var.hint or "barrier", "count": var.type.count, "arrivals": var.type.arrivals,
                    "offset": program.offsets[var], "uses": []}
    elif name in _ON_BARRIERS and s.eqn.values[0] in found:
      use = {"what": _ON_BARRIERS[name], "role": str(s.role), "line": s.eqn.loc.short(), "trips": s.trips}
      if "nbytes" in s.eqn.params:
        use["bytes"] = s.eqn.params["nbytes"]
      uses = found[s.eqn.values[0]]["uses"]      # type: ignore[index]
      if use not in uses:
        uses.append(use)
  return list(found.values())


def ordering(places: Sequence[Site]) -> list[dict[str, Any]]:
  """Syncs of threads, fences between proxies, and waits for asynchronous groups; alike ones of a line are counted."""
  count: collections.Counter[tuple[Any, ...]] = collections.Counter()
  for s in places:
    name = s.eqn.primitive.name
    if name in _ORDERING:
      detail = ", ".join(f"{k}={v}" for k, v in sorted(s.eqn.params.items()))
      threads = s.role.threads if name != "sync" or s.eqn.params["each"] == "scope" else 128
      count[name, detail, str(s.role), threads, s.eqn.loc.short(), s.trips] += 1
  return [{"op": op, "detail": detail, "role": role, "threads": threads, "line": line, "trips": trips, "count": n}
          for (op, detail, role, threads, line, trips), n in count.items()]
