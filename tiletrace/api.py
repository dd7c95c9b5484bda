"""tile_call: from a plain Python kernel to a JAX function, with stages."""
from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import export

from tiletrace.core import config
from tiletrace.core.dimensions import Pattern, Sizes, parse
from tiletrace.core.dtypes import canonical
from tiletrace.core.effects import Access, RefEffect
from tiletrace.core.errors import ResourceError, TileTypeError
from tiletrace.core.graph import CallOptions, Eqn, Literal, RefOperand, TileGraph, Var, walk
from tiletrace.core.ops.memory import store_p
from tiletrace.core.rules import effects
from tiletrace.core.source import function_loc, user_loc
from tiletrace.core.trace import Trace, trace_kernel
from tiletrace.core.types import MAX_PROGRAMS, RefType, Space, grid_size
from tiletrace.ffi import primitive
from tiletrace.lowering.options import CompileOptions, given_options
from tiletrace.lowering.target import SM_90A
from tiletrace.stages import Lowered, TileProgram, Traced

_TRANSLATIONS = {
    "out_type": "out_shape=", "out_specs": "index blocks in the kernel: ref[tt.block(i, n)]",
    "in_specs": "index blocks in the kernel: ref[tt.block(i, n)]", "grid_spec": "grid=",
    "scratch_shapes": "tt.alloc_shared and tt.alloc_fragment in the kernel",
    "scratch_types": "tt.alloc_shared and tt.alloc_fragment in the kernel",
    "num_threads": "warpgroups=, of 128 threads each", "threads": "warpgroups=, of 128 threads each",
    "num_warps": "warpgroups=, of 4 warps each", "num_stages": "num_stages of tt.pipelined in the kernel",
    "compiler_params": "options=", "interpret": 'backend="xla"', "debug": "TT_DUMP=all",
    "aliases": "input_output_aliases=", "use_swizzle": "raster=", "zeroed_outputs": "ref[...] = 0 in the kernel",
}


class TileCall:
  """A kernel with its launch. Call it with arrays, inside or outside jax.jit; `trace` and `lower` give its stages.

  >>> def kernel(x, y):
  ...   y[...] = x[...] + 1
  >>> x = jnp.arange(4.)
  >>> f = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)
  >>> f
  <tile_call kernel grid=(1,)>
  >>> f(x)
  Array([1., 2., 3., 4.], dtype=float32)
  >>> ".target sm_90a" in f.lower(x).as_text("ptx")
  True
  """

  def __init__(self, kernel: Callable[..., None], out_shape: Any, options: CallOptions, *, aliases: dict[int, int],
               vjp: Any, compile_options: CompileOptions, backend: str | None, name: str | None,
               patterns: tuple[Pattern, ...] | None = None):
    self.kernel, self.out_shape, self.options, self.patterns = kernel, out_shape, options, patterns
    self.aliases, self.vjp, self.compile_options, self.backend = aliases, vjp, compile_options, backend
    self._function = _innermost(kernel)
    self.__name__ = name or getattr(self._function, "__name__", type(self._function).__name__)
    self.__wrapped__ = kernel
    self._statics = _static_key(kernel, self.__name__)

  def __repr__(self) -> str:
    return f"<tile_call {self.__name__} grid={self.options.grid}>"

  def trace(self, *args: Any) -> Traced:
    """Traces for arrays, ShapeDtypeStructs, or anything with a shape and dtype."""
    leaves, structure = jax.tree.flatten(args)
    avals = tuple(_aval(x, self.__name__) for x in leaves)
    return Traced(self._program(avals, structure))

  def lower(self, *args: Any, target: str | None = None, options: CompileOptions | None = None) -> Lowered:
    """`trace(*args).lower(target, options)`."""
    return self.trace(*args).lower(target, options)

  def __call__(self, *args: Any) -> Any:
    leaves, structure = jax.tree.flatten(args)
    arrays = primitive.vary_alike([jnp.asarray(x) for x in leaves])
    program = self._program(tuple(_aval(x, self.__name__) for x in arrays), structure)

    def run(*args: Any) -> Any:
      return jax.tree.unflatten(jax.tree.structure(self.out_shape), primitive.bind(program, *jax.tree.leaves(args)))

    call = run if self.vjp is None else self._differentiable(run, program)
    return call(*jax.tree.unflatten(structure, arrays))

  def _differentiable(self, run: Callable[..., Any], program: TileProgram) -> Callable[..., Any]:
    structure = jax.tree.structure(self.out_shape)

    def interpret(*args: Any) -> Any:
      return jax.tree.unflatten(structure, program.as_jax(*jax.tree.leaves(args)))

    def backward(saved: Any, cotangents: Any) -> tuple:
      inputs, outputs = saved
      if self.vjp == "xla":
        return jax.vjp(interpret, *inputs)[1](cotangents)
      found = self.vjp(inputs, outputs, cotangents)
      if not isinstance(found, tuple) or len(found) != len(inputs):
        what = f"{len(found)} cotangents" if isinstance(found, tuple) else type(found).__name__
        raise TileTypeError(f"vjp of {self.__name__} returned {what} for {len(inputs)} inputs",
                            loc=function_loc(self.vjp) or program.graph.loc,
                            hint="a tuple with one cotangent for each input; None stands for zero")
      return found

    run.__name__ = run.__qualname__ = self.__name__
    call = jax.custom_vjp(run)

    def forward(*args: Any) -> tuple:
      outputs = call(*args)        # not `run`: a second derivative finds the rule again
      return outputs, (args, outputs)

    call.defvjp(forward, backward)
    return call

  def _program(self, avals: tuple[primitive.Aval, ...], structure: Any) -> TileProgram:
    outs, out_structure = jax.tree.flatten(self.out_shape)
    out_avals = tuple((tuple(o.shape), np.dtype(o.dtype)) for o in outs)
    static = (self._statics, self.__name__, structure, out_structure, tuple(self.aliases.items()), self.compile_options,
              self.backend)
    programs = _programs(self._function)
    if any(export.is_symbolic_dim(n) for shape, _ in (*avals, *out_avals) for n in shape):
      return self._dynamic(programs, static, avals, out_avals, structure)   # of no use to other calls
    key = (static, avals, out_avals, self.options, self.patterns)
    if key not in programs and self.patterns is None:
      graph = self._graph(avals, out_avals, self.options, structure)
      programs[key] = TileProgram(graph, self.compile_options, self.backend)
    elif key not in programs:
      programs[key] = self._dynamic(programs, static, avals, out_avals, structure)
    return programs[key]

  def _dynamic(self, programs: dict[Hashable, TileProgram], static: Hashable, avals: tuple[primitive.Aval, ...],
               out_avals: tuple[primitive.Aval, ...], structure: Any) -> TileProgram:
    """The program of dynamic shapes: traced once, for whatever sizes."""
    sizes, arrays = Sizes(self.__name__), (*avals, *out_avals)
    if self.patterns is None:
      raise TileTypeError(f"{self.__name__}: a shape is symbolic: {', '.join(str(shape) for shape, _ in arrays)}",
                          loc=user_loc(), hint="dynamic_shapes= gives such dimensions a name; or export with concrete "
                                               "shapes")
    if len(self.patterns) != len(arrays):
      raise TileTypeError(f"{self.__name__}: dynamic_shapes has {len(self.patterns)} strings, the call {len(avals)} "
                          f"inputs and {len(out_avals)} outputs", loc=user_loc(), hint="one for each array, or None")
    labels = self._labels(structure, len(avals))
    found = [(sizes.match(label, pattern, shape), dtype)
             for label, pattern, (shape, dtype) in zip(labels, self.patterns, arrays, strict=True)]
    cluster = self.options.cluster or (1,) * len(self.options.grid)
    axes = {grid_size(a).names[0]: n // c for a, (n, c) in enumerate(zip(self.options.grid, cluster, strict=True))}
    options = dataclasses.replace(self.options, grid=tuple(grid_size(a) * c for a, c in enumerate(cluster)))
    inputs, outputs = tuple(found[:len(avals)]), tuple(found[len(avals):])
    key = (static, inputs, outputs, options)
    if key not in programs:
      graph = self._graph(inputs, outputs, options, structure)
      programs[key] = TileProgram(graph, self.compile_options, self.backend, tuple((sizes.values | axes).items()))
    return programs[key].at(tuple((sizes.values | axes).items()))

  def _labels(self, structure: Any, inputs: int) -> list[str]:
    """A name for each input leaf and each output leaf."""
    outs = jax.tree.structure(self.out_shape)
    several = isinstance(self.out_shape, tuple | list)
    args = jax.tree.unflatten(structure, range(inputs))
    names = self._parameter_names(len(args), len(self.out_shape) if several else 1)
    return _leaf_names(names, args, jax.tree.unflatten(outs, range(outs.num_leaves)), several)

  def _graph(self, avals: tuple[Any, ...], out_avals: tuple[Any, ...], options: CallOptions, structure: Any
             ) -> TileGraph:
    """Traces for arrays of (shape, dtype); with dynamic shapes an extent may be a Size."""
    several, out_structure = isinstance(self.out_shape, tuple | list), jax.tree.structure(self.out_shape)
    labels = self._labels(structure, len(avals))
    out_types = [RefType(tuple(shape), canonical(dtype), Space.GLOBAL) for shape, dtype in out_avals]
    loc = function_loc(self.kernel) or user_loc()
    invars: list[Var] = []

    def make_args(trace: Trace) -> list[Any]:
      refs = []
      for i, (shape, dtype) in enumerate(avals):
        ref = trace.binder(RefType(tuple(shape), canonical(dtype), Space.GLOBAL), loc, labels[i])
        ref.writable = i in self.aliases  # type: ignore[attr-defined]
        refs.append(ref)
      aliased = {o: i for i, o in self.aliases.items()}
      made = []
      for o, type_ in enumerate(out_types):
        if o in aliased:
          self._check_alias(aliased[o], o, refs[aliased[o]].type, type_)
          made.append(refs[aliased[o]])
        else:
          made.append(trace.binder(type_, loc, labels[len(avals) + o]))
      invars.extend(r.var for r in (*refs, *made))
      given, produced = jax.tree.unflatten(structure, refs), jax.tree.unflatten(out_structure, made)
      return [*given, *(produced if several else (produced,))]

    body, returned = trace_kernel(self.kernel, make_args, name=self.__name__, options=options)
    graph = TileGraph(self.__name__, tuple(invars), tuple(labels), len(avals), body, options, loc)
    if returned is not None:
      raise TileTypeError(f"the kernel {self.__name__} returned {type(returned).__name__}", loc=loc,
                          hint="a kernel stores into its output references and returns None")
    _check_written(graph)
    _check_not_zeroed(graph)
    _check_shared(graph)
    return graph

  def _check_alias(self, i: int, o: int, given: Any, wanted: RefType) -> None:
    if given != wanted:
      raise TileTypeError(f"{self.__name__}: input_output_aliases {{{i}: {o}}}: input {i} is {given}, output {o} is "
                          f"{wanted}", loc=user_loc(),
                          hint="an aliased output is the input's memory: give it the same shape and dtype")

  def _parameter_names(self, inputs: int, outputs: int) -> list[str]:
    """The kernel's positional parameters; one for each argument and output."""
    found = inspect.signature(self.kernel).parameters.values()
    positional = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in positional]
    if any(p.kind is p.VAR_POSITIONAL for p in found):
      return names + [f"arg{i}" for i in range(len(names), inputs + outputs)]
    required = sum(p.default is p.empty for p in positional)
    if not required <= inputs + outputs <= len(names):
      raise TileTypeError(
          f"the kernel {self.__name__} takes {len(names)} references ({', '.join(names)}), but {inputs} "
          f"input{'s' * (inputs != 1)} + {outputs} output{'s' * (outputs != 1)} are passed",
          loc=function_loc(self.kernel),
          hint="inputs come first, then outputs; static arguments are keyword-only and bound by functools.partial")
    return names


def _leaf_names(names: list[str], inputs: tuple, outputs: Any, several: bool) -> list[str]:
  """A name for each leaf: the parameter's, with the path inside it where it is a tree."""
  values = [*inputs, *(outputs if several else (outputs,))]
  labels: list[str] = []
  for name, value in zip(names, values):
    for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]:
      labels.append(name + "".join(f"_{getattr(k, 'key', getattr(k, 'idx', getattr(k, 'name', k)))}" for k in path))
  return labels


def _check_written(graph: TileGraph) -> None:
  written = {e.refs[x.operand].root for e in walk(graph.body) if not e.blocks for x in effects(e)
             if isinstance(x, RefEffect) and x.access is Access.WRITE}
  for var, name in zip(graph.outputs, graph.arg_names[graph.num_inputs:]):
    if var not in written:
      raise TileTypeError(f"{graph.name}: output '{name}' is never written", loc=graph.loc,
                          hint=f"store into it: {name}[...] = value")


def _check_not_zeroed(graph: TileGraph) -> None:
  """What is aliased is worth reading: zeroing all of it first, or just what is read next, loses the input."""
  if not graph.aliases:
    return
  names = {graph.outputs[o]: (graph.arg_names[i], graph.arg_names[graph.num_inputs + o]) for i, o in graph.aliases}
  made = {v: e for e in walk(graph.body) for v in e.outvars}
  read: set[Var] = set()
  zeroed: dict[RefOperand, Eqn] = {}
  for eqn in walk(graph.body):
    for effect in effects(eqn) if not eqn.blocks else ():
      ref = eqn.refs[effect.operand] if isinstance(effect, RefEffect) else None
      if ref is None or ref.root not in names:
        continue
      lost = None
      if isinstance(effect, RefEffect) and effect.access is Access.READ:
        lost = zeroed.get(ref)
        read.add(ref.root)
      elif eqn.primitive is store_p and ref.root not in read and _is_zero(eqn, made):
        zeroed[ref] = eqn
        lost = eqn if ref.is_whole else None
      else:
        zeroed.pop(ref, None)
      if lost is not None:
        given, out = names[ref.root]
        raise TileTypeError(f"{graph.name}: '{out}' is the memory of the input '{given}', and is zeroed before that is "
                            "read", loc=lost.loc, hint="drop the pair from input_output_aliases: XLA reuses the memory "
                                                       "of a donated input anyway")


def _is_zero(store: Eqn, made: dict[Var, Eqn]) -> bool:
  """Whether a store, without a mask, is of the number 0, as it is or as a tile."""
  value, *mask = store.values
  if mask:
    return False
  while isinstance(value, Var) and value in made and made[value].primitive.name in ("broadcast_in_dim", "cast"):
    value = made[value].values[0]
  return isinstance(value, Literal) and value.value == 0


def _check_shared(graph: TileGraph) -> None:
  """Buffers that cannot fit on any GPU of the target are refused on every backend."""
  allocs = [e for e in walk(graph.body) if e.primitive.name == "alloc" and e.params["space"] is Space.SHARED]
  sizes = [e.outvars[0].type.nbytes for e in allocs]  # type: ignore[union-attr]
  if sum(sizes) > SM_90A.smem_bytes:
    lines = "\n".join(f"    {n:>8}  {e.outvars[0].hint or 'buffer'} {e.outvars[0].type} at {e.loc.short()}"
                      for n, e in zip(sizes, allocs))
    raise ResourceError(f"{graph.name} needs {sum(sizes)} bytes of shared memory, a CTA has {SM_90A.smem_bytes}:\n"
                        + lines, loc=allocs[sizes.index(max(sizes))].loc, hint="take smaller blocks")


def _innermost(kernel: Any) -> Any:
  while isinstance(kernel, functools.partial):
    kernel = kernel.func
  return kernel


_caches: weakref.WeakKeyDictionary[Any, dict[Hashable, TileProgram]] = weakref.WeakKeyDictionary()


def _programs(function: Any) -> dict[Hashable, TileProgram]:
  """Programs of one function, by identity: equal code elsewhere, or a re-run notebook cell, is another function."""
  return _caches.setdefault(function, {})


def _static_key(kernel: Any, name: str) -> Hashable:
  """Bound arguments by (type, value): 1, True and 1.0 are three kernels."""
  key: list[Hashable] = []
  while isinstance(kernel, functools.partial):
    if kernel.args:
      raise TileTypeError(f"tile_call({name}): functools.partial binds positional arguments", loc=user_loc(),
                          hint="make static arguments keyword-only and bind them by name")
    for k, v in sorted(kernel.keywords.items()):
      if isinstance(v, jax.Array):
        kind = "tracer" if isinstance(v, jax.core.Tracer) else "array"
        raise TileTypeError(f"tile_call({name}): static argument '{k}' is a JAX {kind} {jax.typeof(v).str_short()}",
                            loc=user_loc(), hint="compute it with Python numbers (math.sqrt, not jnp.sqrt), or pass it "
                                                 f"as an array and read {k}[...] in the kernel")
      try:
        hash(v)
      except TypeError:
        raise TileTypeError(f"tile_call({name}): static argument '{k}' of type {type(v).__name__} is not hashable",
                            loc=user_loc(), hint="use a tuple, a number, a string, a dtype or a function") from None
      key.append((k, type(v), v))
    kernel = kernel.func
  return tuple(key)


def _aval(x: Any, name: str) -> primitive.Aval:
  if not hasattr(x, "shape") or not hasattr(x, "dtype"):
    x = np.asarray(x)
  if jnp.issubdtype(x.dtype, jax.dtypes.extended):
    raise TileTypeError(f"{name}: an argument is {x.dtype}{list(x.shape)}, which has no bits that a kernel could read",
                        loc=user_loc(), hint="of a key: jax.random.key_data(key)")
  return tuple(x.shape), np.dtype(jax.dtypes.canonicalize_dtype(x.dtype))


def _patterns(dynamic_shapes: Any, name: str) -> tuple[Pattern, ...] | None:
  if dynamic_shapes is None:
    return None
  if not isinstance(dynamic_shapes, tuple | list):
    raise TileTypeError(f"tile_call({name}): dynamic_shapes={dynamic_shapes!r} must be a tuple", loc=user_loc(),
                        hint='a string or None for each array, inputs first: ("m, k", "k, 128", "m, 128")')
  out = []
  for i, text in enumerate(dynamic_shapes):
    try:
      out.append(parse(text))
    except ValueError as e:
      raise TileTypeError(f"tile_call({name}): dynamic_shapes[{i}]: {e}", loc=user_loc(),
                          hint='dimensions are written "m, 8*k, 64": names, multiples of names, numbers') from None
  return tuple(out)


def _grid(grid: Any, name: str, dynamic: bool) -> tuple[Any, ...]:
  """Python ints; with dynamic shapes symbolic dimensions too."""
  extents = grid if isinstance(grid, tuple | list) else (grid,)
  if dynamic and any(export.is_symbolic_dim(n) for n in extents):
    return tuple(extents)
  for axis, n in enumerate(extents):
    if dynamic and isinstance(n, int) and n > MAX_PROGRAMS:
      raise ResourceError(f"tile_call({name}): grid[{axis}] is {n}, with dynamic_shapes an axis has at most "
                          f"{MAX_PROGRAMS} programs", loc=user_loc(), hint="take larger blocks, or loop in the kernel")
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
      raise TileTypeError(f"tile_call({name}): grid[{axis}] must be a Python int, got {n!r}", loc=user_loc(),
                          hint="use tt.cdiv(n, block), or // with Python ints")
    if n < 0:
      raise TileTypeError(f"tile_call({name}): grid[{axis}] is {n}", loc=user_loc(), hint="tt.cdiv(n, block) programs")
  if math.prod(extents) > SM_90A.grid_x:
    raise ResourceError(f"tile_call({name}): grid {tuple(extents)} has {math.prod(extents)} programs, the hardware "
                        f"takes {SM_90A.grid_x}", loc=user_loc(), hint="take larger blocks, or loop in the kernel")
  return tuple(int(n) for n in extents)


def _cluster(cluster: Any, grid: tuple[int, ...], name: str) -> tuple[int, ...] | None:
  if cluster is None:
    return None
  if not isinstance(cluster, tuple) or len(cluster) != len(grid):
    raise TileTypeError(f"tile_call({name}): cluster={cluster!r} must be a tuple of CTAs along each of the {len(grid)} "
                        "axes of the grid", loc=user_loc(), hint=f"cluster={(1,) * (len(grid) - 1) + (2,)}, say")
  for axis, (c, n) in enumerate(zip(cluster, grid, strict=True)):
    _count(c, f"cluster[{axis}]", name, SM_90A.max_cluster)
    if n % c != 0:
      raise TileTypeError(f"tile_call({name}): clusters of {c} CTAs do not divide grid[{axis}] = {n}", loc=user_loc(),
                          hint=f"grid[{axis}] = {-(-n // c) * c}: blocks past the end of an array are empty")
  if math.prod(cluster) > SM_90A.max_cluster:
    raise ResourceError(f"tile_call({name}): cluster={cluster} has {math.prod(cluster)} CTAs, a portable one has "
                        f"{SM_90A.max_cluster} at most", loc=user_loc(), hint="take a smaller cluster")
  return cluster if math.prod(cluster) > 1 else None


def _count(value: Any, what: str, name: str, most: int | None = None) -> int:
  if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
    bounds = f"from 1 to {most}" if most else "from 1"
    raise TileTypeError(f"tile_call({name}): {what} must be a Python int {bounds}, got {value!r}", loc=user_loc())
  return value


def _check_kinds(kernel: Any, out_shape: Any, name: Any, vjp: Any) -> None:
  """What nothing else would notice, or only when a kernel is differentiated."""
  if not callable(kernel):
    raise TileTypeError(f"tile_call: kernel is {kernel!r}", loc=user_loc(), hint="a Python function of references")
  for leaf in jax.tree.leaves(out_shape):
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
      raise TileTypeError(f"tile_call: out_shape has {leaf!r}", loc=user_loc(),
                          hint="jax.ShapeDtypeStruct(shape, dtype), or a tuple of them")
  if not (name is None or isinstance(name, str)):
    raise TileTypeError(f"tile_call: name={name!r}", loc=user_loc(), hint='a string, as in name="my_kernel"')
  if not (vjp is None or vjp == "xla" or callable(vjp)):
    raise TileTypeError(f"tile_call: vjp={vjp!r}", loc=user_loc(),
                        hint='a function (inputs, outputs, cotangents) -> cotangents of the inputs, or "xla"')


def _aliases(aliases: Any, inputs_known: Sequence[Any], name: str) -> dict[int, int]:
  if not (aliases is None or isinstance(aliases, dict)):
    raise TileTypeError(f"tile_call({name}): input_output_aliases={aliases!r}", loc=user_loc(),
                        hint="{number of an input: number of an output}")
  out = dict(aliases or {})
  outs = len(inputs_known)
  for i, o in out.items():
    if not isinstance(i, int) or not isinstance(o, int) or not 0 <= o < outs:
      raise TileTypeError(f"tile_call({name}): input_output_aliases {{{i!r}: {o!r}}} does not name an input and one of "
                          f"{outs} outputs", loc=user_loc())
  if len(set(out.values())) != len(out):
    raise TileTypeError(f"tile_call({name}): input_output_aliases gives one output to two inputs", loc=user_loc())
  return out


def _check_persistent(persistent: Any, cluster: tuple[int, ...] | None, label: str) -> None:
  if isinstance(persistent, bool):
    return
  if not isinstance(persistent, str) or persistent != "dynamic":
    raise TileTypeError(f'tile_call({label}): persistent={persistent!r} must be True, False or "dynamic"',
                        loc=user_loc())
  if math.prod(cluster or ()) > 1:
    raise TileTypeError(f'tile_call({label}): persistent="dynamic" with cluster={cluster}: a CTA takes a program, '
                        "not a cluster several", loc=user_loc(), hint="persistent=True, or drop cluster=")


def tile_call(kernel: Callable[..., None], out_shape: Any, *, grid: int | tuple[int, ...], warpgroups: int = 1,
              cluster: tuple[int, ...] | None = None, raster: int | None = None, persistent: bool | str = False,
              dynamic_shapes: Any = None, input_output_aliases: dict[int, int] | None = None, vjp: Any = None,
              options: CompileOptions | None = None, backend: str | None = None, name: str | None = None,
              cost_estimate: Any = None, **unknown: Any) -> TileCall:
  """A JAX function that runs `kernel` once for each program of a grid.

  Args:
    kernel: a Python function of references, inputs first, then outputs; static arguments are keyword-only and bound
      with functools.partial.
    out_shape: jax.ShapeDtypeStruct, or a pytree of them: the outputs.
    grid: programs along each axis, Python ints; the last axis is fastest.
    warpgroups: how many groups of 128 threads compute one program. A producer warpgroup may be added.
    cluster: CTAs of a cluster along each axis of the grid, 8 at most in all. Copies of a pipelined loop whose source
      does not depend on an axis are made once for the CTAs along it (TMA multicast), each CTA bringing a part.
    raster: rows of programs that are taken together, for locality in L2, over the last two axes of the grid.
    persistent: launch one CTA for each SM and loop over the programs: those of a CTA are known beforehand. "dynamic": a
      CTA takes its next program from a counter in global memory when it is free, for programs whose lengths only the
      data says; those of known lengths are taken the longest first. Without `cluster`.
    dynamic_shapes: a string for each array, inputs, then outputs, with jax.export's words: "m, 8*k, 64". One compiled
      kernel serves all sizes of the dimensions that have a name; there `ref.shape` has an i32 scalar. One name is one
      size, a number is that size, and "8*k" promises a multiple of 8; each call checks. "_" is a dimension that is
      static whatever its size, None an array of those.
    input_output_aliases: {input: output} that are the same memory; the kernel gets one reference for both.
    vjp: vjp(inputs, outputs, cotangents) -> the inputs' cotangents, any JAX code. `inputs` is the tuple of arguments,
      the other two are trees like out_shape; the result is a tuple like `inputs`, where None stands for zero. Or "xla":
      differentiate the jax program of the kernel.
    options: CompileOptions.
    backend: "xla" runs the kernel as jax ops on every platform, "sim" runs its PTX in the simulator; None is what
      TT_BACKEND says, and else compiles on GPUs.
    name: shown in jaxprs, HLO and profiles; default: the kernel function's.
  Returns:
    a TileCall: callable on arrays (pytrees of them), with `trace`, `lower`.
  Raises:
    TypeError: an unknown keyword, with ours where the word of another system is known.
    TileTypeError, ResourceError: an argument that does not fit, named.

  Example:
    >>> import jax, jax.numpy as jnp, tiletrace as tt
    >>> def add_kernel(x, y, z):
    ...   r = tt.block(tt.program_id(0), 256)
    ...   z[r] = x[r] + y[r]
    >>> x = jnp.arange(1000.)
    >>> z = tt.tile_call(add_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(tt.cdiv(1000, 256),))(x, x)
    >>> bool((z == 2 * x).all())
    True
  """
  for k in unknown:
    raise TypeError(f"tile_call() has no keyword {k!r}" + (f"; use {_TRANSLATIONS[k]}" if k in _TRANSLATIONS else ""))
  _check_kinds(kernel, out_shape, name, vjp)
  label = name or getattr(_innermost(kernel), "__name__", "kernel")
  if cost_estimate is not None:
    raise TileTypeError(f"tile_call({label}): cost_estimate={cost_estimate!r}: there are none yet", loc=user_loc(),
                        hint="drop cost_estimate=")
  if not label.isidentifier():
    raise TileTypeError(f"tile_call: name {label!r} is not an identifier, as a GPU symbol must be", loc=user_loc(),
                        hint='give one: name="my_kernel"')
  if backend not in (None, "xla", "sim"):
    raise TileTypeError(f"tile_call({label}): backend is {backend!r}", loc=user_loc(), hint='None, "xla" or "sim"')
  backend = backend or config.read().backend
  patterns = _patterns(dynamic_shapes, label)
  extents = _grid(grid, label, patterns is not None)
  if raster is not None:
    _count(raster, "raster", label)
    if len(extents) < 2:
      raise TileTypeError(f"tile_call({label}): raster={raster} groups rows of a grid of two axes, this one is "
                          f"{extents}", loc=user_loc(), hint="drop raster=")
  clusters = _cluster(cluster, extents, label)
  _check_persistent(persistent, clusters, label)
  aliases = _aliases(input_output_aliases, jax.tree.leaves(out_shape), label)
  if vjp is not None and aliases:
    raise TileTypeError(f"tile_call({label}): vjp= with input_output_aliases: the saved input would be overwritten",
                        loc=user_loc(), hint="drop one of the two")
  options = given_options(options, f"tile_call({label})")
  switches = config.read()
  options = dataclasses.replace(options, debug=options.debug or switches.debug,
                                profile=options.profile or switches.profile, target=options.target or switches.target)
  call = CallOptions(extents, _count(warpgroups, "warpgroups", label, 8), clusters, raster, persistent)
  return TileCall(kernel, out_shape, call, aliases=aliases, vjp=vjp, compile_options=options,
                  backend=backend, name=name, patterns=patterns)
