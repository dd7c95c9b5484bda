"""Stages of a kernel that the user holds: Traced, Lowered, Compiled (the words of jax.stages), and the report.

>>> import functools, jax, jax.numpy as jnp, tiletrace as tt
>>> def double_kernel(x, y):
...   r = tt.block(tt.program_id(0), 128)
...   y[r] = x[r] * 2
>>> x = jnp.ones(1000)
>>> f = tt.tile_call(double_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(8,))
>>> "program_id" in f.trace(x).as_text()
True
>>> "ld.global" in f.lower(x).as_text("ptx")
True
"""
from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, overload

import jax
import numpy as np
from jax import export

from tiletrace.core import config
from tiletrace.core.batch import batch
from tiletrace.core.digest import digest as graph_digest
from tiletrace.core.dimensions import Sizes
from tiletrace.core.errors import LoweringError, ResourceError, TileTypeError
from tiletrace.core.graph import TileGraph, Var, walk
from tiletrace.core.printer import to_text
from tiletrace.core.source import user_loc
from tiletrace.core.specialise import specialise
from tiletrace.core.types import RefType, Size, extent_at
from tiletrace.ffi import primitive
from tiletrace.ffi.image import KernelImage, Param, SizeSource, TensorMapSpec
from tiletrace.lowering import cache, pipeline
from tiletrace.lowering.assemble import Cubin, sass
from tiletrace.lowering.options import CompileOptions
from tiletrace.lowering.target import SM_90A, Target
from tiletrace.lowering.variants import Choice
from tiletrace.lowering.xla.run import run as run_xla
from tiletrace.report import Report, cost, make_report
from tiletrace.sim.faults import raise_faults
from tiletrace.sim.launch import MOST_STEPS, run as run_simulator

_TENSOR_MAP_RANK = 5  # CUDA driver API, cuTensorMapEncodeTiled


class Observer(Protocol):
  """What `tiletrace.check` is told while a script runs."""

  def traced(self, program: TileProgram) -> None:
    """A kernel was traced."""
    ...

  def simulate(self, program: TileProgram, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """A kernel of the backend "sim" runs: its results."""
    ...


OBSERVERS: list[Observer] = []


# Symbolic sizes print alike in different scopes of jax.export: programs of these are equal to themselves only.
_symbolic = itertools.count()


class TileProgram:
  """A traced kernel as the JAX primitive needs it. Equal by fingerprint: graph, options, target and sizes.

  Attributes:
    sizes: with dynamic shapes, what this call's names stand for: ints, or jax.export's symbolic dimensions.
  """

  def __init__(self, graph: TileGraph, options: CompileOptions, backend: str | None,
               sizes: tuple[tuple[str, Any], ...] = ()):
    _check_extents(graph)
    self.graph, self.options, self.backend, self.sizes = graph, options, backend, sizes
    assert {name for name, _ in sizes} == set(graph.size_names), (sizes, graph.size_names)
    self.is_symbolic = any(export.is_symbolic_dim(n) for _, n in sizes)
    self.name, self.source = graph.name, graph.loc.short()
    self.fingerprint = cache.digest(graph_digest(graph), repr(options), repr(backend), repr(sizes),
                                    str(next(_symbolic)) if self.is_symbolic else "")
    self.hidden = pipeline.instrumented(graph, options)[1]
    self._images: dict[str, KernelImage] = {}
    self._lowerings: list[pipeline.Lowering] = []
    self._batches: dict[tuple[int, tuple[bool, ...]], TileProgram] = {}
    for observer in OBSERVERS:
      observer.traced(self)

  def __repr__(self) -> str:
    return f"<{self.name} {self.fingerprint[:8]} at {self.source}>"

  def __eq__(self, other: object) -> bool:
    return isinstance(other, TileProgram) and other.fingerprint == self.fingerprint

  def __hash__(self) -> int:
    return hash(self.fingerprint)

  def __reduce__(self) -> tuple[Any, ...]:
    return TileProgram, (self.graph, self.options, self.backend, self.sizes)

  def at(self, sizes: tuple[tuple[str, Any], ...]) -> TileProgram:
    """The program of another call: the same code for other sizes. Of empty arrays it has a code of its own, since no
    tensor map describes them."""
    if any(type(n) is int and n == 0 for _, n in sizes):
      return TileProgram(specialise(self.graph, dict(sizes)), self.options, self.backend)
    made = TileProgram(self.graph, self.options, self.backend, sizes)
    made._images, made._lowerings = self._images, self._lowerings
    return made

  def sizes_of(self, inputs: Sequence[Any], grid: Any = None) -> dict[str, int]:
    """The sizes of a launch of this code for arrays of other sizes, and another grid; a name that only results have is
    what it is in this program.

    Raises:
      TileTypeError: arrays or a grid that do not fit, or empty ones, for which there is another code.
    """
    options, known = self.graph.options, dict(self.sizes)
    if not known:
      if grid is not None:
        raise TileTypeError(f"{self.name} has no dynamic shapes: its grid is {options.grid}", loc=user_loc(),
                            hint="drop grid=, or give tile_call dynamic_shapes=")
      return known
    found = Sizes(self.name)
    for name, var, x in zip(self.graph.arg_names, self.graph.invars[:self.graph.num_inputs], inputs):
      found.match(name, var.shape, x.shape)
    if grid is None and any(known[name] != n for name, n in found.values.items()):
      raise TileTypeError(f"{self.name} was traced for other sizes: its grid {self.grid} may not fit", loc=user_loc(),
                          hint="give grid=")
    known |= found.values
    for n, axis in zip(self.grid if grid is None else np.atleast_1d(grid).tolist(), options.grid, strict=True):
      if isinstance(axis, Size):
        known[axis.names[0]] = n // axis.factor
    if 0 in known.values():
      raise TileTypeError(f"{self.name}: empty arrays have a code of their own", loc=user_loc(),
                          hint='trace it for these arrays, or call it with backend="sim"')
    return known

  @functools.cached_property
  def concrete(self) -> TileGraph:
    """The graph with the sizes of this call."""
    return specialise(self.graph, dict(self.sizes)) if self.sizes else self.graph

  @property
  def grid(self) -> tuple[Any, ...]:
    """Programs along each axis, at this call."""
    return tuple(extent_at(n, dict(self.sizes)) for n in self.graph.options.grid)

  def _avals(self, vars: Sequence[Var]) -> tuple[primitive.Aval, ...]:
    sizes = dict(self.sizes)
    return tuple((tuple(extent_at(n, sizes) for n in v.shape), v.dtype) for v in vars)

  @property
  def in_avals(self) -> tuple[primitive.Aval, ...]:
    return self._avals(self.graph.invars[:self.graph.num_inputs])

  @property
  def out_avals(self) -> tuple[primitive.Aval, ...]:
    return self._avals(self.graph.outputs)

  @property
  def aliases(self) -> tuple[tuple[int, int], ...]:
    return self.graph.aliases

  def interpret(self, *arrays: jax.Array) -> list[jax.Array]:
    explicit = self.backend is None and any(e.primitive.level == 0 for e in walk(self.graph.body))
    simulated = (self.backend == "sim" or explicit) and not self.is_symbolic
    return self._simulated(*arrays) if simulated else self.as_jax(*arrays)

  def as_jax(self, *arrays: jax.Array) -> list[jax.Array]:
    """The kernel as plain jax ops, which jax can differentiate."""
    if self.is_symbolic:
      raise LoweringError(f"{self.name} has the symbolic sizes {', '.join(f'{k}={n}' for k, n in self.sizes)}, which "
                          "jax ops and the simulator do not take", loc=self.graph.loc,
                          hint='export for GPUs alone, platforms=["cuda"], or with concrete shapes')
    return run_xla(self.concrete, *arrays, debug=self.options.debug)

  def _simulated(self, *arrays: jax.Array) -> list[jax.Array]:
    """The PTX in the simulator, called back to from the compiled program."""
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.out_avals]
    lowering = self.lowering                     # refused here, not within the call back
    return jax.pure_callback(lambda *given: self._simulate(lowering, given), results, *arrays)

  def _simulate(self, lowering: pipeline.Lowering, given: Sequence[Any]) -> list[np.ndarray]:
    inputs = [np.asarray(x) for x in given]
    if not OBSERVERS:
      return simulate(lowering, inputs, sizes=dict(self.sizes))
    return [list(observer.simulate(self, inputs)) for observer in OBSERVERS][-1]

  @property
  def lowering(self) -> pipeline.Lowering:
    if not self._lowerings:
      self._lowerings.append(pipeline.lower(self.graph, *pipeline.resolve(None, self.options)))
    return self._lowerings[0]

  def batch(self, size: int, batched: tuple[bool, ...]) -> TileProgram:
    """The program of `size` examples at once: one more grid axis; every result and the `batched` operands are wider.

    Where rank 5 would be exceeded the new dimension may be merged with the first (core/batch.py): `in_avals` tells.

    Raises:
      ResourceError: more programs than a launch takes.
      LoweringError: the kernel distributes its work over the launch by itself.
    """
    if export.is_symbolic_dim(size):
      raise TileTypeError(f"{self.name}: jax.vmap over a batch of the symbolic size {size}", loc=user_loc(),
                          hint="give the kernel an axis and dynamic_shapes a name for it, or export a batch of numbers")
    key = (size, batched)
    if key not in self._batches:
      programs = size * math.prod(self.grid)
      if not self.is_symbolic and programs > SM_90A.grid_x:
        raise ResourceError(f"{self.name}: {size} examples of a grid of {self.grid} are {programs} "
                            f"programs, the hardware takes {SM_90A.grid_x}", loc=self.graph.loc,
                            hint="split the batch: jax.lax.map")
      wider = (*batched, *(True,) * len(self.graph.outputs))
      self._batches[key] = TileProgram(batch(self.graph, size, wider, max_rank=_TENSOR_MAP_RANK), self.options,
                                       self.backend, self.sizes)
    return self._batches[key]

  def image(self, target: str) -> KernelImage:
    """The compiled kernel: from memory, from the disk cache, or compiled now. For the sizes of this call, if they are
    numbers.

    Args:
      target: where the options name none.
    """
    where, options = pipeline.resolve(None, self.options, target)
    if where.name not in self._images:
      self._images[where.name] = compile_image(self.graph, where, options)
    image = self._images[where.name]
    return image.at(dict(self.sizes)) if self.sizes and not self.is_symbolic else image


def simulate(lowering: pipeline.Lowering, arrays: Sequence[Any], **options: Any) -> list[np.ndarray]:
  """The results of a simulated launch (`tiletrace.sim.launch.run` has the options).

  Raises:
    SimulationError: a fault was found.
  """
  result = run_simulator(lowering, [np.asarray(x) for x in arrays], **options)
  raise_faults(result.faults)
  return list(result.outputs)


def _check_extents(graph: TileGraph) -> None:
  """Addresses are 64 bits wide, but an index is an i32, in kernels as in program ids."""
  for name, var in zip(graph.arg_names, graph.invars, strict=True):
    assert isinstance(var.type, RefType)
    for d, n in enumerate(var.type.shape):
      if isinstance(n, int) and n > 2**31 - 1:
        raise TileTypeError(f"{graph.name}: dimension {d} of {name} has {n} elements, and an index is an i32",
                            loc=graph.loc, hint="fold it into two dimensions: x.reshape(-1, 4096)")


def _cache_key(graph: TileGraph, target: Target, machine: str, options: CompileOptions) -> str:
  """L1: everything that determines the image."""
  return cache.digest(graph_digest(graph), target.name, machine, repr(options), cache.assembler_version(),
                      cache.package_digest(), str(config.read().lineinfo))


def compile_image(graph: TileGraph, target: Target, options: CompileOptions) -> KernelImage:
  """The image, through the kernel cache; machine code is for the GPU that is there, if it is newer than the target.

  Raises:
    TileTraceError: a kind of it, from the pass or the assembler that refuses.
  """
  machine = target.machine(primitive.capability())
  key = _cache_key(graph, target, machine, options)
  dumping = bool(config.read().dump.stages) or config.read().stop_after is not None
  payload = None if dumping else cache.STORE.get("kernel", key)
  if payload is not None:
    return dataclasses.replace(KernelImage.from_bytes(payload), source=graph.loc.short())
  lowering = pipeline.lower(graph, target, options)
  image = build_image(lowering, pipeline.assemble(lowering, machine), machine)
  cache.STORE.put("kernel", key, image.to_bytes())
  return image


def build_image(lowering: pipeline.Lowering, cubin: Cubin, machine: str) -> KernelImage:
  """What a launch needs: the entry's parameters are the distinct references' addresses, the sizes that a call decides,
  then the tensor maps."""
  graph, emitted, program = lowering.graph, lowering.emitted, lowering.program
  roots = list(dict.fromkeys(graph.invars))
  operands = [graph.invars.index(v) for v in roots]
  maps = tuple(TensorMapSpec(operands[m.argument], m.dtype, m.dims, m.strides, m.box, m.swizzle,
                            lowering.options.l2_promotion, m.offset)
               for m in emitted.tensor_maps)
  pointers: list[Param] = [("operand", i) for i in operands]
  sizes = _size_sources(graph)
  scalars: list[Param] = [("size", i) for i in range(len(sizes))]
  encoded: list[Param] = [("tensormap", i) for i in range(len(maps))]
  fingerprint = cache.digest(lowering.ptx)
  return KernelImage(graph.name, cubin.image, (math.prod(graph.options.grid), 1, 1), program.threads,
                     graph.options.launch_cluster, program.smem_bytes, (*pointers, *scalars, *encoded), maps,
                     bool(graph.options.persistent), graph.loc.short(), fingerprint, machine, sizes,
                     emitted.overlap, graph.num_inputs - 1 if graph.options.takes_tiles else None)


def _size_sources(graph: TileGraph) -> tuple[SizeSource, ...]:
  """Where a call finds each of the graph's size_names: the first array's dimension that has it, or the grid's axis."""
  found: dict[str, SizeSource] = {}
  for i, var in enumerate(graph.invars):
    for d, n in enumerate(var.shape):
      if isinstance(n, Size):
        found.setdefault(n.names[0], SizeSource(n.names[0], i, d, n.factor, n.most // n.factor))
  for axis, n in enumerate(graph.options.grid):
    if isinstance(n, Size):
      found[n.names[0]] = SizeSource(n.names[0], None, axis, n.factor, n.most // n.factor)
  return tuple(found[name] for name in graph.size_names)


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
  """A kernel traced for operands of certain shapes and dtypes."""
  program: TileProgram

  @property
  def graph(self) -> TileGraph:
    return self.program.graph

  def as_text(self, stage: str = "trace") -> str:
    """The tile graph; other stages lower first."""
    return to_text(self.graph) if stage == "trace" else self.lower().as_text(stage)

  __str__ = as_text

  def lower(self, target: str | None = None, options: CompileOptions | None = None) -> Lowered:
    """Lowers to PTX.

    Args:
      target: "sm_90a", "sm_80", "sm_86" or "sm_89"; None: the options' (TT_TARGET's), else that of the GPU,
        else sm_90a.
      options: default: those of the tile_call.
    Raises:
      TileTraceError: a kind of it, from the pass that refuses, with the user's line.
    """
    where, chosen = pipeline.resolve(target, options or self.program.options, primitive.default_target())
    return Lowered(self.program, pipeline.lower(self.graph, where, chosen))


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
  """A kernel in PTX, with everything that was decided on the way."""
  program: TileProgram
  lowering: pipeline.Lowering

  @property
  def choices(self) -> tuple[Choice, ...]:
    """The variant of each op, and why better ones declined."""
    return self.lowering.selected.choices

  def as_text(self, stage: str = "ptx") -> str:
    """The text of a stage: trace, layout, select, schedule, ptx or sass.

    Raises:
      LoweringError: there is no such stage.
    """
    return self.compile().as_text(stage) if stage == "sass" else self.lowering.text(stage)

  @overload
  def report(self, *, json: Literal[False] = False) -> Report: ...

  @overload
  def report(self, *, json: Literal[True]) -> str: ...

  def report(self, *, json: bool = False) -> Report | str:
    """What was decided and what it costs: text where it is printed; json=True gives it in the JSON format."""
    found = make_report(self.lowering, None, dict(self.program.sizes))
    return found.json() if json else found

  def compile(self) -> Compiled:
    """Assembles: for the target, or for the GPU that is there, if it is of a later generation.

    Raises:
      AssembleError: there is no ptxas, or it refuses, spills or serialises wgmma.
    """
    machine = self.lowering.target.machine(primitive.capability())
    cubin = pipeline.assemble(self.lowering, machine)
    return Compiled(self, build_image(self.lowering, cubin, machine), cubin)

  def simulate(self, *args: Any, grid: int | tuple[int, ...] | None = None, seed: int = 0, num_sms: int = 2,
               races: bool = True, most_steps: int = MOST_STEPS) -> list[np.ndarray]:
    """Runs the PTX on this CPU (docs/simulator.md); returns the flat list of results.

    Args:
      *args: arrays of the shapes and dtypes that were traced; with dynamic shapes of other sizes too.
      grid: of a kernel of dynamic shapes, the programs for these sizes; default: those of the tile_call.
      seed: of what the hardware leaves open: the order of warps, when asynchronous work is done.
      num_sms: SMs of the simulated GPU, which bounds the CTAs of a persistent kernel.
      races: whether to look for data races.
      most_steps: instructions after which a kernel counts as one that never ends.
    Raises:
      SimulationError: a fault was found; its `faults` have them all.
      SimulatorInputError: arguments that do not fit.
      TileTypeError: sizes that dynamic_shapes does not allow.
    """
    flat = [jax.numpy.asarray(x) for x in jax.tree.leaves(args)]
    sizes = self.program.sizes_of(flat, grid)
    return simulate(self.lowering, flat, sizes=sizes, seed=seed, num_sms=num_sms, races=races, most_steps=most_steps)


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
  """Machine code and what a launch needs."""
  lowered: Lowered
  image: KernelImage
  cubin: Cubin

  def as_text(self, stage: str = "sass") -> str:
    return self._sass if stage == "sass" else self.lowered.as_text(stage)

  @functools.cached_property
  def _sass(self) -> str:
    return sass(self.cubin)

  @overload
  def report(self, *, json: Literal[False] = False) -> Report: ...

  @overload
  def report(self, *, json: Literal[True]) -> str: ...

  def report(self, *, json: bool = False) -> Report | str:
    """As of `Lowered`, with registers and spills."""
    found = make_report(self.lowered.lowering, self.cubin, dict(self.lowered.program.sizes))
    return found.json() if json else found

  def memory_analysis(self) -> dict[str, int]:
    """Registers per thread, spilled bytes per thread, shared memory bytes per CTA."""
    return {"registers": self.cubin.registers, "spill_stores": self.cubin.spill_stores,
            "spill_loads": self.cubin.spill_loads, "smem_bytes": self.image.smem_bytes}

  def cost_analysis(self) -> dict[str, int]:
    """"flops" of the gemms, where an abstract number of trips counts for the fewest that are possible, and "bytes" of
    every operand read and every result written once; a result in place is both."""
    return cost(self.lowered.lowering, dict(self.lowered.program.sizes))

  def __call__(self, *args: Any) -> Any:
    """Runs on arrays of the shapes and dtypes that were traced; returns the flat list of results."""
    flat = [jax.numpy.asarray(x) for x in jax.tree.leaves(args)]
    given = tuple((x.shape, np.dtype(x.dtype)) for x in flat)
    if given != self.lowered.program.in_avals:
      raise TypeError(f"{self.lowered.program.name} was compiled for {self.lowered.program.in_avals}, got {given}")
    return primitive.bind(self.lowered.program, *flat)
