"""Predicates, fills, vectors and tensor maps of loads, stores and copies."""
from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import Case, normal
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F32, assemble, count, lower, matmul, struct, variants
from tests.tolerances import assert_close
from tiletrace.core.errors import ResourceError
from tiletrace.lowering.emit import addressing
from tiletrace.lowering.layouts.catalog import wgmma_accumulator


def copy_kernel(x, y, *, rows, columns):
  at = tt.block(tt.program_id(0), rows), tt.block(tt.program_id(1), columns)
  y[at] = x[at]


def copied(shape, rows, columns, dtype=F32):
  x = struct(*shape, dtype=dtype)
  return lower(copy_kernel, [x], x, grid=(tt.cdiv(shape[0], rows), tt.cdiv(shape[1], columns)),
               static=dict(rows=rows, columns=columns))


def guards(lowered):
  """Comparisons with the array's extents."""
  return set(re.findall(r"setp\.lt\.u32 %p\d+, %r\d+, (\d+);", lowered.as_text("ptx")))


@pytest.mark.parametrize(("shape", "tested"), [
  ((64, 128), set()), ((60, 128), {"60"}), ((64, 100), {"100"}), ((60, 100), {"60", "100"})])
def test_only_dimensions_that_overhang_are_tested(shape, tested):
  assert guards(copied(shape, 16, 64)) == tested


def test_one_test_serves_every_access_of_a_row():
  tested = re.findall(r"setp\.lt\.u32 %p\d+, (%r\d+), 60;", copied((60, 128), 16, 128).as_text("ptx"))
  rows = 16 * 128 // 128 // 4 // (128 // 4 // 32)               # that a thread holds: 4 elements each
  assert len(tested) == 2 * rows                                # once for its load, once for its store


def test_padding_of_a_fragment_is_neither_loaded_nor_stored():
  """7 x 24 in a hull: the rows of the view are tested against 7 though the array goes on."""
  def kernel(x, y):
    y[tt.ds(8, 7), :] = x[tt.ds(8, 7), :]

  text = lower(kernel, [struct(64, 24)], struct(64, 24)).as_text("ptx")
  limit = re.findall(r"setp\.gt\.s32 (%p\d+), 7, %r\d+;", text)
  assert limit
  accesses = re.findall(r"^\s*(@%p\d+ )?(?:ld|st)\.global", text, re.MULTILINE)
  assert accesses and all(accesses)


def test_padding_is_not_stored_over_the_next_row_of_shared_memory():
  def kernel(x, y):
    s = tt.alloc_shared((7, 33), x.dtype)
    s[...] = x[...]
    y[...] = s[...]

  text = lower(kernel, [struct(7, 33)], struct(7, 33)).as_text("ptx")
  accesses = re.findall(r"^\s*(@%p\d+ )?(?:ld|st)\.shared", text, re.MULTILINE)
  assert accesses and all(accesses)
  assert re.search(r"setp\.gt\.s32 %p\d+, 33, %r\d+;", text)


def test_registers_that_may_stay_empty_hold_the_fill():
  def kernel(x, y):
    y[...] = tt.load(x.at[tt.ds(0, 64)], fill_value=2.5)

  text = lower(kernel, [struct(60)], struct(64)).as_text("ptx")
  assert len(re.findall(r"mov\.(?:f|b)32 %f\d+, (?:2\.5|0f40200000)", text)) == 4


def test_cp_async_past_an_edge_reads_nothing_and_writes_zeros():
  def kernel(x, y):
    s = tt.alloc_shared((32, 64), x.dtype)
    tt.copy(x.at[tt.block(tt.program_id(0), 32), :], s, dispatch="cp_async")
    y[tt.block(tt.program_id(0), 32), :] = s[...]

  inside, tail = (lower(kernel, [struct(n, 64)], struct(n, 64), grid=2) for n in (64, 40))
  assert count(inside, r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 16;") == 4
  assert count(tail, r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 16, %r\d+;") == 4
  assert re.search(r"selp\.u32 %r\d+, 16, 0, %p\d+;", tail.as_text("ptx"))
  assemble(tail)


def test_bools_travel_in_words():
  x = struct(4096, dtype="bool")

  def kernel(x, y):
    r = tt.block(tt.program_id(0), 2048)
    y[r] = ~x[r]

  lowered = lower(kernel, [x], x, grid=2)
  assert count(lowered, "ld.global.nc.v4.b32") == 1 and count(lowered, "st.global.v4.b32") == 1
  assert count(lowered, "setp.ne.b32") == 16
  assemble(lowered)


def test_tensor_maps_describe_the_arrays():
  lowered = matmul(1000, 776, 336, bm=128, bn=128, bk=64)
  maps = {m.argument: m for m in lowered.lowering.emitted.tensor_maps}
  assert [(maps[i].dims, maps[i].strides, maps[i].box, maps[i].swizzle) for i in range(3)] == [
    ((336, 1000), (672,), (64, 128), 128), ((776, 336), (1552,), (64, 64), 128), ((776, 1000), (1552,), (64, 64), 128)]
  assert {m.dtype for m in maps.values()} == {"bfloat16"}


def test_a_batch_is_one_dimension_more_of_the_map():
  def kernel(x, y):
    s = tt.alloc_shared((32, 64), x.dtype)
    b = tt.program_id(0)
    tt.copy(x.at[b, tt.block(tt.program_id(1), 32), :], s)
    y[b, tt.block(tt.program_id(1), 32), :] = s[...]

  x = struct(3, 70, 64, dtype=BF16)
  lowered = lower(kernel, [x], x, grid=(3, 3))
  (m,) = lowered.lowering.emitted.tensor_maps
  assert (m.dims, m.strides, m.box) == ((64, 70, 3), (128, 8960), (64, 32, 1))
  assert count(lowered, "cp.async.bulk.tensor.3d") == 1


def test_a_grid_over_the_hardwares_limit_is_refused():
  def kernel(x, y):
    y[...] = x[...]

  with pytest.raises(ResourceError, match="has 4294967296 programs, the hardware takes 2147483647"):
    tt.tile_call(kernel, struct(64), grid=(65536, 65536))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("swizzle", [0, 32, 64])
@pytest.mark.parametrize("warpgroups", [2, 3, 4, 6])
def test_warpgroups_may_begin_inside_of_a_swizzle_s_period(warpgroups, swizzle, dtype):
  """An accumulator of 96 columns shared out: 48, 32, 24 or 16 to a warpgroup, of rows of 32 to 128 bytes."""
  def kernel(x, y):
    mine = tt.alloc_fragment((64, 96), dtype, layout=wgmma_accumulator(64, 96, warpgroups, "n"))
    shared = tt.alloc_shared((64, 96), dtype, layout=tt.swizzle(swizzle) if swizzle else None)
    mine[...] = x[...]
    shared[...] = mine[...]
    y[...] = shared[...]

  x = normal(np.random.default_rng(warpgroups), 64, 96, dtype=dtype)
  call = tt.tile_call(kernel, struct(64, 96, dtype=dtype), grid=1, warpgroups=warpgroups)
  (got,) = simulated.run(call.lower(x), Case(call, (x,), (), "exact"))
  np.testing.assert_array_equal(got, x)


def test_a_part_that_starts_where_its_fragment_does_is_not_all_of_it():
  def kernel(x, y):
    f = tt.alloc_fragment((64, 64), F32)
    f[...] = x[...]
    f[:, :32] = f[:, :32] * 2
    y[...] = f[...]

  with pytest.raises(tt.LayoutError, match="does not cut whole registers"):
    lower(kernel, [struct(64, 64)], struct(64, 64))


@pytest.mark.parametrize("warps", [1, 4, 8, 12])
def test_addresses_that_differ_in_every_warp_are_chosen_bit_by_bit(warps):
  """Any table: halves of the threads that a bit tells apart, until what is left is a sum or an XOR."""
  threads = 32 * warps
  rng = np.random.default_rng(warps)
  starts = rng.permutation(warps)[np.arange(threads) // 32] * 128
  table = (starts + np.arange(threads) % 32 * 4)[:, None]
  period = addressing._period(table)
  assert period == 1 << (threads - 1).bit_length() if warps > 1 else 32
  half = period // 2
  below, above = table[np.arange(threads) % half], table[half + np.arange(threads) % min(half, threads - half)]
  chosen = np.where(np.arange(threads)[:, None] & half, above, below)
  np.testing.assert_array_equal(chosen, table)
  assert max(addressing._period(below), addressing._period(above)) <= half


def test_three_warpgroups_read_operands_of_columns_that_no_power_of_two_divides():
  """256 columns over three: wgmma declines, and the fragments of mma.sync begin in each warp elsewhere."""
  def kernel(x, w, y):
    x_s, w_s = tt.alloc_shared((64, 64), BF16), tt.alloc_shared((64, 256), BF16)
    acc = tt.alloc_fragment((64, 256), jnp.float32)
    acc[...] = 0
    tt.copy(x, x_s)
    tt.copy(w, w_s)
    tt.gemm(x_s, w_s, acc, policy=tt.FULL_COL)
    y[...] = acc[...]

  rng = np.random.default_rng(0)
  x, w = (rng.standard_normal(s).astype(BF16) for s in ((64, 64), (64, 256)))
  call = tt.tile_call(kernel, struct(64, 256), grid=1, warpgroups=3, backend="sim")
  lowered = call.lower(x, w)

  assert variants(lowered, "gemm") == ["mma_sync"]
  assert_close(call(x, w), x.astype(np.float64) @ w.astype(np.float64), "gemm")


@pytest.mark.parametrize("warpgroups", [2, 3])
def test_bools_are_no_matrices_for_ldmatrix(warpgroups):
  """What crosses warps does so through shared memory: bytes there, predicates in registers."""
  def kernel(x, y, z):
    flags = x[...] > 1
    y[...] = tt.all(flags, axis=0)
    z[...] = flags == tt.broadcast_to(flags[32:33], flags.shape)

  flags = tuple(struct(*shape, dtype="bool") for shape in ((8, 4), (64, 8, 4)))
  call = tt.tile_call(kernel, flags, grid=1, warpgroups=warpgroups)
  x = normal(np.random.default_rng(5), 64, 8, 4)
  x[:, 0, 0] = 2
  for got, want in zip(simulated.run(call.lower(x), Case(call, (x,), (), "exact")), call(x), strict=True):
    np.testing.assert_array_equal(got, np.asarray(want))
