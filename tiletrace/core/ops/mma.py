"""Matrix multiplication into an accumulator: `acc += a @ b`."""
from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.effects import Effect, OrderEffect, read, write
from tiletrace.core.errors import TileTypeError
from tiletrace.core.graph import Eqn, Literal, Primitive
from tiletrace.core.operands import check, operand, refuse_keywords, tile_types
from tiletrace.core.ops.control import predicate
from tiletrace.core.printer import Printer, print_rules
from tiletrace.core.ref import Ref, describe, plain_name, static_shape
from tiletrace.core.rules import effect_rules, type_rules
from tiletrace.core.source import user_loc
from tiletrace.core.tile import Tile
from tiletrace.core.trace import bind
from tiletrace.core.types import Space, TileType, whole_view

gemm_p = Primitive("gemm")
gemm_async_p = Primitive("gemm_async", level=0)
wgmma_wait_p = Primitive("wgmma_wait", level=0)
mma_sync_p = Primitive("mma_sync")  # a gemm of two values: b is one, or wgmma declines

SQUARE, FULL_ROW, FULL_COL = "square", "full_row", "full_col"
POLICIES = (SQUARE, FULL_ROW, FULL_COL)
TF32 = "tf32"
# (a's and b's dtypes, acc's): PTX ISA, wgmma.mma_async and mma. f32 operands are multiplied as tf32.
_PRODUCTS: tuple[tuple[tuple[np.dtype, ...], tuple[np.dtype, ...]], ...] = (
  ((dtypes.f16,), (dtypes.f32, dtypes.f16)), ((dtypes.bf16,), (dtypes.f32,)), ((dtypes.f32,), (dtypes.f32,)),
  ((dtypes.f8e4m3, dtypes.f8e5m2), (dtypes.f32,)), ((dtypes.i8, dtypes.u8), (dtypes.i32,)),
)
ACCUMULATORS = {pair: acc for types, acc in _PRODUCTS for pair in itertools.product(types, repeat=2)}
_OPERANDS = tuple(dict.fromkeys(a for a, _ in ACCUMULATORS))
_DISPATCH = (None, "wgmma_ss", "wgmma_rs", "mma_sync")
MAX_PENDING = 7  # PTX ISA, wgmma.wait_group: depths that the code generator keeps apart
_WORDS = {
  "transpose_A": "pass the view a.T", "transpose_B": "pass the view b.T", "trans_a": "pass the view a.T",
  "trans_b": "pass the view b.T", "transpose_a": "pass the view a.T", "transpose_b": "pass the view b.T",
  "clear_accum": "accumulate=False", "k_pack": "not a parameter of gemm",
  "wg_wait": "tt.gemm_async and tt.wgmma_wait(n)",
  "preferred_element_type": "the dtype of acc",
}


def _operand_types(eqn: Eqn) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
  """(shape, dtype) of a, b and acc."""
  refs = [(r.shape, r.type.dtype) for r in eqn.refs]
  if eqn.params["a_in"] == "ref":
    return tuple(refs)
  a = eqn.values[1].type
  assert isinstance(a, TileType)
  return ((a.shape, a.dtype), *refs)


@type_rules.register(gemm_p, gemm_async_p)
def _gemm_type(eqn: Eqn) -> tuple[()]:
  name, in_ref = eqn.primitive.name, eqn.params["a_in"] == "ref"
  policy = eqn.params["policy"]
  check(policy in POLICIES or _is_split(policy), f"{name}: policy {policy!r}")
  check(len(eqn.refs) == 2 + in_ref and len(eqn.values) == 2 - in_ref, f"{name}: operands do not fit a_in")
  check(eqn.values[0].type == TileType((), dtypes.bool_), f"{name}: accumulate is {eqn.values[0].type}")
  a, b, acc = _operand_types(eqn)
  check(len(a[0]) == len(b[0]) == len(acc[0]) == 2 and a[0][1] == b[0][0] and acc[0] == (a[0][0], b[0][1]),
        f"{name}: a is {list(a[0])}, b is {list(b[0])}, acc is {list(acc[0])}")
  check(acc[1] in ACCUMULATORS.get((a[1], b[1]), ()) and (a[1] == dtypes.f32) == (eqn.params["precision"] == TF32),
        f"{name}: a is {dtypes.short_name(a[1])}, b is {dtypes.short_name(b[1])}, acc is {dtypes.short_name(acc[1])}")
  check(eqn.refs[-1].type.space is Space.FRAGMENT and eqn.refs[-2].type.space is Space.SHARED
        and eqn.refs[0].type.space is not Space.GLOBAL, f"{name}: operands are in the wrong spaces")
  return ()


@type_rules.register(mma_sync_p)
def _mma_sync_type(eqn: Eqn) -> tuple[()]:
  (acc,), (accumulate, a, b) = eqn.refs, tile_types(eqn.values)
  check(accumulate == TileType((), dtypes.bool_), f"mma_sync: accumulate is {accumulate}")
  *batch, m, k = a.shape
  check(len(batch) < 2 and len(a.shape) == len(b.shape) and b.shape == (*batch, k, b.shape[-1])
        and acc.shape == (*batch, m, b.shape[-1]), f"mma_sync: a is {a}, b is {b}, acc is {list(acc.shape)}")
  check(acc.type.dtype in ACCUMULATORS.get((a.dtype, b.dtype), ()) and acc.type.space is Space.FRAGMENT,
        f"mma_sync: {a} and {b} into {acc.type}")
  return ()


@effect_rules.register(mma_sync_p)
def _mma_sync_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (read(0), write(0))


@print_rules.register(mma_sync_p)
def _print_mma_sync(eqn: Eqn, p: Printer) -> str:
  accumulate, a, b = eqn.values
  when = "" if isinstance(accumulate, Literal) and accumulate.value else f" (accumulate={p.atom(accumulate)})"
  return f"{p.ref(eqn.refs[0])} += mma_sync{p.params(eqn)} {p.atom(a)} @ {p.atom(b)}{when}"


@effect_rules.register(gemm_p, gemm_async_p)
def _gemm_effects(eqn: Eqn) -> tuple[Effect, ...]:
  *inputs, acc = range(len(eqn.refs))
  accumulate = eqn.values[0]
  overwrites = isinstance(accumulate, Literal) and not accumulate.value
  order = (OrderEffect("gemm_async"),) if eqn.primitive is gemm_async_p else ()
  return (*map(read, inputs), *(() if overwrites else (read(acc),)), write(acc), *order)


@type_rules.register(wgmma_wait_p)
def _wait_type(eqn: Eqn) -> tuple[()]:
  check(0 <= eqn.params["n"] <= MAX_PENDING, f"wgmma_wait: n is {eqn.params['n']}")
  return ()


@effect_rules.register(wgmma_wait_p)
def _wait_effects(eqn: Eqn) -> tuple[Effect, ...]:
  return (OrderEffect("wgmma_wait"),)


@print_rules.register(gemm_p, gemm_async_p)
def _print_gemm(eqn: Eqn, p: Printer) -> str:
  *inputs, acc = map(p.ref, eqn.refs)
  accumulate, *a = eqn.values
  becomes = "=" if isinstance(accumulate, Literal) and not accumulate.value else "+="
  when = "" if isinstance(accumulate, Literal) else f" if {p.atom(accumulate)}"
  product = " @ ".join([*map(p.atom, a), *inputs])
  return f"{acc} {becomes} {eqn.primitive}{p.params(eqn, 'a_in')} {product}{when}"


def gemm(a: Any, b: Any, acc: Any, *, accumulate: Any = True, policy: Any = None, precision: str | None = None,
         dispatch: str | None = None, **unknown: Any) -> None:
  """`acc += a @ b`, or `acc = a @ b`.

  | a and b | acc | sums |
  |---|---|---|
  | bf16 and bf16, f16 and f16 | f32 | f32 |
  | f16 and f16 | f16 | f16, rounded after every 16 products; half the registers |
  | f8e4m3 or f8e5m2, each | f32 | about 14 bits in one gemm: add several, of k = 128, in f32 where that is too little |
  | i8 or u8, each | i32 | exact, modulo 2**32 |
  | f32 and f32 with precision="tf32" | f32 | f32, of operands cut to 10 bits of mantissa |

  Args:
    a: [m, k] in shared memory or a fragment, or a tile value. Transposes are views: `a_s.T`.
    b: [k, n] in shared memory. Of 8-bit and f32 operands k must be contiguous: keep b as [n, k] and pass `b_s.T`. Or a
      tile value: then mma.sync multiplies, and a is read from shared memory once for each such gemm. A value
      [s, k, n] is s products side by side, of a [s, m, k] into acc [s, m, n], which the warps divide first: of parts
      of one k, `tt.sum(acc, axis=0)` then is the product.
    acc: [m, n], a whole fragment: no part, no transpose.
    accumulate: bool, or a bool scalar.
    policy: how warpgroups divide acc: tt.SQUARE (default), tt.FULL_ROW, tt.FULL_COL, or how many (along the rows, along
      the columns).
    precision: "tf32" lets tensor cores multiply f32 operands, which ignore the low 13 bits of each.
    dispatch: force an implementation, by the name of its variant: "wgmma_ss", "wgmma_rs" or "mma_sync".
  Raises:
    TileTypeError: shapes, dtypes or spaces do not fit.

  Example:
    >>> def kernel(a, b, c):
    ...   a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    ...   acc = tt.alloc_fragment((64, 64), jnp.float32)
    ...   tt.copy(a, a_s)
    ...   tt.copy(b, b_s)
    ...   tt.gemm(a_s, b_s.T, acc, accumulate=False)
    ...   c[...] = acc[...]
    >>> a, b = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) for i in range(2))
    >>> c = tt.tile_call(kernel, jax.ShapeDtypeStruct((64, 64), jnp.float32), grid=1)(a, b)
    >>> bool(jnp.allclose(c, a.astype("float32") @ b.T.astype("float32"), atol=1e-3))
    True
  """
  _gemm(gemm_p, "gemm", a, b, acc, accumulate, _choices("gemm", policy, precision, dispatch), unknown)


def gemm_async(a: Any, b: Any, acc: Any, *, accumulate: Any = True, policy: Any = None, precision: str | None = None,
               dispatch: str | None = None, **unknown: Any) -> None:
  """Issues `acc += a @ b` and commits it as one wgmma group (level 0); acc, a and b are in use until tt.wgmma_wait.

  >>> def kernel(a, b, c):
  ...   a_s = tt.alloc_shared((64, 64), a.dtype, layout=tt.swizzle(128))
  ...   b_s = tt.alloc_shared((64, 64), b.dtype, layout=tt.swizzle(128))
  ...   acc = tt.alloc_fragment((64, 64), jnp.float32)
  ...   a_s[...], b_s[...], acc[...] = a[...], b[...], 0
  ...   tt.fence()
  ...   tt.sync()
  ...   tt.gemm_async(a_s, b_s, acc)
  ...   tt.wgmma_wait(0)
  ...   c[...] = acc[...]
  >>> a, b = (jnp.full((64, 64), v, jnp.bfloat16) for v in (1, 2))
  >>> tt.tile_call(kernel, jax.ShapeDtypeStruct((64, 64), jnp.float32), grid=1)(a, b).mean()
  Array(128., dtype=float32)
  """
  _gemm(gemm_async_p, "gemm_async", a, b, acc, accumulate, _choices("gemm_async", policy, precision, dispatch), unknown)


def wgmma_wait(n: int = 0) -> None:
  """Waits until at most `n` wgmma groups are pending (level 0).

  The example of `tt.gemm_async` uses it.
  """
  if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= MAX_PENDING:
    raise TileTypeError(f"wgmma_wait: n is {n!r}, it must be a Python int from 0 to {MAX_PENDING}", loc=user_loc())
  bind(wgmma_wait_p, (), dict(n=n))


def _is_split(policy: Any) -> bool:
  """(warpgroups along the rows, along the columns)."""
  return isinstance(policy, tuple) and len(policy) == 2 and all(type(n) is int and n > 0 for n in policy)


def _choices(what: str, policy: Any, precision: Any, dispatch: Any) -> dict[str, Any]:
  policy = SQUARE if policy is None else policy
  if not _is_split(policy) and policy not in POLICIES:
    raise TileTypeError(f"{what}: policy is {policy!r}", loc=user_loc(),
                        hint="tt.SQUARE, tt.FULL_ROW, tt.FULL_COL, or (warpgroups along m, along n)")
  for name, value, legal in (("dispatch", dispatch, _DISPATCH), ("precision", precision, (None, TF32))):
    if value not in legal:
      raise TileTypeError(f"{what}: {name} is {value!r}", loc=user_loc(), hint="one of " + ", ".join(map(repr, legal)))
  return {"policy": policy, "precision": precision, "dispatch": dispatch}


def _gemm(primitive: Primitive, what: str, a: Any, b: Any, acc: Any, accumulate: Any, choices: dict[str, Any],
          unknown: dict[str, Any]) -> None:
  refuse_keywords(what, unknown, _WORDS)
  if not isinstance(a, (Ref, Tile)):
    operand(a, f"{what}: a")
    raise TileTypeError(f"{what}: a is the number {a}", loc=user_loc(),
                        hint="a shared or fragment reference, or a tile")
  acc = _reference(what, "acc", acc)
  b = b if isinstance(b, Tile) and primitive is gemm_p else _reference(what, "b", b)
  _check_spaces(what, a, b, acc)
  _check_shapes(what, a, b, acc)
  if not _is_whole(acc):
    raise TileTypeError(f"{what}: acc is {describe(acc)}, a part or a transpose of a fragment", loc=user_loc(),
                        hint="a gemm accumulates into a whole fragment: take one for each part; (a @ b).T is b.T @ a.T")
  if isinstance(a, Ref) and a.space is Space.FRAGMENT and not _is_whole(a):
    a = a[...]                                       # other registers than those that hold the whole
  _check_dtypes(what, a, b, acc, choices["precision"])
  flag = predicate(accumulate, f"{what}: accumulate")
  if isinstance(b, Tile):
    _multiply_values(a, b, acc, flag, choices)
    return
  in_ref = isinstance(a, Ref)
  views = (*((a.view,) if isinstance(a, Ref) else ()), b.view, acc.view)
  operands = (*(a.operands if isinstance(a, Ref) else ()), *b.operands, *acc.operands, flag, *(() if in_ref else (a,)))
  bind(primitive, operands, dict(views=views, **choices, a_in="ref" if in_ref else "value"))


def _is_whole(ref: Ref) -> bool:
  return ref.view == whole_view(ref.type.shape)


def _multiply_values(a: Ref | Tile, b: Tile, acc: Ref, flag: Any, choices: dict[str, Any]) -> None:
  """Registers past the end of k would not be zero in a value: k is whole instructions."""
  depth = 32 // b.dtype.itemsize
  if b.shape[-2] % depth:
    raise TileTypeError(f"gemm: b is a value {b.type}, and its K = {b.shape[-2]} is not a multiple of {depth}",
                        loc=user_loc(), hint="one instruction's depth: pad it with zeros, or store b to shared memory")
  if choices["dispatch"] not in (None, "mma_sync") or not isinstance(choices["policy"], str):
    raise TileTypeError(f"gemm: b is a value {b.type}, which mma.sync alone multiplies", loc=user_loc(),
                        hint="drop dispatch= and a policy of two numbers, or store b to shared memory")
  value = a[...] if isinstance(a, Ref) else a
  bind(mma_sync_p, (*acc.operands, flag, value, b), dict(views=(acc.view,), policy=choices["policy"]))


def _reference(what: str, name: str, x: Any) -> Ref:
  if isinstance(x, Ref):
    return x
  hint = {"acc": "acc = tt.alloc_fragment((m, n), jnp.float32)",
          "b": "b must be in shared memory: b_s[...] = value, then tt.gemm(a, b_s, acc)"}[name]
  if not isinstance(x, Tile):
    operand(x, f"{what}: {name}")
  kind = f"a value {x.type}" if isinstance(x, Tile) else type(x).__name__
  raise TileTypeError(f"{what}: {name} is {kind}, not a reference", loc=user_loc(), hint=hint)


def _check_spaces(what: str, a: Ref | Tile, b: Ref | Tile, acc: Ref) -> None:
  for name, x, spaces in (("a", a, (Space.SHARED, Space.FRAGMENT)), ("b", b, (Space.SHARED,)),
                          ("acc", acc, (Space.FRAGMENT,))):
    if isinstance(x, Ref) and x.space not in spaces:
      hint = "copy it first: tt.copy(x.at[...], x_s)"
      if name == "acc":
        hint = "acc = tt.alloc_fragment((m, n), jnp.float32)"
      raise TileTypeError(f"{what}: {name} is {describe(x)}, it must be in {' or '.join(map(str, spaces))} memory",
                          loc=user_loc(), hint=hint)


def _check_shapes(what: str, a: Ref | Tile, b: Ref | Tile, acc: Ref) -> None:
  shapes = {}
  for name, x in (("a", a), ("b", b), ("acc", acc)):
    shapes[name] = x.shape if isinstance(x, Tile) else static_shape(x, f"{what}: {name}")
  batch = shapes["b"][:-2] if isinstance(b, Tile) and len(shapes["b"]) == 3 else ()
  for name, shape in shapes.items():
    if len(shape) != 2 + len(batch):
      takes = "three, as b has" if batch else "two"
      raise TileTypeError(f"{what}: {name} has {len(shape)} dimensions, shape {list(shape)}; it takes {takes}",
                          loc=user_loc(), hint="an integer index removes a dimension: a_s.at[slot]; "
                          "products side by side take b as a value, b_s[...]")
    if shape[:-2] != batch:
      raise TileTypeError(f"{what}: {name} is {list(shape)}, b has {shapes['b'][0]} matrices", loc=user_loc())
  (m, k), (k2, n) = shapes["a"][-2:], shapes["b"][-2:]
  if k != k2:
    hint = None
    if n == k:
      hint = f"pass the view {plain_name(b)}.T"
    elif m == k2:
      hint = f"pass the view {plain_name(a)}.T"
    raise TileTypeError(f"{what} contracts K={k} of a {[m, k]} with K={k2} of b {[k2, n]}", loc=user_loc(), hint=hint)
  if shapes["acc"] != (*batch, m, n):
    raise TileTypeError(f"{what}: acc is {list(shapes['acc'])} but a @ b is {[*batch, m, n]}", loc=user_loc())


def _check_dtypes(what: str, a: Ref | Tile, b: Ref | Tile, acc: Ref, precision: str | None) -> None:
  names = [dtypes.short_name(x.dtype) for x in (a, b, acc)]
  for name, x in (("a", a), ("b", b)):
    if x.dtype not in _OPERANDS:
      raise TileTypeError(f"{what}: {name} is {dtypes.short_name(x.dtype)}, it takes "
                          f"{', '.join(map(dtypes.short_name, _OPERANDS))}", loc=user_loc(),
                          hint="convert it: x_s[...] = value.astype(jnp.bfloat16)")
  found = ACCUMULATORS.get((a.dtype, b.dtype))
  if found is None:
    raise TileTypeError(f"{what}: a is {names[0]}, b is {names[1]}", loc=user_loc(),
                        hint="convert one: a[...].astype(b.dtype)")
  if a.dtype == dtypes.f32 and precision is None:
    raise TileTypeError(f"{what}: a and b are f32, and tensor cores multiply 11 bits of each (tf32)", loc=user_loc(),
                        hint='precision="tf32" where that will do; or convert them: .astype(jnp.bfloat16)')
  if a.dtype != dtypes.f32 and precision is not None:
    raise TileTypeError(f"{what}: precision is {precision!r}, a and b are {names[0]}", loc=user_loc(),
                        hint="precision says how f32 operands are multiplied")
  if acc.dtype not in found:
    raise TileTypeError(f"{what}: acc is {names[2]}, of {names[0]} and {names[1]} it is "
                        f"{' or '.join(map(dtypes.short_name, found))}", loc=user_loc(),
                        hint=f"acc = tt.alloc_fragment((m, n), {found[0].name!r}), and .astype at the end")
