"""A gemm's operand in shared memory: a whole tile of a buffer, or a part that the instructions can start at.

Hardware applies the swizzle to the sum of the start address and an element's offset, so that starts add where the
layout without its swizzle is a sum (PTX ISA, "Matrix descriptor").
"""
from __future__ import annotations

import dataclasses

from tiletrace.core.graph import Atom, RefOperand
from tiletrace.core.types import Dyn
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.layouts.descriptor import ROWS, Descriptor, Role, derive_descriptor
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import recognise_swizzle, swizzled
from tiletrace.lowering.shared_views import shared_place


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixPlace:
  """The operand starts at base + sum(value * step) elements, beside what its descriptor says.

  Attributes:
    descriptor: of the part that the view cuts, its static start included.
    base: of the slot. dynamic: (scalar, elements that one step of it moves).
  """
  descriptor: Descriptor
  base: int
  dynamic: tuple[tuple[Atom, int], ...]


def matrix_place(ref: RefOperand, layout: Layout, facts: Facts, *, role: Role, tile: int) -> MatrixPlace | str:
  """Where a gemm reads a view of a shared buffer, or why no descriptor says so.

  Args:
    role: of the view, "A" [m, k] or "B" [k, n].
    tile: rows (A) or columns (B) of one instruction.
  """
  bits = ref.type.dtype.itemsize * 8
  found = recognise_swizzle(layout, bits)
  if found is None:
    return "the shared layout is not one of the hardware's swizzles"
  mode, plain = found
  dims = ref.view.dims
  if any(d.stride != 1 for d in dims):
    return "a gemm reads elements that are side by side, the view skips some"
  fixed = [not d.squeezed and isinstance(d.start, int) for d in dims]
  moved = tuple(dataclasses.replace(d, start=0) if f else d for d, f in zip(dims, fixed, strict=True))
  place = shared_place(dataclasses.replace(ref, view=dataclasses.replace(ref.view, dims=moved)), plain, facts)
  if isinstance(place, str):
    return place
  start = tuple(dims[p].start if fixed[p] else 0 for p in ref.view.perm)
  descriptor = derive_descriptor(swizzled(place.layout, bits, mode), bits, role, tile, start, place.shape)
  if isinstance(descriptor, str):
    return descriptor
  for d, dim in enumerate(dims):
    if isinstance(dim.start, Dyn) and not dim.squeezed:
      atom = ref.dyn[dim.start.index]
      step = next((s for a, s in place.dynamic if a is atom), 0) * facts[atom].divisor * bits // 8
      if any(i * step % 16 or i * step & ROWS * mode for i in range(layout.shape[d] // max(1, facts[atom].divisor))):
        return f"the start along dimension {d} is not provably a multiple of 16 bytes and of 8 rows"
  return MatrixPlace(descriptor, place.base, place.dynamic)
