"""Reductions in compiled kernels: their instructions, what is refused, and numbers that the corpus does not have."""
from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu import corpus_reduce  # noqa: F401  (it registers)
from tests.gpu.corpus import Case, build, normal
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F32, assemble, lower, struct
from tests.tolerances import assert_close
from tiletrace.core.errors import LoweringError
from tiletrace.core.ops.reduce import reduce_sum_p
from tiletrace.core.tile import bind_tile
from tiletrace.stages import Lowered


def reduced(name: str, rows: int, n: int, dtype: Any = F32, axis: int = 1, **call: Any) -> Lowered:
  def kernel(x, y):
    y[...] = getattr(tt, name)(x[...], axis=axis)

  return lower(kernel, [struct(rows, n, dtype=dtype)], struct(n if axis == 0 else rows, dtype=dtype), **call)


def facts(lowered: Lowered) -> dict[str, int]:
  """How often each of the instructions that exchange data stands in the PTX."""
  text = lowered.as_text("ptx")
  return {name: text.count(part) for name, part in (
    ("shuffles", "shfl.sync.bfly"), ("syncs", "bar.sync"), ("stores", "st.shared"), ("loads", "ld.shared"))}


@pytest.mark.parametrize(("rows", "n", "name"), [(4, 1000, "sum"), (4, 229, "max"), (8, 100, "min")])
def test_a_row_within_a_warp_needs_five_shuffles_and_no_shared_memory(rows, n, name):
  lowered = reduced(name, rows, n)
  per_warp = rows // 4
  assert facts(lowered) == {"shuffles": 5 * per_warp, "syncs": 0, "stores": 0, "loads": 0}
  assert assemble(lowered).image


def test_a_row_of_four_warps_is_exchanged_once_between_them():
  lowered = reduced("sum", 1, 8192, BF16)
  assert facts(lowered) == {"shuffles": 5, "syncs": 1, "stores": 1, "loads": 4}
  assert "reduce_sum: 4 warps share a result" in lowered.as_text("schedule")
  assert lowered.as_text("ptx").count("v4.b32") == 8192 * 2 // 16 // 128  # 16-byte loads


def test_columns_that_fill_the_warps_are_reduced_in_their_threads():
  assert facts(reduced("sum", 32, 1024, axis=0, warpgroups=2)) == {"shuffles": 0, "syncs": 0, "stores": 0, "loads": 0}


def test_one_exchange_in_a_loop_has_two_syncs_and_two_have_two():
  """The sync of one exchange also separates the accesses to the other's buffer."""
  def kernel(x, y, *, twice):
    acc = tt.alloc_fragment((1,), F32)
    acc[...] = 0
    for k in tt.range(4):
      v = x[:, tt.block(k, 1024)]
      top = tt.max(v, axis=1)
      acc[...] += tt.minimum(tt.sum(tt.exp(v - top[:, None]), axis=1), 9) if twice else top
    y[...] = acc[...]

  for twice in (False, True):
    lowered = lower(functools.partial(kernel, twice=twice), [struct(1, 4096)], struct(1))
    assert facts(lowered)["syncs"] == 2


def test_row_statistics_of_an_accumulator_are_two_shuffles_for_each_of_two_registers():
  lowered = build("attention-1x64x64x300").call.lower(*build("attention-1x64x64x300").inputs)
  assert "relayout" not in lowered.as_text("schedule")
  assert facts(lowered)["shuffles"] == 2 * 2 * 2  # a maximum and a sum
  assert "partials" not in lowered.as_text("schedule")


def test_in_a_consumer_role_the_warps_meet_at_the_roles_barrier():
  case = build("accumulator_sums")
  text = case.call.lower(*case.inputs).as_text("ptx")
  assert "shfl.sync.bfly" in text
  assert "bar.sync 1, 256;" in text


def test_a_vector_of_elements_is_masked_by_one_predicate():
  text = reduced("max", 1, 1000, warpgroups=1).as_text("ptx")
  assert text.count("selp.f32") == 4  # 250 vectors in 256 places: one register group of four is padded
  assert text.count("setp.gt.s32") == 2  # for the load and for the reduction


def test_sums_of_16_bit_floats_are_exchanged_in_f32():
  def kernel(x, y):
    y[...] = bind_tile(reduce_sum_p, [x[...]], axes=(1,))

  x = np.full((1, 4096), 2**-9, BF16)
  x[0, 0] = 1  # 16 bits hold no sum of 1 and 2**-9
  call = tt.tile_call(kernel, struct(1, dtype=BF16), grid=1)
  lowered = call.lower(x)
  assert "st.shared.f32" in lowered.as_text("ptx")
  (got,) = simulated.run(lowered, Case(call, (x,), (), "exact"))
  assert got[0] == np.asarray(1 + 4095 / 512, BF16)


def test_reductions_in_a_role_of_the_author_sync_that_role():
  def kernel(x, y):
    with tt.warpgroup(range(2)):
      y[...] = tt.sum(x[...], axis=1)

  x = normal(np.random.default_rng(3), 1, 1024)
  call = tt.tile_call(kernel, struct(1), grid=1, warpgroups=2)
  lowered = call.lower(x)
  assert facts(lowered) == {"shuffles": 5, "syncs": 2, "stores": 1, "loads": 8}
  (got,) = simulated.run(lowered, Case(call, (x,), (), "exact"))
  assert_close(got, x.astype(np.float64).sum(1), "reduce")


def test_one_thread_cannot_reduce():
  def kernel(x, y):
    s = tt.alloc_shared((4, 256), F32)
    with tt.warpgroup(0), tt.elect():
      y[0] = tt.sum(s[...])

  with pytest.raises(LoweringError) as e:
    lower(kernel, [struct(4, 256)], struct(4))
  assert "sum of f32[4,256] takes all threads of a warpgroup" in str(e.value)
  assert "y[0] = tt.sum(s[...])" in str(e.value)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("name", ["max", "min", "argmax"])
def test_padding_does_not_make_extrema_of_8_bit_floats_nan(name, dtype):
  """Most threads hold nothing of 3 x 255: what they bring to the exchange is a number of the dtype."""
  def kernel(x, y):
    y[...] = getattr(tt, name)(x[...])

  x = np.random.default_rng(2).integers(-4, 5, (3, 255)).astype(dtype)
  call = tt.tile_call(kernel, struct(dtype=np.int32 if name == "argmax" else dtype), grid=1, warpgroups=2)
  got, = simulated.run(call.lower(x), Case(call, (x,), (), "exact"))
  assert got == getattr(np, name)(x.astype(F32))
