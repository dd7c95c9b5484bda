"""The examples run as a user runs them, on the CPU, and print what they say; the benchmarks explain themselves."""
from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

from benchmarks import harness, matmul, scaled_matmul
from tests.tolerances import assert_close

ROOT = pathlib.Path(__file__).parents[1]
MEASURING = ("attention", "decode", "dequant_matmul", "grouped_matmul", "linear_attention", "matmul", "matmul_tails",
             "mla", "norms", "scaled_matmul", "tutorial_gemm")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
  return subprocess.run([sys.executable, "-W", "error", *arguments], cwd=ROOT, env=env | environment, text=True,
                        capture_output=True, check=False)


def output(*arguments: str, **environment: str) -> str:
  done = run(*arguments, **environment)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.mark.parametrize("shape", [(), ("13", "8", "24"), ("200", "300", "100")], ids=["default", "tiny", "tails"])
def test_matmul_relu_is_right_and_says_where_it_ran(shape):
  lines = output("examples/matmul_relu.py", *shape).splitlines()

  assert lines[0] == "no GPU that jax can use: running on the CPU, the kernel as jax ops"
  error = re.fullmatch(r"relu\(A @ B\), (.*), bfloat16: relative error (\S+) to float64, \S+ to jnp in f32", lines[1])
  assert error is not None, lines
  assert error[1] == (" x ".join(shape) or "1000 x 776 x 336")
  assert 1e-4 < float(error[2]) < 1e-2          # a bfloat16 result is rounded: no error at all would mean no reference
  assert lines[2:] == ["right"]


@pytest.mark.parametrize("word", ["x", "0", "1.5"])
def test_matmul_relu_names_the_size_that_is_none(word):
  done = run("examples/matmul_relu.py", "8", word, "3")

  assert done.returncode == 2 and not done.stdout
  assert done.stderr.splitlines()[-1].endswith(f"error: argument N: '{word}' is no whole number above 0")


def test_vector_add_prints_one_operation():
  text = output("examples/vector_add.py")

  assert text.count("tile_call[") == 1
  assert text.endswith("100003 sums on the CPU: equal to x + y\n")


def test_look_inside_prints_every_stage(tmp_path):
  text = output("examples/look_inside.py", TT_CACHE_DIR=str(tmp_path))
  parts = re.split(r"\n=+\n(\w+)\n=+\n", text)
  stages = dict(zip(parts[1::2], parts[2::2], strict=True))

  assert list(stages) == ["trace", "layout", "select", "schedule", "ptx", "sass", "report"]
  facts = {"trace": "gemm[policy=square]", "layout": "swizzle", "select": "gemm: wgmma_ss",
           "schedule": "barrier_arrive_expect_tx[nbytes=16384]", "ptx": ".target sm_90a",
           "report": "0 bytes spilled"}
  assert not {stage: fact for stage, fact in facts.items() if fact not in stages[stage]}
  assert re.search(r"/\*0000\*/|\(skipped: nvdisasm was not found; searched:; pip install", stages["sass"])


def test_timeline_says_where_the_steps_go_and_writes_what_to_look_at(tmp_path):
  lines = output("examples/timeline.py", str(tmp_path)).splitlines()

  # 9 programs of 3 blocks, each warpgroup the loop, its blocks and the store
  assert lines[0] == f"192 x 192 x 192 on the simulator, {2 * 9 * (1 + 3 + 1)} spans:"
  told = [re.fullmatch(r"  warpgroup (\d), (.*): (\d+) times, median (\d+) steps", line) for line in lines[1:7]]
  found = [(int(m[1]), m[2], int(m[3])) for m in told if m is not None]
  assert found == [(w, name, count) for w in (0, 1) for name, count in (("block", 27), ("main loop", 9), ("store", 9))]
  assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 2 * 9 * 5
  assert "<canvas" in (tmp_path / "layouts.html").read_text()


@pytest.mark.parametrize("benchmark", [*MEASURING, "compile_time", "launch_overhead"])
def test_benchmarks_explain_themselves_anywhere(benchmark):
  assert output("-m", f"benchmarks.{benchmark}", "--help").startswith(f"usage: python -m benchmarks.{benchmark}")


@pytest.mark.parametrize("benchmark", MEASURING)
def test_benchmarks_read_no_option_that_they_do_not_have(benchmark, monkeypatch):
  monkeypatch.setattr(sys, "argv", [benchmark])
  module = importlib.import_module(f"benchmarks.{benchmark}")
  read = {node.attr for source in (module, harness.compare) for node in ast.walk(ast.parse(inspect.getsource(source)))
          if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"}

  assert "json" in read
  assert read <= set(vars(module.arguments()))


@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
def test_the_dynamic_peer_of_the_matmul_benchmark_is_one_kernel_for_all_m(form):
  texts = set()
  for m in (24, 200):
    call = matmul.matmul(m, 40, 72, jnp.bfloat16, form=form, relu=False, dynamic=True)
    a, b = matmul.inputs(m, 40, 72, jnp.bfloat16, form, 0)
    texts.add(call.lower(a, b).as_text())
    assert_close(call(a, b), matmul.reference(a, b, form=form, relu=False, out_dtype=jnp.float32), "gemm")

  assert len(texts) == 1


def test_sums_that_stay_in_the_tensor_core_are_judged_by_their_length():
  row = {"error": 0.016, "error_f32": 0.03, "jit_equals_launch": True, "k": 8192, "scaling": "tensor+fast"}

  assert scaled_matmul.status(row) == "ok"
  for change in ({"k": 2048}, {"scaling": "tensor"}, {"error": float("nan")}):
    assert scaled_matmul.status(row | change) == "WRONG"


def test_benchmarks_that_need_a_gpu_say_so():
  done = run("-m", "benchmarks.matmul")

  assert done.returncode == 2
  assert "needs an NVIDIA GPU" in done.stdout
