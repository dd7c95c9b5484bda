from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tiletrace as tt
from tiletrace.core.graph import Block, CallOptions, walk
from tiletrace.core.ops.roles import arrivals, elect_p, warpgroup_p
from tiletrace.core.rules import effects
from tiletrace.core.source import user_loc
from tiletrace.core.trace import Trace, trace_kernel
from tiletrace.core.types import RefType, Space

X = RefType((64,), np.dtype(np.float32), Space.GLOBAL)


def record(kernel) -> Block:
  def make_args(trace: Trace) -> tuple[Any]:
    return (trace.binder(X, user_loc(), "x"),)
  return trace_kernel(kernel, make_args, name="k", options=CallOptions(grid=(1,), warpgroups=4))[0]


def test_roles_nest_as_blocks():
  def k(x):
    with tt.warpgroup(0, regs=24), tt.elect():
      x[0] = 1.0
    with tt.warpgroup(range(1, 4), regs=160):
      with tt.elect(each="warpgroup"):
        x[1] = 1.0

  block = record(k)
  assert [e.params for e in walk(block) if e.primitive is warpgroup_p] == [
      dict(first=0, count=1, regs=24), dict(first=1, count=3, regs=160)]
  assert [e.params for e in walk(block) if e.primitive is elect_p] == [dict(each="scope"), dict(each="warpgroup")]
  assert all(effects(e) for e in block.eqns)


def test_a_barrier_arrival_counts_warpgroups_or_elected_threads():
  def k(x):
    seen = [arrivals()]
    with tt.elect():
      seen.append(arrivals())
    with tt.warpgroup(range(1, 4)):
      seen.append(arrivals())
      with tt.elect():
        seen.append(arrivals())
      with tt.elect(each="warpgroup"):
        seen.append(arrivals())
    assert seen == [4, 1, 3, 1, 3]

  assert len(record(k).eqns) == 2


@pytest.mark.parametrize("make, error, says", [
    (lambda: tt.warpgroup(4), tt.TileIndexError, "of a program with 4 warpgroups"),
    (lambda: tt.warpgroup(range(3, 5)), tt.TileIndexError, "of a program with 4 warpgroups"),
    (lambda: tt.warpgroup(range(0, 4, 2)), tt.TileTypeError, "which is range"),
    (lambda: tt.warpgroup(range(2, 2)), tt.TileTypeError, "which is range"),
    (lambda: tt.warpgroup(True), tt.TileTypeError, "which is True"),
    (lambda: tt.warpgroup(0, regs=25), tt.TileTypeError, "regs is 25"),
    (lambda: tt.warpgroup(0, regs=264), tt.TileTypeError, "regs is 264"),
    (lambda: tt.elect(each="warp"), tt.TileTypeError, "each is 'warp'")])
def test_arguments_are_checked(make: Any, error: type[Exception], says: str):
  with pytest.raises(error, match=says):
    record(lambda x: make())


@pytest.mark.parametrize("outer, inner", [
    (lambda: tt.warpgroup(0), lambda: tt.warpgroup(0)), (lambda: tt.elect(), lambda: tt.elect()),
    (lambda: tt.elect(), lambda: tt.warpgroup(0))])
def test_only_elect_in_a_warpgroup_nests(outer: Any, inner: Any):
  def statement(x):
    with outer():
      with inner():
        x[0] = 1.0

  def decorator(x):
    with outer():
      @inner()
      def _():
        x[0] = 1.0

  for kernel in (statement, decorator):
    with pytest.raises(tt.ControlFlowError, match="inside `with tt"):
      record(kernel)


def test_scalars_and_shared_memory_are_common_to_all_roles():
  def k(x):
    n = tt.program_id(0) + 1
    s = tt.alloc_shared((64,), np.float32)
    with tt.warpgroup(0):
      s[...] = x[...]
    with tt.warpgroup(1):
      x[n] = s[0]

  assert [e.primitive.name for e in record(k).eqns][-2:] == ["warpgroup", "warpgroup"]


def test_tiles_and_fragments_belong_to_the_threads_that_made_them():
  def tile(x):
    v = x[...]
    with tt.warpgroup(0):
      x[...] = v

  def one_thread(x):
    with tt.warpgroup(0):
      acc = tt.alloc_fragment((64,), np.float32)
      with tt.elect():
        acc[...] = 0.0

  def scalar_state(x):
    state = tt.PipelineState(3)
    with tt.warpgroup(0):
      state.advance()

  for kernel in (tile, one_thread, scalar_state):
    with pytest.raises(tt.ScopeError, match="belongs to the threads of"):
      record(kernel)
