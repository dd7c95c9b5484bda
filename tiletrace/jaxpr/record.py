"""call_jax: any jax.numpy function of tiles, traced by JAX and recorded as tile operations."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex

from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError
from tiletrace.core.foreign import is_jax, refuse_foreign
from tiletrace.core.graph import Literal
from tiletrace.core.ref import Ref, plain_name
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile
from tiletrace.core.trace import current
from tiletrace.jaxpr.control import BLOCKS
from tiletrace.jaxpr.rules import HINT, HINTS, Operand, Refused, as_tile, jax_rules, takes_arrays

# What jax raises where a function asks for the value of what it is given.
_NOT_KNOWN = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError,
              jax.errors.TracerIntegerConversionError, jax.errors.NonConcreteBooleanIndexError)


def call_jax(fn: Callable[..., Any], *args: Any, **static: Any) -> Any:
  """Applies a jax.numpy function to tile values.

  Args:
    fn: a pure function of arrays, e.g. `jax.nn.gelu`. It is traced once, with abstract arrays of the tiles' types;
      jax.jit, custom derivatives and checkpoints in it are seen through.
    *args: pytrees of tiles. Python and numpy numbers stay what they are, so weak types work as in jnp.
    **static: passed to `fn` as they are.

  Returns:
    `fn`'s result, with tiles for arrays.

  Raises:
    TileTypeError: `fn` needs an operation that tiles do not have, or the values of its arguments while it is traced;
      it closes over an array that more than known arrays and indices go into; or an argument is an array or a
      reference.

  Example:
    >>> def kernel(x, y):
    ...   y[...] = tt.call_jax(jax.nn.relu, x[...])
    >>> x = jnp.array([-1., 2.])
    >>> tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=1)(x)
    Array([0., 2.], dtype=float32)
  """
  current().raise_pending()
  inner = fn.func if isinstance(fn, functools.partial) else fn
  name = getattr(inner, "__name__", repr(inner))
  leaves, tree = jax.tree.flatten(args)
  for leaf in leaves:
    _check_argument(leaf, name)
  tiles = [x for x in leaves if isinstance(x, Tile)]

  def flat(*arrays: jax.Array) -> Any:
    given = iter(arrays)
    return fn(*jax.tree.unflatten(tree, [next(given) if isinstance(x, Tile) else x for x in leaves]), **static)

  with jax.enable_x64(False):  # tiles never become 64 bits wide by themselves
    try:
      closed, out_shape = jax.make_jaxpr(flat, return_shape=True)(
          *(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in tiles))
    except _NOT_KNOWN as e:
      raise TileTypeError(f"call_jax({name}): the function asks for a value that is not known while tracing: "
                          f"{str(e).splitlines()[0]}", loc=user_loc(),
                          hint="shapes do not depend on data, also under jax.jit: take jnp.where, a size=, or pass "
                               "what is static by keyword") from None
    recorder = _Recorder(name)
    outs = recorder.run(closed.jaxpr, [_constant(c, name) for c in closed.consts], tiles)
  return jax.tree.unflatten(jax.tree.structure(out_shape), list(map(recorder.tile, outs)))


def _check_argument(x: Any, name: str) -> None:
  if isinstance(x, Ref):
    raise TileTypeError(f"call_jax({name}): {plain_name(x)} is a reference, not a value", loc=user_loc(),
                        hint=f"did you mean {plain_name(x)}[...]?")
  if is_jax(x):
    refuse_foreign(x, f"call_jax({name})")


def _constant(value: Any, name: str) -> Operand:
  """What the function closes over: a known scalar or array."""
  if isinstance(value, Tracer):
    raise TileTypeError(f"call_jax({name}): the function closes over a JAX tracer of shape {list(np.shape(value))}",
                        loc=user_loc(), hint=_PASS)
  array = np.asarray(value)
  return array if array.ndim else Literal(array.item(), dtypes.canonical(array.dtype))


_PASS = "pass it to the kernel, load it, and give the tile to the function"


class _Recorder:
  """Records the equations of a jaxpr; `name` is the user's function."""

  def __init__(self, name: str):
    self.name = name

  def run(self, jaxpr: jex.Jaxpr, consts: Sequence[Operand], args: Sequence[Operand]) -> list[Operand]:
    env: dict[Any, Operand] = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))

    def read(atom: Any) -> Operand:
      if _is_var(atom):
        return env[atom]
      return _constant(np.asarray(atom.val, atom.aval.dtype), self.name)

    for eqn in _live(jaxpr):
      env.update(zip(eqn.outvars, self._apply(eqn, list(map(read, eqn.invars)))))
    return list(map(read, jaxpr.outvars))

  def tile(self, x: Operand) -> Tile:
    try:
      return as_tile(x)
    except Refused:
      raise TileTypeError(f"call_jax({self.name}): the function closes over an array of shape {list(np.shape(x))}",
                          loc=user_loc(), hint=_PASS) from None

  def _apply(self, eqn: Any, operands: list[Operand]) -> Sequence[Operand]:
    name = eqn.primitive.name
    if name in _CALLS:
      inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
      return self.closed(inner, operands)
    try:
      if name in BLOCKS:
        return BLOCKS[name](self.closed, operands, eqn)
      arrays = [isinstance(x, np.ndarray) for x in operands]
      if any(arrays) and not any(isinstance(x, Tile) for x in operands):
        return _computed(eqn, operands, self.name)
      if name not in jax_rules:
        raise Refused
      if any(arrays) and name not in takes_arrays:
        operands = [self.tile(x) if isinstance(x, np.ndarray) else x for x in operands]
      return jax_rules[name](operands, eqn)
    except Refused as e:
      raise TileTypeError(f"call_jax({self.name}): the jax primitive '{name}' {e.what}", loc=user_loc(),
                          hint=e.hint or HINTS.get(name, HINT)) from None

  def closed(self, jaxpr: Any, operands: Sequence[Operand]) -> list[Operand]:
    """Records a jaxpr, with or without its constants."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
      return self.run(jaxpr.jaxpr, [_constant(c, self.name) for c in jaxpr.consts], operands)
    return self.run(jaxpr, [], operands)


def _computed(eqn: Any, operands: Sequence[Operand], name: str) -> list[Operand]:
  """The results of an equation of known arrays and numbers."""
  with jax.ensure_compile_time_eval():
    values = [np.asarray(x.value, x.dtype) if isinstance(x, Literal) else x for x in operands]
    out = eqn.primitive.bind(*values, **eqn.params)
  return [_constant(x, name) for x in (out if eqn.primitive.multiple_results else [out])]


# jit, derivative rules and rematerialisation: what they call is what they mean
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
                    "custom_vjp_call_jaxpr", "remat2", "remat", "checkpoint"})


def _live(jaxpr: jex.Jaxpr) -> list[Any]:
  """The equations that the results need, and those that do something: they are refused by name."""
  needed, out = set(filter(_is_var, jaxpr.outvars)), []
  for eqn in reversed(jaxpr.eqns):
    if eqn.effects or needed.intersection(eqn.outvars):
      needed.update(filter(_is_var, eqn.invars))
      out.append(eqn)
  return out[::-1]


def _is_var(atom: Any) -> bool:
  return not isinstance(atom, jex.Literal)
