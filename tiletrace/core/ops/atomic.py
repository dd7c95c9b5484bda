"""Atomic operations on global memory: each element read, changed and written as one, whatever other threads do."""
from __future__ import annotations

from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect, read, write
from tiletrace.core.errors import TileTypeError
from tiletrace.core.graph import Eqn, Primitive
from tiletrace.core.indexed import Indexed
from tiletrace.core.operands import check, operand, tile_types
from tiletrace.core.ops.gather import check_indices, index_operands, split_values, whole_tile
from tiletrace.core.ops.memory import mask_operand, stored_operand, tile_of, writable
from tiletrace.core.printer import Printer, print_rules
from tiletrace.core.ref import Ref, describe, plain_name
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile, bind_tile
from tiletrace.core.types import Space, TileType

# Values: value (for cas: compare, value), indices (see gather), mask. Params: op, sem, scope, returns, dims (() without
# indices).
atomic_p = Primitive("atomic")
# The same, of which the old values go to shared memory: refs (array, buffer). A thread that holds a copy of an element
# finds them there.
atomic_to_shared_p = Primitive("atomic_to_shared", level=0)

OPS = ("add", "max", "min", "and", "or", "xor", "exchange", "cas")
SEMANTICS, SCOPES = ("relaxed", "acquire", "release", "acq_rel"), ("cta", "cluster", "gpu", "sys")
_TYPES = {  # PTX ISA 9.7.13, atom; max and min of f32 are made of those of integers
  "add": (dtypes.i32, dtypes.u32, dtypes.f32, dtypes.f16, dtypes.bf16),
  **dict.fromkeys(("max", "min"), (dtypes.i32, dtypes.u32, dtypes.f32)),
  **dict.fromkeys(("and", "or", "xor", "exchange", "cas"), (dtypes.i32, dtypes.u32)),
}
_TYPES["exchange"] = _TYPES["cas"] = (dtypes.i32, dtypes.u32, dtypes.f32)


def num_operands(eqn: Eqn) -> int:
  return 2 if eqn.params["op"] == "cas" else 1


def _shape(eqn: Eqn) -> tuple[int, ...]:
  indices, mask = split_values(eqn, num_operands(eqn))
  ref = eqn.refs[0]
  shape = check_indices(eqn, ref, tile_types(indices)) if indices else ref.shape
  check(len(mask) <= 1 and all(m.dtype == dtypes.bool_ and m.shape in ((), shape) for m in tile_types(mask)),
        f"atomic: mask for {list(shape)}")
  return shape


@type_rules.register(atomic_p)
def _atomic_type(eqn: Eqn) -> tuple[TileType, ...]:
  p, ref, shape = eqn.params, eqn.refs[0], _shape(eqn)
  check(p["op"] in OPS and p["sem"] in SEMANTICS and p["scope"] in SCOPES and ref.type.space is Space.GLOBAL,
        f"atomic {p['op']} {p['sem']} {p['scope']} on {ref.type}")
  out = TileType(shape, ref.type.dtype)
  check(all(t == out for t in tile_types(eqn.values[:num_operands(eqn)])), f"atomic {p['op']} of others than {out}")
  return (out,) if p["returns"] else ()


@type_rules.register(atomic_to_shared_p)
def _to_shared_type(eqn: Eqn) -> tuple[()]:
  buffer = eqn.refs[1]
  check(buffer.shape == _shape(eqn) and buffer.type.dtype == eqn.refs[0].type.dtype, f"atomic: a buffer {buffer.type}")
  return ()


@effect_rules.register(atomic_p)
def _atomic_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (read(0), write(0))


@effect_rules.register(atomic_to_shared_p)
def _to_shared_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (read(0), write(0), write(1))


@print_rules.register(atomic_p, atomic_to_shared_p)
def _print_atomic(eqn: Eqn, p: Printer) -> str:
  outs = f"{p.binder(eqn.outvars[0])} <- " if eqn.outvars else ""
  usual = {"sem": "relaxed", "scope": "gpu"}
  kind = "".join(f" {eqn.params[k]}" for k, v in usual.items() if eqn.params[k] != v)
  return (f"{outs}{eqn.primitive}_{eqn.params['op']}{kind} {' '.join(map(p.ref, eqn.refs))} "
          f"{' '.join(map(p.atom, eqn.values))}")


def _atomic(op: str, ref: Any, values: tuple[Any, ...], mask: Any, sem: str, scope: str) -> Tile:
  what = f"atomic_{op}"
  base = ref.ref if isinstance(ref, Indexed) else ref
  if not isinstance(base, Ref):
    raise TileTypeError(f"{what}: ref is {getattr(ref, 'type', type(ref).__name__)}, not a reference", loc=user_loc(),
                        hint="write ref.at[...] for a view")
  if base.space is not Space.GLOBAL:
    raise TileTypeError(f"{what} on {describe(base)}: only global memory has atomics here", loc=user_loc(),
                        hint=f"a program's threads need none: {plain_name(base)}[...] += v, and tt.sum for what meets")
  writable(base, what)
  if base.dtype not in _TYPES[op]:
    raise TileTypeError(f"{what} of {dtypes.short_name(base.dtype)}: the hardware has it for "
                        + ", ".join(map(dtypes.short_name, _TYPES[op])), loc=user_loc())
  for name, value, known in (("sem", sem, SEMANTICS), ("scope", scope, SCOPES)):
    if value not in known:
      raise TileTypeError(f"{what}: {name} is {value!r}", loc=user_loc(), hint="one of " + ", ".join(map(repr, known)))
  shape = tile_of(ref, what)
  operands = [stored_operand(operand(v, f"{what}: value"), base, shape, what) for v in values]
  if shape:
    operands = [whole_tile(v, shape) for v in operands]
  indices, dims = (index_operands(ref, shape), ref.dims) if isinstance(ref, Indexed) else ((), ())
  return bind_tile(atomic_p, (*base.operands, *operands, *indices, *mask_operand(mask, shape, what)),
                   views=(base.view,), op=op, sem=sem, scope=scope, dims=dims, returns=True)


def atomic_add(ref: Any, value: Any, *, mask: Any = None, sem: str = "relaxed", scope: str = "gpu") -> Tile:
  """Adds `value` to every element of a view of global memory, and returns what was there before.

  Where the result is not used nothing is returned by the hardware either (`red`), several elements at once where they
  are neighbours. Programs come in any order, and so do elements that an index tile names several times: sums of floats
  differ in the last bits from run to run.

  Args:
    ref: a view of an output, `y.at[r, :]`, or of its elements at index tiles, `y.at[idx, :]`. What lies outside is
      dropped, and its old value is 0.
    value: a number, or a tile of the view's dtype and rank whose size-1 dimensions are repeated.
    mask: a bool tile of the view's shape, or a scalar: elements where it is False are left alone.
    sem: "relaxed", "acquire", "release" or "acq_rel" (PTX ISA 8.7).
    scope: whose atomic operations it is ordered with: "cta", "cluster", "gpu" or "sys".
  Raises:
    TileTypeError: an input, shared memory, or a dtype that the hardware has no such operation for.

  Example:
    >>> def kernel(x, y):
    ...   tt.atomic_add(y, tt.program_id(0))
    >>> x = jnp.array([1, 5, 9])
    >>> call = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=4, input_output_aliases={0: 0})
    >>> call(x)
    Array([ 7, 11, 15], dtype=int32)
  """
  return _atomic("add", ref, (value,), mask, sem, scope)


def atomic_max(ref: Any, value: Any, *, mask: Any = None, sem: str = "relaxed", scope: str = "gpu") -> Tile:
  """The larger of each element and `value`, of i32, u32 or f32 (numbers: NaN may win or lose); see `atomic_add`.

  >>> def kernel(x, y):
  ...   tt.atomic_max(y, 2 * tt.program_id(0))
  >>> x = jnp.array([1, 5, 9])
  >>> call = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=4, input_output_aliases={0: 0})
  >>> call(x)
  Array([6, 6, 9], dtype=int32)
  """
  return _atomic("max", ref, (value,), mask, sem, scope)


def atomic_min(ref: Any, value: Any, *, mask: Any = None, sem: str = "relaxed", scope: str = "gpu") -> Tile:
  """The smaller of each element and `value`, of i32, u32 or f32 (numbers: NaN may win or lose); see `atomic_add`.

  >>> def kernel(x, y):
  ...   tt.atomic_min(y, 2 * tt.program_id(0))
  >>> x = jnp.array([1, 5, 9])
  >>> call = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=4, input_output_aliases={0: 0})
  >>> call(x)
  Array([0, 0, 0], dtype=int32)
  """
  return _atomic("min", ref, (value,), mask, sem, scope)


def atomic_and(ref: Any, value: Any, *, mask: Any = None, sem: str = "relaxed", scope: str = "gpu") -> Tile:
  """Each element & `value`; see `atomic_add`.

  >>> def kernel(x, y):
  ...   tt.atomic_and(y, 12 + tt.program_id(0))
  >>> x = jnp.array([1, 5, 9])
  >>> call = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=4, input_output_aliases={0: 0})
  >>> call(x)
  Array([0, 4, 8], dtype=int32)
  """
  return _atomic("and", ref, (value,), mask, sem, scope)


def atomic_or(ref: Any, value: Any, *, mask: Any = None, sem: str = "relaxed", scope: str = "gpu") -> Tile:
  """Each element | `value`; see `atomic_add`.

  >>> def kernel(x, y):
  ...   tt.atomic_or(y, tt.program_id(0))
  >>> x = jnp.array([1, 5, 9])
  >>> call = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=4, input_output_aliases={0: 0})
  >>> call(x)
  Array([ 3,  7, 11], dtype=int32)
  """
  return _atomic("or", ref, (value,), mask, sem, scope)


def atomic_xor(ref: Any, value: Any, *, mask: Any = None, sem: str = "relaxed", scope: str = "gpu") -> Tile:
  """Each element ^ `value`; see `atomic_add`.

  >>> def kernel(x, y):
  ...   tt.atomic_xor(y, tt.program_id(0))
  >>> x = jnp.array([1, 5, 9])
  >>> call = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=4, input_output_aliases={0: 0})
  >>> call(x)
  Array([1, 5, 9], dtype=int32)
  """
  return _atomic("xor", ref, (value,), mask, sem, scope)


def atomic_exchange(ref: Any, value: Any, *, mask: Any = None, sem: str = "relaxed", scope: str = "gpu") -> Tile:
  """Stores `value` and returns what was there; see `atomic_add`.

  >>> def kernel(x, y):
  ...   tt.atomic_exchange(y.at[0], 7)
  >>> x = jnp.array([1, 5, 9])
  >>> call = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=4, input_output_aliases={0: 0})
  >>> call(x)
  Array([7, 5, 9], dtype=int32)
  """
  return _atomic("exchange", ref, (value,), mask, sem, scope)


def atomic_cas(ref: Any, compare: Any, value: Any, *, mask: Any = None, sem: str = "relaxed", scope: str = "gpu"
               ) -> Tile:
  """Stores `value` where an element has the bits of `compare`, and returns what was there; see `atomic_add`.

  >>> def kernel(x, y):
  ...   tt.atomic_cas(y.at[0], 1, 10 + tt.program_id(0))
  >>> x = jnp.array([1, 5, 9])
  >>> call = tt.tile_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=4, input_output_aliases={0: 0})
  >>> call(x)
  Array([10,  5,  9], dtype=int32)
  """
  return _atomic("cas", ref, (compare, value), mask, sem, scope)


def apply(op: str, old: Any, operands: tuple[Any, ...], where: Any) -> Any:
  """What an operation leaves of an element, on numpy-like arrays; `where` is their library's."""
  b = operands[0]
  if op == "cas":
    return where(old == b, operands[1], old)
  return {"add": lambda: old + b, "max": lambda: where(old < b, b, old), "min": lambda: where(b < old, b, old),
          "and": lambda: old & b, "or": lambda: old | b, "xor": lambda: old ^ b, "exchange": lambda: b}[op]()

