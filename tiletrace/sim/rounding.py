"""Rounding once: exact sums and products as pairs of float64, and their rounding to narrower formats.

A pair (hi, lo) stands for hi + lo exactly, where hi is the sum rounded to nearest. `to_odd` folds it into one float64
that is inexact in its last bit if it is inexact at all; rounding that number to at most 51 bits in any direction equals
rounding the exact value (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
rounding to odd", 2008).

Modes are PTX's: rn (nearest, ties to even), rna (nearest, ties away), rz, rm (down), rp (up).
"""
from __future__ import annotations

import dataclasses

import numpy as np

NAN32 = np.uint32(0x7FFF_FFFF).view(np.float32)     # the canonical NaN (PTX ISA 9.7.3)
NAN16 = np.uint16(0x7FFF)                           # of f16 and bf16
TINY32 = np.float32(2.0**-126)                      # smallest normal f32
TINY16 = np.float32(2.0**-14)


@dataclasses.dataclass(frozen=True)
class Format:
  """A binary floating-point format: significant bits, exponent of the smallest normal number, largest number."""
  precision: int
  min_exponent: int
  largest: float


FORMATS = {
    "f32": Format(24, -126, float(np.finfo(np.float32).max)),
    "tf32": Format(11, -126, (2 - 2.0**-10) * 2.0**127),
    "bf16": Format(8, -126, (2 - 2.0**-7) * 2.0**127),
    "f16": Format(11, -14, 65504.0),
    "e4m3": Format(4, -6, 448.0),
    "e5m2": Format(3, -14, 57344.0),
}


def canonical(x: np.ndarray) -> np.ndarray:
  """f32 with every NaN the canonical one. The test is one dot product: it is NaN where an element is."""
  total = np.vdot(x, x)
  return x if total == total else np.where(x == x, x, NAN32)


def flush(x: np.ndarray, tiny: np.float32 = TINY32) -> np.ndarray:
  """Subnormal numbers become zeros of their sign (.ftz)."""
  return np.where(np.abs(x) < tiny, np.copysign(np.float32(0), x), x)


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """a + b of float64, exactly (Knuth)."""
  hi = a + b
  part = hi - a
  return hi, (a - (hi - part)) + (b - part)


def to_odd(hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
  """hi + lo rounded to odd in float64."""
  move = (np.abs(lo) > 0) & (hi.view(np.int64) & 1 == 0)
  if not move.any():
    return hi
  step = np.where((lo > 0) == (hi > 0), 1, -1)
  return np.where(move, (hi.view(np.int64) + step).view(np.float64), hi)


def round_f32(x: np.ndarray, mode: str) -> np.ndarray:
  """float64 -> f32."""
  r = x.astype(np.float32)
  if mode == "rn":
    return r
  back = r.astype(np.float64)
  if mode == "rz":
    return np.where(np.abs(back) > np.abs(x), np.nextafter(r, np.float32(0)), r)
  if mode == "rm":
    return np.where(back > x, np.nextafter(r, np.float32(-np.inf)), r)
  return np.where(back < x, np.nextafter(r, np.float32(np.inf)), r)


def _away(x: np.ndarray) -> np.ndarray:
  return np.copysign(np.floor(np.abs(x) + 0.5), x)     # exact for |x| < 2**52


TO_INTEGER = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil, "rna": _away}


def round_to(x: np.ndarray, name: str, mode: str = "rn", saturate: bool = False) -> np.ndarray:
  """float64 -> the nearest number of a narrow format, still in float64.

  Args:
    x: float64 of any shape.
    name: a key of FORMATS.
    mode: "rn", "rna", "rz", "rm" or "rp".
    saturate: too large numbers become the largest finite one (.satfinite, infinities too); else IEEE 754 overflow.
  """
  form = FORMATS[name]
  exponent = np.frexp(x)[1] - 1
  step = np.maximum(exponent, form.min_exponent) - (form.precision - 1)
  y = np.ldexp(TO_INTEGER[mode](np.ldexp(x, -step)), step)
  if saturate:
    return np.clip(y, -form.largest, form.largest)
  over = np.abs(y) > form.largest
  if not over.any():
    return y
  to_largest = {"rn": False, "rna": False, "rz": True, "rm": y > 0, "rp": y < 0}[mode]
  bounded = np.where(to_largest & np.isfinite(x), form.largest, np.inf)
  return np.where(over, np.copysign(bounded, y), y)
