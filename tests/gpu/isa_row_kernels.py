"""A kernel for each row of the instruction table that stands alone: all its forms on random operands."""
from __future__ import annotations

import dataclasses
import functools
import zlib

import ml_dtypes
import numpy as np

from tests.gpu.isa_rows import DTYPES, THREADS, Kernel, Writer
from tests.lowering.ptx.isa_test import forms
from tests.sim.arrays import packed, registers
from tiletrace.lowering.layouts.descriptor import Descriptor, wgmma_descriptor
from tiletrace.lowering.layouts.relation import Layout
from tiletrace.lowering.layouts.shared import SWIZZLES, shared_layout
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Form, Instr, Slot
from tiletrace.lowering.ptx.registers import OperandLike, Reg
from tiletrace.sim import fragments

_SHIFTS = (isa.SHL, isa.SHR, isa.SHF)
_BOUNDED = (isa.SIN, isa.COS)                     # the ISA bounds their error near zero only
CELL = 16                                         # bytes of memory of each thread, for loads, stores and atomics


def seed_of(*names: str) -> int:
  return zlib.crc32(" ".join(names).encode())


def operand_values(row: Instr, slot: Slot, cls: str) -> np.ndarray:
  """[THREADS] registers for a slot: random bits and edge cases, within what the ISA defines."""
  seed = seed_of(row.template, slot.name)
  rng = np.random.default_rng(seed)
  is_amount = row in _SHIFTS and slot.name == row.operands.split(", ")[-1][0]
  if is_amount or slot.name in ("pos", "len"):
    return rng.integers(0, 70, THREADS).astype(DTYPES[cls])
  if slot.type.endswith("x2") and cls == "b32":
    return packed(THREADS, seed)
  x = registers(cls, THREADS, seed)
  if row in (isa.DIV, isa.REM) and slot.name == "b":          # by zero: unspecified
    return np.where(x == 0, x.dtype.type(3), x)
  if row is isa.DIV_APPROX and slot.name == "b":              # unspecified below
    return np.where((np.abs(x) < 2.0**-126) & (x != 0), np.float32(3), x)
  if row in _BOUNDED:
    return rng.uniform(-2 * np.pi, 2 * np.pi, THREADS).astype(np.float32)
  return x


def _execute(w: Writer, form: Form, given: dict[str, np.ndarray] | None = None, widest: bool = False) -> None:
  """Loads the sources of a form, executes it, keeps what it writes. `given` has operands by the slot's name."""
  operands: list[OperandLike] = []
  sources: list = []
  made: list[tuple[str, Reg]] = []
  for slot in form.slots:
    if slot.kind == "int":
      operands.append(slot.values[len(form.head) * 7 % len(slot.values)])
      sources.append(operands[-1])
      continue
    cls, many = slot.classes[-1 if widest else 0], []
    for i in range(max(slot.count, 1)):
      if slot.writes:
        many.append(w.b.reg(cls))
        made.append((slot.type, many[-1]))
      elif given and slot.name in given:
        many.append(w.load(cls, given[slot.name]) if given[slot.name].ndim else int(given[slot.name]))
      else:
        named = dataclasses.replace(slot, name=f"{slot.name}{i}" if i else slot.name)
        sources.append(operand_values(form.row, named, cls))
        many.append(w.load(cls, sources[-1]))
    operands.append(many if slot.count else many[0])
  w.b(form, *operands)
  for part, (type_, reg) in enumerate(made):
    w.keep(form, type_, reg, tuple(sources), part)


@functools.cache
def arithmetic(row: Instr, widest: bool = False) -> Kernel:
  """A row that computes registers from registers. With `widest` they are of the widest classes that its slots take."""
  w = Writer()
  for form in forms(row):
    _execute(w, form, widest=widest)
  return w.kernel()


# ---- exchange within a warp

EXCHANGES = (isa.SHFL, isa.SHFL_P, isa.VOTE, isa.VOTE_BALLOT, isa.MATCH_ANY, isa.REDUX, isa.ACTIVEMASK, isa.ELECT)


def exchange(row: Instr) -> Kernel:
  """Whole warps; each of the four has shuffles of another width, and predicates of another kind."""
  w = Writer()
  rng = np.random.default_rng(seed_of(row.template))
  warp = np.arange(THREADS) // 32
  truth = np.where(warp == 0, 1, np.where(warp == 1, 0, rng.integers(0, 2, THREADS))).astype(bool)
  full = np.array(-1)
  for form in forms(row):
    given = {"mask": full, "b": rng.integers(0, 40, THREADS).astype(np.uint32)}
    if row in (isa.SHFL, isa.SHFL_P):
      clamp = 0 if form.mods["mode"] == "up" else 31
      given["c"] = ((32 - (32 >> warp)) << 8 | clamp).astype(np.uint32)
      given["b"] %= 32
    elif row in (isa.VOTE, isa.VOTE_BALLOT):
      given["a"] = truth
    elif row is isa.MATCH_ANY:
      given["a"] = rng.integers(0, 5, THREADS).astype(f"u{int(form.mods['type'][1:]) // 8}")
    _execute(w, form, given)
  return w.kernel()


# ---- memory

MEMORY = (isa.LD_GLOBAL, isa.LD_GLOBAL_HINT, isa.ST_GLOBAL, isa.ST_GLOBAL_HINT, isa.LD_SHARED, isa.ST_SHARED,
          isa.LD_CLUSTER, isa.ST_CLUSTER, isa.LD_SYNC, isa.ST_SYNC, isa.ATOM, isa.ATOM_CAS, isa.ATOM_HALF, isa.RED,
          isa.RED_HALF, isa.RED_VECTOR)


def memory_values(type_: str, cls: str, seed: int) -> np.ndarray:
  """[THREADS] registers; moderate numbers where the type is a float, so that sums have no NaN."""
  rng = np.random.default_rng(seed)
  element = type_.removesuffix("x2")
  if element in ("f16", "bf16"):
    words = rng.integers(0x3000, 0x4400, (THREADS, 2), dtype=np.uint16) ^ rng.choice([0, 0x8000], (THREADS, 2)).astype(
        np.uint16)
    return words.view(np.uint32)[:, 0] if cls == "b32" else words[:, 0].copy()
  if type_ in ("f32", "f64"):
    return rng.standard_normal(THREADS).astype(DTYPES[cls])
  return registers(cls, THREADS, seed)


def memory(row: Instr) -> Kernel:
  """Loads, stores and atomics: each thread on 16 bytes of its own, which are kept afterwards."""
  w = Writer(smem=CELL * THREADS)
  own = w.b.new(isa.MAD_LO, w.tid, CELL, w.b.new(isa.MOV_SYMBOL, w.shared, type="u32"), type="u32")
  for form in forms(row):
    (at,) = (s for s in form.slots if s.kind == "addr")
    type_ = form.mods.get("type", "f32")
    if type_.removesuffix("x2") in ("f16", "bf16"):
      type_, cls = type_.removesuffix("x2") + "x2", "b32"
    else:
      cls = type_ if type_[0] == "f" else "b64" if type_.endswith("64") else "b32"
    count = 2 if cls.endswith("64") else 4
    contents = [memory_values(type_, cls, seed_of(form.head, str(i))) for i in range(count)]
    words = np.stack(contents, axis=1).view(np.uint32)                # [THREADS, 4]
    _on_memory(w, form, at, words, contents[0], own)
  return w.kernel()


def _on_memory(w: Writer, form: Form, at: Slot, words: np.ndarray, first: np.ndarray, own: Reg) -> None:
  """One access to cells of `words`, whose first element of the type is `first`.

  Global loads read the inputs, where nothing is written: so they may be .nc.
  """
  in_shared = at.classes[0] == "b32"
  region = w.space(CELL * THREADS)
  output = w.address("outputs", CELL, region)
  if in_shared:
    address = w.b.addr(own)
  elif form.row in (isa.LD_GLOBAL, isa.LD_GLOBAL_HINT, isa.LD_SYNC):
    address = w.address("inputs", CELL, w.data(words))
  else:
    address = output
  initial = [w.load("b32", words[:, i].copy()) for i in range(4)]
  if in_shared:
    w.b(isa.ST_SHARED, address, initial, vec="v4", type="b32")
  else:
    w.b(isa.ST_GLOBAL, output, initial, vec="v4", type="b32")
  operands: list[OperandLike] = []
  made: list[tuple[str, Reg]] = []
  for slot in form.slots:
    if slot is at or slot.name == "policy":
      operands.append(address if slot is at else w.b.new(isa.CREATEPOLICY, 1.0, l2="L2::evict_first"))
      continue
    cls, many = slot.classes[0], []
    for i in range(max(slot.count, 1)):
      if slot.writes:
        many.append(w.b.reg(cls))
        made.append((slot.type, many[-1]))
      else:
        x = memory_values(slot.type, cls, seed_of(form.head, slot.name, str(i)))
        if form.row is isa.ATOM_CAS and slot.name == "b":      # half of them find what they compare with
          x = np.where(np.arange(THREADS) % 2 == 0, first, x)
        many.append(w.load(cls, x))
    operands.append(many if slot.count else many[0])
  w.b(form, *operands)
  for part, (type_, reg) in enumerate(made):
    w.keep(form, type_, reg, part=part)
  if in_shared:
    after = w.b.regs("b32", 4)
    w.b(isa.LD_SHARED, after, address, vec="v4", type="b32")
    w.b(isa.ST_GLOBAL, output, after, vec="v4", type="b32")
  w.keep_region(form, region, 4)


# ---- asynchronous copies of a thread

COPIES = (isa.CP_ASYNC, isa.CP_ASYNC_ZFILL, isa.CP_ASYNC_CG, isa.CP_ASYNC_CG_ZFILL, isa.CP_ASYNC_HINT,
          isa.CP_ASYNC_ZFILL_HINT, isa.CP_ASYNC_CG_HINT, isa.CP_ASYNC_CG_ZFILL_HINT)


def copies(row: Instr) -> Kernel:
  """cp.async of every size into poison, waited for; source sizes from none to all."""
  w = Writer(smem=CELL * THREADS)
  own = w.b.new(isa.MAD_LO, w.tid, CELL, w.b.new(isa.MOV_SYMBOL, w.shared, type="u32"), type="u32")
  source = w.address("inputs", CELL, w.data(registers("b32", 4 * THREADS, 3)))
  rng = np.random.default_rng(seed_of(row.template))
  for form in forms(row):
    (size,) = (s for s in form.slots if s.name == "size")
    for nbytes in size.values:
      w.b(isa.ST_SHARED, w.b.addr(own), [0x5A5A_5A5A] * 4, vec="v4", type="b32")
      names = [s.name for s in form.slots]
      extra = [w.load("b32", rng.integers(0, nbytes + 1, THREADS).astype(np.uint32))] if "src_size" in names else []
      extra += [w.b.new(isa.CREATEPOLICY, 1.0, l2="L2::evict_last")] if "policy" in names else []
      w.b(form, w.b.addr(own), source, nbytes, *extra)
      w.b(isa.CP_ASYNC_COMMIT)
      w.b(isa.CP_ASYNC_WAIT_GROUP, 0)
      _keep_cell(w, form, own)
  return w.kernel()


def _keep_cell(w: Writer, form: Form, own: Reg) -> None:
  """Each thread's 16 bytes of shared memory, as a result of `form`."""
  after = w.b.regs("b32", 4)
  w.b(isa.LD_SHARED, after, w.b.addr(own), vec="v4", type="b32")
  region = w.space(CELL * THREADS)
  w.b(isa.ST_GLOBAL, w.address("outputs", CELL, region), after, vec="v4", type="b32")
  w.keep_region(form, region, 4)


# ---- matrices of a warp

MATRICES = (isa.LDMATRIX, isa.STMATRIX, isa.MOVMATRIX)


def matrices(row: Instr) -> Kernel:
  """Matrix moves: every warp on 512 bytes of its own, its rows in a random order."""
  w = Writer(smem=CELL * THREADS)
  base = w.b.new(isa.MOV_SYMBOL, w.shared, type="u32")
  own = w.b.new(isa.MAD_LO, w.tid, CELL, base, type="u32")
  rng = np.random.default_rng(seed_of(row.template))
  rows = np.concatenate([512 * i + CELL * rng.permutation(32) for i in range(THREADS // 32)])
  at = w.b.new(isa.ADD, base, w.load("b32", rows.astype(np.uint32)), type="u32")
  contents = [w.load("b32", registers("b32", THREADS, 20 + i)) for i in range(4)]
  for form in forms(row):
    if row is isa.MOVMATRIX:
      _execute(w, form)
      continue
    w.b(isa.BAR_SYNC_ALL, 0)
    w.b(isa.ST_SHARED, w.b.addr(own), contents, vec="v4", type="b32")
    w.b(isa.BAR_SYNC_ALL, 0)
    count = int(form.mods["num"][1:])
    if row is isa.LDMATRIX:
      loaded = w.b.regs("b32", count)
      w.b(form, loaded, w.b.addr(at))
      for part, reg in enumerate(loaded):
        w.keep(form, "b32", reg, part=part)
      continue
    w.b(form, w.b.addr(at), [w.load("b32", registers("b32", THREADS, 30 + i)) for i in range(count)])
    w.b(isa.BAR_SYNC_ALL, 0)
    _keep_cell(w, form, own)
  return w.kernel()


# ---- products

PRODUCTS = (isa.MMA, isa.MMA_TF32, isa.MMA_F8, isa.MMA_S8)
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
_SMALL = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn,
          "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8}


def small_numbers(type_: str, rng: np.random.Generator, count: int, whole: bool = True) -> np.ndarray:
  """[count] numbers of a type: integers, of which every sum is exact, or normal ones."""
  if type_ == "u8":
    return rng.integers(0, 256, count).astype(np.uint8)
  if type_ == "s8":
    return rng.integers(-128, 128, count).astype(np.int8)
  x = rng.integers(-4, 5, count) if whole else rng.standard_normal(count)
  return x.astype(_SMALL[type_])


def words_of(type_: str, rng: np.random.Generator, whole: bool = True) -> np.ndarray:
  """[THREADS] 32-bit registers full of numbers."""
  return small_numbers(type_, rng, THREADS * 32 // _BITS[type_], whole).view(np.uint32)


def products(row: Instr, whole: bool = True) -> Kernel:
  """mma.sync of four warps."""
  w = Writer()
  rng = np.random.default_rng(seed_of(row.template))
  for form in forms(row):
    slots = {s.name: s for s in form.slots}
    d = w.b.regs(slots["d"].classes[0], slots["d"].count)
    a, b = ([w.load("b32", words_of(form.mods[x], rng, whole)) for _ in range(slots[x].count)] for x in "ab")
    c = [w.load(slots["c"].classes[0], accumulators(form.mods["d"], rng)) for _ in range(slots["c"].count)]
    w.b(form, d, a, b, c)
    for part, reg in enumerate(d):
      w.keep(form, "f16x2" if form.mods["d"] == "f16" else form.mods["d"], reg, part=part)
  return w.kernel()


def accumulators(type_: str, rng: np.random.Generator) -> np.ndarray:
  """[THREADS] registers of an accumulator: whole numbers."""
  if type_ == "f16":
    return words_of("f16", rng)
  return rng.integers(-100, 100, THREADS).astype(np.float32 if type_ == "f32" else np.int32).view(
      np.float32 if type_ == "f32" else np.uint32)


@dataclasses.dataclass(frozen=True)
class Wgmma:
  """One product of a warpgroup: the row and form, how B (and A) lie in shared memory, and its scales.

  `a_swizzle` is None where A comes from registers.
  """
  row: Instr
  shape: str
  d: str
  a: str
  b: str
  a_swizzle: int | None
  b_swizzle: int
  a_major: str = "k"
  b_major: str = "k"
  scale_a: int = 1
  scale_b: int = 1
  accumulate: bool = True

  def __str__(self) -> str:
    a = "registers" if self.a_swizzle is None else f"{self.a_major}{self.a_swizzle}"
    scales = f"{self.scale_a}{self.scale_b}{'' if self.accumulate else 'fresh'}"
    return f"{self.shape}.{self.d}.{self.a}.{self.b}-{a}-{self.b_major}{self.b_swizzle}-{scales}"

  @property
  def n(self) -> int:
    return int(self.shape.partition("n")[2].partition("k")[0])

  def layout(self, role: str) -> tuple[Layout, Descriptor]:
    bits = _BITS[self.a]
    k = 256 // bits
    shape, k_dim = ((64, 2 * k), 1) if role == "A" else ((2 * k, self.n), 0)
    major, swizzle = (self.a_major, self.a_swizzle or 0) if role == "A" else (self.b_major, self.b_swizzle)
    order = (k_dim, 1 - k_dim) if major == "k" else (1 - k_dim, k_dim)
    layout = shared_layout(shape, bits, swizzle, order=order, block_bytes=16)
    return layout, wgmma_descriptor(layout, bits, role=role)


def wgmma(case: Wgmma, whole: bool = True) -> tuple[Kernel, np.ndarray]:
  """Two k-steps into one accumulator, the first of which may drop what it held; and the result [64, n] in float64.

  Shared memory is filled as it lies in the input.
  """
  rng = np.random.default_rng(seed_of(str(case)))
  bits = _BITS[case.a]
  used = ["A", "B"] if case.a_swizzle is not None else ["B"]
  tiles = {role: case.layout(role) for role in used}
  sizes = {role: -(-tile.extent("off") * bits // 8 // 2048) * 2048 for role, (tile, _) in tiles.items()}
  w = Writer(smem=sum(sizes.values()))
  base = w.b.new(isa.MOV_SYMBOL, w.shared, type="u32")
  own = w.b.new(isa.MAD_LO, w.tid, CELL, base, type="u32")
  start, starts, operands = 0, {}, {}
  for role in used:
    starts[role] = start
    image = small_numbers(case.a if role == "A" else case.b, rng, sizes[role] * 8 // bits, whole)
    layout = tiles[role][0]
    operands[role] = image[layout.coordinates("off", np.ogrid[tuple(map(slice, layout.valid))])].astype(np.float64)
    offset = w.data(image)
    for at in range(0, sizes[role], CELL * THREADS):
      piece = w.b.new(isa.LD_GLOBAL, w.address("inputs", CELL, offset + at), vec="v4", type="b32")
      w.b(isa.ST_SHARED, w.b.addr(own, start + at), piece, vec="v4", type="b32")
    start += sizes[role]
  w.b(isa.FENCE_PROXY_ASYNC, space="shared::cta")
  w.b(isa.BAR_SYNC_ALL, 0)
  encoded = w.b.new(isa.CVT, w.b.new(isa.BFE, base, 4, 14, type="u32"), to="u64", source="u32")
  form = case.row.form(shape=case.shape, d=case.d, a=case.a, b=case.b)
  acc_slot = form.slots[0]
  acc = w.b.regs(acc_slot.classes[0], acc_slot.count)
  held = [accumulators(case.d, rng) for _ in acc]
  for reg, x in zip(acc, held):
    w.b(isa.MOV, reg, w.load(reg.cls, x), type="f32" if reg.cls == "f32" else "b32")
  a_words = [[words_of(case.a, rng, whole) for _ in range(4)] for _ in range(2)]
  a_regs = [[w.load("b32", x) for x in step] for step in a_words]
  if case.a_swizzle is None:
    operands["A"] = np.concatenate([fragments.gather_a(np.stack(step), case.a) for step in a_words], axis=1)
  keeps = w.load("pred", np.full(THREADS, case.accumulate))
  on = w.load("pred", np.ones(THREADS, bool))
  descs = {(role, step): w.b.new(isa.ADD, encoded, tiles[role][1].encode(starts[role] + tiles[role][1].k_offset(step)),
                                 type="u64") for role in used for step in range(2)}
  w.b(isa.WGMMA_FENCE)
  for step in range(2):
    left = a_regs[step] if case.a_swizzle is None else descs["A", step]
    extra: list[int] = [] if case.d == "s32" else [case.scale_a, case.scale_b]
    if bits == 16:
      extra += [int(m == "mn") for m in ([case.b_major] if case.a_swizzle is None else [case.a_major, case.b_major])]
    w.b(form, acc, left, descs["B", step], on if step else keeps, *extra)
  w.b(isa.WGMMA_COMMIT)
  w.b(isa.WGMMA_WAIT, 0)
  for part, reg in enumerate(acc):
    w.keep(form, "f16x2" if case.d == "f16" else case.d, reg, part=part)
  before = fragments.read_accumulator(np.stack(held), case.d) if case.accumulate else 0
  return w.kernel(), before + case.scale_a * case.scale_b * (operands["A"] @ operands["B"])


_S, _R = isa.WGMMA_SS, isa.WGMMA_RS
WGMMAS = (
    *(Wgmma(_S, "m64n128k16", "f32", "bf16", "bf16", s, s) for s in SWIZZLES),
    *(Wgmma(_S, "m64n64k16", "f32", "f16", "f16", s, s, a_major="mn", b_major="mn") for s in SWIZZLES),
    Wgmma(_S, "m64n256k16", "f32", "bf16", "bf16", 128, 128, b_major="mn"),
    Wgmma(_S, "m64n24k16", "f16", "f16", "f16", 128, 64),
    Wgmma(_S, "m64n8k16", "f32", "f16", "f16", 64, 32, scale_a=-1, accumulate=False),
    Wgmma(_R, "m64n176k16", "f32", "bf16", "bf16", None, 128, scale_b=-1),
    Wgmma(_R, "m64n64k16", "f16", "f16", "f16", None, 128, b_major="mn"),
    Wgmma(isa.WGMMA_F8_SS, "m64n96k32", "f32", "e4m3", "e5m2", 128, 128),
    Wgmma(isa.WGMMA_F8_RS, "m64n64k32", "f32", "e5m2", "e4m3", None, 64, accumulate=False),
    Wgmma(isa.WGMMA_F8_SS, "m64n16k32", "f16", "e4m3", "e4m3", 64, 64),
    Wgmma(isa.WGMMA_TF32_SS, "m64n40k8", "f32", "tf32", "tf32", 128, 64),
    Wgmma(isa.WGMMA_TF32_RS, "m64n128k8", "f32", "tf32", "tf32", None, 128, scale_a=-1, scale_b=-1),
    Wgmma(isa.WGMMA_S8_SS, "m64n96k32", "s32", "s8", "u8", 128, 128),
    Wgmma(isa.WGMMA_S8_RS, "m64n32k32", "s32", "u8", "s8", None, 32, accumulate=False),
)
