"""Cases: tiles of indices, atomic operations, random bits, and jnp's functions over all of f32."""
from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np

import tiletrace as tt
from tests.gpu.corpus import Case, case, normal, out
from tests.gpu.corpus_elementwise import each

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i8": np.int8}


def rows_kernel(x, idx, y, z, *, rows):
  r = tt.block(tt.program_id(0), rows)
  i = tt.load(idx.at[r], fill_value=-1)
  y[r, :] = tt.load(x.at[i, :], fill_value=1)
  z[i, :] = x[r, :]


@case(what=tuple((d, n) for d in DTYPES for n in (64, 33)))
def rows_by_index(rng, what):
  dtype, n = DTYPES[what[0]], what[1]
  x = (normal(rng, 50, n) * 20).astype(dtype)
  idx = rng.permutation(np.concatenate([rng.permutation(40), -1 - np.arange(5), 50 + np.arange(5)])).astype(np.int32)
  inside = (idx >= 0) & (idx < 50)
  gathered = np.where(inside[:, None], x[idx.clip(0, 49)], np.ones((), dtype))
  scattered = np.zeros((40, n), dtype)
  valid = (idx >= 0) & (idx < 40)
  scattered[idx[valid]] = x[valid]
  call = tt.tile_call(functools.partial(rows_kernel, rows=16), out(((50, n), dtype), ((40, n), dtype)), grid=4)
  return Case(call, (x, idx), (gathered, scattered), "exact")


def row_copies_kernel(x, idx, y):
  s = tt.alloc_shared((32, x.shape[1]), x.dtype)
  for k in tt.range(3):
    tt.copy(x.at[tt.load(idx.at[tt.block(k, 32)], fill_value=-1), :], s)
    y[tt.block(k, 32), :] = s[...]


@case(columns=(128, 20, 7))
def rows_by_index_through_shared_memory(rng, columns):
  x, idx = normal(rng, 70, columns), rng.integers(-3, 75, 80).astype(np.int32)
  want = np.where(((idx >= 0) & (idx < 70))[:, None], x[idx.clip(0, 69)], np.float32(0))
  return Case(tt.tile_call(row_copies_kernel, out(((80, columns), np.float32)), grid=1), (x, idx), (want,), "exact")


def elements_kernel(x, i, j, y):
  y[...] = x[i[...][:, None], j[...][None, :]]


@case
def elements_by_two_tiles_of_indices(rng):
  x = normal(rng, 30, 40)
  i, j = rng.integers(0, 30, 24).astype(np.int32), rng.integers(0, 40, 50).astype(np.int32)
  call = tt.tile_call(elements_kernel, out(((24, 50), np.float32)), grid=1)
  return Case(call, (x, i, j), (x[i[:, None], j],), "exact")


def sums_kernel(zero, x, idx, y, *, rows):
  r = tt.block(tt.program_id(0), rows)
  tt.atomic_add(y.at[tt.load(idx.at[r], fill_value=-1), :], x[r, :])


@case(dtype=("f32", "bf16", "i32"))
def rows_that_many_programs_add_up(rng, dtype):
  """Sums that are exact in any order."""
  dtype = {**DTYPES, "i32": np.int32}[dtype]
  x, idx = rng.integers(-2, 3, (200, 66)).astype(dtype), rng.integers(-1, 8, 200).astype(np.int32)
  want = np.zeros((7, 66), np.float64)
  np.add.at(want, idx[(idx >= 0) & (idx < 7)], x[(idx >= 0) & (idx < 7)].astype(np.float64))
  call = tt.tile_call(functools.partial(sums_kernel, rows=16), out(((7, 66), dtype)), grid=13,
                      input_output_aliases={0: 0})
  return Case(call, (np.zeros((7, 66), dtype), x, idx), (want.astype(dtype),), "exact")


def tickets_kernel(*refs):
  *_, last, order, low, high = refs
  ticket = tt.atomic_add(last.at[0], 1)
  order[ticket] = 1
  tt.atomic_max(high.at[...], tt.program_id(0) * tt.arange(100) % 37)
  tt.atomic_xor(low.at[...], tt.program_id(0) << tt.arange(32) % 5)


@case
def tickets_and_extrema(rng):
  p = np.arange(50, dtype=np.int32)[:, None]
  low = np.bitwise_xor.reduce(p << np.arange(32) % 5, 0).astype(np.int32)
  call = tt.tile_call(tickets_kernel, out(((1,), np.int32), ((50,), np.int32), ((32,), np.int32), ((100,), np.int32)),
                      grid=50, warpgroups=2, input_output_aliases={0: 0, 1: 2, 2: 3})
  high = (p * np.arange(100) % 37).max(0).astype(np.int32)
  return Case(call, tuple(np.zeros(n, np.int32) for n in (1, 32, 100)),
              (np.array([50], np.int32), np.ones(50, np.int32), low, high), "exact")


def random_kernel(key, o, u):
  i = tt.program_id(0)
  r = tt.block(i, 8)
  o[r, :] = tt.random_bits((key[0], key[1]), (8, o.shape[1]), stream=i)
  u[r, :] = tt.random_uniform((key[0], key[1]), (8, o.shape[1]), stream=i)


@case
def random_bits(rng):
  key = rng.integers(0, 2**32, 2, dtype=np.uint32)
  k, index = [int(x) for x in key], np.arange(8 * 50, dtype=np.uint64).reshape(8, 50)
  c = [np.tile(index, (3, 1)), np.repeat(np.arange(3), 8)[:, None] + 0 * np.tile(index, (3, 1)), 0, 0]
  c = [np.asarray(x, np.uint64) + np.zeros((24, 50), np.uint64) for x in c]
  low, half = np.uint64(2**32 - 1), np.uint64(32)
  for _ in range(10):
    p, q = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
    c = [q >> half ^ c[1] ^ np.uint64(k[0]), q & low, p >> half ^ c[3] ^ np.uint64(k[1]), p & low]
    k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
  bits = c[0].astype(np.uint32)
  call = tt.tile_call(random_kernel, out(((24, 50), np.uint32), ((24, 50), np.float32)), grid=3)
  return Case(call, (key,), (bits, (bits >> 9).astype(np.float32) * np.float32(2**-23)), "exact")


_erfc = np.vectorize(math.erfc, otypes=[np.float64])
WIDE = {  # name -> (on tiles, on float64), of every normal f32; subnormals are 0 to XLA on a CPU
  "atan": (tt.atan, np.arctan), "asinh": (tt.asinh, np.arcsinh), "cbrt": (tt.cbrt, np.cbrt),
  "round": (tt.round, np.round), "trunc": (tt.trunc, np.trunc), "isfinite": (tt.isfinite, np.isfinite),
}
NEAR = {
  "sin": (tt.sin, np.sin), "cos": (tt.cos, np.cos), "tan": (tt.tan, np.tan), "sinh": (tt.sinh, np.sinh),
  "cosh": (tt.cosh, np.cosh), "expm1": (tt.expm1, np.expm1), "erfc": (tt.erfc, _erfc),
  "log1p": (lambda x: tt.log1p(tt.abs(x)), lambda x: np.log1p(np.abs(x))),
  "log10": (lambda x: tt.log10(tt.abs(x)), lambda x: np.log10(np.abs(x))),
}


@case
def functions_of_all_magnitudes(rng):
  x = rng.integers(0x00800000, 0x7F800000, 300, dtype=np.uint32).view(np.float32)
  x = np.concatenate([x, -x])
  return each(list(WIDE.values()), [x], np.float32, "relative")


@case
def functions_of_numbers(rng):
  x = rng.uniform(-6, 6, 300).astype(np.float32)
  return each(list(NEAR.values()), [x], np.float32, "relative")


@case
def sines_of_all_magnitudes(rng):
  """Against values to 300 bits; see tests/lowering/emit/math_functions_test.py."""
  x = np.array([1e5, 105616, 1e6, 2**24, 1e10, 1e20, 1e30, 3.4e38, 16367173 * 2.0**72, 2.3199494], np.float32)
  sines = np.array([_sine(int(v.as_integer_ratio()[0]), v.as_integer_ratio()[1]) for v in map(float, x)])
  return each([(tt.sin, lambda v: sines)], [x], np.float32, "relative")


def _sine(numerator: int, denominator: int) -> float:
  """sin(numerator / denominator), reduced by pi to 400 bits (Machin's formula) in integers."""
  bits = 400
  def inverse_tangent(n: int) -> int:
    term = total = (1 << bits + 20) // n
    k = 1
    while term:
      term = -(term // (n * n)) if term > 0 else -term // (n * n)
      k += 2
      total += (term // k) if term >= 0 else -(-term // k)
    return total
  pi = 16 * inverse_tangent(5) - 4 * inverse_tangent(239) >> 20
  scaled = (numerator << bits) // denominator
  n = (2 * scaled + pi) // (2 * pi)
  return (-1) ** (n & 1) * math.sin((scaled - n * pi) / (1 << bits))


def power_kernel(x, y, o):
  o[...] = tt.power(x[...], y[...])


@case
def powers(rng):
  x, y = rng.uniform(0.1, 9, 400).astype(np.float32), rng.uniform(-9, 9, 400).astype(np.float32)
  x[:100], y[:100] = -x[:100], np.round(y[:100])
  call = tt.tile_call(power_kernel, out(((400,), np.float32)), grid=1)
  return Case(call, (x, y), (x.astype(np.float64) ** y,), "relative")
