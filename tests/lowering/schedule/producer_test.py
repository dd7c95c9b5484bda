"""The producer: what it fetches into the L2 cache while the slots that it is for are not free."""
from __future__ import annotations

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, assemble, lower, matmul, struct
from tests.tolerances import assert_close


def chunks_kernel(table, a, b, c, *, num_stages, late=False):
  """c = a b, 192 rows of b at a time in three rings of 64; `late`: which they are, a table says, read one by one."""
  a_s = tt.alloc_shared((64, a.shape[1]), BF16)
  b_s = [tt.alloc_shared((64, 64), BF16) for _ in range(3)]
  acc = tt.alloc_fragment((64, 64), jnp.float32)
  acc[...] = 0
  tt.copy(a.at[tt.block(tt.program_id(0), 64), :], a_s)
  for k in tt.pipelined(a.shape[1] // 192, num_stages=num_stages):
    for i, s in enumerate(b_s):
      page = table[3 * k + i] if late else 3 * k + i
      tt.copy(b.at[tt.block(page, 64), :], s)
    for i, s in enumerate(b_s):
      tt.gemm(a_s.at[:, tt.block(3 * k + i, 64)], s, acc)
  c[tt.block(tt.program_id(0), 64), :] = acc[...].astype(c.dtype)


def lowered(**static):
  inputs = [struct(6, dtype=np.int32), struct(128, 384, dtype=BF16), struct(384, 64, dtype=BF16)]
  cluster = static.pop("cluster", None)
  return lower(chunks_kernel, inputs, struct(128, 64, dtype=BF16), static=static, grid=2, cluster=cluster)


def fetched(lowered):
  return re.findall(r"^\s+prefetch (.*) for", lowered.as_text("schedule"), re.MULTILINE)


def test_with_one_slot_what_later_copies_of_an_iteration_read_is_fetched_after_the_first():
  found = lowered(num_stages=1)
  copied = re.findall(r"copy_async\[\S+\] (b\[.*\]) on", found.as_text("schedule"))
  order = re.findall(r"cp\.async\.bulk\.(prefetch\.|)tensor", found.as_text("ptx"))

  assert len(copied) == 3 and all(f in copied[1:] for f in fetched(found))
  assert order[-6:] == ["", "prefetch.", "prefetch.", "", "", ""]     # of b; at last c is stored
  assemble(found)


@pytest.mark.parametrize("static", [{"num_stages": 2}, {"num_stages": 1, "cluster": (2,)}], ids=str)
def test_where_slots_are_free_or_a_cluster_shares_copies_nothing_is_fetched(static):
  assert fetched(lowered(**static)) == []


def test_buffers_of_one_ring_are_copied_together_and_not_fetched():
  assert fetched(matmul(num_stages=1)) == []


def test_places_that_are_not_known_yet_are_not_fetched():
  """That of the third copy is read after the second one, before which everything is fetched."""
  assert len(fetched(lowered(num_stages=1, late=True))) == 1


def test_the_product_is_right_with_one_slot():
  rng = np.random.default_rng(0)
  a, b = (rng.standard_normal(s).astype(BF16) for s in ((128, 384), (384, 64)))
  call = tt.tile_call(functools.partial(chunks_kernel, num_stages=1), struct(128, 64, dtype=BF16), grid=2,
                      backend="sim")
  args = np.arange(6, dtype=np.int32), a, b

  assert fetched(call.lower(*args))
  assert_close(call(*args), a.astype(np.float64) @ b.astype(np.float64), "gemm")
