"""Loops, branches and their functional forms: for_loop, while_loop, cond, switch.

The statements (`for i in tt.range(n)`, `with tt.when(p)`) carry nothing: state lives in references. The functions
have jax.lax's signatures and carry nested tuples, lists and dicts of tiles.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tiletrace.core import bytecode, dtypes
from tiletrace.core.effects import Effect, OrderEffect
from tiletrace.core.errors import ControlFlowError, TileTypeError
from tiletrace.core.foreign import is_jax
from tiletrace.core.graph import Atom, Block, Eqn, Literal, Primitive, walk
from tiletrace.core.operands import literal, operand, python_number
from tiletrace.core.ops.shape import iota_p
from tiletrace.core.pytrees import LEAF, Structure, flatten, unflatten
from tiletrace.core.rules import effect_rules, effects, type_rules
from tiletrace.core.scopes import Branch, Loop, record_function
from tiletrace.core.source import Loc, user_frame, user_loc
from tiletrace.core.tile import MeshIndex, Tile
from tiletrace.core.trace import Scope, Value, bind, current
from tiletrace.core.types import Space, TileType, Type

for_loop_p = Primitive("for_loop")
while_loop_p = Primitive("while_loop")
cond_p = Primitive("cond")
switch_p = Primitive("switch")

INDEX = TileType((), dtypes.i32)
PREDICATE = TileType((), dtypes.bool_)


# Rules.

def _expect(what: str, found: Sequence[Atom], types: Sequence[Type], eqn: Eqn) -> None:
  if tuple(a.type for a in found) != tuple(types):
    raise TileTypeError(f"{eqn.primitive}: {what} is ({', '.join(str(a.type) for a in found)}), "
                        f"not ({', '.join(map(str, types))})", loc=eqn.loc)


@type_rules.register(for_loop_p)
def _for_loop_types(eqn: Eqn) -> tuple[Type, ...]:
  bounds, init, (body,) = eqn.values[:3], eqn.values[3:], eqn.blocks
  carried = tuple(a.type for a in init)
  _expect("(lo, hi, step)", bounds, (INDEX,) * 3, eqn)
  _expect("the head of the body", body.invars, (INDEX, *carried), eqn)
  _expect("the result of the body", body.outs, carried, eqn)
  return carried


@type_rules.register(while_loop_p)
def _while_loop_types(eqn: Eqn) -> tuple[Type, ...]:
  carried = tuple(a.type for a in eqn.values)
  cond, body = eqn.blocks
  _expect("the head of the condition", cond.invars, carried, eqn)
  _expect("the condition", cond.outs, (PREDICATE,), eqn)
  _expect("the head of the body", body.invars, carried, eqn)
  _expect("the result of the body", body.outs, carried, eqn)
  return carried


@type_rules.register(cond_p)
def _cond_types(eqn: Eqn) -> tuple[Type, ...]:
  _expect("the predicate", eqn.values, (PREDICATE,), eqn)
  return _branch_types(eqn, eqn.blocks if len(eqn.blocks) > 1 else (*eqn.blocks, Block()))


@type_rules.register(switch_p)
def _switch_types(eqn: Eqn) -> tuple[Type, ...]:
  _expect("the index", eqn.values, (INDEX,), eqn)
  return _branch_types(eqn, eqn.blocks)


def _branch_types(eqn: Eqn, blocks: Sequence[Block]) -> tuple[Type, ...]:
  types = tuple(a.type for a in blocks[0].outs)
  for block in blocks:
    _expect("the head of a branch", block.invars, (), eqn)
    _expect("the result of a branch", block.outs, types, eqn)
  return types


@effect_rules.register(for_loop_p, while_loop_p, cond_p, switch_p)
def block_effects(eqn: Eqn) -> tuple[Effect, ...]:
  """An equation with blocks keeps its place if anything inside does. What it reads and writes is found by `walk`."""
  inside = any(effects(e) for block in eqn.blocks for e in walk(block))
  return (OrderEffect(eqn.primitive.name),) if inside else ()


# Operands.

def integer(x: Any, what: str) -> Tile | Literal:
  """An i32 scalar from a Python or numpy integer, or an integer scalar. `what` names the argument.

  Raises:
    TileTypeError: a float, bool, tile of rank > 0, reference or anything else.
  """
  x = operand(x, what)
  if isinstance(x, Tile):
    if x.ndim or not dtypes.is_integer(x.dtype):
      raise TileTypeError(f"{what} must be an integer scalar, got {x.type}", loc=user_loc(),
                          hint="use tt.cdiv or //" if dtypes.is_float(x.dtype) else None)
    return x if x.dtype == dtypes.i32 else x.astype(dtypes.i32)
  x = python_number(x)
  if isinstance(x, (bool, float)):
    raise TileTypeError(f"{what} must be an integer, got {x}", loc=user_loc(), hint="use tt.cdiv(n, block) or //")
  return literal(x, dtypes.i32, what)


def predicate(p: Any, what: str) -> Tile | Literal:
  """A bool scalar from a Python bool or a bool scalar."""
  p = operand(p, what)
  if isinstance(p, Tile):
    if p.ndim:
      raise TileTypeError(f"{what} takes a scalar condition, got {p.type}", loc=user_loc(),
                          hint="use tt.where(mask, x, y), tt.store(ref.at[...], v, mask=mask) or tt.any(mask)")
    if p.dtype != dtypes.bool_:
      raise TileTypeError(f"{what} takes a bool, got {p.type}", loc=user_loc(), hint="compare it: x != 0")
    return p
  p = python_number(p)
  if not isinstance(p, bool):
    raise TileTypeError(f"{what} takes a bool, got {p!r}", loc=user_loc(), hint="compare it: x != 0")
  return Literal(p, dtypes.bool_)


def _leaf(x: Any, what: str, like: TileType | None = None) -> Tile | Literal:
  """A leaf of a carry or result. A Python number takes the dtype of `like` where its kind allows."""
  if not isinstance(x, (Tile, bool, int, float, np.generic)) and not is_jax(x):
    raise TileTypeError(f"{what}: a {type(x).__name__} cannot be carried or returned", loc=user_loc(),
                        hint="use nested tuples, lists and dicts of tiles and numbers; references need not be carried")
  x = operand(x, what)
  if isinstance(x, Tile):
    return x
  dtype = x.dtype if isinstance(x, np.generic) else dtypes.canonical(type(x))
  if like is not None and not like.shape and dtypes.promote(like.dtype, python_number(x)) == like.dtype \
      and not isinstance(x, np.generic):
    dtype = like.dtype
  return literal(x, dtype, what)


def _atoms(values: Sequence[Tile | Literal], what: str) -> tuple[Atom, ...]:
  trace = current()
  for value in values:
    if isinstance(value, Tile):
      trace.check_operand(value, what)
  return tuple(v.var if isinstance(v, Tile) else v for v in values)


# for

class _RangeLoop(Loop):
  def __init__(self, what: str, bounds: tuple[Any, Any, Any], kind: str, num_stages: int = 1, unroll: int = 1):
    lo, hi, step = bounds
    super().__init__(what, tuple(integer(x, f"{what}: {n}") for x, n in ((lo, "start"), (hi, "stop"), (step, "step"))))
    self.params = dict(kind=kind, num_stages=num_stages, unroll=unroll)

  def begin(self, scope: Scope) -> Value:
    frame = user_frame()
    scope.params["bounds"] = self.operands
    return self.trace.binder(INDEX, self.loc, None if frame is None else bytecode.target_name(frame))

  def end(self, scope: Scope) -> None:
    if self.params["kind"] == "pipelined" and not any(map(_is_stage_copy, walk(scope.block()))):
      self.trace.fail(ControlFlowError(
          f"{self.what} has nothing to pipeline: its body copies nothing from global to shared memory", loc=self.loc,
          hint="tt.copy(x.at[...], x_s) inside the loop, or use tt.range"))
    if "at_end" in scope.params:                             # of statements that have a say in the whole body
      scope.params["at_end"](scope.block(), self.loc)
    bind(for_loop_p, self.operands, self.params, (scope.block(),), loc=self.loc)


def _is_stage_copy(eqn: Eqn) -> bool:
  return eqn.primitive.name == "copy" and [r.type.space for r in eqn.refs] == [Space.GLOBAL, Space.SHARED]


def _static_int(x: Any, what: str, hint: str, *, least: int | None = 1) -> int:
  if isinstance(x, (bool, np.bool_)) or not isinstance(x, (int, np.integer)):
    got = str(x.type) if isinstance(x, Value) else repr(x)
    raise TileTypeError(f"{what} must be a Python int, got {got}", loc=user_loc(), hint=hint)
  if (x == 0) if least is None else (x < least):
    raise TileTypeError(f"{what} is {x}", loc=user_loc(), hint=hint)
  return int(x)


def range_(start: Any, stop: Any = None, step: Any = 1, *, unroll: int = 1) -> Loop:
  """A loop over `range(start, stop, step)` that is recorded once: `for i in tt.range(n):`, i an i32 scalar.

  Args:
    start: first index; with one argument, the stop. Python int or integer scalar.
    stop: end, exclusive. Python int or integer scalar.
    step: Python int, not 0; or an integer scalar (tt.num_ctas(), in a persistent loop written by hand): one that is 0
      or negative when the kernel runs makes a loop without iterations.
    unroll: how many iterations the compiler puts in one; Python int.
  Raises:
    TileTypeError: a bound is a float, a step is no integer or 0, unroll is not a Python int.
    ControlFlowError: the body breaks, returns, or depends on Python state that changes.

  Example:
    >>> def kernel(x, y):
    ...   y[0] = 0.
    ...   for i in tt.range(1, 4):
    ...     y[i] = x[i] - x[i - 1]
    >>> x = jnp.array([1., 4., 9., 16.])
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
    Array([0., 3., 5., 7.], dtype=float32)
  """
  start, stop = (0, start) if stop is None else (start, stop)
  if not isinstance(step, Value):
    step = _static_int(step, "tt.range: step", "step is not 0", least=None)
  return _RangeLoop("tt.range", (start, stop, step), "range",
                    unroll=_static_int(unroll, "tt.range: unroll", "unroll=1 leaves the loop as it is"))


def pipelined(start: Any, stop: Any = None, *, num_stages: int) -> Loop:
  """`tt.range` whose copies from global to shared memory run ahead, through rings of `num_stages` slots.

  Args:
    start, stop: as for tt.range.
    num_stages: slots of each ring, Python int >= 1.
  Raises:
    ControlFlowError: the body copies nothing from global to shared memory.
    TileTypeError: num_stages < 1.

  Example:
    >>> def kernel(x, y):
    ...   s = tt.alloc_shared((64,), x.dtype)
    ...   total = tt.alloc_fragment((64,), x.dtype)
    ...   total[...] = 0
    ...   for k in tt.pipelined(4, num_stages=2):
    ...     tt.copy(x.at[tt.block(k, 64)], s)
    ...     total[...] += s[...]
    ...   y[...] = tt.sum(total[...], keepdims=True)
    >>> x = jnp.arange(256.)
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((1,), x.dtype), grid=1)(x)
    Array([32640.], dtype=float32)
  """
  start, stop = (0, start) if stop is None else (start, stop)
  num_stages = _static_int(num_stages, "tt.pipelined: num_stages", "the slots of each ring, at least 1")
  return _RangeLoop("tt.pipelined", (start, stop, 1), "pipelined", num_stages)


class _ParallelLoop(Loop):
  def __init__(self, extents: tuple[int, ...]):
    super().__init__("tt.parallel", ())
    self.extents = extents

  def begin(self, scope: Scope) -> Any:
    rank = len(self.extents)
    indices = []
    for axis, extent in enumerate(self.extents):
      shape = tuple(extent if d == axis else 1 for d in range(rank))
      (tile,) = bind(iota_p, (), dict(shape=shape, dimension=axis), loc=self.loc)
      assert isinstance(tile, Tile)
      indices.append(MeshIndex(tile, axis, self.extents, 0))
    return indices[0] if rank == 1 else tuple(indices)

  def end(self, scope: Scope) -> None:
    self.trace.scope.eqns.extend(scope.eqns)


def parallel(*extents: int) -> Loop:
  """All elements at once: `for i, j in tt.parallel(m, n):` binds i32 tiles of shape [m, 1] and [1, n].

  `ref[i, j]`, `ref[i0 + i, j]`, `ref[j, i]` and `ref[j]` are blocks of `ref` that broadcast like the indices.

  Args:
    extents: Python ints >= 1. One extent binds a tile of rank 1.

  Example:
    >>> def kernel(x, y):
    ...   for i, j in tt.parallel(2, 3):
    ...     y[j, i] = x[i, j]
    >>> x = jnp.arange(6.).reshape(2, 3)
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((3, 2), x.dtype), grid=1)(x)
    Array([[0., 3.],
           [1., 4.],
           [2., 5.]], dtype=float32)
  """
  hint = "the extents are static: for i, j in tt.parallel(64, 128)"
  if not extents:
    raise TileTypeError("tt.parallel takes one extent or more", loc=user_loc(), hint=hint)
  return _ParallelLoop(tuple(_static_int(n, f"tt.parallel: extent {k}", hint) for k, n in enumerate(extents)))


# with

class When(Branch):
  """What tt.when returns."""

  def __init__(self, condition: Tile | Literal):
    super().__init__("tt.when")
    if isinstance(condition, Tile):
      self.trace.check_operand(condition, "tt.when")
    self.condition = condition

  def end(self, scope: Scope) -> None:
    if isinstance(self.condition, Tile):
      bind(cond_p, (self.condition,), {}, (scope.block(),), loc=self.loc)
    elif self.condition.value:
      self.trace.scope.eqns.extend(scope.eqns)

  def otherwise(self) -> When:
    """The branch for the opposite condition. Stands after this one: `with w.otherwise():`."""
    if self.scope is None or self.scope.alive:
      self.trace.fail(ControlFlowError("otherwise() stands after its tt.when, not inside", loc=user_loc(),
                                       also=("the tt.when is at", self.loc),
                                       hint="with tt.when(p) as w: ...\n        with w.otherwise(): ..."))
    if isinstance(self.condition, Tile):
      return When(~self.condition)
    return When(Literal(not self.condition.value, dtypes.bool_))


def when(condition: Any) -> When:
  """A branch: `with tt.when(p):`, or `@tt.when(p)` on a function without arguments.

  Args:
    condition: a bool scalar, or a Python bool; then the body is recorded and checked, and kept if it is True.
  Raises:
    TileTypeError: not a bool scalar.
    ControlFlowError: break, continue or return leaves the block; a name rebound in it is read later.

  Example:
    >>> def kernel(x, y):
    ...   with tt.when(x[0] > 0) as w:
    ...     y[...] = x[...]
    ...   with w.otherwise():
    ...     y[...] = -x[...]
    >>> x = jnp.array([-1., 2.])
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
    Array([ 1., -2.], dtype=float32)
  """
  return When(predicate(condition, "tt.when"))


# Functions.

def _results(out: Any, what: str, who: str, structure: Structure, types: Sequence[TileType]) -> tuple[Atom, ...]:
  """What a body returned, checked against the carry."""
  leaves, found = flatten(out)
  if found != structure:
    raise TileTypeError(f"{what}: {who} returns {found}, the carry is {structure}", loc=user_loc(),
                        hint="return the carry's structure: tuples, lists and dicts must match")
  values = [_leaf(x, what, like) for x, like in zip(leaves, types)]
  for n, (value, type) in enumerate(zip(values, types)):
    if value.type != type:
      leaf = "the carry" if structure == LEAF else f"leaf {n} of the carry"
      raise TileTypeError(f"{what}: {leaf} is {type} at the start and {value.type} after {who}", loc=user_loc(),
                          hint="match them with .astype or a broadcast")
  return _atoms(values, what)


def _carry(init: Any, what: str) -> tuple[list[Tile | Literal], list[TileType], Structure]:
  leaves, structure = flatten(init)
  values = [_leaf(x, f"{what}: init") for x in leaves]
  return values, [v.type for v in values], structure


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Any) -> Any:
  """jax.lax.fori_loop: `carry = body_fun(i, carry)` for i in [lower, upper); returns the last carry.

  Args:
    lower, upper: Python ints or integer scalars.
    body_fun: (i, carry) -> carry, of the same structure, shapes and dtypes. Called twice.
    init_val: nested tuples, lists and dicts of tiles and numbers.
  Raises:
    TileTypeError: the carry changes its structure or a type.
    ControlFlowError: the body depends on Python state that changes.

  Example:
    >>> def kernel(x, y):
    ...   y[...] = tt.fori_loop(0, 10, lambda i, c: c + i * x[...], tt.zeros((2,)))
    >>> x = jnp.array([1., 2.])
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
    Array([45., 90.], dtype=float32)
  """
  what, loc, trace = "tt.fori_loop", user_loc(), current()
  bounds = (integer(lower, f"{what}: lower"), integer(upper, f"{what}: upper"), Literal(1, dtypes.i32))
  init, types, structure = _carry(init_val, what)

  def body() -> tuple[Atom, ...]:
    index, *carry = [trace.binder(t, loc) for t in (INDEX, *types)]
    trace.scope.params["bounds"] = bounds
    return _results(body_fun(index, unflatten(structure, carry)), what, "the body", structure, types)

  block = record_function(what, loc, body, twice=True)
  params = dict(kind="fori", num_stages=1, unroll=1)
  return unflatten(structure, bind(for_loop_p, (*bounds, *init), params, (block,), loc=loc))


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
  """jax.lax.while_loop: `while cond_fun(carry): carry = body_fun(carry)`; returns the last carry.

  Args:
    cond_fun: carry -> bool scalar. Called twice.
    body_fun: carry -> carry, of the same structure, shapes and dtypes. Called twice.
    init_val: nested tuples, lists and dicts of tiles and numbers.

  Example:
    >>> def kernel(x, y):
    ...   y[...] = tt.while_loop(lambda c: tt.max(c) < 100, lambda c: 2 * c, x[...])
    >>> x = jnp.array([1., 3.])
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
    Array([ 64., 192.], dtype=float32)
  """
  what, loc, trace = "tt.while_loop", user_loc(), current()
  init, types, structure = _carry(init_val, what)

  def carry() -> Any:
    return unflatten(structure, [trace.binder(t, loc) for t in types])

  def condition() -> tuple[Atom, ...]:
    return _atoms((predicate(cond_fun(carry()), f"{what}: cond_fun"),), what)

  def body() -> tuple[Atom, ...]:
    return _results(body_fun(carry()), what, "the body", structure, types)

  blocks = (record_function(what, loc, condition, twice=True), record_function(what, loc, body, twice=True))
  return unflatten(structure, bind(while_loop_p, init, {}, blocks, loc=loc))


def _branches(what: str, loc: Loc, functions: Sequence[Callable[..., Any]],
              operands: Sequence[Any]) -> tuple[list[Block], list[list[Any]], Structure]:
  """Records each function: blocks, the leaves each returned, and their structure.

  A Python number that one returns takes the type that another gives the same leaf.
  """
  outs: list[list[Any]] = []
  structures: list[Structure] = []

  def record(fn: Callable[..., Any]) -> Block:
    def body() -> tuple[Atom, ...]:
      leaves, structure = flatten(fn(*operands))
      outs.append(leaves)
      structures.append(structure)
      return _atoms([v for v in (_leaf(x, what) for x in leaves) if isinstance(v, Tile)], what)
    return record_function(what, loc, body, branch=True)

  blocks = [record(fn) for fn in functions]
  if any(s != structures[0] for s in structures):
    raise TileTypeError(f"{what}: the branches return {' and '.join(map(str, structures))}", loc=loc,
                        hint="return the same structure from each")
  strong = [next((x.type for x in column if isinstance(x, Tile)), None) for column in zip(*outs)]
  values = [[_leaf(x, what, like) for x, like in zip(leaves, strong)] for leaves in outs]
  types = [tuple(v.type for v in row) for row in values]
  if any(t != types[0] for t in types):
    said = " and ".join(f"({', '.join(map(str, t))})" for t in types)
    raise TileTypeError(f"{what}: the branches return {said}", loc=loc, hint="match them with .astype or a broadcast")
  made = [Block((), b.eqns, tuple(v.var if isinstance(v, Tile) else v for v in row)) for b, row in zip(blocks, values)]
  return made, outs, structures[0]


def _inline(block: Block, leaves: Sequence[Any], structure: Structure, loc: Loc) -> Any:
  """The results of a branch that is known to be taken."""
  trace = current()
  trace.scope.eqns.extend(block.eqns)
  return unflatten(structure, [trace.value(x.var, loc) if isinstance(x, Tile) else x for x in leaves])


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any) -> Any:
  """jax.lax.cond: `true_fun(*operands) if pred else false_fun(*operands)`.

  Args:
    pred: a bool scalar, or a Python bool; then both functions are recorded and one is kept.
    true_fun, false_fun: return the same structure, shapes and dtypes.
    operands: anything, references too.

  Example:
    >>> def kernel(x, y):
    ...   y[...] = tt.cond(x[0] > 0, lambda: x[...], lambda: -x[...])
    >>> x = jnp.array([-1., 2.])
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
    Array([ 1., -2.], dtype=float32)
  """
  loc = user_loc()
  p = predicate(pred, "tt.cond")
  blocks, leaves, structure = _branches("tt.cond", loc, (true_fun, false_fun), operands)
  if isinstance(p, Literal):
    taken = 0 if p.value else 1
    return _inline(blocks[taken], leaves[taken], structure, loc)
  return unflatten(structure, bind(cond_p, (p,), {}, tuple(blocks), loc=loc))


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
  """jax.lax.switch: `branches[clamp(index, 0, len(branches) - 1)](*operands)`.

  Args:
    index: Python int or integer scalar.
    branches: functions that return the same structure, shapes and dtypes.
    operands: anything, references too.

  Example:
    >>> def kernel(x, y):
    ...   y[...] = tt.switch(x[0], (lambda: x[...], lambda: 2 * x[...], lambda: -x[...]))
    >>> x = jnp.array([1, 4])
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
    Array([2, 8], dtype=int32)
  """
  loc = user_loc()
  i = integer(index, "tt.switch: index")
  if not branches:
    raise TileTypeError("tt.switch: branches is empty", loc=loc)
  blocks, leaves, structure = _branches("tt.switch", loc, branches, operands)
  if isinstance(i, Literal):
    taken = min(max(int(i.value), 0), len(blocks) - 1)
    return _inline(blocks[taken], leaves[taken], structure, loc)
  return unflatten(structure, bind(switch_p, (i,), {}, tuple(blocks), loc=loc))
