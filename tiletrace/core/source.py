"""Where in the user's file something was written. Made at every op, resolved only when somebody reads it."""
from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PACKAGE_NAME = __name__.partition(".")[0] + "."
_KERNELS = os.path.join(_PACKAGE, "kernels") + os.sep  # ready-made kernels are written like a user's
_STDLIB = tuple({os.path.dirname(os.__file__) + os.sep, sysconfig.get_paths()["stdlib"] + os.sep})
_FOREIGN = tuple(f"{os.sep}site-packages{os.sep}{p}{os.sep}" for p in ("jax", "jaxlib", "numpy", "ml_dtypes"))
_NO_CODE = compile("", "", "exec")


@functools.cache
def is_user_file(filename: str) -> bool:
  """Not tiletrace (but its kernels/), jax, jaxlib, numpy or the standard library."""
  if filename.startswith(_PACKAGE):
    return filename.startswith(_KERNELS)
  if any(part in filename for part in _FOREIGN):
    return False
  return "site-packages" in filename or not filename.startswith(_STDLIB)


def _is_user_frame(frame: FrameType) -> bool:
  """The methods that dataclasses makes for a class of ours stand in no file."""
  filename = frame.f_code.co_filename
  made = filename == "<string>" and str(frame.f_globals.get("__name__")).startswith(_PACKAGE_NAME)
  return not made and is_user_file(filename)


@functools.lru_cache(maxsize=4096)
def _positions(code: CodeType) -> tuple[tuple[int | None, int | None, int | None, int | None], ...]:
  return tuple(code.co_positions())


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
  """A range of source text: lines from 1, columns from 0, end exclusive."""
  line: int
  end_line: int
  column: int
  end_column: int


class Loc:
  """An instruction of a code object; `span` finds its line and columns."""
  __slots__ = ("_span", "code", "lasti")

  def __init__(self, code: CodeType, lasti: int, span: Span | None = None):
    self.code, self.lasti, self._span = code, lasti, span

  @property
  def span(self) -> Span:
    if self._span is None:
      line, end_line, column, end_column = _positions(self.code)[self.lasti // 2]
      self._span = Span(line or 0, end_line or line or 0, column or 0, end_column or 0)
    return self._span

  @property
  def filename(self) -> str:
    return self.code.co_filename

  @property
  def line(self) -> int:
    return self.span.line

  def __reduce__(self) -> tuple[Any, ...]:
    return _unpickled, (self.filename, self.code.co_qualname, self.span)

  def short(self) -> str:
    """`file.py:12`, without a directory: stable across machines."""
    return f"{os.path.basename(self.filename)}:{self.line}"

  def __str__(self) -> str:
    return f"{os.path.basename(self.filename)}:{self.line}:{self.span.column + 1} ({self.code.co_qualname})"

  def __repr__(self) -> str:
    return f"Loc({self})"

  def excerpt(self) -> str:
    """The source line with a caret under the range, indented by four."""
    span = self.span
    text = linecache.getline(self.filename, span.line).rstrip("\n")
    if not text:
      return "    (source not available)"
    end = span.end_column if span.end_line == span.line else len(text)
    return f"    {text}\n    {' ' * span.column}{'^' * max(1, end - span.column)}"


def _unpickled(filename: str, qualname: str, span: Span) -> Loc:
  """The place of an instruction of another process, whose code object stayed there."""
  return Loc(_NO_CODE.replace(co_filename=filename, co_qualname=qualname), 0, span)


def user_frame(depth: int = 1) -> FrameType | None:
  """The innermost frame, from `depth` callers up, that belongs to the user."""
  frame: FrameType | None = sys._getframe(depth)
  while frame is not None and not _is_user_frame(frame):
    frame = frame.f_back
  return frame


def user_loc() -> Loc:
  """The user's instruction that led here."""
  frame = user_frame(2)
  if frame is None:
    frame = sys._getframe(1)
  return Loc(frame.f_code, frame.f_lasti)


def caller_loc() -> Loc:
  """The user's instruction that called one of the ready-made kernels."""
  frame = user_frame(2)
  while frame is not None and (frame.f_code.co_filename.startswith(_PACKAGE) or not _is_user_frame(frame)):
    frame = frame.f_back
  return user_loc() if frame is None else Loc(frame.f_code, frame.f_lasti)


def function_loc(fun: object) -> Loc | None:
  """The first line of a Python function (through functools.partial); None for other callables."""
  while isinstance(fun, functools.partial):
    fun = fun.func
  code = getattr(fun, "__code__", None)
  if code is None:
    return None
  return Loc(code, 0, Span(code.co_firstlineno, code.co_firstlineno, 0, 0))
