"""tt.take: numbers as jax ops and in PTX run on the CPU, in several layouts, and what is refused."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import assemble, struct
from tests.tracing import trace_values
from tiletrace.core import dtypes
from tiletrace.core.errors import TileIndexError, TileTypeError
from tiletrace.lowering.layouts.catalog import wgmma_accumulator
from tiletrace.lowering.layouts.fragment import blocked

rng = np.random.default_rng(5)


def take_kernel(x, i, y, *, axis, layout):
  """y[p] = x taken at i[p]."""
  p = tt.program_id(0)
  if layout is None:
    v = x[...]
  else:
    ref = tt.alloc_fragment(x.shape, x.dtype, layout=layout)
    ref[...] = x[...]
    v = ref[...]
  out = tt.take(v, i[p], axis)
  if out.ndim == 0:
    y[p] = out
  elif out.ndim == 1:
    y[p, :] = out
  else:
    y[p, :, :] = out


def take_call(x: np.ndarray, axis: int, programs: int, *, layout=None, **call) -> tt.TileCall:
  shape = (programs, *np.delete(x.shape, axis))
  return tt.tile_call(functools.partial(take_kernel, axis=axis, layout=layout),
                      jax.ShapeDtypeStruct(tuple(map(int, shape)), x.dtype), grid=programs, **call)


def bits(x: np.ndarray) -> np.ndarray:
  return x.view(f"u{x.dtype.itemsize}")


def sample(dtype, shape: tuple[int, ...]) -> np.ndarray:
  """Any bits, but for NaNs, of which there is one."""
  if np.dtype(dtype) == np.bool_:
    return rng.integers(0, 2, shape).astype(bool)
  if np.dtype(dtype).kind in "iu":
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
  x = rng.standard_normal(shape).astype(dtype)
  x.flat[:4] = [-0.0, np.inf, -np.inf, 0.0]
  return x


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.int32, np.uint32, np.bool_],
                         ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(1,), (7,), (200,)], ids=str)
def test_every_bit_of_every_element_arrives(dtype, shape):
  x, i = sample(dtype, (max(shape[0], 4),)), np.arange(max(shape[0], 4), dtype=np.int32)
  x, i = x[:shape[0]], i[:shape[0]]
  lowered = take_call(x, 0, len(i)).lower(x, i)

  np.testing.assert_array_equal(bits(lowered.simulate(x, i)[0]), bits(x))
  np.testing.assert_array_equal(bits(np.asarray(take_call(x, 0, len(i), backend="xla")(x, i))), bits(x))
  assert assemble(lowered).image


def test_nans_are_taken_and_do_no_harm_elsewhere():
  x, i = np.asarray([1, np.nan, 3], np.float32), np.asarray([0, 1, 2], np.int32)
  np.testing.assert_array_equal(take_call(x, 0, 3).lower(x, i).simulate(x, i)[0], x)
  np.testing.assert_array_equal(take_call(x, 0, 3, backend="xla")(x, i), x)


def test_abstract_indices_are_clamped():
  x, i = sample(np.int32, (10,)), np.asarray([-2**31, -1, 9, 10, 2**31 - 1], np.int32)
  want = x[[0, 0, 9, 9, 9]]
  np.testing.assert_array_equal(take_call(x, 0, 5).lower(x, i).simulate(x, i)[0], want)
  np.testing.assert_array_equal(take_call(x, 0, 5, backend="xla")(x, i), want)


LAYOUTS = {"default": (None, (40, 24), 1), "accumulator": (wgmma_accumulator(64, 96), (64, 96), 1),
           "accumulator of two warpgroups": (wgmma_accumulator(128, 64), (128, 64), 2),
           "three warpgroups": (blocked((96, 8), 32, 12, order=(0, 1)), (96, 8), 3)}


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_and_columns_are_right_in_any_layout(name, axis):
  layout, shape, warpgroups = LAYOUTS[name]
  x, i = sample(np.int32, shape), np.asarray([0, 3, 7], np.int32)
  lowered = take_call(x, axis, 3, layout=layout, warpgroups=warpgroups).lower(x, i)
  np.testing.assert_array_equal(lowered.simulate(x, i)[0], np.moveaxis(np.take(x, i, axis), axis, 0))


def test_static_indices_are_slices_and_count_from_the_end():
  assert trace_values(lambda v: tt.take(v, -1, axis=1), (dtypes.f32, (4, 8))).shape == (4,)
  x = sample(np.float32, (4, 8))
  call = tt.tile_call(lambda x, y: y.__setitem__(..., tt.take(x[...], -2, axis=1)), struct(4), grid=1, backend="xla",
                      name="last")
  np.testing.assert_array_equal(call(x), x[:, -2])


@pytest.mark.parametrize(("fn", "error", "says"), [
  (lambda v: tt.take(v, 4), TileIndexError, r"take: index 4 of axis 0 of f32\[4,8\]"),
  (lambda v: tt.take(v, 0, axis=2), TileIndexError, r"take: axis 2 of f32\[4,8\]"),
  (lambda v: tt.take(v, 0, axis=None), TileTypeError, "take: axis None"),
  (lambda v: tt.take(v, 1.5), TileTypeError, "take: index must be an integer, got 1.5"),
  (lambda v: tt.take(v, tt.arange(4)), TileTypeError, r"take: index must be an integer scalar, got i32\[4\]"),
  (lambda v: tt.take(v[:0], tt.program_id(0)), TileIndexError, r"take: f32\[0,8\] has no elements"),
])
def test_other_indices_and_axes_are_refused_at_their_line(fn, error, says):
  with pytest.raises(error, match=says) as info:
    trace_values(fn, (dtypes.f32, (4, 8)))
  assert "take_test.py" in str(info.value) and "tt.take(v" in str(info.value)
