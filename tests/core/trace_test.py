from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import pytest

import tiletrace as tt
from tiletrace.core.graph import CallOptions, walk
from tiletrace.core.source import user_loc
from tiletrace.core.trace import Trace, _current, name_of, trace_kernel
from tiletrace.core.types import RefType, Space

VECTOR = RefType((128,), np.dtype(np.float32), Space.GLOBAL)
OPTIONS = CallOptions(grid=(2,))


def record(kernel):
  def make_args(trace: Trace) -> tuple[Any, Any]:
    return trace.binder(VECTOR, user_loc(), "x"), trace.binder(VECTOR, user_loc(), "y")
  return trace_kernel(kernel, make_args, name="k", options=OPTIONS)


def test_the_block_binds_the_arguments_and_returns_what_the_kernel_returned():
  def k(x, y):
    y[...] = x[...] * 2
    return "result"

  block, result = record(k)
  assert [v.hint for v in block.invars] == ["x", "y"]
  assert [e.primitive.name for e in block.eqns] == ["load", "mul", "store"]
  assert result == "result"
  load, mul, store = block.eqns
  assert load.invars == (block.invars[0],) and mul.invars[0] is load.outvars[0]
  assert store.invars == (block.invars[1], mul.outvars[0])


def test_each_equation_knows_its_line():
  def k(x, y):
    v = x[...]
    y[...] = v

  block, _ = record(k)
  first = k.__code__.co_firstlineno
  assert [e.loc.line - first for e in block.eqns] == [1, 2]


def test_operations_outside_a_kernel_are_refused():
  with pytest.raises(tt.TileTraceError, match="outside a kernel"):
    tt.alloc_fragment((8,), np.float32)
  with pytest.raises(tt.TileTraceError, match="outside a kernel"):
    tt.range(4)


def test_the_context_is_restored_after_success_failure_and_nesting():
  def inner(x, y):
    y[...] = x[...]

  def outer(x, y):
    before = _current.get()
    record(inner)
    assert _current.get() is before
    y[...] = x[...] + 1

  block, _ = record(outer)
  assert [e.primitive.name for e in block.eqns] == ["load", "add", "store"]
  with pytest.raises(ZeroDivisionError):
    record(lambda x, y: 1 / 0)
  assert _current.get() is None


def test_values_of_another_kernel_are_refused_even_while_it_runs():
  def outer(x, y):
    v = x[...]

    def inner(a, b):
      b[...] = v

    record(inner)

  with pytest.raises(tt.ScopeError, match="belongs to another kernel's trace"):
    record(outer)


def test_other_exceptions_get_a_note_with_the_kernels_name():
  def k(x, y):
    raise KeyError("from the kernel")

  with pytest.raises(KeyError) as info:
    record(k)
  assert info.value.__notes__ == ["while tracing kernel k"]

  def foreign(x, y):
    raise TypeError("unsupported operand type: <class 'tiletrace.core.tile.Tile'>")

  with pytest.raises(TypeError) as info:
    record(foreign)
  assert "tt.call_jax" in info.value.__notes__[1]


def test_a_refusal_that_the_kernel_catches_is_raised_at_the_end():
  def k(x, y):
    with contextlib.suppress(tt.ControlFlowError):
      list(tt.range(4))

  with pytest.raises(tt.ControlFlowError, match="consumed by"):
    record(k)


def test_names_are_found_in_the_users_frames():
  def k(x, y):
    v = x[...]
    return name_of(v), name_of(x), name_of(x.at[0:8]), name_of(object())

  assert record(k)[1] == ("'v'", "'x'", "'x'", None)


def test_a_loop_at_depth_d_is_recorded_d_plus_one_times():
  passes = [0]

  def k(x, y):
    for i in tt.range(2):
      for j in tt.range(2):
        for _ in tt.range(2):
          passes[0] += 1
          y[tt.ds(i, 1)] = x[tt.ds(j, 1)]

  block, _ = record(k)
  assert passes[0] == 4
  assert [e.primitive.name for e in walk(block)].count("store") == 1


def test_loop_indices_carry_the_users_name():
  def k(x, y):
    for row in tt.range(8):
      y[tt.ds(row, 1)] = x[tt.ds(row, 1)]

  block, _ = record(k)
  assert block.eqns[0].blocks[0].invars[0].hint == "row"


def test_tracing_a_loop_of_twenty_operations_stays_under_ten_milliseconds():
  def k(x, y):
    for i in tt.range(8):
      v = x[tt.ds(i, 1)]
      for _ in range(18):
        v = v + 1
      y[tt.ds(i, 1)] = v

  record(k)
  best = min(_timed(k) for _ in range(20))
  assert best < 10e-3, f"{best * 1e3:.2f} ms"


def _timed(kernel) -> float:
  start = time.perf_counter()
  record(kernel)
  return time.perf_counter() - start
