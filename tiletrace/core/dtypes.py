"""Data types: short names, and jnp's promotion lattice without jax.

A dtype is a `np.dtype` (ml_dtypes' for bfloat16 and float8). Python numbers are weak, numpy scalars are strong, and
nothing becomes 64 bits wide unless an operand already is, whatever `jax_enable_x64` says.
"""
from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from tiletrace.core.errors import TileTypeError

bool_ = np.dtype(np.bool_)
i8, i16, i32, i64 = map(np.dtype, (np.int8, np.int16, np.int32, np.int64))
u8, u16, u32, u64 = map(np.dtype, (np.uint8, np.uint16, np.uint32, np.uint64))
f16, f32, f64 = map(np.dtype, (np.float16, np.float32, np.float64))
bf16 = np.dtype(ml_dtypes.bfloat16)
f8e4m3 = np.dtype(ml_dtypes.float8_e4m3fn)
f8e5m2 = np.dtype(ml_dtypes.float8_e5m2)

_SHORT: dict[np.dtype, str] = {
  bool_: "bool", i8: "i8", i16: "i16", i32: "i32", i64: "i64", u8: "u8", u16: "u16", u32: "u32", u64: "u64",
  f16: "f16", bf16: "bf16", f32: "f32", f64: "f64", f8e4m3: "f8e4m3", f8e5m2: "f8e5m2",
}
SUPPORTED: tuple[np.dtype, ...] = tuple(_SHORT)
_PYTHON = {bool: bool_, int: i32, float: f32}

_Node = np.dtype | str  # "i_" and "f_": a weak Python int and float
# jnp's lattice: an edge goes to the next wider type; the promotion of two types is their least upper bound.
_EDGES: dict[_Node, tuple[_Node, ...]] = {
  bool_: ("i_",), "i_": (u8, i8), u8: (i16, u16), u16: (i32, u32), u32: (i64, u64), u64: ("f_",),
  i8: (i16,), i16: (i32,), i32: (i64,), i64: ("f_",), "f_": (f8e4m3, f8e5m2, bf16, f16),
  f8e4m3: (), f8e5m2: (), bf16: (f32,), f16: (f32,), f32: (f64,), f64: (),
}
_NARROW: dict[_Node, np.dtype] = {i64: i32, u64: u32, f64: f32}


def short_name(dtype: np.dtype) -> str:
  """"f32", "bf16", "i32", "bool", "f8e4m3", ..."""
  return _SHORT[dtype]


def canonical(x: Any) -> np.dtype:
  """The dtype that `x` names: `jnp.float32`, `np.int8`, "bfloat16", a dtype, or Python's `bool`, `int`, `float`.

  Raises:
    TileTypeError: `x` names no dtype that tiles can have.

  >>> canonical("bfloat16"), canonical(float)
  (dtype(bfloat16), dtype('float32'))
  """
  if isinstance(x, type) and x in _PYTHON:
    return _PYTHON[x]
  try:
    dtype = np.dtype(x).newbyteorder("=")
  except (TypeError, ValueError):
    raise TileTypeError(f"dtype: {x!r} is not a dtype") from None
  if x is None or dtype not in _SHORT:
    raise TileTypeError(f"dtype: tiles have no dtype {x if x is None else dtype.name}",
                        hint="one of " + ", ".join(d.name for d in SUPPORTED))
  return dtype


def is_float(dtype: np.dtype) -> bool:
  return dtype in (f16, bf16, f32, f64, f8e4m3, f8e5m2)


def is_integer(dtype: np.dtype) -> bool:
  return dtype.kind in "iu"


@functools.cache
def _above(node: _Node) -> frozenset[_Node]:
  return frozenset({node}).union(*map(_above, _EDGES[node]))


@functools.cache
def _join(nodes: frozenset[_Node]) -> _Node | None:
  """The least upper bound; None where there is none (float8 with another float)."""
  bounds = frozenset.intersection(*map(_above, nodes))
  least = [n for n in bounds if _above(n) >= bounds]
  return least[0] if least else None


def promote(*operands: np.dtype | bool | int | float) -> np.dtype:
  """The common dtype of operands: a dtype stands for a strong operand, a Python number for itself.

  Raises:
    TileTypeError: there is none (float8 with another float type): cast one.

  >>> promote(i32, 0.5), promote(bf16, 2.0), promote(u32, i32)
  (dtype('float32'), dtype(bfloat16), dtype('int32'))
  """
  nodes = frozenset(x if isinstance(x, np.dtype) else bool_ if isinstance(x, bool) else
                    "i_" if isinstance(x, int) else "f_" for x in operands)
  out = _join(nodes)
  if out is None:
    names = " and ".join(sorted(short_name(n) for n in nodes if isinstance(n, np.dtype)))
    raise TileTypeError(f"{names} have no common dtype", hint="cast one of them with .astype(...)")
  if isinstance(out, str):
    return i32 if out == "i_" else f32
  # 64 bits only where an operand is 64 bits wide; elsewhere jnp's result without x64
  return out if any(n in _NARROW for n in nodes) else narrow(out)


def narrow(dtype: np.dtype) -> np.dtype:
  """The 32-bit type for a 64-bit one."""
  return _NARROW.get(dtype, dtype)


def range_of(dtype: np.dtype) -> tuple[int, int]:
  """The least and greatest value of an integer dtype (0 and 1 for bool)."""
  if dtype == bool_:
    return 0, 1
  info = np.iinfo(dtype)
  return int(info.min), int(info.max)
