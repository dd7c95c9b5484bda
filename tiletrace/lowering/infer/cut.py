"""Where conversions go: a minimum cut of the dataflow between two anchors.

Spreading layouts from the anchors outwards leaves a conversion wherever two spreads happen to meet. Any other border
between them computes the same; the cheapest is a minimum s-t cut, found for each pair of anchors in turn (the
alpha-beta swap of Boykov, Veksler and Zabih, "Fast Approximate Energy Minimization via Graph Cuts", 2001).
"""
from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from tiletrace.core.graph import Var
from tiletrace.lowering.infer.constraints import Relates
from tiletrace.lowering.layouts.relation import Layout

_INFINITE = 1 << 60
_SOURCE, _SINK = "source", "sink"


def improve(labels: dict[Var, int], spreads: Sequence[dict[Var, Layout]], links: Sequence[Relates],
            edge_cost: Callable[[Relates, Layout, Layout], int], node_cost: Callable[[Var, Layout], int],
            pinned: set[Var]) -> dict[Var, int]:
  """Moves borders between anchors to where conversions cost least.

  Args:
    labels: the anchor whose layout each variable has now.
    spreads: for each anchor, the layout that every variable would have from it alone.
    links: transfer constraints; a link between two labels is a conversion unless the layouts agree.
    edge_cost: of converting a link's operand, given the operand's and the wanted layout.
    node_cost: of computing a variable in a layout (elements computed more than once).
    pinned: variables that keep their label.
  Returns:
    new labels; equal to `labels` where nothing is cheaper.
  """
  labels = dict(labels)
  changed = True
  while changed:
    changed = False
    for a, b in sorted({tuple(sorted((labels[l.operand], labels[l.out]))) for l in links
                        if l.operand in labels and l.out in labels and labels[l.operand] != labels[l.out]}):
      moved = _swap(labels, a, b, spreads, links, edge_cost, node_cost, pinned)
      changed = changed or moved
  return labels


def _swap(labels: dict[Var, int], a: int, b: int, spreads: Sequence[dict[Var, Layout]], links: Sequence[Relates],
          edge_cost: Callable[[Relates, Layout, Layout], int], node_cost: Callable[[Var, Layout], int],
          pinned: set[Var]) -> bool:
  """Relabels the variables of anchors a and b by a minimum cut; True where that is strictly cheaper."""
  nodes = {v for v, l in labels.items() if l in (a, b)}
  flow = _Flow()
  now = 0
  for v in nodes:
    in_a, in_b = spreads[a].get(v), spreads[b].get(v)
    pay_a = _INFINITE if in_a is None or (v in pinned and labels[v] != a) else node_cost(v, in_a)
    pay_b = _INFINITE if in_b is None or (v in pinned and labels[v] != b) else node_cost(v, in_b)
    flow.add(_SOURCE, v, pay_b)  # cut, and so paid, when v is on the sink's side: labelled b
    flow.add(v, _SINK, pay_a)
    now += pay_a if labels[v] == a else pay_b
  for link in links:
    if link.operand not in nodes or link.out not in nodes:
      continue
    cost = max(_crossing(link, spreads[a], spreads[b], edge_cost), _crossing(link, spreads[b], spreads[a], edge_cost))
    flow.add(link.operand, link.out, cost)
    flow.add(link.out, link.operand, cost)
    now += cost if labels[link.operand] != labels[link.out] else 0
  best = flow.maximum()
  if best >= min(now, _INFINITE):
    return False
  side = flow.source_side()
  for v in nodes:
    labels[v] = a if v in side else b
  return True


def _crossing(link: Relates, operand: dict[Var, Layout], out: dict[Var, Layout],
              edge_cost: Callable[[Relates, Layout, Layout], int]) -> int:
  """The cost of the link where its operand comes from one anchor and its result from the other: a conversion before
  the equation, or after it where the result does not tell the operand's layout."""
  have, result = operand.get(link.operand), out.get(link.out)
  if have is None or result is None:
    return _INFINITE
  wanted = link.backward(result)
  if wanted is None:
    link, have, wanted = dataclasses.replace(link, operand=link.out), link.forward(have), result
  if have is None:
    return _INFINITE
  return 0 if have == wanted else edge_cost(link, have, wanted)


class _Flow:
  """Maximum flow by shortest augmenting paths (Edmonds and Karp): the graphs have tens of nodes."""

  def __init__(self) -> None:
    self.capacity: dict[Hashable, dict[Hashable, int]] = {}

  def add(self, u: Hashable, v: Hashable, capacity: int) -> None:
    forward = self.capacity.setdefault(u, {})
    forward[v] = forward.get(v, 0) + capacity
    self.capacity.setdefault(v, {}).setdefault(u, 0)

  def _path(self) -> dict[Hashable, Hashable]:
    """Predecessors of every node that the source still reaches."""
    came: dict[Hashable, Hashable] = {_SOURCE: _SOURCE}
    queue: deque[Hashable] = deque([_SOURCE])
    while queue:
      u = queue.popleft()
      for v, left in self.capacity.get(u, {}).items():
        if left > 0 and v not in came:
          came[v] = u
          queue.append(v)
    return came

  def maximum(self) -> int:
    total = 0
    while _SINK in (came := self._path()):
      path: list[Hashable] = [_SINK]
      while path[-1] is not _SOURCE:
        path.append(came[path[-1]])
      pairs = list(zip(path[1:], path[:-1], strict=True))
      room = min(self.capacity[u][v] for u, v in pairs)
      for u, v in pairs:
        self.capacity[u][v] -= room
        self.capacity[v][u] += room
      total += room
      if total >= _INFINITE:
        return total
    return total

  def source_side(self) -> set[Hashable]:
    return set(self._path())
