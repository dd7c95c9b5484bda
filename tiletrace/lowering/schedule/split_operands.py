"""Left operands of gemms whose columns two warpgroups hold a half of each: each multiplies its own from registers at
once, while the other's comes through shared memory."""
from __future__ import annotations

import dataclasses

from tiletrace.core import dtypes
from tiletrace.core.graph import Atom, Block, Eqn, Literal, RefOperand, Var, prefixed, walk
from tiletrace.core.ops import grid, memory, mma, shape
from tiletrace.core.ops.relayout import own_columns_p, relayout_p
from tiletrace.core.types import Space, TileType, whole_view
from tiletrace.lowering.layouts.catalog import wgmma_a_fragment
from tiletrace.lowering.layouts.normal import REPLICA
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import SWIZZLES, shared_layout
from tiletrace.lowering.schedule.builder import Builder, whole
from tiletrace.lowering.schedule.exchange import Exchange
from tiletrace.lowering.shared_views import stack
from tiletrace.lowering.wgmma_plan import wgmma_plan

_PARTS = 2
_STEP_BYTES = 32                     # of a row that one instruction takes (PTX ISA, wgmma.mma_async)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Split:
  """`gemms` multiply what `relayout` would give all warpgroups; `store` puts it into a fragment of theirs, or None."""
  relayout: Eqn
  store: Eqn | None
  gemms: tuple[Eqn, ...]


class SplitOperands(Exchange):
  """Replaces relayouts between the accumulators of one gemm, split along its columns, and the operand of others.

  k is summed in another order in each warpgroup, its own part first. Half of the gemms are issued with it before the
  first of them needs the other's. (Of more warpgroups the others' parts take more registers than all of it, loaded at
  once, and what is in flight.)

  Args:
    warpgroups: that compute.
  """

  def __init__(self, layouts: dict[Var, Layout], warpgroups: int):
    super().__init__(layouts)
    self.warpgroups = warpgroups
    self._dropped: set[Var] = set()

  def body(self, body: Block) -> Block:
    users: dict[Var, list[Eqn]] = {}
    for eqn in walk(body):
      for v in {*(a for a in eqn.invars if isinstance(a, Var)), *(o for b in eqn.blocks for o in b.outs
                                                                  if isinstance(o, Var))}:
        users.setdefault(v, []).append(eqn)
    return self._without_allocs(self._split(body, users))

  def _split(self, block: Block, users: dict[Var, list[Eqn]]) -> Block:
    found = [s for e in block.eqns if (s := self._match(e, block, users)) is not None]
    first = {s.gemms[0]: s for s in found}
    gone = {e for s in found for e in (s.relayout, s.store, *s.gemms)}
    eqns: list[Eqn] = []
    for eqn in block.eqns:
      if eqn in first:
        eqns += self._gemms(first[eqn])
      elif eqn not in gone:
        eqns.append(eqn.replace(blocks=tuple(self._split(b, users) for b in eqn.blocks)) if eqn.blocks else eqn)
    return dataclasses.replace(block, eqns=tuple(eqns))

  def _match(self, eqn: Eqn, block: Block, users: dict[Var, list[Eqn]]) -> _Split | None:
    if eqn.primitive is not relayout_p or eqn.params["how"] != "shared" or eqn.params["cut"] is not None:
      return None
    x, y = eqn.values[0], eqn.outvars[0]
    own = self._own_layout(y)
    if own is None or not isinstance(x, Var) or self.layouts[x] != own.repeat("warp", _PARTS, 1):
      return None
    store, using = None, users.get(y, [])
    if len(using) == 1 and using[0].primitive is memory.store_p and _fills_fragment(using[0]):
      store = using[0]
      using = [e for e in users[store.refs[0].root] if e is not store]
    inside = set(block.eqns)
    if not using or not all(e in inside and self._takes(e, y, store) for e in using):
      return None
    gemms = tuple(e for e in block.eqns if e in set(using))
    places = [block.eqns.index(e) for e in gemms]
    if places != list(range(places[0], places[0] + len(places))) or places[0] < block.eqns.index(store or eqn):
      return None
    return _Split(eqn, store, gemms)

  def _own_layout(self, y: Var) -> Layout | None:
    """Of a warpgroup's part as an operand; None where its columns are no whole instructions."""
    itemsize = y.dtype.itemsize
    if self.warpgroups != _PARTS or len(y.shape) != 2 or y.shape[0] % 64 or (
        y.shape[1] * itemsize % (_PARTS * _STEP_BYTES)):
      return None
    return wgmma_a_fragment(y.shape[0], y.shape[1] // _PARTS, 8 * itemsize)

  def _takes(self, eqn: Eqn, y: Var, store: Eqn | None) -> bool:
    """Whether it is a gemm of all of the operand, whose columns are split over the warpgroups, and of nothing else."""
    if eqn.primitive is not mma.gemm_p or eqn.params["dispatch"] != "wgmma_rs":
      return False
    left = eqn.values[1] if eqn.params["a_in"] == "value" else eqn.refs[0].root if eqn.refs[0].is_whole else None
    wanted = y if store is None else store.refs[0].root
    return left is wanted and wgmma_plan(eqn, self.layouts[eqn.refs[-1].root], _PARTS).grid == (1, _PARTS)

  def _gemms(self, split: _Split) -> list[Eqn]:
    x, gemms = split.relayout.values[0], split.gemms
    tile = self._own_layout(split.relayout.outvars[0])
    assert isinstance(x, Var) and tile is not None
    width, layout = x.shape[1] // _PARTS, tile.repeat("warp", _PARTS, REPLICA)
    b = Builder(split.relayout.loc)
    buffer = self._hand_over(b, x, tile)                     # first: nothing may read registers of a gemm in flight
    (own,) = b.bind(own_columns_p, (x,), {"parts": _PARTS})
    self.layouts[own] = layout
    wg = b.bind(grid.warpgroup_id_p, (), {})[0]
    at, lead = b.mul(wg, width), (len(gemms) + 1) // 2
    for gemm in gemms[:lead]:
      self._part(b, gemm, own, at, width)
    b.loc = split.relayout.loc
    other, place = self._other(b, buffer, wg, layout)
    for i, gemm in enumerate(gemms):
      if i >= lead:
        self._part(b, gemm, own, at, width)
      self._part(b, gemm, other, place, width, follows=True)
    if split.store is not None:
      self._dropped.add(split.store.refs[0].root)
    self.notes.append(f"{split.relayout.loc.short()}  each warpgroup multiplies its own {width} columns of {x.type} "
                      "from registers, the other's come through shared memory meanwhile")
    return b.eqns

  def _hand_over(self, b: Builder, x: Var, tile: Layout) -> Var:
    """Both warpgroups' parts into a buffer [2, m, width]."""
    (m, width), bits = tile.shape, 8 * x.dtype.itemsize
    (apart,) = b.bind(shape.reshape_p, (x,), {"shape": (m, _PARTS, width)})
    (in_front,) = b.bind(shape.transpose_p, (apart,), {"permutation": (1, 0, 2)})
    self.layouts[in_front] = tile.expand_dims(0).repeat("warp", _PARTS, 0)
    self.layouts[apart] = self.layouts[in_front].permute((1, 0, 2))
    swizzle = next(s for s in SWIZZLES if s and width * x.dtype.itemsize % s == 0)
    layout = stack(shared_layout((m, width), bits, swizzle), _PARTS, bits)
    buffer = self.buffer(b.loc, TileType((_PARTS, m, width), x.dtype), "exchange", layout)
    b.store(whole(buffer), in_front, dispatch="direct")
    return buffer

  def _other(self, b: Builder, buffer: Var, wg: Atom, layout: Layout) -> tuple[Var, Atom]:
    """The other warpgroup's part, and at which column it starts."""
    other = b.sub(1, wg)
    value = b.load(RefOperand(buffer, *prefixed(whole_view(buffer.shape[1:]), other)))
    self.layouts[value] = layout
    return value, b.mul(other, buffer.shape[2])

  def _part(self, b: Builder, gemm: Eqn, left: Var, at: Atom, width: int, *, follows: bool = False) -> None:
    """The product of some columns of the left operand and the rows of the right one that they meet."""
    right, acc = gemm.refs[-2:]
    b.loc = gemm.loc
    rows = b.part(right, ((at, width), (0, right.shape[1])))
    accumulate = Literal(True, dtypes.bool_) if follows else gemm.values[0]
    b.append(gemm.replace(invars=(rows.root, *rows.dyn, acc.root, *acc.dyn, accumulate, left),
                          params={**gemm.params, "a_in": "value", "views": (rows.view, acc.view)}))

  def _without_allocs(self, body: Block) -> Block:
    kept = (e for e in body.eqns if not (e.primitive is memory.alloc_p and e.outvars[0] in self._dropped))
    return dataclasses.replace(body, eqns=tuple(kept))


def _fills_fragment(store: Eqn) -> bool:
  ref = store.refs[0]
  return ref.type.space is Space.FRAGMENT and ref.is_whole and len(store.values) == 1
