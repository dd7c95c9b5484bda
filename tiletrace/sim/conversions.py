"""cvt: between integers, floats, and their packed and 8-bit forms (PTX ISA 9.7.9, cvt), on arrays of registers.

An 8-bit integer fills its b16 register. NaN becomes the canonical NaN as a float; as an integer it is 0, or only the
highest bit where one of the two types has 64 bits.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Instr, Mods
from tiletrace.sim.halves import bf16_bits, decode, encode
from tiletrace.sim.rounding import NAN32, TO_INTEGER, canonical, round_f32, round_to, to_odd, two_sum
from tiletrace.sim.storage import NUMBERS, Unit, joined, parts, width

_INTEGER = ("u", "s")
_NAN8 = np.uint8(0x7F)


# ---- integers

def _read(x: np.ndarray, type_: str) -> np.ndarray:
  """A register's number in the type's own dtype; registers may be wider than 8 bits."""
  own = NUMBERS[type_]
  return x.astype(own) if width(type_) == 8 else x.view(own)


def _store(x: np.ndarray, type_: str) -> np.ndarray:
  """Numbers in the type's own dtype -> its register."""
  if width(type_) == 8:
    return x.astype(np.int16).view(np.uint16)
  return x.view(f"u{width(type_) // 8}")


def _integer_to_integer(mods: Mods) -> Unit:
  to, source = mods["to"], mods["source"]
  own = NUMBERS[to]
  if not mods["sat"]:
    return lambda a: _store(_read(a, source).astype(own), to)
  info, limits = np.iinfo(NUMBERS[to]), np.iinfo(NUMBERS[source])
  low, high = max(info.min, limits.min), min(info.max, limits.max)
  return lambda a: _store(np.clip(_read(a, source), low, high).astype(own), to)


def _exact_integer(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """An integer of up to 64 bits as a pair of float64."""
  if x.itemsize < 8:
    return x.astype(np.float64), np.zeros(x.shape)
  low = x & x.dtype.type(0xFFFF_FFFF)
  return two_sum((x - low).astype(np.float64), low.astype(np.float64))


def _round_f64(hi: np.ndarray, lo: np.ndarray, mode: str) -> np.ndarray:
  """A pair rounded to float64."""
  if mode == "rn":
    return hi
  if mode == "rz":
    return np.where(lo * np.sign(hi) < 0, np.nextafter(hi, 0), hi)
  wrong, to = (lo < 0, -np.inf) if mode == "rm" else (lo > 0, np.inf)
  return np.where(wrong, np.nextafter(hi, to), hi)


def _integer_to_float(mods: Mods) -> Unit:
  to, source, mode = mods["to"], mods["source"], mods["rnd"]
  if to == "f32" and mode == "rn":
    return lambda a: _read(a, source).astype(np.float32)

  def unit(a: np.ndarray) -> np.ndarray:
    hi, lo = _exact_integer(_read(a, source))
    return _round_f64(hi, lo, mode) if to == "f64" else _write_float(to_odd(hi, lo), to, mode)
  return unit


# ---- floats

def _read_float(x: np.ndarray, type_: str) -> np.ndarray:
  return x if type_ in ("f32", "f64") else decode(x, type_)


def _write_float(x: np.ndarray, type_: str, mode: str) -> np.ndarray:
  """f32 or float64 -> the register of a float type."""
  if type_ == "f64":
    return x.astype(np.float64)
  if type_ == "f32":
    return canonical(round_f32(x, mode) if x.dtype == np.float64 else x)
  return encode(x, type_, mode)


def _float_to_integer(mods: Mods) -> Unit:
  """Rounded to an integer, then clamped to the type's range."""
  to, source = mods["to"], mods["source"]
  own, rounding = NUMBERS[to], TO_INTEGER[mods["rnd"][:-1]]
  info = np.iinfo(own)
  above = 2.0**(width(to) - (to[0] == "s"))             # the first number too large: exact in every float type
  of_nan = np.array([(1 << width(to) - 1) * (source == "f64" or width(to) == 64)], f"u{width(to) // 8}").view(own)

  def unit(a: np.ndarray) -> np.ndarray:
    x = rounding(_read_float(a, source)).astype(np.float64)
    inside = (x < above) & (x >= info.min)
    r = np.where(inside, x, 0).astype(own)
    if not inside.all():
      r = np.where(x >= above, own(info.max), np.where(x < info.min, own(info.min), r))
      r = np.where(x == x, r, of_nan)
    return _store(r, to)
  return unit


def _float_to_float(mods: Mods) -> Unit:
  to, source, mode = mods["to"], mods["source"], mods["rnd"]
  if mode.endswith("i"):
    rounding = TO_INTEGER[mode[:-1]]
    return lambda a: _write_float(rounding(_read_float(a, source)), to, "rn")
  return lambda a: _write_float(_read_float(a, source), to, mode or "rn")


def _convert(mods: Mods) -> Unit:
  to, source = (mods[x][0] in _INTEGER for x in ("to", "source"))
  if to:
    return _integer_to_integer(mods) if source else _float_to_integer(mods)
  return _integer_to_float(mods) if source else _float_to_float(mods)


# ---- packed forms

def _positive(x: np.ndarray, relu: str) -> np.ndarray:
  """.relu: negative numbers and -0 become +0, NaN stays."""
  return np.where(x <= 0, x.dtype.type(0), x) if relu else x


def _pack_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  total = np.vdot(a, a) + np.vdot(b, b)
  if total != total:
    return encode(a, "bf16").astype(np.uint32) << np.uint32(16) | encode(b, "bf16")
  return bf16_bits(a) & np.uint32(0xFFFF_0000) | bf16_bits(b) >> np.uint32(16)


def _pack(mods: Mods) -> Unit:
  """Two f32 into one register: the first operand is the high half."""
  element, mode, relu = mods["to"].removesuffix("x2"), mods["rnd"], mods["relu"]
  if element == "bf16" and mode == "rn" and not relu:
    return _pack_bf16

  def unit(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    high, low = (encode(_positive(x, relu), element, mode) for x in (a, b))
    return high.astype(np.uint32) << np.uint32(16) | low
  return unit


def _to_tf32(mods: Mods) -> Unit:
  """The low 13 bits of a number are zero; of a NaN the ISA leaves the bits open."""
  mode = mods["rnd"]

  def unit(a: np.ndarray) -> np.ndarray:
    r = round_f32(round_to(a.astype(np.float64), "tf32", mode), "rn")
    return np.where(a == a, r, NAN32).view(np.uint32)
  return unit


# ---- 8-bit floats

def encode_f8(x: np.ndarray, type_: str) -> np.ndarray:
  """f32 of any shape -> uint8 of e4m3 or e5m2, to nearest even, too large numbers and infinities the largest finite.

  A rounded e5m2 is the upper byte of the f16. An e4m3 has a bias of 7 where f16 has 15: 2**-8 times the number has the
  same exponent field, subnormals included.
  """
  y = round_to(x.astype(np.float64), type_, "rn", saturate=True)
  half = (y if type_ == "e5m2" else y * 2.0**-8).astype(np.float16).view(np.uint16)
  if type_ == "e5m2":
    bits = half >> np.uint16(8)
  else:
    bits = half >> np.uint16(8) & np.uint16(0x80) | (half & np.uint16(0x7FFF)) >> np.uint16(7)
  return np.where(x == x, bits.astype(np.uint8), _NAN8)


def _f8_table(type_: str) -> np.ndarray:
  """The 256 numbers of an 8-bit type, in f32. Only e5m2 has infinities."""
  code = np.arange(256, dtype=np.uint16)
  if type_ == "e5m2":
    return np.where(code & 0x7F > 0x7C, NAN32, (code << np.uint16(8)).view(np.float16).astype(np.float32))
  half = (code & np.uint16(0x80)) << np.uint16(8) | (code & np.uint16(0x7F)) << np.uint16(7)
  numbers = half.view(np.float16).astype(np.float32) * np.float32(2.0**8)
  return np.where(code & 0x7F == 0x7F, NAN32, numbers)


F8_NUMBERS = {type_: _f8_table(type_) for type_ in ("e4m3", "e5m2")}


def _pack_f8(mods: Mods) -> Unit:
  element, relu = mods["to"].removesuffix("x2"), mods["relu"]

  def unit(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    high, low = (encode_f8(_positive(x, relu), element) for x in (a, b))
    return high.astype(np.uint16) << np.uint16(8) | low
  return unit


def _f8_from_f16(mods: Mods) -> Unit:
  element, relu = mods["to"].removesuffix("x2"), mods["relu"]
  return lambda a: joined(encode_f8(_positive(decode(parts(a, np.uint16), "f16"), relu), element), np.uint16)


def _f8_to_f16(mods: Mods) -> Unit:
  table, relu = F8_NUMBERS[mods["source"].removesuffix("x2")], mods["relu"]
  return lambda a: joined(encode(_positive(table[parts(a, np.uint8)], relu), "f16"), np.uint32)


UNITS: dict[Instr, Callable[[Any], Unit]] = {
    isa.CVT: _convert,
    isa.CVT_PACK: _pack,
    isa.CVT_TF32: _to_tf32,
    isa.CVT_F8_PACK: _pack_f8,
    isa.CVT_F8_FROM_F16: _f8_from_f16,
    isa.CVT_F8_TO_F16: _f8_to_f16,
}
