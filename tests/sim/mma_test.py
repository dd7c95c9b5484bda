"""mma.sync and its matrix moves against products in float64 and the layouts of the catalog."""
from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.sim.wgmma_test import DTYPES
from tiletrace.lowering.layouts import catalog
from tiletrace.lowering.ptx import isa
from tiletrace.sim import fragments, mma

WARPS = 3
FORMS = [row.form(**dict(zip(row.mods, choice))) for row in (isa.MMA, isa.MMA_TF32, isa.MMA_F8, isa.MMA_S8)
         for choice in itertools.product(*row.mods.values()) if row.is_legal(dict(zip(row.mods, choice)))]


def lanes(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Register, lane/4 and lane%4 of n registers of a warp, as the figures of the ISA name them."""
  r, lane = np.ogrid[:n, :32]
  return r, lane // 4, lane % 4


def a_registers(a: np.ndarray) -> np.ndarray:
  """One warp's A [16, k] as registers: a word is consecutive along k; odd registers hold rows 8-15."""
  e = 4 // a.itemsize
  r, group, thread = lanes(a.shape[1] // (4 * e) * 2)
  k = e * (thread + 4 * (r // 2))
  return np.ascontiguousarray(a[(group + 8 * (r % 2))[..., None], k[..., None] + np.arange(e)]).view(np.uint32)[..., 0]


def b_registers(b: np.ndarray) -> np.ndarray:
  """One warp's B [k, 8] as registers."""
  e = 4 // b.itemsize
  r, group, thread = lanes(b.shape[0] // (4 * e))
  k = e * (thread + 4 * r)
  return np.ascontiguousarray(b[k[..., None] + np.arange(e), group[..., None]]).view(np.uint32)[..., 0]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_multiplies(form):
  mods = form.mods
  k = int(mods["shape"].rpartition("k")[2])
  rng = np.random.default_rng(k)
  low = 0 if mods["a"] == "u8" or mods["b"] == "u8" else -4
  a = rng.integers(low, 5, (WARPS, 16, k)).astype(DTYPES[mods["a"]])
  b = rng.integers(low, 5, (WARPS, k, 8)).astype(DTYPES[mods["b"]])
  c = rng.integers(-9, 10, (16 * WARPS, 8)).astype(np.float64)
  held = [np.concatenate([f(x) for x in operand], axis=1) for f, operand in ((a_registers, a), (b_registers, b))]
  accumulator = fragments.write_accumulator(c, mods["d"])
  counts = {s.name: s.count for s in form.slots}
  assert [len(held[0]), len(held[1]), len(accumulator)] == [counts["a"], counts["b"], counts["c"]]

  got = mma.multiply(mods, held[0], held[1], accumulator)

  assert got.shape == accumulator.shape and got.dtype == accumulator.dtype
  want = c + (a.astype(np.float64) @ b.astype(np.float64)).reshape(-1, 8)
  assert np.array_equal(fragments.read_accumulator(got, mods["d"]), want)


def test_fragments_of_m16n8k16_are_the_catalogs():
  rng = np.random.default_rng(0)
  for layout, pack, shape in ((catalog.mma_m16n8k16_a(), a_registers, (16, 16)),
                              (catalog.mma_m16n8k16_b(), b_registers, (16, 8))):
    matrix = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    held = pack(matrix).view(np.uint16).reshape(-1, 32, 2)
    index = np.ogrid[:shape[0], :shape[1]]
    register, lane = layout.coordinates("reg", index), layout.coordinates("lane", index)
    assert np.array_equal(held[register // 2, lane, register % 2], matrix)
  matrix = rng.standard_normal((16, 8)).astype(np.float32)
  layout, index = catalog.mma_m16n8k16_c(), np.ogrid[:16, :8]
  held = fragments.write_accumulator(matrix.astype(np.float64), "f32")
  assert np.array_equal(held[layout.coordinates("reg", index), layout.coordinates("lane", index)], matrix)


def test_signed_and_unsigned_bytes_mix_and_wrap():
  a, b = np.full((16, 32), 255, np.uint8), np.full((32, 8), -128, np.int8)
  c = np.full((16, 8), -2.0**31)
  got = mma.multiply(dict(a="u8", b="s8", d="s32"), a_registers(a), b_registers(b),
                     fragments.write_accumulator(c, "s32"))
  assert (got.view(np.int32) == 2**31 - 255 * 128 * 32).all()


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_matrix_moves_place_elements_as_the_catalog_says(num, trans):
  rng = np.random.default_rng(num)
  memory = rng.permutation(1 << 14).astype(np.uint16)
  addresses = 16 * rng.permutation(1 << 11)[:32 * WARPS]
  got = memory[mma.element_addresses(addresses, num, trans) // 2]
  layout = catalog.matrix_fragment(num, trans=trans)
  for w in range(WARPS):
    rows = addresses[32 * w:][:8 * num].reshape(num, 8)
    matrices = memory[rows[..., None] // 2 + np.arange(8)]
    index = np.ogrid[:num, :8, :8]
    register, lane = layout.coordinates("reg", index), layout.coordinates("lane", index)
    assert np.array_equal(got[register // 2, 32 * w + lane, register % 2], matrices)


def test_the_addresses_of_lanes_beyond_the_matrices_are_ignored():
  addresses = 16 * np.arange(32)
  moved = np.where(np.arange(32) < 16, addresses, 1 << 20)
  assert np.array_equal(mma.element_addresses(addresses, 2, False), mma.element_addresses(moved, 2, False))


def test_movmatrix_transposes_each_warps_matrix():
  matrices = np.random.default_rng(1).integers(0, 1 << 16, (WARPS, 8, 8), dtype=np.uint16)

  def held(m: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ascontiguousarray(x.reshape(32, 2)).view(np.uint32)[:, 0] for x in m])

  assert np.array_equal(mma.transpose(held(matrices)), held(matrices.transpose(0, 2, 1)))


def test_f16_accumulators_are_rounded_once():
  rng = np.random.default_rng(4)
  a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((16, 8)).astype(np.float16)
  c = rng.standard_normal((16, 8)).astype(np.float16).astype(np.float64)
  got = mma.multiply(dict(a="f16", b="f16", d="f16"), a_registers(a), b_registers(b),
                     fragments.write_accumulator(c, "f16"))
  want = (c + a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16)
  assert np.array_equal(fragments.read_accumulator(got, "f16"), want.astype(np.float64))


def test_copies_of_a_tile_may_be_stored_by_stmatrix_unordered():
  """Both warpgroups hold all of A, which each multiplies with its columns of B, and store it to one place."""
  def kernel(a, b, c, t):
    b_s, t_s = tt.alloc_shared((32, 64), b.dtype), tt.alloc_shared((32, 64), a.dtype)
    left, acc = tt.alloc_fragment((64, 32), a.dtype), tt.alloc_fragment((64, 64), jnp.float32)
    left[...] = a[...]
    b_s[...] = b[...]
    tt.gemm(left, b_s, acc, accumulate=False)
    t_s[...] = left[...].T
    c[...], t[...] = acc[...], t_s[...]

  rng = np.random.default_rng(0)
  a, b = (rng.integers(-4, 5, s).astype(jnp.bfloat16) for s in ((64, 32), (32, 64)))
  outs = (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.bfloat16))
  lowered = tt.tile_call(kernel, outs, grid=1, warpgroups=2).lower(a, b)
  assert "stmatrix" in lowered.as_text("ptx")
  c, t = lowered.simulate(a, b)
  np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32))
  np.testing.assert_array_equal(t, a.T)
