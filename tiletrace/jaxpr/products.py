"""dot_general without a matrix product: what is an elementwise product and a sum. Matrices are tt.gemm's."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiletrace.core import dtypes
from tiletrace.core.ops import reduce as reductions, shape as shapes
from tiletrace.core.tile import Tile
from tiletrace.jaxpr.rules import Refused, as_tile, op, rule


@rule("dot_general")
def _dot_general(x: Any, y: Any, *, dimension_numbers: Any, preferred_element_type: Any, **_: Any) -> Any:
  """Products with vectors, and outer products: no more elements than the larger operand or the result has. 16-bit
  floats multiply and add in f32."""
  (sum_x, sum_y), (batch_x, batch_y) = dimension_numbers
  a, b = as_tile(x), as_tile(y)
  free_a, free_b = _free(a, sum_x, batch_x), _free(b, sum_y, batch_y)
  if sum_x and free_a and free_b and _count(a, sum_x) > 1 < min(_count(a, free_a), _count(b, free_b)):
    raise Refused(f"multiplies matrices, {a.type} and {b.type}")
  out = dtypes.canonical(preferred_element_type) if preferred_element_type is not None else a.dtype
  wide = dtypes.f32 if dtypes.is_float(out) and out.itemsize < 4 else out
  ones_a, ones_b = (1,) * len(free_a), (1,) * len(free_b)
  batch, summed = _shape(a, batch_x), _shape(a, sum_x)
  left = _arranged(a.astype(wide), (*batch_x, *free_a, *sum_x), (*batch, *_shape(a, free_a), *ones_b, *summed))
  right = _arranged(b.astype(wide), (*batch_y, *free_b, *sum_y), (*batch, *ones_a, *_shape(b, free_b), *summed))
  product = left * right
  axes = tuple(range(product.ndim - len(summed), product.ndim))
  total = reductions.reduce_max_p if wide == dtypes.bool_ else reductions.reduce_sum_p    # bools: whether any is true
  return (op(total, product, axes=axes) if axes else product).astype(out)


def _free(x: Tile, *taken: Sequence[int]) -> list[int]:
  return [d for d in range(x.ndim) if not any(d in t for t in taken)]


def _shape(x: Tile, dims: Sequence[int]) -> tuple[int, ...]:
  return tuple(x.shape[d] for d in dims)


def _count(x: Tile, dims: Sequence[int]) -> int:
  count = 1
  for n in _shape(x, dims):
    count *= n
  return count


def _arranged(x: Tile, order: Sequence[int], shape: tuple[int, ...]) -> Tile:
  return shapes.reshape(shapes.transpose(x, tuple(order)), shape)
