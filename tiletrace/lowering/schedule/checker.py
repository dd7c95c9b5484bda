"""The static checker: what can be proven of barriers, byte counts and register budgets before anything runs.

It runs on scheduled and on hand-written level-0 programs. What it refutes is an error; what it cannot decide is left to
the simulator.
"""
from __future__ import annotations

import dataclasses

from tiletrace.core.errors import ScheduleError
from tiletrace.core.graph import Block, Eqn, TileGraph, Var
from tiletrace.core.types import BarrierType, Space


def check_program(graph: TileGraph) -> list[str]:
  """Checks arrival counts, transaction bytes, accumulators read before their wait, and register totals.

  Returns:
    what is not proven: barriers whose arrivals do not evidently sum to a phase.
  Raises:
    ScheduleError: a refuted property, with the line of the equation.
  """
  _check_barriers(graph)
  _check_roles(graph)
  _check_accumulators(graph.body, {})
  return _unproven_phases(graph)


# ---- barriers


def _check_barriers(graph: TileGraph) -> None:
  arrivals: dict[Var, dict[str, list[tuple[int, Eqn]]]] = {}
  expected: dict[Var, list[tuple[int, Eqn]]] = {}
  moved: dict[Var, list[tuple[int | None, Eqn, Block]]] = {}

  def visit(block: Block) -> None:
    for eqn in block.eqns:
      name = eqn.primitive.name
      if name in ("barrier_arrive", "barrier_arrive_expect_tx"):
        bar = eqn.values[0]
        assert isinstance(bar, Var)
        count = eqn.params["count"] if name == "barrier_arrive" else 1
        arrivals.setdefault(bar, {}).setdefault(name, []).append((count, eqn))
        if name == "barrier_arrive_expect_tx":
          expected.setdefault(bar, []).append((eqn.params["nbytes"], eqn))
          moved.setdefault(bar, []).append((_bytes_on(block, bar), eqn, block))
      for inner in eqn.blocks:
        visit(inner)

  visit(graph.body)
  for bar, kinds in arrivals.items():
    assert isinstance(bar.type, BarrierType)
    for found in kinds.values():
      for count, eqn in found:
        if count > bar.type.arrivals or bar.type.arrivals % count:
          raise ScheduleError(f"{bar.hint or 'a barrier'} completes a phase after {bar.type.arrivals} arrivals, this "
                              f"is {count} of them", loc=eqn.loc,
                              hint="alloc_barrier(n, arrivals=...) counts one per warpgroup")
  for found in moved.values():
    for nbytes, eqn, _ in found:
      if nbytes is not None and nbytes != eqn.params["nbytes"]:
        raise ScheduleError(f"the barrier expects {eqn.params['nbytes']} bytes, the copies beside it bring {nbytes}",
                            loc=eqn.loc, hint="expect the sum of the destinations' nbytes")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Arrival:
  """An equation that arrives: in which role, in which straight line (a loop's body, or the role's), conditionally."""
  role: Eqn | None
  line: Block
  kind: str
  count: int
  conditional: bool


def _arrivals(graph: TileGraph) -> dict[Var, list[_Arrival]]:
  found: dict[Var, list[_Arrival]] = {}

  def visit(block: Block, role: Eqn | None, line: Block, conditional: bool) -> None:
    for eqn in block.eqns:
      name = eqn.primitive.name
      if name in ("barrier_arrive", "barrier_arrive_expect_tx"):
        bar = eqn.values[0]
        assert isinstance(bar, Var)
        times = graph.options.cluster_size if eqn.params.get("cluster") else 1
        found.setdefault(bar, []).append(_Arrival(role, line, name, eqn.params.get("count", 1) * times, conditional))
      for inner in eqn.blocks:
        visit(inner, eqn if name == "warpgroup" else role, line if name in ("elect", "cond", "switch") else inner,
              conditional or name in ("cond", "switch"))

  visit(graph.body, None, graph.body, False)
  return found


def _unproven_phases(graph: TileGraph) -> list[str]:
  """Barriers of which it is not proven that one arrival of each kind in each role completes a phase.

  Proven: the arrivals of a kind in a role all count the same; these counts, one of each, sum to the barrier's; and in a
  straight line no kind arrives more often than another (arrivals under a condition are late ones of other lines).
  """
  out = []
  for bar, arrivals in _arrivals(graph).items():
    assert isinstance(bar.type, BarrierType)
    counts: dict[tuple[Eqn | None, str], set[int]] = {}
    lines: dict[tuple[Eqn | None, Block], dict[str, int]] = {}
    for a in arrivals:
      counts.setdefault((a.role, a.kind), set()).add(a.count)
      if not a.conditional:
        line = lines.setdefault((a.role, a.line), {})
        line[a.kind] = line.get(a.kind, 0) + 1
    name = f"{bar.hint or 'a barrier'} ({bar.type.arrivals} arrivals)"
    if any(len(c) > 1 for c in counts.values()):
      out.append(f"{name}: not proven that a phase completes, arrivals in a role count differently")
    elif sum(n for c in counts.values() for n in c) != bar.type.arrivals:
      out.append(f"{name}: not proven that a phase completes, one arrival of each kind in each role is not their sum")
    elif any(len(set(line.values())) > 1 for line in lines.values()):
      out.append(f"{name}: not proven that a phase completes, one kind arrives more often than another")
  return out


def _bytes_on(block: Block, bar: Var) -> int | None:
  """Bytes that the copies of this straight line bring on the barrier; None where they stand elsewhere."""
  total = 0
  for eqn in block.eqns:
    if eqn.primitive.name == "copy_async" and eqn.values and eqn.values[0] is bar:
      total += _nbytes(eqn)
  expects = sum(e.primitive.name == "barrier_arrive_expect_tx" and e.values[0] is bar for e in block.eqns)
  return total if total and expects == 1 else None


def _nbytes(copy: Eqn) -> int:
  dst = copy.refs[1]
  size = dst.type.dtype.itemsize
  for n in dst.shape:
    size *= n
  return size


# ---- roles


def _check_roles(graph: TileGraph) -> None:
  roles = [e for e in graph.body.eqns if e.primitive.name == "warpgroup"]
  taken: dict[int, Eqn] = {}
  for role in roles:
    for wg in range(role.params["first"], role.params["first"] + role.params["count"]):
      if wg in taken:
        raise ScheduleError(f"warpgroup {wg} has two roles", loc=role.loc, also=("the first is at", taken[wg].loc))
      taken[wg] = role
  total = sum(r.params["count"] * (r.params["regs"] or 0) for r in roles)
  groups = sum(r.params["count"] for r in roles)
  if roles and all(r.params["regs"] for r in roles) and total > 512 // groups // 8 * 8 * groups:
    launched = 128 * (512 // groups // 8 * 8) * groups
    have = "an SM has 65536" if 128 * total > 65536 else f"{groups} warpgroups have {launched} at launch"
    raise ScheduleError(f"the roles ask for {128 * total} registers, {have}: the kernel would wait for ever",
                        loc=roles[-1].loc, hint="24 + 2 x 240 and 40 + 2 x 232 fit")


# ---- accumulators


def _check_accumulators(block: Block, pending: dict[Var, Eqn]) -> None:
  """No access to an accumulator between a gemm_async and a wait that covers it."""
  order: list[Eqn] = []
  for eqn in block.eqns:
    name = eqn.primitive.name
    if name == "gemm_async":
      order.append(eqn)
      pending[eqn.refs[-1].root] = eqn
      continue
    if name == "wgmma_wait":
      keep = eqn.params["n"]
      done = order[:max(0, len(order) - keep)] if keep else order
      still = {g.refs[-1].root for g in order[len(done):]}
      for g in done:
        if g.refs[-1].root not in still:
          pending.pop(g.refs[-1].root, None)
      if keep == 0:
        pending.clear()
      order = order[len(done):]
      continue
    for ref in eqn.refs:
      if ref.type.space is Space.FRAGMENT and ref.root in pending:
        name = ref.root.hint or "an accumulator"
        raise ScheduleError(f"{name} is read or written while a gemm_async may still write it", loc=eqn.loc,
                            also=("the gemm is at", pending[ref.root].loc),
                            hint="tt.wgmma_wait(0) before the access")
    for inner in eqn.blocks:
      _check_accumulators(inner, dict(pending) if name in ("cond", "switch") else pending)

