"""A launch on the simulator: operands in, results out, the grid's clusters one after another or side by side.

>>> result = run(lowering, [x])             # doctest: +SKIP
>>> result.outputs, result.faults           # doctest: +SKIP
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tiletrace.core.graph import Var
from tiletrace.core.types import extent_at
from tiletrace.ffi.image import TensorMapSpec
from tiletrace.lowering.pipeline import Lowering
from tiletrace.sim import semantics  # noqa: F401  (it registers what instructions do)
from tiletrace.sim.adversary import Adversary
from tiletrace.sim.faults import Fault
from tiletrace.sim.machine import Launch, Machine, Stop
from tiletrace.sim.memory import Global
from tiletrace.sim.program import Program, SimulatorInputError
from tiletrace.sim.races import Grid
from tiletrace.sim.shadow import Shadow
from tiletrace.sim.summary import Counters

NUM_SMS = 2                   # of the simulated device: persistent CTAs then have several tiles each
MOST_STEPS = 20_000_000       # instructions of strands
_TURN = 20_000                # instructions before another resident cluster may go on
_POISON = 0xFF                # of outputs: NaN as a float, -1 as an integer


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
  """What a launch gave.

  Attributes:
    outputs: one array for each result; elements that nobody wrote are NaN (integers: all ones).
    faults: what is wrong; the outputs are worthless where one of them ended the run.
    steps: instructions executed, each for all threads at one place.
    counters: what was counted, where that was asked for.
  """
  outputs: tuple[np.ndarray, ...]
  faults: tuple[Fault, ...]
  steps: int
  counters: Counters | None = None


def run(lowering: Lowering, inputs: Sequence[np.ndarray], *, sizes: Mapping[str, int] | None = None, seed: int = 0,
        num_sms: int = NUM_SMS, races: bool = True, counters: bool = False, most_steps: int = MOST_STEPS,
        first_only: bool = False) -> Result:
  """Runs a lowered kernel.

  Args:
    inputs: arrays of the traced shapes and dtypes.
    sizes: of a kernel of dynamic shapes, what its names stand for, the grid's axes among them (`TileProgram.sizes`).
    seed: of everything that the hardware leaves open (`adversary`).
    num_sms: SMs of the device; a persistent grid has at most so many CTAs, in whole clusters.
    races: whether to look for data races.
    counters: whether to count bytes, wavefronts and the like (`summary`).
    most_steps: the limit of instructions.
    first_only: whether the first race ends the run, as other faults do: for whoever asks only whether there are any.
  Raises:
    SimulatorInputError: inputs that do not fit, or an instruction without semantics.
    DebugCheckError: a tt.debug_check failed, with debugging on; what the kernel prints has been printed.
  """
  graph = lowering.graph
  inputs, sizes = [*inputs, *(h.empty() for h in lowering.hidden)], sizes or {}
  _check_inputs(lowering, inputs, sizes)
  roots = list(dict.fromkeys(graph.invars))
  data: dict[int, np.ndarray] = {}
  for i, var in enumerate(roots):
    at = graph.invars.index(var)
    data[i] = np.asarray(inputs[at]) if at < graph.num_inputs else _poison(_at(var, sizes), var.dtype)
  names = [graph.arg_names[graph.invars.index(v)] for v in roots]
  tables = {c.name: np.asarray(c.values, np.int32) for c in lowering.emitted.module.constants}
  memory = Global({**{f"{name} {_shape(x)}": x for name, x in zip(names, data.values())}, **tables})
  written = {roots.index(v) for v in graph.outputs}
  maps = tuple(TensorMapSpec(m.argument, m.dtype, m.dims, m.strides, m.box, m.swizzle, 0, m.offset).at(sizes)
               for m in lowering.emitted.tensor_maps)
  (entry,) = lowering.emitted.module.entries
  pointers = [memory.arrays[i].address for i in range(len(roots))]
  values = [*pointers, *(sizes[name] for name in graph.size_names), *range(len(maps))]
  params = {p.name: value for p, value in zip(entry.params, values, strict=True)}
  ctas = extent_at(math.prod(graph.options.grid), sizes)
  x, y, z = (*(entry.cluster or (1,)), 1, 1)[:3]
  grid = (min(ctas, max(num_sms // x, 1) * x) if graph.options.persistent else ctas, 1, 1)
  program = Program(lowering.emitted.module, entry)
  launch = Launch(program, memory, params, maps, grid, (x, y, z),
                  lowering.program.smem_bytes, Adversary(seed), most_steps)
  if races:
    launch.grid_order = Grid()
    launch.shadows = tuple(
        Shadow(a.address, max(16, -(-a.nbytes // 16) * 16), grid_wide=True, read_only=i not in written)
        for i, a in enumerate(memory.arrays))
  launch.written, launch.first_only = frozenset(written), first_only
  if counters:
    launch.counters = Counters(program, [0] * len(program.ops))
  run_launch(launch)
  outputs = tuple(memory.contents(roots.index(v), _at(v, sizes), v.dtype) for v in graph.outputs)
  results = len(outputs) - len(lowering.hidden)
  for hidden, words in zip(lowering.hidden, outputs[results:], strict=True):
    if hidden.report is not None:
      hidden.report(words)
  return Result(outputs[:results], tuple(launch.findings), launch.steps, launch.counters)


def run_launch(launch: Launch) -> None:
  """Runs all CTAs; what is found goes to `launch.findings`."""
  step = launch.cluster[0]
  if launch.cluster[1:] != (1, 1) or launch.grid[1:] != (1, 1):
    raise SimulatorInputError(f"the simulator runs grids and clusters along x, got {launch.grid} and {launch.cluster}")
  waiting = list(range(0, launch.grid[0], step))
  running: list[Machine] = []
  idle: list[Machine] = []
  stuck = 0                      # machines in a row that could not go on
  turn = 0
  try:
    with np.errstate(all="ignore"):
      while waiting or running:
        if not running or stuck >= len(running) or turn >= len(running):
          if waiting:
            machine = idle.pop() if idle else Machine(launch)
            machine.start(waiting.pop(launch.adversary.pick(len(waiting)) if launch.adversary.seed else 0))
            running.append(machine)
            stuck = 0
          elif stuck >= len(running):
            for machine in running:
              machine.collect_races()
            fault = running[0].deadlock()
            others = tuple(line for machine in running[1:] for line in machine.states())
            launch.findings.append(dataclasses.replace(fault, warps=(*fault.warps, *others)))
            return
          turn = 0
        machine = running[0]
        state = _turn(machine)
        if launch.first_only and machine.raced():
          machine.collect_races()
          return
        del running[0]
        stuck = stuck + 1 if state == "waits" else 0
        turn += 1
        (idle if state == "done" else running).append(machine)
        if state == "done":
          turn = 0
  except Stop as e:
    for machine in running:
      machine.collect_races()
    launch.findings.append(e.fault)


def _turn(machine: Machine) -> str:
  """Runs a cluster for a while: "ran", "waits" or "done"."""
  until = machine.launch.steps + _TURN
  while (state := machine.step()) == "ran" and machine.launch.steps < until:
    if machine.launch.first_only and machine.raced():
      break
  return state


def _at(var: Var, sizes: Mapping[str, int]) -> tuple[int, ...]:
  """An array's shape in this launch."""
  return tuple(extent_at(n, sizes) for n in var.shape)


def _check_inputs(lowering: Lowering, inputs: Sequence[np.ndarray], sizes: Mapping[str, int]) -> None:
  graph = lowering.graph
  wanted = [(_at(v, sizes), v.dtype) for v in graph.invars[:graph.num_inputs]]
  given = [(np.shape(x), np.asarray(x).dtype) for x in inputs]
  if given != wanted:
    def text(items: list) -> str:
      return ", ".join(f"{np.dtype(d).name}[{','.join(map(str, s))}]" for s, d in items)
    raise SimulatorInputError(f"{graph.name} was lowered for ({text(wanted)}), got ({text(given)})", loc=graph.loc)


def _poison(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  raw = np.full(math.prod(shape) * dtype.itemsize, _POISON, np.uint8)
  return raw.view(dtype).reshape(shape)


def _shape(x: np.ndarray) -> str:
  return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
