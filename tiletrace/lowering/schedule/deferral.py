"""The deferred epilogue of a persistent gemm: a tile is stored while the tensor cores work on the next one.

At the end of a tile the accumulators are converted into a fragment of their own (half the registers), and the place
where they go is remembered. The next tile issues its first k-blocks, and with these in flight the tile before goes
through staging and TMA. Where the staging is smaller than the tile, it goes in parts, some k-blocks apart: TMA reads a
part behind the loads that it was asked for before, and the tensor cores would run dry while a part waited for the one
before it. The last tile is stored after the loop. Two 64 x 256 accumulators have 128 registers in flight beside 64 that
leave.
"""
from __future__ import annotations

import dataclasses

from tiletrace.core import dtypes
from tiletrace.core.graph import Atom, Block, Eqn, Literal, Var, copied, walk
from tiletrace.core.ops import control, elementwise, memory, mma
from tiletrace.core.types import RefType, Space, TileType
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.schedule.builder import Builder, i32, whole

_APART = 2        # k-blocks from one part of a tile that leaves to the next
_REGISTERS = 200  # accumulators in flight and the tile that leaves; a consumer needs about 40 more of its 240
_THREAD = 255     # registers that a thread can have
_EPILOGUE = frozenset({"elect", "sync", "slice", "store", "fence", "copy_async", "warpgroup_id", "mul", "add",
                       "commit_group", "wait_group"})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Deferred:
  """`setup` stands before the tile loop, `work` is one tile's program, `last` follows the loop."""
  setup: tuple[Eqn, ...]
  work: Block
  last: tuple[Eqn, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Parts:
  """One tile's program: before the gemm loop, the loop and its trips, from there to the value that is stored, the
  stores."""
  before: tuple[Eqn, ...]
  loop: Eqn
  trips: int
  value: tuple[Eqn, ...]
  epilogue: tuple[Eqn, ...]


def defer_epilogue(work: Block, layouts: dict[Var, Layout], facts: Facts, fragments: int) -> Deferred | str:
  """Defers the epilogue of a tile's program, or says why it stays where it is.

  Args:
    work: the consumers' level-0 program of one tile.
    layouts: is extended by the fragments that this allocates.
    fragments: registers of a thread that all fragments of the kernel take.
  """
  inside = _branch_with_gemm(work)
  if inside is not None:                         # other tiles have no gemm, and leave the one that waits waiting
    found = defer_epilogue(inside.blocks[0], layouts, facts, fragments)
    if isinstance(found, str):
      return found
    branch = inside.replace(blocks=(found.work, *inside.blocks[1:]))
    return dataclasses.replace(found, work=dataclasses.replace(
        work, eqns=tuple(branch if e is inside else e for e in work.eqns)))
  parts = _split(work, facts)
  if isinstance(parts, str):
    return parts
  used = _free_variables(parts.epilogue)
  tiles = [v for v in used if isinstance(v.type, TileType) and v.type.shape]
  scalars = [v for v in used if isinstance(v.type, TileType) and v.type == TileType((), dtypes.i32)]
  if not tiles or any(v.type.dtype.itemsize != 2 for v in tiles):  # type: ignore[union-attr]
    return "the stored value is not made of 16-bit elements"
  accs = {e.refs[-1].root for e in walk(parts.loop.blocks[0]) if e.primitive is mma.gemm_async_p}
  leaving = sum(layouts[v].extent("reg") // 2 for v in tiles)
  registers = sum(layouts[a].extent("reg") for a in accs) + leaving
  if registers > _REGISTERS:
    return f"the accumulators and the tile that leaves would take {registers} registers of each thread"
  if fragments + leaving > _THREAD:
    return f"all fragments and the tile that leaves would take {fragments + leaving} registers of each thread"
  return _Deferral(parts, tiles, scalars, layouts).build()


def _branch_with_gemm(work: Block) -> Eqn | None:
  """The branch whose first block has all gemms of a tile's program, where one has."""
  with_gemm = [e for e in work.eqns if e.blocks and any(
      x.primitive is mma.gemm_async_p for b in e.blocks for x in walk(b))]
  if len(with_gemm) != 1 or with_gemm[0].primitive is not control.cond_p or with_gemm[0].outvars:
    return None
  others = (x for b in with_gemm[0].blocks[1:] for x in walk(b))
  return None if any(x.primitive is mma.gemm_async_p for x in others) else with_gemm[0]


def _split(work: Block, facts: Facts) -> _Parts | str:
  loops = [i for i, e in enumerate(work.eqns) if e.primitive is control.for_loop_p and any(
      x.primitive is mma.gemm_async_p for x in walk(e.blocks[0]))]
  if len(loops) != 1:
    return f"the tile has {len(loops)} gemm loops, one can be overlapped"
  at = loops[0]
  loop = work.eqns[at]
  lo, hi, step = (facts[a] for a in loop.values[:3])
  if loop.outvars or step.lo != 1 or step.hi != 1 or lo.lo != lo.hi or hi.lo != hi.hi or hi.lo - lo.lo < 2:
    return "the gemm loop has no static trip count of two or more"
  body = loop.blocks[0]
  gemms = [e for e in body.eqns if e.primitive is mma.gemm_async_p]
  if len(gemms) != 1 or len(gemms) != sum(x.primitive is mma.gemm_async_p for x in walk(body)):
    return "the gemm loop does not issue exactly one group an iteration"
  start = next((i for i in range(at + 1, len(work.eqns)) if work.eqns[i].primitive.name == "elect"), None)
  if start is None:
    return "the result is not staged through shared memory"
  epilogue = work.eqns[start:]
  if any(e.primitive.name not in _EPILOGUE for e in walk(Block((), epilogue, ()))):
    return "something besides the staged store follows the gemm loop"
  if any(e.primitive is memory.store_p and e.refs[0].type.space is Space.GLOBAL for e in work.eqns):
    return "the tile also stores directly"
  return _Parts(work.eqns[:at], loop, hi.lo - lo.lo, work.eqns[at + 1:start], epilogue)


def _free_variables(eqns: tuple[Eqn, ...]) -> list[Var]:
  """Values that equations use and others bind, in order of use."""
  bound: set[Var] = set()
  free: dict[Var, None] = {}

  def visit(eqn: Eqn) -> None:
    for a in eqn.invars:
      if isinstance(a, Var) and isinstance(a.type, TileType) and a not in bound:
        free.setdefault(a)
    for b in eqn.blocks:
      for inner in b.eqns:
        visit(inner)
    bound.update(eqn.outvars)

  for eqn in eqns:
    visit(eqn)
  return list(free)


class _Deferral:
  """Builds the three pieces."""

  def __init__(self, parts: _Parts, tiles: list[Var], scalars: list[Var], layouts: dict[Var, Layout]):
    self.parts, self.tiles, self.scalars, self.layouts = parts, tiles, scalars, layouts
    self.setup = Builder(parts.epilogue[0].loc)
    self.kept: dict[Var, Var] = {}
    for v in tiles:
      assert isinstance(v.type, TileType)
      self.kept[v] = self.setup.alloc(Space.FRAGMENT, v.type.shape, v.type.dtype, "leaving")
      layouts[self.kept[v]] = layouts[v]
    for v in scalars:
      self.kept[v] = self.setup.alloc(Space.FRAGMENT, (), dtypes.i32, v.hint or "place")
    self.pending = self.setup.alloc(Space.FRAGMENT, (), dtypes.i32, "pending")
    self.setup.store(whole(self.pending), 0)

  def build(self) -> Deferred:
    loop, body, trips = self.parts.loop, self.parts.loop.blocks[0], self.parts.trips
    lo = loop.values[0]
    assert isinstance(lo, Literal)
    start, leaving = int(lo.value), _in_parts(self.parts.epilogue)
    given = set(_free_variables(self.parts.epilogue))
    assert all(given.issuperset(_free_variables(part)) for part in leaving), "a part needs what another one binds"
    places = [min(1 + _APART * i, trips - 1) for i in range(len(leaving))]
    work = [*self.parts.before]
    for i in range(places[-1] + 1):
      eqns = clone(body, {body.invars[0]: i32(start + i)}, self.layouts)
      issued = 1 + next(i for i, e in enumerate(eqns) if e.primitive is mma.gemm_async_p)
      parts = [self._leave(part, True) for place, part in zip(places, leaving, strict=True) if place == i]
      work += [*eqns[:issued], *(e for part in parts for e in part), *eqns[issued:]]
    if places[-1] + 1 < trips:
      rest = (i32(start + places[-1] + 1), *loop.invars[1:])
      work.append(loop.replace(invars=rest, blocks=(_past_the_first(body, lo),)))
    save = Builder(self.parts.epilogue[0].loc)
    for v, ref in self.kept.items():
      save.store(whole(ref), v)
    save.store(whole(self.pending), 1)
    work += [*self.parts.value, *save.eqns]
    return Deferred(tuple(self.setup.eqns), Block((), tuple(work), ()), tuple(self._leave(self.parts.epilogue, False)))

  def _leave(self, part: tuple[Eqn, ...], in_loop: bool) -> list[Eqn]:
    """Stores a part of the tile that waits, if there is one: in the loop not at its first tile, for which the last one
    is stored after the loop."""
    b = Builder(part[0].loc)
    waiting = b.op(elementwise.gt_p, b.load(whole(self.pending)), 0)
    inner = b.inner()
    env: dict[Var, Atom] = {}
    for v in filter(self.kept.__contains__, _free_variables(part)):
      env[v] = loaded = inner.load(whole(self.kept[v]))
      if v in self.layouts:
        self.layouts[loaded] = self.layouts[v]
    inner.eqns += clone(Block((), part, ()), env, self.layouts)
    b.bind(control.cond_p, (waiting,), {"once_a_tile": True} if in_loop else {}, (inner.block(),))
    return b.eqns


def _in_parts(epilogue: tuple[Eqn, ...]) -> list[tuple[Eqn, ...]]:
  """An epilogue, cut before each wait for the staging."""
  starts = [i for i, e in enumerate(epilogue) if any(
      x.primitive is memory.wait_group_p for b in e.blocks for x in b.eqns)]
  assert starts[0] == 0
  return [epilogue[i:j] for i, j in zip(starts, [*starts[1:], len(epilogue)], strict=True)]


def _past_the_first(body: Block, lo: Atom) -> Block:
  """The body for iterations after the first, where `index > lo` holds."""
  known = {e.outvars[0]: Literal(True, dtypes.bool_) for e in body.eqns
           if e.primitive is elementwise.gt_p and e.invars == (body.invars[0], lo)}
  kept = tuple(e for e in body.eqns if not e.outvars or e.outvars[0] not in known)
  index = body.invars[0]
  return Block((index,), tuple(_substituted(e, known) for e in kept), ())


def _substituted(eqn: Eqn, env: dict[Var, Literal]) -> Eqn:
  return eqn.replace(
      invars=tuple(env.get(a, a) if isinstance(a, Var) else a for a in eqn.invars),
      blocks=tuple(dataclasses.replace(b, eqns=tuple(_substituted(e, env) for e in b.eqns)) for b in eqn.blocks))


def clone(block: Block, env: dict[Var, Atom], layouts: dict[Var, Layout]) -> list[Eqn]:
  """The block's equations with fresh variables; `env` replaces operands. Layouts go with the variables."""
  assert not any(isinstance(v.type, RefType) for v in block.invars)
  given, env = set(env), dict(env)
  eqns = copied(block.eqns, env)
  bound = {v: new for v, new in env.items() if v not in given and isinstance(new, Var)}
  layouts.update((new, layouts[v]) for v, new in bound.items() if v in layouts)
  return eqns
