"""What the report says of choices, layouts, conversions, barriers, memory, registers, occupancy and the roofline."""
from __future__ import annotations

import functools
import json
import math
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F16, F32, count, lower, matmul, struct
from tests.report.kernels import (
  LANES,
  REGISTERS,
  SUBJECTS,
  Subject,
  converted,
  gemm,
  one_after_the_other,
  relayout,
  softmax,
  softmax_kernel,
)
from tiletrace.kernels.matmul import matmul_kernel
from tiletrace.lowering.layouts.catalog import wgmma_accumulator
from tiletrace.lowering.target import H200, SM_90A
from tiletrace.sim.launch import run


@pytest.fixture(scope="module", params=["gemm", "softmax", "relayout", "odd_rows", "mma_sync"])
def subject(request: pytest.FixtureRequest) -> Subject:
  return SUBJECTS[request.param]()


def data(subject: Subject) -> dict[str, Any]:
  return subject.lowered.report().data


# ---- the forms

def test_it_is_text_where_it_is_printed_and_json_where_that_is_asked_for(subject):
  report = subject.lowered.report()

  assert repr(report) == str(report) and str(report).startswith(f"{report.data['kernel']} (kernels.py:")
  assert json.loads(report.json()) == json.loads(json.dumps(report.data))
  told = json.loads(subject.lowered.report(json=True))
  assert {**told, "seconds": None} == {**json.loads(report.json()), "seconds": None}
  assert "operations:" in report and "no such words" not in report
  assert all(len(line) < 400 for line in str(report).splitlines())


# ---- operations

def test_every_choice_is_told_with_the_reasons_against_better_ones(subject):
  told = [(o["op"].removesuffix("_async"), o["variant"], tuple((x["variant"], x["reason"]) for x in o["declined"]))
          for o in data(subject)["ops"] if o["variant"] is not None for _ in range(o["count"])]

  assert sorted(told) == sorted((c.op, c.variant, c.declined) for c in subject.lowered.choices)
  text = str(subject.lowered.report())
  assert all(f"not {name}: {reason}" in text for _, _, declined in told for name, reason in declined)


def test_operations_that_python_unrolls_are_told_once_with_a_count():
  def kernel(x, y):
    for _ in range(3):
      y[...] = x[...] + 1

  (store,) = [o for o in lower(kernel, [struct(128)], struct(128)).report().data["ops"] if o["op"] == "store"]
  assert store["count"] == 3


# ---- layouts

def test_layouts_have_the_names_of_the_schedules_text(subject):
  legend = re.findall(r"^  (L\d+) = (.*)$", subject.lowered.as_text("schedule"), re.MULTILINE)

  assert {name: x["layout"] for name, x in data(subject)["layouts"].items()}.items() >= dict(legend).items()


def test_a_layout_is_drawn_and_says_what_a_thread_holds():
  layouts = data(gemm())["layouts"].values()
  (acc,) = [x for x in layouts if "acc" in x["variables"]]

  assert acc["elements_per_thread"] == 128 * 128 // 256 and acc["warps"] == 8 and acc["copies"] == 1
  assert acc["drawing"][0] == "   T0:0  T0:1  T1:0  T1:1  T2:0  T2:1  T3:0  T3:1 ...".replace("   T0", " T0")
  assert acc["drawing"][1].split()[0] == f"T{4}:0"
  first = wgmma_accumulator(64, 128)
  assert acc["drawing"][7].split()[0] == f"T{first.locate((7, 0))['lane']}:0"
  assert any(x["of"] == "shared memory" and "a_s" in x["variables"] for x in layouts)


# ---- conversions

def test_a_conversion_through_shared_memory_tells_its_bytes_and_is_the_accesses_of_its_line():
  found = data(relayout())
  (c,) = found["conversions"]

  assert (c["class"], c["shared_bytes"], c["trips"]) == ("shared", 2 * 64 * 64 * 2, 1)
  assert c["from"] != c["to"] and {c["from"], c["to"]} <= found["layouts"].keys()
  (op,) = [o for o in found["ops"] if o["op"] == "relayout"]
  assert sum(a["nbytes"] for a in op["accesses"]) == c["shared_bytes"]
  assert f"from {c['from']} to {c['to']}: shared, 16384 bytes through shared memory" in relayout().lowered.report()


@pytest.mark.parametrize("dtype", [F32, np.int32])
def test_a_conversion_inside_warps_has_as_many_shuffles_as_the_ptx(dtype):
  subject = converted(LANES, dtype)
  (c,) = data(subject)["conversions"]

  assert c["class"] == "shuffle" and c["shuffles"] == c["instructions"] == 1
  # One more of them makes the warpgroup's index uniform.
  assert count(subject.lowered, "shfl.sync.idx") == c["shuffles"] + 1


@pytest.mark.parametrize(("dtype", "permutes"), [(F32, 0), (F16, 2)])
def test_a_renaming_of_registers_costs_the_byte_permutes_of_the_ptx(dtype, permutes):
  subject = converted(REGISTERS, dtype)
  (c,) = data(subject)["conversions"]

  assert (c["class"], c["instructions"]) == ("registers", permutes)
  assert count(subject.lowered, "prmt") == 2 * permutes        # the store puts them in the order of memory again
  assert ("free" if not permutes else f"{permutes} byte permutes a thread") in subject.lowered.report()


# ---- barriers

def test_barriers_and_syncs_are_those_of_the_ptx(subject):
  found = data(subject)

  assert sum(b["count"] for b in found["mbarriers"]) == count(subject.lowered, "mbarrier.init")
  syncs = sum(o["count"] for o in found["ordering"] if o["op"] == "sync")
  begins = int(bool(found["mbarriers"]))               # all threads wait until the barriers are initialised
  assert syncs + begins == count(subject.lowered, r"bar(rier)?\.(cta\.)?sync")
  waits = sum(o["count"] for o in found["ordering"] if o["op"] == "wgmma_wait")
  assert waits == count(subject.lowered, "wgmma.wait_group")


def test_a_barrier_tells_who_waits_and_how_many_bytes_it_expects():
  full, empty = data(gemm(k=192, bk=64))["mbarriers"]

  assert (full["barrier"], full["count"], empty["barrier"], empty["arrivals"]) == ("full", 3, "empty", 2)
  expects, waits = full["uses"]
  assert expects == {"what": "expects", "role": "warpgroup 0", "line": expects["line"], "trips": 3,
                     "bytes": 2 * (128 * 64 + 64 * 128)}
  assert (waits["what"], waits["role"]) == ("waits", "warpgroups 1-2")


# ---- shared memory

def test_buffers_do_not_overlap_and_fill_what_the_launch_asks_for(subject):
  memory = data(subject)["shared_memory"]
  ends = [0]
  for b in memory["buffers"]:
    assert b["offset"] >= ends[-1]
    ends.append(b["offset"] + b["bytes"])

  assert ends[-1] == memory["bytes"] == subject.lowered.compile().memory_analysis()["smem_bytes"]
  assert sum(b["bytes"] for b in memory["buffers"]) >= memory["live_peak_bytes"] > 0 or not memory["buffers"]


def test_a_buffer_lives_from_its_first_to_its_last_use():
  memory = data(one_after_the_other())["shared_memory"]
  first, second = (b for b in memory["buffers"] if b["bytes"] == 64 * 64 * 4)

  assert first["live"][1] < second["live"][0] or second["live"][1] < first["live"][0]
  assert memory["live_peak_bytes"] < 2 * 64 * 64 * 4 <= memory["bytes"]
  assert [u["access"] for u in first["uses"]] == ["write", "read"]


def test_what_a_loop_touches_lives_as_long_as_the_loop():
  memory = data(gemm(num_stages=2))["shared_memory"]
  a, b = (x for x in memory["buffers"] if x["buffer"] in ("a_s", "b_s"))

  assert a["live"][0] == b["live"][0] and {"read", "write"} == {u["access"] for u in a["uses"]}


# ---- registers and occupancy

def test_registers_are_those_of_ptxas_and_of_the_fragments():
  compiled = matmul(bm=128, bn=256, num_stages=4).compile()
  registers = compiled.report().data["registers"]
  producer, consumers = registers["roles"]

  assert registers["at_entry"] == compiled.memory_analysis()["registers"] <= registers["at_most_at_entry"] == 168
  assert (producer["budget"], consumers["budget"]) == (24, 240)
  assert consumers["fragments"] == [{"fragment": "acc", "type": "Ref<fragment>{f32[128,256]}", "registers": 128}]
  assert "24 by setmaxnreg" in compiled.report() and "acc 128" in compiled.report()
  assert "at_entry" not in compiled.lowered.report().data["registers"]


@pytest.mark.parametrize(("rows", "ctas"), [(64, 13), (128, 6), (256, 3), (384, 2)])
def test_shared_memory_limits_the_ctas_of_an_sm(rows, ctas):
  """228 KiB of an SM, of which a CTA takes its 256 bytes a row, 1 KiB of the system and its barriers or none."""
  def kernel(x, y):
    s = tt.alloc_shared((rows, 64), x.dtype)
    tt.copy(x, s)
    y[...] = s[...] + 1

  x = struct(rows, 64)
  occupancy = lower(kernel, [x], x, grid=1).report().data["occupancy"]
  assert occupancy["limits"]["shared memory"] == ctas == 228 * 1024 // (rows * 256 + 1024)
  assert occupancy["limited_by"] in ("shared memory", "threads") and not occupancy["registers_known"]


def test_registers_limit_the_ctas_of_an_sm_once_they_are_known():
  compiled = softmax(rows=4, columns=4096).lowered.compile()
  occupancy, used = compiled.report().data["occupancy"], compiled.memory_analysis()["registers"]

  assert occupancy["limits"]["registers"] == 65536 // (128 * math.ceil(used / 8) * 8)
  assert occupancy["limited_by"] == "registers" and occupancy["ctas_per_sm"] == occupancy["limits"]["registers"]


def test_waves_are_programs_over_the_places_of_the_gpu():
  occupancy = matmul(4096, 4096, 64, bm=128, bn=256, num_stages=4).report().data["occupancy"]

  assert occupancy["ctas_per_sm"] == 1 and occupancy["programs"] == 32 * 16
  assert occupancy["waves"] == pytest.approx(512 / 132) and occupancy["busy"] == pytest.approx(512 / (4 * 132))
  persistent = matmul(4096, 4096, 64, bm=128, bn=256, num_stages=4, persistent=True).report().data["occupancy"]
  assert persistent["ctas"] == SM_90A.sm_count


# ---- work and roofline

def test_a_large_product_is_bound_by_tensor_cores_and_takes_its_flops_at_their_rate():
  report = matmul(8192, 8192, 8192, bm=128, bn=256).report().data
  roofline = report["roofline"]

  assert roofline["bound"] == "tensor cores" and roofline["sms_used"] == 1
  assert roofline["at_least_seconds"] == pytest.approx(2 * 8192**3 / 989.5e12)
  assert roofline["flops_per_byte"] == pytest.approx(2 * 8192**3 / (3 * 2 * 8192**2))
  assert roofline["ridge_flops_per_byte"] == pytest.approx(989.5 / 4.8)
  assert report["work"]["tensor_flops"] == {"bf16": 2 * 8192**3}


def test_rows_are_bound_by_memory_and_take_their_bytes_at_its_rate():
  x = struct(1024, 512, dtype=BF16)
  report = lower(softmax_kernel, [x], x, grid=256, static={"rows": 4}).report()
  roofline, work = report.data["roofline"], report.data["work"]

  assert roofline["bound"] == "global memory" and not work["tensor_flops"] and roofline["sms_used"] == 1
  assert roofline["at_least_seconds"] == pytest.approx(2 * 1024 * 512 * 2 / H200.bandwidth)
  assert work["other_flops"] == 5 * 1024 * 512        # max, sub, exp, sum and div of every element
  assert work["loaded_bytes"] == work["stored_bytes"] == 1024 * 512 * 2
  assert "bound by global memory" in report


def test_a_deferred_epilogue_asks_for_and_stores_as_many_bytes():
  kernel = functools.partial(matmul_kernel, form="nn", activation=None, bm=128, bn=256, bk=64, num_stages=4)
  inputs = [struct(512, 512, dtype=BF16), struct(512, 1024, dtype=BF16), None]
  now, deferred = (tt.tile_call(kernel, struct(512, 1024, dtype=BF16), grid=(4, 4), warpgroups=2, persistent=p).lower(
      *inputs).report() for p in (False, True))

  assert "the epilogue is deferred" in deferred and "the epilogue is deferred" not in now
  assert deferred.data["work"] == now.data["work"]
  assert deferred.data["work"]["stored_bytes"] == 512 * 1024 * 2


def test_fewer_programs_than_sms_have_their_part_of_the_tensor_cores():
  roofline = matmul(128, 128, 64).report().data["roofline"]

  assert roofline["sms_used"] == pytest.approx(1 / 132)
  assert roofline["seconds"]["tensor cores"] == pytest.approx(2 * 128 * 128 * 64 / (989.5e12 / 132))


def test_trip_counts_that_depend_on_data_make_the_work_a_bound_from_below():
  def kernel(x, n, y):
    total = tt.alloc_fragment((128,), jnp.float32)
    total[...] = 0
    for _ in tt.range(tt.clip(n[...], 2, 5)):
      total[...] += x[...]
    y[...] = total[...]

  lowered = lower(kernel, [struct(128), struct(dtype=np.int32)], struct(128))
  assert lowered.report().data["work"]["exact"] is False and lowered.report().data["work"]["other_flops"] == 2 * 128
  assert "at least: trip counts depend on data" in lowered.report()


def test_what_a_persistent_kernel_loads_is_counted_for_each_tile():
  subject = gemm(256, 256, 192, bn=128, persistent=True)
  counters = run(subject.lowered.lowering, subject.inputs, counters=True, races=False).counters
  assert counters is not None

  assert data(subject)["work"]["loaded_bytes"] == counters.bytes["global to shared by TMA"]
