"""Logic, shifts, bit fields and byte moves (PTX ISA 9.7.1, 9.7.8, 9.7.9), on arrays of registers."""
from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Instr, Mods
from tiletrace.sim.storage import NUMBERS, STORAGE, Unit, parts, width

# ---- lop3

_EVEN_TABLES: tuple[Callable[..., np.ndarray | np.uint32], ...] = (
    lambda b, c: np.uint32(0), lambda b, c: c & ~b, lambda b, c: b & ~c, lambda b, c: b ^ c,
    lambda b, c: b & c, lambda b, c: c, lambda b, c: b, lambda b, c: b | c)


def _two_inputs(table: int, b: np.ndarray, c: np.ndarray) -> np.ndarray | np.uint32:
  """The function of two bits whose value at (b, c) is bit 2b + c of `table`."""
  if table & 1:
    return ~_two_inputs(table ^ 15, b, c)
  return _EVEN_TABLES[table >> 1](b, c)


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
  """Any function of three bits; its value at (a, b, c) is bit 4a + 2b + c of `table` (PTX ISA 9.7.8, lop3)."""
  low, high = table & 15, table >> 4
  return _two_inputs(low, b, c) ^ (a & _two_inputs(low ^ high, b, c))


# ---- shifts. numpy's shifts by the width or more give zero, or the sign, as PTX's do.

def _shift(mods: Mods, f: Callable[..., np.ndarray]) -> Unit:
  type_ = mods["type"]
  bits, stored = width(type_), f"u{width(type_) // 8}"
  own = NUMBERS[type_]
  if bits == 32:
    if type_ == "s32":
      return lambda a, b: f(a.view(np.int32), b.view(np.int32)).view(np.uint32)
    return f
  if bits == 64:
    return lambda a, b: f(a.view(own), b.astype(own)).view(stored)
  return lambda a, b: f(a.view(own), np.minimum(b, np.uint32(16)).astype(own)).view(stored)


def _funnel(mods: Mods) -> Unit:
  """d = the upper (l) or lower (r) word of {b, a} shifted by c, which is clamped to 32 or taken modulo 32."""
  clamp, left = mods["mode"] == "clamp", mods["dir"] == "l"
  word = np.uint64(32)

  def unit(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    n = np.minimum(c, np.uint32(32)) if clamp else c & np.uint32(31)
    both = b.astype(np.uint64) << word | a
    shifted = both << n >> word if left else both >> n
    return shifted.astype(np.uint32)
  return unit


# ---- bit fields

def _extract(mods: Mods) -> Unit:
  """bfe: a field at `pos` of `length` bits; what lies beyond the register is zero, or the sign (PTX ISA 9.7.1, bfe)."""
  bits = width(mods["type"])
  stored, own = STORAGE[f"b{bits}"], NUMBERS[mods["type"]]
  one, top = stored(1), own(bits - 1)

  def unsigned(a: np.ndarray, pos: np.ndarray, length: np.ndarray) -> np.ndarray:
    pos, length = (pos & 0xFF).astype(stored), (length & 0xFF).astype(stored)
    return a >> pos & ((one << length) - one)

  def signed(a: np.ndarray, pos: np.ndarray, length: np.ndarray) -> np.ndarray:
    pos, length = (pos & 0xFF).astype(own), (length & 0xFF).astype(own)
    left = top - np.minimum(pos + length - own(1), top)
    field = a.view(own) << left >> np.minimum(left + pos, top)
    return np.where(length == 0, own(0), field).view(stored)
  return signed if mods["type"][0] == "s" else unsigned


def _insert(mods: Mods) -> Unit:
  """bfi: a's low bits in place of a field of b."""
  stored = STORAGE[mods["type"]]
  one = stored(1)

  def unit(a: np.ndarray, b: np.ndarray, pos: np.ndarray, length: np.ndarray) -> np.ndarray:
    pos, length = (pos & 0xFF).astype(stored), (length & 0xFF).astype(stored)
    mask = ((one << length) - one) << pos
    return b & ~mask | a << pos & mask
  return unit


def bit_length(a: np.ndarray) -> np.ndarray:
  """[n] unsigned -> [n] uint32: the position of the highest one, plus one. A float64 has it as its exponent."""
  if a.dtype == np.uint64:
    high = (a >> np.uint64(32)).astype(np.uint32)
    low = a.astype(np.uint32)
    return np.where(high != 0, bit_length(high) + np.uint32(32), bit_length(low))
  return np.frexp(a.astype(np.float64))[1].astype(np.uint32)


def _leading_zeros(mods: Mods) -> Unit:
  bits = np.uint32(width(mods["type"]))
  return lambda a: bits - bit_length(a)


def _find(mods: Mods) -> Unit:
  """bfind: the highest one, for negative numbers the highest zero; all ones where there is none."""
  type_ = mods["type"]
  if type_[0] == "u":
    return lambda a: bit_length(a) - np.uint32(1)
  own = NUMBERS[type_]
  return lambda a: bit_length(np.where(a.view(own) < 0, ~a, a)) - np.uint32(1)


_REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), axis=1)[:, 0]


def reverse(a: np.ndarray) -> np.ndarray:
  """Bit 0 becomes the highest bit."""
  return np.ascontiguousarray(_REVERSED[parts(a, np.uint8)][..., ::-1]).view(a.dtype)[..., 0]


# ---- bytes

def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
  """prmt in its default mode: each nibble of the selector names a byte of {b, a}; its bit 3 spreads the byte's sign."""
  if selector.size == 1:
    return _permute_alike(a, b, int(selector.reshape(-1)[0]))
  a, b, selector = np.broadcast_arrays(a, b, selector)
  source = np.concatenate([parts(a, np.uint8), parts(b, np.uint8)], axis=-1)
  nibbles = selector[..., None] >> np.array([0, 4, 8, 12], np.uint32)
  byte = np.take_along_axis(source, (nibbles & 7).astype(np.intp), axis=-1)
  sign = (byte.view(np.int8) >> 7).view(np.uint8)
  return np.where(nibbles & 8, sign, byte).view(np.uint32)[..., 0]


def _permute_alike(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
  """Every lane takes the same bytes."""
  if selector == 0x5410:                  # the low halves side by side
    return a & np.uint32(0xFFFF) | b << np.uint32(16)
  if selector == 0x7632:                  # the high halves
    return a >> np.uint32(16) | b & np.uint32(0xFFFF_0000)
  out = None
  for i in range(4):
    nibble = selector >> 4 * i & 15
    byte = (a if nibble & 4 == 0 else b) >> np.uint32(8 * (nibble & 3)) & np.uint32(0xFF)
    if nibble & 8:
      byte = (byte >> np.uint32(7)) * np.uint32(0xFF)
    placed = byte << np.uint32(8 * i)
    out = placed if out is None else out | placed
  assert out is not None
  return out


def _pack(mods: Mods) -> Unit:
  """mov of a vector to its register: the first element is the low half."""
  stored = STORAGE[mods["type"]]
  half = stored(width(mods["type"]) // 2)
  return lambda low, high: low.astype(stored) | high.astype(stored) << half


def _unpack(mods: Mods) -> Unit:
  half = width(mods["type"]) // 2
  stored, amount = STORAGE[f"b{half}"], STORAGE[mods["type"]](half)
  return lambda a: (a.astype(stored), (a >> amount).astype(stored))


UNITS: dict[Instr, Callable[[Mods], Unit]] = {
    isa.AND: lambda m: np.bitwise_and,
    isa.OR: lambda m: np.bitwise_or,
    isa.XOR: lambda m: np.bitwise_xor,
    isa.NOT: lambda m: np.invert,
    isa.LOP3: lambda m: lop3,
    isa.SHL: functools.partial(_shift, f=np.left_shift),
    isa.SHR: functools.partial(_shift, f=np.right_shift),
    isa.SHF: _funnel,
    isa.POPC: lambda m: lambda a: np.bitwise_count(a).astype(np.uint32),
    isa.CLZ: _leading_zeros,
    isa.BFIND: _find,
    isa.BREV: lambda m: reverse,
    isa.BFE: _extract,
    isa.BFI: _insert,
    isa.PRMT: lambda m: permute,
    isa.MOV: lambda m: lambda a: a,
    isa.MOV_PRED: lambda m: lambda a: a,
    isa.PACK: _pack,
    isa.UNPACK: _unpack,
}
