"""The control-flow corpus: each kernel of control_flow/*.py is accepted, or refused at the line marked `#!`.

Each kernel gets `x`, an i32 scalar, and `r`, an i32 scalar reference that it may write. `@case(expected)` says what
must happen: "ok", or the error's class. The corpus also runs without source text, under tracers and monitors, in
threads, after warm-up, and with each net switched off, which shows that the net is needed.
"""
from __future__ import annotations

import dataclasses
import gc
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tiletrace.core import bytecode, scopes
from tiletrace.core.graph import Block, CallOptions
from tiletrace.core.source import user_loc
from tiletrace.core.trace import Trace, _current, trace_kernel
from tiletrace.core.types import RefType, Space

FILES = sorted((pathlib.Path(__file__).parent / "control_flow").glob("*.py"))
OPTIONS = CallOptions(grid=(1,), warpgroups=3)
SCALAR = RefType((), np.dtype(np.int32), Space.GLOBAL)


@dataclasses.dataclass(frozen=True)
class Case:
  name: str
  kernel: Callable[..., Any]
  expected: str
  line: int | None


def load(filename: Callable[[pathlib.Path], str] = str) -> dict[str, Case]:
  """The corpus, compiled as if it stood in `filename(path)`."""
  cases: dict[str, Case] = {}
  for path in FILES:
    text = path.read_text()
    lines = text.splitlines()

    def case(expected: str, lines: list[str] = lines) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
      def add(kernel: Callable[..., Any]) -> Callable[..., Any]:
        first = kernel.__code__.co_firstlineno
        end = next((n for n in range(first + 1, len(lines) + 1) if lines[n - 1].startswith("@case")), len(lines) + 1)
        line = next((n for n in range(first, end) if lines[n - 1].endswith("#!")), None)
        cases[kernel.__name__] = Case(kernel.__name__, kernel, expected, line)
        return kernel
      return add

    names = {"case": case, "FLOW": "ControlFlowError", "SCOPE": "ScopeError", "TYPE": "TileTypeError"}
    exec(compile(text, filename(path), "exec"), {"__name__": f"corpus_{path.stem}", **names})
  return cases


def record(kernel: Callable[..., Any]) -> Block:
  def make_args(trace: Trace) -> tuple[Any, Any]:
    x, r = (trace.binder(SCALAR, user_loc(), name) for name in ("x", "r"))
    return x[...], r
  return trace_kernel(kernel, make_args, name=kernel.__name__, options=OPTIONS)[0]


def outcome(case: Case) -> tuple[str, int | None]:
  """("ok" or the error's class, the line it names)."""
  try:
    record(case.kernel)
  except Exception as error:
    loc = getattr(error, "loc", None)
    return type(error).__name__, None if loc is None else loc.line
  return "ok", None


CASES = load()


def as_expected(case: Case, cases: dict[str, Case]) -> tuple[str, int | None]:
  if case.name == "leak_use":
    outcome(cases["leak_make"])
  got, line = outcome(case)
  return got, line if case.line is not None else None


def unexpected(cases: dict[str, Case]) -> list[tuple[str, Any, Any]]:
  found = []
  for case in cases.values():
    got = as_expected(case, cases)
    if got != (case.expected, case.line):
      found.append((case.name, (case.expected, case.line), got))
  return found


@pytest.fixture(autouse=True)
def nothing_is_raised_in_a_finaliser(monkeypatch: pytest.MonkeyPatch):
  seen = []
  monkeypatch.setattr(sys, "unraisablehook", lambda u: seen.append(u.exc_value))
  yield
  assert not seen
  assert _current.get() is None


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_accepted_or_refused_at_its_line(name: str):
  case = CASES[name]
  assert as_expected(case, CASES) == (case.expected, case.line)


def test_without_source_the_verdicts_are_the_same():
  assert not unexpected(load(lambda path: f"<no source {path.stem}>"))
