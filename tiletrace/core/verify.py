"""The rules that a graph keeps between passes. A violation is a fault of the pass that made the graph."""
from __future__ import annotations

import dataclasses
from typing import NoReturn

from tiletrace.core import dtypes
from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.errors import TileTraceError, VerifyError
from tiletrace.core.graph import Atom, Block, Eqn, Literal, TileGraph, Var
from tiletrace.core.printer import Printer
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.types import Dyn, RefType, Space, TileType, View

_WINDOW = 5


@dataclasses.dataclass(frozen=True)
class Spec:
  """What a level allows: primitives that are not there yet or any more, kinds of for_loop, and views of shared memory
  that go backwards."""
  absent: frozenset[str] = frozenset()
  loops: frozenset[str] = frozenset({"range", "pipelined", "fori"})
  backwards: bool = False


SPECS: dict[str, Spec] = {
  "trace": Spec(absent=frozenset({"relayout"})),
  "layout": Spec(absent=frozenset({"step"})),
  "select": Spec(absent=frozenset({"step"})),
  "schedule": Spec(absent=frozenset({"gemm", "step"}), loops=frozenset({"range", "fori"}), backwards=True),
}


def verify(graph: TileGraph, level: str = "trace") -> TileGraph:
  """Returns `graph` if it keeps the specification of `level`.

  Checked: every variable is bound once, before its use and in scope; operands follow the convention of graph.py; types
  and effects are re-derivable; only outputs are written; the level's primitives.

  Raises:
    VerifyError: with the equation, its neighbours and the user's line.
  """
  _Verifier(graph, level).graph()
  return graph


class _Verifier:
  def __init__(self, graph: TileGraph, level: str):
    self._graph, self._spec, self._level = graph, SPECS[level], level
    self._bound: set[Var] = set()   # anywhere so far
    self._scope: set[Var] = set()   # visible here
    self._block, self._at = graph.body, 0

  def graph(self) -> None:
    g = self._graph
    if len(g.invars) != len(g.arg_names) or not 0 <= g.num_inputs <= len(g.invars):
      self._fail("arg_names and num_inputs do not fit invars")
    if any(not isinstance(v.type, RefType) or v.type.space is not Space.GLOBAL for v in g.invars):
      self._fail("an argument is no global reference")
    if g.body.outs or not set(g.body.invars) <= set(g.invars):
      self._fail("the body binds or returns something else than the arguments")
    self._bound = set(g.invars)
    self._scope = set(g.invars)
    self._eqns(g.body)

  def _fail(self, message: str) -> NoReturn:
    eqns, at = self._block.eqns, self._at
    loc = eqns[at].loc if at < len(eqns) else self._graph.loc
    printer = Printer(self._graph)
    lines = [f"{'-->' if k == at else '   '} {_line(printer, eqns[k])}"
             for k in range(max(0, at - _WINDOW), min(len(eqns), at + _WINDOW + 1))]
    raise VerifyError("\n".join([f"at level '{self._level}': {message}", *lines]), loc=loc)

  def _bind(self, var: Var) -> None:
    if var in self._bound:
      self._fail(f"{var} is bound twice")
    self._bound.add(var)
    self._scope.add(var)

  def _use(self, atom: Atom) -> None:
    if isinstance(atom, Var) and atom not in self._scope:
      self._fail(f"{atom} is used " + ("outside its block" if atom in self._bound else "before it is bound"))

  def _eqns(self, block: Block) -> None:
    outer_block, outer_at, outer_scope = self._block, self._at, set(self._scope)
    self._block, self._at = block, 0
    for self._at, eqn in enumerate(block.eqns):
      self._eqn(eqn)
    self._at = max(0, len(block.eqns) - 1)
    for out in block.outs:
      self._use(out)
    self._block, self._at, self._scope = outer_block, outer_at, outer_scope

  def _eqn(self, eqn: Eqn) -> None:
    name = eqn.primitive.name
    if name in self._spec.absent or (name == "for_loop" and eqn.params["kind"] not in self._spec.loops):
      self._fail(f"{name}{' ' + eqn.params['kind'] if name == 'for_loop' else ''} is not allowed here")
    for atom in eqn.invars:
      self._use(atom)
    self._params(eqn)
    self._operands(eqn)
    for block in eqn.blocks:
      scope = set(self._scope)
      for var in block.invars:
        self._bind(var)
      self._eqns(block)
      self._scope = scope
    self._types(eqn)
    self._effects(eqn)
    for var in eqn.outvars:
      self._bind(var)

  def _params(self, eqn: Eqn) -> None:
    for key, value in eqn.params.items():
      try:
        hash(value)
      except TypeError:
        self._fail(f"parameter {key} is not hashable: {value!r}")
      if isinstance(value, (Var, Literal)):
        self._fail(f"parameter {key} is an operand")

  def _operands(self, eqn: Eqn) -> None:
    at = 0
    for view in eqn.params.get("views", ()):
      root = eqn.invars[at] if at < len(eqn.invars) else None
      if not isinstance(root, Var) or not isinstance(root.type, RefType):
        self._fail(f"operand {at} of {eqn.primitive} is no reference")
      self._view(view, root.type, eqn.invars[at + 1:at + 1 + view.num_dyn])
      at += 1 + view.num_dyn
    if any(isinstance(a.type, RefType) for a in eqn.invars[at:]):
      self._fail(f"a value operand of {eqn.primitive} is a reference")

  def _view(self, view: View, root: RefType, dyn: tuple[Atom, ...]) -> None:
    if len(view.dims) != len(root.shape):
      self._fail(f"a view of {len(view.dims)} dimensions of {root}")
    if sorted(view.perm) != [k for k, d in enumerate(view.dims) if not d.squeezed]:
      self._fail(f"perm {view.perm} does not name the kept dimensions")
    if len(dyn) != view.num_dyn or any(a.type != TileType((), dtypes.i32) for a in dyn):
      self._fail("the dynamic operands of a view are i32 scalars")
    parts = [p for d in view.dims for p in (d.start, d.size, *(x for edge in d.edges for x in edge))]
    used = {p.index for p in parts if isinstance(p, Dyn)}
    if used != set(range(view.num_dyn)):
      self._fail("a dynamic operand of a view is not used")
    backwards = self._spec.backwards and root.space is Space.SHARED
    if any(d.stride == 0 or (d.stride < 0 and not backwards) or (d.squeezed and (d.size, d.stride) != (1, 1))
           for d in view.dims):
      self._fail("a squeezed dimension has size 1, and strides are positive")

  def _types(self, eqn: Eqn) -> None:
    try:
      types = type_rules[eqn.primitive](eqn)
    except TileTraceError as e:
      self._fail(f"its types cannot be derived: {e.message}")
    if types != tuple(v.type for v in eqn.outvars):
      self._fail(f"its results are ({', '.join(map(str, types))}), not "
                 f"({', '.join(str(v.type) for v in eqn.outvars)})")

  def _effects(self, eqn: Eqn) -> None:
    refs = eqn.refs
    for effect in effect_rules[eqn.primitive](eqn):
      if not isinstance(effect, RefEffect):
        continue
      if effect.operand >= len(refs):
        self._fail(f"an effect on operand {effect.operand} of {len(refs)} references")
      ref = refs[effect.operand]
      if effect.access is Access.WRITE and ref.type.space is Space.GLOBAL and ref.root not in self._graph.outputs:
        self._fail("it writes to an input")


def _line(printer: Printer, eqn: Eqn) -> str:
  """The equation as text, also where its operands are too broken for the printer."""
  try:
    return printer.eqn(eqn)
  except (AssertionError, IndexError, KeyError, AttributeError, ValueError):
    return f"{eqn.primitive} {' '.join(map(repr, eqn.invars))}"
