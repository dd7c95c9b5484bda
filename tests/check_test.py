"""python -m tiletrace.check: what it prints, and its exit status."""
from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from tests.sim.edit import Edit
from tests.sim.inject import FAULTS
from tiletrace.check import check, main
from tiletrace.lowering import pipeline

HEAD = """
import functools, jax, numpy as np, tiletrace as tt
def struct(*shape): return jax.ShapeDtypeStruct(shape, np.float32)
"""
RIGHT = HEAD + """
def double_kernel(x, y):
  r = tt.block(tt.program_id(0), 32)
  y[r] = x[r] * 2
call = tt.tile_call(double_kernel, struct(70), grid=3)
print(float(call(np.ones(70, np.float32)).sum()))
"""
RACE = HEAD + """
def race_kernel(x, y):
  y[0] = x[tt.program_id(0)]
tt.tile_call(race_kernel, struct(1), grid=3)(np.arange(3, dtype=np.float32))
"""
NOT_RUN = HEAD + """
def idle_kernel(x, i, y):
  y[0] = x[i[...]]
tt.tile_call(idle_kernel, struct(1), grid=1).trace(struct(5), jax.ShapeDtypeStruct((), np.int32))
"""
EXPLICIT = HEAD + """
def explicit_kernel(x, y):
  with tt.warpgroup(0):
    y[...] = x[...]
    tt.sync()
tt.tile_call(explicit_kernel, struct(70), grid=1)(np.ones(70, np.float32))
"""
FAILS = HEAD + """
raise ValueError("no such data")
"""
ARGUMENTS = HEAD + """
import sys
assert sys.argv[1:] == ["--size", "3"], sys.argv
if __name__ == "__main__": sys.exit(0)
"""


def script(path: pathlib.Path, text: str) -> str:
  file = path / "script.py"
  file.write_text(text)
  return str(file)


def run(path: pathlib.Path, text: str, *options: str) -> int:
  return main(["--no-assemble", *options, script(path, text)])


def test_a_right_kernel_is_ok(tmp_path, capsys):
  assert run(tmp_path, RIGHT) == 0
  out = capsys.readouterr().out
  assert "140.0" in out
  assert "double_kernel (script.py:5): ok, 2 launches simulated" in out
  assert "1 kernels, 0 wrong" in out


def test_a_wrong_kernel_is_named_with_its_line_and_the_status_is_1(tmp_path, capsys):
  assert run(tmp_path, RACE) == 1
  out = capsys.readouterr().out
  assert "race_kernel (script.py:5): WRONG" in out
  assert "race between CTAs" in out and "y[0] = x[tt.program_id(0)]" in out


def test_json_is_one_object_on_standard_output(tmp_path, capsys):
  assert run(tmp_path, RACE, "--json", "--summary", "--seeds", "1") == 1
  data = json.loads(capsys.readouterr().out)
  [kernel] = data["kernels"]

  assert data["ok"] is False and data["failure"] is None
  assert kernel["launches"] == 1 and kernel["summary"]["bytes"]["global from registers"] == 12
  assert {f["kind"] for f in kernel["faults"]} == {"race between CTAs"}


# ---- results


def gemm(k: int) -> str:
  """A script; each `k` must be one test's own, since lowered kernels are kept."""
  return HEAD + f"""
from tests.gpu.corpus_gemm import matmul
case = matmul(np.random.default_rng(1), 256, 256, {k}, bn=128)
jax.block_until_ready(case.call(*case.inputs))
"""


@pytest.fixture
def broken(monkeypatch):
  """`broken(fault)`: what is lowered from now on has the fault."""
  lower = pipeline.lower

  def apply(name: str) -> None:
    def lower_and_break(*args):
      lowering = lower(*args)
      FAULTS[name].apply(Edit(lowering.emitted.module))
      return dataclasses.replace(lowering, ptx=lowering.emitted.module.render())
    monkeypatch.setattr(pipeline, "lower", lower_and_break)
  return apply


@pytest.mark.parametrize(("fault", "k"), [("lbo_and_sbo_are_swapped", 192), ("a_box_has_the_wrong_coordinates", 200)])
def test_a_wrong_result_is_named_with_its_output_and_the_line_that_stores_it(fault, k, broken, tmp_path, capsys):
  broken(fault)
  assert run(tmp_path, gemm(k)) == 1
  out = capsys.readouterr().out
  assert "matmul_kernel (corpus_gemm.py:" in out and ": WRONG, 2 launches simulated\n  wrong result: " in out
  assert " of 65536 elements of c, bfloat16[256,256], differ; the first is [0, " in out
  assert "c[tt.block(i, bm), tt.block(j, bn)] = tt.maximum(acc[...], 0).astype(c.dtype)\n" in out and "^^^^" in out


def test_a_wrong_result_is_data_too(broken, tmp_path, capsys):
  broken("lbo_and_sbo_are_swapped")
  assert run(tmp_path, gemm(208), "--json", "--seeds", "1") == 1
  [kernel] = json.loads(capsys.readouterr().out)["kernels"]
  [fault] = kernel["faults"]

  assert fault["kind"] == "wrong result" and fault["kernel"] == "matmul_kernel" and fault["cta"] is None
  assert fault["place"]["python"]["file"].endswith("corpus_gemm.py")
  found = fault["difference"]
  assert found["output"] == "c" and found["shape"] == [256, 256] and found["first"][0] == 0
  assert found["count"] > 10000 and found["error"] > abs(found["got"] - found["want"]) > found["bound"]


def test_the_comparison_can_be_left_out(broken, tmp_path):
  broken("lbo_and_sbo_are_swapped")
  assert run(tmp_path, gemm(216), "--no-compare", "--seeds", "1") == 0


def test_without_the_fault_the_result_is_right(tmp_path, capsys):
  assert run(tmp_path, gemm(224)) == 0
  assert "ok, 2 launches simulated" in (out := capsys.readouterr().out) and "note" not in out


def test_results_that_are_not_compared_have_a_note(tmp_path, capsys):
  assert run(tmp_path, EXPLICIT) == 0
  assert "note: results are not compared: plain jax ops have no explicit orchestration" in capsys.readouterr().out
  assert run(tmp_path, RACE) == 1
  assert "note: results of launches that have other findings are not compared" in capsys.readouterr().out


def test_a_kernel_that_the_script_did_not_run_gets_random_arguments(tmp_path, capsys):
  assert run(tmp_path, NOT_RUN) == 0
  assert "note: the script did not run it" in capsys.readouterr().out


def test_a_script_that_fails_gives_2(tmp_path, capsys):
  assert run(tmp_path, FAILS) == 2
  assert "no such data" in capsys.readouterr().out


def test_the_script_gets_its_arguments(tmp_path):
  assert main(["--no-assemble", script(tmp_path, ARGUMENTS), "--size", "3"]) == 0


@pytest.mark.parametrize("example", ["look_inside.py", "matmul_relu.py", "vector_add.py"])
def test_the_examples_have_no_faults(example):
  """Their own tails, and at least two tiles along each axis."""
  kernels, failure = check(str(pathlib.Path(__file__).parents[1] / "examples" / example), seeds=1, assemble=False)

  assert failure is None and kernels
  assert all(k.ok and k.launches for k in kernels), "\n".join(map(str, kernels))
