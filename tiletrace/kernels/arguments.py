"""Arguments of the ready-made kernels that are no arrays, and arrays of floats: refused where the caller gives them."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
_PROBE = (2, 3)          # a tile whose dimensions can be told apart
_OF_PLACES = frozenset({"iota", "rev", "sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})


def float_array(function: str, name: str, x: Any) -> jax.Array:
  """`x` as an array of floats of rank 1 or more.

  Raises:
    TileTypeError: it is none.
  """
  try:
    x = jnp.asarray(x)
  except (TypeError, ValueError):
    raise TileTypeError(f"{function}: {name} is {x!r}", loc=caller_loc(), hint="an array of floats") from None
  if x.dtype not in FLOATS:
    raise TileTypeError(f"{function}: {name} is {x.dtype}[{', '.join(map(str, x.shape))}]", loc=caller_loc(),
                        hint=f"bfloat16, float16 or float32: {name}.astype(jnp.float32)")
  if not x.ndim:
    raise TileTypeError(f"{function}: {name} is a scalar", loc=caller_loc(), hint="give it an axis: x[None]")
  return x


def half_array(function: str, name: str, x: Any, *, wider: str) -> jax.Array:
  """`x` as an array of 16-bit floats of rank 1 or more; `wider`: what takes float32.

  Raises:
    TileTypeError: it is none.
  """
  x = float_array(function, name, x)
  if x.dtype == jnp.float32:
    raise TileTypeError(f"{function}: {name} is float32", loc=caller_loc(),
                        hint=f"bfloat16 or float16: {name}.astype(jnp.bfloat16); {wider} takes float32")
  return x


def described(x: Any) -> str:
  """What an argument is, in a message."""
  return f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}"


def number(function: str, name: str, value: Any, *, above: float = -math.inf) -> float:
  """A number that is part of the kernel, not an argument of its program.

  Raises:
    TileTypeError: it is none, or not above `above`.
  """
  if isinstance(value, jax.core.Tracer):
    raise TileTypeError(f"{function}: {name} is traced", loc=caller_loc(),
                        hint="a Python number: static_argnames= of jax.jit, or functools.partial, keep it one")
  try:
    found = math.nan if isinstance(value, str | bytes | bool) else float(value)
  except (TypeError, ValueError):
    found = math.nan
  if not above < found < math.inf:
    raise TileTypeError(f"{function}: {name}={value!r}", loc=caller_loc(),
                        hint="a Python number" + ("" if above == -math.inf else f" above {above:g}"))
  return found


def whole(function: str, name: str, value: Any, *, least: int | None = None) -> int:
  """A whole number that is part of the kernel.

  Raises:
    TileTypeError: it is none, or less than `least`.
  """
  if isinstance(value, bool) or not isinstance(value, int | np.integer) or (least is not None and value < least):
    raise TileTypeError(f"{function}: {name}={value!r}", loc=caller_loc(),
                        hint="a Python int" + ("" if least is None else f" of {least} or more"))
  return int(value)


def float_dtype(function: str, name: str, dtype: Any, default: Any = None) -> np.dtype:
  """The dtype of a result.

  Raises:
    TileTypeError: it is no float of the language.
  """
  try:
    found = np.dtype(default if dtype is None else dtype)
  except TypeError:
    found = None
  if found is None or not dtypes.is_float(found):
    raise TileTypeError(f"{function}: {name}={dtype!r}", loc=caller_loc(),
                        hint="bfloat16, float16, float32, or a float of 8 bits")
  return found


def check_elementwise(function: str, name: str, f: Any) -> None:
  """Refuses what is no function of single elements; None is none, and may be.

  A kernel applies it to tiles: what sums over elements, or depends on their places, would depend on the tiling.
  """
  if f is None:
    return
  if not callable(f):
    raise TileTypeError(f"{function}: {name}={f!r}", loc=caller_loc(), hint="a jax.numpy function, e.g. jax.nn.relu")
  found = _looks_around(f)
  if found is not None:
    what = getattr(f, "__name__", repr(f))
    raise TileTypeError(f"{function}: {name}={what} is no function of single elements: {found}", loc=caller_loc(),
                        hint="it is applied to tiles, in f32: what needs whole rows comes after")


@functools.lru_cache(maxsize=256)
def _looks_around(f: Callable[..., Any]) -> str | None:
  """Why a function of an array is no function of its elements; None: it may be one, or says itself what is wrong when a
  kernel calls it."""
  try:
    with jax.enable_x64(False):
      closed = jax.make_jaxpr(f)(jax.ShapeDtypeStruct(_PROBE, jnp.float32))
  except Exception:
    return None
  shapes = [v.aval.shape for v in closed.jaxpr.outvars]
  if shapes != [_PROBE]:
    return f"of {list(_PROBE)} elements it makes {' and '.join(str(list(s)) for s in shapes) or 'nothing'}"
  seen = {e.primitive.name: {v.aval.shape for v in e.outvars} for e in _equations(closed.jaxpr)}
  around = [p for p, made in seen.items() if p in _OF_PLACES or made - {_PROBE, ()}]
  return f"it has {', '.join(around)}" if around else None


def _equations(jaxpr: Any) -> Iterator[Any]:
  """Those that compute, of functions in functions."""
  for eqn in jaxpr.eqns:
    inner = [j for p in eqn.params.values() for j in (p if isinstance(p, tuple | list) else (p,))
             if hasattr(j, "eqns") or hasattr(j, "jaxpr")]
    for j in inner:
      yield from _equations(getattr(j, "jaxpr", j))
    if not inner:
      yield eqn
