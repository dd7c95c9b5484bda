"""Clusters: which copies are multicast, how they come apart, who releases a slot; what is refused."""
from __future__ import annotations

import functools
import itertools
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, assemble, count, lower, matmul, matmul_kernel, notes, struct
from tests.tolerances import assert_close
from tiletrace.core.errors import ResourceError, TileTypeError
from tiletrace.core.graph import walk
from tiletrace.lowering.tma_plan import TmaPart, TmaPlan, share

FORMS, CLUSTERS = ("nn", "nt", "tn", "tt"), ((2, 1), (1, 2), (2, 2), (4, 1))


def equations(lowered, name):
  return [e for e in walk(lowered.lowering.program.graph.body) if e.primitive.name == name]


def shared_axes(lowered):
  """Of A's and B's copies."""
  return [e.params.get("multicast", ()) for e in equations(lowered, "copy_async") if e.values]


@pytest.mark.parametrize(("form", "cluster"), list(itertools.product(FORMS, CLUSTERS)))
def test_an_operand_is_multicast_along_the_axes_that_its_place_does_not_depend_on(form, cluster):
  lowered = matmul(form=form, cluster=cluster, persistent=True, raster=4)
  assert shared_axes(lowered) == [(1,) if cluster[1] > 1 else (), (0,) if cluster[0] > 1 else ()]
  loads = count(lowered, r"cp\.async\.bulk\.tensor\S*shared::cluster\S*multicast")
  assert loads and assemble(lowered)
  assert f".reqnctapercluster {math.prod(cluster)}, 1, 1" in lowered.as_text("ptx")


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_slot_is_free_when_the_consumers_of_all_ctas_have_read_theirs(cluster):
  lowered = matmul(cluster=cluster)
  arrivals = {e.outvars[0].hint: e.params["arrivals"] for e in equations(lowered, "alloc_barrier")}
  assert arrivals["full"] == 1 and arrivals["empty"] == 2 * math.prod(cluster)
  released = equations(lowered, "barrier_arrive")
  assert released and all(e.params["cluster"] and e.params["count"] == 2 for e in released)
  assert count(lowered, r"mbarrier\.arrive\.shared::cluster") == len(released) == count(lowered, "mapa")


def test_arrivals_at_peers_carry_no_fence_for_the_whole_gpu():
  text = matmul(cluster=(2, 1)).as_text("ptx")
  assert "mbarrier.arrive.release.cluster" not in text


def test_ctas_meet_before_they_touch_each_other_and_before_they_end():
  lines = [line.strip() for line in matmul(cluster=(2, 1)).as_text("ptx").splitlines()]
  meetings = [i for i, line in enumerate(lines) if line.startswith("barrier.cluster.wait")]
  touches = [i for i, line in enumerate(lines) if "multicast" in line or "mapa" in line]
  assert len(meetings) == 2 and meetings[0] < min(touches) and max(touches) < meetings[1]
  assert lines[meetings[1] + 1] == "ret;"


def test_without_a_cluster_nothing_of_it_is_there():
  text = matmul().as_text("ptx")
  assert not re.search(r"multicast|mapa|barrier\.cluster|reqnctapercluster", text)
  assert matmul(cluster=(1, 1)).as_text("ptx") == text


def test_copies_whose_number_differs_between_the_ctas_are_not_multicast():
  def kernel(a, b, c):
    i = tt.program_id(0)
    a_s, b_s = tt.alloc_shared((64, 64), BF16), tt.alloc_shared((64, 64), BF16)
    acc = tt.alloc_fragment((64, 64), jnp.float32)
    acc[...] = 0
    for k in tt.pipelined(i + 1, num_stages=3):
      tt.copy(a.at[tt.block(i, 64), tt.block(k, 64)], a_s)
      tt.copy(b.at[tt.block(k, 64), :], b_s)
      tt.gemm(a_s, b_s, acc)
    c[tt.block(i, 64), :] = acc[...].astype(c.dtype)

  wide, narrow = struct(256, 256, dtype=BF16), struct(256, 64, dtype=BF16)
  lowered = lower(kernel, [wide, narrow], narrow, grid=4, cluster=(2,))
  assert "not multicast: how often it is filled may differ between the CTAs" in notes(lowered)
  assert shared_axes(lowered) == [(), ()]
  assemble(lowered)


def test_what_threads_copy_is_not_multicast():
  lowered = matmul(1000, 776, 332, cluster=(2, 1))
  assert "not multicast: threads copy into it" in notes(lowered)
  assert not count(lowered, r"\S*multicast") and assemble(lowered)


@pytest.mark.parametrize(("parts", "ways"), [(4, 2), (4, 4), (1, 2), (1, 4), (3, 2), (6, 2)])
def test_the_shares_of_a_plan_are_the_plan(parts, ways):
  """Every element of every box, once."""
  plan = TmaPlan((64, 64), tuple(TmaPart((0, 64 * i), 8192 * i) for i in range(parts)))
  mine = share(plan, ways, itemsize=2, alignment=1024)
  assert mine is not None

  def cells(box, parts, index, step):
    return [(p.smem_bytes + index * step.smem_bytes + 128 * r, p.offset[0] + index * step.offset[0] + r,
             p.offset[1] + index * step.offset[1]) for p in parts for r in range(box[0])]

  whole = cells(plan.box, plan.parts, 0, TmaPart((0, 0), 0))
  assert sorted(c for i in range(ways) for c in cells(mine.box, mine.parts, i, mine.step)) == sorted(whole)


def test_a_box_that_would_be_cut_inside_the_swizzle_has_no_shares():
  assert share(TmaPlan((8, 64), (TmaPart((0, 0), 0),)), 2, itemsize=2, alignment=1024) is None
  assert share(TmaPlan((1, 64), (TmaPart((0, 0), 0),)), 2, itemsize=2, alignment=128) is None


# ---- refusals


@pytest.mark.parametrize(("cluster", "error", "message"), [
  ((3, 1), TileTypeError, r"clusters of 3 CTAs do not divide grid\[0\] = 8.*\n(.*\n)*.*hint: grid\[0\] = 9"),
  ((2,), TileTypeError, r"cluster=\(2,\) must be a tuple of CTAs along each of the 2 axes"),
  (2, TileTypeError, "cluster=2 must be a tuple"),
  ((0, 1), TileTypeError, r"cluster\[0\] must be a Python int from 1 to 8"),
  ((4, 4), ResourceError, r"cluster=\(4, 4\) has 16 CTAs, a portable one has 8 at most"),
])
def test_a_cluster_that_cannot_be_is_refused(cluster, error, message):
  with pytest.raises(error, match=message):
    matmul(cluster=cluster)


def test_multicast_and_arrivals_everywhere_need_a_cluster():
  def copies(a, c):
    bar, a_s = tt.alloc_barrier(1, arrivals=1), tt.alloc_shared((64, 64), BF16)
    with tt.elect():
      tt.copy_async(a, a_s, barrier=bar[0], multicast=(0,))

  def arrives(a, c):
    tt.alloc_barrier(1, arrivals=1)[0].arrive(cluster=True)

  x = struct(64, 64, dtype=BF16)
  with pytest.raises(TileTypeError, match=r"multicast=\(0,\) along the axes \(\) of the cluster"):
    lower(copies, [x], x)
  with pytest.raises(TileTypeError, match="cluster=True in a kernel without clusters"):
    lower(arrives, [x], x)


# ---- results


@pytest.mark.parametrize(("form", "cluster"), [("nn", (2, 1)), ("nt", (1, 2)), ("tn", (2, 2))])
def test_the_ctas_of_a_cluster_compute_what_they_would_alone(form, cluster):
  m, n, k = 250, 200, 328
  rng = np.random.default_rng(0)
  a, b = (rng.standard_normal(s).astype(BF16) for s in ((m, k), (k, n)))
  args = [x.T.copy() if t == "t" else x for x, t in zip((a, b), form, strict=True)]
  call = tt.tile_call(functools.partial(matmul_kernel, bm=64, bn=64, bk=64, num_stages=3, form=form),
                      struct(m, n, dtype=BF16), grid=(4, 4), cluster=cluster, persistent=True, raster=2, backend="sim")
  assert_close(call(*args), a.astype(np.float64) @ b.astype(np.float64), "gemm")
