"""Copies that TMA cannot take, made by a full producer warpgroup: the schedule, its protocol, its code."""
from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import Case
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F32, assemble, count, lower, matmul, notes, struct
from tests.lowering.protocol import Protocol
from tiletrace.core.errors import ScheduleError
from tiletrace.core.graph import Eqn, walk
from tiletrace.core.ops import memory
from tiletrace.lowering.emit.cp_async import _parts
from tiletrace.lowering.schedule import fill, producer
from tiletrace.lowering.schedule.checker import check_program
from tiletrace.lowering.schedule.resources import register_budget
from tiletrace.stages import Lowered


def roles(lowered: Lowered) -> list[Eqn]:
  return [e for e in lowered.lowering.program.graph.body.eqns if e.primitive.name == "warpgroup"]


def arrivals(lowered: Lowered) -> dict[str, int]:
  """Barrier arrays by name: arrivals of a phase."""
  return {e.outvars[0].hint or "": e.params["arrivals"] for e in walk(lowered.lowering.program.graph.body)
          if e.primitive.name == "alloc_barrier"}


def dispatches(lowered: Lowered) -> set[str]:
  return {e.params["dispatch"] for e in walk(roles(lowered)[0].blocks[0]) if e.primitive.name in ("copy", "copy_async")}


# ---- the schedule

@pytest.mark.parametrize(("shape", "by", "full"), [
  ((200, 264, 136), {"tma"}, 1),
  ((200, 333, 777), {"scalar"}, 1),
  ((200, 330, 454), {"cp_async"}, 1),
  ((200, 264, 777), {"scalar", "tma"}, 2),
  ((200, 264, 454), {"cp_async", "tma"}, 2),
  ((200, 333, 454), {"cp_async", "scalar"}, 1),
])
def test_a_phase_has_one_arrival_for_tma_and_one_for_the_threads(shape, by, full):
  lowered = matmul(*shape)
  assert dispatches(lowered) == by
  assert arrivals(lowered) == {"full": full, "empty": 2}
  assert "ring a_s_b_s: 3 slots" in notes(lowered)


def test_the_producer_is_one_thread_only_where_tma_makes_all_copies():
  one, all_threads = (roles(matmul(*shape))[0].blocks[0].eqns for shape in ((200, 264, 136), (200, 333, 777)))
  assert [e.primitive.name for e in one] == ["elect"]
  assert "elect" not in [e.primitive.name for e in all_threads]


def test_what_threads_wrote_is_fenced_and_synced_before_the_arrival():
  producer = roles(matmul(200, 333, 777))[0]
  loop = next(e for e in walk(producer.blocks[0]) if e.primitive.name == "for_loop")
  order = [e.primitive.name for e in walk(loop.blocks[0])
           if e.primitive.name in ("barrier_wait", "copy", "fence", "sync", "barrier_arrive")]
  assert order == ["barrier_wait", "copy", "copy", "copy", "copy", "fence", "sync", "barrier_arrive"]


def test_tiles_inside_the_array_are_copied_without_bounds_checks():
  producer = roles(matmul(200, 333, 777))[0]
  guards = [e.params["guard"] for e in walk(producer.blocks[0]) if e.primitive.name == "copy"]
  assert guards == [(), (), (0, 1), (0, 1)]


@pytest.mark.parametrize(("stages", "lag"), [(2, 0), (3, 1), (4, 2), (6, 4)])
def test_cp_async_arrives_as_late_as_the_slots_allow(stages, lag):
  producer = roles(matmul(200, 330, 454, num_stages=stages, bn=64))[0]
  waits = [e.params["n"] for e in walk(producer.blocks[0]) if e.primitive.name == "wait_group"]
  assert waits == ([lag, 0] if lag else [0])


def test_one_stage_stays_with_the_consumers():
  lowered = matmul(200, 333, 777, num_stages=1)
  assert not roles(lowered)
  assert "one slot, filled by the consumers" in notes(lowered)


def test_a_copy_from_what_the_kernel_writes_is_not_pipelined():
  def kernel(x, y):
    s = tt.alloc_shared((16, 64), x.dtype)
    y[:, :64] = x[:, :64]
    for k in tt.pipelined(4, num_stages=3):
      tt.copy(y.at[:, tt.block(k, 64)], s)
      y[:, tt.block(k, 64)] = s[...] * 2

  lowered = lower(kernel, [struct(16, 255)], struct(16, 255))
  assert not roles(lowered)
  assert "only TMA copies go to a producer: y at" in notes(lowered)


@pytest.mark.parametrize("shape", [(200, 264, 136), (200, 333, 777), (200, 264, 454), (200, 333, 454)])
def test_the_checker_proves_that_phases_complete(shape):
  assert check_program(matmul(*shape, persistent=True).lowering.program.graph) == []


def test_the_checker_does_not_prove_a_second_arrival(monkeypatch):
  arrive = fill.Builder.arrive

  def twice(self, bar, index, count, **kw):
    for _ in range(1 + (bar.hint == "full")):
      arrive(self, bar, index, count, **kw)

  monkeypatch.setattr(fill.Builder, "arrive", twice)
  with pytest.raises(AssertionError) as e:
    matmul(200, 264, 777)
  assert "full (2 arrivals): not proven that a phase completes, one kind arrives more often" in str(e.value)


def written_kernel(x, y, *, arrivals):
  """An author's producer whose threads copy."""
  full = tt.alloc_barrier(2, arrivals=arrivals)
  empty = tt.alloc_barrier(2, arrivals=1)
  s = tt.alloc_shared((2, 16, 64), x.dtype)
  with tt.warpgroup(0):
    ring = tt.PipelineState(2, phase=1)
    for k in tt.range(4):
      empty[ring.slot].wait(ring.phase)
      tt.copy(x.at[:, tt.block(k, 64)], s.at[ring.slot], dispatch="scalar")
      tt.fence()
      tt.sync(each="warpgroup")
      full[ring.slot].arrive()
      ring.advance()
  with tt.warpgroup(1):
    ring = tt.PipelineState(2)
    for k in tt.range(4):
      full[ring.slot].wait(ring.phase)
      y[:, tt.block(k, 64)] = s[ring.slot]
      tt.sync(each="warpgroup")
      empty[ring.slot].arrive()
      ring.advance()


def test_an_author_writes_the_same_protocol():
  lowered = lower(written_kernel, [struct(16, 255)], struct(16, 255), warpgroups=2, static={"arrivals": 1})
  assert assemble(lowered).spill_stores == 0
  protocol = Protocol(lowered.lowering.program.graph, 0)
  protocol.run()
  assert protocol.read == protocol.pushed and "not proven" not in notes(lowered)
  other = lower(written_kernel, [struct(16, 255)], struct(16, 255), warpgroups=2, static={"arrivals": 2})
  assert "full (2 arrivals): not proven that a phase completes" in notes(other)


# ---- registers

@pytest.mark.parametrize("consumers", range(1, 8))
@pytest.mark.parametrize("beside", (None, 0, 64, 128, 160, 240))
def test_registers_of_all_roles_fit_what_the_launch_gave(consumers, beside):
  budget = register_budget(consumers, 65536, beside)
  if consumers == 1:
    assert budget is None
    return
  assert budget is not None
  producer, each = budget
  entry = 65536 // (128 * (consumers + 1)) // 8 * 8
  assert producer % 8 == each % 8 == 0 and 24 <= producer <= entry <= each <= 240
  assert producer + consumers * each <= entry * (consumers + 1)


def test_a_producer_takes_fewer_registers_where_the_consumers_need_them():
  assert [register_budget(2, 65536, n) for n in (128, 152, 200)] == [(136, 184), (88, 208), (56, 224)]
  assert [roles(matmul(200, n, k, bn=256))[0].params["regs"] for n, k in ((333, 777), (264, 136))] == [136, 24]


def test_roles_that_ask_for_more_than_the_launch_gave_are_refused():
  def kernel(x, y):
    with tt.warpgroup(0, regs=24):
      tt.sync(each="warpgroup")
    with tt.warpgroup(range(1, 5), regs=120):
      y[...] = x[...]

  with pytest.raises(ScheduleError, match="the roles ask for 64512 registers, 5 warpgroups have 61440 at launch"):
    lower(kernel, [struct(64, 64)], struct(64, 64), warpgroups=5)


# ---- the protocol: every order of the roles

@pytest.mark.parametrize("trips", (1, 2, 3, 7))
@pytest.mark.parametrize("stages", (2, 3, 4))
@pytest.mark.parametrize("shape", ((330, 0), (333, 0), (264, -1), (264, 2), (333, 2)))
def test_slots_are_read_in_the_order_of_the_pushes(shape, stages, trips):
  """n and the offset of k choose the copies: cp.async, scalars, TMA beside either, cp.async beside scalars."""
  n, offset = shape
  k = 64 * trips + offset
  lowered = matmul(130, n, k, bn=128, num_stages=stages, persistent=True)
  for seed in range(4):
    protocol = Protocol(lowered.lowering.program.graph, seed)
    protocol.run()
    assert protocol.read == protocol.pushed
    assert {len(tags) for tags in protocol.pushed.values()} == {2 * 3 * tt.cdiv(k, 64)}


def counted_kernel(a, b, trips, c, *, num_stages):
  a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
  acc = tt.alloc_fragment((64, 64), jnp.float32)
  for n in tt.range(3):
    acc[...] = 0
    for k in tt.pipelined(trips[...], num_stages=num_stages):
      tt.copy(a.at[n, :, tt.block(k, 64)], a_s)
      tt.copy(b.at[n, tt.block(k, 64), tt.ds(0, 64)], b_s)
      tt.gemm(a_s, b_s, acc)
    c[n, :, :] = acc[...]


@pytest.mark.parametrize("columns", (62, 61))
@pytest.mark.parametrize("stages", (2, 3, 4))
def test_trip_counts_that_data_decide(stages, columns):
  inputs = [struct(3, 64, 1022, dtype=BF16), struct(3, 1022, columns, dtype=BF16), struct(dtype="int32")]
  lowered = lower(counted_kernel, inputs, struct(3, 64, 64), static={"num_stages": stages})
  for trips in (-1, 0, 1, 2, 3, 5):
    protocol = Protocol(lowered.lowering.program.graph, trips, number=trips)
    protocol.run()
    assert protocol.read == protocol.pushed
    assert all(len(tags) == 3 * trips for tags in protocol.pushed.values())


@pytest.mark.parametrize(("name", "broken", "message"), [
  ("lag_of", lambda rings: rings[0].slots - 1, "deadlock"),     # the consumers' release needs what has not arrived
  ("fill.fence", None, "arrives before the fence"),
  ("fill.is_async", None, "a slot is read before it is full"),
])
def test_the_protocol_finds_what_is_wrong(name, broken, message, monkeypatch):
  if name == "lag_of":
    monkeypatch.setattr(producer, "lag_of", broken)
  elif name == "fill.fence":
    monkeypatch.setattr(fill.Builder, "fence", lambda self: None)
  else:
    monkeypatch.setattr(fill, "is_async", lambda copy: False)   # no commit, no wait
    monkeypatch.setattr(fill, "_with_operands", _as_cp_async)
  graph = matmul(130, 330, 450, num_stages=4, bn=64).lowering.program.graph
  with pytest.raises(AssertionError, match=message):
    for seed in range(8):
      Protocol(graph, seed).run()


def _as_cp_async(copy, src, dst, plan, guard):
  return Eqn(memory.copy_async_p, (src.root, *src.dyn, dst.root, *dst.dyn), (), {
      "views": (src.view, dst.view), "fill_value": 0, "dispatch": "cp_async", "layout": plan.layout, "vec": plan.width,
      "guard": guard}, copy.loc)


def test_several_slots_are_in_flight():
  protocol = Protocol(matmul(130, 330, 640 + 2, num_stages=4, bn=64).lowering.program.graph, 0)
  protocol.run()
  assert protocol.most_in_flight == 3


def relu_attention_kernel(q, k, v, o):
  q_s, k_s, v_s = (tt.alloc_shared((n, 64), q.dtype) for n in (128, 64, 64))
  s, acc = tt.alloc_fragment((128, 64), jnp.float32), tt.alloc_fragment((128, 64), jnp.float32)
  acc[...] = 0
  tt.copy(q.at[tt.ds(0, 128), tt.ds(0, 64)], q_s)
  for j in tt.pipelined(tt.cdiv(k.shape[0], 64), num_stages=3):
    tt.copy(k.at[tt.block(j, 64), tt.ds(0, 64)], k_s)
    tt.copy(v.at[tt.block(j, 64), tt.ds(0, 64)], v_s)
    tt.gemm(q_s, k_s.T, s, accumulate=False)
    tt.gemm(tt.maximum(s[...], 0).astype(v.dtype), v_s, acc)
  o[...] = acc[...].astype(o.dtype)


@pytest.mark.parametrize("widths", [(64, 61), (62, 62), (62, 61), (61, 64)])
def test_two_rings_in_one_loop_do_not_wait_for_each_other(widths):
  d, dv = widths
  for rows in (40, 64, 300):
    lowered = lower(relu_attention_kernel, [struct(128, 64, dtype=BF16), struct(rows, d, dtype=BF16),
                                            struct(rows, dv, dtype=BF16)], struct(128, 64, dtype=BF16), warpgroups=2)
    for seed in range(4):
      protocol = Protocol(lowered.lowering.program.graph, seed)
      protocol.run()
      assert protocol.read == protocol.pushed


def test_threads_without_a_sync_of_their_own_do_not_wait():
  """Q comes by TMA alone: the elected thread waits for its slot. K and V: all wait, and a sync follows."""
  lowered = lower(relu_attention_kernel, [struct(128, 64, dtype=BF16), struct(300, 61, dtype=BF16),
                                          struct(300, 61, dtype=BF16)], struct(128, 64, dtype=BF16), warpgroups=2)
  body = roles(lowered)[0].blocks[0]
  loop = next(e for e in body.eqns if e.primitive.name == "for_loop")
  once = next(e for e in body.eqns if e.primitive.name == "elect")
  assert [e.primitive.name for e in once.blocks[0].eqns] == ["barrier_wait", "barrier_arrive_expect_tx", "copy_async"]
  assert "barrier_wait" not in [e.primitive.name for e in body.eqns]
  names = [e.primitive.name for e in loop.blocks[0].eqns]
  order = [n for n in names if n in ("barrier_wait", "sync", "barrier_arrive")]
  assert order == ["barrier_wait", "sync", "barrier_arrive"] * 2


# ---- the code

def test_pairs_of_2_byte_elements_are_stored_as_words():
  lowered = matmul(200, 333, 777)
  assert count(lowered, r"st\.shared\.b16") == 0
  assert count(lowered, r"ld\.global\.b16") == 2 * (64 + 64) == 2 * count(lowered, r"st\.shared\.b32")


@pytest.mark.parametrize("shape", [(4095, 4093, 4091), (4095, 4094, 4090), (1000, 776, 333)])
def test_it_assembles_without_spills_and_without_serialised_wgmma(shape):
  cubin = assemble(matmul(*shape, bn=256, num_stages=4, persistent=True, raster=8))
  assert (cubin.spill_stores, cubin.spill_loads) == (0, 0)
  assert not [w for w in cubin.warnings if "C75" in w]


def test_elements_of_4_bytes_with_a_fill_are_pipelined():
  def kernel(x, y):
    s = tt.alloc_shared((16, 64), x.dtype)
    acc = tt.alloc_fragment((16, 64), np.float32)
    acc[...] = 0
    for k in tt.pipelined(tt.cdiv(x.shape[1], 64), num_stages=3):
      tt.copy(x.at[:, tt.block(k, 64)], s, fill_value=-1.0)
      acc[...] += s[...]
    y[...] = acc[...]

  lowered = lower(kernel, [struct(16, 256, dtype=F32)], struct(16, 64, dtype=F32))
  assert dispatches(lowered) == {"vector"} and arrivals(lowered) == {"full": 1, "empty": 4}
  assert assemble(lowered).spill_stores == 0


def staged_kernel(x, y, *, fill, swizzle):
  """The copy that a producer makes, by all threads, where nothing is asynchronous."""
  i, j = tt.program_id(0), tt.program_id(1)
  s = tt.alloc_shared((16, 64), x.dtype, layout=tt.swizzle(swizzle))
  tt.copy(x.at[tt.ds(i * 16 - 3, 16), tt.block(j, 64)], s, fill_value=fill)
  y[tt.block(i, 16), tt.block(j, 64)] = s[...]


@pytest.mark.parametrize("columns", (61, 64, 130, 191))
@pytest.mark.parametrize(("dtype", "swizzle"), [
  (BF16, 0), (BF16, 128), (np.float16, 64), (F32, 0), (F32, 128), (np.bool_, 0)])
def test_what_the_copies_write(dtype, swizzle, columns):
  rng = np.random.default_rng(columns)
  x = (rng.standard_normal((37, columns)) * 9).astype(dtype) if dtype != np.bool_ else rng.random((37, columns)) < 0.5
  fill = dtype == np.bool_ or 1.5
  padded = np.full((48, 192), fill, dtype)
  padded[3:40, :columns] = x
  call = tt.tile_call(functools.partial(staged_kernel, fill=fill, swizzle=swizzle),
                      struct(48, 192, dtype=dtype), grid=(3, 3))
  got, = simulated.run(call.lower(x), Case(call, (x,), (padded,), "exact"))
  np.testing.assert_array_equal(got, padded)


@pytest.mark.parametrize("part", (2, 8, 14, 64))
def test_parts_are_whole_accesses_of_every_element_once(part):
  loads = [[r] for r in range(48)]
  for stores in ([[2 * i, 2 * i + 1] for i in range(24)], [[i, i + 12, i + 24, i + 36] for i in range(12)]):
    parts = _parts(loads, stores, part)
    assert sorted(r for p in parts for r in p.registers) == list(range(48))
    assert all(sorted(r for g in p.loads for r in g) == sorted(r for g in p.stores for r in g) for p in parts)
    assert max(len(p.registers) for p in parts) <= max(part, len(stores[0]))


def test_one_ring_takes_pushes_of_tma_and_of_threads_in_turn():
  """x's rows are no multiple of 16 bytes, w's are: each phase has an arrival of either kind."""
  def kernel(x, w, y):
    s, acc = tt.alloc_shared((16, 16), x.dtype), tt.alloc_fragment((16, 16), x.dtype)
    acc[...] = 0
    for k in tt.pipelined(3, num_stages=3):
      tt.copy(x.at[:, tt.block(k, 16)], s)
      acc[...] = acc[...] * 2 + s[...]
      tt.copy(w.at[:, tt.block(k, 16)], s)
      acc[...] = acc[...] * 2 - s[...]
    y[...] = acc[...]

  rng = np.random.default_rng(3)
  x, w = (rng.integers(-4, 5, (16, n)).astype(F32) for n in (47, 48))
  call = tt.tile_call(kernel, struct(16, 16), grid=1)
  lowered = call.lower(x, w)
  assert dispatches(lowered) == {"tma", "cp_async"} and arrivals(lowered)["full"] == 2
  got, = simulated.run(lowered, Case(call, (x, w), (), "exact"))
  np.testing.assert_array_equal(got, np.asarray(call(x, w)))
