"""Roles, rings, waits, releases, syncs and fences: facts of the scheduled program and its PTX."""
from __future__ import annotations

import re

import jax.numpy as jnp
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, assemble, count, lower, matmul, notes, struct
from tiletrace.core.errors import LoweringError, ResourceError, ScheduleError
from tiletrace.core.graph import walk


def names(block):
  return [e.primitive.name for e in block.eqns]


def role(lowered, first):
  return next(e for e in walk(lowered.lowering.program.graph.body)
              if e.primitive.name == "warpgroup" and e.params["first"] == first).blocks[0]


def loop(block):
  return next(e for e in walk(block) if e.primitive.name == "for_loop" and any(
    x.primitive.name.startswith(("gemm", "copy_async")) for x in e.blocks[0].eqns)).blocks[0]


# ---- the gemm


@pytest.mark.parametrize(("warpgroups", "bm", "regs"), [
  (1, 64, (None, None)), (2, 128, (24, 240)), (3, 192, (32, 160))])
def test_a_producer_warpgroup_stands_before_the_consumers(warpgroups, bm, regs):
  lowered = matmul(warpgroups=warpgroups, bm=bm, bn=64)
  roles = [e for e in walk(lowered.lowering.program.graph.body) if e.primitive.name == "warpgroup"]
  assert [(r.params["first"], r.params["count"]) for r in roles] == [(0, 1), (1, warpgroups)]
  assert tuple(r.params["regs"] for r in roles) == regs
  assert lowered.lowering.program.threads == 128 * (1 + warpgroups)
  assert count(lowered, "setmaxnreg") == (2 if warpgroups > 1 else 0)
  assemble(lowered)


def test_one_group_stays_in_flight_and_slots_are_released_one_iteration_late():
  lowered = matmul(num_stages=4)
  body = loop(role(lowered, 1))
  order = [n for n in names(body) if n in ("barrier_wait", "gemm_async", "wgmma_wait", "cond")]
  assert order == ["barrier_wait", "gemm_async", "wgmma_wait", "cond"]
  assert [e.params["n"] for e in body.eqns if e.primitive.name == "wgmma_wait"] == [1]
  assert names(next(e for e in body.eqns if e.primitive.name == "cond").blocks[0])[-1] == "barrier_arrive"
  assert [count(lowered, f"wgmma.wait_group.sync.aligned {n}") for n in (1, 0)] == [1, 1]
  assemble(lowered)


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_every_push_expects_the_bytes_that_its_boxes_bring(num_stages):
  lowered = matmul(bn=96, num_stages=num_stages)
  produced = loop(role(lowered, 0))
  expected = next(e for e in produced.eqns if e.primitive.name == "barrier_arrive_expect_tx").params["nbytes"]
  assert expected == 2 * (128 * 64 + 64 * 96)
  text, maps = lowered.as_text("ptx"), lowered.lowering.emitted.tensor_maps
  loads = re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared::cluster\S* \S+, \[(%rd\d+), ", text)
  generic = dict(re.findall(r"cvta\.param\.u64 (%rd\d+), (%rd\d+)", text))
  number = {raw: int(i) for raw, i in re.findall(r"mov\.u64 (%rd\d+), map(\d+)", text)}
  boxes = [maps[number[generic[r]]].box for r in loads]
  assert sum(2 * a * b for a, b in boxes) == expected


def test_a_ring_of_one_slot_is_released_in_its_iteration():
  lowered = matmul(num_stages=1)
  assert [e.params["n"] for e in loop(role(lowered, 1)).eqns if e.primitive.name == "wgmma_wait"] == [0]
  assert "has one slot" in notes(lowered)
  assemble(lowered)


def test_zeroing_before_the_loop_becomes_the_first_overwrite():
  lowered = matmul()
  assert not [e for e in walk(role(lowered, 1)) if e.primitive.name == "store" and e.refs[0].root.hint == "acc"]
  assert count(lowered, "mov.f32") == 0


def test_a_loop_that_may_not_run_keeps_its_zeros():
  lowered = matmul(k=0)
  assert [e for e in walk(lowered.lowering.program.graph.body) if e.primitive.name == "store"]
  assemble(lowered)


@pytest.mark.parametrize("persistent", [True, False])
def test_the_tile_loop_stands_in_every_role(persistent):
  lowered = matmul(persistent=persistent, raster=4)
  for first in (0, 1):
    strides = [e for e in walk(role(lowered, first)) if e.primitive.name == "num_ctas"]
    assert bool(strides) == persistent
  assert count(lowered, r"mov.u32 %r\d+, %nctaid.x") == (2 if persistent else 0)
  assemble(lowered)


@pytest.mark.parametrize(("filler", "chunks"), [(2976, 2), (2992, 1)])
def test_staging_may_take_the_last_byte(filler, chunks):
  """Beside it are six slots of 32 KB, twelve barriers, and the filler."""
  def kernel(a, b, c):
    left = tt.alloc_shared((filler // 4,), F32)
    left[...] = tt.zeros((filler // 4,), F32)
    a_s, b_s = tt.alloc_shared((128, 64), a.dtype), tt.alloc_shared((64, 128), b.dtype)
    acc = tt.alloc_fragment((128, 128), F32)
    acc[...] = left[tt.program_id(0)]
    for k in tt.pipelined(8, num_stages=6):
      tt.copy(a.at[:, tt.block(k, 64)], a_s)
      tt.copy(b.at[tt.block(k, 64), :], b_s)
      tt.gemm(a_s, b_s, acc)
    c[...] = acc[...].astype(c.dtype)

  lowered = lower(kernel, [struct(128, 512, dtype=BF16), struct(512, 128, dtype=BF16)], struct(128, 128, dtype=BF16),
                  warpgroups=2)
  assert [v.type.shape[0] for v in lowered.lowering.program.offsets if v.hint == "staging"] == [chunks]
  assert chunks == 1 or lowered.lowering.program.smem_bytes == 232448
  assemble(lowered)


def test_staging_takes_what_the_rings_leave():
  big = matmul(bn=256, num_stages=4)
  small = matmul(bn=256, num_stages=3)
  assert [v.type.shape[0] for v in big.lowering.program.offsets if v.hint == "staging"] == [2]
  assert [v.type.shape[0] for v in small.lowering.program.offsets if v.hint == "staging"] == [4]
  assert big.lowering.program.smem_bytes <= 232448


def test_staging_of_columns_takes_whole_registers_where_little_memory_is_left():
  """64 rows of an accumulator are spread over the warps: fewer would not be a part of every thread's registers."""
  def kernel(x, w, y):
    x_s, w_s = tt.alloc_shared((64, 416), BF16), tt.alloc_shared((416, 192), BF16)
    acc = tt.alloc_fragment((64, 192), jnp.float32)
    tt.copy(x, x_s)
    tt.copy(w, w_s)
    tt.gemm(x_s, w_s, acc, accumulate=False, policy=tt.FULL_COL)
    y[...] = acc[...].astype(y.dtype)

  lowered = lower(kernel, [struct(64, 416, dtype=BF16), struct(416, 192, dtype=BF16)], struct(64, 192, dtype=BF16),
                  warpgroups=3)
  assert "no shared memory is left for staging" in notes(lowered)
  assemble(lowered)


def test_threads_beyond_the_hardware_are_refused():
  def kernel(x, y):
    s = tt.alloc_shared((64, 64), x.dtype)
    for k in tt.pipelined(4, num_stages=2):
      tt.copy(x.at[tt.block(k, 64), :], s)
      y[tt.block(k, 64), :] = s[...]

  x = struct(256, 64)
  assemble(lower(kernel, [x], x, warpgroups=7))
  with pytest.raises(ResourceError, match="warpgroups=8 needs 1152 threads with its producer, a CTA has at most 1024"):
    lower(kernel, [x], x, warpgroups=8)


# ---- rings that threads read


def sum_kernel(x, y, *, num_stages):
  s = tt.alloc_shared((64, 64), x.dtype)
  acc = tt.alloc_fragment((64, 64), F32)
  acc[...] = 0
  for k in tt.pipelined(8, num_stages=num_stages):
    tt.copy(x.at[tt.block(k, 64), :], s)
    acc[...] += s[...]
  y[...] = acc[...]


def test_each_warp_releases_a_slot_that_its_lanes_have_read_and_waits_for_no_other():
  lowered = lower(sum_kernel, [struct(512, 64)], struct(64, 64), static={"num_stages": 3}, warpgroups=2)
  order = [n for n in names(loop_of(role(lowered, 1))) if n in ("load", "sync", "fence", "barrier_arrive")]
  read = order.index("fence") - 1
  assert order[read] == "load" and order[read + 2] == "barrier_arrive" and "sync" not in order
  arrive = next(e for e in walk(role(lowered, 1)) if e.primitive.name == "barrier_arrive")
  assert arrive.params == {"count": 8, "each": "warp"} and arrive.values[0].type.arrivals == 8
  assert count(lowered, "bar.warp.sync") == 1 and count(lowered, r"bar.sync %r\d+, 128") == 0


def loop_of(block):
  return next(e for e in walk(block) if e.primitive.name == "for_loop").blocks[0]


def test_slots_that_only_wgmma_reads_need_no_sync():
  assert "sync" not in names(loop(role(matmul(), 1)))


def test_what_consumers_rewrite_waits_for_the_gemm_that_reads_it():
  lowered = matmul(n=777, num_stages=1)                         # B comes by the consumers: one slot
  body = loop(role(lowered, 1))
  order = [n for n in names(body) if n in ("copy", "fence", "sync", "gemm_async", "wgmma_wait", "barrier_wait")]
  assert order == ["sync", "copy", "barrier_wait", "fence", "sync", "gemm_async", "wgmma_wait"]
  assert [e.params["n"] for e in body.eqns if e.primitive.name == "wgmma_wait"] == [0]


# ---- shared memory of the threads


def test_writes_and_reads_of_other_threads_are_synced_once_each_way():
  def kernel(x, y):
    s = tt.alloc_shared((64, 32), x.dtype)
    for k in tt.range(4):
      s[...] = x[k, :, :]
      y[k, :, :] = s.T[...]

  lowered = lower(kernel, [struct(4, 64, 32)], struct(4, 32, 64))
  order = [n for n in names(loop_of(lowered.lowering.program.graph.body)) if n in ("store", "load", "sync")]
  assert order == ["load", "sync", "store", "sync", "load", "store"]


def test_two_buffers_share_a_sync():
  def kernel(x, y):
    s, t = tt.alloc_shared((64,), x.dtype), tt.alloc_shared((64,), x.dtype)
    s[...] = x[...]
    t[...] = x[...] * 2
    y[...] = s[...] + t[...]

  assert count(lower(kernel, [struct(64)], struct(64)), "bar.sync") == 1


def test_a_branch_that_writes_is_ordered_with_the_read_behind_it():
  def kernel(x, n, y):
    s = tt.alloc_shared((64,), x.dtype)
    s[...] = x[...]
    with tt.when(n[...] > 0):
      s[...] = x[...] * 2
    y[...] = s[...]

  lowered = lower(kernel, [struct(64), struct(dtype="int32")], struct(64))
  assert count(lowered, "bar.sync") == 2                        # inside the branch before its store; before the load


def test_operands_written_by_threads_are_made_visible_to_wgmma():
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 32), b.dtype)
    acc = tt.alloc_fragment((64, 32), F32)
    acc[...] = 0
    for k in tt.range(3):
      a_s[...] = a[:, tt.block(k, 64)] * 2
      b_s[...] = b[tt.block(k, 64), :]
      tt.gemm(a_s, b_s, acc)
    c[...] = acc[...]

  lowered = lower(kernel, [struct(64, 192, dtype=BF16), struct(192, 32, dtype=BF16)], struct(64, 32))
  body = loop_of(lowered.lowering.program.graph.body)
  order = [n for n in names(body) if n in ("fence", "sync", "gemm_async", "wgmma_wait")]
  assert order == ["wgmma_wait", "sync", "fence", "sync", "gemm_async"]   # the next blocks are loaded meanwhile
  assert count(lowered, "fence.proxy.async.shared::cta") == 1
  assemble(lowered)


# ---- two gemms


def two_gemms_kernel(q, k, v, o):
  q_s, k_s, v_s = (tt.alloc_shared((64, 64), q.dtype) for _ in range(3))
  s, acc = tt.alloc_fragment((64, 64), F32), tt.alloc_fragment((64, 64), F32)
  acc[...] = 0
  tt.copy(q, q_s)
  for j in tt.pipelined(k.shape[0] // 64, num_stages=2):
    tt.copy(k.at[tt.block(j, 64), :], k_s)
    tt.copy(v.at[tt.block(j, 64), :], v_s)
    tt.gemm(q_s, k_s.T, s, accumulate=False)
    tt.gemm(tt.maximum(s[...], 0).astype(v.dtype), v_s, acc)
  o[...] = acc[...]


def test_a_product_is_waited_for_before_it_is_read_and_its_operand_released_then():
  lowered = lower(two_gemms_kernel, [struct(n, 64, dtype=BF16) for n in (64, 256, 256)], struct(64, 64))
  body = loop(role(lowered, 1))
  order = [n for n in names(body) if n in ("gemm_async", "wgmma_wait", "barrier_arrive", "cond")]
  assert order == ["gemm_async", "wgmma_wait", "cond", "barrier_arrive", "gemm_async"]     # values one iteration late
  assert count(lowered, "wgmma.mma_async") == 8
  assert not [w for w in assemble(lowered).warnings if "C75" in w]


# ---- copies without a producer


def test_a_buffer_that_is_used_before_its_copy_has_no_producer_and_says_why():
  def kernel(x, y):
    s = tt.alloc_shared((64, 64), x.dtype)
    s[...] = x[:64, :]
    for k in tt.pipelined(2, num_stages=2):
      y[tt.block(k, 64), :] = s[...]
      tt.copy(x.at[tt.block(k, 64), :], s)

  lowered = lower(kernel, [struct(128, 64)], struct(128, 64))
  assert "s is one slot, filled by the consumers: it is written by 'store'" in lowered.report()
  assert count(lowered, "cp.async.ca|cp.async.cg") and not count(lowered, "cp.async.bulk")
  assemble(lowered)


def test_addresses_that_come_from_tiles_stay_with_the_threads_that_know_them():
  def kernel(x, y):
    s = tt.alloc_shared((64, 64), x.dtype)
    at = tt.alloc_fragment((), "int32")
    at[...] = 0
    for k in tt.pipelined(4, num_stages=2):
      tt.copy(x.at[tt.ds(at[...], 64), :], s)
      y[tt.block(k, 64), :] = s[...]
      at[...] = (at[...] + 3) % 64

  lowered = lower(kernel, [struct(128, 64)], struct(256, 64))
  assert "no producer warpgroup: what the copies need at" in lowered.report()
  assemble(lowered)


def test_half_a_buffer_is_no_push():
  def kernel(x, y):
    s = tt.alloc_shared((64, 64), x.dtype)
    t = tt.alloc_shared((64, 64), x.dtype)
    for k in tt.pipelined(4, num_stages=2):
      tt.copy(x.at[tt.block(k, 32), :], s.at[32:, :])      # the other order would make a whole
      tt.copy(x.at[tt.block(k, 32), :], s.at[:32, :])
      tt.copy(x.at[tt.block(k, 64), :], t)
      y[tt.block(k, 64), :] = s[...] + t[...]

  lowered = lower(kernel, [struct(256, 64)], struct(256, 64))
  assert "s is one slot, filled by the consumers" in lowered.report()
  assert "ring t: 2 slots" in lowered.report()
  assert count(lowered, "cp.async.bulk.tensor") == 2 and count(lowered, "cp.async.c[ag]") > 0  # two boxes of 128 bytes
  assemble(lowered)


def test_a_forced_tma_copy_without_a_producer_is_refused():
  def kernel(x, y):
    s = tt.alloc_shared((64, 64), x.dtype)
    s[...] = x[...]
    tt.copy(x.at[...], s, dispatch="tma")
    y[...] = s[...]

  with pytest.raises(LoweringError) as e:
    lower(kernel, [struct(64, 64)], struct(64, 64))
  assert "the forced TMA copy has no producer" in str(e.value)
  assert "it is written by 'store'" in str(e.value) and 'dispatch="tma")' in str(e.value)


def test_downward_loops_release_every_slot():
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), F32)
    acc[...] = 0
    for k in tt.range(3, -1, -1):
      tt.copy(a.at[:, tt.block(k, 64)], a_s)
      tt.copy(b.at[tt.block(k, 64), :], b_s)
      tt.gemm(a_s, b_s, acc)
    c[...] = acc[...]

  lowered = lower(kernel, [struct(64, 256, dtype=BF16), struct(256, 64, dtype=BF16)], struct(64, 64))
  assert "cond" not in names(loop(role(lowered, 1)))
  assert names(loop(role(lowered, 1))).count("barrier_arrive") == 1
  assert [e for e in walk(role(lowered, 1)) if e.primitive.name == "store" and e.refs[0].root.hint == "acc"]
  assemble(lowered)


# ---- level 0


def matmul_ws_kernel(a, b, c, *, bm, bn, bk, num_stages, expected=None, regs=(24, 240), arrivals=2, wait=0):
  i, j = tt.program_id(0), tt.program_id(1)
  a_s = tt.alloc_shared((num_stages, bm, bk), a.dtype, layout=tt.swizzle(128))
  b_s = tt.alloc_shared((num_stages, bk, bn), b.dtype, layout=tt.swizzle(128))
  full = tt.alloc_barrier(num_stages, arrivals=1)
  empty = tt.alloc_barrier(num_stages, arrivals=arrivals)
  trips = tt.cdiv(a.shape[1], bk)
  with tt.warpgroup(0, regs=regs[0]), tt.elect():
    for k in tt.range(trips):
      slot, phase = k % num_stages, (k // num_stages) & 1
      empty[slot].wait(phase ^ 1)
      full[slot].arrive_expect_tx(expected or a_s.at[slot].nbytes + b_s.at[slot].nbytes)
      tt.copy_async(a.at[tt.block(i, bm), tt.block(k, bk)], a_s.at[slot], barrier=full[slot], dispatch="tma")
      tt.copy_async(b.at[tt.block(k, bk), tt.block(j, bn)], b_s.at[slot], barrier=full[slot], dispatch="tma")
  with tt.warpgroup(range(1, 3), regs=regs[1]):
    acc = tt.alloc_fragment((bm, bn), jnp.float32)
    acc[...] = 0
    for k in tt.range(trips):
      slot, phase = k % num_stages, (k // num_stages) & 1
      full[slot].wait(phase)
      tt.gemm_async(a_s.at[slot], b_s.at[slot], acc)
      tt.wgmma_wait(1)
      with tt.when(k > 0):
        empty[(k - 1) % num_stages].arrive()
    if wait is not None:
      tt.wgmma_wait(wait)
    c[tt.block(i, bm), tt.block(j, bn)] = acc[...].astype(c.dtype)


def matmul_ws(**static):
  static = dict(bm=128, bn=256, bk=64, num_stages=4) | static
  return lower(matmul_ws_kernel, [struct(512, 512, dtype=BF16)] * 2, struct(512, 512, dtype=BF16), grid=(4, 2),
               warpgroups=3, static=static)


def test_the_level_0_gemm_is_emitted_as_it_stands():
  lowered = matmul_ws()
  cubin = assemble(lowered)
  assert not [w for w in cubin.warnings if "C75" in w]
  assert count(lowered, "setmaxnreg") == 2 and count(lowered, "cp.async.bulk.tensor") == 1 + 4
  assert lowered.lowering.program.threads == 384
  assert not [n for n in lowered.lowering.program.notes if "ring" in n]


@pytest.mark.parametrize(("change", "said"), [
  (dict(expected=1024), "the barrier expects 1024 bytes, the copies beside it bring 49152"),
  (dict(regs=(40, 240)), "the roles ask for 66560 registers, an SM has 65536"),
  (dict(arrivals=1), "completes a phase after 1 arrivals, this is 2 of them"),
  (dict(wait=None), "acc is read or written while a gemm_async may still write it"),
  (dict(wait=1), "acc is read or written while a gemm_async may still write it"),
])
def test_what_the_checker_refutes_is_an_error_at_its_line(change, said):
  with pytest.raises(ScheduleError) as e:
    matmul_ws(**change)
  assert said in str(e.value)
  assert "schedule_test.py" in str(e.value) and "^" in str(e.value)


def test_a_conversion_inside_a_role_brings_its_own_syncs():
  def kernel(x, y):
    with tt.warpgroup(range(1, 3)):
      for k in tt.range(3):
        v = tt.exp(x[...]) * k
        y[k, :, :] = v[None, :] + v[:, None]

  lowered = lower(kernel, [struct(64)], struct(3, 64, 64), warpgroups=3)
  order = [n for n in names(loop_of(role(lowered, 1))) if n in ("sync", "store", "load")]
  assert order == ["load", "sync", "store", "sync", "load", "store"]
  assert "relayout of f32[64] by shared" in notes(lowered)
  assert count(lowered, "bar.sync 1, 256") == 2
  assemble(lowered)


def test_two_roles_for_one_warpgroup_are_refused():
  def kernel(x, y):
    with tt.warpgroup(0):
      y[:64] = x[:64]
    with tt.warpgroup(range(2)):
      y[64:] = x[64:]

  with pytest.raises(ScheduleError) as e:
    lower(kernel, [struct(128)], struct(128), warpgroups=2)
  assert "warpgroup 0 has two roles" in str(e.value) and "the first is at" in str(e.value)
