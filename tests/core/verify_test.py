"""Each rule of the verifier, broken by hand."""
from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import pytest

import tiletrace as tt
from tests.tracing import Out, f32, trace
from tiletrace.core import dtypes
from tiletrace.core.errors import VerifyError
from tiletrace.core.graph import Block, Literal, Primitive, TileGraph, Var
from tiletrace.core.ops.control import for_loop_p
from tiletrace.core.ops.memory import store_p
from tiletrace.core.types import Dyn, RefType, TileType, View, ViewDim
from tiletrace.core.verify import verify


def kernel(x, y):
  s = tt.alloc_shared((32, 64), x.dtype)
  for k in tt.range(2):
    v = x[tt.block(k, 32), :]
    s[...] = tt.exp(v)
    y[tt.block(k, 32), :] = s[...]


GRAPH = trace(kernel, x=f32(64, 64), y=Out(f32(64, 64)))
LOOP = GRAPH.body.eqns[1]
BODY = LOOP.blocks[0]


def with_body(*eqns, invars=BODY.invars, outs=()) -> TileGraph:
  loop = LOOP.replace(blocks=(Block(invars, eqns, outs),))
  return GRAPH.replace(body=dataclasses.replace(GRAPH.body, eqns=(GRAPH.body.eqns[0], loop)))


def changed(name: str, **changes) -> TileGraph:
  """The graph with the body's first equation of that name changed."""
  at = [e.primitive.name for e in BODY.eqns].index(name)
  eqns = list(BODY.eqns)
  eqns[at] = eqns[at].replace(**{k: f(eqns[at]) for k, f in changes.items()})
  return with_body(*eqns)


def broken_view(view: View) -> TileGraph:
  return changed("load", params=lambda e: {**e.params, "views": (view,)})


ROWS, COLUMNS = BODY.eqns[1].params["views"][0].dims
I32 = TileType((), dtypes.i32)

BROKEN = {
  "is bound twice": with_body(BODY.eqns[0], BODY.eqns[0]),
  "is used before it is bound": with_body(*BODY.eqns[1:]),
  "is used outside its block": GRAPH.replace(body=dataclasses.replace(
    GRAPH.body, eqns=(*GRAPH.body.eqns, BODY.eqns[-1]))),
  r"its results are \(f32\[32,64\]\), not \(f32\[32,65\]\)": changed(
    "load", outvars=lambda e: (Var(TileType((32, 65), dtypes.f32)),)),
  "its types cannot be derived: exp of i32: it takes floats": changed(
    "exp", invars=lambda e: (Literal(2, dtypes.i32),)),
  "parameter fill_value is not hashable": changed("load", params=lambda e: {**e.params, "fill_value": [0]}),
  "parameter fill_value is an operand": changed(
    "load", params=lambda e: {**e.params, "fill_value": Literal(0, dtypes.i32)}),
  "operand 0 of load is no reference": changed("load", invars=lambda e: e.invars[1:]),
  "perm \\(0, 0\\) does not name the kept dimensions": broken_view(View((ROWS, COLUMNS), (0, 0))),
  "a view of 1 dimensions": broken_view(View((ROWS,), (0,))),
  "the dynamic operands of a view are i32 scalars": broken_view(View((ViewDim(Dyn(1), 32), COLUMNS), (0, 1))),
  "a squeezed dimension has size 1": broken_view(View((dataclasses.replace(ROWS, squeezed=True), COLUMNS), (1,))),
  "it writes to an input": GRAPH.replace(num_inputs=2),
  "arg_names and num_inputs do not fit invars": GRAPH.replace(arg_names=("x",)),
  "an argument is no global reference": GRAPH.replace(invars=(Var(I32), GRAPH.invars[1])),
  "the body binds or returns something else": GRAPH.replace(body=dataclasses.replace(
    GRAPH.body, outs=(Literal(0, dtypes.i32),))),
  "a value operand of store is a reference": changed("store", invars=lambda e: (*e.invars[:-1], e.invars[0])),
}


def test_traced_graphs_pass():
  assert verify(GRAPH) is GRAPH


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_rule_is_named(message):
  with pytest.raises(VerifyError, match=message) as e:
    verify(BROKEN[message])
  assert e.value.code == "TT910"


def test_the_error_shows_the_equation_in_its_window_and_the_users_line():
  with pytest.raises(VerifyError) as e:
    verify(changed("exp", invars=lambda e: (Literal(2, dtypes.i32),)))
  lines = e.value.message.splitlines()
  assert lines[0].startswith("at level 'trace': its types cannot be derived")
  assert [line.startswith("-->") for line in lines[1:]].index(True) == 2
  assert re.fullmatch(r"--> \w:f32\[32,64\] = exp 2", lines[3])
  assert e.value.loc.line == kernel.__code__.co_firstlineno + 4
  assert "s[...] = tt.exp(v)" in str(e.value)


def test_levels_have_their_primitives():
  def pipelined(x, y):
    a = tt.alloc_shared((64, 64), jnp.bfloat16)
    acc = tt.alloc_fragment((64, 64), jnp.float32)
    x_s = tt.alloc_shared((64, 64), jnp.float32)
    for _ in tt.pipelined(4, num_stages=2):
      tt.copy(x, x_s)
      tt.gemm(a, a, acc)
    y[...] = acc[...]

  graph = trace(pipelined, x=f32(64, 64), y=Out(f32(64, 64)))
  for level in ("trace", "layout", "select"):
    verify(graph, level)
  with pytest.raises(VerifyError, match="at level 'schedule': for_loop pipelined is not allowed here"):
    verify(graph, "schedule")
  at = [e.primitive for e in graph.body.eqns].index(for_loop_p)
  loop = graph.body.eqns[at].replace(params=dict(kind="range", num_stages=1, unroll=1))
  ranged = graph.replace(body=dataclasses.replace(
    graph.body, eqns=(*graph.body.eqns[:at], loop, *graph.body.eqns[at + 1:])))
  with pytest.raises(VerifyError, match="at level 'schedule': gemm is not allowed here"):
    verify(ranged, "schedule")


def test_a_primitive_without_rules_is_reported_as_such():
  assert store_p.name == "store"
  nothing = Primitive.__new__(Primitive)
  nothing.name, nothing.level = "nothing", 1
  with pytest.raises(VerifyError, match="its types cannot be derived: no type rule for 'nothing'"):
    verify(changed("store", primitive=lambda e: nothing))


def test_an_aliased_output_may_be_written():
  var = GRAPH.invars[1]
  assert isinstance(var.type, RefType)
  verify(GRAPH.replace(invars=(GRAPH.invars[0], var, var), arg_names=("x", "h", "y"), num_inputs=2))
