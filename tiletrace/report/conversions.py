"""The conversions between layouts that inference inserted, each with its class and cost."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiletrace.core.graph import Eqn, Var
from tiletrace.core.ops.relayout import relayout_p
from tiletrace.core.types import TileType
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.relayout import register_permutation, word_plan
from tiletrace.lowering.select.select import Selected
from tiletrace.lowering.words import per_word
from tiletrace.report.sites import WARPGROUP, sites


def conversions(selected: Selected) -> Iterator[tuple[dict[str, Any], Layout, Layout]]:
  """(the conversion as data, its layouts), in program order.

  Classes: "same" and "registers" are other names for registers and cost nothing; "shuffle" stays within warps;
  "shared" is stored to shared memory and loaded from it, with a sync before each.
  """
  graph, layouts = selected.graph, selected.layouts
  options = graph.options
  for site in sites(graph.body, Facts(graph), WARPGROUP * options.warpgroups, tiles=bool(options.persistent)):
    if site.eqn.primitive is not relayout_p:
      continue
    (source,), (out,) = site.eqn.values, site.eqn.outvars
    assert isinstance(source, Var)
    have, want = layouts[source], layouts[out]
    data = {"line": site.eqn.loc.short(), "type": str(out.type), **_cost(site.eqn, have, want), "trips": site.trips}
    yield data, have, want


def _cost(eqn: Eqn, have: Layout, want: Layout) -> dict[str, Any]:
  """Class, and instructions of a thread or bytes of a CTA."""
  how, source, out = eqn.params["how"], eqn.values[0].type, eqn.outvars[0].type
  assert isinstance(source, TileType) and isinstance(out, TileType)
  if how == "shuffle":
    plan = word_plan(have, want, per_word(source.dtype))
    if plan is not None:
      return {"class": how, "shuffles": plan.shuffles, "instructions": plan.cost, "shared_bytes": 0}
    how = "shared"      # halves of words that do not move together
  if how == "shared":
    return {"class": how, "shuffles": 0, "instructions": None,
            "shared_bytes": (source.size + out.size) * source.dtype.itemsize}
  permutes = 0 if how == "same" or eqn.params["cut"] is not None else _permutes(have, want, per_word(source.dtype))
  return {"class": how, "shuffles": 0, "instructions": permutes, "shared_bytes": 0}


def _permutes(have: Layout, want: Layout, pack: int) -> int:
  """Byte permutes of a renaming: a word that moves whole takes none, one made of k words k - 1 and at least one."""
  index = register_permutation(have, want)
  assert index is not None, "the inference chose renaming"
  count = 0
  for first in range(0, len(index), pack):
    places = [divmod(i, pack) for i in index[first:first + pack]]
    words = {w for w, _ in places}
    moved = len(words) > 1 or any(p != i for i, (_, p) in enumerate(places))
    count += max(1, len(words) - 1) if pack > 1 and moved else 0
  return count
