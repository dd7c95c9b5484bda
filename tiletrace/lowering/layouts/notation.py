"""Named-axis shard, replica, offset notation: how authors write layouts and how reports print them.

`S[extents:strides]` says where each tensor element goes: the row-major index, split by the extents, moves along the
named axes by the strides. `+ R[extents:strides]` adds copies, `+ 5@warp` an offset. Nested extents are the factors of
one dimension; flat ones are grouped by the tile's shape. `wg` is four warps.

Example::

  n = S[(8, 2, 4, 2):(4@lane, 1@warp, 1@lane, 1@reg)] + R[2:4@warp] + 5@warp
  n.layout((8, 16)).apply(lane=12, warp=6, reg=1)       # (3, 9), element 57
"""
from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiletrace.core.errors import LayoutError
from tiletrace.lowering.layouts.normal import REPLICA, NotALayout, Outer
from tiletrace.lowering.layouts.relation import Layout, build

WARPS_PER_WARPGROUP = 4


@dataclass(frozen=True)
class Stride:
  """`k@axis`."""
  k: int
  axis: str

  def __repr__(self) -> str:
    return f"{self.k}@{self.axis}"


@dataclass(frozen=True)
class Axis:
  """A hardware axis; `4@lane` is a stride or an offset along it."""
  name: str
  unit: int = 1

  def __rmatmul__(self, k: int) -> Stride:
    if isinstance(k, bool) or not isinstance(k, int):
      raise LayoutError(f"stride {k!r} on axis {self.name} is not an integer")
    return Stride(k * self.unit, "warp" if self.name == "wg" else self.name)

  def __str__(self) -> str:
    return self.name


lane, warp, reg, cta, off, stage = (Axis(a) for a in ("lane", "warp", "reg", "cta", "off", "stage"))
wg = Axis("wg", WARPS_PER_WARPGROUP)
AXIS_OBJECTS = {a.name: a for a in (reg, lane, warp, wg, cta, off, stage)}


@dataclass(frozen=True)
class Iter:
  extent: int
  stride: Stride | None          # None only where the extent is one


@dataclass(frozen=True)
class Notation:
  """A written layout; `layout(shape)` gives its relation.

  Attributes:
    shard: iterations per tensor dimension, or one flat group when `grouped` is false.
    grouped: whether the author nested the factors of each dimension.
    replica, offset: copies and offsets.
    swizzles: (b, m): offset bits [m, m+b) ^= bits [m+3, m+3+b).
    extents: true extents, where the written ones include padding.
  """
  shard: tuple[tuple[Iter, ...], ...]
  grouped: bool
  replica: tuple[Iter, ...] = ()
  offset: tuple[Stride, ...] = ()
  swizzles: tuple[int, int] | None = None
  extents: tuple[int, ...] | None = None

  def __add__(self, other: object) -> Notation:
    if isinstance(other, Replica):
      return replace(self, replica=self.replica + other.iters)
    if isinstance(other, Stride):
      if other.k < 0:
        raise LayoutError(f"offset {other} is negative")
      return replace(self, offset=(*self.offset, other))
    raise LayoutError(f"{other!r} cannot be added to a layout",
                      hint="add R[extent:stride@axis] or an offset such as 5@warp")

  def swizzle(self, b: int, m: int) -> Notation:
    """XORs offset bits [m, m+b) with bits [m+3, m+3+b), as the hardware's swizzles do."""
    return replace(self, swizzles=(b, m))

  def valid(self, *extents: int) -> Notation:
    """The true extents of a tile whose written extents are padded."""
    return replace(self, extents=extents)

  def layout(self, shape: Sequence[int] | None = None) -> Layout:
    """The relation over a tile of `shape`; by default the extents as written.

    Raises:
      LayoutError: with the axis or dimension and the reason.
    """
    groups = self._group(None if shape is None else tuple(shape))
    outers: list[Outer] = []
    for d, group in enumerate(groups):
      step = 1
      for i in reversed(group):
        if i.extent > 1:
          if i.stride is None or i.stride.k <= 0:
            raise LayoutError(f"dimension {d}: extent {i.extent} with stride {i.stride or 0} puts several elements on "
                              "one hardware point",
                              hint="strides are positive; copies of an element are written R[...]")
          outers.append(Outer(i.stride.axis, i.stride.k, i.extent, d, step))
        step *= i.extent
    for i in self.replica:
      if i.stride is None or i.stride.k <= 0:
        raise LayoutError(f"replica of extent {i.extent} has stride {i.stride or 0}")
      outers.append(Outer(i.stride.axis, i.stride.k, i.extent, REPLICA, 0))
    origin: dict[str, int] = {}
    for o in self.offset:
      origin[o.axis] = origin.get(o.axis, 0) + o.k
    hull = tuple(_product(g) for g in groups)
    try:
      layout = build(hull, {}, outers, origin=origin)
      layout = self._finish(layout, shape)
    except NotALayout as e:
      raise LayoutError(f"{self.text()} is not a layout: {e}") from None
    lanes = layout.start("lane") + layout.extent("lane")
    if lanes > 32:
      raise LayoutError(f"axis lane: {lanes} lanes are named, a warp has 32")
    return layout

  def _finish(self, layout: Layout, shape: Sequence[int] | None) -> Layout:
    if self.swizzles:
      b, m = self.swizzles
      columns = list(layout.columns("off"))
      if m + 3 + b > len(columns):
        raise NotALayout(f"axis off: swizzle({b}, {m}) needs {m + 3 + b} bits of offset, the layout has {len(columns)}")
      for i in range(m + 3, m + 3 + b):
        columns[i] ^= columns[i - 3]
      layout = build(layout.shape, {**dict(layout.core), "off": columns}, layout.outers, origin=dict(layout.origin))
    valid = self.extents or shape
    return layout if valid is None else layout.with_valid(valid)

  def _group(self, shape: tuple[int, ...] | None) -> tuple[tuple[Iter, ...], ...]:
    """The iterations of each dimension."""
    if self.grouped or shape is None:
      groups = self.shard if self.grouped else tuple((i,) for i in self.shard[0])
      written = tuple(_product(g) for g in groups)
      target = written if shape is None or self.extents else shape
      if written != target:
        raise LayoutError(f"{self.text()} has extents {written}, the tile is {shape}")
      return groups
    rest = list(self.shard[0])
    groups = []
    for d, extent in enumerate(shape):
      group: list[Iter] = []
      while _product(group) < extent and rest:
        group.append(rest.pop(0))
      if _product(group) != extent:
        raise LayoutError(f"{self.text()}: extents {tuple(i.extent for i in group)} do not multiply to {extent}, "
                          f"dimension {d} of the tile {shape}")
      groups.append(tuple(group))
    if any(i.extent > 1 for i in rest):
      raise LayoutError(f"{self.text()} has {_product(self.shard[0])} elements, the tile {shape} has fewer")
    return tuple(groups)

  def text(self) -> str:
    """The notation as written."""
    def side(groups: Sequence[Sequence[Iter]], pick) -> str:
      nested = ["(" + ", ".join(str(pick(i)) for i in g) + ")" if self.grouped and len(g) > 1 else
                ", ".join(str(pick(i)) for i in g) for g in groups]
      return "(" + ", ".join(nested) + ")"
    out = f"S[{side(self.shard, lambda i: i.extent)}:{side(self.shard, lambda i: i.stride or 0)}]"
    for i in self.replica:
      out += f" + R[{i.extent}:{i.stride}]"
    return out + "".join(f" + {o}" for o in self.offset)


def _product(iters: Sequence[Iter]) -> int:
  total = 1
  for i in iters:
    total *= i.extent
  return total


@dataclass(frozen=True)
class Replica:
  iters: tuple[Iter, ...]


def _iters(letter: str, extents: object, strides: object) -> tuple[Iter, ...] | Iter:
  """Pairs extents with strides, which must nest alike."""
  if isinstance(extents, tuple) or isinstance(strides, tuple):
    if not (isinstance(extents, tuple) and isinstance(strides, tuple) and len(extents) == len(strides)):
      raise LayoutError(f"{letter}[{extents}:{strides}]: extents and strides differ in structure",
                        hint="write one stride for each extent, nested the same way")
    flat = [_iters(letter, e, s) for e, s in zip(extents, strides)]
    return tuple(i for f in flat for i in (f if isinstance(f, tuple) else (f,)))
  if isinstance(extents, bool) or not isinstance(extents, int) or extents < 1:
    raise LayoutError(f"{letter}[...]: extent {extents!r} is not a positive integer")
  if isinstance(strides, Stride):
    return Iter(extents, strides)
  if extents == 1 and strides == 0:
    return Iter(1, None)
  raise LayoutError(f"{letter}[...]: stride {strides!r} of extent {extents} names no axis",
                    hint=f"write {strides}@reg, @lane, @warp, @wg, @cta, @off or @stage")


def _sides(letter: str, item: object) -> tuple[object, object]:
  if not isinstance(item, slice) or item.step is not None:
    raise LayoutError(f"{letter}[{item!r}] has no strides", hint=f"write {letter}[(8, 4):(4@lane, 1@reg)]")
  return item.start, item.stop


class _Shard:
  def __getitem__(self, item: object) -> Notation:
    extents, strides = _sides("S", item)
    if not isinstance(extents, tuple):
      extents, strides = (extents,), (strides,)
    if not isinstance(strides, tuple) or len(extents) != len(strides):
      raise LayoutError(f"S[{extents}:{strides}]: extents and strides differ in structure",
                        hint="write one stride for each extent, nested the same way")
    groups = [_iters("S", e, s) for e, s in zip(extents, strides)]
    grouped = not groups or any(isinstance(g, tuple) for g in groups)
    tuples = tuple(g if isinstance(g, tuple) else (g,) for g in groups)
    return Notation(tuples if grouped else (tuple(i for g in tuples for i in g),), grouped)


class _Replica:
  def __getitem__(self, item: object) -> Replica:
    found = _iters("R", *_sides("R", item))
    return Replica(found if isinstance(found, tuple) else (found,))


S = _Shard()
R = _Replica()


def parse(text: str, shape: Sequence[int] | None = None) -> Layout:
  """Reads notation, as authors write it and `str(layout)` prints it.

  Example: `parse(str(layout)) == layout` for every layout that has a notation.
  """
  try:
    tree = ast.parse(text.strip(), mode="eval")
  except SyntaxError as e:
    raise LayoutError(f"{text!r} is not layout notation: {e.msg} at column {e.offset}") from None
  found = _evaluate(tree.body, text)
  if not isinstance(found, Notation):
    raise LayoutError(f"{text!r} is not layout notation: it has no S[...]")
  return found.layout(shape)


def _evaluate(node: ast.expr, text: str):
  """The few forms that notation has; nothing else is run."""
  def go(n: ast.expr):
    return _evaluate(n, text)

  match node:
    case ast.Constant(value=int() as value):
      return value
    case ast.Name(id=name) if name in AXIS_OBJECTS:
      return AXIS_OBJECTS[name]
    case ast.Tuple(elts=elts):
      return tuple(go(e) for e in elts)
    case ast.Subscript(value=ast.Name(id="S" | "R" as letter), slice=ast.Slice(step=None) as cut):
      if cut.lower is not None and cut.upper is not None:
        item = slice(go(cut.lower), go(cut.upper))
        return S[item] if letter == "S" else R[item]
    case ast.BinOp(left=left, op=ast.MatMult(), right=right):
      k, axis = go(left), go(right)
      if isinstance(axis, Axis):
        return k @ axis
    case ast.BinOp(left=left, op=ast.Add(), right=right):
      whole = go(left)
      if isinstance(whole, Notation):
        return whole + go(right)
    case ast.Call(func=ast.Attribute(value=value, attr="swizzle" | "valid" as attr), args=args, keywords=[]):
      whole = go(value)
      if isinstance(whole, Notation):
        return getattr(whole, attr)(*(go(a) for a in args))
  part = ast.get_source_segment(text.strip(), node)
  raise LayoutError(f"{text!r} is not layout notation: {part!r} is not S[...], R[...], k@axis or a sum of them",
                    hint="the axes are " + ", ".join(AXIS_OBJECTS))
