"""Masks that stay in a register.

`x & a ^ b` is one LOP3, which takes one literal: for the other one ptxas writes a MOV before each of them, and would do
so for any register whose value it can compute. A product with %ntid.y, which is one (CTAs have one dimension), is
nothing that it computes. Of decoding int4 (`kernels/packed_weights.py`) that is one instruction of six.
"""
from __future__ import annotations

from tiletrace.core.graph import Atom, Eqn, Literal, TileGraph, Var, walk
from tiletrace.core.ops import elementwise as ew
from tiletrace.core.types import TileType

_MOST = 4                # registers that a kernel keeps


def kept_masks(graph: TileGraph) -> dict[Eqn, int]:
  """Each `and` of a distributed tile with a literal, all of whose results another one is put to by `or` or `xor` -> the
  literal."""
  uses: dict[Var, list[Eqn]] = {}
  for eqn in walk(graph.body):
    for block in eqn.blocks:
      for v in block.outs:
        if isinstance(v, Var):
          uses.setdefault(v, []).append(eqn)
    for v in eqn.values:
      if isinstance(v, Var):
        uses.setdefault(v, []).append(eqn)
  found = {e: mask for e in walk(graph.body) if e.primitive is ew.and_p and (mask := _literal(e)) is not None
           and all(u.primitive in (ew.or_p, ew.xor_p) and _literal(u) is not None for u in uses.get(e.outvars[0], ()))}
  few = list(dict.fromkeys(found.values()))[:_MOST]
  return {e: mask for e, mask in found.items() if mask in few}


def _literal(eqn: Eqn) -> int | None:
  """The one literal of a bitwise operation on 32 bits of more than one element; None: it has none."""
  out = eqn.outvars[0].type
  if not isinstance(out, TileType) or not out.shape or out.dtype.kind not in "iu" or out.dtype.itemsize != 4:
    return None
  literals: list[Atom] = [v for v in eqn.values if isinstance(v, Literal)]
  return int(literals[0].value) & 0xFFFFFFFF if len(literals) == 1 else None  # type: ignore[union-attr]
