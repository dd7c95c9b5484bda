"""TMA reductions, tt.copy_async(s, y, reduce=): what programs add up in global memory, and what is refused."""
from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F16, F32, I32, assemble, lower, struct
from tiletrace.core.errors import TileTypeError

PROGRAMS = 6


def kernel(x, old, y, *, op):
  """Each program its rows of x into the same rows of y, which hang over the end of it."""
  s = tt.alloc_shared((16, 64), x.dtype)
  with tt.warpgroup(0):
    s[...] = x[tt.program_id(0), :, :]
    tt.fence()
    tt.sync()
    with tt.elect():
      tt.copy_async(s, y.at[tt.ds(8 * (tt.program_id(0) % 2), 16), :], reduce=op)
      tt.commit_group()
      tt.wait_group()


@pytest.mark.parametrize(("op", "dtype"), [
  ("add", F32), ("add", I32), ("add", BF16), ("add", F16), ("min", I32), ("max", BF16), ("min", F16),
  ("max", np.uint32), ("and", I32), ("or", np.uint32), ("xor", I32)])
def test_elements_of_all_programs_are_reduced_in_memory(op, dtype):
  rng = np.random.default_rng(0)
  x = rng.integers(-9, 9, (PROGRAMS, 16, 64)).astype(dtype)           # sums of halves are exact
  old = rng.integers(-9, 9, (20, 64)).astype(dtype)
  call = tt.tile_call(functools.partial(kernel, op=op), jax.ShapeDtypeStruct((20, 64), dtype), grid=PROGRAMS,
                      input_output_aliases={1: 0}, name="reduce")
  lowered = call.lower(x, old, target="sm_90a")
  want = old.astype(np.float64 if dtype in (F32, BF16, F16) else dtype)
  how = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
         "xor": np.bitwise_xor}[op]
  for p in range(PROGRAMS):
    first = 8 * (p % 2)
    rows = min(16, 20 - first)
    want[first:first + rows] = how(want[first:first + rows], x[p, :rows].astype(want.dtype))

  np.testing.assert_array_equal(np.asarray(lowered.simulate(x, old)[0]).astype(want.dtype), want)
  assert re.search(rf"cp\.reduce\.async\.bulk\.tensor\.2d\S*\.{op}\.", lowered.as_text("ptx"))
  assert f"TMA reduction ({op}), box" in str(lowered.report())
  assemble(lowered)


@pytest.mark.parametrize(("dtype", "how", "message"), [
  (F32, dict(reduce="mean"), "copy_async: reduce is 'mean'"),
  (F32, dict(reduce="max"), "copy_async: reduce='max' of f32: TMA has it for i32, u32, f16, bf16"),
  (BF16, dict(reduce="or"), "copy_async: reduce='or' of bf16: TMA has it for i32, u32"),
  (F32, dict(reduce="add", eviction_policy="evict_last"), "copy_async: reduce='add' with an eviction_policy"),
])
def test_what_tma_does_not_reduce_is_refused_at_the_users_line(dtype, how, message):
  def refused(x, y):
    s = tt.alloc_shared((16, 64), x.dtype)
    tt.copy_async(s, y, **how)

  with pytest.raises(TileTypeError) as e:
    lower(refused, [struct(16, 64, dtype=dtype)], struct(16, 64, dtype=dtype))
  assert str(e.value).startswith(message) and "^" in str(e.value)


def test_a_load_reduces_nothing():
  def refused(x, y):
    s = tt.alloc_shared((16, 64), x.dtype)
    tt.copy_async(x, s, reduce="add")
    y[...] = s[...]

  with pytest.raises(TileTypeError, match=r"reduce='add' from x: Ref<global>"):
    lower(refused, [struct(16, 64)], struct(16, 64))
