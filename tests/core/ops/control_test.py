from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tiletrace as tt
from tiletrace.core import dtypes
from tiletrace.core.graph import Block, CallOptions, Eqn, Literal, walk
from tiletrace.core.ops.control import cond_p, for_loop_p, switch_p, while_loop_p
from tiletrace.core.rules import effects, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import MeshIndex
from tiletrace.core.trace import Trace, trace_kernel
from tiletrace.core.types import RefType, Space, TileType

X = RefType((64, 32), np.dtype(np.float32), Space.GLOBAL)
SCALAR = TileType((), dtypes.i32)


def record(kernel) -> Block:
  def make_args(trace: Trace) -> tuple[Any, Any]:
    return trace.binder(X, user_loc(), "x"), trace.binder(X, user_loc(), "y")
  return trace_kernel(kernel, make_args, name="k", options=CallOptions(grid=(2, 2)))[0]


def only(block: Block, primitive) -> Eqn:
  (eqn,) = (e for e in walk(block) if e.primitive is primitive)
  return eqn


def refused(kernel, error: type[Exception], match: str) -> None:
  with pytest.raises(error, match=match) as info:
    record(kernel)
  first = kernel.__code__.co_firstlineno
  assert info.value.loc.line > first or kernel.__name__ == "<lambda>"


# for

def test_range_takes_pythons_arguments():
  def k(x, y):
    for _ in tt.range(8):
      pass
    for _ in tt.range(2, 8):
      pass
    for _ in tt.range(8, 0, -2, unroll=4):
      pass
    for _ in tt.range(np.int64(3)):
      pass

  loops = record(k).eqns
  assert [tuple(a.value for a in e.values) for e in loops] == [(0, 8, 1), (2, 8, 1), (8, 0, -2), (0, 3, 1)]
  assert loops[2].params == dict(kind="range", num_stages=1, unroll=4)
  assert all(a.type == SCALAR for e in loops for a in e.values)
  assert [v.type for v in loops[0].blocks[0].invars] == [SCALAR]


def test_bounds_may_be_traced_scalars_of_any_integer_type():
  def k(x, y):
    n = tt.program_id(0)
    for _ in tt.range(n, n.astype(np.uint8)):
      pass

  block = record(k)
  lo, hi, step = only(block, for_loop_p).values
  assert lo.type == hi.type == SCALAR and step == Literal(1, dtypes.i32)
  assert block.eqns[-2].primitive.name == "cast"


@pytest.mark.parametrize("bound, says", [
    (2.0, "tt.range: stop must be an integer, got 2.0"), (True, "must be an integer, got True"),
    (np.float32(2), "must be an integer, got 2.0"), ("8", "tt.range: stop: str is not a tile"), (2 ** 31, "i32")])
def test_other_bounds_are_refused(bound: Any, says: str):
  def k(x, y):
    for _ in tt.range(bound):
      pass

  refused(k, tt.TileTypeError, says)


def test_float_tiles_vectors_and_references_are_no_bounds():
  def float_tile(x, y):
    for _ in tt.range(x[0, 0]):
      pass

  def vector(x, y):
    for _ in tt.range(tt.arange(8)):
      pass

  def reference(x, y):
    for _ in tt.range(x):
      pass

  refused(float_tile, tt.TileTypeError, r"must be an integer scalar, got f32\[\]")
  refused(vector, tt.TileTypeError, r"must be an integer scalar, got i32\[8\]")
  refused(reference, tt.TileTypeError, "x is a reference, not a value")


def test_steps_are_integers_and_unroll_and_num_stages_static():
  def step_0(x, y):
    tt.range(0, 8, 0)

  def float_step(x, y):
    tt.range(0, 8, 1.5)

  def unroll_0(x, y):
    tt.range(8, unroll=0)

  def stages_0(x, y):
    tt.pipelined(8, num_stages=0)

  def stages_float(x, y):
    tt.pipelined(8, num_stages=2.0)

  refused(step_0, tt.TileTypeError, "tt.range: step is 0")
  refused(float_step, tt.TileTypeError, "step must be a Python int, got 1.5")
  refused(unroll_0, tt.TileTypeError, "unroll is 0")
  refused(stages_0, tt.TileTypeError, "num_stages is 0")
  refused(stages_float, tt.TileTypeError, "num_stages must be a Python int, got 2.0")


def test_pipelined_needs_a_copy_from_global_to_shared():
  def staged(x, y):
    s = tt.alloc_shared((16, 32), np.float32)
    for i in tt.pipelined(4, num_stages=3):
      with tt.when(i >= 0):
        tt.copy(x.at[tt.block(i, 16), :], s)

  def direct(x, y):
    for i in tt.pipelined(4, num_stages=3):
      y[i, :] = x[i, :]

  def back(x, y):
    s = tt.alloc_shared((16, 32), np.float32)
    for i in tt.pipelined(4, num_stages=3):
      tt.copy(s, y.at[tt.block(i, 16), :])

  assert only(record(staged), for_loop_p).params == dict(kind="pipelined", num_stages=3, unroll=1)
  refused(direct, tt.ControlFlowError, "tt.pipelined has nothing to pipeline")
  refused(back, tt.ControlFlowError, "tt.pipelined has nothing to pipeline")


def test_parallel_binds_an_open_mesh_and_no_loop():
  seen = {}

  def k(x, y):
    for i, j in tt.parallel(64, 32):
      seen["mesh"] = i, j
    for r in tt.parallel(64):
      seen["bare"] = r

  block = record(k)
  i, j = seen["mesh"]
  assert isinstance(i, MeshIndex) and (i.shape, i.axis, i.offset) == ((64, 1), 0, 0)
  assert isinstance(j, MeshIndex) and (j.shape, j.axis, j.mesh) == ((1, 32), 1, (64, 32))
  assert seen["bare"].shape == (64,)
  assert [e.primitive.name for e in block.eqns] == ["iota", "iota", "iota"]
  assert [e.params["dimension"] for e in block.eqns] == [0, 1, 0]


def test_parallel_extents_are_positive_python_ints():
  refused(lambda x, y: tt.parallel(), tt.TileTypeError, "one extent or more")
  refused(lambda x, y: tt.parallel(8, 0), tt.TileTypeError, "extent 1 is 0")
  refused(lambda x, y: tt.parallel(tt.program_id(0)), tt.TileTypeError, r"extent 0 must be a Python int, got i32\[\]")


# with

def test_when_is_a_cond_with_one_block_and_otherwise_a_second_with_the_negated_predicate():
  def k(x, y):
    with tt.when(tt.program_id(0) == 0) as w:
      y[0, :] = x[0, :]
    with w.otherwise():
      y[1, :] = x[1, :]

  block = record(k)
  assert [e.primitive.name for e in block.eqns] == ["program_id", "eq", "cond", "not", "cond"]
  first, second = (e for e in block.eqns if e.primitive is cond_p)
  assert len(first.blocks) == len(second.blocks) == 1 and not first.outvars
  assert first.values == block.eqns[1].outvars and second.values == block.eqns[3].outvars


def test_a_static_condition_keeps_or_drops_the_body():
  def k(x, y):
    with tt.when(True) as w:
      y[0, :] = x[0, :]
    with w.otherwise():
      y[1, :] = x[1, :] + 1
    @tt.when(np.bool_(False))
    def _():
      y[1, :] = x[1, :] + 1

  assert [e.primitive.name for e in record(k).eqns] == ["load", "store"]


@pytest.mark.parametrize("make, says", [
    (lambda x: x[...] > 0, r"takes a scalar condition, got bool\[64,32\]"),
    (lambda x: tt.program_id(0), "takes a bool"),
    (lambda x: 1, "takes a bool, got 1"), (lambda x: x, "is a reference, not a value"), (lambda x: None, "NoneType")])
def test_when_takes_a_bool_scalar(make: Any, says: str):
  def k(x, y):
    with tt.when(make(x)):
      pass

  refused(k, tt.TileTypeError, says)


# Functions.

def test_fori_loop_carries_a_nested_structure():
  def k(x, y):
    init = {"sum": tt.zeros((32,), np.float32), "count": (0, [True, np.float16(0.5)])}

    def body(i, c):
      n, (flag, half) = c["count"]
      return {"count": (n + i, [flag, half * 2]), "sum": c["sum"] + x[i, :]}

    out = tt.fori_loop(2, tt.program_id(0), body, init)
    assert set(out) == {"sum", "count"} and isinstance(out["count"][1], list)
    y[0, :] = out["sum"]

  eqn = only(record(k), for_loop_p)
  types = [*(TileType((), d) for d in (dtypes.i32, dtypes.bool_, dtypes.f16)), TileType((32,), dtypes.f32)]
  assert [v.type for v in eqn.outvars] == types
  assert [v.type for v in eqn.blocks[0].invars] == [SCALAR, *types]
  assert [a.type for a in eqn.blocks[0].outs] == types
  assert eqn.params["kind"] == "fori"


def test_a_python_number_takes_the_carrys_type_only_where_its_kind_allows():
  def fits(x, y):
    tt.fori_loop(0, 4, lambda i, c: 0, tt.program_id(0).astype(ml_dtypes.bfloat16))

  def does_not(x, y):
    tt.fori_loop(0, 4, lambda i, c: 0.5, tt.program_id(0))

  assert only(record(fits), for_loop_p).blocks[0].outs[0].type == TileType((), dtypes.bf16)
  refused(does_not, tt.TileTypeError, r"the carry is i32\[\] at the start and f32\[\] after the body")


def test_a_carry_that_changes_is_refused():
  def dtype(x, y):
    tt.fori_loop(0, 4, lambda i, c: (c[0] * 0.5, c[1]), (tt.program_id(0), 0))

  def structure(x, y):
    tt.fori_loop(0, 4, lambda i, c: [c[0], c[1]], (0, 0))

  def shape(x, y):
    tt.while_loop(lambda c: c > 0, lambda c: c + x[0, :], x[0, 0])

  refused(dtype, tt.TileTypeError, r"leaf 0 of the carry is i32\[\] at the start and f32\[\] after the body")
  refused(structure, tt.TileTypeError, r"the body returns \[\*, \*\], the carry is \(\*, \*\)")
  refused(shape, tt.TileTypeError, r"the carry is f32\[\] at the start and f32\[32\] after the body")


def test_references_and_other_objects_are_not_carried():
  @dataclasses.dataclass
  class State:
    n: int

  def reference(x, y):
    tt.fori_loop(0, 4, lambda i, c: c, x)

  def record_(x, y):
    tt.fori_loop(0, 4, lambda i, c: c, State(0))

  refused(reference, tt.TileTypeError, "tt.fori_loop: init: a Ref cannot be carried or returned")
  refused(record_, tt.TileTypeError, "a State cannot be carried or returned")


def test_while_loop_has_a_condition_and_a_body():
  def k(x, y):
    n, v = tt.while_loop(lambda c: (c[0] < 8) & (c[1] > 0), lambda c: (c[0] + 1, c[1] * 0.5), (0, x[0, 0]))
    y[n, 0] = v

  eqn = only(record(k), while_loop_p)
  condition, body = eqn.blocks
  assert [a.type for a in condition.outs] == [TileType((), dtypes.bool_)]
  assert [v.type for v in body.invars] == [v.type for v in eqn.outvars] == [SCALAR, TileType((), dtypes.f32)]
  refused(lambda x, y: tt.while_loop(lambda c: c, lambda c: c, 0), tt.TileTypeError, "cond_fun takes a bool")


def test_cond_gives_a_python_number_the_type_of_the_other_branch():
  def k(x, y):
    v, n = tt.cond(tt.program_id(0) > 0, lambda s: (s * 2, 1), lambda s: (0, 2), x[0, 0])
    y[n, 0] = v

  eqn = only(record(k), cond_p)
  assert [v.type for v in eqn.outvars] == [TileType((), dtypes.f32), SCALAR]
  assert eqn.blocks[1].outs == (Literal(0.0, dtypes.f32), Literal(2, dtypes.i32))


def test_branches_must_agree():
  def types(x, y):
    tt.cond(tt.program_id(0) > 0, lambda: x[0, :], lambda: x[:, 0])

  def structures(x, y):
    tt.switch(tt.program_id(0), (lambda: (1, 2), lambda: [1, 2]))

  refused(types, tt.TileTypeError, r"the branches return \(f32\[32\]\) and \(f32\[64\]\)")
  refused(structures, tt.TileTypeError, r"the branches return \(\*, \*\) and \[\*, \*\]")
  refused(lambda x, y: tt.switch(0, ()), tt.TileTypeError, "branches is empty")


def test_a_static_predicate_or_index_keeps_one_branch():
  def k(x, y):
    v = tt.cond(False, lambda r: r[0, :] + 1, lambda r: r[1, :], x)
    w = tt.switch(7, (lambda: v + 1, lambda: v - 1))
    assert tt.cond(True, lambda: 3, lambda: 4) == 3
    y[0, :] = w

  assert [e.primitive.name for e in record(k).eqns] == ["load", "sub", "store"]


def test_switch_has_a_block_for_each_branch():
  def k(x, y):
    y[0, :] = tt.switch(tt.program_id(0), [lambda v, s=s: v * s for s in (1.0, 2.0, 3.0)], x[0, :])

  eqn = only(record(k), switch_p)
  assert len(eqn.blocks) == 3 and [v.type for v in eqn.outvars] == [TileType((32,), dtypes.f32)]


# Rules.

def test_an_equation_with_blocks_keeps_its_place_if_something_inside_does():
  def k(x, y):
    for i in tt.range(4):
      with tt.when(i > 0):
        y[i, :] = x[i, :]
    tt.fori_loop(0, 4, lambda i, c: c + i, 0)

  block = record(k)
  loop, pure = (e for e in walk(block) if e.primitive is for_loop_p)
  assert [e.what for e in effects(loop)] == ["for_loop"]
  assert [e.what for e in effects(loop.blocks[0].eqns[-1])] == ["cond"]
  assert effects(pure) == ()


def test_type_rules_refuse_blocks_that_do_not_fit():
  def k(x, y):
    tt.fori_loop(0, 4, lambda i, c: c + i, 0)
    tt.cond(tt.program_id(0) > 0, lambda: 1, lambda: 2)

  block = record(k)
  loop, branch = only(block, for_loop_p), only(block, cond_p)
  body = loop.blocks[0]
  for wrong in (dataclasses.replace(body, outs=()), dataclasses.replace(body, invars=body.invars[:1]),
                dataclasses.replace(body, outs=(Literal(0.5, dtypes.f32),))):
    with pytest.raises(tt.TileTypeError, match=r"for_loop: the .* of the body is"):
      type_rules[for_loop_p](loop.replace(blocks=(wrong,)))
  with pytest.raises(tt.TileTypeError, match="cond: the result of a branch is"):
    type_rules[cond_p](branch.replace(blocks=branch.blocks[:1]))
  with pytest.raises(tt.TileTypeError, match="cond: the predicate is"):
    type_rules[cond_p](branch.replace(invars=(Literal(1, dtypes.i32),)))
