"""The Python in docs/ runs: of the home page, the tutorials, and the tables of other systems' words."""
from __future__ import annotations

import pathlib
import re

import pytest

from tests.docs.pages import DOCS, blocks, run

TABLES = ["from_pallas.md", "from_tilelang.md", "from_triton.md"]

RUN = ["index.md", *(f"tutorials/{name}.md" for name in ("vector_add", "softmax", "gemm", "attention", "mla")),
       *TABLES]
ELSEWHERE = {"language.md",                                # run by tests/docs_test.py
             "reference/index.md",                         # the imports of tests/docs/reference_test.py
             "explanations.md", "simulator.md"}            # lines about any kernel: `f`, `kernel`, `x` are the reader's


@pytest.mark.parametrize("page", RUN)
def test_the_python_of_a_page_runs_and_checks_its_results(page: str, tmp_path: pathlib.Path,
                                                          monkeypatch: pytest.MonkeyPatch):
  monkeypatch.chdir(tmp_path)
  text = (DOCS / page).read_text()

  assert any("assert " in block for block in blocks(text))
  assert run(text, tmp_path, pathlib.Path(page).stem)


@pytest.mark.parametrize("page", ["softmax", "attention", "mla"])
def test_the_kernels_of_a_tutorial_are_right_as_ptx(page: str, tmp_path: pathlib.Path,
                                                    monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setenv("TT_BACKEND", "sim")
  text = (DOCS / f"tutorials/{page}.md").read_text()

  assert run(text, tmp_path, page)


def ours(page: str) -> list[str]:
  """The code in the last column of a page's tables."""
  rows = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]
  return [code for row in rows for code in re.findall(r"`([^`]+)`", row.removesuffix(" |").rpartition(" | ")[2])]


@pytest.mark.parametrize("page", TABLES)
def test_what_a_table_says_to_write_is_in_the_programs_that_run(page: str):
  programs = " ".join("\n".join(blocks((DOCS / page).read_text())).split())
  found = ours(page)

  assert len(found) > 40
  assert not [code for code in found if " ".join(code.split()) not in programs]


@pytest.mark.parametrize("text, error, line", [
    ("text\n\n```python\nx = 1\n```\nmore\n```python\nassert x == 2\n```\n", AssertionError, 8),
    ("```python\nimport tiletrace as tt\ntt.no_such_name\n```\n", AttributeError, 3)])
def test_a_block_that_breaks_fails_at_the_line_of_the_page(text, error, line, tmp_path):
  with pytest.raises(error) as caught:
    run(text, tmp_path, "page")

  assert caught.traceback[-1].lineno + 1 == line


def test_no_page_has_python_that_nothing_runs():
  with_python = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if blocks(page.read_text())}

  assert with_python == {*RUN, *ELSEWHERE}, "list it in RUN"
