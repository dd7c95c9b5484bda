"""Left operands whose columns the warpgroups hold in parts: who multiplies what from where, what is left as it is."""
from __future__ import annotations

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F16, assemble, count, lower, notes, struct
from tests.tolerances import assert_close
from tiletrace.core.graph import walk

SAID = "each warpgroup multiplies its own"


def twice(x, w, v, y, *, m=64, chunks=1, policy=tt.FULL_COL, in_fragment=True, kept=False, apart=False):
  """y = relu(x w) v: k of the second product is what the first one's columns are."""
  hidden, columns = w.shape[1], v.shape[1] // chunks
  x_s, w_s = tt.alloc_shared((m, x.shape[1]), x.dtype), tt.alloc_shared(w.shape, w.dtype)
  v_s = [tt.alloc_shared((hidden, columns), v.dtype) for _ in range(chunks)]
  h = tt.alloc_fragment((m, hidden), jnp.float32)
  p = tt.alloc_fragment((m, hidden), x.dtype)
  acc = [tt.alloc_fragment((m, columns), jnp.float32) for _ in range(chunks)]
  tt.copy(x, x_s)
  tt.copy(w, w_s)
  for i, s in enumerate(v_s):
    tt.copy(v.at[:, tt.block(i, columns)], s)
  tt.gemm(x_s, w_s, h, accumulate=False, policy=tt.FULL_COL)
  weights = tt.maximum(h[...], 0).astype(x.dtype)
  if in_fragment:
    p[...] = weights
  for i, (s, a) in enumerate(zip(v_s, acc, strict=True)):
    tt.gemm(p if in_fragment else weights, s, a, accumulate=False, policy=policy)
    if apart:
      y[:, tt.block(i, columns)] = a[...].astype(y.dtype)
  total = tt.sum(p[...].astype(jnp.float32), axis=1, keepdims=True) if kept else 0
  if not apart:
    for i, a in enumerate(acc):
      y[:, tt.block(i, columns)] = (a[...] + total).astype(y.dtype)


def lowered(m=64, k=64, hidden=128, n=256, *, warpgroups=2, dtype=BF16, **static):
  inputs = [struct(*s, dtype=dtype) for s in ((m, k), (k, hidden), (hidden, n))]
  return lower(twice, inputs, struct(m, n, dtype=dtype), static={"m": m, **static}, warpgroups=warpgroups)


def parts_of(found):
  """(k of each of the asynchronous products whose left operand is in registers)"""
  return [e.refs[0].shape[0] for e in walk(found.lowering.program.graph.body)
          if e.primitive.name == "gemm_async" and e.params["dispatch"] == "wgmma_rs"]


def test_parts_go_to_shared_memory_and_come_back_as_matrices():
  text = lowered(hidden=128, n=128).as_text("ptx")
  before = text[:text.index("wgmma.mma_async", text.index("ldmatrix"))]      # of the second product
  assert before.count("stmatrix.sync.aligned.m8n8.x4") == 4 and before.count("ldmatrix.sync.aligned.m8n8.x4") == 4


@pytest.mark.parametrize("in_fragment", [True, False])
@pytest.mark.parametrize("hidden", [128, 96, 32])
def test_each_warpgroup_multiplies_its_own_columns_and_then_the_others(hidden, in_fragment):
  found = lowered(hidden=hidden, n=128, in_fragment=in_fragment)

  assert f"{SAID} {hidden // 2} columns" in notes(found)
  assert parts_of(found) == [hidden // 2] * 2
  assemble(found)


def test_half_of_the_products_are_issued_before_the_first_needs_what_the_other_holds():
  text = lowered(chunks=4).as_text("schedule")
  text = text[text.index("own_columns"):]
  exchange = re.search(r"sync\[each=scope\]\n\s+\w+:bf16\[64,64\]@\w+ <- \w+\[", text)

  assert exchange is not None
  assert text[:exchange.start()].count("wgmma_rs") == 2
  assert text[exchange.end():].count("wgmma_rs") == 6


def test_nothing_reads_registers_of_a_product_in_flight():
  """The operand goes to shared memory before its first product is issued."""
  text = lowered(chunks=2).as_text("schedule")

  assert re.search(r"bf16\[2,64,64\]@\w+ = transpose.*\n\s+\w+\[...\] <- .*\n.*own_columns", text)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("m", "hidden", "n", "chunks"), [
    (64, 128, 256, 1), (64, 128, 256, 4), (128, 64, 64, 1), (64, 32, 48, 1), (64, 192, 96, 2)])
def test_the_product_is_that_of_the_whole_operand(m, hidden, n, chunks, dtype):
  rng = np.random.default_rng(hidden + n)
  x, w, v = (rng.standard_normal(s).astype(dtype) for s in ((m, 48), (48, hidden), (hidden, n)))
  call = tt.tile_call(functools.partial(twice, m=m, chunks=chunks), struct(m, n, dtype=dtype), grid=1,
                      warpgroups=2, backend="sim")
  h = np.maximum(x.astype(np.float64) @ w.astype(np.float64), 0).astype(dtype).astype(np.float64)

  assert SAID in notes(call.lower(x, w, v))
  assert_close(call(x, w, v), h @ v.astype(np.float64), "gemm")


@pytest.mark.parametrize(("static", "why"), [
    ({"kept": True}, "elements of it are used elsewhere"),
    ({"apart": True, "chunks": 2}, "something stands between the products"),
    ({"hidden": 48}, "24 columns are no whole instructions"),
    ({"m": 128, "policy": tt.FULL_ROW}, "the warpgroups divide the rows of the second product"),
    ({"warpgroups": 4}, "the parts of three others take as many registers as all of it"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_other_operands_go_through_shared_memory_whole(static, why):
  found = lowered(**static)

  assert SAID not in notes(found), why
  assert count(found, "wgmma") and assemble(found)
