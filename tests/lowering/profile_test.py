"""tt.profile: what is recorded by PTX run on the CPU, what is written for Perfetto; and no code where it is off."""
from __future__ import annotations

import itertools
import json
from typing import Any

import jax
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, I32, assemble, count, matmul_kernel, struct
from tests.tolerances import assert_close
from tiletrace.core.config import read
from tiletrace.core.errors import TileTypeError
from tiletrace.ffi import primitive
from tiletrace.lowering import profile
from tiletrace.lowering.profile import Event, perfetto

rng = np.random.default_rng(11)
ON = tt.CompileOptions(profile=True)


def call_of(kernel: Any, out: Any, *, grid: Any = 1, options: Any = ON, **call: Any) -> tt.TileCall:
  return tt.tile_call(kernel, out, grid=grid, options=options, **call)


def spans(call: tt.TileCall, *args: Any, path: Any = None) -> list[Event]:
  with tt.timeline(path) as t:
    jax.block_until_ready(call(*args))
  return t.events


def rows_kernel(x, n, y):
  i = tt.program_id(0)
  with tt.profile("all"):
    v = tt.alloc_fragment((x.shape[1],), x.dtype)
    v[...] = x[i, :]
    for _ in tt.range(n[i]):
      with tt.profile("trip"):
        v[...] = v[...] + 0
    with tt.when(i > 1):
      with tt.profile("only some"):
        y[i, :] = v[...]
    with tt.when(i <= 1):
      y[i, :] = v[...]


def inputs() -> tuple[np.ndarray, np.ndarray]:
  return rng.standard_normal((3, 256)).astype(F32), np.asarray([2, 0, 1], I32)


def test_each_warpgroup_of_each_program_records_what_it_comes_through():
  x, n = inputs()
  found = spans(call_of(rows_kernel, struct(3, 256), grid=3, backend="sim", warpgroups=2), x, n)

  want = [(w, i, name) for w in range(2) for i in range(3) for name in
          ["trip"] * n[i] + ["only some"] * (i > 1) + ["all"]]
  assert sorted((e.warpgroup, *e.program, e.name) for e in found) == sorted(want)
  assert {e.kernel for e in found} == {"rows_kernel"} and all(e.line.startswith("profile_test.py:") for e in found)
  assert {e.cta for e in found} == {0, 1, 2}


def test_spans_lie_within_those_around_them_and_take_time():
  x, n = inputs()
  found = spans(call_of(rows_kernel, struct(3, 256), grid=3, backend="sim"), x, n)

  for inner in (e for e in found if e.name != "all"):
    (outer,) = [e for e in found if e.name == "all" and e.program == inner.program]
    assert outer.start < inner.start < inner.end < outer.end
  assert all(e.cycles == e.end - e.start > 0 for e in found)        # the simulator's timers both count its steps


def gemm_kernel(a, b, c):
  i = tt.program_id(0)
  a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
  acc = tt.alloc_fragment((64, 64), F32)
  acc[...] = 0
  with tt.profile("main loop"):
    for k in tt.pipelined(3, num_stages=2):
      with tt.profile("step"):
        tt.copy(a.at[tt.block(i, 64), tt.block(k, 64)], a_s)
        tt.copy(b.at[tt.block(k, 64), :], b_s)
        tt.gemm(a_s, b_s, acc)
  with tt.profile("store"):
    c[tt.block(i, 64), :] = acc[...].astype(c.dtype)


@pytest.mark.parametrize("persistent", [False, True])
def test_producer_and_consumers_record_their_own_spans_and_wgmma_is_not_serialised(persistent):
  a, b = rng.standard_normal((192, 192)).astype(BF16), rng.standard_normal((192, 64)).astype(BF16)
  call = call_of(gemm_kernel, struct(192, 64, dtype=BF16), grid=3, persistent=persistent)
  lowered = call.lower(a, b)
  assert assemble(lowered).image
  with tt.timeline() as t:
    (got,) = lowered.simulate(a, b)

  assert_close(got, a.astype(np.float64) @ b.astype(np.float64), "gemm")
  for i in range(3):
    mine = [e for e in t.events if e.program == (i,)]
    assert [sum(e.warpgroup == w and e.name == "step" for e in mine) for w in range(2)] == [3, 3]
    producer, consumer = (next(e for e in mine if e.name == "step" and e.warpgroup == w) for w in range(2))
    assert producer.start < consumer.end                            # it starts copies before they are multiplied


def test_roles_that_the_author_writes_record_where_they_are_written_and_elected_threads_too():
  def kernel(x, y):
    s = tt.alloc_shared((128,), x.dtype)
    ready = tt.alloc_barrier(1, arrivals=1)
    with tt.warpgroup(0):
      with tt.profile("bring"), tt.elect():
        with tt.profile("start"):
          ready[0].arrive_expect_tx(s.nbytes)
          tt.copy_async(x, s, barrier=ready[0], dispatch="tma")
    with tt.warpgroup(range(1, 3)):
      with tt.profile("use"):
        ready[0].wait(0)
        y[...] = s[...]

  x = rng.standard_normal(128).astype(F32)
  call = call_of(kernel, struct(128), warpgroups=3, backend="sim")
  found = spans(call, x)
  assert sorted((e.warpgroup, e.name) for e in found) == [(0, "bring"), (0, "start"), (1, "use"), (2, "use")]
  np.testing.assert_array_equal(call(x), x)


def test_the_cost_of_a_kernel_is_without_its_records():
  x, n = inputs()
  costs = [call_of(rows_kernel, struct(3, 256), grid=3, options=o).lower(x, n).compile().cost_analysis()
           for o in (ON, None)]
  assert costs[0] == costs[1] and costs[0]["bytes"] == 2 * x.nbytes + n.nbytes


def test_the_largest_gemm_has_registers_left_for_its_records():
  def kernel(a, b, c):
    with tt.profile("tile"):
      matmul_kernel(a, b, c, bm=128, bn=256, bk=64, num_stages=4)

  x = struct(512, 512, dtype=BF16)
  compiled = call_of(kernel, x, grid=(4, 2), warpgroups=2).lower(x, x).compile()
  assert compiled.memory_analysis()["spill_stores"] == 0 and "24 by setmaxnreg" in compiled.report()


def test_where_profiling_is_off_the_ptx_is_that_of_the_kernel_without_spans():
  def plain(a, b, c):
    i = tt.program_id(0)
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), F32)
    acc[...] = 0
    for k in tt.pipelined(3, num_stages=2):
      tt.copy(a.at[tt.block(i, 64), tt.block(k, 64)], a_s)
      tt.copy(b.at[tt.block(k, 64), :], b_s)
      tt.gemm(a_s, b_s, acc)
    c[tt.block(i, 64), :] = acc[...].astype(c.dtype)

  args = struct(192, 192, dtype=BF16), struct(192, 64, dtype=BF16)
  without, off, on = (call_of(k, struct(192, 64, dtype=BF16), grid=3, options=o, name="kernel").lower(*args)
                      for k, o in ((plain, None), (gemm_kernel, None), (gemm_kernel, ON)))
  assert without.as_text("ptx") == off.as_text("ptx") != on.as_text("ptx")
  assert count(on, r"mov.u64 %rd\d+, %globaltimer") == 2 * 6 and count(off, r"mov.u64 %rd\d+, %globaltimer") == 0
  assert off.lowering.hidden == () and len(on.lowering.hidden) == 1


def test_the_environment_switches_it_on(monkeypatch):
  assert not read({}).profile and read({"TT_PROFILE": "1"}).profile
  monkeypatch.setenv("TT_PROFILE", "1")
  x, n = inputs()
  assert spans(call_of(rows_kernel, struct(3, 256), grid=3, backend="sim", options=None), x, n)


def test_as_jax_ops_there_is_nothing_to_record():
  x, n = inputs()
  call = call_of(rows_kernel, struct(3, 256), grid=3, backend="xla")

  assert spans(call, x, n) == []
  np.testing.assert_array_equal(call(x, n), x)


def test_a_ring_keeps_the_newest_records_and_counts_on(monkeypatch):
  monkeypatch.setattr(profile, "_MOST_RECORDS", 8)

  def kernel(x, y):
    for _ in tt.range(20):
      with tt.profile("trip"):
        y[...] = x[...]

  found = spans(call_of(kernel, struct(128), backend="sim"), np.ones(128, F32))
  assert [e.name for e in found] == ["trip"] * 4
  assert all(a.end < b.start for a, b in itertools.pairwise(found))


def test_ctas_that_have_no_room_record_nothing(monkeypatch):
  monkeypatch.setattr(profile, "MOST_WORDS", 2 * 2 * (profile.HEADER + 8 * 6))
  x, n = inputs()
  found = spans(call_of(rows_kernel, struct(3, 256), grid=3, backend="sim", name="with_little_room"), x, n)

  assert {e.cta for e in found} == {0, 1}


def test_debugging_and_profiling_go_together(capsys):
  def kernel(x, y):
    with tt.profile("copy"):
      tt.debug_print("row {}", tt.program_id(0))
      y[tt.program_id(0), :] = x[tt.program_id(0), :]

  x = rng.standard_normal((2, 128)).astype(F32)
  call = call_of(kernel, struct(2, 128), grid=2, backend="sim", options=tt.CompileOptions(debug=True, profile=True))
  assert len(spans(call, x)) == 2
  np.testing.assert_array_equal(call(x), x)
  out = capsys.readouterr().out
  assert "row 0" in out and "row 1" in out


def test_a_batch_of_calls_records_each_example():
  x, n = inputs()
  call = call_of(rows_kernel, struct(3, 256), grid=3, backend="sim")
  with tt.timeline() as t:
    jax.block_until_ready(jax.vmap(call)(np.stack([x, x]), np.stack([n, n])))
  assert len({e.program for e in t.events}) == 6 and len(t.events) == 2 * (3 + 3 + 1)


# ---- on a GPU it is one more operand and result of the call

def test_the_custom_call_gets_the_records_and_gives_them_to_a_callback(monkeypatch):
  reported = []
  monkeypatch.setattr(jax.debug, "callback", lambda fn, words: reported.append((fn, words.shape)))
  x, n = inputs()
  traced = call_of(rows_kernel, struct(3, 256), grid=3).trace(x, n)
  (records,) = traced.program.hidden

  jaxpr = jax.make_jaxpr(lambda *args: primitive._call_with_hidden(traced.program, *args))(x, n)
  (call,) = [e for e in jaxpr.eqns if e.primitive.name == "ffi_call"]
  assert len(call.invars) == 3 and [v.aval.shape for v in call.outvars] == [(3, 256), records.empty().shape]
  assert reported == [(records.report, records.empty().shape)]


# ---- the file

def test_the_file_is_in_the_trace_event_format(tmp_path):
  x, n = inputs()
  found = spans(call_of(rows_kernel, struct(3, 256), grid=3, backend="sim"), x, n, path=tmp_path / "trace.json")
  trace = json.loads((tmp_path / "trace.json").read_text())
  events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
  names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}

  assert len(events) == len(found) and min(e["ts"] for e in events) == 0
  assert {e["name"] for e in events} == {"all", "trip", "only some"}
  first = min(found, key=lambda e: e.start)
  assert events[0]["dur"] == pytest.approx((first.end - first.start) / 1000)
  assert events[0]["args"] == {"program": list(first.program), "cycles": first.cycles, "line": first.line}
  for e in events:
    assert names["process_name", e["pid"], 0] == f"rows_kernel, SM {e['pid']}"
    assert names["thread_name", e["pid"], e["tid"]] == f"CTA {e['tid'] // 8}, warpgroup {e['tid'] % 8}"


def test_kernels_of_different_names_are_different_processes():
  event = Event("first", "a", "x.py:1", 3, 5, 1, (5,), 1000, 3000, 40)
  trace = perfetto([event, Event("second", "a", "x.py:1", 3, 5, 1, (5,), 2500, 2600, 40)])

  first, second = [e for e in trace["traceEvents"] if e["ph"] == "X"]
  assert first["pid"] != second["pid"] and (first["ts"], first["dur"], second["ts"]) == (0, 2, 1.5)
  assert perfetto([])["traceEvents"] == []


def test_a_timeline_that_is_left_by_an_exception_writes_nothing(tmp_path):
  with pytest.raises(ZeroDivisionError), tt.timeline(tmp_path / "trace.json"):
    raise ZeroDivisionError
  assert not (tmp_path / "trace.json").exists() and profile.COLLECTORS == []


# ---- refusals

def test_a_name_that_is_no_string_is_refused_at_its_line():
  def kernel(x, y):
    with tt.profile(3):  # type: ignore[arg-type]
      y[...] = x[...]

  with pytest.raises(TileTypeError, match=r"tt.profile: the name is 3, not a string") as e:
    call_of(kernel, struct(8)).trace(struct(8))
  assert "tt.profile(3)" in str(e.value)


@pytest.mark.gpu
def test_a_gpu_records_the_same_spans():
  x, n = inputs()
  call = {b: call_of(rows_kernel, struct(3, 256), grid=3, backend=b, warpgroups=2) for b in ("sim", None)}
  sim, gpu = (spans(c, x, n) for c in call.values())

  assert sorted((e.warpgroup, e.cta, e.program, e.name) for e in gpu) == (
      sorted((e.warpgroup, e.cta, e.program, e.name) for e in sim))
  assert all(0 < e.cycles < 10**7 and 0 <= e.end - e.start < 10**7 for e in gpu)
  for inner in (e for e in gpu if e.name != "all"):
    (outer,) = [e for e in gpu if (e.name, e.program, e.warpgroup) == ("all", inner.program, inner.warpgroup)]
    assert outer.start <= inner.start <= inner.end <= outer.end and outer.sm == inner.sm
