"""Rings: which shared buffers are FIFOs of slots, pushed by copies and popped by their last use.

A buffer is a ring if it is filled by copies of the whole buffer from global memory, by TMA (also in parts, rows after
rows, as from two pages) or, in a loop of several stages, by threads, and everything that such a copy brings is used in
the block of the copy, before the next one. In between consumers may change it. Buffers that are pushed side by side
share their barriers where they are used over the same stretch, or where TMA brings them and all that is done with them
is that threads read them, with neither products nor loops between: each barrier is a wait, a fence and arrivals.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.graph import Block, Eqn, TileGraph, Var, walk
from tiletrace.core.rules import effects
from tiletrace.core.types import Space

_LONG = frozenset({"gemm", "mma_sync", "barrier_wait", "sync"})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Segment:
  """One push site: the copies, and the first and last equation of the block that use what they bring."""
  copies: tuple[Eqn, ...]
  first_use: Eqn
  last_use: Eqn


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ring:
  """Buffers that are pushed together. `slots` is the depth."""
  buffers: tuple[Var, ...]
  slots: int
  segments: tuple[Segment, ...]

  @property
  def nbytes(self) -> int:
    """Bytes of one push."""
    return sum(v.type.nbytes for v in self.buffers)  # type: ignore[union-attr]

  @property
  def name(self) -> str:
    return "_".join(v.hint or "buffer" for v in self.buffers)

  @property
  def by_tma(self) -> bool:
    """A phase has an arrival with TMA's bytes."""
    return any(is_tma(c) for s in self.segments for c in s.copies)

  @property
  def by_threads(self) -> bool:
    """A phase has an arrival of a warpgroup whose threads copy."""
    return any(not is_tma(c) for s in self.segments for c in s.copies)


def is_tma(copy: Eqn) -> bool:
  return copy.params["dispatch"] == "tma"


def shared_uses(eqn: Eqn) -> set[Var]:
  """Shared buffers that an equation, blocks included, reads or writes."""
  inner = (e for b in eqn.blocks for e in walk(b))
  return {r.root for e in (eqn, *inner) for r in e.refs if r.type.space is Space.SHARED}


def _refills(eqn: Eqn, buffer: Var) -> bool:
  """A copy of a block inside the equation writes the buffer: what it held before is gone, or never asked for again."""
  return any(e.primitive.name == "copy" and e.refs[1].root is buffer for b in eqn.blocks for e in walk(b))


def _is_push(eqn: Eqn, buffer: Var, by_threads: bool, fillable: Callable[[Var], bool]) -> bool:
  if eqn.primitive.name != "copy":
    return False
  src, dst = eqn.refs
  whole = dst.root is buffer and dst.is_whole and src.type.space is Space.GLOBAL
  return whole and (is_tma(eqn) or (by_threads and fillable(buffer)))


def _pushes_in_parts(block: Block) -> dict[Eqn, tuple[Eqn, ...]]:
  """Copies by TMA of rows that together are all rows of a buffer, one after another, before anything uses it: each of
  them -> all of them."""
  found: dict[Eqn, tuple[Eqn, ...]] = {}
  begun: dict[Var, tuple[tuple[Eqn, ...], int]] = {}       # the copies, and the row that they reach
  for eqn in block.eqns:
    for inner in eqn.blocks:
      found |= _pushes_in_parts(inner)
    rows = _rows_of(eqn)
    buffer = eqn.refs[1].root if rows is not None else None
    for used in shared_uses(eqn):
      if used is not buffer:
        begun.pop(used, None)
    if rows is None or buffer is None:
      continue
    copies, reached = begun.pop(buffer, ((), 0))
    if rows.start == reached:
      begun[buffer] = ((*copies, eqn), rows.stop)
    if buffer in begun and rows.stop == buffer.type.shape[0]:  # type: ignore[union-attr]
      copies, _ = begun.pop(buffer)
      found |= dict.fromkeys(copies, copies)
  return found


def _rows_of(eqn: Eqn) -> range | None:
  """The rows of a shared buffer that a copy by TMA writes, in full, and not all of them; None of other equations."""
  if eqn.primitive.name != "copy" or not is_tma(eqn) or eqn.refs[0].type.space is not Space.GLOBAL:
    return None
  dst = eqn.refs[1]
  first, *others = dst.view.dims
  plain = dst.view.perm == tuple(range(len(dst.view.dims))) and all(
      d.stride == 1 and not d.squeezed and not d.edges for d in dst.view.dims)
  full = all(d.start == 0 and d.size == n for d, n in zip(others, dst.root.type.shape[1:], strict=True))  # type: ignore[union-attr]
  if not plain or not full or dst.is_whole or not isinstance(first.start, int) or not isinstance(first.size, int):
    return None
  return range(first.start, first.start + first.size)


def _depth(eqn: Eqn, around: int) -> int:
  """Stages of the blocks inside an equation."""
  depth = eqn.params.get("num_stages") if eqn.primitive.name == "for_loop" else None
  return depth or around


def _walk_stages(block: Block, stages: int) -> Iterator[tuple[Eqn, int]]:
  """Every equation with the stages of the loop around it."""
  for eqn in block.eqns:
    yield eqn, stages
    for inner in eqn.blocks:
      yield from _walk_stages(inner, _depth(eqn, stages))


def find_rings(graph: TileGraph, fillable: Callable[[Var], bool], *, least: int = 2) -> tuple[list[Ring], list[str]]:
  """The rings of a graph, and for each other shared buffer that a copy fills the reason why it is none.

  Args:
    fillable: whether threads may fill slots of a buffer.
    least: stages of the loop, 1 outside of any, from which on their copies are pushes.
  """
  notes: list[str] = []
  refused: set[Var] = set()
  changed: dict[Var, Eqn] = {}
  parts = _pushes_in_parts(graph.body)
  for eqn, stages in _walk_stages(graph.body, 1):
    for effect in effects(eqn) if not eqn.blocks else ():
      if isinstance(effect, RefEffect) and effect.access is Access.WRITE:
        ref = eqn.refs[effect.operand]
        if ref.type.space is not Space.SHARED or ref.root in refused:
          continue
        if eqn.primitive.name != "copy":
          changed.setdefault(ref.root, eqn)
        elif eqn not in parts and not _is_push(eqn, ref.root, stages >= least, fillable):
          refused.add(ref.root)
          notes.append(_filled_by_consumers(ref.root, eqn))
  for buffer, eqn in changed.items():
    if buffer not in refused and not _pushed_first(graph.body, buffer):
      refused.add(buffer)
      notes.append(_filled_by_consumers(buffer, eqn))
  segments: dict[frozenset[Var], list[tuple[Segment, int]]] = {}
  _collect(graph.body, 1, refused, parts, segments, notes)
  keys = _disjoint(segments, refused)
  rings = []
  for key, found in keys.items():
    order = tuple(dict.fromkeys(c.refs[1].root for c in found[0][0].copies))
    assert set(order) == set(key)
    rings.append(Ring(order, max(n for _, n in found), tuple(s for s, _ in found)))
  return rings, notes


def changed_buffers(block: Block) -> set[Var]:
  """Shared buffers that something other than a copy writes."""
  return {e.refs[x.operand].root for e in walk(block) if not e.blocks and e.primitive.name != "copy" for x in effects(e)
          if isinstance(x, RefEffect) and x.access is Access.WRITE and e.refs[x.operand].type.space is Space.SHARED}


def _filled_by_consumers(buffer: Var, eqn: Eqn) -> str:
  how = eqn.params.get("dispatch") if eqn.primitive.name == "copy" else None
  what = f"a {how} copy" if how else f"'{eqn.primitive}'"
  return f"{buffer.hint or 'buffer'} is one slot, filled by the consumers: it is written by {what} at {eqn.loc.short()}"


def _pushed_first(block: Block, buffer: Var) -> bool:
  """Whether every use of a buffer comes after a copy into it in the same block, or in a block around."""
  copies = {e for e in walk(block) if e.primitive.name == "copy" and e.refs[1].root is buffer}
  return bool(copies) and not _unreached(block, {buffer}, copies)


def _disjoint(segments: dict[frozenset[Var], list[tuple[Segment, int]]],
              refused: set[Var]) -> dict[frozenset[Var], list[tuple[Segment, int]]]:
  """Splits groups that share a buffer with another group into single buffers, and drops refused buffers."""
  owners: dict[Var, set[frozenset[Var]]] = {}
  for key in segments:
    for v in key:
      owners.setdefault(v, set()).add(key)
  shared = {v for v, keys in owners.items() if len(keys) > 1}
  out: dict[frozenset[Var], list[tuple[Segment, int]]] = {}
  for key, found in segments.items():
    parts = [key] if not key & shared and not key & refused else [frozenset({v}) for v in key]
    for part in parts:
      if part & refused:
        continue
      for s, n in found:
        copies = tuple(c for c in s.copies if c.refs[1].root in part)
        out.setdefault(part, []).append((Segment(copies, s.first_use, s.last_use), n))
  return out


def _collect(block: Block, stages: int, refused: set[Var], parts: dict[Eqn, tuple[Eqn, ...]], out: dict,
             notes: list[str]) -> None:
  pushes: list[tuple[int, tuple[Eqn, ...]]] = []           # the place of the last copy, and the copies
  for i, eqn in enumerate(block.eqns):
    for inner in eqn.blocks:
      _collect(inner, _depth(eqn, stages), refused, parts, out, notes)
    if eqn.primitive.name == "copy" and eqn.refs[1].type.space is Space.SHARED and eqn.refs[1].root not in refused:
      copies = parts.get(eqn, (eqn,))                      # whatever else writes the buffer is refused
      if eqn is copies[-1]:
        pushes.append((i, copies))
  spans: list[tuple[int, tuple[Eqn, ...], int, int]] = []
  later = {copies[0] for _, copies in pushes}
  for i, copies in pushes:
    buffer = copies[0].refs[1].root
    end = next((j for j in range(i + 1, len(block.eqns)) if _refills(block.eqns[j], buffer) or (
        block.eqns[j] in later and block.eqns[j].refs[1].root is buffer)), len(block.eqns))
    uses = [j for j in range(i + 1, end) if buffer in shared_uses(block.eqns[j])]
    if not uses:
      refused.add(buffer)
      at = copies[0].loc.short()
      notes.append(f"{buffer.hint or 'buffer'} is one slot: what the copy at {at} brings is not used in its block")
    else:
      spans.append((i, copies, uses[0], uses[-1]))
  groups: list[list[tuple[int, tuple[Eqn, ...], int, int]]] = []
  for span in spans:
    if groups and span[1][0].refs[1].root not in {s[1][0].refs[1].root for s in groups[-1]} and (
        (groups[-1][0][2:] == span[2:] and span[0] < span[2]) or _read_together(block, [*groups[-1], span])):
      groups[-1].append(span)
    else:
      groups.append([span])
  for group in groups:
    copies = tuple(c for s in group for c in s[1])
    segment = Segment(copies, block.eqns[min(s[2] for s in group)], block.eqns[max(s[3] for s in group)])
    out.setdefault(frozenset(c.refs[1].root for c in copies), []).append((segment, stages))


def _read_together(block: Block, spans: list[tuple[int, tuple[Eqn, ...], int, int]]) -> bool:
  """Whether threads read what the copies bring, one after another, and nothing that takes long comes between."""
  first, last = min(s[2] for s in spans), max(s[3] for s in spans)
  buffers = {s[1][0].refs[1].root for s in spans}
  between = block.eqns[first:last + 1]
  return max(s[0] for s in spans) < first and all(is_tma(c) for s in spans for c in s[1]) and all(
      e.primitive.name == "load" if shared_uses(e) & buffers else not e.blocks and e.primitive.name not in _LONG
      for e in between)


def uses_outside_segments(graph: TileGraph, rings: list[Ring]) -> dict[Var, Eqn]:
  """Ring buffers that are used where no push of their block reaches: before its first copy, after a loop or branch that
  copies, or in another block."""
  push_sites = {c for r in rings for s in r.segments for c in s.copies}
  return _unreached(graph.body, {v for r in rings for v in r.buffers}, push_sites)


def _unreached(body: Block, buffers: set[Var], push_sites: set[Eqn]) -> dict[Var, Eqn]:
  bad: dict[Var, Eqn] = {}

  def visit(block: Block, live: frozenset[Var]) -> None:
    for eqn in block.eqns:
      used = shared_uses(eqn) & buffers
      if eqn.primitive.name == "copy" and eqn in push_sites:
        live = live | {eqn.refs[1].root}
        continue
      for v in used - live:
        if not eqn.blocks:
          bad.setdefault(v, eqn)
      refilled = {v for v in buffers if eqn.blocks and _refills(eqn, v)}
      live = live - refilled
      for inner in eqn.blocks:
        visit(inner, live)

  visit(body, frozenset())
  return bad
