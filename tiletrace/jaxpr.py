"""call_jax: any jax.numpy function of tiles, traced by JAX and recorded as tile operations.

A jaxpr's types are explicit: its operands have the result's shape or are scalars, and one dtype, which is just the
convention of tile equations. So a rule binds primitives directly; nothing is promoted or broadcast again.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError
from tiletrace.core.foreign import is_jax, refuse_foreign
from tiletrace.core.graph import Literal, Primitive
from tiletrace.core.ops import elementwise as ops, reduce as reductions, shape as shapes
from tiletrace.core.ref import Ref, plain_name
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile
from tiletrace.core.trace import bind, current

Operand = Tile | Literal
# A rule: (operands, the jaxpr equation) -> its results.
JaxRule = Callable[[list[Operand], Any], "Sequence[Operand]"]
jax_rules: dict[str, JaxRule] = {}


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

  >>> y = tt.call_jax(jax.nn.gelu, acc[...])            # in a kernel
  """
  current().raise_pending()
  name = getattr(fn, "__name__", repr(fn))
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
  if isinstance(value, jax.core.Tracer) or np.ndim(value):
    kind = "a JAX tracer" if isinstance(value, jax.core.Tracer) else "an array"
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
      return _constant(np.asarray(atom.val, atom.aval.dtype), self.name) if isinstance(atom, jex.Literal) else env[atom]

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

def _dtype(x: Operand) -> np.dtype:
  return x.type.dtype


def _like(x: Operand, value: bool | int | float) -> Literal:
  """A number of `x`'s dtype."""
  return Literal(float(value) if dtypes.is_float(_dtype(x)) else value, _dtype(x))


def _op(primitive: Primitive, *operands: Operand, **params: Any) -> Tile:
  return bind(primitive, operands, params)[0]  # type: ignore[return-value]


def _cast(x: Operand, dtype: np.dtype) -> Operand:
  if _dtype(x) == dtype:
    return x
  if isinstance(x, Literal):
    return Literal(np.asarray(x.value).astype(dtype).item(), dtype)
  return _op(ops.cast_p, x, dtype=dtype)


def _rule(*names: str) -> Callable[[Callable[..., Operand]], Callable[..., Operand]]:
  """Registers fn(*operands, **params of the jaxpr equation) -> the one result."""
  def add(fn: Callable[..., Operand]) -> Callable[..., Operand]:
    for name in names:
      assert name not in jax_rules, name
      jax_rules[name] = lambda operands, eqn: [fn(*operands, **eqn.params)]
    return fn
  return add


def _direct(name: str, primitive: Primitive) -> None:
  jax_rules[name] = lambda operands, eqn: [_op(primitive, *operands)]


for _name, _primitive in {
    "add": ops.add_p, "add_any": ops.add_p, "sub": ops.sub_p, "mul": ops.mul_p, "max": ops.max_p, "min": ops.min_p,
    "and": ops.and_p, "or": ops.or_p, "xor": ops.xor_p, "not": ops.not_p, "neg": ops.neg_p, "abs": ops.abs_p,
    "sign": ops.sign_p, "floor": ops.floor_p, "ceil": ops.ceil_p, "exp": ops.exp_p, "exp2": ops.exp2_p,
    "log": ops.log_p, "tanh": ops.tanh_p, "logistic": ops.logistic_p, "sqrt": ops.sqrt_p, "rsqrt": ops.rsqrt_p,
    "erf": ops.erf_p, "sin": ops.sin_p, "cos": ops.cos_p, "eq": ops.eq_p, "ne": ops.ne_p, "lt": ops.lt_p,
    "le": ops.le_p, "gt": ops.gt_p, "ge": ops.ge_p, "shift_left": ops.shift_left_p,
    "shift_right_arithmetic": ops.shift_right_p}.items():
  _direct(_name, _primitive)


# --- elementwise

@_rule("stop_gradient", "copy", "copy_p")
def _identity(x: Operand, **_: Any) -> Operand:
  return x


@_rule("convert_element_type")
def _convert(x: Operand, *, new_dtype: Any, **_: Any) -> Operand:
  dtype = dtypes.canonical(new_dtype)
  if dtype == dtypes.bool_ and isinstance(x, Tile) and x.dtype != dtype:
    return _op(ops.ne_p, x, _like(x, 0))
  return _cast(x, dtype)


@_rule("square")
def _square(x: Operand) -> Operand:
  return _op(ops.mul_p, x, x)


@_rule("integer_pow")
def _integer_pow(x: Operand, *, y: int) -> Operand:
  """Repeated squaring, as XLA does it."""
  out: Operand | None = None
  power, n = x, abs(y)
  while n:
    if n & 1:
      out = power if out is None else _op(ops.mul_p, out, power)
    n >>= 1
    power = _op(ops.mul_p, power, power) if n else power
  if out is None:
    return _full_like(x, 1)
  return out if y >= 0 else _op(ops.div_p, _like(x, 1), out)


@_rule("pow")
def _pow(x: Operand, y: Operand) -> Operand:
  return _op(ops.pow_p, x, _cast(y, _dtype(x)))


@_rule("div")
def _div(x: Operand, y: Operand) -> Operand:
  """Of integers towards zero."""
  if dtypes.is_float(_dtype(x)):
    return _op(ops.div_p, x, y)
  if _dtype(x).kind == "u":
    return _op(ops.floordiv_p, x, y)
  sign = _op(ops.mul_p, _op(ops.sign_p, x), _op(ops.sign_p, y))
  return _op(ops.mul_p, sign, _op(ops.floordiv_p, _op(ops.abs_p, x), _op(ops.abs_p, y)))


@_rule("rem")
def _rem(x: Operand, y: Operand) -> Operand:
  """Of x / y towards zero: it has x's sign."""
  if dtypes.is_float(_dtype(x)):
    quotient = _op(ops.div_p, x, y)
    whole = _op(ops.mul_p, _op(ops.sign_p, quotient), _op(ops.floor_p, _op(ops.abs_p, quotient)))
    return _op(ops.sub_p, x, _op(ops.mul_p, whole, y))
  return _op(ops.sub_p, x, _op(ops.mul_p, _div(x, y), y))


@_rule("is_finite")
def _is_finite(x: Operand) -> Operand:
  return _op(ops.lt_p, _op(ops.abs_p, x), _like(x, math.inf))


@_rule("tan")
def _tan(x: Operand, **_: Any) -> Operand:
  return _op(ops.div_p, _op(ops.sin_p, x), _op(ops.cos_p, x))


@_rule("log1p")
def _log1p(x: Operand, **_: Any) -> Operand:
  """log(u) x / (u - 1) with u = 1 + x rounded, which cancels the rounding (Kahan)."""
  u = _op(ops.add_p, x, _like(x, 1))
  d = _op(ops.sub_p, u, _like(x, 1))
  log = _op(ops.log_p, u)
  small = _op(ops.select_p, _op(ops.eq_p, d, _like(x, 0)), x, _op(ops.mul_p, log, _op(ops.div_p, x, d)))
  return _op(ops.select_p, _op(ops.eq_p, u, _like(x, math.inf)), u, small)


@_rule("expm1")
def _expm1(x: Operand, **_: Any) -> Operand:
  """(u - 1) x / log(u) with u = exp(x) rounded, which cancels the rounding (Kahan); only where x is small."""
  u = _op(ops.exp_p, x)
  d = _op(ops.sub_p, u, _like(x, 1))
  small = _op(ops.select_p, _op(ops.eq_p, u, _like(x, 1)), x, _op(ops.mul_p, d, _op(ops.div_p, x, _op(ops.log_p, u))))
  return _op(ops.select_p, _op(ops.lt_p, _op(ops.abs_p, x), _like(x, 1)), small, d)


@_rule("erfc")
def _erfc(x: Operand) -> Operand:
  """Relative error below 1.2e-7 in the tail: erfc(z) = t exp(-z^2 + p(t)), t = 1 / (1 + z / 2) (Press et al., 6.2)."""
  z = _op(ops.abs_p, x)
  t = _op(ops.div_p, _like(x, 1), _op(ops.add_p, _op(ops.mul_p, z, _like(x, 0.5)), _like(x, 1)))
  p: Operand = _like(x, _ERFC[0])
  for c in _ERFC[1:]:
    p = _op(ops.add_p, _op(ops.mul_p, p, t), _like(x, c))
  tail = _op(ops.mul_p, t, _op(ops.exp_p, _op(ops.sub_p, p, _op(ops.mul_p, z, z))))
  return _op(ops.select_p, _op(ops.lt_p, x, _like(x, 0)), _op(ops.sub_p, _like(x, 2), tail), tail)


_ERFC = (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
         -1.26551223)


@_rule("round")
def _round(x: Operand, *, rounding_method: Any) -> Operand:
  """0: halves away from zero; 1: to even."""
  size = _op(ops.abs_p, x)
  below = _op(ops.floor_p, size)
  rest = _op(ops.sub_p, size, below)
  up = _op(ops.ge_p, rest, _like(x, 0.5))
  if int(rounding_method) == 1:
    half = _op(ops.mul_p, below, _like(x, 0.5))
    odd = _op(ops.ne_p, _op(ops.floor_p, half), half)
    up = _op(ops.or_p, _op(ops.gt_p, rest, _like(x, 0.5)), _op(ops.and_p, up, odd))
  whole = _op(ops.select_p, up, _op(ops.add_p, below, _like(x, 1)), below)
  return _op(ops.select_p, _op(ops.lt_p, x, _like(x, 0)), _op(ops.neg_p, whole), whole)


@_rule("clamp")
def _clamp(low: Operand, x: Operand, high: Operand) -> Operand:
  return _op(ops.min_p, _op(ops.max_p, x, low), high)


@_rule("select_n")
def _select_n(which: Operand, *cases: Operand) -> Operand:
  """cases[which]; a bool picks the second case when it is true."""
  if _dtype(which) == dtypes.bool_:
    return _op(ops.select_p, which, *reversed(cases)) if len(cases) == 2 else cases[0]
  out = cases[0]
  for k, case in enumerate(cases[1:], 1):
    out = _op(ops.select_p, _op(ops.eq_p, which, _like(which, k)), case, out)
  return out


# --- shapes

def _full_like(x: Operand, value: int | float) -> Operand:
  return shapes.broadcast_in_dim(_like(x, value), x.type.shape, ())


@_rule("broadcast_in_dim")
def _broadcast(x: Operand, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any) -> Operand:
  return shapes.broadcast_in_dim(x, tuple(shape), tuple(broadcast_dimensions))


@_rule("reshape")
def _reshape(x: Operand, *, new_sizes: tuple[int, ...], **_: Any) -> Operand:
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

def _reduction(name: str, primitive: Primitive, *, through: np.dtype | None = None) -> None:
  @_rule(name)
  def rule(x: Operand, *, axes: Sequence[int], **_: Any) -> Operand:
    if not axes:
      return x
    if through is None:
      return _op(primitive, x, axes=tuple(axes))
    out = _op(primitive, _cast(x, through), axes=tuple(axes))
    return _op(ops.ne_p, out, _like(out, 0))


_reduction("reduce_sum", reductions.reduce_sum_p)
_reduction("reduce_prod", reductions.reduce_prod_p)
_reduction("reduce_max", reductions.reduce_max_p)
_reduction("reduce_min", reductions.reduce_min_p)
_reduction("reduce_or", reductions.reduce_max_p, through=dtypes.i32)
_reduction("reduce_and", reductions.reduce_min_p, through=dtypes.i32)
