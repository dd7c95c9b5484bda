"""The tutorial's eight steps are those that benchmarks/tutorial_gemm.py measures; its table is what they do."""
from __future__ import annotations

import ast
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import tutorial_gemm
from benchmarks.tutorial_gemm import STEPS, matmul
from tests.docs.pages import DOCS, blocks

PAGE = (DOCS / "tutorials/gemm.md").read_text()
OPERAND = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)


def rows() -> list[list[str]]:
  """The page's table, without its head."""
  lines = re.findall(r"^\| (\d .*) \|$", PAGE, re.MULTILINE)
  return [line.split(" | ") for line in lines]


def functions(text: str) -> dict[str, str]:
  return {node.name: ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def test_the_kernels_of_the_page_are_those_that_are_measured():
  shown = functions("".join(blocks(PAGE)))
  measured = functions(pathlib.Path(tutorial_gemm.__file__).read_text())
  names = {kernel.__name__ for kernel, _, _ in STEPS.values()}

  assert len(names) == 4
  assert {name: shown[name] for name in names} == {name: measured[name] for name in names}


def test_the_constants_of_the_page_are_those_that_are_measured():
  text = " ".join(PAGE.split())
  calls = {f"is_right({kernel.__name__}, " + ", ".join(f"{k}={v}" for k, v in (constants | launch).items()) + ")"
           for kernel, constants, launch in STEPS.values()}

  assert {call for call in calls if call in text} == calls


@pytest.mark.parametrize("step", STEPS)
def test_the_table_says_what_a_step_compiles_to(step: int):
  number, _, tile, product, asked, _ = rows()[step - 1]
  _, constants, _ = STEPS[step]
  compiled = matmul(step, 4096, 4096).lower(OPERAND, OPERAND).compile()
  products = [c.variant for c in compiled.lowered.choices if c.op == "gemm"]
  data: dict[str, Any] = compiled.report().data

  assert number == str(step)
  assert tile == f"{constants['bm']} × {constants['bn']}"
  assert product == (f"`{products[0]}`" if products else "f32 FMA")
  assert asked == f"{data['work']['loaded_bytes'] / 1e9:.1f} GB"
  assert compiled.memory_analysis()["spill_stores"] == 0
  assert data["work"]["exact"]


def test_the_table_has_a_ratio_only_where_one_was_measured():
  assert len(rows()) == len(STEPS) == 8
  assert all(re.fullmatch(r"not measured yet|\d+\.\d+", row[-1]) for row in rows())
