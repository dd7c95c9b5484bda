"""TileGraph: a typed, first-order program of tile operations, with nested blocks for loops, branches and roles.

Conventions that every primitive keeps:

* `invars` begins with the reference operands, each followed by the dynamic operands of its view, in the order of
  `params["views"]`; the value operands follow. `Eqn.refs` and `Eqn.values` take them apart.
* Blocks may use variables of the blocks around them; only what a loop carries is passed through `invars`/`outs`.
* Parameters are hashable and compared by value; they never hold a Var.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tiletrace.core.source import Loc
from tiletrace.core.types import BarrierType, Dyn, RefType, Size, TileType, Type, View, ViewDim, whole_view


class Primitive:
  """A name. What it means stands in the rule tables, one table for each concern."""
  __slots__ = ("level", "name")

  def __init__(self, name: str, *, level: int = 1):
    self.name, self.level = name, level
    ALL_PRIMITIVES.append(self)

  def __repr__(self) -> str:
    return self.name

  def __reduce__(self) -> tuple[Any, ...]:
    return primitive, (self.name,)


ALL_PRIMITIVES: list[Primitive] = []


def primitive(name: str) -> Primitive:
  """The one primitive of that name."""
  found, = (p for p in ALL_PRIMITIVES if p.name == name)
  return found


class Var:
  """A value, reference or barrier that an equation (or a block's head) binds. Compared by identity."""
  __slots__ = ("__weakref__", "hint", "type")

  def __init__(self, type: Type, hint: str | None = None):
    self.type, self.hint = type, hint  # hint: the user's name, used by reports only

  @property
  def shape(self) -> tuple[int, ...]:
    assert not isinstance(self.type, BarrierType), self
    return self.type.shape

  @property
  def dtype(self) -> np.dtype:
    assert not isinstance(self.type, BarrierType), self
    return self.type.dtype

  def __repr__(self) -> str:
    return f"Var({self.hint or ''}:{self.type})"


class Literal:
  """A Python number (weak: `type.dtype` is what it became) as an operand. Compared by value and type."""
  __slots__ = ("type", "value")

  def __init__(self, value: bool | int | float, dtype: np.dtype):
    self.value, self.type = value, TileType((), dtype)

  @property
  def shape(self) -> tuple[int, ...]:
    return ()

  @property
  def dtype(self) -> np.dtype:
    return self.type.dtype

  def _key(self) -> tuple:
    return (type(self.value).__name__, repr(self.value), self.type)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Literal) and self._key() == other._key()

  def __hash__(self) -> int:
    return hash(self._key())

  def __repr__(self) -> str:
    return f"{self.value}"


Atom = Var | Literal


@dataclasses.dataclass(frozen=True, slots=True)
class RefOperand:
  """A reference operand of an equation: the root it views, the view, and the view's dynamic operands."""
  root: Var
  view: View
  dyn: tuple[Atom, ...]

  @property
  def type(self) -> RefType:
    assert isinstance(self.root.type, RefType)
    return self.root.type

  @property
  def shape(self) -> tuple[int, ...]:
    return self.view.static_shape

  @property
  def is_whole(self) -> bool:
    """The root itself, untouched."""
    return self.view == whole_view(self.type.shape)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Block:
  """A straight line of equations. `invars` are bound by the owner (loop index, carried values)."""
  invars: tuple[Var, ...] = ()
  eqns: tuple[Eqn, ...] = ()
  outs: tuple[Atom, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Eqn:
  primitive: Primitive
  invars: tuple[Atom, ...]
  outvars: tuple[Var, ...]
  params: dict[str, Any]
  loc: Loc
  blocks: tuple[Block, ...] = ()

  @property
  def refs(self) -> tuple[RefOperand, ...]:
    """The reference operands, in the order of params["views"]."""
    out, at = [], 0
    for view in self.params.get("views", ()):
      root, n = self.invars[at], view.num_dyn
      assert isinstance(root, Var)
      out.append(RefOperand(root, view, self.invars[at + 1:at + 1 + n]))
      at += 1 + n
    return tuple(out)

  @property
  def values(self) -> tuple[Atom, ...]:
    """The operands after the references."""
    return self.invars[sum(1 + v.num_dyn for v in self.params.get("views", ())):]

  def replace(self, **changes: Any) -> Eqn:
    return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, slots=True)
class CallOptions:
  """The options of a tile_call that a pass may read. `warpgroups` counts consumers, `cluster` the CTAs of a cluster
  along each axis of the grid; `persistent` is a bool or "dynamic". With dynamic shapes each extent of the grid is a
  Size."""
  grid: tuple[int, ...]
  warpgroups: int = 1
  cluster: tuple[int, ...] | None = None
  raster: int | None = None
  persistent: bool | str = False

  @property
  def takes_tiles(self) -> bool:
    """A CTA takes the next program when it is free: programs have no CTA before that."""
    return self.persistent == "dynamic"

  @property
  def cluster_size(self) -> int:
    return math.prod(self.cluster or ())

  @property
  def launch_cluster(self) -> tuple[int, int, int] | None:
    """CTAs of a cluster along x, y, z, as the hardware counts them; the grid lies along x."""
    return (self.cluster_size, 1, 1) if self.cluster_size > 1 else None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TileGraph:
  """A traced kernel.

  Attributes:
    name: the kernel's name.
    invars: one global reference for each input leaf, then for each output leaf. An output that is aliased to an
      input is the *same* Var, standing twice.
    arg_names: the user's parameter names, one for each of `invars`.
    num_inputs: how many of `invars` are inputs.
    body: the equations.
    options: see CallOptions.
    loc: the kernel function's first line.
  """
  name: str
  invars: tuple[Var, ...]
  arg_names: tuple[str, ...]
  num_inputs: int
  body: Block
  options: CallOptions
  loc: Loc

  @property
  def outputs(self) -> tuple[Var, ...]:
    return self.invars[self.num_inputs:]

  @property
  def aliases(self) -> tuple[tuple[int, int], ...]:
    """(input index, output index) of each aliased pair."""
    first = {v: i for i, v in enumerate(self.invars[:self.num_inputs])}
    return tuple((first[v], o) for o, v in enumerate(self.outputs) if v in first)

  @property
  def size_names(self) -> tuple[str, ...]:
    """What a call decides: the names of dynamic dimensions, then of the grid's axes."""
    extents = [n for v in self.invars if isinstance(v.type, RefType) for n in v.type.shape]
    return tuple(dict.fromkeys(x for n in (*extents, *self.options.grid) if isinstance(n, Size) for x in n.names))

  def replace(self, **changes: Any) -> TileGraph:
    return dataclasses.replace(self, **changes)

  def with_hidden(self, var: Var, name: str, body: Block) -> TileGraph:
    """The graph with another body, and one more argument that it reads and writes: its last input and last output."""
    n = self.num_inputs
    invars = (*self.invars[:n], var, *self.invars[n:], var)
    names = (*self.arg_names[:n], name, *self.arg_names[n:], name)
    body = dataclasses.replace(body, invars=invars if body.invars else ())
    return self.replace(invars=invars, arg_names=names, num_inputs=n + 1, body=body)


def walk(block: Block) -> Iterator[Eqn]:
  """Every equation, outer before inner, in program order."""
  for eqn in block.eqns:
    yield eqn
    for inner in eqn.blocks:
      yield from walk(inner)


def map_block(block: Block, fn: Callable[[Eqn], Eqn]) -> Block:
  """The block with `fn` applied to every equation, inner blocks first."""
  return expand_block(block, lambda eqn: (fn(eqn),))


def expand_block(block: Block, fn: Callable[[Eqn], Iterable[Eqn]]) -> Block:
  """The block with the equations that `fn` gives for every equation, inner blocks first. An equation without blocks
  comes to `fn` as it is, so that it may be known by identity."""
  eqns: list[Eqn] = []
  for e in block.eqns:
    eqns += fn(e.replace(blocks=tuple(expand_block(b, fn) for b in e.blocks)) if e.blocks else e)
  return dataclasses.replace(block, eqns=tuple(eqns))


def substitute(block: Block, env: dict[Var, Atom]) -> Block:
  """The block with operands replaced. Binders are kept."""
  def atom(a: Atom) -> Atom:
    return env.get(a, a) if isinstance(a, Var) else a

  def eqn(e: Eqn) -> Eqn:
    return e.replace(invars=tuple(map(atom, e.invars)), blocks=tuple(substitute(b, env) for b in e.blocks))

  return dataclasses.replace(block, eqns=tuple(map(eqn, block.eqns)), outs=tuple(map(atom, block.outs)))


def copied(eqns: Iterable[Eqn], env: dict[Var, Atom]) -> list[Eqn]:
  """The equations with fresh variables; `env` replaces operands, and is extended by what they bind."""
  def atom(a: Atom) -> Atom:
    return env.get(a, a) if isinstance(a, Var) else a

  def fresh(v: Var) -> Var:
    env[v] = new = Var(v.type, v.hint)
    return new

  def block(b: Block) -> Block:
    heads = tuple(map(fresh, b.invars))
    return Block(heads, tuple(map(copy, b.eqns)), tuple(map(atom, b.outs)))

  def copy(e: Eqn) -> Eqn:
    invars, blocks = tuple(map(atom, e.invars)), tuple(map(block, e.blocks))
    return e.replace(invars=invars, blocks=blocks, outvars=tuple(map(fresh, e.outvars)))

  return list(map(copy, eqns))


def with_refs(eqn: Eqn, refs: Sequence[RefOperand], *, values: Sequence[Atom] | None = None, **params: Any) -> Eqn:
  """The equation with other reference (and value) operands."""
  invars: list[Atom] = []
  for r in refs:
    invars += [r.root, *r.dyn]
  invars += eqn.values if values is None else values
  return eqn.replace(invars=tuple(invars), params={**eqn.params, "views": tuple(r.view for r in refs), **params})


def prefixed(view: View, slot: Atom | int) -> tuple[View, tuple[Atom, ...]]:
  """A view of one slot: a leading dimension, fixed at `slot`, before the view's own; and its first dynamic operand."""
  slot = int(slot.value) if isinstance(slot, Literal) else slot  # type: ignore[arg-type]
  dynamic = () if isinstance(slot, int) else (slot,)
  shift = len(dynamic)

  def moved(x: Any) -> Any:
    return Dyn(x.index + shift) if isinstance(x, Dyn) else x

  dims = tuple(dataclasses.replace(d, start=moved(d.start), size=moved(d.size),
                                   edges=tuple((moved(a), moved(b)) for a, b in d.edges)) for d in view.dims)
  lead = ViewDim(Dyn(0) if dynamic else int(slot), 1, squeezed=True)  # type: ignore[arg-type]
  return View((lead, *dims), tuple(p + 1 for p in view.perm)), dynamic
