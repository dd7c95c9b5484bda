"""Recording a kernel: the trace, its stack of scopes, abstract values, and `bind`.

A kernel runs once as ordinary Python with abstract values. Every operation goes through `bind`, which appends an
equation to the innermost open scope; loops, branches and roles open and close scopes (scopes.py).
"""
from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tiletrace.core.errors import ControlFlowError, ScopeError, TileTraceError
from tiletrace.core.graph import Atom, Block, CallOptions, Eqn, Literal, Primitive, Var
from tiletrace.core.rules import type_rules
from tiletrace.core.source import Loc, is_user_file, user_frame, user_loc
from tiletrace.core.types import RefType, Space, TileType, Type

_current: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("tiletrace_trace", default=None)
W = TypeVar("W", bound=Callable[..., Any])


class Scope:
  """A block that is being recorded.

  Attributes:
    what: the construct in the user's words, e.g. "tt.range".
    loc: where it stands. None for the kernel itself.
    role: the innermost scope that narrows the set of threads (tt.warpgroup, tt.elect), None for all threads.
    params: what the construct tells the operations inside it (the warpgroups of a role, the bounds of a loop).
    alive: still open. A value of a closed scope may not be used.
    repeated: the first of two recordings of a loop's body, while the second is under way.
  """
  __slots__ = ("alive", "eqns", "invars", "loc", "params", "repeated", "role", "what")

  def __init__(self, what: str, loc: Loc | None, role: Scope | None, params: dict[str, Any]):
    self.what, self.loc, self.role, self.params = what, loc, role, params
    self.invars: list[Var] = []
    self.eqns: list[Eqn] = []
    self.alive, self.repeated = True, False

  def block(self, outs: Sequence[Atom] = ()) -> Block:
    return Block(tuple(self.invars), tuple(self.eqns), tuple(outs))

  def __str__(self) -> str:
    if self.loc is None:
      return self.what
    return f"{self.what} at line {self.loc.line}" + (", in the previous iteration," if self.repeated else "")


class Value:
  """An abstract value, reference or barrier of a running trace. Base of Tile, Ref and BarrierArray.

  Attributes:
    var: the variable that stands for it in equations. For a view, the root's.
    scope: where `var` was bound.
    loc: the user's line that made it.
  """
  __slots__ = ("__weakref__", "loc", "scope", "trace", "var")

  def __init__(self, trace: Trace, scope: Scope, var: Var, loc: Loc):
    self.trace, self.scope, self.var, self.loc = trace, scope, var, loc

  @property
  def type(self) -> Type:
    return self.var.type


_wrappers: dict[type, Callable[[Trace, Scope, Var, Loc], Value]] = {}


def wrapper(type_class: type) -> Callable[[W], W]:
  """`@wrapper(TileType)`: how a variable of that type becomes a Value, (trace, scope, var, loc) -> Value."""
  def add(make: W) -> W:
    assert type_class not in _wrappers, type_class
    _wrappers[type_class] = make
    return make
  return add


class Trace:
  """The state of one kernel's recording.

  Attributes:
    name: the kernel's name.
    options: the call's options (grid, warpgroups, ...).
    root: the kernel's own scope; its `invars` are the arguments.
    stack: the open scopes, outermost first.
    made: loop and branch objects, to find those that were never entered.
    pending: the first error that could not be raised where it arose; every later operation raises it.
    shadow: whether the body of a loop is being recorded for the second time.
    closed: the kernel has ended; finalisers do nothing any more.
  """

  def __init__(self, name: str, options: CallOptions):
    self.name, self.options = name, options
    self.root = Scope(f"kernel {name}", None, None, {})
    self.stack = [self.root]
    self.made: list[Any] = []
    self.pending: TileTraceError | None = None
    self.shadow: object | None = None
    self.closed = False

  @property
  def scope(self) -> Scope:
    return self.stack[-1]

  def value(self, var: Var, loc: Loc) -> Value:
    """The user's object for a variable that is bound in the current scope."""
    return _wrappers[type(var.type)](self, self.scope, var, loc)

  def binder(self, type: Type, loc: Loc, hint: str | None = None) -> Value:
    """A new variable bound by the head of the current scope: an argument, a loop's index, a carried value."""
    var = Var(type, hint)
    self.scope.invars.append(var)
    return self.value(var, loc)

  def raise_pending(self) -> None:
    if self.pending is not None:
      raise self.pending

  def fail(self, error: TileTraceError) -> None:
    """Raises `error`, and again at the end should the kernel catch it."""
    self.pending = self.pending or error
    raise error

  def open(self, what: str, loc: Loc, *, role: bool = False, **params: Any) -> Scope:
    self.raise_pending()
    scope = Scope(what, loc, self.scope.role, params)
    if role:
      scope.role = scope
    self.stack.append(scope)
    return scope

  def close(self, scope: Scope) -> None:
    """Closes the innermost scope, which must be `scope`."""
    self.raise_pending()
    if self.scope is not scope:
      self.fail(_left_open(self.scope))
    self.stack.pop().alive = False

  def abandon(self, scope: Scope, error: TileTraceError) -> None:
    """Leaves `scope` and all inside it, without an equation; `error` is raised later. Safe in a finaliser."""
    if self.closed or scope not in self.stack:
      return
    while True:
      top = self.stack.pop()
      top.alive = False
      if top is scope:
        break
    self.pending = self.pending or error

  def finish(self) -> None:
    """The end of the kernel: every scope closed, every loop and branch entered, no error kept back."""
    self.raise_pending()
    if len(self.stack) > 1:
      raise _left_open(self.scope)
    for construct in self.made:
      if not construct.entered:
        raise ControlFlowError(f"{construct.what} was created but never used", loc=construct.loc,
                               hint=construct.usage)

  def check_operand(self, value: Value, what: str) -> None:
    """The operand belongs to this trace, to a scope that is open, and to the threads that are active."""
    if value.trace is not self:
      raise ScopeError(f"an operand of {what} belongs to another kernel's trace", loc=user_loc(),
                       also=("it was made at", value.loc),
                       hint="a value cannot be kept in a global, a cache or a list from one kernel to the next")
    if not value.scope.alive:
      raise _escaped(value)
    if value.scope.role is not self.scope.role and _is_distributed(value.type):
      raise _wrong_threads(value, self.scope)


def _left_open(scope: Scope) -> ControlFlowError:
  return ControlFlowError(f"{scope} was left before its end", loc=scope.loc,
                          hint="the body of a traced loop or branch is recorded once, to its end: "
                               "leave early with tt.while_loop, or mask the work with tt.when")


def _escaped(value: Value) -> ScopeError:
  name = name_of(value)
  n = (name or "x").strip("'")
  if isinstance(value.type, RefType):
    hint = f"allocate it before {value.scope.what}"
  elif value.scope.role is value.scope:
    hint = "pass it to other threads through shared memory"
  elif value.scope.params.get("branch"):
    hint = (f"tile values are immutable: write {n} = tt.where(p, new, {n}) or tt.cond, "
            "or store into a fragment: ref[...] = new")
  else:
    hint = ("keep it in a fragment (acc = tt.alloc_fragment(...); acc[...] = ...), "
            "or carry it: tt.fori_loop(lo, hi, body, init)")
  return ScopeError(f"{name or 'a value'} was made inside {value.scope} and is used outside it", loc=user_loc(),
                    also=("it was made at", value.loc), hint=hint)


def _is_distributed(type: Type) -> bool:
  """Spread over the threads of a scope. Scalars, shared memory and barriers are seen alike by every thread."""
  if isinstance(type, TileType):
    return bool(type.shape)
  return isinstance(type, RefType) and type.space is Space.FRAGMENT


def _wrong_threads(value: Value, scope: Scope) -> ScopeError:
  owner = value.scope.role or value.scope
  return ScopeError(f"{name_of(value) or 'a value'} belongs to the threads of {owner} "
                    f"and is used by those of {scope.role or scope}", loc=user_loc(),
                    also=("it was made at", value.loc),
                    hint="make it where it is used, or pass it through shared memory")


def name_of(value: object) -> str | None:
  """The user's name of an object, in quotes, searched in the user's frames. For error messages only."""
  frame = user_frame(2)
  while frame is not None and is_user_file(frame.f_code.co_filename):
    names = frame.f_locals
    for same in (lambda v: v is value,
                 lambda v: isinstance(v, Value) and isinstance(value, Value) and v.var is value.var):
      for name, held in names.items():
        if same(held):
          return f"'{name}'"
    frame = frame.f_back
  return None


def current() -> Trace:
  """The trace of the kernel that is running. Raises TileTraceError outside a kernel."""
  trace = _current.get()
  if trace is None:
    raise TileTraceError("a tile operation was applied outside a kernel", loc=user_loc(),
                         hint="call it in a function given to tt.tile_call; outside kernels use jax.numpy")
  return trace


def bind(primitive: Primitive, operands: Sequence[Value | Literal], params: dict[str, Any],
         blocks: tuple[Block, ...] = (), *, loc: Loc | None = None) -> tuple[Value, ...]:
  """Appends an equation to the open scope.

  Args:
    primitive: the operation.
    operands: in the order of the primitive's `invars`; a reference stands for its root.
    params: static parameters, hashable.
    blocks: recorded bodies.
    loc: the user's line; default: the innermost user frame's.
  Returns:
    one Value for each result type that the primitive's type rule gives.
  """
  trace = current()
  trace.raise_pending()
  invars: list[Atom] = []
  for operand in operands:
    if isinstance(operand, Value):
      trace.check_operand(operand, primitive.name)
      invars.append(operand.var)
    else:
      assert isinstance(operand, Literal), operand
      invars.append(operand)
  loc = loc or user_loc()
  eqn = Eqn(primitive, tuple(invars), (), params, loc, blocks)
  outvars = tuple(map(Var, type_rules[primitive](eqn)))
  trace.scope.eqns.append(eqn.replace(outvars=outvars) if outvars else eqn)
  return tuple([trace.value(v, loc) for v in outvars])


def trace_kernel(fn: Callable[..., Any], make_args: Callable[[Trace], Sequence[Any]], *, name: str,
                 options: CallOptions) -> tuple[Block, Any]:
  """Records `fn(*make_args(trace))`.

  Args:
    fn: the kernel.
    make_args: makes the positional arguments, with `trace.binder(type, loc, hint)` for each reference.
    name: the kernel's name.
    options: the call's options.
  Returns:
    the kernel's block, whose `invars` are the references that `make_args` bound, and what `fn` returned.
  """
  trace = Trace(name, options)
  token = _current.set(trace)
  try:
    result = fn(*make_args(trace))
    trace.finish()
  except TileTraceError:
    raise
  except Exception as error:
    error.add_note(f"while tracing kernel {name}")
    if any(name in str(error) for name in ("tiletrace.", "'Tile'", "'Ref'")):
      error.add_note("jax and numpy functions take no tiles: use the tt function, or tt.call_jax(fn, *tiles)")
    raise
  finally:
    trace.closed = True
    _current.reset(token)
  return trace.root.block(), result
