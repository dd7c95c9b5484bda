"""Per-thread quantities from layout tables: a number for every (thread, register), taken apart into code.

A table is exact and small (threads x registers), so nothing is assumed of the layout: each decomposition is checked
against every entry before it is emitted.
"""
from __future__ import annotations

import dataclasses

import numpy as np

from tiletrace.lowering.emit.context import EmitContext
from tiletrace.lowering.emit.values import Operand
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.module import Builder
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.tables import inside_view, replicated_bits as replicated_bits, split_sum

_ATOMS = (1024, 512, 256)  # bytes: the hardware's swizzles permute within so much (PTX ISA, tensor swizzling modes)


def _bit_steps(values: np.ndarray) -> list[int] | None:
  """c with values[t] = values[0] + sum of c[i] over the one bits i of t; None where it is not of that form."""
  n = len(values)
  steps = [int(values[1 << i] - values[0]) for i in range((n - 1).bit_length())]
  t = np.arange(n)
  total = sum((((t >> i) & 1) * c for i, c in enumerate(steps)), np.zeros(n, np.int64))
  return steps if (total + values[0] == values).all() else None


def both(b: Builder, p: Reg | None, q: Operand | None) -> Reg | None:
  """p and q; None and true literals say nothing."""
  if isinstance(q, Reg):
    return q if p is None else b.new(isa.AND, p, q, type="pred")
  return p if q is None or q else b.new(isa.MOV_PRED, 0)


class ViewBounds:
  """Which registers hold elements of a view, where a fragment is padded beyond it.

  Args:
    table: element of each (thread, register), [threads, registers, rank].
    shape: the view's.
  """

  def __init__(self, ctx: EmitContext, table: np.ndarray, shape: tuple[int, ...]):
    self.ctx, self.table, self.shape = ctx, table, shape
    self.inside = inside_view(table, shape)
    self._made: dict[tuple[int, int], Reg] = {}

  @property
  def overhangs(self) -> bool:
    return not self.inside.all()

  def at(self, reg: int) -> Reg | None:
    """Whether this thread's element in `reg` lies in the view; None where it always does."""
    found = None
    for d, extent in enumerate(self.shape) if not self.inside[:, reg].all() else ():
      found = both(self.ctx.b, found, self._dimension(d, extent, reg))
    return found

  def _dimension(self, d: int, extent: int, reg: int) -> Reg | None:
    values = self.table[:, reg, d].astype(np.int64)
    if (values < extent).all():
      return None
    key = d, int(values[0])
    if key not in self._made:
      x = thread_sum(self.ctx, values)
      self._made[key] = self.ctx.b.new(isa.SETP, extent, x, cmp="gt", type="s32") if isinstance(x, Reg) else (
          self.ctx.b.new(isa.MOV_PRED, int(x < extent)))
    return self._made[key]


def _runs(steps: list[int]) -> list[tuple[int, int, int]]:
  """(first bit, number of bits, scale): consecutive bits whose steps double."""
  out: list[tuple[int, int, int]] = []
  for i, c in enumerate(steps):
    if c == 0:
      continue
    if out and out[-1][0] + out[-1][1] == i and out[-1][2] << out[-1][1] == c:
      out[-1] = (out[-1][0], out[-1][1] + 1, out[-1][2])
    else:
      out.append((i, 1, c))
  return out


def _field(ctx: EmitContext, first: int, bits: int, width: int) -> Operand:
  """Bits [first, first + bits) of the scope's thread index, which has `width` bits."""
  b, x = ctx.b, ctx.local_tid()
  if first:
    x = b.new(isa.SHR, x, first, type="u32")
  return x if first + bits >= width else b.new(isa.AND, x, (1 << bits) - 1, type="b32")


def _scaled(ctx: EmitContext, x: Operand, scale: int) -> Operand:
  if scale == 1:
    return x
  if scale > 0 and scale & (scale - 1) == 0:
    return ctx.b.new(isa.SHL, x, scale.bit_length() - 1, type="b32")
  return ctx.b.new(isa.MUL_LO, x, scale, type="s32")


def thread_sum(ctx: EmitContext, values: np.ndarray) -> Operand:
  """Code for values[t], t being the thread's index in the scope: a literal, or a b32 register."""
  width, steps = (len(values) - 1).bit_length(), _bit_steps(values)
  assert steps is not None, "not linear in the bits of the thread index"
  total: Operand = int(values[0])
  for first, bits, scale in _runs(steps):
    term = _scaled(ctx, _field(ctx, first, bits, width), scale)
    total = term if total == 0 else ctx.b.new(isa.ADD, term, total, type="s32")
  return total


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SharedAddresses:
  """Byte addresses of a table of shared-memory offsets, one (register, immediate) for each column."""
  addresses: tuple[tuple[Reg, int], ...]


def shared_addresses(ctx: EmitContext, table: np.ndarray, base: Reg, offset: int) -> SharedAddresses:
  """Code for base + offset + table[t, i], for every column i.

  Args:
    table: int [threads, columns], bytes within the buffer. Most often each entry is (T(t) ^ x(i)) + a(i), an XOR below
      the swizzle's atom and a sum above it; or, without a swizzle, a sum T(t) + a(i). Where warps begin inside of a
      swizzle's period, that holds for some columns at a time, or for some warps.
    base: the buffer's base register. `offset` is a literal on top of it, a multiple of the atom where x is not zero.
  """
  below = min(0, int(table.min()))               # of a view that goes backwards: no register holds less than the base
  return SharedAddresses(tuple(_addresses(ctx, table.astype(np.int64) - below, base, offset + below)))


def _addresses(ctx: EmitContext, table: np.ndarray, base: Reg, offset: int) -> list[tuple[Reg, int]]:
  groups = _alike(table)
  if groups is None:
    return _by_halves(ctx, table, base, offset)
  out: list[tuple[Reg, int]] = [(base, 0)] * table.shape[1]
  for columns in groups:
    for i, address in zip(columns, _addresses_of(ctx, table[:, columns], base, offset), strict=True):
      out[i] = address
  return out


def _by_halves(ctx: EmitContext, table: np.ndarray, base: Reg, offset: int) -> list[tuple[Reg, int]]:
  """The addresses of the threads without and with the highest bit of their index that matters, and a choice by it."""
  b, t = ctx.b, np.arange(len(table))
  half = _period(table) // 2
  assert half, "what is the same for all threads comes apart"
  below, above = (_addresses(ctx, part, base, offset) for part in (
      table[t % half], table[half + t % min(half, len(table) - half)]))
  is_above = b.new(isa.SETP, b.new(isa.AND, ctx.local_tid(), half, type="b32"), 0, cmp="ne", type="s32")
  made: dict[tuple[Reg, Reg, int], Reg] = {}
  out = []
  for (p, i), (q, j) in zip(below, above, strict=True):
    key = p, q, j - i
    if key not in made:
      q = b.new(isa.ADD, q, j - i, type="s32") if j != i else q
      made[key] = b.new(isa.SELP, q, p, is_above, type="b32")
    out.append((made[key], i))
  return out


def _period(table: np.ndarray) -> int:
  """The least power of two of threads after which the table repeats itself."""
  n = len(table)
  period = 1 << (n - 1).bit_length()
  while period > 1 and (table == table[np.arange(n) % (period // 2)]).all():
    period //= 2
  return period


def _alike(table: np.ndarray) -> list[list[int]] | None:
  """The columns, in groups that each come apart into a thread's and a column's part; None where one does not."""
  everything = list(range(table.shape[1]))
  if _comes_apart(table):
    return [everything]
  groups: list[list[int]] = []
  for i in everything:
    group = next((g for g in groups if _comes_apart(table[:, [*g, i]])), None)
    if group is not None:
      group.append(i)
    elif _comes_apart(table[:, [i]]):
      groups.append([i])
    else:
      return None
  return groups


def _comes_apart(table: np.ndarray) -> bool:
  if any(_xor_and_sum(table, atom) is not None for atom in _ATOMS):
    return True
  return bool((table == table[:, :1] + table[:1] - table[0, 0]).all()) and _bit_steps(table[:, 0]) is not None


def _addresses_of(ctx: EmitContext, table: np.ndarray, base: Reg, offset: int) -> list[tuple[Reg, int]]:
  b = ctx.b
  parts = next((p for atom in _ATOMS if (p := _xor_and_sum(table, atom)) is not None), None)
  if parts is None:
    thread, delta = split_sum(table)
    least = int(thread.min())
    x = thread_sum(ctx, thread - least)
    start = b.new(isa.ADD, base, x, type="s32") if isinstance(x, Reg) else base
    return [(start, offset + least + d) for d in delta.tolist()]
  low, high, columns = parts
  flip, step = low[0] ^ low[0, 0], high[0] - high[0, 0]
  varying = int(np.bitwise_or.reduce(low[:, 0] ^ low[0, 0])) | int(low[0, 0])
  thread = thread_xor(ctx, columns, low[:, 0], high[:, 0])
  made: dict[int, Reg] = {}
  out = []
  for x, a in zip(flip.tolist(), step.tolist(), strict=True):
    mixed = x & varying
    if mixed not in made:
      t = thread
      if mixed:
        t = b.new(isa.XOR, thread, mixed, type="b32") if isinstance(thread, Reg) else thread ^ mixed
      made[mixed] = base if t == 0 else b.new(isa.ADD, base, t, type="s32")
    out.append((made[mixed], offset + (x & ~varying) + a))
  return out


def _xor_and_sum(table: np.ndarray, atom: int) -> tuple[np.ndarray, np.ndarray, list[int]] | None:
  """(offsets within the atom, multiples of it, the columns of the former); None where the two do not come apart."""
  low, high = table % atom, table // atom * atom
  columns = _xor_columns(low[:, 0])
  alike = ((low[:, :1] ^ low[0] ^ low[0, 0]) == low).all() and (high[:, :1] + high[0] - high[0, 0] == high).all()
  return (low, high, columns) if columns is not None and alike and _bit_steps(high[:, 0]) is not None else None


def _xor_columns(low: np.ndarray) -> list[int] | None:
  """c with low[t] = low[0] ^ XOR of c[i] over the one bits i of t; None where it is not of that form."""
  t = np.arange(len(low))
  columns = [int(low[1 << i] ^ low[0]) for i in range((len(low) - 1).bit_length())]
  check = np.full(len(low), low[0])
  for i, c in enumerate(columns):
    check ^= np.where(t >> i & 1, c, 0)
  return columns if (check == low).all() else None


def thread_xor(ctx: EmitContext, columns: list[int], low: np.ndarray, high: np.ndarray) -> Operand:
  """Code for low[t] + high[t], where low is F2-linear in the bits of t (after its constant) and high is a sum."""
  b, width = ctx.b, len(columns)
  total: Operand = int(low[0])
  for first, bits, shift in _diagonals(columns):
    term = _scaled(ctx, _field(ctx, first, bits, width), 1 << shift)
    total = term if total == 0 else b.new(isa.XOR, term, total, type="b32")
  above = thread_sum(ctx, high)
  if above == 0:
    return total
  return above if total == 0 else b.new(isa.ADD, above, total, type="s32")


def _diagonals(columns: list[int]) -> list[tuple[int, int, int]]:
  """(first thread bit, number of bits, shift): thread bit first + k lands on bit shift + k."""
  left = {(i, j) for i, c in enumerate(columns) for j in range(c.bit_length()) if c >> j & 1}
  out = []
  for i, j in sorted(left):
    if (i, j) not in left:
      continue
    k = 0
    while (i + k, j + k) in left:
      left.discard((i + k, j + k))
      k += 1
    out.append((i, k, j))
  return out


def register_map(src: np.ndarray, wanted: np.ndarray, valid: tuple[int, ...]) -> list[int]:
  """For each register of `wanted` [threads, n, rank], the register of `src` [threads, m, rank] with that element.

  Elements outside `valid` are padding and may come from anywhere.
  """
  ok = np.ones(wanted.shape[:-1], bool)
  if valid:
    ok = np.all((wanted >= 0) & (wanted < np.asarray(valid, wanted.dtype)), axis=-1)
  first = {tuple(x): r for r, x in reversed(list(enumerate(src[0].tolist())))}
  index = []
  for r in range(wanted.shape[1]):
    threads = np.flatnonzero(ok[:, r])
    if not threads.size:
      index.append(0)
      continue
    t = int(threads[0])
    found = first.get(tuple(wanted[t, r].tolist())) if t == 0 else None
    if found is None:
      found = int(np.flatnonzero((src[t] == wanted[t, r]).all(-1))[0])
    index.append(found)
  moved = src[:, index]
  assert ((moved == wanted).all(-1) | ~ok).all(), "an element is in another thread: a relayout is missing"
  return index
