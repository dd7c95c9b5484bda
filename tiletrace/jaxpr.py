"""call_jax: any jax.numpy function of tiles, traced by JAX and recorded as tile operations.

A jaxpr's types are explicit: operands have equal ranks or are scalars, and one dtype, which is nearly the convention of
tile equations. So most rules bind primitives directly and promote nothing again.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex

from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError
from tiletrace.core.foreign import is_jax, refuse_foreign
from tiletrace.core.graph import Literal, Primitive
from tiletrace.core.ops import (
  cumulative,
  elementwise as ops,
  reduce as reductions,
  shape as shapes,
  transcendental as more,
)
from tiletrace.core.ref import Ref, plain_name
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile, bind_tile
from tiletrace.core.trace import current

Operand = Tile | Literal
# A rule: (operands, the jaxpr equation) -> its results.
JaxRule = Callable[[list[Operand], Any], "Sequence[Operand]"]
jax_rules: dict[str, JaxRule] = {}
F = TypeVar("F", bound=Callable[..., Any])


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
    TileTypeError: `fn` needs an operation that tiles do not have, closes over an array, or an argument is an array or
      a reference.

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
    closed, out_shape = jax.make_jaxpr(flat, return_shape=True)(
        *(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in tiles))
  consts = [_constant(c, name) for c in closed.consts]
  outs = _Recorder(name).run(closed.jaxpr, consts, tiles)
  return jax.tree.unflatten(jax.tree.structure(out_shape), list(map(_as_tile, outs)))


def _check_argument(x: Any, name: str) -> None:
  if isinstance(x, Ref):
    raise TileTypeError(f"call_jax({name}): {plain_name(x)} is a reference, not a value", loc=user_loc(),
                        hint=f"did you mean {plain_name(x)}[...]?")
  if is_jax(x):
    refuse_foreign(x, f"call_jax({name})")


def _constant(value: Any, name: str) -> Operand:
  """An array that the function closes over: only a known scalar."""
  if isinstance(value, Tracer) or np.ndim(value):
    kind = "a JAX tracer" if isinstance(value, Tracer) else "an array"
    raise TileTypeError(f"call_jax({name}): the function closes over {kind} of shape {list(np.shape(value))}",
                        loc=user_loc(), hint="pass it to the kernel, load it, and give the tile to the function")
  array = np.asarray(value)
  return Literal(array.item(), dtypes.canonical(array.dtype))


def _as_tile(x: Operand) -> Tile:
  return x if isinstance(x, Tile) else shapes.broadcast_in_dim(x, (), ())


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

  def _apply(self, eqn: Any, operands: list[Operand]) -> Sequence[Operand]:
    rule = jax_rules.get(eqn.primitive.name)
    if rule is not None:
      return rule(operands, eqn)
    if eqn.primitive.name in _CALLS:
      inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
      if isinstance(inner, jex.ClosedJaxpr):
        return self.run(inner.jaxpr, [_constant(c, self.name) for c in inner.consts], operands)
      return self.run(inner, [], operands)
    raise _unsupported(self.name, f"the jax primitive '{eqn.primitive.name}'")


# jit, derivative rules and rematerialisation: what they call is what they mean
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
                    "custom_vjp_call_jaxpr", "remat2", "remat", "checkpoint"})


def _unsupported(name: str, what: str) -> TileTypeError:
  return TileTypeError(f"call_jax({name}): {what} has no tile operation", loc=user_loc(),
                       hint="write this part with tt functions: tt.gemm for products, tt.sum and tt.max for reductions")


def _live(jaxpr: jex.Jaxpr) -> list[Any]:
  """The equations that the results need."""
  needed, out = set(filter(_is_var, jaxpr.outvars)), []
  for eqn in reversed(jaxpr.eqns):
    if needed.intersection(eqn.outvars):
      needed.update(filter(_is_var, eqn.invars))
      out.append(eqn)
  return out[::-1]


def _is_var(atom: Any) -> bool:
  return not isinstance(atom, jex.Literal)


# --- what rules are made of

def _op(primitive: Primitive, *operands: Operand, **params: Any) -> Tile:
  return bind_tile(primitive, operands, **params)


def _elementwise(primitive: Primitive, *operands: Operand) -> Tile:
  """Scalars stay, dimensions of size 1 are repeated."""
  shape = np.broadcast_shapes(*(x.type.shape for x in operands))
  return _op(primitive, *(shapes.spread(x, shape) if isinstance(x, Tile) and x.shape else x for x in operands))


def _cast(x: Operand, dtype: np.dtype) -> Operand:
  if isinstance(x, Literal):
    return Literal(np.asarray(x.value).astype(dtype).item(), dtype)
  return x.astype(dtype)


def _rule(*names: str) -> Callable[[F], F]:
  """Registers fn(*operands, **params of the jaxpr equation) -> the one result."""
  def add(fn: F) -> F:
    for name in names:
      assert name not in jax_rules, name
      jax_rules[name] = lambda operands, eqn: [fn(*operands, **eqn.params)]
    return fn
  return add


def _formula(name: str) -> Callable[[F], F]:
  """Registers a composition of tile operations, fn(*tiles, **params) -> tile. 16-bit floats go through f32."""
  def add(fn: F) -> F:
    def rule(*operands: Operand, **params: Any) -> Operand:
      tiles = list(map(_as_tile, operands))
      narrow = tiles[0].dtype if dtypes.is_float(tiles[0].dtype) else dtypes.f32
      out = fn(*(t.astype(dtypes.f32) if t.dtype.itemsize < 4 and dtypes.is_float(t.dtype) else t for t in tiles),
               **params)
      return out.astype(narrow) if dtypes.is_float(out.dtype) else out
    _rule(name)(rule)
    return fn
  return add


def _direct(name: str, primitive: Primitive) -> None:
  jax_rules[name] = lambda operands, eqn: [_elementwise(primitive, *operands)]


for _name, _primitive in {
    "add": ops.add_p, "add_any": ops.add_p, "sub": ops.sub_p, "mul": ops.mul_p, "max": ops.max_p, "min": ops.min_p,
    "and": ops.and_p, "or": ops.or_p, "xor": ops.xor_p, "not": ops.not_p, "neg": ops.neg_p, "abs": ops.abs_p,
    "sign": ops.sign_p, "floor": ops.floor_p, "ceil": ops.ceil_p, "exp": ops.exp_p, "exp2": ops.exp2_p,
    "log": ops.log_p, "log2": ops.log2_p, "tanh": ops.tanh_p, "logistic": ops.logistic_p, "sqrt": ops.sqrt_p,
    "rsqrt": ops.rsqrt_p, "erf": ops.erf_p, "sin": ops.sin_p, "cos": ops.cos_p, "eq": ops.eq_p, "ne": ops.ne_p,
    "lt": ops.lt_p, "le": ops.le_p, "gt": ops.gt_p, "ge": ops.ge_p, "shift_left": ops.shift_left_p,
    "shift_right_arithmetic": ops.shift_right_p, "tan": more.tan_p, "asin": more.asin_p, "acos": more.acos_p,
    "atan": more.atan_p, "atan2": more.atan2_p, "sinh": more.sinh_p, "cosh": more.cosh_p, "asinh": more.asinh_p,
    "acosh": more.acosh_p, "atanh": more.atanh_p, "expm1": more.expm1_p, "log1p": more.log1p_p, "cbrt": more.cbrt_p,
    "erfc": more.erfc_p, "population_count": more.population_count_p, "clz": more.clz_p}.items():
  _direct(_name, _primitive)


# --- elementwise

@_rule("stop_gradient", "copy", "copy_p")
def _identity(x: Operand, **_: Any) -> Operand:
  return x


@_rule("convert_element_type")
def _convert(x: Operand, *, new_dtype: Any, **_: Any) -> Operand:
  dtype = dtypes.canonical(new_dtype)
  return x.astype(dtype) if isinstance(x, Tile) else _cast(x, dtype)


@_rule("pow")
def _pow(x: Operand, y: Operand) -> Operand:
  return _elementwise(ops.pow_p, x, _cast(y, x.type.dtype))


@_formula("square")
def _square(x: Tile) -> Tile:
  return x * x


@_formula("integer_pow")
def _integer_pow(x: Tile, *, y: int) -> Tile:
  return x ** y


@_formula("div")
def _div(x: Tile, y: Tile) -> Tile:
  """Of integers towards zero."""
  if dtypes.is_float(x.dtype):
    return x / y
  return x // y if x.dtype.kind == "u" else ops.sign(x) * ops.sign(y) * (abs(x) // abs(y))


@_formula("rem")
def _rem(x: Tile, y: Tile) -> Tile:
  """x - trunc(x / y) y: it has x's sign."""
  if not dtypes.is_float(x.dtype):
    return x - _div(x, y) * y
  return ops.where(x < 0, -1.0, 1.0) * ops.mod(abs(x), abs(y))


@_formula("is_finite")
def _is_finite(x: Tile) -> Tile:
  return more.isfinite(x)


@_rule("bitcast_convert_type")
def _bitcast(x: Operand, *, new_dtype: Any) -> Operand:
  return more.bitcast_convert_type(_as_tile(x), new_dtype)


@_formula("round")
def _round(x: Tile, *, rounding_method: Any) -> Tile:
  """0: halves away from zero; 1: halves to even."""
  if int(rounding_method) == 1:
    return more.round_(x)
  size = abs(x)
  below = ops.floor(size)
  whole = ops.where(size - below >= 0.5, below + 1.0, below)
  return ops.where(x < 0, -whole, whole)


@_rule("clamp")
def _clamp(low: Operand, x: Operand, high: Operand) -> Operand:
  return _elementwise(ops.min_p, _elementwise(ops.max_p, x, low), high)


@_rule("select_n")
def _select_n(which: Operand, *cases: Operand) -> Operand:
  """cases[which]; a bool picks the second case when it is true."""
  if which.type.dtype == dtypes.bool_ and len(cases) == 2:
    return _elementwise(ops.select_p, which, *reversed(cases))
  index, out = _as_tile(_cast(which, dtypes.i32)), cases[0]
  for k, case in enumerate(cases[1:], 1):
    out = _elementwise(ops.select_p, ops.equal(index, k), case, out)
  return out


# --- shapes

@_rule("broadcast_in_dim")
def _broadcast(x: Operand, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any) -> Operand:
  return shapes.broadcast_in_dim(x, tuple(shape), tuple(broadcast_dimensions))


@_rule("reshape")
def _reshape(x: Operand, *, new_sizes: tuple[int, ...], dimensions: tuple[int, ...] | None = None, **_: Any) -> Operand:
  if dimensions is not None and tuple(dimensions) != tuple(sorted(dimensions)):
    x = _op(shapes.transpose_p, x, permutation=tuple(dimensions))
  return x if tuple(new_sizes) == x.type.shape else _op(shapes.reshape_p, x, shape=tuple(new_sizes))


@_rule("squeeze")
def _squeeze(x: Operand, *, dimensions: tuple[int, ...]) -> Operand:
  return _op(shapes.reshape_p, x, shape=tuple(n for d, n in enumerate(x.type.shape) if d not in dimensions))


@_rule("transpose")
def _transpose(x: Operand, *, permutation: tuple[int, ...]) -> Operand:
  return _op(shapes.transpose_p, x, permutation=tuple(permutation))


@_rule("slice")
def _slice(x: Operand, *, start_indices: Sequence[int], limit_indices: Sequence[int], strides: Any) -> Operand:
  return _op(shapes.slice_p, x, start=tuple(start_indices), limit=tuple(limit_indices),
             strides=tuple(strides or (1,) * len(start_indices)))


@_rule("concatenate")
def _concatenate(*xs: Operand, dimension: int) -> Operand:
  return _op(shapes.concatenate_p, *xs, dimension=dimension)


@_rule("iota")
def _iota(*, dtype: Any, shape: tuple[int, ...], dimension: int, **_: Any) -> Operand:
  return _cast(_op(shapes.iota_p, shape=tuple(shape), dimension=dimension), dtypes.canonical(dtype))


# --- reductions

def _reduction(name: str, primitive: Primitive) -> None:
  @_rule(name)
  def rule(x: Operand, *, axes: Sequence[int], **_: Any) -> Operand:
    return _op(primitive, x, axes=tuple(sorted(axes))) if axes else x


for _name, _primitive in {
    "reduce_sum": reductions.reduce_sum_p, "reduce_prod": reductions.reduce_prod_p,
    "reduce_max": reductions.reduce_max_p, "reduce_min": reductions.reduce_min_p}.items():
  _reduction(_name, _primitive)


def _of_bools(name: str, primitive: Primitive) -> None:
  @_rule(name)
  def rule(x: Operand, *, axes: Sequence[int], **_: Any) -> Operand:
    if x.type.dtype != dtypes.bool_:
      raise TileTypeError(f"call_jax: the jax primitive '{name}' combines the bits of {x.type}, and has a tile "
                          "operation for bool only", loc=user_loc(), hint="write this part with tt functions")
    return _op(primitive, x, axes=tuple(sorted(axes))) if axes else x


_of_bools("reduce_or", reductions.reduce_max_p)
_of_bools("reduce_and", reductions.reduce_min_p)


@_rule("argmax")
def _argmax(x: Operand, *, axes: Sequence[int], index_dtype: Any) -> Operand:
  return _cast(reductions.argmax(x, axes[0]), dtypes.canonical(index_dtype))


@_rule("argmin")
def _argmin(x: Operand, *, axes: Sequence[int], index_dtype: Any) -> Operand:
  return _cast(reductions.argmin(x, axes[0]), dtypes.canonical(index_dtype))


def _cumulative(name: str, primitive: Primitive) -> None:
  @_rule(name)
  def rule(x: Operand, *, axis: int, reverse: bool) -> Operand:
    return _cast(getattr(cumulative, primitive.name)(_as_tile(x), axis, reverse=reverse), x.type.dtype)


for _primitive in cumulative.CUMULATIVE:
  _cumulative(_primitive.name, _primitive)
