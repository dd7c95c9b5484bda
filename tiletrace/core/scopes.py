"""Scopes that a kernel opens in Python: loops (`for`), branches and roles (`with`), traced functions.

Python hides a jump from an iterator and from a context manager, so each construct has several nets: the order in which
scopes close, a finaliser for a loop that is dropped, the instruction that iterates, a second recording of each loop's
body, the jumps in the source of a `with`, names rebound in a branch, and exceptions that pass through.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from tiletrace.core import bytecode
from tiletrace.core.errors import ControlFlowError, ScopeError, TileTypeError
from tiletrace.core.graph import Atom, Block, Eqn, Literal, Var
from tiletrace.core.source import Loc, is_user_file, user_frame, user_loc
from tiletrace.core.trace import Scope, Trace, Value, current
from tiletrace.core.types import RefType, TileType

CONDITION, TRIPS = "whatever the condition is", "whatever the trip count is"
_STATIC = (bool, int, float, complex, str, bytes, type(None))


class Loop:
  """An iterable, not a generator: it can be reused, has no state, and only a `for` statement may consume it.

  Subclasses say how a recording of the body begins (`begin` returns the index) and what it becomes (`end`).
  """
  entered = False

  def __init__(self, what: str, operands: Sequence[Value | Literal]):
    self.what, self.operands, self.loc, self.trace = what, tuple(operands), user_loc(), current()
    self.usage = f"write `for i in {what}(...):`"
    for operand in self.operands:
      if isinstance(operand, Value):
        self.trace.check_operand(operand, what)
    self.trace.made.append(self)

  def begin(self, scope: Scope) -> Any:
    raise NotImplementedError

  def end(self, scope: Scope) -> None:
    raise NotImplementedError

  def __iter__(self) -> LoopIterator:
    frame = user_frame()
    assert frame is not None
    _check_trace(self.trace, self.what, self.loc)
    by = bytecode.consumer(frame)
    if by is not None:
      self.trace.fail(ControlFlowError(
          f"the body of {self.what} is recorded once, so it cannot be consumed {by}", loc=self.loc,
          hint=f"write `for i in {self.what}(...):` in the kernel or in a function that takes the body; "
               "Python's range() unrolls and can be zipped"))
    self.entered = True
    return LoopIterator(self, dict(frame.f_locals))

  def _refuse(self, *_: object) -> NoReturn:
    self.trace.fail(ControlFlowError(f"{self.what} has no length and cannot be indexed, reversed, tested or entered",
                                     loc=user_loc(), hint=self.usage))
    raise AssertionError

  # Not TypeErrors: list() swallows one from __len__.
  __len__ = __length_hint__ = __getitem__ = __contains__ = __reversed__ = __bool__ = __next__ = _refuse
  __enter__ = __exit__ = _refuse


class LoopIterator:
  """Runs the body twice. The second recording sees what Python state the first one left behind: rebound names,
  attributes, lists, iterators, globals. If that reaches an operation, the two differ, or an operand belongs to the
  first recording, whose scope is closed. Loops inside a second recording run once, so depth d costs d + 1 passes."""
  __slots__ = ("first", "loop", "names", "running", "scope", "trace")

  def __init__(self, loop: Loop, names: dict[str, Any]):
    self.loop, self.trace, self.names = loop, loop.trace, names
    self.scope: Scope | None = None
    self.first: Scope | None = None
    self.running = False

  def __next__(self) -> Any:
    trace, loop = self.trace, self.loop
    if self.scope is None:
      return self._record()
    trace.close(self.scope)
    if SECOND_PASS and self.first is None and trace.shadow is None:
      self.first, trace.shadow = self.scope, self
      self.first.repeated = True
      return self._record()
    self.running = False
    if self.first is not None:
      trace.shadow, self.first.repeated = None, False
      compare(trace, self.first.block(), self.scope.block(), loop.what, loop.loc)
    frame = user_frame()
    assert frame is not None
    check_rebound_names(trace, loop.what, loop.loc, self.names, frame, TRIPS)
    loop.end(self.first or self.scope)
    raise StopIteration

  def _record(self) -> Any:
    self.running = True
    self.scope = self.trace.open(self.loop.what, self.loop.loc)
    return self.loop.begin(self.scope)

  def __del__(self) -> None:
    # break, return and exceptions drop the iterator at their own instruction. Nothing can be raised from here.
    trace, scope = self.trace, self.scope
    if not self.running or trace.closed or scope is None:
      return
    if trace.shadow is self:
      trace.shadow = None
    frame = user_frame()
    loc = self.loop.loc if frame is None else Loc(frame.f_code, frame.f_lasti)
    trace.abandon(scope, ControlFlowError(
        f"{self.loop.what} was left before its end (break, return, or an exception that was caught)",
        loc=loc, also=("the loop is at", self.loop.loc),
        hint="the trip count is not known while tracing: use tt.while_loop, bound the range, or mask with tt.when"))


SECOND_PASS = True  # switched off only by the tests that show what it catches


class Branch:
  """A `with` block, or a decorated function, whose body is recorded in a scope: tt.when and the roles.

  Subclasses say what the recording becomes (`end`).
  """
  entered = False
  role = False
  whatever = CONDITION  # ends the sentence "a jump would leave it ..."

  def __init__(self, what: str, **params: Any):
    self.what, self.params, self.loc, self.trace = what, params, user_loc(), current()
    self.usage = f"write `with {what}(...):`, or decorate a function with it"
    self.scope: Scope | None = None
    self.names: dict[str, Any] = {}
    self.enter_loc, self.by_statement = self.loc, False
    self.trace.made.append(self)

  def begin(self) -> None:
    """Refuses a place where the block may not stand."""

  def end(self, scope: Scope) -> None:
    raise NotImplementedError

  def __bool__(self) -> NoReturn:
    self.trace.fail(ControlFlowError(f"{self.what}(...) opens a block, it is not a condition", loc=user_loc(),
                                     hint=self.usage))
    raise AssertionError

  def _open(self, frame: FrameType) -> Scope:
    _check_trace(self.trace, self.what, self.loc)
    if self.scope is not None and self.scope.alive:
      self.trace.fail(ControlFlowError(f"this {self.what} is open already", loc=user_loc(),
                                       also=("it was made at", self.loc), hint="make another one"))
    self.begin()
    self.entered, self.names = True, dict(frame.f_locals)
    self.scope = self.trace.open(f"`with {self.what}`", self.loc, role=self.role, branch=True, **self.params)
    return self.scope

  def _close(self, frame: FrameType) -> None:
    assert self.scope is not None
    self.trace.close(self.scope)
    check_rebound_names(self.trace, f"`with {self.what}`", self.loc, self.names, frame, self.whatever)
    self.names = {}
    self.end(self.scope)

  def __enter__(self) -> Self:
    frame = user_frame()
    assert frame is not None
    self.enter_loc, self.by_statement = Loc(frame.f_code, frame.f_lasti), frame is sys._getframe(1)
    jumps = bytecode.jumps_out(frame.f_code, frame.f_lasti)
    if jumps is None and bytecode.is_generator(frame.f_code):
      self._refuse_jump("yield", self.loc)
    if jumps:
      self._refuse_jump(*jumps[0])
    self._open(frame)
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               traceback: TracebackType | None) -> None:
    assert self.scope is not None
    if kind is not None:
      self.trace.abandon(self.scope, _caught(self.what, _raised_at(traceback) or self.loc))
      return
    frame = user_frame()
    assert frame is not None
    if self._left_by_jump(frame):
      # An exception that is in flight must not be replaced by ours; here there is none.
      self._refuse_jump("jump", self.loc)
    self._close(frame)

  def _left_by_jump(self, frame: FrameType) -> bool:
    """The check of code without source. Jumps out of an ExitStack cannot be seen."""
    code, enter = self.enter_loc.code, self.enter_loc.lasti
    return (self.by_statement and bytecode.jumps_out(code, enter) is None
            and bytecode.leaves_early(code, enter, frame.f_lasti))

  def _refuse_jump(self, kind: str, loc: Loc) -> None:
    hint = {
      "continue": "put the rest of the body under the opposite condition",
      "break": "use tt.while_loop, or put the rest of the body under the opposite condition",
      "yield": "do not yield inside a traced block",
      "return": "put the rest of the kernel under the opposite condition, or in a function that is called under it",
    }.get(kind, f"put the rest under the opposite condition, or decorate a function with @{self.what}(...)")
    name = "a jump (continue, break or return)" if kind == "jump" else f"`{kind}`"
    self.trace.fail(ControlFlowError(f"{name} inside `with {self.what}` would leave it {self.whatever}", loc=loc,
                                     hint=hint))

  def __call__(self, fn: Callable[[], None]) -> None:
    """The decorator form: `return` leaves only the function, break and continue are syntax errors."""
    frame = user_frame()
    assert frame is not None
    scope = self._open(frame)
    with _poisoned_by_exceptions(self.trace, scope, self.what, self.loc):
      out = fn()
    if out is not None:
      raise TileTypeError(f"the function under @{self.what} must return None, not {type(out).__name__}", loc=self.loc,
                          hint="tt.cond chooses between values; or store into a fragment: ref[...] = v")
    self._close(frame)


def _check_trace(trace: Trace, what: str, loc: Loc) -> None:
  if current() is not trace:
    raise ScopeError(f"this {what} belongs to another kernel's trace", loc=user_loc(), also=("it was made at", loc),
                     hint="make it in the kernel that uses it")


def _caught(what: str, loc: Loc) -> ControlFlowError:
  return ControlFlowError(f"an exception left {what} and was caught: the recording is incomplete", loc=loc,
                          hint="do not catch exceptions around traced loops and branches; catch them inside")


def _raised_at(traceback: TracebackType | None) -> Loc | None:
  found = None
  while traceback is not None:
    if is_user_file(traceback.tb_frame.f_code.co_filename):
      found = Loc(traceback.tb_frame.f_code, traceback.tb_lasti)
    traceback = traceback.tb_next
  return found


@contextlib.contextmanager
def _poisoned_by_exceptions(trace: Trace, scope: Scope, what: str, loc: Loc) -> Iterator[None]:
  try:
    yield
  except BaseException as error:
    trace.abandon(scope, _caught(what, _raised_at(error.__traceback__) or loc))
    raise


def check_rebound_names(trace: Trace, what: str, loc: Loc, before: dict[str, Any], frame: FrameType,
                        whatever: str) -> None:
  """Refuses a name of the frame that `what` gave another meaning, once and for all, and that is read later.

  Args:
    trace, what, loc: the construct that ends.
    before: the frame's names when it began.
    frame: the frame, at its end.
    whatever: ends the sentence, e.g. "whatever the condition is".
  """
  now = frame.f_locals
  changed = {}
  for name, old in before.items():
    new = now.get(name, old)
    if new is old or same_static(old, new) or isinstance(new, (Branch, Loop)):
      continue
    if isinstance(new, Value) and not new.scope.alive:
      continue  # a use of it is refused at its own line
    changed[name] = (old, new)
  for name in bytecode.read_later(frame, changed):
    old, new = changed[name]
    if isinstance(new, Value):
      how = f"'{name}' is rebound to another {'reference' if isinstance(new.type, RefType) else 'value'}"
    else:
      how = f"'{name}' was {old!r} and is rebound to {new!r}"
    hint = f"choose '{name}' before"
    if whatever == TRIPS:
      hint = f"keep '{name}' in a reference, carry it with tt.fori_loop, or compute it before or after the loop"
    elif isinstance(new.type, TileType) if isinstance(new, Value) else isinstance(new, (bool, int, float)):
      hint = f"use {name} = tt.where(p, {'new' if isinstance(new, Value) else repr(new)}, {name})"
    trace.fail(ControlFlowError(f"{how} inside {what}, and read after it: it would change {whatever}", loc=loc,
                                hint=hint))


def same_static(p: Any, q: Any) -> bool:
  """Equal as static parameters: `1`, `True` and `1.0` differ, NaN equals NaN."""
  if p is q:
    return True
  if type(p) is not type(q):
    return False
  if isinstance(p, tuple):
    return len(p) == len(q) and all(map(same_static, p, q))
  return isinstance(p, _STATIC) and bool(p == q or (p != p and q != q))


def record_function(what: str, loc: Loc, body: Callable[[], Sequence[Atom]], *, twice: bool = False,
                    branch: bool = False) -> Block:
  """Records `body()` in a scope of its own. It binds the block's head itself and returns the block's results.

  Args:
    what: the construct in the user's words.
    loc: its line.
    body: called once, or twice.
    twice: the block may run again after itself: a second recording must equal the first.
    branch: the block runs or does not; a message then proposes a choice between values.
  """
  trace, frame = current(), user_frame()
  assert frame is not None
  names = dict(frame.f_locals)

  def record() -> tuple[Scope, Block]:
    scope = trace.open(what, loc, branch=branch)
    with _poisoned_by_exceptions(trace, scope, what, loc):
      outs = body()
      trace.close(scope)
    return scope, scope.block(outs)

  scope, block = record()
  if twice and SECOND_PASS and trace.shadow is None:
    trace.shadow, scope.repeated = scope, True
    try:
      _, again = record()
    finally:
      trace.shadow, scope.repeated = None, False
    compare(trace, block, again, what, loc)
  check_rebound_names(trace, what, loc, names, frame, TRIPS if twice else CONDITION)
  return block


def compare(trace: Trace, first: Block, second: Block, what: str, loc: Loc, same: dict[Var, Var] | None = None) -> None:
  """Fails unless two recordings of a body are equal, equation by equation, up to the variables they bind."""
  same = {} if same is None else same
  same.update(zip(first.invars, second.invars))

  def differ(how: str, at: Loc) -> NoReturn:
    trace.fail(ControlFlowError(
        f"the body of {what} is not the same in the next iteration: {how}", loc=at, also=("the loop is at", loc),
        hint="Python state (a rebound name, an attribute, a list, an iterator) changes from one iteration to the next, "
             "but the body is recorded once: keep it in a reference, carry it with tt.fori_loop, or compute it from "
             "the index"))
    raise AssertionError

  def operands(name: str, ps: Sequence[Atom], qs: Sequence[Atom], at: Loc) -> None:
    for p, q in zip(ps, qs):
      if isinstance(p, Literal) or isinstance(q, Literal):
        if p != q:
          differ(f"{name} was {_say(p)}, then {_say(q)}", at)
      elif same.get(p, p) is not q:
        kind = "reference" if isinstance(q.type, RefType) else "value"
        differ(f"{name} is another {kind}", at)

  for x, y in zip(first.eqns, second.eqns):
    name = x.primitive.name
    if x.primitive is not y.primitive:
      differ(f"{name}, then {y.primitive}", y.loc)
    if len(x.invars) != len(y.invars) or len(x.blocks) != len(y.blocks):
      differ(f"{name} had {len(x.invars)} operands, then {len(y.invars)}", y.loc)
    operands(f"an operand of {name}", x.invars, y.invars, y.loc)
    _compare_params(x, y, differ)
    for inner, again in zip(x.blocks, y.blocks):
      compare(trace, inner, again, what, loc, same)
    for a, b in zip(x.outvars, y.outvars):
      if a.type != b.type:
        differ(f"the result of {name} was {a.type}, then {b.type}", y.loc)
      same[a] = b
  if len(first.eqns) != len(second.eqns):
    longer = max(first.eqns, second.eqns, key=len)
    differ(f"{len(first.eqns)} operations, then {len(second.eqns)}",
           longer[min(len(first.eqns), len(second.eqns))].loc)
  operands("a result", first.outs, second.outs, loc)


def _compare_params(x: Eqn, y: Eqn, differ: Callable[[str, Loc], NoReturn]) -> None:
  for key in x.params.keys() | y.params.keys():
    p, q = x.params.get(key), y.params.get(key)
    if not _same_param(p, q):
      differ(f"'{key}' of {x.primitive} was {p}, then {q}", y.loc)


def _same_param(p: Any, q: Any) -> bool:
  if isinstance(p, tuple) and isinstance(q, tuple):
    return len(p) == len(q) and all(map(_same_param, p, q))
  return same_static(p, q) or (type(p) is type(q) and p == q)  # frozen dataclasses: views, layouts


def _say(atom: Atom) -> str:
  return repr(atom.value) if isinstance(atom, Literal) else f"a traced {atom.type}"
