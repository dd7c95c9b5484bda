"""The messages of the nets: what, the user's line with a caret, the second place, the hint."""
from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tiletrace as tt
from tiletrace.core.graph import CallOptions
from tiletrace.core.scopes import same_static
from tiletrace.core.source import user_loc
from tiletrace.core.trace import Trace, trace_kernel
from tiletrace.core.types import RefType, Space

ROWS = RefType((8, 32), np.dtype(np.float32), Space.GLOBAL)


def message(kernel: Callable[..., Any]) -> str:
  """The error of a kernel with an input and an output f32[8, 32], lines counted from the kernel's `def`."""
  def make_args(trace: Trace) -> tuple[Any, Any]:
    return trace.binder(ROWS, user_loc(), "x"), trace.binder(ROWS, user_loc(), "y")

  with pytest.raises(tt.TileTraceError) as info:
    trace_kernel(kernel, make_args, name="k", options=CallOptions(grid=(4,), warpgroups=3))
  first = kernel.__code__.co_firstlineno
  text = re.sub(r"scopes_test\.py:(\d+)", lambda m: f"k.py:{int(m[1]) - first}", str(info.value))
  text = re.sub(r"at line (\d+)", lambda m: f"at line {int(m[1]) - first}", text)
  return re.sub(r"\(test_\w+\.<locals>\.", "(", text)


def says(kernel: Callable[..., Any], expected: str) -> None:
  assert message(kernel) == textwrap.dedent(expected).strip("\n")


def test_a_changed_python_number_is_shown_with_both_values():
  def k(x, y):
    phase = 0
    for n in tt.range(8):
      y[n, :] = 0.0 + phase
      phase ^= 1

  says(k, """
    the body of tt.range is not the same in the next iteration: an operand of store was 0.0, then 1.0 [TT100]
      at k.py:3:7 (k)
              y[n, :] = 0.0 + phase
              ^^^^^^^
      the loop is at k.py:2:14 (k)
            for n in tt.range(8):
                     ^^^^^^^^^^^
      hint: Python state (a rebound name, an attribute, a list, an iterator) changes from one iteration to the next, \
but the body is recorded once: keep it in a reference, carry it with tt.fori_loop, or compute it from the index
    """)


def test_a_changed_reference_and_a_changed_parameter_are_named():
  def swapped(x, y):
    a, b = x, y
    for _ in tt.range(8):
      a[0, 0]
      a, b = b, a

  def sliced(x, y):
    widths = [4, 8]
    for _ in tt.range(8):
      x[0, :widths[0]]
      widths.reverse()

  assert "an operand of load is another reference" in message(swapped)
  assert "'views' of load was" in message(sliced)


def test_a_carried_tile_is_refused_where_it_is_read():
  def k(x, y):
    m = x[0, :]
    for n in tt.range(8):
      m = tt.maximum(m, x[n, :])

  says(k, """
    'm' was made inside tt.range at line 2, in the previous iteration, and is used outside it [TT110]
      at k.py:3:11 (k)
              m = tt.maximum(m, x[n, :])
                  ^^^^^^^^^^^^^^^^^^^^^^
      it was made at k.py:3:11 (k)
              m = tt.maximum(m, x[n, :])
                  ^^^^^^^^^^^^^^^^^^^^^^
      hint: keep it in a fragment (acc = tt.alloc_fragment(...); acc[...] = ...), or carry it: \
tt.fori_loop(lo, hi, body, init)
    """)


def test_continue_in_a_branch_has_its_own_caret():
  def k(x, y):
    for n in tt.range(4):
      with tt.when(n > 2):
        continue
      y[n, :] = x[n, :]

  says(k, """
    `continue` inside `with tt.when` would leave it whatever the condition is [TT100]
      at k.py:3:9 (k)
                continue
                ^^^^^^^^
      hint: put the rest of the body under the opposite condition
    """)


def test_break_names_the_loop_too():
  def k(x, y):
    for _ in tt.range(4):
      break

  says(k, """
    tt.range was left before its end (break, return, or an exception that was caught) [TT100]
      at k.py:2:7 (k)
              break
              ^^^^^
      the loop is at k.py:1:14 (k)
            for _ in tt.range(4):
                     ^^^^^^^^^^^
      hint: the trip count is not known while tracing: use tt.while_loop, bound the range, or mask with tt.when
    """)


def test_zip_says_who_consumes_the_loop():
  def k(x, y):
    for n, s in zip(tt.range(4), (1.0, 2.0)):
      y[n, :] = x[n, :] * s

  says(k, """
    the body of tt.range is recorded once, so it cannot be consumed by a function such as zip, enumerate, list, map \
or iter [TT100]
      at k.py:1:21 (k)
            for n, s in zip(tt.range(4), (1.0, 2.0)):
                            ^^^^^^^^^^^
      hint: write `for i in tt.range(...):` in the kernel or in a function that takes the body; Python's range() \
unrolls and can be zipped
    """)


def test_a_value_made_in_a_branch_gets_the_branchs_hint():
  def k(x, y):
    v = x[0, :]
    with tt.when(tt.program_id(0) == 0):
      v = v * 2
    y[0, :] = v

  says(k, """
    'v' was made inside `with tt.when` at line 2 and is used outside it [TT110]
      at k.py:4:5 (k)
            y[0, :] = v
            ^^^^^^^
      it was made at k.py:3:11 (k)
              v = v * 2
                  ^^^^^
      hint: tile values are immutable: write v = tt.where(p, new, v) or tt.cond, or store into a fragment: \
ref[...] = new
    """)


def test_a_reference_is_told_to_be_allocated_earlier():
  def k(x, y):
    for _ in tt.range(4):
      acc = tt.alloc_fragment((32,), np.float32)
    acc[...] = 0

  assert "hint: allocate it before tt.range" in message(k)


def test_a_rebound_number_shows_both_values_and_the_choice():
  def k(x, y):
    n = 0
    with tt.when(tt.program_id(0) == 0):
      n = 1
    y[n, :] = x[n, :]

  says(k, """
    'n' was 0 and is rebound to 1 inside `with tt.when`, and read after it: it would change whatever the \
condition is [TT100]
      at k.py:2:10 (k)
            with tt.when(tt.program_id(0) == 0):
                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      hint: use n = tt.where(p, 1, n)
    """)


def test_a_count_of_iterations_is_refused_where_the_loop_stands():
  def k(x, y):
    done = 0
    for n in tt.range(8):
      y[n, :] = x[n, :]
      done += 1
    y[0, :] = 0.0 + done

  says(k, """
    'done' was 0 and is rebound to 2 inside tt.range, and read after it: it would change whatever the trip count is \
[TT100]
      at k.py:2:14 (k)
            for n in tt.range(8):
                     ^^^^^^^^^^^
      hint: keep 'done' in a reference, carry it with tt.fori_loop, or compute it before or after the loop
    """)


def test_a_role_speaks_of_threads():
  def k(x, y):
    acc = tt.alloc_fragment((32,), np.float32)
    with tt.warpgroup(0):
      acc[...] = 0

  says(k, """
    'acc' belongs to the threads of kernel k and is used by those of `with tt.warpgroup` at line 2 [TT110]
      at k.py:3:7 (k)
              acc[...] = 0
              ^^^^^^^^
      it was made at k.py:1:11 (k)
            acc = tt.alloc_fragment((32,), np.float32)
                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      hint: make it where it is used, or pass it through shared memory
    """)


def test_a_loop_or_branch_of_another_kernel_is_refused():
  kept: list[Any] = []

  def make(x, y):
    kept.append(tt.range(4))
    for _ in kept[0]:
      pass
    kept.append(tt.when(True))
    with kept[1]:
      pass

  def loop(x, y):
    for _ in kept[0]:
      pass

  def branch(x, y):
    with kept[1]:
      pass

  make_args = lambda trace: (0, 0)
  trace_kernel(make, make_args, name="make", options=CallOptions(grid=(1,)))
  assert "this tt.range belongs to another kernel's trace" in message(loop)
  assert "this tt.when belongs to another kernel's trace" in message(branch)


def test_a_branch_may_be_entered_again_but_not_inside_itself():
  def again(x, y):
    w = tt.when(tt.program_id(0) == 0)
    with w:
      y[0, :] = x[0, :]
    with w:
      y[1, :] = x[1, :]

  def nested(x, y):
    w = tt.when(tt.program_id(0) == 0)
    with w, w:
      y[0, :] = x[0, :]

  make_args = lambda trace: (trace.binder(ROWS, user_loc()), trace.binder(ROWS, user_loc()))
  block, _ = trace_kernel(again, make_args, name="k", options=CallOptions(grid=(1,)))
  assert [e.primitive.name for e in block.eqns].count("cond") == 2
  assert "this tt.when is open already" in message(nested)


def test_static_parameters_compare_by_type_and_value():
  assert same_static((1, ("a", float("nan"))), (1, ("a", float("nan"))))
  assert not same_static(1, True)
  assert not same_static(1, 1.0)
  assert not same_static((1, 2), (1, 2, 3))
  assert not same_static([1], [1])
