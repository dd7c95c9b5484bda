"""The layout relation: hardware point -> tensor element, as an F2 core plus integer outers.

Every hardware point has one element (a function). Replication is the kernel of the map; elements that no point
holds are missing from its image. The hardware axes are `reg`, `lane`, `warp`, `cta` of a fragment and `off`
(elements), `stage` of shared memory. `warp` counts the warps of the owning scope, four to a warpgroup:
`apply(wg=1, warp=2)` is `apply(warp=6)`.

The map of one point: write each axis coordinate minus the origin as `core + sum(i_k * stride_k)`; the element is
the XOR of the core's columns at the one bits of the core parts, plus `sum(i_k * step_k)`. Outers stand above the core
on their axis; in the tensor they stand on whole spans of it or in its gaps, so sums never carry into it. `build` takes
every factor of two into the core that can go there: equal maps are equal values, whatever they were written as.

Example::

  acc = make({"reg": 48, "lane": 32, "warp": 4}, (64, 96), lambda reg, lane, warp: (
    16 * warp + lane // 4 + 8 * (reg // 2 % 2), 8 * (reg // 4) + 2 * (lane % 4) + reg % 2))
  acc.apply(reg=5, lane=9, warp=1)      # (18, 11)
  acc.is_injective(), acc.extent("reg") # (True, 48)
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from tiletrace.lowering.layouts import f2
from tiletrace.lowering.layouts.normal import AXES, FIELD, REPLICA, NotALayout, Outer, field, normal_form, pack, unpack
from tiletrace.lowering.layouts.text import layout_text


@dataclass(frozen=True)
class Kernel:
  """The replication of a layout.

  Attributes:
    bits: generators of the core's kernel; each lists (axis, XOR mask) of a move that changes no element.
    outers: the replicated outers.
  """
  bits: tuple[tuple[tuple[str, int], ...], ...]
  outers: tuple[Outer, ...]

  @property
  def size(self) -> int:
    """Number of copies of each element."""
    return 2 ** len(self.bits) * math.prod(o.extent for o in self.outers)

  def masks(self, axis: str) -> tuple[int, ...]:
    """XOR masks of the generators that move along `axis` alone."""
    return tuple(g[0][1] for g in self.bits if len(g) == 1 and g[0][0] == axis)


@dataclass(frozen=True)
class Layout:
  """A layout in normal form; build one with `build`, `make`, or the constructors of this package.

  Attributes:
    shape: extents of the hull, one per tensor dimension.
    valid: true extents, at most the hull's; elements beyond them are padding.
    core: (axis, packed columns) per axis with core bits, in the order of AXES.
    outers: integer iterations, by axis and stride.
    origin: (axis, first coordinate) where it is not zero.
  """
  shape: tuple[int, ...]
  valid: tuple[int, ...]
  core: tuple[tuple[str, tuple[int, ...]], ...]
  outers: tuple[Outer, ...] = ()
  origin: tuple[tuple[str, int], ...] = ()

  def __str__(self) -> str:
    return layout_text(self)

  # --- the axes

  @property
  def rank(self) -> int:
    return len(self.shape)

  @cached_property
  def axes(self) -> tuple[str, ...]:
    """Hardware axes with more than one point or an origin, in the order of AXES."""
    present = {a for a, _ in self.core} | {o.axis for o in self.outers} | {a for a, _ in self.origin}
    return tuple(a for a in AXES if a in present)

  def columns(self, axis: str) -> tuple[int, ...]:
    """Packed core columns of an axis."""
    return dict(self.core).get(axis, ())

  def outers_of(self, axis: str) -> tuple[Outer, ...]:
    return tuple(o for o in self.outers if o.axis == axis)

  def start(self, axis: str) -> int:
    """First coordinate of an axis."""
    return dict(self.origin).get(axis, 0)

  def extent(self, axis: str) -> int:
    """Coordinates of an axis from its origin to its last point, holes included: elements a thread, of a buffer."""
    return (1 << len(self.columns(axis))) + sum((o.extent - 1) * o.stride for o in self.outers_of(axis))

  # --- the map

  def _split(self, axis: str, x: int) -> tuple[int, int] | None:
    """(XOR part, sum part) of the element at a coordinate, packed; None in a hole."""
    total = 0
    for o in reversed(self.outers_of(axis)):
      i, x = divmod(x, o.stride)
      if i >= o.extent:
        return None
      total += 0 if o.dim == REPLICA else i * o.step << FIELD * o.dim
    columns = self.columns(axis)
    return None if x >> len(columns) else (f2.apply(columns, x), total)

  def apply(self, **hw: int) -> tuple[int, ...]:
    """The tensor element of a hardware point. Missing axes stand at their origin; `wg=i` adds four warps each."""
    wg = hw.pop("wg", 0)
    if wg:
      hw["warp"] = hw.get("warp", self.start("warp")) + 4 * wg
    xor = total = 0
    for axis, x in hw.items():
      assert axis in AXES, f"unknown hardware axis {axis!r}"
      part = self._split(axis, x - self.start(axis)) if x >= self.start(axis) else None
      assert part is not None, f"{axis}={x} holds no element of {self}"
      xor, total = xor ^ part[0], total + part[1]
    return unpack(xor + total, self.rank)

  def table(self, axes: Sequence[str] | None = None) -> np.ndarray:
    """Every point's element: int32 [*extents of axes, rank], -1 in holes. Axes not listed stand at their origin."""
    axes = self.axes if axes is None else tuple(axes)
    parts = [self._axis_table(axis) for axis in axes]
    lead = [(slice(None), *(None,) * (len(axes) - k - 1)) for k in range(len(axes))]
    shape = tuple(len(h) for _, _, h in parts)
    out = np.empty((self.rank, *shape), np.int32)        # dimension first: whole rows for numpy's inner loops
    for d in range(self.rank):
      xor, total = np.int32(0), np.int32(0)
      for (x, t, _), at in zip(parts, lead):
        if x[:, d].any():
          xor = xor ^ x[:, d][at]
        if t[:, d].any():
          total = total + t[:, d][at]
      out[d] = xor + total
    for (_, _, h), at in zip(parts, lead):
      if h.any():
        out[:, np.broadcast_to(h[at], shape)] = -1
    return np.moveaxis(out, 0, -1)

  def _axis_table(self, axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rest = np.arange(self.extent(axis), dtype=np.int32)
    total = np.zeros((rest.size, self.rank), np.int32)
    hole = np.zeros(rest.size, bool)
    for o in reversed(self.outers_of(axis)):
      i, rest = rest // o.stride, rest % o.stride
      hole |= i >= o.extent
      if o.dim != REPLICA:
        total[:, o.dim] += i * o.step
    columns = self.columns(axis)
    core = np.zeros((1, self.rank), np.int32)
    for column in columns:
      core = np.concatenate([core, core ^ np.array(unpack(column, self.rank), np.int32)])
    hole |= rest >= len(core)
    return core[np.minimum(rest, len(core) - 1)], total, hole

  # --- the inverse

  @cached_property
  def _echelon(self) -> tuple[dict[int, tuple[int, int]], list[int]]:
    return f2.echelon([c for _, columns in self.core for c in columns])

  def _point(self, combination: int) -> dict[str, int]:
    """A set of core columns as a coordinate per axis."""
    out = {}
    for axis, columns in self.core:
      out[axis] = combination & (1 << len(columns)) - 1
      combination >>= len(columns)
    return out

  def inverse_tables(self, axis: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per tensor dimension, (XOR part, sum part) of the axis coordinate over that dimension's indices, int64.

    The coordinate of element x is origin + XOR_d xor_d[x_d] + sum_d sum_d[x_d], for the copy whose free bits are zero.
    Past the hull the topmost iteration or bit goes on, so a larger padded fragment can be addressed (and masked).
    """
    return self._inverse(axis, self.shape)

  @lru_cache(maxsize=512)  # noqa: B019 (layouts are values; the cache is bounded)
  def _inverse(self, axis: str, extents: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    out = []
    for d, extent in enumerate(extents):
      rest = np.arange(extent, dtype=np.int64)
      total = np.zeros(extent, np.int64)
      above, gaps = self._chain(d)
      if not above:
        total += rest // self.shape[d] * self._beyond(axis, d)
        rest = rest % self.shape[d]
      for o in reversed(above):
        total += rest // o.step * (o.stride if o.axis == axis else 0)
        rest = rest % o.step
      for o in gaps:
        total += (rest & field(o)) // o.step * (o.stride if o.axis == axis else 0)
        rest = rest & ~field(o)
      mask = self._masks[d]
      assert not extent or not (rest & ~mask).any(), f"dimension {d} is not covered by {self}"
      xor = np.zeros(1 << mask.bit_length(), np.int64)
      for b in f2.bits_of(mask):
        combination = f2.solve(self._echelon[0], 1 << FIELD * d + b)
        assert combination is not None, f"bit {b} of dimension {d} is not in the image of {self}"
        half = 1 << b
        xor[half:2 * half] = xor[:half] ^ self._point(combination).get(axis, 0)
      out.append((xor[rest], total))
    return out

  def _beyond(self, axis: str, d: int) -> int:
    """Coordinates from the hull's first element to the first one past it along `d`, as if the core had one bit more."""
    if not self._masks[d]:
      return self.extent(axis)
    combination = f2.solve(self._echelon[0], 1 << FIELD * d + self._masks[d].bit_length() - 1)
    assert combination is not None
    return 1 << self._point(combination).get(axis, 0).bit_length()

  @cached_property
  def _masks(self) -> tuple[int, ...]:
    """Per dimension, the bits that core columns touch."""
    masks = [0] * self.rank
    for _, columns in self.core:
      for c in columns:
        for d, x in enumerate(unpack(c, self.rank)):
          masks[d] |= x
    return tuple(masks)

  def _chain(self, d: int) -> tuple[list[Outer], list[Outer]]:
    """Outers of a dimension by step: those above the core's span, those in its gaps."""
    chain = sorted((o for o in self.outers if o.dim == d), key=lambda o: o.step)
    return [o for o in chain if o.step > self._masks[d]], [o for o in chain if o.step <= self._masks[d]]

  def coordinates(self, axis: str, index: Sequence[np.ndarray | np.integer],
                  extents: tuple[int, ...] | None = None) -> np.ndarray:
    """Axis coordinate of many elements: `index` holds one broadcastable integer array per dimension."""
    xor, total = np.int64(0), np.int64(self.start(axis))
    for x, (x_d, sum_d) in zip(index, self._inverse(axis, extents or self.shape)):
      xor, total = xor ^ x_d[x], total + sum_d[x]
    return np.asarray(xor + total)

  def locate(self, index: Sequence[int]) -> dict[str, int]:
    """A hardware point that holds the element: the copy whose free coordinates are at the origin."""
    return {axis: int(self.coordinates(axis, [np.int64(i) for i in index])) for axis in self.axes}

  def offset_of(self, index: Sequence[int]) -> int:
    """Element offset in shared memory of a tensor index."""
    assert len(index) == self.rank
    return int(self.coordinates("off", [np.int64(i) for i in index]))

  # --- queries

  def is_injective(self) -> bool:
    """Whether no element has two copies."""
    return self.kernel().size == 1

  def is_surjective(self) -> bool:
    """Whether every element of the hull has a point."""
    for d, mask in enumerate(self._masks):
      above, gaps = self._chain(d)
      reach = 1 + (mask | sum(field(o) for o in gaps))
      for o in above:
        if o.step != reach:
          return False
        reach *= o.extent
      if reach != self.shape[d]:
        return False
    return len(self._echelon[0]) == sum(m.bit_count() for m in self._masks)

  def kernel(self) -> Kernel:
    bits = tuple(tuple((a, x) for a, x in self._point(k).items() if x) for k in self._echelon[1])
    return Kernel(bits, tuple(o for o in self.outers if o.dim == REPLICA))

  def key(self) -> Hashable:
    """Cache key: the normal form."""
    return self.shape, self.valid, self.core, self.outers, self.origin

  # --- transfer functions

  def permute(self, perm: Sequence[int]) -> Layout:
    """Transpose: dimension i of the result is dimension perm[i]."""
    return self._select(list(perm))

  def project(self, dims: Iterable[int]) -> Layout:
    """The dimensions `dims` go; points that differed only there become copies (a reduction's or a slice's layout)."""
    gone = set(dims)
    return self._select([d for d in range(self.rank) if d not in gone])

  def expand_dims(self, dim: int) -> Layout:
    """A new dimension of extent one at position `dim`."""
    order: list[int | None] = list(range(self.rank))
    order.insert(dim, None)
    return self._select(order)

  def _select(self, order: Sequence[int | None]) -> Layout:
    """Dimension i of the result is dimension order[i] of this one, or new and of extent one."""
    place = {d: i for i, d in enumerate(order) if d is not None}
    core = {}
    for axis, columns in self.core:
      vectors = (unpack(c, self.rank) for c in columns)
      core[axis] = [pack([0 if d is None else v[d] for d in order]) for v in vectors]
    outers = [replace(o, dim=place[o.dim]) if o.dim in place else replace(o, dim=REPLICA, step=0) for o in self.outers]
    shape, valid = (tuple(1 if d is None else s[d] for d in order) for s in (self.shape, self.valid))
    return build(shape, core, outers, valid=valid, origin=dict(self.origin))

  def restrict(self, *axes: str) -> Layout:
    """Only the points whose other coordinates stand at their origin."""
    core = {a: c for a, c in self.core if a in axes}
    origin = {a: x for a, x in self.origin if a in axes}
    return build(self.shape, core, [o for o in self.outers if o.axis in axes], valid=self.valid, origin=origin)

  def repeat(self, axis: str, extent: int, dim: int, *, step: int | None = None, stride: int | None = None) -> Layout:
    """`extent` copies of the layout along a hardware axis and a tensor dimension (REPLICA for plain copies).

    The stride defaults to the axis' present extent, the step to the dimension's.
    """
    shape, valid = list(self.shape), list(self.valid)
    step = 0 if dim == REPLICA else shape[dim] if step is None else step
    if dim != REPLICA:
      shape[dim] += (extent - 1) * step
      valid[dim] += (extent - 1) * step
    outer = Outer(axis, self.extent(axis) if stride is None else stride, extent, dim, step)
    return build(shape, dict(self.core), [*self.outers, outer], valid=valid, origin=dict(self.origin))

  def with_valid(self, valid: Sequence[int]) -> Layout:
    assert len(valid) == self.rank and all(v <= s for v, s in zip(valid, self.shape)), (valid, self.shape)
    return replace(self, valid=tuple(valid))

  def with_origin(self, **origin: int) -> Layout:
    return replace(self, origin=_origin({**dict(self.origin), **origin}))


def _origin(origin: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
  return tuple((a, origin[a]) for a in AXES if origin.get(a))


def build(shape: Sequence[int], core: Mapping[str, Sequence[int]], outers: Iterable[Outer] = (), *,
          valid: Sequence[int] | None = None, origin: Mapping[str, int] | None = None) -> Layout:
  """A layout in normal form from packed core columns and outers.

  Raises:
    NotALayout: the parts overlap, leave the hull, or put an odd factor on `lane`.
  """
  shape = tuple(shape)
  columns, rest = normal_form(shape, core, outers)
  return Layout(shape, shape if valid is None else tuple(valid), columns, rest, _origin(origin or {}))


def make(axes: Mapping[str, int], shape: Sequence[int], fn: Callable[..., Sequence], *,
         valid: Sequence[int] | None = None) -> Layout:
  """A layout from its formula, proven by enumeration of every point.

  Args:
    axes: extent of each hardware axis.
    shape: extents of the tensor.
    fn: called once with an open mesh of integer arrays by axis name; returns one array (or int) per tensor dimension.
    valid: true extents, by default `shape`.

  Raises:
    NotALayout: the formula is not an F2 core plus outers.
  """
  mesh = np.ogrid[tuple(slice(0, e) for e in axes.values())] if axes else ()
  index = fn(**{a: np.asarray(m) for a, m in zip(axes, mesh)})
  table = np.stack([np.broadcast_to(np.asarray(x), tuple(axes.values())) for x in index], axis=-1) if len(index) else (
    np.zeros((*axes.values(), 0), np.int64))
  return fit(tuple(axes), tuple(shape), table, valid=valid)


def fit(axes: Sequence[str], shape: Sequence[int], table: np.ndarray, *, valid: Sequence[int] | None = None) -> Layout:
  """The layout whose `table(axes)` is `table`, or NotALayout.

  A run of even length may be an outer or begin with a core bit: each axis is read with outers only, with bits for
  steps that are one bit, and with bits for all. (An axis that needs several-bit steps of both kinds is refused too; no
  hardware map is of that kind.)
  """
  if table[(0,) * len(axes)].any():
    raise NotALayout("the first point does not hold the first element")
  lines = [table[tuple(slice(None) if i == k else 0 for i in range(len(axes)))] for k in range(len(axes))]
  reason = None
  for widest in itertools.product((0, 1, FIELD), repeat=len(axes)):
    try:
      parts = [_fit_axis(axis, line, width) for axis, line, width in zip(axes, lines, widest)]
      layout = build(shape, {a: c for a, (c, _) in zip(axes, parts)}, [o for _, found in parts for o in found],
                     valid=valid)
    except NotALayout as e:
      reason = reason or e
      continue
    if np.array_equal(layout.table(axes), table):
      return layout
  raise reason or NotALayout(f"not linear over {', '.join(axes)}")


def _fit_axis(axis: str, line: np.ndarray, widest: int) -> tuple[list[int], list[Outer]]:
  """Core columns and outers of the map along one axis, from below: runs of one step, and columns of bits.

  A step of at most `widest` one bits begins a column where it can.
  """
  columns: list[int] = []
  outers: list[Outer] = []
  done = 1
  while done < len(line):
    step = line[done]
    left = len(line) // done
    is_bit = left % 2 == 0 and done & done - 1 == 0 and bool((line[done:2 * done] == line[:done] ^ step).all())
    run = _longest_run(line, done)
    if run > 1 and not (is_bit and run % 2 == 0 and np.bitwise_count(step).sum() <= widest):
      dim = int(np.flatnonzero(step)[0]) if step.any() else REPLICA
      outers.append(Outer(axis, done, run, dim, int(step[dim]) if step.any() else 0))
      done *= run
    elif is_bit:
      columns, outers = [pack([int(x) for x in line[1 << b]]) for b in range(done.bit_length())], []
      done *= 2
    else:
      raise NotALayout(f"axis {axis}: neither arithmetic nor linear over bits at {axis}={done}")
  return columns, outers


def _longest_run(line: np.ndarray, done: int) -> int:
  """Blocks of `done` points that repeat with one step along one dimension; a divisor of their number."""
  step, left = line[done], len(line) // done
  if np.count_nonzero(step) > 1:
    return 1
  blocks = line[:left * done].reshape(left, done, -1)
  good = (blocks == line[:done] + np.arange(left)[:, None, None] * step).all(axis=(1, 2))
  return max(r for r in range(1, left + 1) if left % r == 0 and good[:r].all())
