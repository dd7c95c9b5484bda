"""Philox-4x32-10 against numpy in 64-bit integers, and the known answers of Random123."""
from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import Case
from tests.lowering import simulated
from tests.lowering.kernels import assemble, struct
from tests.tracing import trace_values
from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError


def philox(key, counter):
  """Four u32 arrays; Salmon et al., figure 4 and its constants."""
  k0, k1 = key
  c = [np.asarray(x, np.uint64) for x in np.broadcast_arrays(*counter)]
  low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
  for _ in range(10):
    p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
    c = [p1 >> shift ^ c[1] ^ np.uint64(k0), p1 & low, p0 >> shift ^ c[3] ^ np.uint64(k1), p0 & low]
    k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
  return [x.astype(np.uint32) for x in c]


KNOWN = [  # Random123's kat_vectors: counter, key -> words
  ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
  ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
  ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
   (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_reference_and_the_kernel_give_the_known_words(counter, key, words):
  assert tuple(int(x) for x in philox(key, counter)) == words

  def kernel(c, o):
    for i, w in enumerate(tt.philox_4x32(key, tuple(c[j] for j in range(4)))):
      o[i] = w

  got = jax.jit(tt.tile_call(kernel, struct(4, dtype=np.uint32), grid=1))(np.array(counter, np.uint32))
  assert tuple(int(x) for x in got) == words


def bits_kernel(key, o, u, *, seed, rows):
  i = tt.program_id(0)
  r = tt.block(i, rows)
  words = (key[0], key[1]) if seed is None else seed
  o[r, :] = tt.random_bits(words, (rows, o.shape[1]), stream=(i, 7))
  u[r, :] = tt.random_uniform(words, (rows, o.shape[1]), stream=i)


@pytest.mark.parametrize("seed", [None, 3, 0x123456789ABCDEF0, -1], ids=str)
def test_bits_are_those_of_the_counter_on_every_backend(seed):
  key = np.array([0xDEADBEEF, 0x01234567], np.uint32)
  shape = (12, 50)
  call = tt.tile_call(functools.partial(bits_kernel, seed=seed, rows=4),
                      (struct(*shape, dtype=np.uint32), struct(*shape)), grid=3)
  lowered = call.lower(key)
  assemble(lowered)
  k = tuple(map(int, key)) if seed is None else (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
  index = np.arange(200).reshape(4, 50)
  want = np.concatenate([philox(k, (index, i, 7, 0))[0] for i in range(3)])
  uniform = np.concatenate([philox(k, (index, i, 0, 0))[0] for i in range(3)]) >> 9
  for got in (simulated.run(lowered, Case(call, (key,), (), "exact")), jax.jit(call)(key)):
    np.testing.assert_array_equal(got[0], want)
    np.testing.assert_array_equal(got[1], uniform.astype(np.float32) * np.float32(2**-23))


def test_uniform_numbers_fill_the_unit_interval():
  def kernel(o):
    o[...] = tt.random_uniform(5, (4096,))

  x = np.asarray(jax.jit(tt.tile_call(kernel, struct(4096), grid=1))())
  assert 0 <= x.min() < 0.002 and 0.998 < x.max() < 1
  assert abs(x.mean() - 0.5) < 0.015 and abs(x.var() - 1 / 12) < 0.005


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_the_upper_half_of_a_product_is_exact(dtype):
  rng = np.random.default_rng(1)
  info = np.iinfo(dtype)
  x, y = (rng.integers(info.min, info.max, 300, dtype=dtype, endpoint=True) for _ in range(2))
  x[:3], y[:3] = [info.min, info.max, 0], [info.min, info.min, info.max]

  def kernel(x, y, o):
    o[...] = tt.mul_hi(x[...], y[...])

  call = tt.tile_call(kernel, struct(300, dtype=dtype), grid=1)
  lowered = call.lower(x, y)
  want = (x.astype(object) * y.astype(object) >> 32).astype(dtype)
  np.testing.assert_array_equal(simulated.run(lowered, Case(call, (x, y), (), "exact"))[0], want)
  np.testing.assert_array_equal(jax.jit(call)(x, y), want)


@pytest.mark.parametrize(("f", "message"), [
  (lambda x: tt.random_bits(x, (4,)), r"random_bits: key is i32\[4\], not a scalar"),
  (lambda x: tt.random_bits((1, 2, 3), (4,)), "random_bits: key has 3 words"),
  (lambda x: tt.random_bits(0, (4,), stream=(1, 2, 3, 4)), "random_bits: stream has 4 words"),
  (lambda x: tt.random_bits(0, (4,), stream=x), r"random_bits: stream is i32\[4\], not a scalar"),
  (lambda x: tt.random_uniform(0, (4,), stream=1.5), r"philox_4x32: counter\[1\] is the float 1.5"),
  (lambda x: tt.philox_4x32(0, (x, 1)), "philox_4x32: counter is"),
  (lambda x: tt.philox_4x32(0, (x.astype(np.float32), 0, 0, 0)), r"counter\[0\] is f32\[4\], not an integer"),
  (lambda x: tt.mul_hi(x.astype(np.int16), x.astype(np.int16)), "mul_hi of i16"),
])
def test_what_is_no_key_or_counter_is_refused(f, message):
  with pytest.raises(TileTypeError, match=message) as e:
    trace_values(f, (dtypes.i32, (4,)))
  assert "random_test.py" in str(e.value) and "^" in str(e.value)
