"""Views of shared buffers at an index of any dimension: right in the simulator, or refused where wgmma would read."""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tiletrace.core.errors import LayoutError, LoweringError
from tiletrace.lowering.layouts.relation import make
from tiletrace.lowering.layouts.shared import shared_layout
from tiletrace.lowering.shared_views import _drop, _step

rng = np.random.default_rng(17)
DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8]


def normal(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
  return (8 * rng.standard_normal(shape)).astype(dtype)


def simulated(kernel: Any, x: np.ndarray, out: tuple[int, ...]) -> np.ndarray:
  call = tt.tile_call(kernel, jax.ShapeDtypeStruct(out, x.dtype), grid=1, backend="sim")
  return np.asarray(call(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 32), (48, 20)])
def test_columns_are_read_at_an_index(shape, dtype):
  def kernel(x, y):
    s = tt.alloc_shared(shape, x.dtype)
    tt.copy(x, s)
    for j in tt.range(shape[1]):
      y[j, :] = s[:, j]

  x = normal(shape, dtype)
  assert (simulated(kernel, x, shape[::-1]) == x.T).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_written_at_an_index(dtype):
  def kernel(x, y):
    s = tt.alloc_shared((48, 20), x.dtype)
    for j in tt.range(20):
      s[:, j] = x[j, :]
    y[...] = s[...]

  x = normal((20, 48), dtype)
  assert (simulated(kernel, x, (48, 20)) == x.T).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_index_stands_in_the_middle_or_at_both_ends(dtype):
  def kernel(x, y):
    s = tt.alloc_shared((4, 32, 16), x.dtype)
    t = tt.alloc_shared((4, 16, 32), x.dtype)
    s[...] = x[...]
    for i in tt.range(4):
      for j in tt.range(16):
        t[i, j, :] = s[i, :, j]
    for j in tt.range(16):
      tt.copy(t.at[:, j, :], y.at[:, j, :])

  x = normal((4, 32, 16), dtype)
  assert (simulated(kernel, x, (4, 16, 32)) == x.swapaxes(1, 2)).all()


def test_an_operand_that_wgmma_cannot_read_with_such_gaps_is_refused():
  def kernel(a, b, c):
    a_s = tt.alloc_shared((64, 2, 64), a.dtype)
    b_s = tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), jnp.float32)
    acc[...] = 0
    tt.copy(a, a_s)
    tt.copy(b, b_s)
    for j in tt.range(2):
      tt.gemm(a_s.at[:, j, :], b_s, acc)
    c[...] = acc[...]

  a, b = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 2, 64), (64, 64)))
  with pytest.raises(LayoutError, match="no shared layout for a_s") as e:
    tt.tile_call(kernel, jax.ShapeDtypeStruct((64, 64), jnp.float32), grid=1).lower(a, b)
  assert "rows of 128 bytes, 2 of them" in str(e.value)
  assert "a_s = tt.alloc_shared((64, 2, 64), a.dtype)" in str(e.value)


def test_what_is_left_of_a_layout_lies_where_it_lay():
  shape = (4, 8, 16)
  layout = make({"off": 512}, shape, lambda off: (off // 128, off // 16 % 8, off % 16))
  for dims in ((0,), (1,), (2,), (0, 2), (1, 2)):
    kept = [d for d in range(3) if d not in dims]
    left = _drop(layout, dims)
    for index in np.ndindex(*(shape[d] for d in kept)):
      whole = [0, 0, 0]
      for d, i in zip(kept, index, strict=True):
        whole[d] = i
      assert left.offset_of(index) == layout.offset_of(whole)


def test_parts_of_parts_are_cut_at_indices_that_stay_inside_of_both():
  def kernel(x, y):
    i = tt.program_id(0)
    s = tt.alloc_shared(x.shape, x.dtype)
    tt.copy(x, s)
    y[0, :] = s.at[2:6].at[i % 4][...]
    y[1, :] = s.at[tt.block(i % 2, 4)].at[tt.block(i % 3, 1)][...][0]
    y[2, :] = s.at[1::2].at[i % 3][...]

  x = normal((8, 20), jnp.float32)
  np.testing.assert_array_equal(simulated(kernel, x, (3, 20)), x[[2, 0, 1]])


def test_a_part_of_a_part_that_may_end_outside_of_it_is_refused():
  def kernel(x, y):
    s = tt.alloc_shared(x.shape, x.dtype)
    s[...] = x[...]
    y[...] = s.at[2:6].at[tt.block(tt.program_id(0) % 3, 2)][...]

  with pytest.raises(LoweringError) as e:
    tt.tile_call(kernel, jax.ShapeDtypeStruct((2, 8), jnp.float32), grid=4).lower(normal((8, 8), jnp.float32))
  assert "is not provably from 0 to 6, and inside of the part of it that this part is cut from" in str(e.value)
  assert "s.at[2:6]" in str(e.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_buffer_may_be_contiguous_along_any_dimension(dtype):
  """Where a transposed view is copied into: the first of three is the array's last."""
  def kernel(x, y):
    s = tt.alloc_shared(x.shape[::-1], x.dtype)
    one = tt.alloc_shared((), x.dtype)
    tt.copy(x, s.T)
    tt.copy(s.at[3, 2, 1], one)
    y[...] = s[...]
    y[0, 0, 0] = one[...]

  x = normal((3, 5, 16), dtype)
  want = x.T.copy()
  want[0, 0, 0] = want[3, 2, 1]
  np.testing.assert_array_equal(simulated(kernel, x, (16, 5, 3)), want)


def test_only_the_bits_in_which_two_dimensions_meet_keep_a_start_from_being_a_shift():
  """192 of 384 rows of 128 bytes: of the rows' bits the swizzle takes the lowest three; the rest are a sum."""
  layout = shared_layout((384, 64), 16, 128)
  assert _step(layout, 0, 192, 192, 1) == 192 * 64
  assert _step(layout, 0, 4, 192, 1) is None
  assert _step(layout, 1, 8, 8, 1) is None


@pytest.mark.parametrize("step", [64, 32, 16])
def test_blocks_of_a_loop_may_be_the_whole_buffer(step):
  """With one block, the only start in range is 0, whatever the index is."""
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), jnp.float32)
    acc[...] = 0
    tt.copy(a, a_s)
    tt.copy(b, b_s)
    for k in tt.range(64 // step):
      tt.gemm(a_s.at[:, tt.block(k, step)], b_s.at[tt.block(k, step), :], acc)
    c[...] = acc[...]

  a, b = (rng.integers(-4, 5, (64, 64)).astype(jnp.bfloat16) for _ in range(2))
  lowered = tt.tile_call(kernel, jax.ShapeDtypeStruct((64, 64), jnp.float32), grid=1).lower(a, b)
  assert [c.variant for c in lowered.choices if c.op == "gemm"] == ["wgmma_ss"]
  np.testing.assert_array_equal(lowered.simulate(a, b)[0], a.astype(np.float32) @ b.astype(np.float32))


def test_an_index_that_can_only_be_0_moves_nothing():
  def kernel(x, y):
    s = tt.alloc_shared(x.shape, x.dtype)
    s[...] = x[...]
    for i in tt.range(0, 1, 2):
      y[...] = s[:, i % 2]

  x = normal((4, 2), jnp.float32)
  np.testing.assert_array_equal(simulated(kernel, x, (4,)), x[:, 0])
