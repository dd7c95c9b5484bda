"""How kernels over the rows of x[m, n] cut their work: rows a CTA, its warpgroups, and the columns that it holds.

A row that fits in the registers of a CTA is read once, by loads that are all in flight before the first is used. What
hides the latency of memory is the number of bytes in flight on an SM (40 to 64 KB on an H100 or H200, by Little's law),
which takes 64 bytes a thread at half of the SM's threads.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from tiletrace.core.errors import TileTypeError
from tiletrace.core.source import caller_loc
from tiletrace.lowering.layouts.fragment import blocked_for_reduction
from tiletrace.lowering.target import SM_90A

_BYTES = 64               # of all arrays together, on the way to a thread
_LATENCY_BYTES = 16       # where there are too few rows to fill the GPU
_MOST_ELEMENTS = 40       # of all arrays together, in the registers of a thread
_CHUNK = 4096             # columns of a row that is read in parts, by two warpgroups


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlan:
  """How x[m, n] is cut.

  Attributes:
    rows: of one program.
    columns: that a program holds at a time; n or more: whole rows.
    warpgroups: of one program.
    grid: programs.
    ctas_per_sm: that the registers must leave room for.
  """
  rows: int
  columns: int
  warpgroups: int
  grid: int
  ctas_per_sm: int = 1

  def launch(self) -> dict[str, Any]:
    """Keywords of tile_call."""
    return {"grid": self.grid, "warpgroups": self.warpgroups,
            "options": tt.CompileOptions(ctas_per_sm=self.ctas_per_sm)}


@functools.lru_cache(maxsize=1024)
def plan_rows(shape: tuple[int, ...], dtype: np.dtype, arrays: int = 1) -> RowPlan:
  """Cuts x of shape (m, n) for a reduction along n.

  Args:
    dtype: of x.
    arrays: how many arrays of that shape a program holds in registers at once.

  Example:
    >>> plan_rows((32768, 1024), np.dtype("float16"))
    RowPlan(rows=4, columns=1024, warpgroups=1, grid=8192, ctas_per_sm=7)
    >>> plan_rows((8192, 16384), np.dtype("float16"))
    RowPlan(rows=1, columns=16384, warpgroups=4, grid=8192, ctas_per_sm=2)
  """
  m, n = shape
  plenty = m * n * arrays * dtype.itemsize >= 4 * SM_90A.sm_count * 128 * _BYTES
  wanted = (_BYTES if plenty else _LATENCY_BYTES) / (arrays * dtype.itemsize)
  best: tuple[float, RowPlan] | None = None
  for warpgroups in (1, 2, 3, 4, 5, 6, 7, 8):
    threads = 128 * warpgroups
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
      if rows > 1 and (warpgroups > 1 or rows * n > threads * wanted * 1.25 or rows > m):
        break
      if n > threads * _MOST_ELEMENTS / arrays:
        break
      held = blocked_for_reduction((rows, n), 8 * dtype.itemsize, 4 * warpgroups, (1,)).extent("reg")
      if (held > _MOST_ELEMENTS / arrays and (warpgroups, rows) != (1, 1)) or held * arrays > _limit(threads):
        continue
      cost = threads * held / (rows * n) + 0.1 * abs(math.log2(held / wanted))
      if best is None or cost < best[0]:
        resident = 768 if held * arrays > 32 else 896 if warpgroups == 1 else 1024      # threads of an SM
        best = cost, RowPlan(rows, n, warpgroups, tt.cdiv(m, rows), max(1, resident // threads))
  return RowPlan(1, _CHUNK, 2, m, 3) if best is None else best[1]


def _limit(threads: int) -> int:
  """Elements in a thread's registers, of which an SM has 65,536, each once as f32 and once as what it becomes."""
  return min(_MOST_ELEMENTS, 65536 // threads // 2)


# ---- arguments


def float_array(function: str, name: str, x: Any) -> jax.Array:
  """`x` as an array of floats of rank 1 or more.

  Raises:
    TileTypeError: it is none.
  """
  x = jnp.asarray(x)
  if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
    raise TileTypeError(f"{function}: {name} is {x.dtype}[{_extents(x.shape)}]", loc=caller_loc(),
                        hint=f"bfloat16, float16 or float32: {name}.astype(jnp.float32)")
  if not x.ndim:
    raise TileTypeError(f"{function}: {name} is a scalar", loc=caller_loc(), hint="give it an axis: x[None]")
  return x


def check_like(function: str, name: str, y: Any, x: jax.Array) -> jax.Array | None:
  """`y` as an array of floats of the shape of `x`; None stays None.

  Raises:
    TileTypeError: it has another shape or no floats.
  """
  if y is None:
    return None
  y = float_array(function, name, y)
  if y.shape != x.shape:
    raise TileTypeError(f"{function}: {name} has the shape ({_extents(y.shape)}), x ({_extents(x.shape)})",
                        loc=caller_loc(), hint=f"jnp.broadcast_to({name}, x.shape)")
  return y


def check_vector(function: str, name: str, y: Any, x: jax.Array) -> jax.Array | None:
  """`y` as an array of floats [n], n being the last extent of `x`; None stays None.

  Raises:
    TileTypeError: it has another shape or no floats.
  """
  if y is None:
    return None
  y = float_array(function, name, y)
  if y.shape != x.shape[-1:]:
    raise TileTypeError(f"{function}: {name} has the shape ({_extents(y.shape)}), x ends in {x.shape[-1]}",
                        loc=caller_loc(), hint=f"{name} has one element for each of the {x.shape[-1]} columns")
  return y


def flatten_rows(x: jax.Array) -> jax.Array:
  """[..., n] as [m, n]: no copy."""
  return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _extents(shape: tuple[int, ...]) -> str:
  return ", ".join(map(str, shape))
