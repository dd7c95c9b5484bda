"""grouped_matmul against float64: empty groups, ends within tiles, rows of no group; how its copies are made."""
from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.kernels.arrays import normal
from tests.lowering.kernels import notes, struct, variants
from tests.tolerances import assert_close
from tiletrace.kernels import grouped_matmul, grouped_matmul_reference
from tiletrace.kernels.grouped_matmul import choose_tiling, grouped_matmul_call, plan

BF16 = jnp.bfloat16

# rows, sizes: tiles have 64 rows where groups are small on average, else 128.
SIZES = {
  "tiles filled exactly": (256, (128, 128)), "groups end within tiles": (300, (70, 1, 129, 100)),
  "empty groups": (200, (0, 0, 150, 0, 50, 0)), "rows of no group": (300, (30, 65)), "all empty": (130, (0, 0, 0)),
  "one group": (333, (333,)), "more groups than rows": (5, (0, 1, 0, 0, 2, 0, 1, 0, 0, 0, 1, 0)),
  "no rows": (0, (0, 0)), "one row": (1, (0, 1)),
}


def operands(m: int, sizes: tuple[int, ...], k: int, n: int, *, transpose_w: bool = False, dtype=BF16) -> tuple:
  shape = (len(sizes), n, k) if transpose_w else (len(sizes), k, n)
  x, w = (np.asarray(normal(i, *s, dtype=dtype)) for i, s in enumerate(((m, k), shape)))
  return x, w, np.asarray(sizes, np.int32)


def product(x, w, sizes, *, transpose_w: bool = False) -> np.ndarray:
  x, w = x.astype(np.float64), np.swapaxes(w, 1, 2).astype(np.float64) if transpose_w else w.astype(np.float64)
  out, row = np.zeros((len(x), w.shape[2])), 0
  for g, size in enumerate(sizes):
    out[row:row + size] = x[row:row + size] @ w[g]
    row += size
  return out


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_every_row_is_multiplied_by_its_groups_matrix(name, transpose_w):
  m, sizes = SIZES[name]
  inputs = operands(m, sizes, 72, 40, transpose_w=transpose_w)
  want = product(*inputs, transpose_w=transpose_w)
  assert_close(jax.jit(grouped_matmul, static_argnames="transpose_w")(*inputs, transpose_w=transpose_w), want, "gemm")
  if m:
    lowered = grouped_matmul_call(m, inputs[1].shape, BF16, transpose_w=transpose_w).lower(*inputs)
    assert_close(lowered.simulate(*inputs)[0], want, "gemm", name)


@pytest.mark.parametrize(("m", "n", "tile"), [
  (600, 264, "[4,128,64]"), (600, 120, "[5,128,64]"), (90, 120, "[6,64,64]")])
def test_copies_are_tma_by_a_producer_although_the_sizes_are_known_to_the_gpu_only(m, n, tile):
  x, w = struct(m, 128, dtype=BF16), struct(4, 128, n, dtype=BF16)
  lowered = grouped_matmul_call(m, w.shape, BF16).lower(x, w, struct(4, dtype=np.int32))

  assert (variants(lowered, "copy"), variants(lowered, "gemm")) == (["tma", "tma"], ["wgmma_ss"])
  assert "filled by TMA from the producer warpgroup" in notes(lowered)
  assert notes(lowered).count("sent to the producer") == 3              # the group, its end, and the first row
  assert f"x_s Ref<shared>{{bf16{tile}}}" in lowered.as_text("schedule")
  assert lowered.compile().memory_analysis()["spill_stores"] == 0


def test_rows_that_tma_cannot_take_are_copied_by_threads():
  inputs = operands(200, (100, 60), 70, 33, dtype=jnp.float16)
  lowered = grouped_matmul_call(200, inputs[1].shape, jnp.float16).lower(*inputs)
  assert "tma" not in variants(lowered, "copy")
  assert_close(lowered.simulate(*inputs)[0], product(*inputs), "gemm")


@pytest.mark.parametrize("persistent", [True, "dynamic"])
def test_persistent_programs_give_the_same(persistent):
  """Programs wait for scalars that the consumers send, and some have nothing to multiply."""
  inputs = operands(700, (300, 0, 1, 260), 128, 136)
  lowered = grouped_matmul_call(700, inputs[1].shape, BF16, persistent=persistent).lower(*inputs)
  assert lowered.compile().memory_analysis()["spill_stores"] == 0
  assert_close(lowered.simulate(*inputs)[0], product(*inputs), "gemm")


@pytest.mark.parametrize("seed", range(6))
def test_any_sizes(seed):
  rng = np.random.default_rng(seed)
  groups, m = int(rng.integers(1, 9)), int(rng.integers(1, 500))
  cuts = np.sort(rng.integers(0, m + 1, groups))
  sizes = tuple(int(n) for n in np.diff(cuts, prepend=0) * (rng.random(groups) > 0.2))
  inputs = operands(m, sizes, 64, 48)
  lowered = grouped_matmul_call(m, inputs[1].shape, BF16).lower(*inputs)
  assert_close(lowered.simulate(*inputs, seed=seed)[0], product(*inputs), "gemm", f"{m} rows, {sizes}")


@pytest.mark.parametrize("name", SIZES)
def test_a_plan_names_each_row_once_with_its_group(name):
  m, sizes = SIZES[name]
  for bm in (64, 128):
    g, first, end = np.asarray(plan(jnp.asarray(sizes, jnp.int32), m, bm))
    assert g.shape == (-(-m // bm) + len(sizes),)
    owners = np.full(m, -1)
    for owner, a, b in zip(g, first, end):
      rows = slice(a, max(a, min(a + bm, b)))
      assert (owners[rows] == -1).all()
      owners[rows] = owner
    ends = np.cumsum(sizes)
    np.testing.assert_array_equal(owners, np.searchsorted(ends, np.arange(m), side="right"))


@pytest.mark.parametrize(("transpose_w", "persistent"), [(False, True), (True, "dynamic")])
@pytest.mark.parametrize("name", SIZES)
def test_planned_products_are_those_that_are_not(name, transpose_w, persistent):
  m, sizes = SIZES[name]
  if not m:
    return
  x, w, sizes = operands(m, sizes, 136, 264, transpose_w=transpose_w)
  t = choose_tiling(m, 264, len(sizes))
  inputs = x, w, sizes, np.asarray(plan(sizes, m, t.bm))
  lowered = grouped_matmul_call(m, w.shape, BF16, transpose_w=transpose_w, tiling=t, planned=True,
                                persistent=persistent).lower(*inputs)
  assert "sent to the producer" not in notes(lowered) and "the epilogue is deferred" in notes(lowered)
  assert variants(lowered, "store")[0] == "tma" and set(variants(lowered, "copy")) == {"tma"}
  assert lowered.compile().memory_analysis()["spill_stores"] == 0
  assert_close(lowered.simulate(*inputs, num_sms=3)[0], product(x, w, sizes, transpose_w=transpose_w), "gemm", name)


def test_what_fills_the_gpu_several_times_is_planned():
  def planned(m, n, k):
    x, w = struct(m, k, dtype=BF16), struct(8, k, n, dtype=BF16)
    tiles = -(-m // choose_tiling(m, n, 8).bm) + 8
    return f"i32[3,{tiles}]" in str(jax.make_jaxpr(grouped_matmul)(x, w, struct(8, dtype=np.int32)))

  assert planned(8192, 4096, 256) and not planned(512, 1024, 256)
  assert not planned(700, 32768, 256)                      # tiles of 64 rows
  assert not planned(8192, 4097, 256)                      # rows that TMA does not take


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_derivatives_are_ragged_dots(transpose_w, planned, monkeypatch):
  if planned:
    for name in ("_WAVES", "_SMALL"):
      monkeypatch.setattr(sys.modules["tiletrace.kernels.grouped_matmul"], name, 0)
  x, w, sizes = operands(120, (50, 0, 33), 72, 40, transpose_w=transpose_w)
  weight = jax.random.normal(jax.random.key(3), (120, 40), jnp.float32)

  def grads(f):
    return jax.jit(jax.grad(lambda x, w: jnp.vdot(f(x, w, sizes, transpose_w=transpose_w).astype(jnp.float32), weight),
                            (0, 1)))(x, w)

  for got, want in zip(grads(grouped_matmul), grads(grouped_matmul_reference), strict=True):
    got, want = (np.asarray(g).astype(np.float64) for g in (got, want))
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2 * np.abs(want).max())


def test_no_groups_give_zeros():
  got = grouped_matmul(jnp.ones((3, 8), BF16), jnp.ones((0, 8, 5), BF16), jnp.zeros(0, jnp.int32))
  np.testing.assert_array_equal(got, np.zeros((3, 5)))


@pytest.mark.parametrize(("call", "message"), [
  (lambda x, w, s: grouped_matmul(x, w[0], s), r"x is bfloat16\[20, 64\], w bfloat16\[64, 24\]"),
  (lambda x, w, s: grouped_matmul(x, w, s, transpose_w=True), "different inner extents"),
  (lambda x, w, s: grouped_matmul(x, w, s[1:]), r"sizes is int32\[1\], w has 2 matrices"),
  (lambda x, w, s: grouped_matmul(x, w, s.astype(jnp.float32)), "sizes is float32"),
  (lambda x, w, s: grouped_matmul(x.astype(jnp.float32), w, s), "x is float32"),
])
def test_operands_that_do_not_fit_are_refused(call, message):
  x, w, sizes = map(jnp.asarray, operands(20, (12, 8), 64, 24))
  with pytest.raises(tt.TileTypeError, match=message):
    call(x, w, sizes)
