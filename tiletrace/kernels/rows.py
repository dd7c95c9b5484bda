"""How kernels over the rows of x[m, n] cut their work: rows a CTA, its warpgroups, and the columns that it holds.

A row that fits in the registers of a CTA is read once, by loads that are all in flight before the first is used. What
hides the latency of memory is the number of bytes in flight on an SM (40 to 64 KB on an H100 or H200, by Little's law),
which takes 32 bytes a thread at three quarters of the SM's threads, or 64 at half of them. Where a row takes a whole
SM's registers nothing would be in flight while it is summed: it comes through a ring in shared memory (TMA).
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
from tiletrace.kernels.arguments import float_array
from tiletrace.lowering.layouts.fragment import blocked_for_reduction
from tiletrace.lowering.target import SM_90A

_BYTES = 64               # of all arrays together, on the way to a thread
_LEAN_BYTES = 32          # where 40 registers do, so that 1536 threads share an SM
_LATENCY_BYTES = 16       # where there are too few rows to fill the GPU
_MOST_ELEMENTS = 40       # of all arrays together, in the registers of a thread
_CHUNK = 4096             # columns of a row that is read in parts, by two warpgroups
_RING_BYTES = 208 << 10   # of shared memory
_LONG_WARPGROUPS = 4      # of a program with a row that would take the registers of an SM
_SHORT_BYTES = 24 << 20   # read in some 6 us


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlan:
  """How x[m, n] is cut.

  Attributes:
    rows: of one program.
    columns: that a program holds at a time; n or more: whole rows.
    warpgroups: of one program.
    grid: programs.
    ctas_per_sm: that the registers must leave room for.
    num_stages: rows on their way through shared memory, by a persistent kernel; 0: they are loaded into registers.
    overlap: launches overlap, which pays where one takes little longer than its start; loads are not read-only then.
  """
  rows: int
  columns: int
  warpgroups: int
  grid: int
  ctas_per_sm: int = 1
  num_stages: int = 0
  overlap: bool = False

  def launch(self) -> dict[str, Any]:
    """Keywords of tile_call."""
    return {"grid": self.grid, "warpgroups": self.warpgroups, "persistent": self.num_stages > 0,
            "options": tt.CompileOptions(ctas_per_sm=self.ctas_per_sm, overlap_launch=self.overlap)}


@functools.lru_cache(maxsize=1024)
def plan_rows(shape: tuple[int, ...], dtype: np.dtype, arrays: int = 1, *, lean: bool = False) -> RowPlan:
  """Cuts x of shape (m, n) for a reduction along n.

  Args:
    dtype: of x.
    arrays: how many arrays of that shape a program holds in registers at once.
    lean: little is held besides, so that 40 registers do for 16 elements.

  Example:
    >>> plan_rows((32768, 1024), np.dtype("float16"), lean=True)
    RowPlan(rows=2, columns=1024, warpgroups=1, grid=16384, ctas_per_sm=12, num_stages=0, overlap=False)
    >>> plan_rows((8192, 16384), np.dtype("float16"))
    RowPlan(rows=1, columns=16384, warpgroups=4, grid=8192, ctas_per_sm=2, num_stages=0, overlap=False)
  """
  m, n = shape
  plenty = m * n * arrays * dtype.itemsize >= 4 * SM_90A.sm_count * 128 * _BYTES
  lean = lean and plenty and arrays == 1 and n * dtype.itemsize % 16 == 0      # whole vectors: few addresses
  wanted = ((_LEAN_BYTES if lean else _BYTES) if plenty else _LATENCY_BYTES) / (arrays * dtype.itemsize)
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
      resident = 1536 if lean and held * dtype.itemsize <= 40 else _resident(held, arrays, warpgroups)
      ctas = max(1, resident // threads)
      cost = threads * held / (rows * n) + 0.1 * abs(math.log2(held / wanted)) + 0.2 * (ctas == 1)
      if best is None or cost < best[0]:
        best = cost, RowPlan(rows, n, warpgroups, tt.cdiv(m, rows), ctas)
  plan = RowPlan(1, _CHUNK, 2, m, 3) if best is None else best[1]
  return dataclasses.replace(plan, overlap=m * n * arrays * dtype.itemsize <= _SHORT_BYTES)


def rows_of_pairs(shape: tuple[int, ...], dtype: np.dtype, arrays: int) -> RowPlan | None:
  """How long rows of two bf16 arrays stay in registers, where they are pairs until they are used: 512 threads hold 32
  elements of each, and two CTAs share an SM. None where that is not so (what f16 takes to convert may spill), or where
  more CTAs share one anyway."""
  m, n = shape
  if arrays != 2 or dtype != jnp.bfloat16 or n % 8 or n > 128 * _LONG_WARPGROUPS * 32:
    return None
  if plan_rows(shape, dtype, arrays).ctas_per_sm > 1:
    return None
  return RowPlan(1, n, _LONG_WARPGROUPS, m, ctas_per_sm=2)


def ring_of_rows(shape: tuple[int, ...], dtype: np.dtype, arrays: int) -> RowPlan | None:
  """How x of shape (m, n) comes through shared memory with `arrays` - 1 others: for rows that would take the registers
  of an SM. None where TMA or the shared memory cannot take them, or they need no ring."""
  m, n = shape
  row = n * arrays * dtype.itemsize
  stages = min(4, _RING_BYTES // row)
  if n * dtype.itemsize % 128 or stages < 2 or plan_rows(shape, dtype, arrays).ctas_per_sm > 1:
    return None
  if n > 128 * _LONG_WARPGROUPS * _MOST_ELEMENTS or m < 2 * SM_90A.sm_count:
    return None
  return RowPlan(1, n, _LONG_WARPGROUPS, m, num_stages=stages)


def _resident(held: int, arrays: int, warpgroups: int) -> int:
  """Threads of an SM that the registers should leave room for."""
  if held * arrays > 32:
    return 768
  return 896 if warpgroups == 1 else 1024


def _limit(threads: int) -> int:
  """Elements in a thread's registers, of which an SM has 65,536, each once as f32 and once as what it becomes."""
  return min(_MOST_ELEMENTS, 65536 // threads // 2)


# ---- arguments


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
