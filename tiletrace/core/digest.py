"""A digest of what a graph computes: the same whatever its variables, source lines and names of arguments."""
from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tiletrace.core.dtypes import short_name
from tiletrace.core.graph import Atom, Block, Literal, TileGraph, Var


def digest(graph: TileGraph) -> str:
  """sha256, in hexadecimal, of the graph's name, options, types, parameters, literals and structure."""
  h = hashlib.sha256()
  for token in _Encoder().graph(graph):
    h.update(token.encode() + b"\0")
  return h.hexdigest()


class _Encoder:
  """Tokens of a graph; each list is preceded by its length, so that no two graphs give the same tokens."""

  def __init__(self) -> None:
    self._numbers: dict[Var, int] = {}

  def graph(self, g: TileGraph) -> Iterator[str]:
    yield from (g.name, encode(g.options), str(g.num_inputs), str(len(g.invars)))
    yield from map(self._binder, g.invars)
    yield from self._block(dataclasses.replace(g.body, invars=()))

  def _binder(self, var: Var) -> str:
    number = self._numbers.setdefault(var, len(self._numbers))
    return f"{number}:{var.type}"

  def _atom(self, a: Atom) -> str:
    return f"{encode(a.value)}:{a.type}" if isinstance(a, Literal) else f"%{self._numbers[a]}"

  def _block(self, block: Block) -> Iterator[str]:
    yield f"{len(block.invars)} {len(block.eqns)} {len(block.outs)}"
    yield from map(self._binder, block.invars)
    for eqn in block.eqns:
      yield f"{eqn.primitive} {len(eqn.invars)} {len(eqn.params)} {len(eqn.blocks)} {len(eqn.outvars)}"
      yield from map(self._atom, eqn.invars)
      yield from (f"{k}={encode(eqn.params[k])}" for k in sorted(eqn.params))
      for inner in eqn.blocks:
        yield from self._block(inner)
      yield from map(self._binder, eqn.outvars)
    yield from map(self._atom, block.outs)


def encode(x: Any) -> str:
  """A parameter as text; different values give different texts, on every machine the same."""
  if x is None or isinstance(x, (bool, int, float, str)):
    return f"{type(x).__name__}:{x!r}"
  if isinstance(x, np.dtype):
    return short_name(x)
  if isinstance(x, enum.Enum):
    return f"{type(x).__name__}.{x.name}"
  if isinstance(x, (tuple, list)):
    return f"({','.join(map(encode, x))})"
  if dataclasses.is_dataclass(x) and not isinstance(x, type):
    fields = ",".join(f"{f.name}={encode(getattr(x, f.name))}" for f in dataclasses.fields(x) if f.compare)
    return f"{type(x).__name__}({fields})"
  assert type(x).__repr__ is not object.__repr__, f"no stable text for a parameter of {type(x)}"
  return f"{type(x).__name__}:{x!r}"
