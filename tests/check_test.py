"""python -m tiletrace.check: what it prints, and its exit status."""
from __future__ import annotations

import json
import pathlib

import pytest

from tiletrace.check import check, main

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
