"""Random bits from a counter: Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011).

Every word is a function of a key of 64 bits and a counter of 128: nothing is stored, nothing depends on which thread
computes it, and all backends give the same bits.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError
from tiletrace.core.operands import operand
from tiletrace.core.ops.bitwise import bitwise_or, bitwise_xor, right_shift
from tiletrace.core.ops.elementwise import add, multiply, subtract
from tiletrace.core.ops.shape import iota, static_size_tuple, tile
from tiletrace.core.ops.transcendental import bitcast_convert_type, mul_hi
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)        # added to the key after each round: golden ratio, sqrt(3) - 1
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox_4x32(key: Any, counter: Any) -> tuple[Tile, Tile, Tile, Tile]:
  """Four random words for each counter.

  Args:
    key: a Python int of up to 64 bits, or two words, low and high: ints or integer scalars (`jax.random.key_data`'s).
    counter: four words, least significant first: ints, or integer tiles of one shape or rank 0.
  Returns:
    four u32 tiles.

  Example:
    >>> def kernel(y):
    ...   y[...] = tt.philox_4x32(42, (tt.arange(3), 0, 0, 0))[0]
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((3,), jnp.uint32), grid=1)()
    Array([2632642643, 4242219303, 3547071013], dtype=uint32)
  """
  k0, k1 = _key("philox_4x32", key)
  if not isinstance(counter, tuple | list) or len(counter) != 4:
    raise TileTypeError(f"philox_4x32: counter is {counter!r}", loc=user_loc(), hint="a tuple of four words")
  c0, c1, c2, c3 = (_word(f"philox_4x32: counter[{i}]", c) for i, c in enumerate(counter))
  for r in range(_ROUNDS):
    high0, low0 = mul_hi(c0, np.uint32(_MULTIPLIERS[0])), multiply(c0, np.uint32(_MULTIPLIERS[0]))
    high1, low1 = mul_hi(c2, np.uint32(_MULTIPLIERS[1])), multiply(c2, np.uint32(_MULTIPLIERS[1]))
    c0, c1 = bitwise_xor(bitwise_xor(high1, c1), _round_key(k0, r * _WEYL[0])), low1
    c2, c3 = bitwise_xor(bitwise_xor(high0, c3), _round_key(k1, r * _WEYL[1])), low0
  return c0, c1, c2, c3


def _round_key(key: Tile | int, added: int) -> Tile | np.uint32:
  if isinstance(key, int):
    return np.uint32(key + added & _MASK)
  return add(key, np.uint32(added & _MASK)) if added else key


def _key(what: str, key: Any) -> tuple[Tile | int, Tile | int]:
  if isinstance(key, tuple | list):
    if len(key) != 2:
      raise TileTypeError(f"{what}: key has {len(key)} words", loc=user_loc(), hint="two words, low and high")
    words = [operand(k, f"{what}: key") for k in key]
  else:
    whole = operand(key, f"{what}: key")
    words = [whole, 0] if isinstance(whole, Tile) else [int(whole) & _MASK, int(whole) >> 32 & _MASK]
  out: list[Tile | int] = []
  for w in words:
    if isinstance(w, Tile) and w.ndim:
      raise TileTypeError(f"{what}: key is {w.type}, not a scalar", loc=user_loc(),
                          hint="read its words: key[0], key[1]")
    out.append(_word(f"{what}: key", w) if isinstance(w, Tile) else int(w) & _MASK)
  return out[0], out[1]


def _word(what: str, x: Any) -> Tile:
  """A u32 tile of the same bits."""
  x = operand(x, what)
  if not isinstance(x, Tile):
    if isinstance(x, float):
      raise TileTypeError(f"{what} is the float {x}", loc=user_loc(), hint="an integer")
    return tile(np.uint32(int(x) & _MASK), dtypes.u32, what)
  if not dtypes.is_integer(x.dtype):
    raise TileTypeError(f"{what} is {x.type}, not an integer", loc=user_loc(),
                        hint="tt.bitcast_convert_type(x, jnp.uint32) for its bits")
  return x.astype(dtypes.u32)


def random_bits(key: Any, shape: Any, *, stream: Any = 0) -> Tile:
  """Random u32 of `shape`: the first word of Philox at the counter (index of the element, *stream).

  Args:
    key: as for `tt.philox_4x32`.
    shape: Python ints.
    stream: up to three integers or integer scalars. Calls with one key and different streams share no bits: give
      the program ids, a step, the number of the call.
  Returns:
    u32 tile; element i in row-major order has counter (i, stream[0], stream[1], stream[2]).

  Example:
    >>> def kernel(y):
    ...   y[...] = tt.random_bits(42, (3,))
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((3,), jnp.uint32), grid=1)()
    Array([2632642643, 4242219303, 3547071013], dtype=uint32)
  """
  return _bits("random_bits", key, shape, stream)


def _bits(what: str, key: Any, shape: Any, stream: Any) -> Tile:
  sizes = static_size_tuple(shape, what)
  words = tuple(stream) if isinstance(stream, tuple | list) else (stream,)
  if len(words) > 3:
    raise TileTypeError(f"{what}: stream has {len(words)} words", loc=user_loc(), hint="at most three")
  for w in words:
    if isinstance(w, Tile) and w.ndim:
      raise TileTypeError(f"{what}: stream is {w.type}, not a scalar", loc=user_loc(),
                          hint="tt.philox_4x32 takes a counter for each element")
  index: Any = 0
  size = 1
  for d in reversed(range(len(sizes))):
    index, size = add(index, multiply(iota(sizes, d), size)), size * sizes[d]
  return philox_4x32(_key(what, key), (index, *words, *(0,) * (3 - len(words))))[0]


def random_uniform(key: Any, shape: Any, *, stream: Any = 0) -> Tile:
  """Random f32 in [0, 1), multiples of 2**-23, from the upper 23 bits of `tt.random_bits`.

  >>> def kernel(y):
  ...   y[...] = tt.random_uniform(42, (3,))
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((3,), jnp.float32), grid=1)()
  Array([0.61295986, 0.9877186 , 0.8258668 ], dtype=float32)
  """
  mantissa = right_shift(_bits("random_uniform", key, shape, stream), 9)
  return subtract(bitcast_convert_type(bitwise_or(mantissa, np.uint32(0x3F800000)), dtypes.f32), 1.0)
