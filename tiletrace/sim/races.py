"""Data races between the threads of a CTA or cluster and its asynchronous operations, by vector clocks.

Clocks have a column for each thread and for each asynchronous operation that may be in flight. Row t says up to which
access of every other column thread t is ordered after. A second row is the part of it that the async proxy sees: a
generic access must be in it when the thread issues an asynchronous operation on the same bytes, one of the two a write
(PTX ISA, Memory Consistency Model: proxy-preserved base causality order). Barriers, mbarriers and fences move clocks;
accesses are compared with the last write and the reads since (`shadow.py`), as in FastTrack (Flanagan and Freund, PLDI
2009).

What orders what:
  * bar.sync, bar.warp.sync: everybody after everybody. Shuffles, votes and `.aligned` matrix accesses order nothing.
  * mbarriers: an arrival releases into the phase, a successful wait acquires it. An asynchronous operation that
    completes on the mbarrier releases itself, not what its issuer did before.
  * wgmma is one operation of its four warps: it sees what all of them see, and whoever waits for it knows it done.
  * A generic read needs a proxy fence before an asynchronous write to the same bytes, too: on an H200 a TMA load that
    refilled a slot overtook loads issued before a bar.sync and an mbarrier arrival. Asynchronous reads and writes that
    were waited for need none.
  * cp.async belongs to the generic proxy; a thread knows its own copies only after a wait.

>>> races = RaceDetector(64, [Shadow(0, 1024)])
>>> t = np.arange(64)
>>> races.write(t, t * 16, 16, "store")
>>> races.read(t, t[::-1] * 16, 16, "load")
>>> print(races.findings[0])
race: load by threads 0..63 against store by threads 0..63, at 0x0..0x3ff
"""
from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from tiletrace.sim.clocks import NO_COLUMNS, NOTHING, Agent, Clock, Grid, Init, Token, join, rows_of
from tiletrace.sim.conflicts import (
  BARRIER_NOT_VISIBLE,
  KINDS,
  MISSING_PROXY_FENCE,
  NOT_WAITED_FOR,
  OVERWRITTEN_WHILE_READ,
  RACE,
  RACE_BETWEEN_CTAS,
  WRITE_TO_INPUT,
  Finding,
)
from tiletrace.sim.shadow import Readers, Shadow, distinct


@dataclasses.dataclass(slots=True)
class _Actor:
  """Who makes an access: epochs [granules], and a clock for each (`t` are rows of `c`) or one for all (an agent)."""
  column: np.ndarray
  value: np.ndarray
  c: np.ndarray
  t: np.ndarray | None = None
  agent: Agent | None = None
  p: np.ndarray | None = None

  def knows(self, columns: np.ndarray, values: Any) -> np.ndarray:
    return self.c.take(columns if self.t is None else self.t * self.c.shape[1] + columns) >= values

  def only(self, which: np.ndarray) -> _Actor:
    t = None if self.t is None else self.t[which]
    return _Actor(self.column[which], self.value[which], self.c, t, self.agent, self.p)


class RaceDetector:
  """The clocks of one CTA, or of one cluster with its threads numbered through.

  Args:
    threads: how many.
    memories: shared memory of each CTA, and global memory, whose shadows the detectors of a grid share. Accesses lie
      within one memory each.
    cta, grid: which CTA this is, and what the grid's detectors share, for shadows that are `grid_wide`.
  """

  def __init__(self, threads: int, memories: Sequence[Shadow], *, cta: int = 0, grid: Grid | None = None):
    self.threads, self.cta, self.grid = threads, cta, grid or Grid()
    self.width = threads                      # columns in use
    capacity = threads + 32
    # row t, column u: how far thread t is ordered after u; the part that the async proxy sees of shared memory; and of
    # global memory, where some fence says so
    self._known = [np.zeros((threads, capacity), np.int32) for _ in range(2)]
    self._known[0][np.arange(threads), np.arange(threads)] = 1
    # of each column: the last epoch given out, who issued, whether its writes are generic, whether it is an agent's
    self._last, self._issuer = np.zeros(capacity, np.int32), np.arange(capacity)
    self._generic, self._agents = np.arange(capacity) < threads, np.zeros(capacity, bool)
    self._team: dict[int, tuple[int, ...]] = {}       # agent's column -> all who issued it
    self._tokens: dict[Token, int] = {}               # of other CTAs -> the column that says which threads know it
    self._readers = Readers(capacity, cta)
    self._copies = -1                         # first column of cp.async, once it is used
    self._mbarriers: dict[int, Init] = {}
    self._seen: set[tuple] = set()
    self.findings: list[Finding] = []
    self._bases: list[int] = []
    self._memories: list[Shadow] = []
    for memory in memories:
      self.add(memory)

  def add(self, memory: Shadow) -> None:
    at = bisect.bisect(self._bases, memory.base)
    self._bases.insert(at, memory.base)
    self._memories.insert(at, memory)

  def _add_columns(self, n: int) -> int:
    """The first of `n` new columns."""
    first, have = self.width, len(self._last)
    self.width += n
    if self.width > have:
      width = max(2 * have, self.width)
      grow = ((0, 0), (0, width - have))
      self._known = [np.pad(m, grow) for m in self._known]
      self._readers.widen(width)
      self._last, self._issuer, self._generic, self._agents = (
          np.pad(x, (0, width - have)) for x in (self._last, self._issuer, self._generic, self._agents))
    return first

  # ---- order

  @property
  def _c(self) -> np.ndarray:
    return self._known[0]

  def barrier(self, threads: np.ndarray) -> None:
    """All of them have arrived and go on: each knows what all knew."""
    rows = rows_of(threads)
    for m in self._known:
      m[rows, :self.width] = m[rows, :self.width].max(0)
    self._c[threads, threads] += 1

  def release(self, threads: np.ndarray) -> Clock:
    """What they know so far, for whoever acquires it."""
    rows = rows_of(threads)
    clock = Clock(tuple(m[rows, :self.width].max(0) for m in self._known), NO_COLUMNS, NO_COLUMNS)
    self._c[threads, threads] += 1
    return clock

  def acquire(self, threads: np.ndarray, clock: Clock) -> None:
    """They are ordered after what the clock says."""
    rows = rows_of(threads)
    for m, known in zip(self._known, clock.known):
      part = m[rows, :len(known)]
      if isinstance(rows, slice):
        np.maximum(part, known, out=part)
      else:
        m[rows, :len(known)] = np.maximum(part, known)
    for column, value in zip(clock.columns.tolist(), clock.values.tolist()):
      self._c[rows, column] = np.maximum(self._c[rows, column], value)

  @staticmethod
  def merge(a: Clock, b: Clock) -> Clock:
    """Both together."""
    known = tuple(join(*pair) for pair in itertools.zip_longest(a.known, b.known))
    return Clock(known, np.concatenate([a.columns, b.columns]), np.concatenate([a.values, b.values]))

  def proxy_fence(self, threads: np.ndarray, space: str = "") -> None:
    """fence.proxy.async: what they know of a space ("shared", "global" or "": both) becomes visible to asynchronous
    operations ordered after this."""
    rows = rows_of(threads)
    if space != "shared" and len(self._known) == 2:
      self._known.append(np.zeros_like(self._known[0]))
    for m in self._known[1 + (space == "global"):2 + (space != "shared")]:
      m[rows, :self.width] = self._known[0][rows, :self.width]
    self._c[threads, threads] += 1
    self._fence_mbarriers(threads)

  # ---- accesses of threads (generic proxy)

  def read(self, threads: np.ndarray, addresses: np.ndarray, nbytes: int, where: Hashable) -> None:
    """Thread threads[i] reads `nbytes` at addresses[i]."""
    for shadow, which in self._split(addresses):
      if not shadow.read_only:
        at, actor = self._lanes(shadow, threads[which], addresses[which], nbytes)
        self._load(shadow, at, actor, self.grid.place(where))

  def write(self, threads: np.ndarray, addresses: np.ndarray, nbytes: int, where: Hashable, *,
            changed: np.ndarray | None = None, lost: np.ndarray | None = None) -> None:
    """Thread threads[i] writes `nbytes` at addresses[i].

    Threads that hold the same value may write it to one place unordered: nobody can tell who was last.

    Args:
      changed: bool [threads]: whether other bytes were there before; default all.
      lost: bool [threads]: whether other bytes are there afterwards, by another of the threads; default all.
    """
    self._write(threads, addresses, nbytes, where, False, changed, lost)

  def atomic(self, threads: np.ndarray, addresses: np.ndarray, nbytes: int, where: Hashable) -> None:
    """An atomic or other strong write: these don't race among themselves, but do with plain accesses."""
    self._write(threads, addresses, nbytes, where, True)

  def strong_read(self, threads: np.ndarray, addresses: np.ndarray, nbytes: int, where: Hashable) -> None:
    """ld.relaxed, ld.acquire: they race with plain writes only. A later plain write isn't compared with them."""
    for shadow, which in self._split(addresses):
      if not shadow.read_only:
        at, actor = self._lanes(shadow, threads[which], addresses[which], nbytes)
        self._load(shadow, at, actor, self.grid.place(where), strong=True)

  def _write(self, threads: np.ndarray, addresses: np.ndarray, nbytes: int, where: Hashable, atomic: bool,
             *differs: np.ndarray | None) -> None:
    for shadow, which in self._split(addresses):
      if shadow.read_only:
        self._find(WRITE_TO_INPUT, where, None, threads[which], (), addresses[which], nbytes)
        continue
      at, actor = self._lanes(shadow, threads[which], addresses[which], nbytes)
      each = len(at) // len(threads[which])
      parts = [d if d is None else np.repeat(d[which], each) for d in differs]
      self._store(shadow, at, actor, self.grid.place(where), atomic, *parts)

  def _lanes(self, shadow: Shadow, threads: np.ndarray, addresses: np.ndarray, nbytes: int,
             ) -> tuple[np.ndarray, _Actor]:
    at, each = shadow.of_lanes(addresses, nbytes, self._readers)
    t = threads if each == 1 else np.repeat(threads, each)
    return at, _Actor(t, self._c.take(t * (self._c.shape[1] + 1)), self._c, t)

  # ---- cp.async

  def copy_async(self, threads: np.ndarray, addresses: np.ndarray, nbytes: int, where: Hashable) -> None:
    """Thread threads[i] starts a cp.async of `nbytes` to shared addresses[i]."""
    if self._copies < 0:
      self._copies = first = self._add_columns(self.threads)
      self._generic[first:first + self.threads] = True
      self._issuer[first:first + self.threads] = np.arange(self.threads)
    for shadow, which in self._split(addresses):
      at, each = shadow.of_lanes(addresses[which], nbytes, self._readers)
      t = np.repeat(threads[which], each)
      column = t + self._copies
      self._store(shadow, at, _Actor(column, self._last[column] + 1, self._c, t), self.grid.place(where), atomic=False)

  def copy_mark(self, threads: np.ndarray) -> np.ndarray:
    """Closes what they have started (commit_group, mbarrier.arrive): marks for copy_wait and copy_clock, int32 [n]."""
    if self._copies < 0:
      return np.zeros(len(threads), np.int32)
    self._last[threads + self._copies] += 1
    return self._last[threads + self._copies]

  def copy_wait(self, threads: np.ndarray, marks: np.ndarray) -> None:
    """cp.async.wait_group: each knows its copies up to its mark to be complete."""
    if self._copies >= 0:
      column = threads + self._copies
      self._c[threads, column] = np.maximum(self._c[threads, column], marks)

  def copy_clock(self, threads: np.ndarray, marks: np.ndarray) -> Clock:
    """What cp.async.mbarrier.arrive releases when the copies up to the marks are complete."""
    return NOTHING if self._copies < 0 else Clock((), threads + self._copies, marks)

  # ---- asynchronous operations

  def issue(self, threads: np.ndarray, kind: str) -> Agent:
    """An asynchronous operation begins: of one thread, or of all threads of a warpgroup together.

    Declare its accesses at once, whenever their effect comes. An operation whose reads and writes complete apart (TMA
    stores) is two agents.
    """
    rows = rows_of(threads)
    known = tuple(m[rows].min(0) for m in self._known)
    done = np.flatnonzero(self._agents & (known[0] >= self._last))
    column = int(done[0]) if done.size else self._add_columns(1)
    self._agents[column] = True
    self._last[column] += 1
    self._c[threads, threads] += 1
    agent = Agent(kind, column, int(self._last[column]), tuple(threads.tolist()), known)
    self._issuer[column], self._team[column] = threads[0], agent.threads
    return agent

  def complete(self, agent: Agent) -> Clock:
    """What is known to whoever waits for it."""
    return Clock((), np.asarray([agent.column], np.int32), np.asarray([agent.value], np.int32))

  def agent_read(self, agent: Agent, addresses: np.ndarray, nbytes: int, where: Hashable) -> None:
    """It reads `nbytes` at each of the addresses, in any order."""
    for shadow, which in self._split(addresses):
      if not shadow.read_only:
        at = shadow.of_bytes(addresses[which], nbytes, self._readers)
        self._load(shadow, at, self._acting(agent, shadow, len(at)), self.grid.place(where))

  def agent_write(self, agent: Agent, addresses: np.ndarray, nbytes: int, where: Hashable, *,
                  atomic: bool = False) -> None:
    """It writes `nbytes` at each of the addresses, in any order; `atomic` for TMA's reductions."""
    for shadow, which in self._split(addresses):
      if shadow.read_only:
        self._find(WRITE_TO_INPUT, where, None, agent.threads, (), addresses[which], nbytes)
        continue
      at = shadow.of_bytes(addresses[which], nbytes, self._readers)
      self._store(shadow, at, self._acting(agent, shadow, len(at)), self.grid.place(where), atomic)

  def _acting(self, agent: Agent, shadow: Shadow, n: int) -> _Actor:
    c, which = agent.known[0], 2 if shadow.grid_wide else 1
    p = agent.known[which] if which < len(agent.known) else np.zeros_like(c)
    if (more := len(self._last) - len(c)) > 0:         # columns were added since
      c, p = np.pad(c, (0, more)), np.pad(p, (0, more))
    c[agent.column] = agent.value                      # it does not race with itself
    return _Actor(np.full(n, agent.column, np.int32), np.full(n, agent.value, np.int32), c, None, agent, p)

  def now(self, threads: np.ndarray) -> np.ndarray:
    """The epoch of what each of them does next, int32 [n]."""
    return self._c[threads, threads]

  def knowledge(self, threads: np.ndarray) -> np.ndarray:
    """Up to which epoch of each column some of them are ordered after, int32 [columns]."""
    return self._c[rows_of(threads)].max(0)

  def unfinished(self, low: int, high: int, threads: np.ndarray) -> np.ndarray:
    """Who issued asynchronous writes to addresses from `low` up to `high` that none of these threads knows to be
    complete, themselves apart."""
    known, late = self.knowledge(threads), []
    for shadow in self._memories:
      if shadow.base < high and low < shadow.base + shadow.nbytes and not shadow.read_only and not shadow.grid_wide:
        at = slice((low - shadow.base) // shadow.granule, (high - shadow.base) // shadow.granule)
        column = shadow.w_col[at][shadow.w_clk[at] > known[shadow.w_col[at]]]
        late += self._issuer[column[column >= self.threads]].tolist()
    return np.setdiff1d(late, threads).astype(int)

  def writers(self, addresses: np.ndarray, nbytes: int) -> list[Any]:
    """Where `nbytes` at each of the addresses were last written, each place once."""
    places: set[int] = set()
    for shadow, which in self._split(addresses):
      if not shadow.read_only:
        at = shadow.of_bytes(addresses[which], nbytes, self._readers)
        places.update(shadow.w_place[at[shadow.w_clk[at] > 0]].tolist())
    return [self.grid.places[p] for p in sorted(places)]

  # ---- mbarriers

  def mbarrier_init(self, thread: int, address: int, where: Hashable) -> None:
    """mbarrier.init: a generic write that other threads and the asynchronous proxy must be able to see."""
    self._mbarriers[address] = Init(thread, int(self._c[thread, thread]), False, where)

  def mbarrier_fence(self, threads: np.ndarray) -> None:
    """fence.mbarrier_init: the initialisations before it become visible to the asynchronous proxy."""
    self._fence_mbarriers(threads)

  def _fence_mbarriers(self, threads: np.ndarray) -> None:
    for address, init in self._mbarriers.items():
      if not init.fenced and (self._c[threads, init.thread] >= init.value).any():
        self._mbarriers[address] = dataclasses.replace(init, fenced=True)

  def mbarrier_use(self, threads: np.ndarray, address: int, where: Hashable) -> None:
    """An arrival or a wait by threads."""
    init = self._mbarriers.get(address)
    if init is not None and (unknown := self._c[threads, init.thread] < init.value).any():
      self._find(BARRIER_NOT_VISIBLE, where, init.where, threads[unknown], (init.thread,), np.asarray([address]), 8)

  def mbarrier_complete(self, agent: Agent, address: int, where: Hashable) -> None:
    """An asynchronous operation that will complete on the mbarrier."""
    init = self._mbarriers.get(address)
    if init is not None and (agent.known[0][init.thread] < init.value or not init.fenced):
      self._find(BARRIER_NOT_VISIBLE, where, init.where, agent.threads, (init.thread,), np.asarray([address]), 8)

  # ---- the comparison

  def _split(self, addresses: np.ndarray) -> list[tuple[Shadow, Any]]:
    """[(memory, which of the accesses are in it)]."""
    if not len(addresses):
      return []
    low, high = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))
    first, last = bisect.bisect(self._bases, low) - 1, bisect.bisect(self._bases, high) - 1
    assert first >= 0 and high < self._memories[last].base + self._memories[last].nbytes, f"{low:#x}..{high:#x}"
    if first == last:
      return [(self._memories[first], slice(None))]
    home = np.searchsorted(self._bases, addresses, side="right") - 1
    return [(self._memories[i], home == i) for i in np.unique(home)]

  def _sees(self, shadow: Shadow, at: np.ndarray, actor: _Actor) -> np.ndarray:
    """Whether each granule's last write is ordered before, and visible."""
    column, value = shadow.w_col.take(at), shadow.w_clk.take(at)
    if shadow.grid_wide:                      # columns of another CTA's clocks: _foreign_load, _foreign_store
      own = shadow.w_cta.take(at) == self.cta
      column, value = np.where(own, column, 0), np.where(own, value, 0)
    return self._ordered(actor, column, value)

  def _ordered(self, actor: _Actor, column: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Whether each earlier access is ordered before, and visible."""
    ordered = actor.knows(column, value)
    if actor.p is not None:
      ordered &= ~self._generic.take(column) | (actor.p.take(column) >= value)
    return ordered

  def _horizon(self, actor: _Actor) -> np.ndarray:
    """Up to which epoch of each column accesses are ordered before, and visible: [columns], or [accesses, columns]."""
    if actor.p is None:
      return actor.c if actor.t is None else actor.c[actor.t]
    return np.where(self._generic, np.minimum(actor.c, actor.p), actor.c)

  def _load(self, shadow: Shadow, at: np.ndarray, actor: _Actor, place: int, strong: bool = False) -> None:
    if shadow.grid_wide:
      self._foreign_load(shadow, at, actor, place, strong)
    seen = self._sees(shadow, at, actor)
    if strong:
      seen |= shadow.w_atomic[at]
    if not seen.all():
      self._conflicts(shadow, at, actor, place, ~seen, with_write=True)
    if strong:
      return
    alone = (shadow.r_row.take(at) < 0) & self._ordered(actor, shadow.r_col.take(at), shadow.r_clk.take(at))
    if alone.all():
      shadow.r_col[at], shadow.r_clk[at], shadow.r_place[at] = actor.column, actor.value, place
      if actor.agent is not None:
        return
      rest = shadow.r_col.take(at) != actor.column            # lanes that read one place together
    else:
      sole = at[alone]
      shadow.r_col[sole], shadow.r_clk[sole], shadow.r_place[sole] = actor.column[alone], actor.value[alone], place
      rest = ~alone | (shadow.r_col[at] != actor.column)
    if rest.any():
      (self._share if actor.agent is None else self._share_alike)(shadow, at[rest], actor.only(rest), place)

  def _share(self, shadow: Shadow, at: np.ndarray, actor: _Actor, place: int) -> None:
    """Adds readers to granules that have others, which these are not ordered after."""
    row = shadow.r_row[at]
    if (old := np.flatnonzero(row >= 0)).size:
      granules = distinct(at[old])
      shadow.r_row[granules] = self._readers.alone(shadow.r_row[granules])
    new = distinct(at[row < 0])
    rows = self._readers.take(len(new))
    new = new[:len(rows)]
    self._readers.rows[rows, shadow.r_col[new]] = shadow.r_clk[new]
    shadow.r_row[new] = rows
    row = shadow.r_row[at]
    self._readers.rows[row[row >= 0], actor.column[row >= 0]] = actor.value[row >= 0]
    shadow.r_col[at], shadow.r_clk[at], shadow.r_place[at] = actor.column, actor.value, place

  def _share_alike(self, shadow: Shadow, at: np.ndarray, actor: _Actor, place: int) -> None:
    """The same for an asynchronous operation: many granules have the same readers before, and then."""
    row = shadow.r_row[at]
    if (new := np.flatnonzero(row < 0)).size:
      row[new] = self._readers.take_alike(shadow.r_col[at[new]], shadow.r_clk[at[new]])
    known = row >= 0
    row[known] = self._readers.add_to_all(row[known], int(actor.column[0]), int(actor.value[0]))
    shadow.r_row[at] = row
    shadow.r_col[at], shadow.r_clk[at], shadow.r_place[at] = actor.column, actor.value, place

  def _store(self, shadow: Shadow, at: np.ndarray, actor: _Actor, place: int, atomic: bool,
             changed: np.ndarray | None = None, lost: np.ndarray | None = None) -> None:
    if shadow.grid_wide:
      self._foreign_store(shadow, at, actor, place, atomic, changed)
    seen = self._sees(shadow, at, actor)
    if atomic:
      seen |= shadow.w_atomic[at]
    if changed is not None:
      seen |= ~changed
    if not seen.all():
      self._conflicts(shadow, at, actor, place, ~seen, with_write=True)
    read = ~self._ordered(actor, shadow.r_col.take(at), shadow.r_clk.take(at))
    row = shadow.r_row.take(at)
    if (several := np.flatnonzero(row >= 0)).size:
      read[several] = self._read_since(row[several], actor.only(several))
      self._conflicts_with_rows(shadow, at, actor, place, several[read[several]])
      self._readers.drop(row[several] if actor.agent is not None else shadow.r_row[distinct(at[several])])
      shadow.r_row[at] = -1
      read[several] = False
    if read.any():
      self._conflicts(shadow, at, actor, place, read, with_write=False)
    shadow.w_col[at], shadow.w_clk[at], shadow.w_place[at] = actor.column, actor.value, place
    shadow.w_atomic[at] = atomic
    shadow.r_clk[at] = 0
    if shadow.grid_wide:
      shadow.w_cta[at], shadow.r_cta[at], shadow.r_many[at] = self.cta, -1, False
    twice = shadow.w_col.take(at) != actor.column             # lanes that write one place together
    if lost is not None:
      twice &= lost
    if not atomic and twice.any():
      self._conflicts(shadow, at, actor, place, twice, with_write=True)

  def _read_since(self, rows: np.ndarray, actor: _Actor) -> np.ndarray:
    """Whether some reader in each of the rows is not ordered before."""
    if actor.agent is None:
      return np.asarray((self._readers.rows[rows] > self._horizon(actor)).any(-1))
    each, which = np.unique(rows, return_inverse=True)
    return np.asarray((self._readers.rows[each] > self._horizon(actor)).any(-1))[which]

  # ---- the grid

  def publish(self, threads: np.ndarray, wide: bool) -> Token:
    """A release through global memory: what these threads know, of other CTAs too.

    Args:
      wide: whether other CTAs may acquire it: gpu or system scope.
    """
    rows = rows_of(threads)
    foreign = tuple(token for token, column in self._tokens.items() if self._c[rows, column].any())
    return Token(self.cta, wide, self.release(threads), foreign)

  def receive(self, threads: np.ndarray, token: Token, wide: bool) -> None:
    """They acquire what a token says; what other CTAs released only where both are `wide`. Proxy fences of other CTAs
    are not looked at."""
    if token.cta == self.cta:
      self.acquire(threads, token.clock)
    elif not (wide and token.wide):
      return
    for one in (token, *token.foreign):
      if one.cta == self.cta:
        self.acquire(threads, one.clock)
      else:
        if one not in self._tokens:
          self._tokens[one] = self._add_columns(1)
        self._c[threads, self._tokens[one]] = 1

  def _learnt(self, actor: _Actor, ctas: np.ndarray, columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether each access, an epoch in its CTA's clocks, is ordered before by a release and an acquire."""
    out = np.zeros(len(ctas), bool)
    for token, column in self._tokens.items():
      row = token.clock.known[0]
      covered = (columns < len(row)) & (row[np.minimum(columns, len(row) - 1)] >= values)
      out |= (ctas == token.cta) & covered & actor.knows(np.full(len(ctas), column), 1)
    return out

  def _foreign_load(self, shadow: Shadow, at: np.ndarray, actor: _Actor, place: int, strong: bool) -> None:
    """Compares with the last write, where another CTA made it."""
    written, reader = shadow.w_cta.take(at), shadow.r_cta.take(at)
    bad = (written >= 0) & (written != self.cta)
    if bad.any():
      bad &= ~self._learnt(actor, written, shadow.w_col[at], shadow.w_clk[at])
      if strong:
        bad &= ~shadow.w_atomic[at]
      if bad.any():
        self._between(shadow, at, actor, place, bad, shadow.w_place)
    if strong:
      return
    strange = at[(reader >= 0) & (reader != self.cta)]
    shadow.r_many[strange] = True
    shadow.r_row[strange], shadow.r_clk[strange], shadow.r_col[strange] = -1, 0, 0
    shadow.r_cta[at] = self.cta

  def _foreign_store(self, shadow: Shadow, at: np.ndarray, actor: _Actor, place: int, atomic: bool,
                     changed: np.ndarray | None) -> None:
    """Compares with the last write and read, where another CTA made them; of several readers with the last one."""
    written, reader = shadow.w_cta.take(at), shadow.r_cta.take(at)
    wrote, has_read = (written >= 0) & (written != self.cta), (reader >= 0) & (reader != self.cta)
    bad = wrote & ~self._learnt(actor, written, shadow.w_col[at], shadow.w_clk[at])
    if atomic:
      bad &= ~shadow.w_atomic[at]
    if changed is not None:
      bad &= changed
    if bad.any():
      self._between(shadow, at, actor, place, bad, shadow.w_place)
    bad = has_read & ~self._learnt(actor, reader, shadow.r_col[at], shadow.r_clk[at])
    if not self._tokens:
      bad |= shadow.r_many[at]
    if bad.any():
      self._between(shadow, at, actor, place, bad, shadow.r_place)
    strange = at[has_read]
    shadow.r_row[strange], shadow.r_clk[strange], shadow.r_col[strange] = -1, 0, 0

  def _between(self, shadow: Shadow, at: np.ndarray, actor: _Actor, place: int, bad: np.ndarray,
               places: np.ndarray) -> None:
    now = actor.only(bad)
    self._find(RACE_BETWEEN_CTAS, self.grid.places[place], self.grid.places[int(places[at[bad]][0])],
               self._issuer[now.column], (), shadow.address(at[bad]), shadow.granule)

  # ---- findings

  def _conflicts(self, shadow: Shadow, at: np.ndarray, actor: _Actor, place: int, bad: np.ndarray, *,
                 with_write: bool) -> None:
    at, now = at[bad], actor.only(bad)
    column, value = (shadow.w_col[at], shadow.w_clk[at]) if with_write else (shadow.r_col[at], shadow.r_clk[at])
    places = (shadow.w_place if with_write else shadow.r_place)[at]
    self._classify(shadow, at, now, place, places, column, value, with_write=with_write)

  def _conflicts_with_rows(self, shadow: Shadow, at: np.ndarray, actor: _Actor, place: int, which: np.ndarray) -> None:
    """The first reader of each row that the write is not ordered after."""
    if which.size:
      rows = self._readers.rows[shadow.r_row[at[which]]]
      now = actor.only(which)
      unordered = rows > (now.c if now.t is None else now.c[now.t])
      column = np.where(unordered.any(-1), unordered.argmax(-1), (rows > self._horizon(now)).argmax(-1))
      value = rows[np.arange(len(rows)), column]
      self._classify(shadow, at[which], now, place, shadow.r_place[at[which]], column, value, with_write=False)

  def _classify(self, shadow: Shadow, at: np.ndarray, now: _Actor, place: int, places: np.ndarray,
                column: np.ndarray, value: np.ndarray, *, with_write: bool) -> None:
    """One finding for each kind and earlier place."""
    asynchronous = column >= self.threads
    kinds = np.full(len(at), KINDS.index(RACE))
    kinds[asynchronous] = KINDS.index(NOT_WAITED_FOR if with_write else OVERWRITTEN_WHILE_READ)
    if now.agent is not None:
      kinds[self._generic[column] & now.knows(column, value)] = KINDS.index(MISSING_PROXY_FENCE)
    for key in np.unique(np.stack([kinds, places], 1), axis=0):
      which = (kinds == key[0]) & (places == key[1])
      threads = now.agent.threads if now.agent is not None else self._issuer[now.column[which]]
      others = [t for c in np.unique(column[which]).tolist() for t in self._team.get(c, (self._issuer[c],))]
      self._find(KINDS[key[0]], self.grid.places[place], self.grid.places[key[1]], threads, others,
                 shadow.address(at[which]), shadow.granule)

  def _find(self, kind: str, where: Any, other: Any, threads: Any, others: Any, addresses: np.ndarray,
            nbytes: int) -> None:
    """Records it, unless the same two places had the same kind before."""
    key = (kind, where, other)
    if key not in self._seen:
      self._seen.add(key)
      threads, others = (tuple(int(t) for t in np.unique(np.asarray(x, int))) for x in (threads, others))
      self.findings.append(Finding(kind, where, other, threads, others, tuple(np.unique(addresses).tolist()), nbytes))
