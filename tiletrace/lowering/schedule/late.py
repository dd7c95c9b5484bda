"""Reductions that a loop accumulates cross threads once, after it: in the loop each thread adds up what it has."""
from __future__ import annotations

import dataclasses
from collections import Counter

from tiletrace.core import dtypes
from tiletrace.core.graph import Atom, Block, Eqn, Literal, Var, walk
from tiletrace.core.ops import elementwise, memory, reduce as ops
from tiletrace.core.ops.control import for_loop_p
from tiletrace.core.ops.relayout import relayout_p
from tiletrace.core.ops.shape import broadcast_in_dim_p, reshape_p
from tiletrace.core.types import RefType, Space
from tiletrace.lowering.layouts.fragment import reduction, thread_partials
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.schedule.builder import Builder, whole
from tiletrace.lowering.schedule.reductions import combining

_ARRANGE = (reshape_p, broadcast_in_dim_p, relayout_p)      # they commute with what is elementwise
_MOST_REGISTERS = 32                                        # of a thread's parts, held beside the accumulator


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Accumulation:
  """`total = total op arrange(reduce(x))`, in a loop that does nothing else with the total; a sum may be rescaled
  first, `total = total * factor + arrange(reduce(x))`.

  Attributes:
    reduce: the reduction. `arranged`: the equations between it and `combine`, in order.
    combine: the elementwise op. `place`: of the total among its operands.
    load, store: of the fragment that holds the total; None where the loop carries it as `carried`.
    parts: layout of the threads' parts.
    scale: the multiplication of a rescaled total. It, and the total, stay in the loop. `factor`: its other operand.
  """
  reduce: Eqn
  arranged: tuple[Eqn, ...]
  combine: Eqn
  place: int
  load: Eqn | None
  store: Eqn | None
  carried: int
  parts: Layout
  scale: Eqn | None = None
  factor: Atom | None = None

  def gone(self) -> set[Eqn]:
    kept = () if self.scale is not None else (self.load, self.store)
    return {e for e in (self.reduce, *self.arranged, self.combine, *kept) if e is not None}


class LateReductions:
  """Rewrites loops, inner ones first.

  Attributes:
    notes: the report.
  """

  def __init__(self, layouts: dict[Var, Layout]):
    self.layouts = layouts
    self.notes: list[str] = []

  def block(self, block: Block) -> Block:
    eqns: list[Eqn] = []
    for eqn in block.eqns:
      eqn = eqn.replace(blocks=tuple(map(self.block, eqn.blocks))) if eqn.blocks else eqn
      eqns += self._loop(eqn) if eqn.primitive is for_loop_p else [eqn]
    return dataclasses.replace(block, eqns=tuple(eqns))

  def _loop(self, loop: Eqn) -> list[Eqn]:
    (body,) = loop.blocks
    found = _Finder(body, self.layouts).all()
    if not found:
      return [loop]
    before, after = Builder(loop.loc), Builder(loop.loc)
    replaced: dict[Eqn, list[Eqn]] = {e: [] for f in found for e in f.gone()}
    outs, outvars = list(body.outs), list(loop.outvars)
    for f in found:
      parts = self._accumulate(f, before, replaced)
      if f.store is not None and f.scale is not None:
        replaced[f.store] = [f.store.replace(invars=(*f.store.invars[:-1], f.scale.outvars[0]))]
      if f.load is None:
        outs[f.carried] = f.scale.outvars[0] if f.scale is not None else body.invars[1 + f.carried]
        outvars[f.carried] = self._like(loop.outvars[f.carried])
      self._finish(f, parts, after, outvars[f.carried] if f.load is None else None, loop)
      self.notes.append(f"{f.reduce.loc.short()}  {f.reduce.primitive}: each thread accumulates its own part, of "
                        f"{f.parts.valid[0]}, and they are joined after the loop")
    eqns = tuple(e for eqn in body.eqns for e in replaced.get(eqn, [eqn]))
    block = dataclasses.replace(body, eqns=eqns, outs=tuple(outs))
    return [*before.eqns, loop.replace(blocks=(block,), outvars=tuple(outvars)), *after.eqns]

  def _accumulate(self, f: _Accumulation, before: Builder, replaced: dict[Eqn, list[Eqn]]) -> Var:
    """A fragment of the parts, nothing before the loop; the equations that add to it stand where the reduction did."""
    (x,), op = f.reduce.values, f.reduce.primitive
    before.loc = f.reduce.loc
    parts = before.alloc(Space.FRAGMENT, f.parts.valid, x.dtype, "parts")
    self.layouts[parts] = f.parts
    before.store(whole(parts), Literal(ops.identity(op, x.dtype), x.dtype))
    b = Builder(f.reduce.loc)
    params = {"op": op.name, "axes": f.reduce.params["axes"], "parts": f.parts.valid[0]}
    (mine,) = b.bind(ops.reduce_thread_p, (x,), params)
    replaced[f.reduce] = b.eqns
    update = Builder(f.combine.loc)       # where the total was updated: there its factor is known
    so_far = update.load(whole(parts))
    self.layouts |= dict.fromkeys((mine, so_far), f.parts)
    scaled = self._scaled(f, update, so_far) if f.scale is not None else so_far
    (joined,) = update.bind(f.combine.primitive, (scaled, mine), f.combine.params)
    update.store(whole(parts), joined)
    self.layouts[joined] = f.parts
    if f.scale is None:
      replaced[f.reduce] += update.eqns
    else:
      replaced[f.combine] = update.eqns
    return parts

  def _scaled(self, f: _Accumulation, b: Builder, so_far: Var) -> Var:
    """so_far * factor. As with any sum in another order, what is not finite may differ: an infinite factor makes NaN of
    a part that is nothing yet."""
    factor = f.factor
    assert f.scale is not None and factor is not None
    if isinstance(factor, Var) and factor.shape:
      axes = tuple(range(1, 1 + len(factor.shape)))
      (factor,) = b.bind(broadcast_in_dim_p, (factor,), {"shape": so_far.shape, "broadcast_dimensions": axes})
      self.layouts[factor] = f.parts
    (scaled,) = b.bind(f.scale.primitive, (so_far, factor), f.scale.params)
    self.layouts[scaled] = f.parts
    return scaled

  def _finish(self, f: _Accumulation, parts: Var, after: Builder, carried: Var | None, loop: Eqn) -> None:
    """total = total op arrange(reduce(parts)), by the equations that stood in the loop."""
    after.loc = f.reduce.loc
    loaded = after.load(whole(parts))
    self.layouts[loaded] = f.parts
    value = self._like(f.reduce.outvars[0])
    after.append(f.reduce.replace(invars=(loaded,), outvars=(value,), params={**f.reduce.params, "axes": (0,)}))
    for eqn in f.arranged:
      out = self._like(eqn.outvars[0])
      after.append(eqn.replace(invars=(value,), outvars=(out,)))
      value = out
    total: Atom
    if f.load is None or f.store is None:
      assert carried is not None
      total, out = carried, loop.outvars[f.carried]
    else:
      total, out = self._like(f.load.outvars[0]), self._like(f.combine.outvars[0])
      after.append(f.load.replace(outvars=(total,)))
    after.append(f.combine.replace(invars=(total, value) if f.place == 0 else (value, total), outvars=(out,)))
    if f.store is not None:
      after.append(f.store.replace(invars=(*f.store.invars[:-1], out)))

  def _like(self, var: Var) -> Var:
    new = Var(var.type, var.hint)
    if var in self.layouts:
      self.layouts[new] = self.layouts[var]
    return new


class _Finder:
  """The accumulations of a loop's body."""

  def __init__(self, body: Block, layouts: dict[Var, Layout]):
    self.body, self.layouts = body, layouts
    self.made = {v: e for e in body.eqns for v in e.outvars}
    self.user: dict[Var, Eqn] = {}
    self.uses: Counter[Var] = Counter(a for a in body.outs if isinstance(a, Var))
    self.touches: Counter[Var] = Counter()
    for eqn in walk(body):
      self.uses.update(a for a in eqn.invars if isinstance(a, Var))
      self.touches.update(r.root for r in eqn.refs)
      for inner in eqn.blocks:
        self.uses.update(a for a in inner.outs if isinstance(a, Var))
    for eqn in body.eqns:
      self.user.update((a, eqn) for a in eqn.invars if isinstance(a, Var))

  def all(self) -> list[_Accumulation]:
    found = (self._of(e) for e in self.body.eqns if e.primitive in ops.REDUCTIONS)
    return [f for f in found if f is not None]

  def _next(self, var: Var) -> Eqn | None:
    """The one equation of the body that uses a value once; None where there are others."""
    return self.user.get(var) if self.uses[var] == 1 else None

  def _of(self, eqn: Eqn) -> _Accumulation | None:
    (x,), value = eqn.values, eqn.outvars[0]
    if not isinstance(x, Var) or (dtypes.is_float(x.dtype) and x.dtype.itemsize < 4 and eqn.primitive in (
        ops.reduce_sum_p, ops.reduce_prod_p)):
      return None
    arranged: list[Eqn] = []
    user = self._next(value)
    while user is not None and user.primitive in _ARRANGE and user.values == (value,):
      arranged.append(user)
      value = user.outvars[0]
      user = self._next(value)
    if user is None or user.primitive is not combining(eqn.primitive, x.dtype) or value not in user.values:
      return None
    parts = self._parts(eqn)
    place = 1 - user.values.index(value)
    if parts is None:
      return None
    return self._total(user, place, _Accumulation(eqn, tuple(arranged), user, place, None, None, 0, parts))

  def _parts(self, eqn: Eqn) -> Layout | None:
    (x,), axes = eqn.values, eqn.params["axes"]
    assert isinstance(x, Var)
    parts = thread_partials(self.layouts[x], axes)
    if parts is None or parts.extent("reg") > _MOST_REGISTERS:
      return None
    finished = reduction(parts, (0,))
    alike = not eqn.outvars[0].shape or finished.layout == self.layouts[eqn.outvars[0]]
    return parts if alike else None

  def _is_total(self, v: Atom, out: Var) -> bool:
    """A value that the loop carries, or loads from a fragment, of the total's shape."""
    if not isinstance(v, Var) or v.shape != out.shape:
      return False
    made = self.made.get(v)
    return v in self.body.invars[1:] or (made is not None and made.primitive is memory.load_p)

  def _total(self, combine: Eqn, place: int, found: _Accumulation) -> _Accumulation | None:
    """Where the total lives: a fragment that nothing else in the loop touches, or a value that the loop carries."""
    total, out = combine.values[place], combine.outvars[0]
    scale = self.made.get(total) if isinstance(total, Var) else None
    if scale is not None and scale.primitive is elementwise.mul_p and found.reduce.primitive is ops.reduce_sum_p:
      assert isinstance(total, Var)
      place = next((i for i, v in enumerate(scale.values) if self._is_total(v, combine.outvars[0])), -1)
      factor = scale.values[1 - place]
      alike = not isinstance(factor, Var) or not factor.shape or (
          not found.arranged and self.layouts[factor] == self.layouts[out])
      if place < 0 or self.uses[total] != 1 or not alike:
        return None
      total, found = scale.values[place], dataclasses.replace(found, scale=scale, factor=factor)
    if not isinstance(total, Var) or self.uses[total] != 1 or self.uses[out] != 1:
      return None
    if total in self.body.invars[1:]:
      at = self.body.invars.index(total) - 1
      return dataclasses.replace(found, carried=at) if self.body.outs[at] is out else None
    load, store = self.made.get(total), self.user.get(out)
    if load is None or store is None or load.primitive is not memory.load_p or store.primitive is not memory.store_p:
      return None
    source, target = load.refs[0], store.refs[0]
    root = source.root
    assert isinstance(root.type, RefType)
    alone = root is target.root and self.touches[root] == 2 and root not in self.made
    if root.type.space is not Space.FRAGMENT or not alone or store.values != (out,):
      return None
    return dataclasses.replace(found, load=load, store=store) if source.is_whole and target.is_whole else None
