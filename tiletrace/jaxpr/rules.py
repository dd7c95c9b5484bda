"""The table of rules for jax primitives, and what rules are made of.

A jaxpr's types are explicit: operands have equal ranks or are scalars, and one dtype, which is nearly the convention of
tile equations. So most rules bind primitives directly and promote nothing again.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from tiletrace.core import dtypes
from tiletrace.core.graph import Literal, Primitive
from tiletrace.core.ops import shape as shapes
from tiletrace.core.tile import Tile, bind_tile

# An array is one that the function closes over: it is known while tracing, and is computed with there.
Operand = Tile | Literal | np.ndarray
# A rule: (operands, the jaxpr equation) -> its results. Only those of `takes_arrays` get arrays.
JaxRule = Callable[[list[Any], Any], "Sequence[Operand]"]
jax_rules: dict[str, JaxRule] = {}
takes_arrays: set[str] = set()
F = TypeVar("F", bound=Callable[..., Any])


class Refused(Exception):
  """What a primitive asks for has no tile operation.

  Attributes:
    what: after "the jax primitive '...'".
    hint: what to write instead; None: what the primitive's row in HINTS says.
  """

  def __init__(self, what: str = "has no tile operation", hint: str | None = None):
    super().__init__(what)
    self.what, self.hint = what, hint


_INDEXED = ("a tile has no addresses: index the reference that it was loaded from, ref[i], or ref[idx, :] with a tile "
            "of indices; tt.take(x, i, axis) finds one element")
_SORT = "tiles are not sorted: sort outside of the kernel; tt.max, tt.argmax and tt.take find the first of an order"
_LOOP = "write the loop or the branch in the kernel: tt.fori_loop, tt.while_loop, tt.cond"
_SERIES = "it takes a long series: compute it outside of the kernel and pass the array"
_RANDOM = "tt.random_bits and tt.random_uniform are counter-based and the same on every backend"
_DEVICES = "it speaks to other devices: call it around the kernel, in jax.shard_map"
_GEMM = "tt.gemm(a, b, acc) multiplies matrices; products with vectors and outer products are taken as they are"
HINTS: dict[str, str] = {
    **dict.fromkeys(("gather", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub",
                     "dynamic_slice", "dynamic_update_slice"), _INDEXED),
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), _SORT),
    **dict.fromkeys(("while", "scan", "cond"), _LOOP),
    **dict.fromkeys(("polygamma", "igamma", "igammac", "igamma_grad_a", "zeta", "bessel_i0e", "bessel_i1e",
                     "regularized_incomplete_beta", "random_gamma_grad"), _SERIES),
    **dict.fromkeys(("threefry2x32", "random_bits", "random_wrap", "random_unwrap", "random_seed", "random_fold_in",
                     "rng_uniform", "rng_bit_generator"), _RANDOM),
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "axis_index",
                     "reduce_scatter"), _DEVICES),
    **dict.fromkeys(("dot_general", "conv_general_dilated", "ragged_dot_general"), _GEMM),
    **dict.fromkeys(("debug_print", "debug_callback"), "tt.debug_print prints from a kernel"),
    **dict.fromkeys(("pure_callback", "io_callback"), "a GPU cannot call Python: call it around the kernel"),
}
HINT = "write this part with tt functions: tt.gemm for products, tt.sum and tt.max for reductions"


def rule(*names: str, arrays: bool = False) -> Callable[[F], F]:
  """Registers fn(*operands, **params of the jaxpr equation) -> the one result, or a list of all."""
  def add(fn: F) -> F:
    def apply(operands: list[Any], eqn: Any) -> Sequence[Operand]:
      out = fn(*operands, **eqn.params)
      return out if isinstance(out, list) else [out]
    for name in names:
      assert name not in jax_rules, name
      jax_rules[name] = apply
      if arrays:
        takes_arrays.add(name)
    return fn
  return add


def formula(name: str) -> Callable[[F], F]:
  """Registers a composition of tile operations, fn(*tiles, **params) -> tile. 16-bit floats go through f32."""
  def add(fn: F) -> F:
    def wide(*operands: Any, **params: Any) -> Operand:
      tiles = list(map(as_tile, operands))
      narrow = tiles[0].dtype if dtypes.is_float(tiles[0].dtype) else dtypes.f32
      out = fn(*(t.astype(dtypes.f32) if t.dtype.itemsize < 4 and dtypes.is_float(t.dtype) else t for t in tiles),
               **params)
      return out.astype(narrow) if dtypes.is_float(out.dtype) else out
    rule(name)(wide)
    return fn
  return add


def op(primitive: Primitive, *operands: Any, **params: Any) -> Tile:
  return bind_tile(primitive, operands, **params)


def elementwise(primitive: Primitive, *operands: Any) -> Tile:
  """Scalars stay, dimensions of size 1 are repeated."""
  shape = np.broadcast_shapes(*(x.type.shape for x in operands))
  return op(primitive, *(shapes.spread(x, shape) if isinstance(x, Tile) and x.shape else x for x in operands))


def cast(x: Any, dtype: np.dtype) -> Any:
  if isinstance(x, Literal):
    return Literal(np.asarray(x.value).astype(dtype).item(), dtype)
  return x.astype(dtype)


def as_tile(x: Any) -> Tile:
  """A known scalar, or an array of one value, as a tile.

  Raises:
    Refused: the array has different values.
  """
  if isinstance(x, np.ndarray):
    return full(x, x.shape)
  return x if isinstance(x, Tile) else shapes.broadcast_in_dim(x, (), ())


def full(x: Any, shape: tuple[int, ...]) -> Tile:
  """A tile of one value: a scalar's, or an array's whose elements are all that."""
  if isinstance(x, np.ndarray):
    first = x.reshape(-1)[:1]
    if not x.size or x.tobytes() != first.tobytes() * x.size:
      raise Refused("is of a known array of different values")
    x = Literal(first.item(), dtypes.canonical(x.dtype))
  return shapes.broadcast_in_dim(x, shape, ())


def static_integer(x: Any) -> int | None:
  """A known integer scalar; None of what the GPU computes."""
  if isinstance(x, Tile):
    return None
  return int(x.value) if isinstance(x, Literal) else int(x)
