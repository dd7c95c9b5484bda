from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError

WIDE = (dtypes.i64, dtypes.u64, dtypes.f64)


PAIRS = list(itertools.combinations_with_replacement(dtypes.SUPPORTED, 2))


def jnp_promotes(a, b):
  """None where jnp refuses."""
  try:
    return np.dtype(jnp.promote_types(a, b))
  except ValueError as e:
    assert "TypePromotionError" in type(e).__name__
    return None


@pytest.mark.parametrize("a, b", PAIRS, ids=str)
def test_promotion_is_the_lattice_of_jnp(a, b):
  x64 = a in WIDE or b in WIDE
  with jax.enable_x64(x64):
    expected = jnp_promotes(a, b)
  if expected is not None and expected == dtypes.f64 and dtypes.f64 not in (a, b):
    expected = dtypes.f32  # u64 with i8: neither is an f64
  if expected is None:
    with pytest.raises(TileTypeError, match="no common dtype"):
      dtypes.promote(a, b)
  else:
    assert dtypes.promote(a, b) == expected == dtypes.promote(b, a)


@pytest.mark.parametrize("dtype", dtypes.SUPPORTED, ids=str)
@pytest.mark.parametrize("number", [True, 3, 0.5], ids=str)
def test_python_numbers_are_weak_as_in_jnp(dtype, number):
  with jax.enable_x64(dtype in WIDE):
    expected = (jnp.ones((), dtype) * number).dtype
  if dtype in WIDE and dtypes.is_integer(dtype) and isinstance(number, float):
    expected = dtypes.f32  # the integer is 64 bits wide, the float is not: nothing asks for f64
  assert dtypes.promote(dtype, number) == expected


@pytest.mark.parametrize("x64", [False, True])
def test_nothing_becomes_64_bits_wide_by_itself_whatever_x64_is(x64):
  with jax.enable_x64(x64):
    assert dtypes.promote(dtypes.i32, 0.5) == dtypes.f32
    assert dtypes.promote(dtypes.u32, dtypes.i32) == dtypes.i32
    assert dtypes.promote(dtypes.bool_, 1) == dtypes.i32
    assert dtypes.promote(1, 2) == dtypes.i32
    assert dtypes.canonical(float) == dtypes.f32
    assert dtypes.canonical(int) == dtypes.i32


@pytest.mark.parametrize("spelling", [jnp.bfloat16, "bfloat16", np.dtype(jnp.bfloat16), jnp.bfloat16.dtype])
def test_every_spelling_of_a_dtype_is_one_dtype(spelling):
  assert dtypes.canonical(spelling) == dtypes.bf16
  assert dtypes.short_name(dtypes.canonical(spelling)) == "bf16"


@pytest.mark.parametrize("wrong", [None, "complex64", "nope", np.dtype([("a", "f4")]), 7, jnp.complex64])
def test_what_is_not_a_tile_dtype_is_refused(wrong):
  with pytest.raises(TileTypeError, match="dtype"):
    dtypes.canonical(wrong)


def test_short_names_are_distinct():
  assert len({dtypes.short_name(d) for d in dtypes.SUPPORTED}) == len(dtypes.SUPPORTED)
