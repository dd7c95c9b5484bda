"""The frame of a kernel: what stands before its body, and what its launch needs."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tiletrace as tt


def _through_shared_memory(x, y):
  s = tt.alloc_shared((64, 64), x.dtype)
  for i in tt.pipelined(2, num_stages=2):
    tt.copy(x.at[tt.block(i, 64), :], s)
    y[tt.block(i, 64), :] = s[...] + 1


def lowered(target="sm_90a", **options):
  x = jax.ShapeDtypeStruct((128, 64), jnp.float32)
  return tt.tile_call(_through_shared_memory, x, grid=1, options=tt.CompileOptions(**options)).lower(x, target=target)


def test_an_overlapping_kernel_lets_the_next_one_come_and_waits_before_it_touches_global_memory():
  lines = lowered(overlap_launch=True).as_text("ptx").splitlines()

  def first(word):
    return next(i for i, line in enumerate(lines) if word in line)

  order = [first(x) for x in ("griddepcontrol.launch_dependents", "mbarrier.init", "bar.sync", "griddepcontrol.wait")]
  assert order == sorted(order)
  accesses = [first(x) for x in ("cp.async.bulk.tensor", "st.global")]
  branches = [i for i, line in enumerate(lines) if " bra " in line and order[2] < i < order[3]]
  assert order[-1] < min(accesses) and not branches         # every thread waits


def test_an_overlapping_kernel_reads_nothing_by_the_read_only_path():
  """It is alive while its input is written; ptxas may move such loads before the wait."""
  def add(x, y):
    y[...] = x[...] + 1

  x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  texts = [tt.tile_call(add, x, grid=1, options=tt.CompileOptions(overlap_launch=o)).lower(x).as_text("ptx")
           for o in (False, True)]
  assert ["ld.global.nc" in text for text in texts] == [True, False]


@pytest.mark.parametrize(("target", "overlap"), [("sm_90a", False), ("sm_80", True)])
def test_other_kernels_do_not_wait(target, overlap):
  low = lowered(target, overlap_launch=overlap)
  assert "griddepcontrol" not in low.as_text("ptx")
  assert not low.lowering.emitted.overlap


def test_the_image_says_that_launches_overlap_and_what_tma_brings_into_l2():
  image = lowered(overlap_launch=True, l2_promotion=128).compile().image
  assert image.overlap and image.attributes()["overlap"] is True
  assert {m.l2_promotion for m in image.tensor_maps} == {128}
  image = lowered().compile().image
  assert not image.overlap and {m.l2_promotion for m in image.tensor_maps} == {256}
