"""The same kernel gives the same bytes in every process."""
from __future__ import annotations

import os
import pathlib
import subprocess
import sys

_SCRIPT = """
import hashlib
from tests.gpu import corpus_control, corpus_elementwise, corpus_gemm, corpus_memory
from tests.gpu.corpus import build
names = ("matmul_tails-1000x776x336", "a_product_of_a_product-2xFULL_ROW", "matmul_rows_tma_cannot_take-40x777x64",
         "through_shared_memory-bf16", "unary-bf16", "global_memory_is_read_after_it_was_written", "nested_branches",
         "views_end_where_they_say-3x9", "two_gemms_in_a_loop", "masks-bf16")
for name in names:
  case = build(name)
  lowered = case.call.lower(*case.inputs)
  text = lowered.as_text("ptx") + lowered.as_text("schedule") + lowered.as_text("layout")
  print(name, hashlib.sha256(text.encode()).hexdigest())
"""


def _run(seed: str) -> str:
  root = pathlib.Path(__file__).parents[3]
  env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
  return subprocess.run([sys.executable, "-c", _SCRIPT], env=env, cwd=root, check=True, capture_output=True,
                        text=True).stdout


def test_two_processes_write_the_same_text():
  first, second = _run("1"), _run("2")
  assert first.count("\n") == 10
  assert first == second
