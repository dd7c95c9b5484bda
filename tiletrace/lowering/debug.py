"""Debugging in compiled kernels: tt.debug_print, tt.debug_check and tt.assume become records in a ring of i32 in global
memory, one more argument that the kernel reads and writes. Without debugging the first two are removed.

The first word of the ring counts the words that were asked for. A record takes its words by an atomic addition, and is
written if all of them fit: the number of its site, the program's ids, then each value, 32 bits an element. No function
is called: a call would make ptxas serialise wgmma (C7510).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.errors import DebugCheckError
from tiletrace.core.graph import Atom, Block, Eqn, TileGraph, Var, expand_block, walk
from tiletrace.core.ops import control, debug, elementwise, grid, memory
from tiletrace.core.ops.assume import assume_p
from tiletrace.core.source import Loc
from tiletrace.core.types import RefType, Space, TileType, whole_view

RING_WORDS = 1 << 16
_SPOKEN = (debug.debug_print_p, debug.debug_check_p)


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
  """A line that records: `text` is the format, or the message of a check."""
  checks: bool
  text: str
  types: tuple[TileType, ...]
  loc: Loc

  def say(self, ids: Iterable[Any], values: Sequence[np.ndarray]) -> str:
    where = f"{self.loc.short()}, program {tuple(int(i) for i in ids)}"
    return f"{where}: {self.text if self.checks else self.text.format(*values)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
  """What a compiled kernel says: its last operand and result. `rank`: axes of the grid, whose ids stand in a record."""
  sites: tuple[Site, ...]
  rank: int

  def empty(self) -> np.ndarray:
    return np.zeros(RING_WORDS, np.int32)

  def report(self, words: Any) -> None:
    """Prints the records in i32 [RING_WORDS].

    Raises:
      DebugCheckError: a check failed, or an assumption; the message has all of them.
    """
    ring = np.asarray(words)
    failed: list[tuple[str, Site]] = []
    at, end = 1, 1 + int(ring[0])
    while at < min(end, RING_WORDS):
      site = self.sites[int(ring[at])]
      size = 1 + self.rank + sum(t.size for t in site.types)
      if at + size > RING_WORDS:
        break
      text = site.say(ring[at + 1:at + 1 + self.rank], _values(ring, at + 1 + self.rank, site))
      if site.checks:
        failed.append((text, site))
      else:
        print(text)
      at += size
    if at < end:
      print(f"{end - at} words more of debug output had no place in the ring of {RING_WORDS}")
    if failed:
      raise DebugCheckError("\n".join(text for text, _ in failed), loc=failed[0][1].loc)


def _values(ring: np.ndarray, at: int, site: Site) -> list[np.ndarray]:
  out = []
  for t in site.types:
    words = ring[at:at + t.size].view(stored(t.dtype)).reshape(t.shape)
    out.append(words.astype(t.dtype)[()])
    at += t.size
  return out


def speaks(graph: TileGraph) -> bool:
  """Whether a graph prints or checks."""
  return any(e.primitive in _SPOKEN for e in walk(graph.body))


def with_checks(graph: TileGraph) -> TileGraph:
  """The graph with a check of each tt.assume."""
  def checked(eqn: Eqn) -> tuple[Eqn, ...]:
    if eqn.primitive is not assume_p:
      return (eqn,)
    params = {"message": "tt.assume: the condition is false"}
    return eqn, eqn.replace(primitive=debug.debug_check_p, params=params)

  return graph.replace(body=expand_block(graph.body, checked))


def without_debug(graph: TileGraph) -> TileGraph:
  """The graph without what only debugging needs. What computed it is dead code."""
  if not speaks(graph):
    return graph
  return graph.replace(body=expand_block(graph.body, lambda eqn: () if eqn.primitive in _SPOKEN else (eqn,)))


def instrument(graph: TileGraph) -> tuple[TileGraph, Ring | None]:
  """The graph with a record for each print, and for each check and assumption that fails; and where these go. If there
  are any, the ring is the graph's last input and output."""
  graph = with_checks(graph)
  if not speaks(graph):
    return graph, None
  ring = Var(RefType((RING_WORDS,), dtypes.i32, Space.GLOBAL), "debug_ring")
  writer = _Writer(ring, len(graph.options.grid))
  body = expand_block(graph.body, writer.equations)
  body = dataclasses.replace(body, eqns=(*writer.scratch, *body.eqns))
  return graph.with_hidden(ring, "debug_ring", body), Ring(tuple(writer.sites), len(graph.options.grid))


class _Writer:
  """Rewrites equations; collects the sites."""

  def __init__(self, ring: Var, rank: int):
    self.ring, self.rank = ring, rank
    self.sites: list[Site] = []
    self.scratch: list[Eqn] = []

  def equations(self, eqn: Eqn) -> list[Eqn]:
    if eqn.primitive is debug.debug_print_p:
      types = tuple(a.type for a in eqn.values if isinstance(a.type, TileType))
      return self._record(eqn, Site(False, eqn.params["fmt"], types, eqn.loc), eqn.values)
    return self._check(eqn) if eqn.primitive is debug.debug_check_p else [eqn]

  def _check(self, eqn: Eqn) -> list[Eqn]:
    (condition,) = eqn.values
    failed = Eqn(elementwise.not_p, (condition,), (Var(condition.type),), {}, eqn.loc)
    record = self._record(eqn, Site(True, eqn.params["message"], (), eqn.loc), ())
    return [failed, Eqn(control.cond_p, failed.outvars, (), {}, eqn.loc, (Block((), tuple(record)),))]

  def _record(self, eqn: Eqn, site: Site, values: Sequence[Atom]) -> list[Eqn]:
    self.sites.append(site)
    out: list[Eqn] = []
    ids = [self._bind(out, grid.program_id_p, (), TileType((), dtypes.i32), {"axis": a}, eqn) for a in range(self.rank)]
    words = [self._word(out, v, eqn) for v in values]
    refs = [self.ring, *([self._scratch(eqn)] if any(v.shape for v in words) else [])]
    params = {"views": tuple(whole_view(r.shape) for r in refs), "site": len(self.sites) - 1}
    out.append(Eqn(debug.debug_record_p, (*refs, *ids, *words), (), params, eqn.loc))
    return out

  def _word(self, out: list[Eqn], value: Atom, eqn: Eqn) -> Atom:
    """The value in 32 bits an element."""
    assert isinstance(value.type, TileType)
    wide = stored(value.type.dtype)
    if value.type.dtype == wide:
      return value
    return self._bind(out, elementwise.cast_p, (value,), TileType(value.type.shape, wide), {"dtype": wide}, eqn)

  def _bind(self, out: list[Eqn], primitive: Any, operands: tuple[Atom, ...], type: TileType, params: dict[str, Any],
            eqn: Eqn) -> Var:
    var = Var(type)
    out.append(Eqn(primitive, operands, (var,), params, eqn.loc))
    return var

  def _scratch(self, eqn: Eqn) -> Var:
    if not self.scratch:
      var = Var(RefType((1,), dtypes.i32, Space.SHARED), "debug_place")
      params = {"space": Space.SHARED, "shape": (1,), "dtype": dtypes.i32, "layout": None}
      self.scratch.append(Eqn(memory.alloc_p, (), (var,), params, eqn.loc))
    return self.scratch[0].outvars[0]


def stored(dtype: np.dtype) -> np.dtype:
  """The dtype of 32 bits that a record holds a value in."""
  if dtypes.is_float(dtype):
    return dtypes.f32
  return dtype if dtype == dtypes.u32 else dtypes.i32
