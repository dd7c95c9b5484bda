"""A griffe extension: docstrings of this code base as griffe's Google parser wants them.

The parser needs a blank line before a section, and calls examples "Examples:"; in the sources sections follow each
other, and an example is "Example:", "Example, in a kernel:" or just a `>>>` at the margin.
"""
from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Example[^:`]*):(:?)$")


def sections(text: str) -> str:
  """The docstring with blank lines before its sections, and its examples under "Examples:"."""
  out: list[str] = []
  for line in text.splitlines():
    found = _SECTION.match(line)
    if found and found[1].startswith("Example"):
      line = f"{found[1]}:" if found[2] else "Examples:"
    if found and out and out[-1]:
      out.append("")
    if line.startswith(">>> ") and out and not out[-1]:
      out.append("Examples:")
    out.append(line)
  return "\n".join(_indented(out))


def _indented(lines: list[str]) -> list[str]:
  """What follows "Examples:" at the margin, moved below it."""
  inside, out = False, []
  for i, line in enumerate(lines):
    inside = line == "Examples:" and lines[i + 1:i + 2] and lines[i + 1].startswith(">>>") or inside and bool(line)
    out.append(f"  {line}" if inside and line and line != "Examples:" else line)
  return out


class Sections(griffe.Extension):
  """Rewrites docstrings, and leaves out of signatures what tells a reader nothing."""

  def on_object(self, *, obj: Any, **kwargs: Any) -> None:
    if obj.docstring is not None:
      obj.docstring.value = sections(obj.docstring.value)

  def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
    """`**unknown` is there to refuse other systems' keywords by name; Any says nothing."""
    if "unknown" in func.parameters:
      del func.parameters["unknown"]
    for parameter in func.parameters:
      if str(parameter.annotation) == "Any":
        parameter.annotation = None
    if str(func.returns) == "Any":
      func.returns = None
