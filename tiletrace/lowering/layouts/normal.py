"""Normal form of a layout: the largest F2 core, then integer outers, sorted and merged."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

AXES = ("reg", "lane", "warp", "cta", "off", "stage")
REPLICA = -1       # an outer's `dim` when moving along it does not change the element
FIELD = 32         # bits of one tensor dimension in a packed column
MASK = (1 << FIELD) - 1


class NotALayout(AssertionError):
  """A map that is not a layout, with the axis or dimension and the reason. `notation` turns it into a user's error."""


@dataclass(frozen=True, order=True)
class Outer:
  """An integer iteration: hardware coordinate `axis += stride*i` is tensor coordinate `dim += step*i`, i < extent."""
  axis: str
  stride: int
  extent: int
  dim: int
  step: int


def field(outer: Outer) -> int:
  """The tensor bits of an outer of powers of two, which may stand in a gap of the core; 0 for any other."""
  if outer.dim == REPLICA or outer.extent & outer.extent - 1 or outer.step & outer.step - 1:
    return 0
  return (outer.extent - 1) * outer.step


def fits_above(outer: Outer, mask: int) -> bool:
  """Whether an outer stands on whole spans of the core bits `mask`, or in a gap between them."""
  return outer.step % (1 << mask.bit_length()) == 0 or (field(outer) != 0 and field(outer) & mask == 0)


def pack(vector: Sequence[int]) -> int:
  """One integer per tensor dimension -> a packed column."""
  return sum(x << FIELD * d for d, x in enumerate(vector))


def unpack(column: int, rank: int) -> tuple[int, ...]:
  return tuple(column >> FIELD * d & MASK for d in range(rank))


def normal_form(shape: tuple[int, ...], core: Mapping[str, Sequence[int]], outers: Iterable[Outer]) -> tuple[
    tuple[tuple[str, tuple[int, ...]], ...], tuple[Outer, ...]]:
  """The normal form of core columns and outers, checked; axes in the order of AXES.

  Raises:
    NotALayout: the parts overlap, leave the hull, or put an odd factor on `lane`.
  """
  columns = {a: list(c) for a, c in core.items() if len(c)}
  rest = _merge(_absorb(columns, _merge(outers), len(shape)))
  _check(shape, columns, rest)
  rest.sort(key=lambda o: (AXES.index(o.axis), o.stride))
  return tuple((a, tuple(columns[a])) for a in AXES if columns.get(a)), tuple(rest)


def _merge(outers: Iterable[Outer]) -> list[Outer]:
  """Drops extents of one and joins neighbours that are one longer iteration; sorted by axis and stride."""
  merged: list[Outer] = []
  for o in sorted(o for o in outers if o.extent > 1):
    if o.step == 0:
      o = replace(o, dim=REPLICA)
    last = merged[-1] if merged else None
    if last and last.axis == o.axis and last.dim == o.dim and o.stride == last.extent * last.stride and (
        o.dim == REPLICA or o.step == last.extent * last.step):
      merged[-1] = replace(last, extent=last.extent * o.extent)
    else:
      merged.append(o)
  return merged


def _absorb(core: dict[str, list[int]], outers: list[Outer], rank: int) -> list[Outer]:
  """Moves into the core every factor of two that stands just above it and adds without carries.

  All are taken at first; then, while a dimension has a carry or an outer that meets the core, its largest taken step
  is given back, with what lies above it on its axis. So the result depends on the map, not on how it was written.
  """
  limit: dict[str, int] = {}
  while True:
    columns = {a: list(c) for a, c in core.items()}
    rest, taken = _take(columns, outers, limit)
    masks = [0] * rank
    for column in (c for cs in core.values() for c in cs):
      for d, x in enumerate(unpack(column, rank)):
        masks[d] |= x
    bad: set[int] = set()
    for _, o in taken:
      if o.dim != REPLICA:
        if masks[o.dim] & o.step:
          bad.add(o.dim)
        masks[o.dim] |= o.step
    bad |= {o.dim for o in rest if o.dim != REPLICA and not fits_above(o, masks[o.dim])}
    victims = [(o.step, o.axis, position) for position, o in taken if o.dim in bad]
    if not victims:
      core.update(columns)
      return rest
    _, axis, position = max(victims)
    limit[axis] = position


def _take(columns: dict[str, list[int]], outers: list[Outer],
          limit: dict[str, int]) -> tuple[list[Outer], list[tuple[int, Outer]]]:
  """Extends the columns by the outers' factors of two up to a limit of bits; what is left, what was taken and where."""
  rest, taken = [], []
  for o in outers:
    bits = columns.setdefault(o.axis, [])
    while o.extent % 2 == 0 and o.stride == 1 << len(bits) and len(bits) < limit.get(o.axis, 64):
      taken.append((len(bits), o))
      bits.append(0 if o.dim == REPLICA else o.step << FIELD * o.dim)
      o = replace(o, stride=2 * o.stride, extent=o.extent // 2, step=2 * o.step)
    if o.extent > 1:
      rest.append(o)
  return rest, taken


def _check(shape: tuple[int, ...], core: Mapping[str, Sequence[int]], outers: Sequence[Outer]) -> None:
  """The invariants: iterations of an axis nest; outers stand on whole spans of the core and nest in each dimension."""
  for axis in {*core, *(o.axis for o in outers)}:
    reach = 1 << len(core.get(axis, ()))
    for o in outers:
      if o.axis != axis:
        continue
      if axis == "lane" and o.stride > reach:
        raise NotALayout(f"axis lane: no element for lanes {reach} to {o.stride - 1}; where they hold copies, "
                         f"add R[{o.stride // reach}:{reach}@lane]")
      if axis == "lane":
        raise NotALayout(f"axis lane: extent {o.extent} with stride {o.stride} is not made of powers of two that "
                          "move whole bits of a tensor dimension; odd factors belong to reg, warp, off or stage")
      if o.stride < reach:
        raise NotALayout(f"axis {axis}: stride {o.stride} of extent {o.extent} overlaps the {reach} points below it")
      reach += (o.extent - 1) * o.stride
  masks = [0] * len(shape)
  for axis, columns in core.items():
    for column in columns:
      for d, x in enumerate(unpack(column, len(shape))):
        if x >= 1 << (shape[d] - 1).bit_length():
          raise NotALayout(f"axis {axis}: step {x} leaves dimension {d} of extent {shape[d]}")
        masks[d] |= x
  for d, mask in enumerate(masks):
    chain = sorted((o for o in outers if o.dim == d), key=lambda o: o.step)
    above = [o for o in chain if o.step > mask]
    for o in chain:
      if not fits_above(o, mask):
        raise NotALayout(f"axis {o.axis}: extent {o.extent} with step {o.step} in dimension {d} meets the bits "
                         f"{mask:#b} of other axes")
      mask |= 0 if o in above else field(o)
    reach = mask + 1
    for o in above:
      if o.step % (1 << mask.bit_length()) or o.step < reach:
        raise NotALayout(f"axis {o.axis}: step {o.step} in dimension {d} overlaps the {reach} elements below it")
      reach += (o.extent - 1) * o.step
    if reach > shape[d]:
      raise NotALayout(f"dimension {d}: the layout reaches element {reach - 1}, the hull ends at {shape[d]}")
