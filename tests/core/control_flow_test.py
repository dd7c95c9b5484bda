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
  found = unexpected(load(lambda path: f"<no source {path.stem}>"))
  assert not [(name, want, got) for name, want, got in found if want[0] != got[0]]


def test_the_source_may_be_of_another_version(tmp_path: pathlib.Path):
  """A file edited since its import: the `with` is not where it was, and the instructions decide."""
  def edited(path: pathlib.Path) -> str:
    copy = tmp_path / path.name
    copy.write_text("# edited\n" * 7 + path.read_text())
    return str(copy)
  found = unexpected(load(edited))
  assert not [(name, want, got) for name, want, got in found if want[0] != got[0]]


@pytest.fixture
def restored_tracer():
  before = sys.gettrace()
  yield
  sys.settrace(before)


def test_under_a_tracer_of_calls(restored_tracer: None):
  sys.settrace(lambda frame, event, arg: None)
  assert not unexpected(CASES)


def test_under_a_tracer_of_lines(restored_tracer: None):
  def tracer(frame: Any, event: str, arg: Any) -> Any:
    return tracer
  sys.settrace(tracer)
  assert not unexpected(CASES)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in 3.12")
def test_under_a_monitor_of_instructions():
  mon = sys.monitoring  # type: ignore[attr-defined]
  events = mon.events.LINE | mon.events.INSTRUCTION | mon.events.BRANCH
  mon.use_tool_id(3, "test")
  try:
    for event in (mon.events.LINE, mon.events.INSTRUCTION, mon.events.BRANCH):
      mon.register_callback(3, event, lambda *args: None)
    mon.set_events(3, events)
    found = unexpected(CASES)
  finally:
    mon.set_events(3, 0)
    mon.free_tool_id(3)
  assert not found


def test_with_the_collector_off():
  gc.disable()
  try:
    assert not unexpected(CASES)
  finally:
    gc.enable()


def test_in_two_threads():
  found: list[Any] = []
  corpora = [load(), load()]
  threads = [threading.Thread(target=lambda cases=cases: found.append(unexpected(cases))) for cases in corpora]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found == [[], []]


def test_after_the_interpreter_has_specialised_the_bytecode():
  for name in ("plain_loop", "when_natural", "break_static", "when_continue", "carried_python_int"):
    for _ in range(300):
      outcome(CASES[name])
  assert not unexpected(CASES)


# Each net, switched off, lets kernels through.

def without_pending(abandon: Callable[..., None]) -> Callable[..., None]:
  def quiet(self: Trace, scope: Any, error: Any) -> None:
    before = self.pending
    abandon(self, scope, error)
    self.pending = before
  return quiet


def raise_only(self: Trace, error: Exception) -> None:
  raise error


FINISH = (Trace, "finish", Trace.raise_pending)
FINALISER = (scopes.LoopIterator, "__del__", lambda self: None)
ABLATIONS: dict[str, tuple[list[tuple[Any, str, Any]], str]] = {
  "the end of the kernel": ([FINISH], "never_iterated when_forgotten_with"),
  "the end and the finaliser": ([FINISH, FINALISER],
                                "break_static break_last_statement_of_kernel return_in_loop goto_by_exception"),
  "who iterates": ([(bytecode, "consumer", lambda frame: None)],
                   "zip_first zip_second enumerate_ unpack map_ generator_helper yield_from nested_comp genexpr"),
  "second pass": ([(scopes, "SECOND_PASS", False)],
                  "carried_tile carried_python_int swapped_refs rotated_buffers attribute_static bytearray_state "
                  "numpy_state global_counter python_iterator random_constant number_of_operations "
                  "static_shape_changes nested_state innermost_state state_over_an_inner_loops_bound "
                  "fori_loop_state fori_loop_leak_to_the_next_iteration while_loop_state"),
  "scopes of operands": ([(Trace, "check_operand", lambda *args: None)],
                         "escape_from_loop escape_of_index escape_from_when escape_sibling escape_of_a_reference "
                         "list_append cond_leak while_loop_leak leak_use fragment_of_other_threads"),
  "jumps out of a with": ([(bytecode, "jumps_out", lambda code, lasti: ())],
                          "when_return when_return_in_if when_continue when_break_of_a_python_loop when_yield "
                          "when_two_items when_multiline return_out_of_a_role continue_out_of_elect"),
  "rebound names": ([(scopes, "check_rebound_names", lambda *args: None)],
                    "when_rebinds_python_int when_rebinds_for_the_next_python_iteration when_rebinds_to_an_outer_tile "
                    "when_rebinds_a_reference when_decorator_rebinds_nonlocal count_read_after_the_loop "
                    "flag_read_after_the_loop outer_tile_chosen_in_a_loop fori_loop_counts_calls "
                    "cond_rebinds_nonlocal"),
  "poison of exceptions": ([(Trace, "abandon", without_pending(Trace.abandon))],
                           "exception_caught_outside when_exception_caught when_decorator_exception_caught "
                           "exception_out_of_fori_loop_caught"),
  "poison of refusals": ([(Trace, "fail", raise_only)], "difference_caught"),
}


@pytest.mark.parametrize("net", ABLATIONS)
def test_each_net_is_needed(net: str, monkeypatch: pytest.MonkeyPatch):
  changes, kernels = ABLATIONS[net]
  for owner, name, value in changes:
    monkeypatch.setattr(owner, name, value)
  for name in kernels.split():
    assert CASES[name].expected != "ok"
    assert as_expected(CASES[name], CASES)[0] == "ok", name


def test_the_finaliser_gives_the_jumps_own_line(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(*FINALISER)
  for name in ("break_static", "break_inner", "return_in_loop", "goto_by_exception"):
    kind, line = outcome(CASES[name])
    assert kind == "ControlFlowError" and line is not None and line < (CASES[name].line or 0)


def test_instructions_alone_find_every_jump(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(bytecode, "jumps_out", lambda code, lasti: None)
  found = unexpected(CASES)
  assert not [(name, want, got) for name, want, got in found if want[0] != got[0]]
