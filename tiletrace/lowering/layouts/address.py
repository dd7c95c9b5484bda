"""Addresses of a fragment in shared memory: the composition of two layouts, and what it says about the access."""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tiletrace.lowering.layouts import f2
from tiletrace.lowering.layouts.relation import Layout

THREAD_AXES = ("lane", "warp")


@dataclass(frozen=True)
class ThreadOuter:
  """`(axis // hw_stride) % extent` times `offset` is added to the address."""
  axis: str
  extent: int
  hw_stride: int
  offset: int


@dataclass(frozen=True)
class AddressMap:
  """Hardware point of a fragment -> element offset in shared memory, exactly.

  offset(reg, thread) = (x(thread) ^ (reg_offsets[reg] % span)) + reg_offsets[reg] // span * span + a(thread), where
  x is the XOR of `thread_bits` at the one bits of the thread's coordinates (minus the fragment's origin) and a the
  sum of `thread_outers`; every a is a multiple of `span`, every x below it.

  Attributes:
    reg_offsets: offset of each register of the first thread.
    thread_bits: (axis, bit) -> offset to XOR; zeros are left out.
    thread_outers: what is added.
    span: elements of the shared layout's F2 core.
  """
  reg_offsets: tuple[int, ...]
  thread_bits: dict[tuple[str, int], int]
  thread_outers: tuple[ThreadOuter, ...]
  span: int

  @property
  def thread_mask(self) -> int:
    """Offset bits that the XOR part of a thread can touch."""
    mask = 0
    for column in self.thread_bits.values():
      mask |= column
    return mask

  def split(self) -> list[tuple[int, int]]:
    """Per register (xor, add): offset = (thread_part ^ xor) + add, thread_part = x(thread) + a(thread).

    Registers that share `xor` share an address register; `add` is the immediate of the access.
    """
    mask = self.thread_mask
    return [(o & mask, o & ~mask) for o in self.reg_offsets]

  def thread_part(self, **hw: int) -> int:
    """x(thread) + a(thread) of one thread."""
    xor = 0
    for (axis, bit), column in self.thread_bits.items():
      if hw.get(axis, 0) >> bit & 1:
        xor ^= column
    return xor + sum(hw.get(o.axis, 0) // o.hw_stride % o.extent * o.offset for o in self.thread_outers)

  def offset(self, reg: int, **hw: int) -> int:
    xor, add = self.split()[reg]
    return (self.thread_part(**hw) ^ xor) + add

  def column(self, axis: str, bit: int) -> int:
    """Offset that one bit of a thread coordinate moves by, XORed and added parts together."""
    return sum(_bit_columns(self, axis, bit))

  def vectors(self, vec: int) -> list[tuple[int, ...]]:
    """Registers grouped into accesses of `vec` consecutive elements, each group in the order of its offsets."""
    groups: dict[int, dict[int, int]] = {}
    for reg, offset in enumerate(self.reg_offsets):
      groups.setdefault(offset // vec, {}).setdefault(offset % vec, reg)
    assert all(len(g) == vec for g in groups.values()), f"registers do not fill vectors of {vec}"
    return [tuple(g[i] for i in range(vec)) for g in groups.values()]


def address_map(frag: Layout, shared: Layout, *, at: tuple[int, ...] | None = None,
                dims: tuple[int, ...] | None = None) -> AddressMap:
  """Composes a fragment with the inverse of a shared layout.

  Args:
    frag: axes reg, lane, warp.
    shared: axis off (and stage, which does not enter).
    at: first index of the fragment in the shared tile, default the origin.
    dims: the shared dimension of each fragment dimension, default all in order; the others stand at `at`.

  The result is compared with the two layouts at every point before it is returned. Few pairs have none: an odd number
  of warps that steps through swizzled rows; `address_refusal` says so beforehand.
  """
  found = _compose(frag, shared, at, dims)
  assert isinstance(found, AddressMap), f"{frag} in {shared}: {found}"
  return found


def address_refusal(frag: Layout, shared: Layout, *, at: tuple[int, ...] | None = None,
                    dims: tuple[int, ...] | None = None) -> str | None:
  """Why `address_map` has no answer, or None."""
  found = _compose(frag, shared, at, dims)
  return found if isinstance(found, str) else None


@lru_cache(maxsize=256)
def _compose(frag: Layout, shared: Layout, at: tuple[int, ...] | None,
             dims: tuple[int, ...] | None) -> AddressMap | str:
  dims = tuple(range(shared.rank)) if dims is None else dims
  at = at or (0,) * shared.rank
  assert len(dims) == frag.rank and len(at) == shared.rank, (dims, at, frag.shape, shared.shape)
  table = frag.table(("reg", *THREAD_AXES))
  index: list[np.ndarray] = [np.asarray(a) for a in at]
  for i, d in enumerate(dims):
    index[d] = table[..., i] + at[d]
  extents = tuple(max(s, a + (frag.shape[dims.index(d)] if d in dims else 1))
                  for d, (s, a) in enumerate(zip(shared.shape, at)))
  offsets = np.broadcast_to(shared.coordinates("off", index, extents) - shared.start("off"), table.shape[:-1])
  span = 1 << len(shared.columns("off"))
  low, high = offsets % span, offsets // span * span
  terms = _thread_terms(frag, low, high)
  if isinstance(terms, str):
    return terms
  bits, outers = terms
  xor, add = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
  hw = {"lane": np.arange(low.shape[1])[:, None], "warp": np.arange(low.shape[2])[None, :]}
  for (axis, bit), column in bits.items():
    xor = xor ^ (hw[axis] >> bit & 1) * column
  for o in outers:
    add = add + hw[o.axis] // o.hw_stride % o.extent * o.offset
  present = table[..., 0] >= 0 if frag.rank else np.ones(low.shape, bool)
  same = (low == low[:, :1, :1] ^ xor) & (high == high[:, :1, :1] + add)
  if not (same | ~present).all():
    return "the offset is not affine: XORs and sums of the thread's bits do not make it up"
  return AddressMap(tuple(int(o) for o in offsets[:, 0, 0]), bits, outers, span)


def _thread_terms(frag: Layout, low: np.ndarray,
                  high: np.ndarray) -> tuple[dict[tuple[str, int], int], tuple[ThreadOuter, ...]] | str:
  bits: dict[tuple[str, int], int] = {}
  outers: list[ThreadOuter] = []

  def moved(axis: str, x: int) -> tuple[int, int]:
    point = (0, x, 0) if axis == "lane" else (0, 0, x)
    return int(low[point] ^ low[0, 0, 0]), int(high[point] - high[0, 0, 0])

  def bit(axis: str, b: int) -> None:
    xor, add = moved(axis, 1 << b)
    if xor:
      bits[axis, b] = xor
    if add:
      outers.append(ThreadOuter(axis, 2, 1 << b, add))

  for axis in THREAD_AXES:
    for b in range(len(frag.columns(axis))):
      bit(axis, b)
    for o in frag.outers_of(axis):
      xor, add = moved(axis, o.stride)
      if not xor:
        if add:
          outers.append(ThreadOuter(axis, o.extent, o.stride, add))
      else:                              # the shared layout takes this factor apart into bits
        if o != frag.outers_of(axis)[-1] or o.stride & o.stride - 1:
          return f"the offset is not affine: extent {o.extent} of axis {axis} is no run of its bits"
        for i in range((o.extent - 1).bit_length()):
          bit(axis, f2.log2(o.stride) + i)
  return bits, tuple(outers)


def vector_width(amap: AddressMap, dtype_bits: int) -> int:
  """Elements of the widest access (at most 16 bytes): aligned runs of consecutive offsets inside every thread."""
  vec = 1
  while 2 * vec * dtype_bits <= 128 and _fits(amap, 2 * vec):
    vec *= 2
  return vec


def _fits(amap: AddressMap, vec: int) -> bool:
  terms = [*amap.thread_bits.values(), *(o.offset for o in amap.thread_outers)]
  held = set(amap.reg_offsets)
  return all(t % vec == 0 for t in terms) and len(held) == vec * len({o // vec for o in held})


def wavefronts(amap: AddressMap, vec: int, dtype_bits: int) -> int:
  """Shared-memory cycles of one warp-wide access of `vec` elements a thread; 1, 2, 4 at best for 4, 8, 16 bytes.

  A warp is served in phases of 128 bytes (8 lanes of 16 bytes, 16 of 8 bytes, else all 32); in each, the busiest of the
  32 four-byte banks counts its distinct words. Words and banks are linear in the lane, so that is
  2^(rank(words) - rank(banks)), the same for every register and warp.
  """
  width = vec * dtype_bits // 8
  lanes = {16: 3, 8: 4}.get(width, 5)
  words = [amap.column("lane", b) * dtype_bits >> 5 for b in range(lanes)]
  words += [1 << b for b in range(max(0, f2.log2(max(1, width // 4))))]
  return (32 >> lanes) << f2.rank(words) - f2.rank(w & 31 for w in words)


@dataclass(frozen=True)
class MatrixPlan:
  """A fragment's accesses as stmatrix or ldmatrix instructions.

  Attributes:
    x: matrices an instruction moves: 1, 2 or 4.
    trans: the `.trans` qualifier.
    groups: per instruction, per matrix, the registers (elements) of its 32-bit word, lowest first.
    address: element offset of the row that a lane names, lane = 8*matrix + row; its registers are the instructions.
      Lanes from 8*x on name rows that the hardware ignores.
  """
  x: int
  trans: bool
  groups: tuple[tuple[tuple[int, ...], ...], ...]
  address: AddressMap

  def wavefronts(self, dtype_bits: int) -> int:
    """Shared-memory cycles of one instruction: for each matrix, the busiest bank over its eight 16-byte rows."""
    return self.x * wavefronts(self.address, 128 // dtype_bits, dtype_bits) // 4


def matrix_x(amap: AddressMap, dtype_bits: int, trans: bool = False) -> int:
  """Matrices one stmatrix or ldmatrix can move: 4, 2, 1, or 0 where the fragment does not match."""
  plan = matrix_plan(amap, dtype_bits, trans)
  return plan.x if plan else 0


def matrix_plan(amap: AddressMap, dtype_bits: int, trans: bool = False) -> MatrixPlan | None:
  """The instructions that move a fragment, or None where it does not match.

  PTX ISA, "ldmatrix": an 8x8 matrix of 16-bit elements is eight 16-byte rows; lane l holds the 32-bit word l % 4 of row
  l / 4 (with `.trans`, which is for 16-bit elements, column l / 4 of rows 2*(l % 4) and the next).
  """
  if dtype_bits not in (8, 16, 32) or (trans and dtype_bits != 16):
    return None
  unit, row = 32 // dtype_bits, 128 // dtype_bits      # elements of a word, of a 16-byte row
  inner, outer = ((0, 1), (2, 3, 4)) if not trans else ((2, 3, 4), (0, 1))
  if any(amap.column("lane", b) != (1 if trans else unit) << i for i, b in enumerate(inner)):
    return None
  inside = {("lane", b) for b in inner}
  others = [c for k, c in amap.thread_bits.items() if k not in inside] + [o.offset for o in amap.thread_outers]
  low = [o % amap.span for o in amap.reg_offsets]
  high = [o - l for o, l in zip(amap.reg_offsets, low)]
  words = [tuple(range(i, i + unit)) for i in range(0, len(low), unit)]
  steps = {(low[w[-1]] ^ low[w[0]], high[w[-1]] - high[w[0]]) for w in words}
  if len(low) % unit or any(c % row for c in others) or (unit > 1 and len(steps) != 1):
    return None
  if trans:
    aligned = all(o % row == 0 for o in low)
  else:
    aligned = all(low[r] == low[w[0]] + i and high[r] == high[w[0]] for w in words for i, r in enumerate(w))
    aligned = aligned and all(low[w[0]] % row == 0 for w in words)
  if not aligned:
    return None
  columns = [_bit_columns(amap, "lane", b) for b in outer]
  columns = [next(iter(steps)), *columns] if trans else columns      # of the three bits of the row
  x = 1
  while x < 4 and len(words) % (2 * x) == 0:
    pairs = [(words[i][0], words[i + x][0]) for i in range(0, len(words), 2 * x)]
    moves = {(low[b] ^ low[a], high[b] - high[a]) for a, b in pairs}
    if len(moves) > 1:
      break
    columns.append(moves.pop())
    x *= 2
  groups = tuple(tuple(words[i:i + x]) for i in range(0, len(words), x))
  bits = {k: c for k, c in amap.thread_bits.items() if k[0] != "lane"}
  bits.update({("lane", i): c for i, (c, _) in enumerate(columns) if c})
  outers = [o for o in amap.thread_outers if o.axis != "lane"]
  outers += [ThreadOuter("lane", 2, 1 << i, c) for i, (_, c) in enumerate(columns) if c]
  address = AddressMap(tuple(amap.reg_offsets[g[0][0]] for g in groups), bits, tuple(outers), amap.span)
  return MatrixPlan(x, trans, groups, address)


def _bit_columns(amap: AddressMap, axis: str, bit: int) -> tuple[int, int]:
  """(XOR part, added part) of one bit of a thread coordinate."""
  added = sum(o.offset for o in amap.thread_outers if (o.axis, o.hw_stride) == (axis, 1 << bit))
  return amap.thread_bits.get((axis, bit), 0), added
