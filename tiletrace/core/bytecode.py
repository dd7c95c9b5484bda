"""What a frame's current instruction says about the statement that it belongs to.

Loops ask who iterates them, branches whether a jump leaves them and which names are read after them. The facts hold
for CPython 3.11 to 3.13; where an instruction is not recognised the answer is the one that refuses.
"""
from __future__ import annotations

import ast
import bisect
import dis
import functools
import inspect
import linecache
import tokenize
from collections.abc import Iterable
from types import CodeType, FrameType

from tiletrace.core.source import Loc, Span

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_GOTO = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
_END = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_SILENT = ("EXTENDED_ARG", "NOP", "PRECALL", "RESUME")
_CONSUMERS = {
  "CALL": "by a function such as zip, enumerate, list, map or iter", "GET_ITER": "by a comprehension",
  "CALL_FUNCTION_EX": "by a call f(*loop)", "LIST_EXTEND": "by * unpacking", "UNPACK_SEQUENCE": "by unpacking",
  "UNPACK_EX": "by unpacking", "CONTAINS_OP": "by `in`", "GET_YIELD_FROM_ITER": "by yield from",
}


@functools.lru_cache(maxsize=1024)
def _decode(code: CodeType) -> tuple[tuple[dis.Instruction, ...], tuple[int, ...]]:
  """The instructions and their offsets."""
  instructions = tuple(dis.get_instructions(code))
  return instructions, tuple(i.offset for i in instructions)


def _index(code: CodeType, offset: int) -> int:
  """The instruction at an offset. On 3.11 a frame in a call may point into the CALL's inline cache."""
  return bisect.bisect_right(_decode(code)[1], offset) - 1


def target_name(frame: FrameType) -> str | None:
  """The local name that takes the result of the frame's current instruction, as `k` in `for k in ...` and `k = f()`."""
  instructions, _ = _decode(frame.f_code)
  at = _index(frame.f_code, frame.f_lasti) + 1
  while at < len(instructions) and instructions[at].opname in _SILENT:
    at += 1
  if at == len(instructions) or not instructions[at].opname.startswith(("STORE_FAST", "STORE_DEREF", "STORE_NAME")):
    return None
  name = instructions[at].argval
  return name[0] if isinstance(name, tuple) else name


def is_generator(code: CodeType) -> bool:
  return bool(code.co_flags & _GENERATORS)


# Who iterates?

def consumer(frame: FrameType) -> str | None:
  """Who calls `__iter__`: None for a `for` statement in an ordinary function, else "by ..." or "in ...".

  A `for` statement is GET_ITER directly followed by FOR_ITER. A comprehension puts other instructions between the two
  (3.12 and later) or calls a function of its own (3.11); its inner clauses look like `for` statements, but append to
  a list that lies under more iterators than the statement opens.
  """
  code = frame.f_code
  if is_generator(code):
    return "in a generator function, which can be cut short"
  instructions, _ = _decode(code)
  at = _index(code, frame.f_lasti)
  after = at + 1
  while after < len(instructions) and instructions[after].opname in _SILENT:
    after += 1
  if instructions[at].opname == "GET_ITER" and after < len(instructions) \
      and instructions[after].opname == "FOR_ITER" and not _collects(instructions, after):
    return None
  name = instructions[at].opname
  return _CONSUMERS.get(name, f"by {name}")


def _collects(instructions: tuple[dis.Instruction, ...], at: int) -> bool:
  """Whether the FOR_ITER at `at` stands in a comprehension: LIST_APPEND k reaches below k - 1 iterators."""
  ends: list[int] = []
  for i in instructions[at:]:
    if i.offset >= instructions[at].argval:
      return False
    ends = [e for e in ends if i.offset < e]
    if i.opname == "FOR_ITER":
      ends.append(i.argval)
    if i.opname in ("LIST_APPEND", "SET_ADD", "MAP_ADD") and (i.arg or 0) > len(ends):
      return True
  return False


# Jumps out of a `with`, seen in the source.

class _Jumps(ast.NodeVisitor):
  """Collects the statements that leave the body they are visited from."""

  def __init__(self) -> None:
    self.found: list[tuple[str, ast.AST]] = []
    self.loops = 0

  def visit_Return(self, node: ast.Return) -> None:
    self.found.append(("return", node))

  def visit_Break(self, node: ast.Break) -> None:
    if not self.loops:
      self.found.append(("break", node))

  def visit_Continue(self, node: ast.Continue) -> None:
    if not self.loops:
      self.found.append(("continue", node))

  def visit_Yield(self, node: ast.AST) -> None:
    self.found.append(("yield", node))
    self.generic_visit(node)

  visit_YieldFrom = visit_Yield

  def _own_jumps(self, node: ast.AST) -> None:
    """A nested function keeps its jumps to itself."""

  visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _own_jumps

  def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
    self.loops += 1
    for statement in node.body:
      self.visit(statement)
    self.loops -= 1
    for statement in node.orelse:
      self.visit(statement)

  visit_For = visit_AsyncFor = visit_While = _loop


@functools.lru_cache(maxsize=1024)
def _function_ast(code: CodeType, filename: str) -> tuple[ast.Module, int] | None:
  """The syntax tree of a function and what to add to its line numbers; None without (matching) source."""
  lines = linecache.getlines(filename)[code.co_firstlineno - 1:]
  if not lines:
    return None
  try:
    block = inspect.getblock(lines)
    nested = block[0][:1].isspace()  # a block of its own keeps the columns as they are in the file
    return ast.parse(("if 1:\n" if nested else "") + "".join(block)), code.co_firstlineno - 1 - nested
  except (SyntaxError, tokenize.TokenError, IndexError):
    return None


def _enters(node: ast.With, span: Span, shift: int) -> bool:
  """Whether an instruction enters this `with`: it covers the statement (to 3.12), or an item of it (from 3.13)."""
  def place(n: ast.stmt | ast.expr) -> tuple[int, int, int, int]:
    return n.lineno + shift, n.col_offset, (n.end_lineno or 0) + shift, n.end_col_offset or 0

  it = span.line, span.column, span.end_line, span.end_column
  return it in (place(node), *(place(item.context_expr) for item in node.items))


@functools.lru_cache(maxsize=1024)
def _jumps_out(code: CodeType, filename: str, lasti: int) -> tuple[tuple[str, Loc], ...] | None:
  parsed = _function_ast(code, filename)
  if parsed is None:
    return None
  tree, shift = parsed
  span = Loc(code, lasti).span
  entered = [node for node in ast.walk(tree) if isinstance(node, ast.With) and _enters(node, span, shift)]
  if not entered:
    return None
  visitor = _Jumps()
  for statement in entered[0].body:
    visitor.visit(statement)
  return tuple((kind, Loc(code, 0, Span(node.lineno + shift, (node.end_lineno or node.lineno) + shift, node.col_offset,
                                        node.end_col_offset or node.col_offset)))
               for kind, node in visitor.found if isinstance(node, (ast.stmt, ast.expr)))


def jumps_out(code: CodeType, lasti: int) -> tuple[tuple[str, Loc], ...] | None:
  """Each break, continue, return and yield that leaves the `with` entered by the instruction at `lasti`.

  None if the source is not there or does not hold that `with`: then `leaves_early` decides at its end.
  """
  return _jumps_out(code, code.co_filename, lasti)


# The same without source.

def leaves_early(code: CodeType, enter_lasti: int, exit_lasti: int) -> bool:
  """Whether a `with` is left by a jump, judged when its `__exit__(None, None, None)` is called.

  The exception handler of the same `with` has a path for a suppressed exception, which goes on where falling through
  the body's end does. An exit call that leads elsewhere is a jump's.
  """
  instructions, _ = _decode(code)
  enter = _index(code, enter_lasti)
  if instructions[enter].opname != "BEFORE_WITH":
    return True
  body = instructions[enter + 1].offset
  targets = [e.target for e in dis._parse_exception_table(code) if e.start <= body < e.end]  # type: ignore[attr-defined]
  if not targets:
    return True
  at = _index(code, targets[0])
  while not instructions[at].opname.startswith("POP_JUMP"):
    at += 1
  handled = _landing(code, _index(code, instructions[at].argval))
  fallen = _landing(code, _index(code, exit_lasti) + 1)
  while handled != fallen:  # small blocks at the end of a function are duplicated: compare what they do
    a, b = instructions[handled], instructions[fallen]
    if (a.opname, a.argval) != (b.opname, b.argval):
      return True
    if a.opname in _END:
      return False
    handled, fallen = _landing(code, handled + 1), _landing(code, fallen + 1)
  return False


def _landing(code: CodeType, at: int) -> int:
  """The first instruction that does something, from the clean-up after an `__exit__` call on."""
  instructions, _ = _decode(code)
  while True:
    i = instructions[at]
    if i.opname in _GOTO:
      at = _index(code, i.argval)
    elif i.opname in ("POP_TOP", "POP_EXCEPT", *_SILENT):
      at += 1
    else:
      return at


# Names.

def read_later(frame: FrameType, names: Iterable[str]) -> set[str]:
  """Those of `names` that the frame may read, before it writes them, after its current instruction.

  A `for` statement's instruction counts as the end of its loop.
  """
  instructions, _ = _decode(frame.f_code)
  at = _index(frame.f_code, frame.f_lasti)
  start = _index(frame.f_code, instructions[at].argval) if instructions[at].opname == "FOR_ITER" else at + 1
  return {name for name in names if _is_read(frame.f_code, instructions, start, name)}


def _is_read(code: CodeType, instructions: tuple[dis.Instruction, ...], start: int, name: str) -> bool:
  todo, seen = [start], set()
  while todo:
    at = todo.pop()
    while at < len(instructions) and at not in seen:
      seen.add(at)
      i = instructions[at]
      use = _first_use(i, name)
      if use == "LOAD":
        return True
      if use is not None:
        break
      if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs:
        todo.append(_index(code, i.argval))
      if i.opname in _GOTO or i.opname in _END:
        break
      at += 1
  return False


def _first_use(i: dis.Instruction, name: str) -> str | None:
  """"LOAD", "STORE" or "DELETE", the first thing that an instruction does to a local name."""
  verb, _, rest = i.opname.partition("_")
  if verb not in ("LOAD", "STORE", "DELETE") or rest == "FAST_AND_CLEAR":
    return None
  if not any(kind in rest for kind in ("FAST", "DEREF", "CLOSURE", "NAME")):
    return None
  if isinstance(i.argval, tuple):  # 3.13: STORE_FAST_LOAD_FAST and its kin
    verbs = (verb, "LOAD" if rest.endswith("LOAD_FAST") else "STORE")
    return next((v for v, held in zip(verbs, i.argval) if held == name), None)
  return verb if i.argval == name else None
