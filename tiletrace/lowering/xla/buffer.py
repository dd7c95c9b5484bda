"""References as arrays: reading and writing views of them, out of bounds as DESIGN says, with jax ops.

A reference is held as one array that may be larger than the reference (an overhang on each side, so that a tile that
hangs over an edge is one slice) or that may be a part of it (the cell that one program owns). What lies in the overhang
is junk: loads mask it, stores drop their out-of-bounds elements into it.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from tiletrace.core.dtypes import is_float, range_of
from tiletrace.core.graph import Atom, RefOperand, TileGraph, Var, walk
from tiletrace.core.types import Dyn, RefType, ViewDim
from tiletrace.lowering.xla.ranges import Range, Ranges

Scalar = int | np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class CellOrigin:
  """Where a program's cell begins along a dimension: `value`, which is `lo` plus an affine form in the program ids.

  Every access of the dimension has that form and a rest >= lo, and ends inside the cell.
  """
  value: jax.Array
  lo: int


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
  """Where the array of a reference lies: `origin` is the reference's coordinate of the array's first element."""
  origin: tuple[int | CellOrigin, ...]
  shape: tuple[int, ...]


def poison(dtype: np.dtype) -> np.ndarray:
  """What memory holds before it is written: NaN, INT_MIN, the greatest unsigned, False."""
  if is_float(dtype):
    return np.asarray(np.nan, dtype)
  lo, hi = range_of(dtype)
  return np.asarray(False if dtype == np.bool_ else lo or hi, dtype)


def poisoned(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
  return lax.full(shape, poison(dtype), dtype)


def span(dim: ViewDim) -> int:
  """How many elements of the root lie between the first and the last of a view's dimension, both included."""
  assert isinstance(dim.size, int)
  return (dim.size - 1) * dim.stride + 1


def overhangs(graph: TileGraph, ranges: Ranges) -> dict[Var, tuple[tuple[int, int], ...]]:
  """For each reference that is accessed: how far its views reach before and past each dimension, at most.

  A start of which nothing is known is clamped to one that is wholly outside, so a view's span is always enough.
  """
  out: dict[Var, tuple[tuple[int, int], ...]] = {}
  for eqn in walk(graph.body):
    for ref in eqn.refs:
      new = tuple(_overhang(ranges, ref, d) for d in range(len(ref.view.dims)))
      old = out.get(ref.root, new)
      out[ref.root] = tuple((max(a, c), max(b, d)) for (a, b), (c, d) in zip(old, new))
  return out


def _overhang(ranges: Ranges, ref: RefOperand, d: int) -> tuple[int, int]:
  dim, extent = ref.view.dims[d], ref.type.shape[d]
  n, r = span(dim), ranges.of_part(dim.start, ref.dyn)
  if r is None:
    return n, n
  lo, hi = ranges.bounds(r)
  return min(n, max(0, -lo)), min(n, max(0, hi + n - extent))


def padded_frame(type: RefType, overhang: Sequence[tuple[int, int]]) -> Frame:
  return Frame(tuple(-lo for lo, _ in overhang), tuple(lo + n + hi for n, (lo, hi) in zip(type.shape, overhang)))


def pad(array: jax.Array, overhang: Sequence[tuple[int, int]]) -> jax.Array:
  """The array with junk (poison) around it."""
  if not any(map(any, overhang)):
    return array
  return lax.pad(array, poison(array.dtype), [(lo, hi, 0) for lo, hi in overhang])


def crop(array: jax.Array, overhang: Sequence[tuple[int, int]]) -> jax.Array:
  if not any(map(any, overhang)):
    return array
  return lax.pad(array, poison(array.dtype), [(-lo, -hi, 0) for lo, hi in overhang])


class Window:
  """One access to a reference: where its elements lie in the array, and which of them exist.

  Args:
    ref: the operand.
    frame: where the root's array lies.
    ranges: what is known of index scalars.
    read: the value of an atom.
  """

  def __init__(self, ref: RefOperand, frame: Frame, ranges: Ranges, read: Callable[[Atom], jax.Array | np.ndarray]):
    self.ref, self.frame, self.ranges, self._read = ref, frame, ranges, read
    self.dims = ref.view.dims
    self.spans = tuple(map(span, self.dims))
    self.positions = tuple(map(self._position, range(len(self.dims))))
    self.is_whole = (self.spans == frame.shape and ref.view.perm == tuple(range(len(self.dims)))
                     and all(d.stride == 1 for d in self.dims) and all(type(p) is int for p in self.positions))

  def _part(self, part: int | Dyn) -> Scalar:
    if not isinstance(part, Dyn):
      return part
    value = self._read(self.ref.dyn[part.index])
    return int(value) if isinstance(value, np.ndarray) else value

  def _range(self, part: int | Dyn) -> Range | None:
    return self.ranges.of_part(part, self.ref.dyn)

  def _position(self, d: int) -> Scalar:
    """The window's first element in the array, clamped into the overhang when it may be farther out."""
    origin, limit = self.frame.origin[d], self.frame.shape[d] - self.spans[d]
    start, r = self._part(self.dims[d].start), self._range(self.dims[d].start)
    if isinstance(origin, CellOrigin):
      assert r is not None
      return r.lo - origin.lo if r.lo == r.hi else start - origin.value
    position = start if origin == 0 else start - origin
    if isinstance(position, int):
      return min(max(position, 0), limit)
    if r is not None:
      lo, hi = self.ranges.bounds(r)
      if lo >= origin and hi - origin <= limit:
        return position
    return lax.clamp(np.int32(0), position, np.int32(limit))

  def _limits(self, d: int, *, bounds: bool) -> list[tuple[int | Dyn | None, int | Dyn | None]]:
    """The half-open ranges that the elements must lie in and that are not proven: None where an end is."""
    dim = self.dims[d]
    ends = [*dim.edges, *([(0, self.ref.type.shape[d])] if bounds else [])]
    start, n, out = self._range(dim.start), self.spans[d], []
    for lo, hi in ends:
      first, last = self._range(lo), self._range(hi)
      above = start is not None and first is not None and self._least(start, first) >= 0
      below = start is not None and last is not None and self._least(last, start) >= n
      out.append((None if above else lo, None if below else hi))
    return [e for e in out if e != (None, None)]

  def _least(self, a: Range, b: Range) -> int:
    return self.ranges.bounds(a + b.scale(-1))[0]

  def mask(self, *, bounds: bool) -> jax.Array | None:
    """Which elements exist, broadcastable to the box of root dimensions; None: all.

    `bounds`: also those outside the root are missing. A store leaves that to the overhang.
    """
    out: jax.Array | None = None
    for d, dim in enumerate(self.dims):
      limits = self._limits(d, bounds=bounds)
      if not limits:
        continue
      assert isinstance(dim.size, int)
      shape = tuple(dim.size if i == d else 1 for i in range(len(self.dims)))
      at = lax.broadcasted_iota(np.int32, shape, d) * np.int32(dim.stride) + np.int32(1) * self._part(dim.start)
      for lo, hi in limits:
        for ok in ([] if lo is None else [at >= self._part(lo)]) + ([] if hi is None else [at < self._part(hi)]):
          out = ok if out is None else out & ok
    return out

  def read(self, array: jax.Array) -> jax.Array:
    """The box of root dimensions, junk where elements do not exist."""
    box = array if self.is_whole else self._slice(array)
    strides = tuple(d.stride for d in self.dims)
    return box if all(s == 1 for s in strides) else lax.slice(box, (0,) * box.ndim, box.shape, strides)

  def _slice(self, array: jax.Array) -> jax.Array:
    if all(isinstance(p, int) for p in self.positions):
      return lax.slice(array, self.positions, [p + n for p, n in zip(self.positions, self.spans)])  # type: ignore
    return lax.dynamic_slice(array, _indices(self.positions), self.spans, allow_negative_indices=False)

  def write(self, array: jax.Array, box: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The array with `box` stored, but where `mask` (of the box's shape) is False."""
    strides = [d.stride for d in self.dims]
    if any(s != 1 for s in strides):
      mask = lax.full(box.shape, True) if mask is None else mask
      between = [(0, 0, s - 1) for s in strides]
      box, mask = lax.pad(box, np.zeros((), box.dtype), between), lax.pad(mask, np.False_, between)
    if mask is not None:
      box = lax.select(mask, box, array if self.is_whole else self._slice(array))
    return box if self.is_whole else _update(array, box, _indices(self.positions))

  def to_view(self, box: jax.Array) -> jax.Array:
    """From the box of root dimensions to the view's shape: squeezed dimensions go, the others are permuted."""
    kept = tuple(d for d in range(len(self.dims)) if d in self.ref.view.perm)
    if len(kept) < len(self.dims):
      box = lax.reshape(box, tuple(box.shape[d] for d in kept))
    order = tuple(kept.index(p) for p in self.ref.view.perm)
    return box if order == tuple(range(len(order))) else lax.transpose(box, order)

  def from_view(self, tile: jax.Array) -> jax.Array:
    order = tuple(sorted(range(tile.ndim), key=self.ref.view.perm.__getitem__))
    box = tile if order == tuple(range(len(order))) else lax.transpose(tile, order)
    shape = tuple(d.size for d in self.dims)
    return box if box.shape == shape else lax.reshape(box, shape)  # type: ignore[arg-type]


def _indices(positions: Sequence[Scalar]) -> list[jax.Array | np.ndarray]:
  return [np.asarray(p, np.int32) if isinstance(p, int) else p for p in positions]


def _update(array: jax.Array, box: jax.Array, starts: list[jax.Array | np.ndarray]) -> jax.Array:
  """`array` with `box` at `starts`, which are inside."""
  if is_float(np.dtype(array.dtype)) and array.dtype.itemsize < 4 and array.dtype != np.float16:
    return _update_bits(array, box, starts)
  return lax.dynamic_update_slice(array, box, starts, allow_negative_indices=False)


@jax.custom_jvp
def _update_bits(array: jax.Array, box: jax.Array, starts: list[jax.Array | np.ndarray]) -> jax.Array:
  """XLA's CPU has no bf16: it would convert the whole array to f32 and back at each update, but it moves integers."""
  bits = np.dtype(f"uint{array.dtype.itemsize * 8}")
  out = lax.dynamic_update_slice(lax.bitcast_convert_type(array, bits), lax.bitcast_convert_type(box, bits), starts,
                                 allow_negative_indices=False)
  return lax.bitcast_convert_type(out, array.dtype)


@_update_bits.defjvp
def _update_bits_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
  (array, box, starts), (d_array, d_box, _) = primals, tangents
  return (_update_bits(array, box, starts),
          lax.dynamic_update_slice(d_array, d_box, starts, allow_negative_indices=False))
