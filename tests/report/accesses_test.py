"""The report's instructions, widths, wavefronts, sectors and bytes are what the PTX has and the simulator counts."""
from __future__ import annotations

import re
from typing import Any

import pytest

from tests.report.kernels import SUBJECTS, Subject, columns, gemm, rows, softmax
from tiletrace.sim.launch import run


@pytest.fixture(scope="module", params=list(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Subject:
  return SUBJECTS[request.param]()


def accesses(subject: Subject) -> list[dict[str, Any]]:
  """With how often each is made in one program."""
  return [{**a, "times": op["count"] * a["count"] * a["trips"]} for op in subject.lowered.report().data["ops"]
          for a in op["accesses"]]


def test_wavefronts_sectors_and_bytes_are_those_that_the_simulator_counts(subject):
  counters = run(subject.lowered.lowering, subject.inputs, counters=True, races=False).counters
  assert counters is not None
  data = subject.lowered.report().data
  programs = data["occupancy"]["programs"]
  found = accesses(subject)

  def total(what: str) -> int:
    return programs * sum(a["times"] * (a[what] or 0) for a in found)

  assert total("wavefronts") == counters.wavefronts == data["work"]["wavefronts"]
  assert total("least_wavefronts") == counters.ideal == data["work"]["least_wavefronts"]
  by_threads = [a for a in found if a["instruction"].startswith(("ld.global", "st.global"))]
  if all(a["sectors"] is not None for a in by_threads):
    assert programs * sum(a["times"] * a["sectors"] for a in by_threads) == counters.sectors
  paths = {"ld.global": "global to registers", "st.global": "global from registers",
           ("ld.shared", "ldmatrix"): "shared to registers", "TMA load": "global to shared by TMA",
           "TMA store": "shared to global by TMA"}
  for start, path in paths.items():
    moved = programs * sum(a["times"] * a["nbytes"] for a in found if a["instruction"].startswith(start))
    assert moved == counters.bytes[path], path
  assert data["work"]["loaded_bytes"] == counters.bytes["global to registers"] + sum(
      counters.bytes[f"global to shared by {by}"] for by in ("TMA", "cp.async"))
  assert data["cost"]["flops"] == counters.flops
  operands = programs * sum(a["times"] * a["nbytes"] for a in found if a["instruction"].startswith("wgmma"))
  assert operands == counters.operand_bytes


def test_every_access_of_the_ptx_is_in_the_report_with_its_width(subject):
  ptx = subject.lowered.as_text("ptx")

  def in_ptx(kind: str) -> set[int]:
    found = re.findall(rf"{kind}\S*?(?:\.v(\d))?\.[bfu](\d+) ", ptx)
    return {int(n or 1) * int(bits) // 8 for n, bits in found}

  for kind in ("ld.global", "st.global", "ld.shared", "st.shared"):
    assert in_ptx(kind.replace(".", r"\.")) == {int(re.findall(r"\d+", a["instruction"])[0]) for a in accesses(subject)
                                                if a["instruction"].startswith(kind)}, kind
  for matrix in ("stmatrix", "ldmatrix"):
    assert (matrix in ptx) == any(a["instruction"].startswith(matrix) for a in accesses(subject))


def test_a_lane_for_each_row_of_128_bytes_meets_in_one_bank_and_the_text_says_how_much_it_costs():
  (read,) = [a for a in accesses(columns()) if a["instruction"].startswith("ld.shared")]

  assert read["instruction"] == "ld.shared 16" and read["instructions"] == 2 * 4
  assert (read["wavefronts"], read["least_wavefronts"]) == (32 * 8, 4 * 8)
  assert f"{32 * 8} bank wavefronts, {28 * 8} by conflicts" in columns().lowered.report()


def test_swizzled_rows_have_no_conflicts():
  found = [a for a in accesses(gemm()) if a["instruction"] == "stmatrix.x4"]

  assert found and all(a["wavefronts"] == a["least_wavefronts"] for a in found)
  assert "no conflicts" in gemm().lowered.report()


def test_the_pipelined_copies_are_made_once_a_block():
  copies = [a for a in accesses(gemm(k=192, bk=64)) if a["instruction"].startswith("TMA load")]

  assert [(a["buffer"], a["trips"], a["nbytes"]) for a in copies] == [("a", 3, 2 * 128 * 64), ("b", 3, 2 * 64 * 128)]


def test_cp_async_is_told_on_both_sides():
  found = {(a["space"], a["instruction"]) for a in accesses(rows(35))}

  assert {("global", "cp.async 4"), ("shared", "cp.async 4")} <= found


def test_rows_that_are_read_whole_have_no_sector_too_many():
  assert all(a["sectors"] == a["least_sectors"] == a["nbytes"] // 32 for a in accesses(softmax()))
