"""flash_decode and mla_decode against float32 jnp, as jax ops and in the simulator; refusals; how they assemble."""
from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.kernels import arrays
from tiletrace.core.graph import walk
from tiletrace.kernels import flash_decode, flash_decode_reference, mla_decode, mla_decode_reference
from tiletrace.kernels.flash_decode import choose_decode_tiling, flash_decode_kernel
from tiletrace.kernels.kv_cache import Sight
from tiletrace.kernels.mla_decode import MlaTiling, choose_mla_tiling, choose_sharing, mla_decode_kernel
from tiletrace.kernels.split_kv import choose_parts, plan, split_calls

BF16, F16 = jnp.bfloat16, jnp.float16
SCALE = 192**-0.5


def normal(shape, seed, dtype=BF16):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype))


def both(fn, reference, *operands, **options):
  """Results of a function and of its reference."""
  return (arrays.compiled(f, *operands, **options) for f in (fn, reference))


def table_of(lengths, page_size, pages, *, spare=1):
  """Shuffled numbers of pages for sequences of these lengths; below 0, and beyond all pages, where none is needed."""
  rng = np.random.default_rng(0)
  needed = [-(-n // page_size) for n in lengths]
  free = iter(rng.permutation(pages))
  table = rng.choice(np.asarray([-1, -(2**31), pages, 2**31 - 1], np.int32), (len(lengths), max(needed) + spare))
  for row, n in zip(table, needed, strict=True):
    row[:n] = [next(free) for _ in range(n)]
  return jnp.asarray(table)


def unused_is_nan(cache, lengths, table=None):
  """The cache with NaN wherever no sequence has a key."""
  used = np.zeros(cache.shape[:2], bool)
  for e, n in enumerate(lengths):
    at = np.arange(n)
    used[(e, at) if table is None else (np.asarray(table)[e, at // cache.shape[1]], at % cache.shape[1])] = True
  return jnp.asarray(np.where(used.reshape(*used.shape, *[1] * (cache.ndim - 2)), np.asarray(cache), np.nan)
                     .astype(cache.dtype))


def close(got, want, dtype=BF16):
  """Of values: half an ulp of the result, and weights rounded to 16 bits; of residuals, f32."""
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert g.shape == w.shape and g.dtype == w.dtype
    g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
    assert np.array_equal(np.isfinite(g), np.isfinite(w))
    ok = np.isfinite(w)
    np.testing.assert_allclose(g[ok], w[ok], atol=2**-7 if dtype == BF16 else 2**-10, rtol=2**-7)


# query heads, key heads, h, s_q, dtype, page size or None, lengths
FLASH = {
    "one head of keys for all": (8, 1, 64, 1, BF16, None, (0, 1, 77, 200)),
    "grouped, two tokens": (8, 2, 128, 2, BF16, None, (1, 130, 200)),
    "every head its own keys": (2, 2, 96, 2, F16, None, (300, 0)),
    "more than one tile of rows": (40, 1, 64, 2, BF16, None, (99, 3)),
    "pages": (8, 2, 64, 2, BF16, 128, (0, 1, 301)),
    "pages smaller than a block": (4, 2, 128, 1, F16, 16, (17, 40)),
    "h = 192": (4, 1, 192, 2, BF16, 64, (129,)),
    "h = 256": (4, 1, 256, 1, BF16, None, (100, 31)),
}
MLA = {                    # heads, s_q, dtype, page size or None, lengths
    "8 heads": (8, 1, BF16, None, (0, 1, 77, 200)),
    "16 heads, two tokens": (16, 2, F16, None, (1, 130)),
    "64 heads, two tokens": (64, 2, BF16, None, (97, 64, 2)),
    "128 heads": (128, 1, BF16, None, (300, 150)),
    "pages": (16, 1, BF16, 64, (0, 1, 193)),
    "pages of a block, two tokens": (64, 2, BF16, 128, (140, 1)),
    "two pages in a block, two tokens": (64, 2, BF16, 64, (300,)),
    "pages that share a divisor with blocks": (8, 1, BF16, 48, (100,)),
    "pages smaller than a block": (16, 2, BF16, 16, (37,)),
}


@functools.cache
def flash_case(case):
  n, k, h, t, dtype, page, lengths = FLASH[case]
  b = len(lengths)
  shape = (b, 200, k, h) if page is None else (12, page, k, h)
  table = None if page is None else table_of(lengths, page, 12)
  keys, values = (unused_is_nan(normal(shape, i, dtype), np.minimum(lengths, 200) if page is None else lengths, table)
                  for i in (1, 2))
  return (normal((b, t, n, h), 0, dtype), keys, values, jnp.asarray(lengths, jnp.int32)), table


@functools.cache
def flash_wanted(case):
  """Of both backends."""
  operands, table = flash_case(case)
  return arrays.compiled(flash_decode_reference, *operands, block_table=table, return_residual=True)


@functools.cache
def mla_case(case):
  heads, t, dtype, page, lengths = MLA[case]
  b = len(lengths)
  table = None if page is None else table_of(lengths, page, 8)
  cache = unused_is_nan(normal((b, 300, 576) if page is None else (8, page, 576), 1, dtype), lengths, table)
  return (normal((b, t, heads, 576), 0, dtype), cache, jnp.asarray(lengths, jnp.int32)), table


@functools.cache
def mla_wanted(case):
  operands, table = mla_case(case)
  return arrays.compiled(mla_decode_reference, *operands, block_table=table, scale=SCALE, return_residual=True)


@pytest.mark.parametrize("backend", ["xla", "sim"])
@pytest.mark.parametrize("case", FLASH)
def test_flash_decode_is_attention_to_what_is_cached(case, backend, monkeypatch):
  monkeypatch.setenv("TT_BACKEND", backend)
  operands, table = flash_case(case)
  close(arrays.compiled(flash_decode, *operands, block_table=table, return_residual=True), flash_wanted(case),
        dtype=operands[0].dtype)


@pytest.mark.parametrize("backend", ["xla", "sim"])
@pytest.mark.parametrize("case", MLA)
def test_mla_decode_is_attention_to_one_cache_of_keys_and_values(case, backend, monkeypatch):
  monkeypatch.setenv("TT_BACKEND", backend)
  operands, table = mla_case(case)
  close(arrays.compiled(mla_decode, *operands, block_table=table, scale=SCALE, return_residual=True), mla_wanted(case),
        dtype=operands[0].dtype)


@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_a_missing_page_in_the_middle_is_not_seen(backend, monkeypatch):
  monkeypatch.setenv("TT_BACKEND", backend)
  q, keys, values = normal((1, 2, 2, 64), 0), normal((5, 16, 2, 64), 1), normal((5, 16, 2, 64), 2)
  table, lengths = jnp.asarray([[4, -3, 1, 5, 0]], jnp.int32), jnp.asarray([71], jnp.int32)
  there = np.r_[0:16, 32:48, 64:71]
  k, v = (jnp.asarray(np.asarray(x)[[4, 0, 1, 0, 0]].reshape(1, 80, 2, 64)[:, there]) for x in (keys, values))

  def reference(q, keys, values, lengths, *, block_table):
    return flash_decode_reference(q, k, v, jnp.asarray([39], jnp.int32))

  close(*both(flash_decode, reference, q, keys, values, lengths, block_table=table))


@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_without_a_mask_every_query_sees_all_keys(backend, monkeypatch):
  monkeypatch.setenv("TT_BACKEND", backend)
  q, cache, lengths = normal((1, 3, 8, 576), 0), normal((1, 100, 576), 1), jnp.asarray([70], jnp.int32)
  got, want = both(mla_decode, mla_decode_reference, q, cache, lengths, scale=SCALE, is_causal=False)
  close(got, want)
  masked = np.asarray(jax.jit(functools.partial(mla_decode, scale=SCALE))(q, cache, lengths), np.float32)
  assert [np.array_equal(masked[0, i], np.asarray(got[0, i], np.float32)) for i in range(3)] == [False, False, True]


@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_rows_that_grow_a_lot_and_a_little_are_weighed_alike(backend, monkeypatch):
  """Exponents up to 2**8 are kept relative to an older maximum; beyond, sums are rescaled."""
  monkeypatch.setenv("TT_BACKEND", backend)
  q, v = normal((1, 1, 2, 64), 0), normal((1, 512, 1, 64), 2)
  signs = np.sign(np.asarray(q[0, 0, 0], np.float32))
  growing = jnp.asarray(np.linspace(0, 12, 512)[None, :, None, None] * signs, BF16)
  close(*both(flash_decode, flash_decode_reference, q, growing, v, jnp.asarray([512], jnp.int32), return_residual=True))


def test_lengths_are_taken_as_what_the_cache_can_hold():
  q, k, v = normal((2, 1, 2, 64), 0), normal((2, 50, 2, 64), 1), normal((2, 50, 2, 64), 2)
  decode = jax.jit(flash_decode)
  got = np.asarray(decode(q, k, v, jnp.asarray([-5, 2**31 - 1], jnp.int32)), np.float32)
  assert np.array_equal(got, np.asarray(decode(q, k, v, jnp.asarray([0, 50], jnp.int32)), np.float32))
  assert (got[0] == 0).all() and (got[1] != 0).all()


def test_the_reference_is_jax_nns():
  q, k, v = normal((2, 1, 4, 64), 0), normal((2, 60, 2, 64), 1), normal((2, 60, 2, 64), 2)
  lengths = jnp.asarray([60, 31], jnp.int32)

  def jax_nns(q, k, v, lengths):
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)

  close(*both(flash_decode_reference, jax_nns, q, k, v, lengths))


# --- the partition

@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("parts", [1, 7, 66])
def test_parts_differ_by_one_block_and_are_all_blocks(seed, parts):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(-3, 2000, 9) * rng.integers(0, 2, 9)
  starts, owners = map(np.asarray, plan(jnp.asarray(lengths, jnp.int32), 1500, 64, parts))
  blocks = -(-np.clip(lengths, 0, 1500) // 64)
  assert np.array_equal(starts, [0, *np.cumsum(blocks)])
  total = starts[-1]
  used = np.clip(total, 1, parts)
  ends = total * np.arange(used + 1) // used
  assert np.ptp(np.diff(ends)) <= 1
  for p in range(used if total else 0):
    assert starts[owners[p]] <= ends[p] < starts[owners[p] + 1]
  assert (owners[used if total else 0:] == 9).all()


@pytest.mark.parametrize(("batch", "programs", "blocks", "parts"), [
    (1, 2, 1056, 66), (64, 2, 4096, 64), (128, 2, 4096, 64), (1, 200, 100, 1), (1, 8, 512, 16), (1, 8, 7, 7)])
def test_parts_fill_the_gpu_and_cut_equal_examples_evenly(batch, programs, blocks, parts):
  assert choose_parts(batch, programs, blocks, slots=132) == parts


# --- how it assembles

def compiled(name, kernel, q, caches, lengths, table, *, width, bm, warpgroups, sharing=1):
  b, heads, rows, _ = q.shape
  split, combine = split_calls(name, kernel, (b, heads, rows, width), q.dtype, parts=33, bm=bm, warpgroups=warpgroups,
                               residual=True, sharing=sharing)
  i32, f32 = (functools.partial(jax.ShapeDtypeStruct, dtype=d) for d in (jnp.int32, jnp.float32))
  partial = (33 + b - 1, heads, rows)
  out = jax.ShapeDtypeStruct((b, heads, rows, width), q.dtype)
  return (split.trace(i32((b + 1,)), i32((34,)), q, *caches, lengths, table).lower().compile(),
          combine.trace(i32((b + 1,)), f32((*partial, width)), f32(partial), out, f32(out.shape[:3])).lower().compile())


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("page", [None, 16])
def test_every_tiling_of_flash_decode_assembles_and_copies_by_tma(head_dim, page):
  i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  q = jax.ShapeDtypeStruct((3, 2, 16, head_dim), BF16)
  cache = jax.ShapeDtypeStruct((3, 4096, 2, head_dim) if page is None else (100, page, 2, head_dim), BF16)
  tiling = choose_decode_tiling(head_dim, page)
  kernel = functools.partial(flash_decode_kernel, tiling=tiling, scale=0.1, sight=Sight(2, 8))
  table = None if page is None else i32((3, 40))
  split, combine = compiled("flash_decode", kernel, q, (cache, cache), i32((3,)), table, width=head_dim, bm=tiling.bm,
                            warpgroups=tiling.warpgroups)
  for found in (split, combine):
    assert found.memory_analysis()["spill_stores"] == 0
  assert {c.variant for c in split.lowered.choices if c.op == "copy"} == {"tma"}
  assert str(split.report()).count("filled by TMA from the producer warpgroup") == (2 if tiling.held else 3)
  assert combine.memory_analysis()["smem_bytes"] == 0 and combine.memory_analysis()["registers"] <= 160


@pytest.mark.parametrize("page", [None, 16, 32, 48, 64])
@pytest.mark.parametrize("tokens", [1, 2])
def test_mla_decode_assembles_into_shared_memory_with_asynchronous_gemms(page, tokens):
  i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  q = jax.ShapeDtypeStruct((3, 1, 128 * tokens, 576), BF16)
  cache = jax.ShapeDtypeStruct((3, 4096, 576) if page is None else (100, page, 576), BF16)
  table, tiling = None if page is None else i32((3, 40)), choose_mla_tiling(128 * tokens, page)
  kernel = functools.partial(mla_decode_kernel, tiling=tiling, scale=0.1, sight=Sight(tokens, 128))
  found, _ = compiled("mla_decode", kernel, q, (cache,), i32((3,)), table, width=512, bm=64, warpgroups=2,
                      sharing=2 if tiling.chunks > 1 else 1)
  memory, report = found.memory_analysis(), str(found.report())
  assert memory["spill_stores"] == 0 and memory["smem_bytes"] <= 232448
  pages = 1 if page is None else tiling.bn // page
  shared = (1 + tiling.chunks) * pages if tiling.chunks > 1 else 0
  assert report.count("is multicast along the cluster's axes (1,)") == shared
  assert report.count("filled by TMA from the producer warpgroup") == 2 + tiling.chunks
  assert {c.variant for c in found.lowered.choices if c.op == "gemm"} == {"wgmma_ss", "wgmma_rs"}


@pytest.mark.parametrize(("rows", "page", "sharing"), [
    (16, None, 1), (64, None, 1), (128, None, 2), (192, None, 1), (256, None, 2), (256, 64, 1), (256, 16, 1)])
def test_pairs_of_tiles_of_rows_share_chunks_of_a_cache_that_is_whole(rows, page, sharing):
  assert choose_sharing(rows, choose_mla_tiling(rows, page), paged=page is not None) == sharing


def test_mla_decode_releases_each_chunk_while_the_next_one_is_multiplied():
  """128 keys: what is read last is refilled last. Each chunk has two groups, of the warpgroup's own weights and of the
  other's; those of the second half of the chunks are issued after the first of the others'."""
  i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  q, cache = jax.ShapeDtypeStruct((3, 1, 128, 576), BF16), jax.ShapeDtypeStruct((3, 4096, 576), BF16)
  kernel = functools.partial(mla_decode_kernel, tiling=MlaTiling(128, 4, 1), scale=0.1, sight=Sight(1, 128))
  found, _ = compiled("mla_decode", kernel, q, (cache,), i32((3,)), None, width=512, bm=64, warpgroups=2)
  waits = re.findall(r"wgmma.wait_group.sync.aligned (\d)", found.lowered.as_text("ptx"))
  assert waits == ["2", "0", "1", "1", "1", "0"]


def test_mla_decode_sums_weights_behind_the_issue_of_the_last_product():
  i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  q, cache = jax.ShapeDtypeStruct((3, 1, 128, 576), BF16), jax.ShapeDtypeStruct((3, 4096, 576), BF16)
  kernel = functools.partial(mla_decode_kernel, tiling=MlaTiling(128, 4, 1), scale=0.1, sight=Sight(1, 128))
  found, _ = compiled("mla_decode", kernel, q, (cache,), i32((3,)), None, width=512, bm=64, warpgroups=2, sharing=2)
  names = [e.primitive.name for e in walk(found.lowered.lowering.program.graph.body)]
  last = len(names) - 1 - names[::-1].index("gemm_async")
  assert names.index("reduce_thread") > last and "wgmma_wait" in names[names.index("reduce_thread"):]


# --- refusals

def flash_operands(**changed):
  given = {"query": normal((2, 1, 4, 64), 0), "key": normal((2, 50, 2, 64), 1), "value": normal((2, 50, 2, 64), 2),
           "lengths": jnp.asarray([3, 4], jnp.int32)}
  return {**given, **changed}


@pytest.mark.parametrize(("changed", "message"), [
    ({"query": normal((4, 64), 0)}, r"query has the shape \(4, 64\)"),
    ({"key": normal((2, 50, 2, 64), 1, jnp.float32)}, "key is float32, query bfloat16"),
    ({"value": normal((2, 40, 2, 64), 1)}, r"value \[2, 40, 2, 64\]"),
    ({"query": normal((2, 1, 3, 64), 0)}, "n is a multiple of k"),
    ({"lengths": jnp.asarray([3], jnp.int32)}, r"lengths is int32\[1\]"),
    ({"lengths": jnp.asarray([3.0, 4.0])}, "lengths.astype"),
    ({"query": normal((3, 1, 4, 64), 0), "lengths": jnp.ones(3, jnp.int32)}, "a cache of 2 sequences, and 3"),
    ({"block_table": jnp.ones(4, jnp.int32)}, r"block_table is int32\[4\]"),
    ({"block_table": jnp.ones((2, 4), jnp.int32)}, "2 pages of 50 keys"),
])
def test_operands_that_do_not_fit_are_refused_by_flash_decode(changed, message):
  with pytest.raises(tt.TileTypeError, match=message) as e:
    flash_decode(**flash_operands(**changed))
  assert "decode_test.py" in str(e.value) and "flash_decode(**" in str(e.value)


@pytest.mark.parametrize("scale", [0, -0.5, float("nan"), None])
def test_a_scale_that_turns_weights_around_is_refused(scale):
  with pytest.raises(tt.TileTypeError, match=f"scale={scale}"):
    mla_decode(normal((2, 1, 4, 576), 0), normal((2, 50, 576), 1), jnp.ones(2, jnp.int32), scale=scale)


def test_head_dimensions_without_a_tiling_are_refused():
  with pytest.raises(tt.TileTypeError, match="the head dimension is 40"):
    flash_decode(*[normal((1, 20, 2, 40), 0)] * 3, lengths=jnp.ones(1, jnp.int32))


@pytest.mark.parametrize(("changed", "message"), [
    ({"query": normal((2, 1, 4, 512), 0)}, r"query has the shape \(2, 1, 4, 512\)"),
    ({"cache": normal((2, 50, 1, 576), 1)}, "cache has the shape"),
    ({"cache": normal((2, 50, 576), 1, F16)}, "cache is float16, query bfloat16"),
    ({"lengths": jnp.ones((2, 1), jnp.int32)}, "lengths is int32"),
    ({"block_table": jnp.ones((2, 3), jnp.int32)}, "a multiple of 16 keys"),
])
def test_operands_that_do_not_fit_are_refused_by_mla_decode(changed, message):
  given = {"query": normal((2, 1, 4, 576), 0), "cache": normal((2, 50, 576), 1), "lengths": jnp.ones(2, jnp.int32)}
  with pytest.raises(tt.TileTypeError, match=message) as e:
    mla_decode(**{**given, **changed}, scale=0.1)
  assert "decode_test.py" in str(e.value) and "mla_decode(**" in str(e.value)
