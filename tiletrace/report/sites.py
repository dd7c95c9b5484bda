"""Where the equations of a scheduled program stand: which threads run them, and how often."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tiletrace.core.graph import Block, Eqn
from tiletrace.lowering.facts import Facts

WARP, WARPGROUP = 32, 128


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
  """Neighbouring warpgroups that run the same code; `registers`: what setmaxnreg gives a thread, None: as launched."""
  first: int
  count: int
  registers: int | None = None

  def __str__(self) -> str:
    last = self.first + self.count - 1
    return f"warpgroup {self.first}" if self.count == 1 else f"warpgroups {self.first}-{last}"

  @property
  def threads(self) -> int:
    return WARPGROUP * self.count


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Site:
  """One equation in its place.

  Attributes:
    elected: "scope" or "warpgroup" where one thread, or one of each warpgroup, runs it; else None.
    trips: how often, in one program (of a persistent kernel: in one tile): the product of the loops' trip counts. Of a
      loop whose count is not known it is the fewest, of a while loop one.
    exact: whether all counts are known and no branch stands around it, but for one that a tile takes once.
    loop: the outermost loop around it, or None.
  """
  eqn: Eqn
  role: Role
  elected: str | None = None
  trips: int = 1
  exact: bool = True
  loop: Eqn | None = None


def sites(block: Block, facts: Facts, threads: int, *, tiles: bool = False) -> Iterator[Site]:
  """Every equation of a program, outer before inner, in program order.

  Args:
    threads: of a CTA.
    tiles: the kernel is persistent: the outermost loop of a role, where its count is not known, is the one over tiles.
  """
  yield from _sites(block, facts, Site(None, Role(0, threads // WARPGROUP)), tiles)  # type: ignore[arg-type]


def _sites(block: Block, facts: Facts, around: Site, tiles: bool) -> Iterator[Site]:
  for eqn in block.eqns:
    here = dataclasses.replace(around, eqn=eqn)
    yield here
    inner, inner_tiles, name = here, tiles, eqn.primitive.name
    if name == "warpgroup":
      inner = dataclasses.replace(here, role=Role(eqn.params["first"], eqn.params["count"], eqn.params["regs"]))
    elif name == "elect":
      inner = dataclasses.replace(here, elected=eqn.params["each"])
    elif name in ("for_loop", "while_loop"):
      trips, exact = trip_count(eqn, facts)
      over_tiles = tiles and not exact
      inner_tiles = tiles and not over_tiles
      inner = dataclasses.replace(here, trips=here.trips * (1 if over_tiles else trips),
                                  exact=here.exact and (exact or over_tiles), loop=here.loop or eqn)
    elif eqn.blocks and not eqn.params.get("once_a_tile"):     # what a deferred epilogue's branches do in all
      inner = dataclasses.replace(here, exact=False)
    for inside in eqn.blocks:
      yield from _sites(inside, facts, inner, inner_tiles)


def trip_count(loop: Eqn, facts: Facts) -> tuple[int, bool]:
  """(the fewest trips that are possible, whether there are no more); one trip, where not even that is known."""
  if loop.primitive.name != "for_loop":
    return 1, False
  lo, hi, step = (facts[a] for a in loop.values[:3])
  if step.lo != step.hi or step.lo == 0 or abs(hi.lo - lo.hi) >= 2**31:
    return 1, False
  return len(range(lo.hi, hi.lo, step.lo)), lo.lo == lo.hi and hi.lo == hi.hi
