"""The tensor maps of a kernel, as it needs them, and their kernel parameters."""
from __future__ import annotations

import dataclasses
from typing import Any

from tiletrace.core.graph import TileGraph, Var
from tiletrace.core.types import RefType
from tiletrace.lowering.ptx.registers import Reg
from tiletrace.lowering.strides import row_major_strides


@dataclasses.dataclass(frozen=True, slots=True)
class TensorMap:
  """A TMA descriptor without its address: one argument, a box and a swizzle. Dimensions are innermost first.

  Attributes:
    argument: index among the graph's distinct references.
    dims, box: elements. strides: bytes, of all dimensions but the innermost. What a call decides is a Size.
    swizzle: span in bytes, 0, 32, 64 or 128.
    offset: bytes from the array's start to the map's.
  """
  argument: int
  dtype: str
  dims: tuple[int, ...]
  strides: tuple[int, ...]
  box: tuple[int, ...]
  swizzle: int
  offset: int = 0


class TensorMaps:
  """Collects the distinct tensor maps; `parameters[i]` is the register that holds map i's generic address."""

  def __init__(self, graph: TileGraph):
    self._argument = {v: i for i, v in enumerate(dict.fromkeys(graph.invars))}
    self.maps: list[TensorMap] = []
    self.addresses: dict[TensorMap, Reg] = {}

  def make(self, root: Var, box: tuple[int, ...], swizzle: int, ends: int | None = None) -> TensorMap:
    """The map of `root` with a box given in the root's dimension order.

    Args:
      ends: a dimension along which views end before the array (`tma_plan.ending_dim`). It has two in the map: one of
        `box` elements, which clips, and outside of it one that says where. Together they begin `box` elements early.
    """
    assert isinstance(root.type, RefType)
    shape, item = root.type.shape, root.type.dtype.itemsize
    strides: tuple[Any, ...] = tuple(s * item for s in row_major_strides(shape)[:-1])
    offset = 0
    if ends is not None:
      offset = -box[ends] * strides[ends]
      shape = (*shape[:ends], shape[ends] + 1, box[ends], *shape[ends + 1:])
      strides = (*strides[:ends], strides[ends], *strides[ends:])
      box = (*box[:ends], 1, *box[ends:])
    return TensorMap(self._argument[root], root.type.dtype.name, shape[::-1], strides[::-1], box[::-1], swizzle, offset)
