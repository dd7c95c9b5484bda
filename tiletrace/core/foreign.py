"""Objects from outside the kernel that reach an operation: jax arrays and tracers, recognised without importing jax."""
from __future__ import annotations

from types import FrameType
from typing import Any, NoReturn

from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import is_user_file, user_frame, user_loc


def is_jax(x: object) -> bool:
  """A jax array or tracer."""
  return hasattr(x, "aval") and type(x).__module__.partition(".")[0] in ("jax", "jaxlib")


def is_symbolic(x: object) -> bool:
  """A symbolic dimension of jax.export, which shapes and grids outside of kernels may have."""
  return hasattr(x, "dimension_as_value")


def refuse_foreign(x: Any, what: str) -> NoReturn:
  """Raises the error for an object that is no tile, reference or number; `what` is e.g. "operand y of add"."""
  if not is_jax(x):
    raise TileTypeError(f"{what}: {type(x).__name__} is not a tile, a reference or a number", loc=user_loc())
  kind = "a JAX tracer" if "Tracer" in type(x).__name__ else "a JAX array"
  described = f"{x.dtype.name}[{','.join(map(str, x.shape))}]" if hasattr(x, "dtype") else type(x).__name__
  raise TileTypeError(
    f"{what}: {_closure_name(x) or 'the value'} is {kind} ({described}) from outside the kernel", loc=user_loc(),
    hint="pass it to the kernel as an argument and read it with ref[...]; in kernels use tt.fori_loop and tt.cond, "
         "not jax.lax; for constants use Python or numpy numbers (math.log2, not jnp.log2)")


def _closure_name(x: object) -> str | None:
  """The name under which the kernel sees `x`: a local, a closure or a global of the user's frames."""
  frame: FrameType | None = user_frame(2)
  while frame is not None and is_user_file(frame.f_code.co_filename):
    for names in (frame.f_locals, {n: frame.f_globals.get(n) for n in frame.f_code.co_names}):
      for name, held in names.items():
        if held is x:
          return f"'{name}'"
    frame = frame.f_back
  return None
