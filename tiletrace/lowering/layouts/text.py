"""Layouts as text, in the shard, replica, offset notation that `notation` reads back."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tiletrace.lowering.layouts.normal import REPLICA, unpack

if TYPE_CHECKING:
  from tiletrace.lowering.layouts.relation import Layout

Iter = tuple[int, int, str]      # extent, stride, axis


def layout_text(layout: Layout) -> str:
  """`S[extents:strides] + R[...] + n@axis`, with `.swizzle(b, m)` and `.valid(...)` where they apply.

  A map with no such form (XORs that are no swizzle, elements that nobody holds) is printed as its columns.
  """
  plain = _split_swizzle(layout)
  if plain is None:
    return _columns_text(layout)
  columns, swizzle = plain
  dims: list[list[tuple[int, Iter]]] = [[] for _ in layout.shape]      # (step, iteration)
  replicas: list[Iter] = []
  for axis, bits in columns.items():
    for b, column in enumerate(bits):
      vector = unpack(column, layout.rank)
      d = next((d for d, x in enumerate(vector) if x), REPLICA)
      if d == REPLICA:
        replicas.append((2, 1 << b, axis))
      else:
        dims[d].append((vector[d], (2, 1 << b, axis)))
  for o in layout.outers:
    if o.dim == REPLICA:
      replicas.append((o.extent, o.stride, o.axis))
    else:
      dims[o.dim].append((o.step, (o.extent, o.stride, o.axis)))
  shard = [_join([i for _, i in sorted(d, reverse=True)]) for d in dims]
  for d, parts in enumerate(dims):
    if not _covers(sorted((step, i[0]) for step, i in parts), layout.shape[d]):
      return _columns_text(layout)
  text = "S" + _brackets(shard)
  if replicas:
    text += " + R" + _brackets([[i] for i in _join(sorted(replicas, key=lambda i: (i[2], i[1]), reverse=True))])
  text += "".join(f" + {n}@{axis}" for axis, n in layout.origin)
  if swizzle or layout.valid != layout.shape:
    text = f"({text})" if " + " in text else text
    text += f".swizzle({swizzle[0]}, {swizzle[1]})" if swizzle else ""
    text += f".valid({', '.join(map(str, layout.valid))})" if layout.valid != layout.shape else ""
  return text


def _covers(parts: list[tuple[int, int]], extent: int) -> bool:
  return [s for s, _ in parts] == [math.prod(e for _, e in parts[:i]) for i in range(len(parts))] and (
    math.prod(e for _, e in parts) == extent)


def _join(iters: list[Iter]) -> list[Iter]:
  """Joins neighbours, outermost first, that are one iteration."""
  out: list[Iter] = []
  for extent, stride, axis in iters:
    if out and out[-1][2] == axis and out[-1][1] == extent * stride:
      out[-1] = (out[-1][0] * extent, stride, axis)
    else:
      out.append((extent, stride, axis))
  return out


def _brackets(dims: list[list[Iter]]) -> str:
  def nest(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"({', '.join(items)})"

  def top(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 and "(" in items[0] else nest(items)

  extents = [nest([str(e) for e, _, _ in d]) if d else "1" for d in dims]
  strides = [nest([f"{s}@{a}" for _, s, a in d]) if d else "0" for d in dims]
  return f"[{top(extents)}:{top(strides)}]"


def _split_swizzle(layout: Layout) -> tuple[dict[str, list[int]], tuple[int, int] | None] | None:
  """Columns that are single bits or zero, and the swizzle (b, m) taken out of `off` to get them; None without one."""
  core = {axis: list(columns) for axis, columns in layout.core}
  modes: list[tuple[int, int] | None] = [None]
  off = core.get("off", [])
  modes += [(b, m) for b in (3, 2, 1) for m in range(len(off)) if m + 3 + b <= len(off)]
  for mode in modes:
    trial = {**core, "off": list(off)} if off else core
    if mode:
      for i in range(mode[1] + 3, mode[1] + 3 + mode[0]):
        trial["off"][i] ^= off[i - 3]
    columns = [c for bits in trial.values() for c in bits if c]
    if all(c & c - 1 == 0 for c in columns) and len(set(columns)) == len(columns):
      return trial, mode
  return None


def _columns_text(layout: Layout) -> str:
  parts = [f"{axis}=[{', '.join(str(unpack(c, layout.rank)) for c in columns)}]" for axis, columns in layout.core]
  parts += [f"{o.extent}:{o.stride}@{o.axis}->" + (f"{o.step}@d{o.dim}" if o.dim != REPLICA else "copies")
            for o in layout.outers]
  parts += [f"+{n}@{axis}" for axis, n in layout.origin]
  return f"linear({layout.shape}, {', '.join(parts)})"
