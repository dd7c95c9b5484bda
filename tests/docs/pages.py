"""Runs the Python of a page of docs/."""
from __future__ import annotations

import pathlib
import re
import runpy
from typing import Any

DOCS = pathlib.Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[str]:
  """The Python blocks of a page."""
  return [found[1] for found in _BLOCK.finditer(text)]


def run(text: str, directory: pathlib.Path, name: str) -> dict[str, Any]:
  """Runs the Python blocks of a page one after the other, and returns their names.

  The file that is run has every line where the page has it, so that an error shows the page's line number.
  """
  lines = [""] * len(text.splitlines())
  for found in _BLOCK.finditer(text):
    first = text.count("\n", 0, found.start(1))
    block = found[1].splitlines()
    lines[first:first + len(block)] = block
  path = directory / f"{name}.py"
  path.write_text("\n".join(lines) + "\n")
  return runpy.run_path(str(path))
