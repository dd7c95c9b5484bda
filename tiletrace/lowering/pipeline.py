"""The compiler, top to bottom: the one place that knows the order of the passes.

trace -> rotate steps, simplify -> choose anchors -> infer layouts -> select -> schedule -> emit -> assemble. Between
passes the graph is verified against the specification of its level, and dumped where TT_DUMP asks for it.
"""
from __future__ import annotations

import dataclasses
import os
import sys
import time

from tiletrace.core import config
from tiletrace.core.digest import digest as graph_digest
from tiletrace.core.errors import LoweringError
from tiletrace.core.graph import TileGraph, Var
from tiletrace.core.printer import to_text
from tiletrace.core.simplify import simplify
from tiletrace.core.verify import verify
from tiletrace.lowering import debug, profile, tiles
from tiletrace.lowering.assemble import AssembleOptions, Cubin
from tiletrace.lowering.cache import assemble_cached
from tiletrace.lowering.emit.emit import Emitted, emit
from tiletrace.lowering.infer.solve import LaidOut, infer_layouts
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.options import CompileOptions, given_options
from tiletrace.lowering.ptx.lint import check as lint
from tiletrace.lowering.schedule.program import Program
from tiletrace.lowering.schedule.schedule import schedule
from tiletrace.lowering.select.select import Selected, choose_anchors, select
from tiletrace.lowering.steps import rotate
from tiletrace.lowering.target import TARGETS, Target

Hidden = debug.Ring | profile.Records | tiles.Counter
STAGES = ("trace", "layout", "select", "schedule", "ptx", "sass")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lowering:
  """Everything between a traced graph and PTX.

  Attributes:
    texts: stage -> text, for "trace" to "ptx".
    seconds: pass -> wall time.
    hidden: what `graph` has as its last inputs and outputs beside the user's: where the kernel is debugged or profiled,
      and the counter of one whose programs are taken dynamically.
  """
  graph: TileGraph
  laid_out: LaidOut
  selected: Selected
  program: Program
  emitted: Emitted
  ptx: str
  target: Target
  options: CompileOptions
  seconds: dict[str, float]
  hidden: tuple[Hidden, ...] = ()

  def text(self, stage: str) -> str:
    """The text of a stage before assembly.

    Raises:
      LoweringError: there is no such stage.
    """
    if stage == "trace":
      return to_text(self.graph)
    if stage == "layout":
      return with_layouts(self.laid_out.graph, self.laid_out.layouts)
    if stage == "select":
      choices = "\n".join(map(str, self.selected.choices))
      return with_layouts(self.selected.graph, self.selected.layouts) + ("\n" + choices + "\n" if choices else "")
    if stage == "schedule":
      return program_text(self.program)
    if stage == "ptx":
      return self.ptx
    raise LoweringError(f"no stage {stage!r}", hint=f"the stages are {', '.join(STAGES)}")


def resolve(target: str | None, options: CompileOptions | None, default: str = "sm_90a"
            ) -> tuple[Target, CompileOptions]:
  """The target by name, and the options with TT_FORCE added.

  Args:
    target: None: that of the options, else `default`.

  Raises:
    LoweringError: there is no such target.
  """
  options = given_options(options, "lower")
  name = target or options.target or default
  if name not in TARGETS:
    raise LoweringError(f"no target {name!r}", hint=f"the targets are {', '.join(TARGETS)}")
  forced = config.read().force
  if forced:
    options = dataclasses.replace(options, force=(*options.force, *forced))
  return TARGETS[name], options


def instrumented(graph: TileGraph, options: CompileOptions) -> tuple[TileGraph, tuple[Hidden, ...]]:
  """The graph as it is compiled, and the operands and results that it gets for debugging, for profiling, and to take
  programs from.

  Raises:
    LoweringError: persistent="dynamic" for a kernel that distributes its work itself.
  """
  graph, ring = debug.instrument(graph) if options.debug else (debug.without_debug(graph), None)
  graph, records = profile.instrument(graph) if options.profile else (profile.without_profile(graph), None)
  graph, counter = tiles.with_counter(graph)
  return graph, tuple(h for h in (ring, records, counter) if h is not None)


def lower(graph: TileGraph, target: Target, options: CompileOptions) -> Lowering:
  """Runs every pass but the assembler.

  Raises:
    TileTraceError: a kind of it, with the user's line, from the pass that refuses.
  """
  run = _Runner(graph.name, graph)
  graph, hidden = instrumented(graph, options)
  graph = run("simplify", lambda: simplify(rotate(graph)), level="trace", text=to_text)
  anchored, before = run("choose_anchors", lambda: choose_anchors(graph, target, options))
  laid_out = run("infer_layouts", lambda: infer_layouts(anchored, target), level="layout",
                 text=lambda x: with_layouts(x.graph, x.layouts))
  selected = run("select", lambda: select(laid_out.graph, laid_out.layouts, target, options, before), level="select",
                 text=lambda x: with_layouts(x.graph, x.layouts))
  program = run("schedule", lambda: schedule(selected, target, options), level="schedule", text=program_text)
  emitted = run("emit", lambda: emit(program, options))
  lineinfo = config.read().lineinfo
  ptx = run("render", lambda: emitted.module.render(lineinfo=lineinfo), text=str)
  if config.read().verify:
    run("lint", lambda: lint(emitted.module))
  return Lowering(graph, laid_out, selected, program, emitted, ptx, target, options, run.seconds, hidden)


def assemble(lowering: Lowering, machine: str | None = None) -> Cubin:
  """The machine code, from the cache where the same text was assembled before.

  Args:
    machine: the architecture that it is for (`Target.machine`); None: the target's own.
  """
  switches = config.read()
  options = AssembleOptions(switches.lineinfo, lowering.options.allow_spills, lowering.options.allow_serialized_wgmma)
  lines = lowering.emitted.module.lines(lineinfo=switches.lineinfo)
  return assemble_cached(lowering.ptx, machine or lowering.target.name, options, locations=[loc for _, loc in lines])


class _Runner:
  """Runs one pass after another: times it, verifies its graph, dumps its text."""

  def __init__(self, name: str, graph: TileGraph):
    self.seconds: dict[str, float] = {}
    self._switches, self._name, self._count = config.read(), name, 0
    self._digest = graph_digest(graph)[:8] if self._switches.dump.stages else ""

  def __call__(self, name: str, step, *, level: str | None = None, text=None):
    start = time.perf_counter()
    result = step()
    self.seconds[name] = time.perf_counter() - start
    if level is not None and self._switches.verify:
      verify(result if isinstance(result, TileGraph) else result.graph, level)
    if text is not None:
      self._dump({"simplify": "trace", "infer_layouts": "layout", "render": "ptx"}.get(name, name), text, result)
    return result

  def _dump(self, stage: str, text, result) -> None:
    dump = self._switches.dump
    if dump.wants(stage):
      write_dump(f"{self._name}-{self._digest}", self._count, stage, text(result))
    self._count += 1
    if self._switches.stop_after == stage:
      raise LoweringError(f"stopped after {stage!r}, as TT_STOP_AFTER asks")


def write_dump(kernel: str, number: int, stage: str, text: str) -> None:
  """To standard error, or to DIR/kernel/NN_stage.txt."""
  directory = config.read().dump.directory
  if directory is None:
    print(f"# {kernel} {stage}\n{text}", file=sys.stderr)
    return
  folder = os.path.join(directory, kernel)
  os.makedirs(folder, exist_ok=True)
  suffix = "ptx" if stage == "ptx" else "txt"
  with open(os.path.join(folder, f"{number}0_{stage}.{suffix}"), "w", encoding="utf-8") as f:
    f.write(text)


def with_layouts(graph: TileGraph, layouts: dict[Var, Layout]) -> str:
  """The graph with `@Ln` behind every variable that has a layout, and the legend of the layouts."""
  names: dict[Layout, str] = {}

  def annotate(var: Var) -> str | None:
    layout = layouts.get(var)
    return names.setdefault(layout, f"L{len(names) + 1}") if layout is not None else None

  text = to_text(graph, annotate)
  legend = "\n".join(f"  {name} = {layout}" for layout, name in names.items())
  return f"{text}\n{legend}\n" if names else text


def program_text(program: Program) -> str:
  """The level-0 graph, the map of shared memory, and the notes."""
  out = [with_layouts(program.graph, program.layouts)]
  out.append(f"{program.threads} threads, {program.smem_bytes} bytes of shared memory:")
  for var, offset in sorted(program.offsets.items(), key=lambda item: item[1]):
    out.append(f"  {offset:>8}  {var.hint or 'buffer'} {var.type}")
  out += [f"# {note}" for note in program.notes]
  return "\n".join(out) + "\n"
