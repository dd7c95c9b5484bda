"""A graph as text, in the style of a jaxpr: a pure function of the graph.

  kernel double grid=(4,)
    in  x:Ref<global>{f32[64,64]}
    out y:Ref<global>{f32[64,64]}

    a:i32[] = program_id[axis=0]
    b:i32[] = mul a 16
    c:f32[16,64] <- x[b:+16, :]
    d:f32[16,64] = mul c 2.0
    y[b:+16, :] <- d

`x[b:+16, :]` are the 16 rows from b on; `x[b, :]` is row b; `x[b:+16:2 in c..d]` are 16 rows, two apart, of a view that
ends at rows c and d; `x[...]` is the whole reference, `x[...].T` its transpose.
"""
from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tiletrace.core.dtypes import short_name
from tiletrace.core.graph import Atom, Block, Eqn, Literal, RefOperand, TileGraph, Var, walk
from tiletrace.core.pretty import bracketed, indented, letters
from tiletrace.core.rules import RuleTable
from tiletrace.core.types import Dyn, ViewDim

Annotate = Callable[[Var], str | None]


def to_text(graph: TileGraph, annotate: Annotate | None = None, *, locs: bool = False) -> str:
  """The graph as text.

  Args:
    annotate: what to write behind a variable where it is bound, as `d:f32[64,256]@L1`; None for nothing.
    locs: write each equation's file and line behind it.
  """
  p = Printer(graph, annotate, locs=locs)
  return "\n".join([*p.header(), "", *indented(p.block(graph.body)), ""])


class Printer:
  """Names for the variables of one graph, and the text of its parts.

  Arguments carry the user's names, all other variables letters in the order in which they are bound.
  """

  def __init__(self, graph: TileGraph, annotate: Annotate | None = None, *, locs: bool = False):
    self.graph, self.annotate, self.locs = graph, annotate, locs
    self.names: dict[Var, str] = {}
    for var, name in zip(graph.invars, graph.arg_names):
      self.names.setdefault(var, name)
    fresh = letters(set(graph.arg_names))
    for var in _binders(graph.body):
      if var not in self.names:
        self.names[var] = next(fresh)

  # --- parts

  def atom(self, a: Atom) -> str:
    if isinstance(a, Literal):
      return param(a.value)
    return self.names.get(a, f"?{a.hint or ''}")  # unbound: only in a graph that verify refuses

  def binder(self, var: Var) -> str:
    note = self.annotate(var) if self.annotate is not None else None
    return f"{self.names[var]}:{var.type}" + (f"@{note}" if note else "")

  def outs(self, eqn: Eqn) -> str:
    """The bound variables and ` = `, if there are any."""
    return "".join(self.binder(v) + " " for v in eqn.outvars) + "= " if eqn.outvars else ""

  def params(self, eqn: Eqn, *skip: str) -> str:
    """`[axis=0]`: sorted; without views, None and `skip`."""
    return bracketed({k: param(v) for k, v in eqn.params.items()
                      if k != "views" and k not in skip and v is not None})

  def ref(self, r: RefOperand) -> str:
    """A reference operand with its view."""
    name, kept = self.atom(r.root), r.view.perm
    order = sorted(kept)
    suffix = "" if list(kept) == order else ".T" if list(kept) == order[::-1] else \
      f".transpose({', '.join(str(order.index(p)) for p in kept)})"
    if all(_is_full(d, n) for d, n in zip(r.view.dims, r.type.shape)):
      return f"{name}[...]{suffix}"
    return f"{name}[{', '.join(self._dim(r, d, n) for d, n in zip(r.view.dims, r.type.shape))}]{suffix}"

  def _dim(self, r: RefOperand, d: ViewDim, extent: int) -> str:
    def part(p: Any) -> str:
      return self.atom(r.dyn[p.index]) if isinstance(p, Dyn) else str(p)

    if _is_full(d, extent):
      return ":"
    text = part(d.start) if d.squeezed else f"{part(d.start)}:+{part(d.size)}" + (
      f":{d.stride}" if d.stride != 1 else "")
    return text + "".join(f" in {part(lo)}..{part(hi)}" for lo, hi in d.edges)

  # --- lines

  def header(self) -> list[str]:
    g, o = self.graph, self.graph.options
    options = dict(warpgroups=o.warpgroups, cluster=o.cluster, raster=o.raster, persistent=o.persistent)
    shown = "".join(f" {k}={param(v)}" for k, v in options.items() if v not in (None, False))
    lines = [f"kernel {g.name} grid={param(o.grid)}{shown}"]
    for k, (var, name) in enumerate(zip(g.invars, g.arg_names)):
      alias = f"{name} is " if self.names[var] != name else ""
      lines.append(f"  {'in ' if k < g.num_inputs else 'out'} {alias}{self.binder(var)}")
    return lines

  def eqn(self, eqn: Eqn) -> str:
    """The equation in one line, without its blocks."""
    rule = print_rules.get(eqn.primitive)
    if rule is not None:
      return rule(eqn, self)
    operands = [*map(self.ref, eqn.refs), *map(self.atom, eqn.values)]
    return " ".join([f"{self.outs(eqn)}{eqn.primitive}{self.params(eqn)}", *operands])

  def lines(self, eqn: Eqn) -> list[str]:
    first = self.eqn(eqn)
    note = f"  # {eqn.loc.short()}" if self.locs else ""
    if not eqn.blocks:
      return [first + note]
    out = []
    for block in eqn.blocks:
      out.append(f"{first if not out else '}'} {{{self._head(block)}{note if not out else ''}")
      out += indented(self.block(block))
    return [*out, "}"]

  def block(self, block: Block) -> list[str]:
    out = [line for eqn in block.eqns for line in self.lines(eqn)]
    return [*out, "yield " + " ".join(map(self.atom, block.outs))] if block.outs else out

  def _head(self, block: Block) -> str:
    return f" ({' '.join(map(self.binder, block.invars))})" if block.invars else ""


# An equation in its own words: (eqn, printer) -> one line.
print_rules: RuleTable[Callable[[Eqn, Printer], str]] = RuleTable("print", levels=frozenset())


def _binders(body: Block) -> Iterable[Var]:
  yield from body.invars
  for eqn in walk(body):
    yield from eqn.outvars
    for block in eqn.blocks:
      yield from block.invars


def _is_full(d: ViewDim, extent: int) -> bool:
  return d == ViewDim(0, extent)


def param(x: Any) -> str:
  """A parameter or literal as text, the same on every machine; floats as the shortest text that reads back exactly."""
  if isinstance(x, np.dtype):
    return short_name(x)
  if isinstance(x, (tuple, list)):
    return f"({', '.join(map(param, x))}{',' * (len(x) == 1)})"
  if isinstance(x, enum.Enum):
    return str(x.value)
  return repr(x) if isinstance(x, (bool, int, float)) else str(x)
