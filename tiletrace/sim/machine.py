"""The machine: the CTAs of one cluster, their strands, what they wait for, and the asynchronous work in flight."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.registers import Reg, Special
from tiletrace.sim import numerics, races
from tiletrace.sim.adversary import Adversary
from tiletrace.sim.clocks import Token
from tiletrace.sim.faults import KINDS, Fault, Place, Violation, ranges
from tiletrace.sim.memory import Global, Shared
from tiletrace.sim.program import Op, Program, SimulatorInputError
from tiletrace.sim.registers import Registers
from tiletrace.sim.shadow import Shadow
from tiletrace.sim.special import SPECIAL
from tiletrace.sim.storage import resize
from tiletrace.sim.strands import WARP, Strand, ascending, diverge, index, merge
from tiletrace.sim.summary import Counters
from tiletrace.sim.tables import EFFECTS, Act

_Unit = TypeVar("_Unit")

WARPGROUP = 128
_ALONE = 1000          # instructions of a strand that is the only one, before it lets other clusters go on
Watcher = Callable[[frozenset[Reg], np.ndarray], None]


class Condition(Protocol):
  """What a blocked strand waits for."""

  def ready(self) -> bool: ...

  def describe(self) -> str:
    """What is waited for, how far it is, and what would release it."""
    ...


class Event(Protocol):
  """Asynchronous work in flight.

  Attributes:
    eager: whether it completes soon, or only when everybody waits.
  """
  eager: bool

  def complete(self) -> None: ...

  def describe(self) -> str: ...


class Stop(Exception):
  """A fault that ends the run."""

  def __init__(self, fault: Fault):
    super().__init__(str(fault))
    self.fault = fault


@dataclasses.dataclass(slots=True)
class Launch:
  """What all CTAs of a launch share.

  Attributes:
    params: parameter name -> its value: an integer, or an index of `tensor_maps` for a "tensormap".
    grid: CTAs along x, y, z.
    cluster: CTAs of a cluster along x, y, z.
    most_steps: instructions that all strands together may run.
    grid_order, shadows: what the race detectors of all clusters share; None and empty: races are not looked for.
    counters: a `summary.Counters`, or None.
    written: which arrays of the memory are outputs.
    first_only: whether the first race ends the run.
    findings: faults that did not end the run.
    released: by global address and (cluster, thread), what was released there (order.py).
  """
  program: Program
  memory: Global
  params: dict[str, int]
  tensor_maps: tuple[Any, ...]
  grid: tuple[int, int, int]
  cluster: tuple[int, int, int]
  smem_bytes: int
  adversary: Adversary
  most_steps: int
  grid_order: races.Grid | None = None
  shadows: tuple[Shadow, ...] = ()
  counters: Counters | None = None
  written: frozenset[int] = frozenset()
  first_only: bool = False
  steps: int = 0
  findings: list[Fault] = dataclasses.field(default_factory=list)
  released: dict[int, dict[tuple[int, int], Token]] = dataclasses.field(default_factory=dict)


class Machine:
  """One cluster at a time.

  Attributes:
    cta: the grid index of the cluster's first CTA.
    ready, blocked: strands. events: asynchronous work in flight.
    changed: whether something happened that a blocked strand may wait for.
    alive: which threads have not ended.
    busy: registers that wgmma in flight own, by warpgroup.
  """

  def __init__(self, launch: Launch):
    self.launch, self.program, self.ops = launch, launch.program, launch.program.ops
    self.adversary = launch.adversary
    self.ctas = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    self.cta_threads = launch.program.entry.threads
    self.threads = self.ctas * self.cta_threads
    self.rank = np.arange(self.threads) // self.cta_threads          # of each thread's CTA in the cluster
    self.registers = Registers(launch.program.entry, self.threads, launch.program.tracked)
    self.shared = Shared(launch.smem_bytes, self.ctas)
    self.shared_start = self.rank * self.shared.span
    self.memory, self.counters = launch.memory, launch.counters
    self.races: races.RaceDetector | None = None
    used = {x.name for op in self.ops for x in op.inst.operands if isinstance(x, Special)}
    self.special = {name: np.zeros(self.threads, np.uint64 if name in ("clock64", "globaltimer", "gridid")
                                   else np.uint32) for name in SPECIAL if name in used}
    self._units: dict[Any, Any] = {}                                 # state of the functional units, by what made it
    self.swizzles: dict[Any, int] = {}                               # of the tensor loads that ran, by instruction
    self.ready: list[Strand] = []
    self.blocked: list[tuple[Strand, Condition]] = []
    self.events: list[Event] = []
    self.changed = False
    self.alive = np.zeros(self.threads, bool)
    self.busy: dict[int, dict[Reg, str]] = {}
    self.busy_anywhere: set[Reg] = set()
    self.cta = -1
    self._running, self._picked = self.ops[0], 0
    self.on_start: list[Callable[[], None]] = []
    self.on_exit: list[Callable[[np.ndarray], None]] = []            # threads end
    self.on_end: list[Callable[[], None]] = []                       # the cluster ends
    self.counts = [0] * len(self.ops) if launch.counters is None else launch.counters.executed
    self._watched: list[tuple[frozenset[Reg], Watcher] | None] = [None] * len(self.ops)
    self.guards: list[tuple[np.ndarray, bool] | None] = [
        None if op.inst.pred is None else (self.registers.row(op.inst.pred), op.inst.negate) for op in self.ops]
    self.plain: list[Callable[[Any], None] | None] = []
    self.acts: list[Act | None] = []
    for op in self.ops:
      run = bind_arithmetic(self.registers, op)
      self.plain.append(run)
      self.acts.append(self._bind_effect(op) if run is None else None)

  def watch(self, written: dict[int, frozenset[Reg]], tell: Watcher) -> None:
    """`tell` hears when these instructions have written these registers."""
    for at, registers in written.items():
      if registers:
        assert self._watched[at] is None
        self._watched[at] = registers, tell

  def _bind_effect(self, op: Op) -> Act | None:
    if op.inst.row is isa.BRA:
      return None
    make = EFFECTS.get(op.inst.row)
    if make is None:
      raise SimulatorInputError(f"the simulator has no semantics for {op.inst.form}: {op.place}", loc=op.inst.loc)
    return make(self, op)

  # ---- the life of a cluster

  def start(self, cta: int) -> None:
    """Puts the cluster whose first CTA is `cta` on the machine."""
    self.cta = cta
    self.registers.clear()
    self.shared.clear()
    self.ready = [Strand(0, np.arange(self.threads))]
    self.blocked, self.events, self.changed = [], [], False
    self.alive[...] = True
    self.busy, self.busy_anywhere = {}, set()
    for name, row in self.special.items():
      row[...] = SPECIAL[name](self)
    if self.launch.grid_order is not None:
      own = Shadow(0, self.shared.span * self.ctas)
      self.races = races.RaceDetector(self.threads, [own, *self.launch.shadows], cta=cta // self.ctas,
                                      grid=self.launch.grid_order)
    for f in self.on_start:
      f()

  def step(self) -> str:
    """One scheduling decision: "ran", "waits" (nothing here can go on) or "done".

    Raises:
      Stop: a fault.
    """
    if self.changed:
      self._wake()
    for event in [e for e in self.events if e.eager]:
      self._complete(event)
    if self.ready:
      self._picked = self.launch.steps
      self._advance(self._pick())
      return "ran"
    if self.events:
      self._complete(self.events[self.adversary.pick(len(self.events))])
      return "ran"
    if self.blocked:
      self._wake()
      return "ran" if self.ready else "waits"
    try:
      for f in self.on_end:
        f()
    except Violation as v:
      raise Stop(self.fault(v, None)) from None
    self.collect_races()
    return "done"

  def raced(self) -> bool:
    return self.races is not None and bool(self.races.findings)

  def _complete(self, event: Event) -> None:
    self.events.remove(event)
    try:
      event.complete()
    except Violation as v:
      raise Stop(self.fault(v, getattr(event, "op", None))) from None

  def _wake(self) -> None:
    self.changed = False
    still = []
    for strand, condition in self.blocked:
      if condition.ready():
        self.ready.append(strand)
      else:
        still.append((strand, condition))
    self.blocked = still

  def _pick(self) -> Strand:
    """The strand furthest behind with all that stand where it does, or any one."""
    ready = self.ready
    if len(ready) == 1:
      return ready.pop()
    if self.adversary.out_of_order():
      chosen = ready[self.adversary.pick(len(ready))]
    else:
      chosen = min(ready, key=_place)
    alike = [s for s in ready if s.pc == chosen.pc and s.frames == chosen.frames]
    self.ready = [s for s in ready if s not in alike]
    return merge(alike)

  # ---- running

  def _advance(self, s: Strand) -> None:
    """Runs a strand until it blocks, diverges, ends, or lets others go first."""
    ops, plain, guards, counts, launch = self.ops, self.plain, self.guards, self.counts, self.launch
    while True:
      pc = s.pc
      if pc >= len(ops):
        raise Stop(self.fault(Violation("trap", "control ran off the end of the kernel"), ops[-1]))
      op = ops[pc]
      if op.joins and s.frames and s.frames[-1].join == pc:
        joined = self._arrive(s)
        if joined is None:
          return
        s = joined
        continue
      launch.steps += 1
      if launch.steps > launch.most_steps:
        self._step_limit(op, s)
      counts[pc] += len(s.warps)
      try:
        self._running = op
        if op.unsure:
          self._check_guard(op, s)
        threads, at, guard = s.threads, s.at, guards[pc]
        if guard is not None:
          on = guard[0][at] ^ guard[1]
          if op.target >= 0:
            if self._branch(op, s, on):
              return
            continue
          running = np.count_nonzero(on)
          if running < len(on):
            if not running:
              s.pc = pc + 1
              continue
            threads = threads[on]
            at = index(threads)
        elif op.target >= 0:
          s.pc = op.target
          if op.target <= pc and self._let_go(s):
            return
          continue
        if op.unsure:
          self._check_written(op, threads, at)
        if self.busy_anywhere and not op.uses.isdisjoint(self.busy_anywhere):
          self._check_busy(op, threads)
        run = plain[pc]
        if run is not None:
          run(at)
          s.pc = pc + 1
        else:
          act = self.acts[pc]
          assert act is not None, op
          if act(s, threads, at):
            return
          s.pc += 1
        for reg in op.tracks:
          self.registers.written[reg][at] = True
        watched = self._watched[pc]
        if watched is not None:
          watched[1](watched[0], threads)
        if run is None and self.adversary.pause() and self._let_go(s):
          return
      except Violation as v:
        raise Stop(self.fault(v, op, s)) from None

  def _let_go(self, s: Strand) -> bool:
    """Puts a strand back, where there is another to run, or where it ran for long: other clusters may be waiting."""
    alone = not self.ready and not (len(s.warps) > 1 and self.adversary.split())
    if alone and self.launch.steps - self._picked < _ALONE:
      return False
    if len(s.warps) > 1 and self.adversary.split():
      border = s.warps[1 + self.adversary.pick(len(s.warps) - 1)] * WARP
      self.ready += [Strand(s.pc, s.threads[s.threads < border], s.frames),
                     Strand(s.pc, s.threads[s.threads >= border], s.frames)]
    else:
      self.ready.append(s)
    return True

  def _branch(self, op: Op, s: Strand, taken: np.ndarray) -> bool:
    """Whether the strand diverged; if not, it goes on at the right place."""
    branching = np.count_nonzero(taken)
    if branching == len(taken):
      s.pc = op.target
    elif not branching:
      s.pc = op.index + 1
    else:
      if op.inst.mods["uni"]:
        raise Violation("not uniform", "bra.uni goes two ways", threads=s.threads[taken])
      self.ready += diverge(s, taken, op.target, op.index + 1, op.join)
      return True
    return s.pc <= op.index and self._let_go(s)

  def _arrive(self, s: Strand) -> Strand | None:
    """A strand reaches its reconvergence point; the joined one, where it was the last."""
    frame = s.frames[-1]
    frame.arrived.append(s.threads)
    frame.missing -= len(s.threads)
    if frame.missing:
      return None
    return Strand(s.pc, np.sort(np.concatenate(frame.arrived)), s.frames[:-1])

  def block(self, s: Strand, condition: Condition) -> bool:
    """The strand waits, then goes on at its `pc`. Returns True, as an act does."""
    self.blocked.append((s, condition))
    if self.counters is not None:
      self.counters.wait(self._running, len(s.warps))
    return True

  def end(self, s: Strand, threads: np.ndarray) -> bool:
    """Threads of a strand end; whether none are left of it."""
    for f in self.on_exit:
      f(threads)
    self.alive[threads] = False
    self.changed = True
    frames = s.frames
    for depth, frame in enumerate(frames):
      frame.missing -= len(threads)
      if not frame.missing and frame.arrived:
        self.ready.append(Strand(frame.join, np.sort(np.concatenate(frame.arrived)), frames[:depth]))
    left = np.setdiff1d(s.threads, threads, assume_unique=True)
    if len(left):
      self.ready.append(Strand(s.pc + 1, left, frames))
    return True

  # ---- checks

  def _check_guard(self, op: Op, s: Strand) -> None:
    if op.inst.pred in op.unsure:
      self._demand_written(op.inst.pred, s.threads, s.at)

  def _check_written(self, op: Op, threads: np.ndarray, at: Any) -> None:
    for reg in op.unsure:
      self._demand_written(reg, threads, at)

  def _demand_written(self, reg: Reg, threads: np.ndarray, at: Any) -> None:
    written = self.registers.written[reg][at]
    if not written.all():
      raise Violation("uninitialised register", f"{reg} has no value", threads=threads[~written])

  def _check_busy(self, op: Op, threads: np.ndarray) -> None:
    if op.inst.row in WGMMA_ROWS:
      return
    for warpgroup in ascending(threads // WARPGROUP):
      owned = self.busy.get(int(warpgroup), {})
      found = [reg for reg in op.uses if reg in owned]
      if found:
        reg = min(found, key=lambda r: r.index)
        raise Violation("register in flight", f"{reg} is touched while {owned[reg]}",
                        threads=threads[threads // WARPGROUP == warpgroup])

  def demand_converged(self, s: Strand, threads: np.ndarray, what: str) -> None:
    """All living lanes of each warp execute this together.

    Raises:
      Violation: otherwise.
    """
    if s.whole and len(threads) == len(s.threads):
      return
    for warp in ascending(threads // WARP):
      living = int(self.alive[warp * WARP:(warp + 1) * WARP].sum())
      here = int((threads // WARP == warp).sum())
      if here != living:
        raise Violation("not uniform", f"{what} is for whole warps; {here} of {living} lanes of warp {warp} execute it",
                        threads=threads[threads // WARP == warp])

  # ---- faults

  def cta_of(self, thread: int) -> int:
    return self.cta + thread // self.cta_threads

  def unit(self, make: Callable[[Machine], _Unit]) -> _Unit:
    """The machine's one of a kind of functional unit, made at its first use."""
    if make not in self._units:
      self._units[make] = make(self)
    return self._units[make]

  def fault(self, v: Violation, op: Op | None, s: Strand | None = None) -> Fault:
    threads = v.threads or (tuple(int(t) for t in s.threads) if s is not None else ())
    cta = self.cta_of(threads[0]) if threads else self.cta
    local = tuple(t % self.cta_threads for t in threads)
    other = v.other
    return Fault(v.kind, self.program.entry.name, cta, v.text, op.place if op is not None else None,
                 other.place if other is not None else None, local, v.addresses)

  def collect_races(self) -> None:
    """The detector's findings become faults of the launch, one for each pair of Python lines."""
    if self.races is None:
      return
    known = {(f.kind, _line_of(f.place), _line_of(f.other)) for f in self.launch.findings}
    for found in self.races.findings:
      places = [None if x is None else x.place for x in (found.where, found.other)]
      key = (found.kind, _line_of(places[0]), _line_of(places[1]))
      if key in known:
        continue
      known.add(key)
      threads = tuple(t % self.cta_threads for t in found.threads)
      cta = self.cta_of(found.threads[0]) if found.threads else self.cta
      against = f"; against threads {ranges([t % self.cta_threads for t in found.others])}" if found.others else ""
      self.launch.findings.append(Fault(found.kind, self.program.entry.name, cta, KINDS[found.kind] + against,
                                        places[0], places[1], threads, found.addresses))

  def _step_limit(self, op: Op, s: Strand) -> None:
    v = Violation("step limit", f"{self.launch.most_steps} instructions ran and the kernel goes on")
    raise Stop(dataclasses.replace(self.fault(v, op, s), warps=(f"{self._where(s)} runs", *self.states())))

  def deadlock(self) -> Fault:
    """The fault that all strands wait, with what each waits for."""
    first = self.blocked[0][0]
    kinds = [getattr(condition, "kind", "deadlock") for _, condition in self.blocked]
    v = Violation(next((k for k in kinds if k != "deadlock"), "deadlock"),
                  f"all {int(self.alive.sum())} living threads wait",
                  threads=np.sort(np.concatenate([s.threads for s, _ in self.blocked])).tolist())
    op = self.ops[first.pc] if first.pc < len(self.ops) else None
    return dataclasses.replace(self.fault(v, op), warps=self.states())

  def states(self) -> tuple[str, ...]:
    """A line for each strand and each event."""
    out = [f"{self._where(s)} is ready" for s in self.ready]
    out += [f"{self._where(s)} waits for {condition.describe()}" for s, condition in self.blocked]
    out += [f"in flight: {event.describe()}" for event in self.events]
    return tuple(out)

  def _where(self, s: Strand) -> str:
    op = self.ops[min(s.pc, len(self.ops) - 1)]
    loc = f", {op.inst.loc.short()}" if op.inst.loc is not None else ""
    cta = f"CTA {self.cta_of(int(s.threads[0]))} " if self.launch.grid[0] > 1 else ""
    return f"{cta}threads {ranges((s.threads % self.cta_threads).tolist())} at PTX line {op.line}{loc}"


def _line_of(place: Place | None) -> str | int | None:
  """The Python line, or the instruction where it has none."""
  return place if place is None else place.index if place.loc is None else str(place.loc)


def _place(s: Strand) -> int:
  return s.pc


WGMMA_ROWS = {isa.WGMMA_SS, isa.WGMMA_RS, isa.WGMMA_F8_SS, isa.WGMMA_F8_RS, isa.WGMMA_TF32_SS, isa.WGMMA_TF32_RS,
              isa.WGMMA_S8_SS, isa.WGMMA_S8_RS}


def bind_arithmetic(registers: Registers, op: Op) -> Callable[[Any], None] | None:
  """What runs an instruction that only computes registers from registers; None for others."""
  unit = numerics.unit(op.inst.form)
  if unit is None:
    return None
  sources: list[Any] = []
  targets: list[tuple[np.ndarray, tuple[str, str] | None]] = []
  for slot, x in zip(op.inst.form.slots, op.inst.operands):
    if slot.kind == "int":
      sources.append(x)
    elif slot.writes:
      targets += [registers.destination(r, slot) for r in (x if isinstance(x, tuple) else (x,))]  # type: ignore[arg-type]
    else:
      sources += registers.sources(x, slot)
  if len(targets) == 1 and targets[0][1] is None and not any(isinstance(x, int) for x in sources):
    return _direct(unit, targets[0][0], sources)

  def run(at: Any) -> None:
    values = unit(*[x if isinstance(x, int) else x[at] for x in sources])
    for (row, extend), value in zip(targets, values if isinstance(values, tuple) else (values,), strict=True):
      row[at] = value if extend is None else resize(value, *extend)
  return run


def _direct(unit: Callable[..., Any], d: np.ndarray, sources: list[Any]) -> Callable[[Any], None]:
  """The usual shapes, without a loop over operands."""
  if len(sources) == 1:
    (a,) = sources

    def unary(at: Any) -> None:
      d[at] = unit(a[at])
    return unary
  if len(sources) == 2:
    a, b = sources

    def binary(at: Any) -> None:
      d[at] = unit(a[at], b[at])
    return binary

  def run(at: Any) -> None:
    d[at] = unit(*[x[at] for x in sources])
  return run
