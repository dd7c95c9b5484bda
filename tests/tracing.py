"""Traces kernels without jax: `trace(kernel, x=f32(64, 64), y=out(f32(64, 64)))` -> TileGraph."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.graph import CallOptions, TileGraph
from tiletrace.core.source import function_loc
from tiletrace.core.trace import Trace, trace_kernel
from tiletrace.core.types import RefType, Space


@dataclasses.dataclass(frozen=True)
class Out:
  type: RefType


def array(dtype: np.dtype, *shape: int) -> RefType:
  return RefType(shape, dtype, Space.GLOBAL)


f32, f16, bf16, i32, u8, b1 = (functools.partial(array, d) for d in (
  dtypes.f32, dtypes.f16, dtypes.bf16, dtypes.i32, dtypes.u8, dtypes.bool_))


def trace(kernel: Callable[..., Any], *, grid: tuple[int, ...] = (4, 4), warpgroups: int = 1,
          **arrays: RefType | Out) -> TileGraph:
  """The graph of `kernel(*arrays)`; arrays wrapped in `Out` are outputs and stand last."""
  def make_args(t: Trace) -> list[Any]:
    refs = []
    for name, a in arrays.items():
      ref: Any = t.binder(a.type if isinstance(a, Out) else a, function_loc(kernel), name)  # type: ignore[arg-type]
      ref.writable = isinstance(a, Out)
      refs.append(ref)
    return refs

  options = CallOptions(grid, warpgroups=warpgroups)
  body, _ = trace_kernel(kernel, make_args, name=kernel.__name__, options=options)
  loc = function_loc(kernel)
  assert loc is not None
  inputs = sum(not isinstance(a, Out) for a in arrays.values())
  return TileGraph(kernel.__name__, body.invars, tuple(arrays), inputs, body, options, loc)


def trace_values(fn: Callable[..., Any], *types: tuple[np.dtype, tuple[int, ...]]) -> Any:
  """What `fn` returns for tiles of these (dtype, shape)."""
  out = []

  def kernel(*refs: Any) -> None:
    out.append(fn(*(r[...] for r in refs)))

  trace(kernel, **{f"x{k}": array(d, *s) for k, (d, s) in enumerate(types)})
  return out[0]
