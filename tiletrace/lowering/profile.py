"""Profiling of compiled kernels: both ends of each tt.profile become records in global memory, one more argument that
the kernel reads and writes. Without profiling they are removed before anything else happens.

Every warpgroup of a CTA has a ring of its own, so a record is a few stores and no atomic operation. Its words: how many
records were made, three unused; then records of `words` words each: 2 * span + begin, the SM, %globaltimer (two words,
ns), %clock (cycles of the SM), the program's ids. The newest are kept.
"""
from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.graph import Eqn, TileGraph, Var, expand_block, walk
from tiletrace.core.ops import grid
from tiletrace.core.ops.profile import profile_mark_p, profile_record_p
from tiletrace.core.source import Loc
from tiletrace.core.types import RefType, Space, TileType, whole_view

HEADER, FIXED = 4, 5            # words before the records of a warpgroup; of a record, before the ids
MOST_WORDS = 1 << 22            # 16 MiB for all
_MOST_RECORDS = 1024            # of a warpgroup
_CTAS = 1024                   # of a kernel whose grid each call decides


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
  """A span that ran.

  Attributes:
    start, end: %globaltimer, ns; the hardware may count in larger steps.
    cycles: of the SM, between the two.
    program: its ids. warpgroup: of the CTA. line: where a span of that name is first opened.
  """
  kernel: str
  name: str
  line: str
  sm: int
  cta: int
  warpgroup: int
  program: tuple[int, ...]
  start: int
  end: int
  cycles: int


COLLECTORS: list[Callable[[list[Event]], None]] = []


@dataclasses.dataclass(frozen=True, slots=True)
class Records:
  """What a profiled kernel records: an operand and result behind the others.

  Attributes:
    spans: (name, place) of each tt.profile.
    ctas, warpgroups: for how many of each there is room; CTAs beyond record nothing.
    capacity: records of a warpgroup, a power of two.
  """
  kernel: str
  spans: tuple[tuple[str, Loc], ...]
  rank: int
  ctas: int
  warpgroups: int
  capacity: int

  @property
  def words(self) -> int:
    """Of a record; even, so that the time is aligned."""
    return FIXED + self.rank + (FIXED + self.rank) % 2

  @property
  def block(self) -> int:
    """Words of one warpgroup."""
    return HEADER + self.capacity * self.words

  def empty(self) -> np.ndarray:
    return np.zeros(self.ctas * self.warpgroups * self.block, np.int32)

  def report(self, words: Any) -> None:
    """Hands the spans in i32 `words` to what collects them (tt.timeline)."""
    events = list(self.events(np.asarray(words)))
    for collect in COLLECTORS:
      collect(events)

  def events(self, words: np.ndarray) -> Iterator[Event]:
    """Every span of which both ends were kept, warpgroup by warpgroup in the order of their ends."""
    blocks = words.reshape(self.ctas, self.warpgroups, self.block)
    for cta, warpgroup in np.ndindex(self.ctas, self.warpgroups):
      made, table = int(blocks[cta, warpgroup, 0]), blocks[cta, warpgroup, HEADER:].reshape(self.capacity, self.words)
      open_spans: list[tuple[int, np.ndarray]] = []
      for n in range(max(0, made - self.capacity), made):
        record = table[n % self.capacity]
        span, begin = divmod(int(record[0]), 2)
        if begin:
          open_spans.append((span, record))
        elif open_spans and open_spans[-1][0] == span:        # else its begin was overwritten
          yield self._event(open_spans.pop()[1], record, cta, warpgroup)

  def _event(self, first: np.ndarray, last: np.ndarray, cta: int, warpgroup: int) -> Event:
    name, loc = self.spans[int(first[0]) // 2]
    start, end = (int(r[2:4].view(np.uint64)[0]) for r in (first, last))
    cycles = (int(last[4]) - int(first[4])) % 2**32
    return Event(self.kernel, name, loc.short(), int(first[1]), cta, warpgroup,
                 tuple(int(i) for i in first[FIXED:FIXED + self.rank]), start, end, cycles)


def without_profile(graph: TileGraph) -> TileGraph:
  """The graph without spans."""
  if not any(e.primitive is profile_mark_p for e in walk(graph.body)):
    return graph
  return graph.replace(body=expand_block(graph.body, lambda eqn: () if eqn.primitive is profile_mark_p else (eqn,)))


def instrument(graph: TileGraph) -> tuple[TileGraph, Records | None]:
  """The graph with a record for both ends of each span, and where these go, its last input and output; None: it has no
  spans."""
  marks = [e for e in walk(graph.body) if e.primitive is profile_mark_p]
  if not marks:
    return graph, None
  spans: dict[str, Loc] = {}
  for mark in marks:
    spans.setdefault(mark.params["name"], mark.loc)
  numbers = {name: i for i, name in enumerate(spans)}
  records = _room(graph, tuple(spans.items()))
  var = Var(RefType((records.empty().size,), dtypes.i32, Space.GLOBAL), "profile_records")

  def record(mark: Eqn) -> list[Eqn]:
    ids = [Eqn(grid.program_id_p, (), (Var(TileType((), dtypes.i32)),), {"axis": a}, mark.loc)
           for a in range(records.rank)]
    params = {"views": (whole_view(var.shape),), "span": numbers[mark.params["name"]], "begin": mark.params["begin"],
              "block": records.block, "words": records.words, "warpgroups": records.warpgroups}
    return [*ids, Eqn(profile_record_p, (var, *(e.outvars[0] for e in ids)), (), params, mark.loc)]

  body = expand_block(graph.body, lambda eqn: record(eqn) if eqn.primitive is profile_mark_p else (eqn,))
  return graph.with_hidden(var, "profile_records", body), records


def _room(graph: TileGraph, spans: tuple[tuple[str, Loc], ...]) -> Records:
  """As many CTAs as there are programs (of a dynamic grid: _CTAS), and records of each warpgroup, as fit; a producer
  may be added."""
  options = graph.options
  found = Records(graph.name, spans, len(options.grid), 1, options.warpgroups + 1, 8)
  programs = math.prod(options.grid)
  ctas = max(1, min(programs if isinstance(programs, int) else _CTAS, MOST_WORDS // (found.warpgroups * found.block)))
  each = (MOST_WORDS // (ctas * found.warpgroups) - HEADER) // found.words
  return dataclasses.replace(found, ctas=ctas, capacity=min(_MOST_RECORDS, 1 << each.bit_length() - 1))


def perfetto(events: list[Event]) -> dict[str, Any]:
  """The events in the Trace Event Format that Perfetto and chrome://tracing read: a process for each SM of a kernel, a
  thread for each warpgroup; times in microseconds from the first."""
  origin = min((e.start for e in events), default=0)
  kernels = {name: 1000 * i for i, name in enumerate(dict.fromkeys(e.kernel for e in events))}
  out: list[dict[str, Any]] = []
  named: collections.OrderedDict[tuple[int, int | None], str] = collections.OrderedDict()
  for e in sorted(events, key=lambda e: (e.start, -e.end)):
    pid, tid = kernels[e.kernel] + e.sm, 8 * e.cta + e.warpgroup
    named.setdefault((pid, None), f"{e.kernel}, SM {e.sm}")
    named.setdefault((pid, tid), f"CTA {e.cta}, warpgroup {e.warpgroup}")
    out.append({"name": e.name, "cat": e.kernel, "ph": "X", "ts": (e.start - origin) / 1000,
                "dur": (e.end - e.start) / 1000, "pid": pid, "tid": tid,
                "args": {"program": list(e.program), "cycles": e.cycles, "line": e.line}})
  names = [{"name": "process_name" if tid is None else "thread_name", "ph": "M", "pid": pid, "tid": tid or 0,
            "args": {"name": name}} for (pid, tid), name in named.items()]
  return {"traceEvents": [*names, *out], "displayTimeUnit": "ns"}
