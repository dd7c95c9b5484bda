"""What emitters share: the environment of registers, the threads that are active, addresses of buffers."""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from tiletrace.core.graph import Atom, Block, Eqn, Literal, TileGraph, Var
from tiletrace.core.rules import RuleTable
from tiletrace.core.types import BarrierType, Extent, RefType, Size, Space, TileType
from tiletrace.lowering.emit.cache_hints import cache_hints
from tiletrace.lowering.emit.masks import kept_masks
from tiletrace.lowering.emit.snapshots import loads_to_copy
from tiletrace.lowering.emit.tensor_maps import TensorMap, TensorMaps
from tiletrace.lowering.emit.values import Elements, Operand, allocate
from tiletrace.lowering.facts import Facts
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.module import Builder, Entry, Module
from tiletrace.lowering.ptx.registers import Reg, Symbol
from tiletrace.lowering.strides import row_major_strides
from tiletrace.lowering.target import Target

emit_rules: RuleTable[Callable[[EmitContext, Eqn], None]] = RuleTable("emit")

WARPGROUP = 128  # threads


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
  """The active threads: `count` warpgroups from `first` on, narrowed to one thread ("scope", "warpgroup") or not."""
  first: int
  count: int
  elected: str | None = None

  @property
  def threads(self) -> int:
    return self.count * WARPGROUP


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Binding:
  """Where a variable lives: registers, an offset in shared memory, or a kernel parameter's address."""
  elements: Elements | None = None
  offset: int | None = None
  pointer: Reg | None = None


class EmitContext:
  """State of one emission.

  Attributes:
    graph: the level-0 program.
    layouts: a layout for each distributed tile, fragment and shared buffer.
    offsets: byte offset in shared memory of each shared buffer and barrier array.
    table: (values) -> the symbol of a table of integers.
    scope: the active threads.
    cache_hints: modifiers of the loads of an array.
    kept: literals that are in registers from the kernel's beginning, once some equation has asked for them.
    policies: cache policies, alike.
  """

  def __init__(self, graph: TileGraph, layouts: dict[Var, Layout], offsets: dict[Var, int], target: Target,
               module: Module, entry: Entry, smem: Symbol, facts: Facts, threads: int):
    self.graph, self.layouts, self.offsets, self.target = graph, layouts, offsets, target
    self.table, self.entry, self.facts = module.table, entry, facts
    self.b: Builder = entry.builder()
    self.maps = TensorMaps(graph)
    self.scope = Scope(0, threads // WARPGROUP)
    self.whole = self.scope
    self._env: dict[Var, Binding] = {}
    self._uniform: dict[tuple, Reg] = {}
    self._barrier_ids: dict[tuple, tuple[int, int]] = {}
    self._smem = smem
    self.guard: Reg | None = None
    self.copied_loads: set[Eqn] = loads_to_copy(graph.body)
    self.cache_hints = cache_hints(graph)
    self.masks = kept_masks(graph)
    self.kept: dict[int, Reg] = {}
    self.policies: dict[str, Reg] = {}

  # ---- the environment

  def bind(self, var: Var, elements: Elements) -> None:
    self._env[var] = Binding(elements=elements)

  def bind_pointer(self, var: Var, pointer: Reg) -> None:
    self._env[var] = Binding(pointer=pointer)

  def read(self, a: Atom) -> Elements:
    """The registers (or the literal) of a tile value or fragment."""
    if isinstance(a, Literal):
      value = int(a.value) if isinstance(a.value, bool) else a.value
      return Elements(a.type.dtype, 1, (value,))
    found = self._env[a].elements
    assert found is not None, a
    return found

  def scalar(self, a: Atom) -> Operand:
    """A rank-0 value as one operand."""
    x = self.read(a)
    assert x.count == 1, a
    return x.regs[0]

  def pointer(self, root: Var) -> Reg:
    """The global address of an argument."""
    found = self._env[root].pointer
    assert found is not None, root
    return found

  def count(self, var: Var) -> int:
    """Elements per thread of a tile value or fragment."""
    assert isinstance(var.type, TileType | RefType)
    return 1 if var.type.shape == () else self.layouts[var].extent("reg")

  def value_layout(self, eqn: Eqn, value: Atom) -> Layout:
    """The layout of a stored value; a scalar is stored as a tile of the layout that was inferred for the store."""
    if isinstance(value, Var) and value in self.layouts:
      return self.layouts[value]
    return eqn.params["layout"]

  def fresh(self, var: Var, eqn: Eqn) -> Elements:
    """New registers for a variable, bound to it."""
    assert isinstance(var.type, TileType | RefType)
    out = allocate(self.b, var.type.dtype, self.count(var), eqn.loc)
    self.bind(var, out)
    return out

  def mask(self, eqn: Eqn) -> Reg | None:
    """The register that holds the literal of an `and` from the kernel's beginning, if one is to (masks.py)."""
    if eqn not in self.masks:
      return None
    value = self.masks[eqn]
    if value not in self.kept:
      self.kept[value] = self.b.reg("b32")
    return self.kept[value]

  # ---- threads

  def uniform(self, key: tuple, make: Callable[[], Reg]) -> Reg:
    """A register made once; `make` runs at the first use, which must dominate the others (see `prologue`)."""
    if key not in self._uniform:
      self._uniform[key] = make()
    return self._uniform[key]

  def tid(self) -> Reg:
    """Thread of the CTA."""
    return self._uniform[("tid",)]

  def local_tid(self) -> Operand:
    """Thread of the current scope's warpgroups."""
    return self._uniform[("local", self.scope.first)]

  def warpgroup(self) -> Operand:
    """Index of this thread's warpgroup in the current scope; the same register in every thread of a warp."""
    return 0 if self.scope.count == 1 else self._uniform[("wg", self.scope.first)]

  def leader(self) -> Reg:
    """Whether this is the first thread of its warpgroup."""
    if self.graph.options.cluster_size > 1:      # beside `peers` it would live throughout, in a register
      return self.b.new(isa.SETP, self._uniform[("lane",)], 0, cmp="eq", type="s32")
    return self._uniform[("leader",)]

  def peers(self) -> tuple[Reg, Reg]:
    """(whether, of which CTA of the cluster) this thread of its warpgroup stands for a CTA: thread i for rank i."""
    return self._uniform[("peers",)], self._uniform[("lane",)]

  def extent(self, n: Extent) -> Operand:
    """An extent as one operand, 32 bits wide."""
    if not isinstance(n, Size):
      return n
    if ("extent", n) in self._uniform:
      return self._uniform[("extent", n)]
    first, *names = n.names
    out = self._uniform[("extent", Size((first,)))]
    for name in names:
      out = self.b.new(isa.MUL_LO, out, self._uniform[("extent", Size((name,)))], type="s32")
    return self.b.new(isa.MUL_LO, out, n.factor, type="s32") if n.factor != 1 else out

  def stride(self, n: Size) -> Reg:
    """Bytes between neighbours along a dimension of an argument, 64 bits wide."""
    return self._uniform[("stride", n)]

  def sizes(self, names: dict[str, Reg]) -> None:
    """Takes the sizes that the call decides, and makes of them all extents and strides of arguments."""
    self._uniform.update((("extent", Size((name,))), reg) for name, reg in names.items())
    types = [v.type for v in dict.fromkeys(self.graph.invars) if isinstance(v.type, RefType)]
    for n in dict.fromkeys(n for t in types for n in t.shape if isinstance(n, Size)):
      self._uniform[("extent", n)] = self.extent(n)  # type: ignore[assignment]
    strides = (s * t.dtype.itemsize for t in types for s in row_major_strides(t.shape))
    for n in dict.fromkeys(s for s in strides if isinstance(s, Size)):
      (first, *more), b = n.names, self.b
      out = b.new(isa.CVT, names[first], to="s64", source="s32")
      for name in more:
        out = b.new(isa.MUL_LO, out, b.new(isa.CVT, names[name], to="s64", source="s32"), type="s64")
      self._uniform[("stride", n)] = b.new(isa.MUL_LO, out, n.factor, type="s64") if n.factor != 1 else out

  def cluster_rank(self) -> Reg:
    """This CTA's rank in its cluster."""
    return self._uniform[("rank",)]

  def prologue(self) -> None:
    """Thread indices that later code shares. wg comes through a shuffle so that ptxas knows it is warp-uniform."""
    b = self.b
    tid = self._uniform[("tid",)] = b.special("tid.x")
    lane = b.new(isa.AND, tid, WARPGROUP - 1, type="b32")
    self._uniform[("local", 0)] = tid
    cluster = self.graph.options.cluster_size
    if cluster == 1:
      self._uniform[("leader",)] = b.new(isa.SETP, lane, 0, cmp="eq", type="s32")
    else:
      self._uniform[("lane",)] = lane
      self._uniform[("peers",)] = b.new(isa.SETP, lane, cluster, cmp="lt", type="s32")
      self._uniform[("rank",)] = b.special("cluster_ctarank")
    wg = b.new(isa.SHFL, b.new(isa.SHR, tid, 7, type="u32"), 0, 31, -1, mode="idx")
    self._uniform[("wg", 0)] = self._uniform[("wg_in_cta",)] = wg

  def enter_role(self, first: int) -> None:
    """Makes the indices relative to warpgroup `first`; called inside the role's branch."""
    b = self.b
    if first and ("local", first) not in self._uniform:
      self._uniform[("local", first)] = b.new(isa.SUB, self.tid(), first * WARPGROUP, type="s32")
      self._uniform[("wg", first)] = b.new(isa.SUB, self._uniform[("wg_in_cta",)], first, type="s32")

  @property
  def entry_registers(self) -> int:
    """Registers per thread at entry: what the SM holds, shared evenly, in the hardware's units of eight."""
    return min(255, self.target.registers // (self.entry.min_ctas or 1) // self.whole.threads // 8 * 8)

  @contextlib.contextmanager
  def guarded(self, predicate: Reg) -> Iterator[None]:
    """The next arrival is predicated by `predicate`, beside the choice of thread."""
    before, self.guard = self.guard, predicate
    try:
      yield
    finally:
      self.guard = before

  @contextlib.contextmanager
  def scoped(self, scope: Scope) -> Iterator[None]:
    before, self.scope = self.scope, scope
    try:
      yield
    finally:
      self.scope = before

  def barrier_id(self, key: tuple, width: int) -> int:
    """The first of `width` named barriers for `key`. 0 is the whole CTA's."""
    if key not in self._barrier_ids:
      self._barrier_ids[key] = (1 + sum(w for _, w in self._barrier_ids.values()), width)
    return self._barrier_ids[key][0]

  # ---- memory

  def smem_address(self, var: Var) -> tuple[Reg, int]:
    """(base register, byte offset) of a shared buffer or barrier array."""
    assert isinstance(var.type, BarrierType) or (isinstance(var.type, RefType) and var.type.space is Space.SHARED)
    return self._uniform[("smem",)], self.offsets[var]

  def smem_base(self) -> None:
    self._uniform[("smem",)] = self.b.new(isa.MOV_SYMBOL, self._smem, type="u32")

  # ---- blocks

  def block(self, block: Block) -> None:
    for eqn in block.eqns:
      with self.b.at(eqn.loc):
        emit_rules[eqn.primitive](self, eqn)

  def policy(self, name: str) -> Reg:
    """The register that will hold a cache policy."""
    if name not in self.policies:
      self.policies[name] = self.b.reg("b64")
    return self.policies[name]

  def map_address(self, tensor_map: TensorMap) -> Reg:
    """The register that will hold the generic address of a tensor map's parameter."""
    if tensor_map not in self.maps.addresses:
      self.maps.maps.append(tensor_map)
      self.maps.addresses[tensor_map] = self.b.reg("b64")
    return self.maps.addresses[tensor_map]
