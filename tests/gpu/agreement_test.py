"""The table of agreement between the simulator and a GPU: what is counted as equal, within its bound and beyond."""
from __future__ import annotations

import json

import numpy as np

from tests.gpu import agreement
from tests.gpu.agreement import Record, merged, record, table, taken
from tests.gpu.isa_rows import THREADS, Result
from tests.gpu.isa_rows_test import judge
from tiletrace.lowering.ptx import isa


def recorded(*args) -> Record:
  kept = taken()                 # of the running test, if it has any
  record("group", "name", *args)
  [data] = taken()
  agreement._NOW.extend(Record(**r) for r in kept)
  return Record(**data)


def test_what_differs_nowhere_is_equal_whatever_its_bound():
  assert recorded(np.ones(5, bool), np.zeros(5), np.ones(5)) == Record("group", "name", True)
  assert recorded(True).part == 0


def test_the_result_closest_to_its_bound_is_kept():
  r = recorded(np.array([True, False, False]), np.array([9.0, 1.0, 0.5]), np.array([1.0, 8.0, 1.0]))
  assert (r.equal, r.error, r.bound, r.part) == (False, 0.5, 1.0, 0.5)


def test_what_has_no_bound_or_is_nan_is_beyond():
  assert recorded(False).part == np.inf
  assert recorded(np.array([False]), np.array([np.nan]), np.array([1.0])).part == np.inf


RECORDS = [Record("float", "ex2", False, 1e-8, 1e-7), Record("float", "ex2", False, 5e-8, 1e-7),
           Record("float", "add", True), Record("float", "rcp", False, 2.0, 1.0), Record("memory", "ld", True),
           Record("memory", "ld", True)]


def test_a_name_counts_once_with_its_worst_record():
  assert [(r.name, r.error) for r in merged(RECORDS)] == [("add", 0.0), ("ex2", 5e-8), ("rcp", 2.0), ("ld", 0.0)]


def test_the_table_has_a_line_for_each_group():
  assert table(RECORDS).splitlines()[2:] == ["| float | 3 | 1 | 1 | 1 | 2 of 1: rcp |",
                                             "| memory | 1 | 1 | 0 | 0 | 0 |"]


def test_the_file_has_the_table_and_all_records(tmp_path):
  path = tmp_path / "agreement.json"
  agreement.write(str(path), [*RECORDS, Record("memory", "st", False, np.inf, 0.0)])
  data = json.loads(path.read_text())

  assert data["table"][2].startswith("| float | 3 |") and len(data["records"]) == 5
  assert data["records"][-1] == {"group": "memory", "name": "st", "equal": False, "error": None, "bound": 0.0}


def test_results_are_judged_by_the_bounds_of_the_isa():
  want = np.random.default_rng(0).uniform(1, 2, THREADS).astype(np.float32)
  got = want.copy()
  got[3] = np.nextafter(got[3], np.float32(4))
  got[5] = want[5] = np.nan
  approximate, exact = (Result(form, "f32", "f32", 0) for form in (isa.EX2.form(), isa.ADD.form(type="f32")))

  equal, error, allowed = judge(approximate, got, want)
  assert equal.sum() == THREADS - 1 and not equal[3] and 0 < error[3] <= allowed[3]
  equal, error, allowed = judge(exact, got, want)
  assert not equal[3] and allowed[3] == 0 < error[3] and equal[5]
