"""Small kernels with numpy references: they run on the CPU (as jax ops), assemble without a GPU, and run on one.

A case is a function decorated with `case`; it gets a random generator and returns a `Case`.
"""
from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import tiletrace as tt


@dataclasses.dataclass(frozen=True)
class Case:
  """A kernel call and what it gives.

  Attributes:
    call: the tile_call, of all inputs.
    inputs: arrays.
    want: one float64 or exact reference per output.
    kind: the kind of computation in tests/tolerances.py; one for all outputs or one for each.
  """
  call: tt.TileCall
  inputs: tuple[Any, ...]
  want: tuple[np.ndarray, ...]
  kind: str | tuple[str, ...]

  def kinds(self) -> tuple[str, ...]:
    return (self.kind,) * len(self.want) if isinstance(self.kind, str) else self.kind


CASES: dict[str, Callable[[np.random.Generator], Case]] = {}


def case(function: Callable[..., Case] | None = None, **variants: Sequence[Any]) -> Callable:
  """Registers a case; `case(dtype=("f32", "bf16"))` registers one for each value (one keyword only)."""
  def register(f: Callable[..., Case]) -> Callable[..., Case]:
    if not variants:
      CASES[f.__name__] = f
    for key, values in variants.items():
      for value in values:
        text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
        CASES[f"{f.__name__}-{text}"] = lambda rng, value=value, key=key: f(rng, **{key: value})
    return f
  return register if function is None else register(function)


class _Building:
  """The case that is being built: its name, and whether a small one is wanted."""
  name, small = "", False


SIZED: set[str] = set()          # cases built so far that have a small form


def build(name: str, *, small: bool = False) -> Case:
  """The case; `small`: with fewer programs, for the simulator."""
  _Building.name, _Building.small = name, small
  return CASES[name](np.random.default_rng(zlib.crc32(name.encode())))


def on_a_gpu(size: Any, small: Any) -> Any:
  """A size for a GPU, which runs hundreds of programs side by side; or one for the simulator, whose device has two SMs,
  with fewer programs of the same instructions: whole tiles, edges, several tiles for each persistent CTA."""
  SIZED.add(_Building.name)
  return small if _Building.small else size


def out(*shapes_and_dtypes: tuple[tuple[int, ...], Any]) -> Any:
  """out_shape: one struct, or a tuple of them."""
  structs = tuple(jax.ShapeDtypeStruct(s, d) for s, d in shapes_and_dtypes)
  return structs if len(structs) > 1 else structs[0]


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
  return rng.standard_normal(shape).astype(dtype)


def f64(x: np.ndarray) -> np.ndarray:
  return np.asarray(x).astype(np.float64)
