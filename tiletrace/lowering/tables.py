"""Tables of a layout: a number for every (thread of the scope, register), and what accesses they allow."""
from __future__ import annotations

import numpy as np

from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.shared_views import SharedPlace


def coordinates(layout: Layout, threads: int) -> np.ndarray:
  """The element of each (thread of the scope, register): int [threads, registers, rank]; replicas where a scope has
  more warps than the layout."""
  table = layout.table(("warp", "lane", "reg"))
  warps, lanes, regs, rank = table.shape
  assert lanes in (1, 32) and threads % 32 == 0, layout
  table = np.broadcast_to(table, (warps, 32, regs, rank)).reshape(warps * 32, regs, rank)
  repeats, rest = divmod(threads, warps * 32)
  assert rest == 0 and repeats >= 1, (threads, layout)
  return np.tile(table, (repeats, 1, 1)) if repeats > 1 else table


def split_sum(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(per thread, per register) parts whose sum is `table` [threads, registers, ...]."""
  base = table[:, 0]
  delta = table[0] - table[0, 0]
  assert (base[:, None] + delta[None] == table).all(), "not a sum of a thread's and a register's part"
  return base, delta


def replicated_bits(table: np.ndarray) -> int:
  """Mask of thread bits that change no element: only threads with zeros there store."""
  n = len(table)
  return sum(1 << i for i in range((n - 1).bit_length()) if (table[1 << i] == table[0]).all())


def shared_bytes(place: SharedPlace, layout: Layout, threads: int, itemsize: int) -> np.ndarray:
  """Byte offset, from the view's start, of each (thread, register) of a fragment in a shared view."""
  table = coordinates(layout, threads)
  if any(s < 0 for s in place.strides):
    return np.sum([_along(place, table, layout, d) for d in range(len(place.strides))], axis=0) * itemsize
  index = [table[..., d] * stride for d, stride in enumerate(place.strides)]
  extents = tuple(max(a, (b - 1) * s + 1) for a, b, s in zip(
    place.layout.shape, layout.shape, place.strides, strict=True))
  return np.broadcast_to(place.layout.coordinates("off", index, extents), table.shape[:-1]) * itemsize


def _along(place: SharedPlace, table: np.ndarray, layout: Layout, dim: int) -> np.ndarray:
  """What one dimension's coordinate adds to the offset in plain rows, which may be read backwards."""
  stride = abs(place.strides[dim])
  index = [table[..., d] * (stride if d == dim else 0) for d in range(len(place.strides))]
  extents = tuple(max(a, (b - 1) * stride + 1) if d == dim else a
                  for d, (a, b) in enumerate(zip(place.layout.shape, layout.shape)))
  offset = np.broadcast_to(place.layout.coordinates("off", index, extents), table.shape[:-1])
  return np.sign(place.strides[dim]) * offset


def inside_view(table: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Whether the element of each (thread, register) of `coordinates` is the view's, not padding of the fragment."""
  return np.all(table < np.asarray(shape, table.dtype), axis=-1)


def _groups(table: np.ndarray, vec_bytes: int, itemsize: int, inside: np.ndarray) -> list[list[int]] | None:
  """Registers grouped into accesses of `vec_bytes` consecutive, aligned bytes in every thread, each wholly inside the
  view or outside; None if they do not."""
  n = vec_bytes // itemsize
  order = np.argsort(table[0], kind="stable")
  if len(order) % n:
    return None
  groups = order.reshape(-1, n)
  grouped, whole = table[:, groups], inside[:, groups]
  first = grouped[..., :1]
  if (first % vec_bytes).any() or (grouped != first + np.arange(n) * itemsize).any() or (whole != whole[..., :1]).any():
    return None
  return groups[np.argsort(groups.min(1), kind="stable")].tolist()


def widest_groups(table: np.ndarray, itemsize: int, inside: np.ndarray,
                  alignment: int = 0) -> tuple[int, list[list[int]]]:
  """(bytes, groups) of the widest access that the registers of every thread allow, at most 16 bytes. `alignment`
  divides the address that the table counts from (0: any power of two does)."""
  for vec_bytes in (16, 8, 4, 2, 1):
    if vec_bytes >= itemsize and alignment % vec_bytes == 0:
      groups = _groups(table, vec_bytes, itemsize, inside)
      if groups is not None:
        return vec_bytes, groups
  raise AssertionError("a single element is always aligned")


def matrix_rows(table: np.ndarray, itemsize: int, *, trans: bool = False) -> np.ndarray | None:
  """Row addresses for ldmatrix and stmatrix of the registers' words: [threads, words], or None where the fragment does
  not match. Lane 8 i + r names row r of the i-th word's 8x8 matrix of 16-bit elements, i modulo the words.

  Lane l of a warp holds the 4 bytes l % 4 of row l / 4; with trans 16-bit elements l / 4 of rows 2(l % 4) and
  2(l % 4) + 1 (PTX ISA, ldmatrix).
  """
  threads, regs = table.shape
  word = 4 // itemsize
  if regs % word or threads % 32 or (trans and itemsize != 2):
    return None
  t = table.reshape(threads // 32, 32, regs // word, word)
  lane, part = np.arange(32), np.arange(word)
  if trans:
    row = 2 * (lane[:, None] % 4) + part
    starts = t[:, np.arange(8) // 2, :, np.arange(8) % 2].transpose(1, 0, 2)     # [warps, row, words]
    want = starts[:, row].transpose(0, 1, 3, 2) + 2 * (lane // 4)[:, None, None]
  else:
    starts = t[..., 0][:, 4 * np.arange(8)]
    want = (starts[:, lane // 4] + 4 * (lane % 4)[:, None])[..., None] + itemsize * part
  return starts if (t == want).all() and not (starts % 16).any() else None


def matrix_addresses(starts: np.ndarray, num: int) -> np.ndarray:
  """The addresses [threads, words / num] that the lanes give to an instruction of `num` words: lane 8 i + r row r of
  word i."""
  warps, _, count = starts.shape
  lane = np.arange(32)
  grouped = starts.reshape(warps, 8, count // num, num)
  return grouped[:, lane % 8, :, lane // 8 % num].transpose(1, 0, 2).reshape(warps * 32, count // num)


def stmatrix_rows(table: np.ndarray) -> np.ndarray | None:
  """Row addresses for stmatrix.x4 of 16-bit elements, as they are or transposed: [threads, groups], or None where the
  fragment does not match."""
  for trans in (False, True):
    starts = matrix_rows(table, 2, trans=trans)
    if starts is not None and starts.shape[2] % 4 == 0:
      return matrix_addresses(starts, 4)
  return None


def is_transposed(table: np.ndarray) -> bool:
  """Whether stmatrix, which takes a fragment, takes it transposed."""
  return matrix_rows(table, 2) is None
