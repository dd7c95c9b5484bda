"""Barriers, bulk copies and clusters in the simulator and on a GPU: short exchanges with one possible result."""
from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.agreement import record
from tests.gpu.isa_row_kernels import CELL
from tests.gpu.isa_rows import THREADS, Kernel, Writer
from tests.gpu.isa_rows_test import compare
from tests.sim.arrays import registers
from tiletrace.ffi.image import TensorMapSpec
from tiletrace.lowering.ptx import isa
from tiletrace.lowering.ptx.instr import Instr
from tiletrace.lowering.ptx.registers import Addr, Label, Reg

REGION = CELL * THREADS
REMOTE_ARRIVALS = [row for row in isa.ROWS.values() if row.opcode.startswith("mbarrier.arrive")
                   and "shared::cluster" in row.template and row.operands == isa.MBARRIER_ARRIVE_REMOTE.operands]
SEEDS = range(4)


class Exchange:
  """A kernel around shared memory: a region of 16 bytes for each thread, more behind it, mbarriers at its end."""

  def __init__(self, ctas: int = 1, maps: int = 0):
    self.w = Writer(smem=8 * REGION, maps=maps, ctas=ctas, min_ctas=1)
    self.b = self.w.b
    self.base = self.b.new(isa.MOV_SYMBOL, self.w.shared, type="u32")
    self.own = self.b.new(isa.MAD_LO, self.w.tid, CELL, self.base, type="u32")
    self.first: Reg = self.b.new(isa.SETP, self.w.tid, 0, cmp="eq", type="u32")
    self.bars = 0
    self.want: list[np.ndarray] = []

  def mbarrier(self, count: int) -> Addr:
    """A new mbarrier, not yet seen by others."""
    bar = self.b.addr(self.base, 7 * REGION + 8 * self.bars)
    self.bars += 1
    self.b(isa.MBARRIER_INIT, bar, count, pred=self.first)
    return bar

  def ready(self) -> None:
    """What was initialised and written is seen by all threads and by the async proxy."""
    self.b(isa.FENCE_MBARRIER_INIT)
    self.b(isa.FENCE_PROXY_ASYNC)
    if self.w.ctas > 1:
      self.b(isa.CLUSTER_ARRIVE, sem="release", aligned="aligned")
      self.b(isa.CLUSTER_WAIT, sem="acquire", aligned="aligned")
    else:
      self.b(isa.BAR_SYNC_ALL, 0)

  def wait(self, bar: Addr, parity: int, **mods: str) -> None:
    again = self.b.label("again")
    self.b.place(again)
    done = self.b.new(isa.MBARRIER_TRY_WAIT, bar, parity, **mods)
    self.b(isa.BRA, again, pred=done, negate=True)

  def words(self, seed: int) -> np.ndarray:
    """[threads, 4] random words."""
    return registers("b32", 4 * self.w.threads, seed).reshape(-1, 4)

  def load(self, words: np.ndarray) -> list[Reg]:
    """Each thread's four of them."""
    return self.b.new(isa.LD_GLOBAL, self.w.address("inputs", CELL, self.w.data(words)), vec="v4", type="b32")

  def store(self, words: np.ndarray, offset: int = 0) -> None:
    """Each thread writes its words to its place in shared memory."""
    self.b(isa.ST_SHARED, self.b.addr(self.own, offset), self.load(words), vec="v4", type="b32")

  def keep(self, row: Instr, values: list[Reg], want: np.ndarray, **mods: str) -> None:
    """Four words of each thread as a result, and what they should be, [threads, 4]."""
    region = self.w.space(CELL * self.w.threads)
    self.b(isa.ST_GLOBAL, self.w.address("outputs", CELL, region), values, vec="v4", type="b32")
    self.w.keep_region(row.form(**mods), region, 4)
    self.want.append(want.reshape(-1))

  def keep_shared(self, row: Instr, offset: int, want: np.ndarray, **mods: str) -> None:
    self.keep(row, self.b.new(isa.LD_SHARED, self.b.addr(self.own, offset), vec="v4", type="b32"), want, **mods)

  def branch(self, condition: Reg) -> Label:
    """The others go on at the label."""
    label = self.b.label("skip")
    self.b(isa.BRA, label, pred=condition, negate=True)
    return label

  def kernel(self) -> tuple[Kernel, list[np.ndarray]]:
    return self.w.kernel(), self.want


def named_barriers():
  """Warps 2 and 3 wait for what warps 0 and 1 wrote, who only arrive; warps then exchange within themselves."""
  x = Exchange()
  b, words = x.b, x.words(1)
  late = b.new(isa.SETP, x.w.tid, 64, cmp="ge", type="u32")
  x.store(words)
  skip, done = b.label("early"), b.label("done")
  partner = b.new(isa.MAD_LO, b.new(isa.XOR, x.w.tid, 64, type="b32"), CELL, x.base, type="u32")
  got = b.regs("b32", 4)
  for reg in got:
    b(isa.MOV, reg, 0, type="b32")
  b(isa.BRA, skip, pred=late, negate=True)
  b(isa.BAR_SYNC, 3, THREADS)
  b(isa.LD_SHARED, got, b.addr(partner), vec="v4", type="b32")
  b(isa.BRA, done)
  b.place(skip)
  b(isa.BAR_ARRIVE, 3, THREADS)
  b.place(done)
  x.keep(isa.BAR_ARRIVE, got, np.where(np.arange(THREADS)[:, None] >= 64, np.roll(words, 64, 0), 0))
  b(isa.BAR_SYNC_ALL, 0)
  others = x.words(2)
  x.store(others)
  for sem in ("sc", "acq_rel"):
    for scope in ("cta", "cluster", "gpu", "sys"):
      b(isa.FENCE, sem=sem, scope=scope)
  b(isa.BAR_WARP_SYNC, -1)
  neighbour = b.new(isa.XOR, x.own, CELL, type="b32")
  x.keep(isa.BAR_WARP_SYNC, b.new(isa.LD_SHARED, b.addr(neighbour), vec="v4", type="b32"),
         others[np.arange(THREADS) ^ 1])
  return x.kernel()


def mbarrier_phases():
  """One thread takes an mbarrier through phases of random arrivals, counts and bytes, and asks after each."""
  x = Exchange()
  b, rng, count = x.b, np.random.default_rng(5), 6
  source = x.words(3)
  bar = x.mbarrier(count)
  x.ready()
  answers: list[Reg] = []
  want: list[int] = []

  def ask(parity: int, expected: bool) -> None:
    mods = {"sem": "acquire", "scope": "cta"} if rng.integers(0, 2) else {}
    done = b.new(isa.MBARRIER_TEST_WAIT, bar, parity, **mods)
    answers.append(b.new(isa.SELP, 1, 0, done, type="b32"))
    want.append(int(expected))

  global_source = x.w.data(source)
  pointer = b.new(isa.LD_PARAM, b.addr(b.entry.param("inputs")), type="u64")
  end = x.branch(x.first)
  for phase in range(8):
    parity, left, bytes_ = phase & 1, count, 0
    ask(parity, False)
    ask(parity ^ 1, True)
    while left:
      kind = rng.integers(0, 4)
      if kind == 0:
        b(isa.MBARRIER_ARRIVE, bar, **({"sem": "release", "scope": "cta"} if left % 2 else {}))
        left -= 1
      elif kind == 1:
        arriving = int(rng.integers(1, left + 1))
        b(isa.MBARRIER_ARRIVE_COUNT, bar, arriving)
        left -= arriving
      else:
        row = (isa.MBARRIER_ARRIVE_EXPECT_TX, isa.MBARRIER_EXPECT_TX)[kind - 2]
        b(row, bar, 16)
        left -= kind == 2
        bytes_ += 16
      ask(parity, not left and not bytes_)
    if bytes_:
      b(isa.BULK_LOAD, b.addr(x.base), b.addr(pointer, global_source), bytes_, bar)
    x.wait(bar, parity)
    ask(parity, True)
    ask(parity ^ 1, False)
  b(isa.MBARRIER_INVAL, bar)
  region = x.w.space(4 * len(answers))
  out = b.new(isa.LD_PARAM, b.addr(b.entry.param("outputs")), type="u64")
  for i, answer in enumerate(answers):
    b(isa.ST_GLOBAL, b.addr(out, region + 4 * i), answer, type="b32")
  b.place(end)
  kernel = x.w.kernel()
  return kernel, region, np.array(want, np.uint32)


def bulk_copies():
  """Bytes from global to shared memory and back, without a tensor map; hints around them."""
  x = Exchange()
  b, words, written = x.b, x.words(6), x.words(7)
  bar = x.mbarrier(1)
  x.store(np.zeros_like(words))
  x.store(written, REGION)
  x.ready()
  inputs, outputs = (b.new(isa.LD_PARAM, b.addr(b.entry.param(p)), type="u64") for p in ("inputs", "outputs"))
  source, region = x.w.data(words), x.w.space(REGION)
  for level in ("L1", "L2"):
    b(isa.PREFETCH, b.addr(inputs, source), level=level)
  end = x.branch(x.first)
  b(isa.BULK_PREFETCH, b.addr(inputs, source), REGION)
  b(isa.MBARRIER_ARRIVE_EXPECT_TX, bar, 1024)
  b(isa.BULK_LOAD, b.addr(x.base, 256), b.addr(inputs, source + 512), 1024, bar)
  b(isa.BULK_STORE, b.addr(outputs, region), b.addr(x.base, REGION), REGION)
  b(isa.BULK_COMMIT)
  b(isa.BULK_WAIT, 0, read="read")
  b(isa.BULK_WAIT, 0)
  b.place(end)
  x.w.keep_region(isa.BULK_STORE.form(), region, 4)
  x.want.append(written.reshape(-1))
  x.wait(bar, 0)
  want = np.zeros_like(words)
  want[16:80] = words[32:96]
  x.keep_shared(isa.BULK_LOAD, 0, want)
  return x.kernel()


def cp_async_on_mbarriers():
  """cp.async whose completion arrives on an mbarrier: with and without raising its pending count."""
  x = Exchange()
  b = x.b
  first, second = x.words(8), x.words(9)
  plain, counted = x.mbarrier(THREADS), x.mbarrier(THREADS)
  x.ready()
  for i, (words, bar, noinc) in enumerate([(first, counted, "noinc"), (second, plain, "")]):
    b(isa.CP_ASYNC_CG, b.addr(x.own, i * REGION), x.w.address("inputs", CELL, x.w.data(words)), 16)
    b(isa.CP_ASYNC_MBARRIER_ARRIVE, bar, noinc=noinc)
  b(isa.MBARRIER_ARRIVE, plain)              # without .noinc the asynchronous arrival was added to the count
  x.wait(counted, 0)
  x.wait(plain, 0)
  neighbour = b.new(isa.XOR, x.own, 32 * CELL, type="b32")
  for i, (words, noinc) in enumerate([(first, "noinc"), (second, "")]):
    got = b.new(isa.LD_SHARED, b.addr(neighbour, i * REGION), vec="v4", type="b32")
    x.keep(isa.CP_ASYNC_MBARRIER_ARRIVE, got, words[np.arange(THREADS) ^ 32], noinc=noinc)
  b(isa.CP_ASYNC_CG, b.addr(x.own, 2 * REGION), x.w.address("inputs", CELL, x.w.data(second)), 16)
  b(isa.CP_ASYNC_WAIT_ALL)
  x.keep_shared(isa.CP_ASYNC_WAIT_ALL, 2 * REGION, second)
  return x.kernel()


def remote_accesses():
  """Two CTAs read, write and count in each other's shared memory."""
  x = Exchange(ctas=2)
  b = x.b
  rank = b.special("cluster_ctarank")
  peer = b.new(isa.XOR, rank, 1, type="b32")
  bars = [x.mbarrier(THREADS * len(REMOTE_ARRIVALS)), x.mbarrier(2 * THREADS), x.mbarrier(1)]
  mine, sent = x.words(10), x.words(11)
  x.store(mine)
  x.ready()
  far = b.new(isa.MAPA, x.own, peer)
  base = b.new(isa.MAPA, x.base, peer)
  x.keep(isa.LD_CLUSTER, b.new(isa.LD_CLUSTER, b.addr(far), vec="v4", type="b32"), np.roll(mine, THREADS, 0), vec="v4",
         type="b32")
  b(isa.ST_CLUSTER, b.addr(far, REGION), x.load(sent), vec="v4", type="b32")
  far_bars = [b.addr(base, 7 * REGION + 8 * i) for i in range(3)]
  for row in REMOTE_ARRIVALS:
    b(row, far_bars[0])
  b(isa.MBARRIER_ARRIVE_REMOTE_COUNT, far_bars[1], 2)
  b(isa.MBARRIER_ARRIVE_EXPECT_TX_REMOTE, far_bars[2], REGION, pred=x.first)
  x.wait(bars[0], 0, sem="acquire", scope="cluster")
  x.keep_shared(isa.ST_CLUSTER, REGION, np.roll(sent, THREADS, 0), vec="v4", type="b32")
  x.wait(bars[1], 0, sem="acquire", scope="cluster")
  b(isa.BULK_TO_CLUSTER, b.addr(base, 2 * REGION), b.addr(x.base), REGION, far_bars[2], pred=x.first)
  x.wait(bars[2], 0)
  x.keep_shared(isa.BULK_TO_CLUSTER, 2 * REGION, np.roll(mine, THREADS, 0))
  for sem, then in (("", ""), ("relaxed", "acquire")):        # nobody leaves while the other reads
    b(isa.CLUSTER_ARRIVE, sem=sem)
    b(isa.CLUSTER_WAIT, sem=then)
  return x.kernel()


def multicast():
  """Each CTA of two loads half a box to both, with cache hints; then each stores its copy."""
  x = Exchange(ctas=2, maps=2)
  b = x.b
  rank = b.special("cluster_ctarank")
  bars = [x.mbarrier(1), x.mbarrier(1)]
  words = registers("b32", 4 * THREADS, 12).reshape(-1, 4)                   # [32 rows, 16 words]
  load = x.w.tensor_map(TensorMapSpec(0, "uint32", (16, 32), (64,), (16, 16), 64, 0, x.w.data(words)))
  region = x.w.space(2 * REGION)
  store = x.w.tensor_map(TensorMapSpec(1, "uint32", (16, 64), (64,), (16, 32), 64, 0, region))
  x.store(np.zeros((2 * THREADS, 4), np.uint32))
  x.store(np.zeros((2 * THREADS, 4), np.uint32), REGION)
  policy = b.new(isa.CREATEPOLICY, 1.0, l2="L2::evict_last")
  mask = b.new(isa.MOV, 3, type="b16")
  x.ready()
  row = b.new(isa.SHL, rank, 4, type="b32")
  b(isa.PREFETCH_TENSORMAP, b.addr(load))
  end = x.branch(x.first)
  b(isa.TMA_PREFETCH, load, [0, row], dim="2d")
  for i, (form, extra) in enumerate([(isa.TMA_LOAD_MULTICAST.form(dim="2d"), [mask]),
                                     (isa.TMA_LOAD_MULTICAST_HINT.form(dim="2d"), [mask, policy])]):
    b(isa.MBARRIER_ARRIVE_EXPECT_TX, bars[i], REGION)
    to = b.new(isa.MAD_LO, rank, REGION // 2, x.base, type="u32")
    b(form, b.addr(to, i * REGION), load, [0, row], bars[i], *extra)
  b.place(end)
  for i in range(2):
    x.wait(bars[i], 0)
  swizzled = words.reshape(32, 4, 4)[np.arange(32)[:, None], np.arange(4) ^ (np.arange(32)[:, None] >> 1 & 3)]
  for i, row_ in enumerate((isa.TMA_LOAD_MULTICAST, isa.TMA_LOAD_MULTICAST_HINT)):
    x.keep_shared(row_, i * REGION, np.concatenate([swizzled.reshape(-1, 4)] * 2), dim="2d")
  b(isa.FENCE_PROXY_ASYNC)
  b(isa.BAR_SYNC_ALL, 0)
  below = b.new(isa.SHL, rank, 5, type="b32")
  end = x.branch(x.first)
  b(isa.TMA_STORE_HINT, store, [0, below], b.addr(x.base), policy, dim="2d")
  b(isa.BULK_COMMIT)
  b(isa.BULK_WAIT, 0)
  b.place(end)
  x.w.keep_region(isa.TMA_STORE_HINT.form(dim="2d"), region, 4)
  x.want.append(np.concatenate([words, words]).reshape(-1))
  b(isa.CLUSTER_ARRIVE)
  b(isa.CLUSTER_WAIT)
  return x.kernel()


def control():
  """What changes nothing of the result: register budgets, waits for other grids, naps; lanes that leave early."""
  x = Exchange()
  b, words = x.b, x.words(13)
  pointer = b.new(isa.LD_PARAM, b.addr(b.entry.param("inputs")), type="u64")
  generic = b.new(isa.CVTA, pointer, space="global")
  same = b.new(isa.SETP, b.new(isa.CVTA_TO, generic, space="global"), pointer, cmp="eq", type="u64")
  b(isa.GRIDDEPCONTROL, op="wait")
  b(isa.GRIDDEPCONTROL, op="launch_dependents")
  b(isa.SETMAXNREG, 40, dir="dec")
  b(isa.SETMAXNREG, 56, dir="inc")
  b(isa.NANOSLEEP, 20)
  values = x.load(words)
  active = b.new(isa.ACTIVEMASK)
  everyone = b.new(isa.SETP, active, -1, cmp="eq", type="u32")
  values[3] = b.new(isa.SELP, values[3], 7, everyone, type="b32")
  values[2] = b.new(isa.SELP, values[2], 7, same, type="b32")
  odd = b.new(isa.SETP, b.new(isa.AND, x.w.tid, 1, type="b32"), 0, cmp="ne", type="b32")
  x.keep(isa.SETMAXNREG, values, words, dir="dec")
  region = x.w.space(REGION)
  out = x.w.address("outputs", CELL, region)
  b(isa.ST_GLOBAL, out, [1] * 4, vec="v4", type="b32")
  b(isa.EXIT, pred=odd)
  b(isa.ST_GLOBAL, out, [2] * 4, vec="v4", type="b32")
  x.w.keep_region(isa.EXIT.form(), region, 4)
  x.want.append(np.repeat(np.where(np.arange(THREADS) % 2, 1, 2).astype(np.uint32), 4))
  return x.kernel()


EXCHANGES = (control, named_barriers, bulk_copies, cp_async_on_mbarriers, remote_accesses, multicast)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("build", EXCHANGES, ids=lambda f: f.__name__)
def test_exchanges_have_their_one_result_in_every_order(build, seed):
  kernel, wants = build()
  memory = kernel.simulate(seed)
  for result, want in zip(kernel.results, wants, strict=True):
    assert np.array_equal(result.read(memory), want), result.form
  if seed == 0:
    assert kernel.assemble().image


@pytest.mark.parametrize("seed", SEEDS)
def test_an_mbarrier_completes_when_arrivals_and_bytes_have_come(seed):
  kernel, region, want = mbarrier_phases()
  got = kernel.simulate(seed)[region:region + want.nbytes].view(np.uint32)
  assert got.tolist() == want.tolist()
  assert kernel.assemble().image


@pytest.mark.gpu
@pytest.mark.parametrize("build", EXCHANGES, ids=lambda f: f.__name__)
def test_exchanges_do_what_the_gpu_does(build):
  compare(build()[0])


@pytest.mark.gpu
def test_an_mbarrier_completes_as_the_gpus_does():
  kernel, region, want = mbarrier_phases()
  got = kernel.launch()[region:region + want.nbytes].view(np.uint32)
  for row in {inst.row for inst in kernel.module.entries[0].instructions() if inst.row.opcode.startswith("mbarrier")}:
    record(row.section, f"{row}: phases", got == want)
  assert got.tolist() == want.tolist()
