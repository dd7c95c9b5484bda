"""Errors: what (with the argument's name), the user's line with a caret, a second place, a hint.

Every kind has a stable code, shown in brackets and searchable in the documentation. A user's mistake raises a
kind of `TileTraceError`; a fault of ours is an `AssertionError`.
"""
from __future__ import annotations

from tiletrace.core.source import Loc


class TileTraceError(Exception):
  """Base of every user-facing error.

  Attributes:
    message: one sentence that names the argument.
    loc: the user's line. None where there is none (a missing driver).
    also: a second place with its label, e.g. ("the loop is at", loc).
    hint: the remedy, one sentence.
    code: stable identifier of the kind of mistake, e.g. "TT101".

  Example:
    >>> def kernel(x, y):
    ...   y[...] = x[...] + x[:, 0]
    >>> x = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    >>> try:
    ...   tt.tile_call(kernel, x, grid=1).trace(x)
    ... except tt.TileTraceError as e:
    ...   print(type(e).__name__, e.code, e.message, sep=": ")
    TileTypeError: TT200: add: ranks differ, [2, 3] and [2]
  """
  code = "TT000"

  def __init__(self, message: str, *, loc: Loc | None = None, also: tuple[str, Loc] | None = None,
               hint: str | None = None, code: str | None = None):
    super().__init__(message)
    self.message, self.loc, self.also, self.hint = message, loc, also, hint
    if code is not None:
      self.code = code

  def __str__(self) -> str:
    out = [f"{self.message} [{self.code}]"]
    if self.loc is not None:
      out.append(f"  at {self.loc}\n{self.loc.excerpt()}")
    if self.also is not None:
      out.append(f"  {self.also[0]} {self.also[1]}\n{self.also[1].excerpt()}")
    if self.hint:
      out.append(f"  hint: {self.hint}")
    return "\n".join(out)


class ControlFlowError(TileTraceError):
  """Python control flow that tracing cannot see: break, return, zip, a rebound name."""
  code = "TT100"


class ScopeError(TileTraceError):
  """A value or reference used outside the loop, branch, role or kernel that made it."""
  code = "TT110"


class ForeignFunctionError(TileTraceError):
  """A jax or numpy function applied to a tile. Not a TypeError: jax swallows those and raises its own."""
  code = "TT120"


class TileTypeError(TileTraceError, TypeError):
  """Shapes, ranks, dtypes, spaces or kinds of arguments that do not fit."""
  code = "TT200"


class TileIndexError(TileTraceError, IndexError):
  """An index that is out of range or of a kind that is not allowed."""
  code = "TT210"


class TileAttributeError(TileTraceError, AttributeError):
  """An attribute that tiles or references do not have."""
  code = "TT220"


class RuleError(TileTraceError):
  """A rule table has no rule for a primitive, or two."""
  code = "TT900"


class VerifyError(TileTraceError):
  """A graph breaks the specification of its level: a fault of a pass."""
  code = "TT910"


class LayoutError(TileTraceError):
  """Layouts that cannot be met, or notation with no such layout."""
  code = "TT300"


class LoweringError(TileTraceError):
  """An op that no variant can emit, with each variant's reason."""
  code = "TT310"


class ResourceError(TileTraceError):
  """Too much shared memory, too many registers or barriers, a grid over the hardware's limits."""
  code = "TT320"


class ScheduleError(TileTraceError):
  """A pipeline, role or barrier that the checker refutes."""
  code = "TT330"


class AssembleError(TileTraceError):
  """ptxas is missing, refuses the text, spills, or serialises wgmma."""
  code = "TT400"


class LaunchError(TileTraceError):
  """The driver is missing, too old, or the GPU is older than the target."""
  code = "TT410"


class DebugCheckError(TileTraceError):
  """A tt.debug_check, or with debugging on a tt.assume, was false while a kernel ran; the message has every place."""
  code = "TT420"


class SimulationError(TileTraceError):
  """The simulator found a fault in a kernel.

  Attributes:
    faults: everything that was found (tiletrace.sim.faults.Fault), the one that stopped the kernel last.
  """
  code = "TT500"

  def __init__(self, message: str, *, loc: Loc | None = None, also: tuple[str, Loc] | None = None,
               hint: str | None = None, faults: tuple = ()):
    super().__init__(message, loc=loc, also=also, hint=hint)
    self.faults = faults
