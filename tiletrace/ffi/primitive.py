"""The JAX primitive of a compiled tile program: `tile_call`.

One primitive, parameterised by a hashable program. It has a rule per platform: on CPUs (and, for programs of the
"xla" and "sim" backends, on GPUs) the program's own jax ops, on CUDA the XLA custom call that carries the kernel image,
elsewhere an error that names the kernel. Only public modules of JAX are used.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import ShapedArray
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from tiletrace.core import config
from tiletrace.core.errors import LoweringError, TileTypeError
from tiletrace.core.source import user_loc
from tiletrace.ffi import library
from tiletrace.ffi.image import KernelImage
from tiletrace.lowering.target import target_of

DEFAULT_TARGET = "sm_90a"

Aval = tuple[tuple[int, ...], np.dtype]


class Hidden(Protocol):
  """What a kernel reads and writes beside the user's arrays: `empty` is the operand, `report` gets the result; None
  where nobody wants it."""

  def empty(self) -> np.ndarray: ...
  @property
  def report(self) -> Callable[[Any], None] | None: ...


class Program(Protocol):
  """What the primitive needs of a tile program. Equality and hash are those of the fingerprint.

  Attributes:
    name: the kernel's name; a Python identifier.
    source: where it was written, "file.py:12".
    fingerprint: hash of everything that determines the code: graph, options, target, versions.
    in_avals: (shape, dtype) of each operand.
    out_avals: (shape, dtype) of each result.
    aliases: (input, output) pairs that share memory.
    is_symbolic: whether sizes are symbolic dimensions of jax.export: then `image` has them as sizes of any call.
    grid: programs along each axis, numbers or symbolic.
    hidden: what its image has as more operands and results: for debugging, for profiling, and to take programs from.
    backend: "xla" and "sim" run `interpret` on every platform; None compiles where a compiler backend exists.
  """

  @property
  def name(self) -> str: ...
  @property
  def source(self) -> str: ...
  @property
  def fingerprint(self) -> str: ...
  @property
  def in_avals(self) -> tuple[Aval, ...]: ...
  @property
  def out_avals(self) -> tuple[Aval, ...]: ...
  @property
  def aliases(self) -> tuple[tuple[int, int], ...]: ...
  @property
  def backend(self) -> str | None: ...
  @property
  def is_symbolic(self) -> bool: ...
  @property
  def grid(self) -> tuple[Any, ...]: ...
  @property
  def hidden(self) -> Sequence[Hidden]: ...

  def interpret(self, *arrays: jax.Array) -> list[jax.Array]:
    """The program as plain jax ops, or (backend "sim") a call back to the simulator."""
    ...

  def batch(self, size: int, batched: tuple[bool, ...]) -> Program:
    """The program of `size` examples: every result, and the operands that are `batched`, get a leading dimension.

    It may come merged with the dimension after it, in `in_avals` and `out_avals`.
    """
    ...

  def image(self, target: str) -> KernelImage:
    """The compiled kernel; compiled once. `target`: where the program names none itself."""
    ...


@functools.cache
def capability() -> int | None:
  """Compute capability, times ten, of jax's first CUDA GPU; None without one."""
  try:
    gpus = jax.local_devices(backend="cuda")
  except RuntimeError:              # jax has no such backend
    return None
  major, minor = str(gpus[0].compute_capability).split(".")
  return 10 * int(major) + int(minor)


def default_target() -> str:
  """TT_TARGET's, else the one that suits the GPU; without one, as where a program is exported for CUDA, "sm_90a".

  Raises:
    LoweringError: kernels do not run on the GPU.
  """
  named = config.read().target
  if named is not None:
    return named
  found = capability()
  target = None if found is None else target_of(found)
  if found is not None and target is None:
    raise LoweringError(f"kernels run from compute capability 8.0 on, this GPU has {found // 10}.{found % 10}",
                        hint='tile_call(..., backend="xla") runs anywhere')
  return DEFAULT_TARGET if target is None else target.name


tile_call_p = jex_core.Primitive("tile_call")
tile_call_p.multiple_results = True


def bind(program: Program, *operands: jax.Array) -> list[jax.Array]:
  """Runs `program` on arrays or tracers.

  Args:
    program: what to run.
    *operands: one array per `program.in_avals`, of exactly those shapes and dtypes.

  Returns:
    One array per `program.out_avals`.

  Raises:
    TileTypeError: an operand is sharded over an explicit mesh axis.
  """
  with jax.named_scope(program.name):
    return tile_call_p.bind(*vary_alike(operands), program=program)


def export_checks() -> list[export.DisabledSafetyCheck]:
  """What `jax.export.export(..., disabled_checks=)` needs to export a program that holds tile calls for CUDA."""
  return [export.DisabledSafetyCheck.custom_call(target) for target in (library.TARGET, library.TARGET_OF_ANY_SIZE)]


def _varying_axes(aval: Any) -> frozenset[str]:
  return frozenset(aval.manual_axis_type.varying)


def vary_alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
  """Casts to the union of the operands' varying manual axes, as jax's own n-ary operations do."""
  union = frozenset().union(*(_varying_axes(jax.typeof(x)) for x in operands))
  missing = [tuple(sorted(union - _varying_axes(jax.typeof(x)))) for x in operands]
  return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(operands, missing)]


@tile_call_p.def_impl
def _impl(*operands: jax.Array, program: Program) -> list[jax.Array]:
  with jax.disable_jit(False):      # an eager call is a compiled call; under disable_jit it would recur for ever
    return _eager(program)(*operands)


@functools.lru_cache(maxsize=4096)
def _eager(program: Program) -> Callable[..., list[jax.Array]]:
  return jax.jit(_named(program, lambda *operands: tile_call_p.bind(*operands, program=program)))


@functools.lru_cache(maxsize=4096)
def _interpreter(program: Program) -> Callable[..., list[jax.Array]]:
  # The jit gives the function in the module the kernel's name.
  return jax.jit(_named(program, lambda *operands: program.interpret(*operands)))


def _named(program: Program, fn: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
  fn.__name__ = fn.__qualname__ = program.name
  return fn


@tile_call_p.def_abstract_eval
def _abstract_eval(*avals: Any, program: Program) -> list[Any]:
  if any(axes is not None for aval in avals for axes in aval.sharding.spec):
    raise TileTypeError(
        f"{program.name} ({program.source}): operands lie on explicit mesh axes: {', '.join(map(str, avals))}",
        loc=user_loc(), hint="a kernel sees one device's memory: wrap the call in jax.shard_map")
  given = tuple((aval.shape, np.dtype(aval.dtype)) for aval in avals)
  assert given == tuple((tuple(s), np.dtype(d)) for s, d in program.in_avals), (program, given)
  if not avals:
    return [ShapedArray(shape, dtype) for shape, dtype in program.out_avals]
  # The operands' own aval carries the abstract mesh and the varying manual axes that shard_map checks.
  return [
      avals[0].update(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False,
                      sharding=avals[0].sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape))))
      for shape, dtype in program.out_avals]


def _lower_interpreted(ctx: mlir.LoweringRuleContext, *operands: Any, program: Program) -> Any:
  return mlir.lower_fun(_interpreter(program), multiple_results=True)(_local(ctx, program), *operands)


def _local(ctx: mlir.LoweringRuleContext, program: Program) -> mlir.LoweringRuleContext:
  """Within shard_map the operands vary over manual axes; what is created beside them (buffers, loop carries) does not.
  One device's work needs no axes at all: it is lowered as if outside."""
  return ctx.replace(avals_in=[ShapedArray(shape, dtype) for shape, dtype in program.in_avals],
                     avals_out=[ShapedArray(shape, dtype) for shape, dtype in program.out_avals])


def _lower_cuda(ctx: mlir.LoweringRuleContext, *operands: Any, program: Program) -> Any:
  if program.backend is not None:
    return _lower_interpreted(ctx, *operands, program=program)
  library.register()
  if program.is_symbolic:
    return mlir.lower_fun(functools.partial(_call_of_any_size, program), multiple_results=True)(ctx, *operands)
  if program.hidden:
    return mlir.lower_fun(functools.partial(_call_with_hidden, program), multiple_results=True)(_local(ctx, program),
                                                                                                *operands)
  rule = jax.ffi.ffi_lowering(library.TARGET, operand_output_aliases=dict(program.aliases))
  return rule(ctx, *operands, **program.image(default_target()).attributes())


def _call_of_any_size(program: Program, *operands: jax.Array) -> list[jax.Array]:
  """The custom call of symbolic sizes: one more operand, of no bytes, tells the grid in its shape."""
  if any(h.report is not None for h in program.hidden):
    raise LoweringError(f"{program.name} ({program.source}) is debugged or profiled, and has symbolic sizes",
                        hint="export without, or with concrete shapes")
  hidden, results, aliases = _hidden_arrays(program)
  call = jax.ffi.ffi_call(library.TARGET_OF_ANY_SIZE, results, input_output_aliases=aliases)
  image = program.image(DEFAULT_TARGET).with_grid_operand(len(operands) + len(hidden))
  found = call(*operands, *hidden, jnp.zeros((0, *program.grid), np.int8), **image.attributes())
  return list(found[:len(program.out_avals)])


def _call_with_hidden(program: Program, *operands: jax.Array) -> list[jax.Array]:
  """The custom call of a kernel that has more arrays than the user's: one that is debugged or profiled calls back to
  Python with what it recorded. Each call gets arrays of its own: XLA copies a constant that a call writes."""
  hidden, results, aliases = _hidden_arrays(program)
  call = jax.ffi.ffi_call(library.TARGET, results, input_output_aliases=aliases)
  found = call(*operands, *hidden, **program.image(default_target()).attributes())
  outs = len(program.out_avals)
  for h, written in zip(program.hidden, found[outs:], strict=True):
    if h.report is not None:
      jax.debug.callback(h.report, written)
  return list(found[:outs])


def _hidden_arrays(program: Program) -> tuple[list[jax.Array], list[jax.ShapeDtypeStruct], dict[int, int]]:
  """(the operands that the user does not see, all results, all aliases) of a custom call."""
  empty = [h.empty() for h in program.hidden]
  n, outs = len(program.in_avals), len(program.out_avals)
  avals = (*program.out_avals, *((x.shape, x.dtype) for x in empty))
  results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals]
  aliases = {**dict(program.aliases), **{n + i: outs + i for i in range(len(empty))}}
  return [jnp.zeros(x.shape, x.dtype) for x in empty], results, aliases


def _lower_elsewhere(ctx: mlir.LoweringRuleContext, *operands: Any, program: Program) -> NoReturn:
  raise NotImplementedError(f"tile kernel '{program.name}' ({program.source}) runs on CPUs and on CUDA GPUs, not on "
                            f"{', '.join(ctx.module_context.platforms)}")


# Equal calls in one module become one function: by `_interpreter`'s jit here, and out of line there, so that a module
# holds one copy of the cubin.
mlir.register_lowering(tile_call_p, _lower_interpreted, platform="cpu")
mlir.register_lowering(tile_call_p, cast(Any, _lower_cuda), platform="cuda", inline=False)
mlir.register_lowering(tile_call_p, _lower_elsewhere)


def _no_derivative(*operands: Any, program: Program) -> NoReturn:
  raise NotImplementedError(
      f"tile kernel '{program.name}' ({program.source}) has no derivative: give tile_call a vjp=, or wrap the call in "
      "jax.custom_vjp")


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], *, program: Program
           ) -> tuple[list[jax.Array], tuple[int, ...]]:
  """Operands without a batch dimension stay as they are, but one written in place is needed for each example."""
  size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
  written = {i for i, _ in program.aliases}
  batched = tuple(d is not None or i in written for i, d in enumerate(dims))
  operands = [x if not b else jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
              for x, d, b in zip(operands, dims, batched)]
  wider = program.batch(size, batched)
  results = bind(wider, *(x.reshape(shape) for x, (shape, _) in zip(operands, wider.in_avals)))
  results = [x.reshape(size, *shape) for x, (shape, _) in zip(results, program.out_avals)]
  return results, (0,) * len(results)


ad.primitive_jvps[tile_call_p] = _no_derivative
ad.primitive_transposes[tile_call_p] = _no_derivative
batching.primitive_batchers[tile_call_p] = _batch

library.register_at_import()
