"""Loops whose gemms overlap with other work, one kernel for each shape: what they wait for, what ptxas makes of it, and
their results in the simulator."""
from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, I32, assemble, lower, struct
from tests.tolerances import assert_close
from tiletrace.core.errors import AssembleError
from tiletrace.core.graph import walk
from tiletrace.lowering.assemble import sass
from tiletrace.stages import Lowered

N = 64                      # queries, keys of a block, and the head dimension


class Attention:
  """The parts of an attention over blocks of n keys, where n is the head dimension; base 2, unscaled logits."""

  def __init__(self, q, k, v):
    self.k, self.v, self.n = k, v, q.shape[1]
    self.q_s, self.k_s, self.v_s = (tt.alloc_shared(shape, q.dtype) for shape in (q.shape, *[(self.n, self.n)] * 2))
    self.logits, self.acc = (tt.alloc_fragment((q.shape[0], self.n), F32) for _ in range(2))
    self.p = tt.alloc_fragment(self.logits.shape, q.dtype)
    self.top, self.total, self.alpha = (tt.alloc_fragment((q.shape[0],), F32) for _ in range(3))
    self.acc[...], self.top[...], self.total[...], self.alpha[...] = 0, -1e30, 0, 1
    tt.copy(q, self.q_s)

  def scores(self, j):
    tt.copy(self.k.at[tt.block(j, self.n), :], self.k_s)
    tt.gemm(self.q_s, self.k_s.T, self.logits, accumulate=False)

  def softmax(self, p=None):
    logits = self.logits[...]
    new = tt.maximum(self.top[...], tt.max(logits, axis=1))
    self.alpha[...] = tt.exp2(self.top[...] - new)
    e = tt.exp2(logits - new[:, None])
    self.total[...] = self.total[...] * self.alpha[...] + tt.sum(e, axis=1)
    self.top[...] = new
    p = self.p if p is None else p
    p[...] = e.astype(p.dtype)

  def mask(self, j, stop):
    with tt.when((j + 1) * self.n > stop):
      self.logits[...] = tt.where((j * self.n + tt.arange(self.n) < stop)[None, :], self.logits[...], -1e30)

  def rescale(self):
    self.acc[...] *= self.alpha[:, None]

  def weigh(self, j, p=None):
    tt.copy(self.v.at[tt.block(j, self.n), :], self.v_s)
    tt.gemm(self.p if p is None else p, self.v_s, self.acc)

  def result(self):
    return self.acc[...] / self.total[:, None]


def fa2(q, k, v, span, o, *, stages=2):
  """Program order: the weighted values of a block stay in flight until the next block's scores are read."""
  a = Attention(q, k, v)
  for j in tt.pipelined(span[0], span[1], num_stages=stages):
    a.scores(j)
    a.softmax()
    a.rescale()
    a.weigh(j)
  o[...] = a.result()


def fa2_masked(q, k, v, span, o, *, stages=2):
  a = Attention(q, k, v)
  for j in tt.pipelined(span[0], span[1], num_stages=stages):
    a.scores(j)
    a.mask(j, span[2])
    a.softmax()
    a.rescale()
    a.weigh(j)
  o[...] = a.result()


def fa3(q, k, v, span, o, *, stages=2, masked=False):
  """Rotated: the scores of a block and the weighted values of the one before are in flight together."""
  a = Attention(q, k, v)
  a.scores(span[0])
  if masked:
    a.mask(span[0], span[2])
  a.softmax()
  for j in tt.pipelined(span[0] + 1, span[1], num_stages=stages):
    a.scores(j)
    a.rescale()
    a.weigh(j - 1)
    if masked:
      a.mask(j, span[2])
    a.softmax()
  a.rescale()
  a.weigh(span[1] - 1)
  o[...] = a.result()


def siblings(q, k, v, span, o, *, stages=2):
  """Two loops push to the same rings: blocks that all see, then the one at the edge under a mask."""
  a = Attention(q, k, v)
  inside = tt.clip(span[2] // a.n, span[0], span[1])
  for j in tt.pipelined(span[0], inside, num_stages=stages):
    a.scores(j)
    a.softmax()
    a.rescale()
    a.weigh(j)
  for j in tt.pipelined(inside, span[1], num_stages=stages):
    a.scores(j)
    a.mask(j, span[2])
    a.softmax()
    a.rescale()
    a.weigh(j)
  o[...] = a.result()


def by_two(q, k, v, span, o, *, stages=2):
  """Two blocks an iteration, with a P for each. span[1] - span[0] is even."""
  a = Attention(q, k, v)
  p2 = tt.alloc_fragment(a.p.shape, q.dtype)
  for j in tt.pipelined(span[0] // 2, span[1] // 2, num_stages=stages):
    for i, p in enumerate((a.p, p2)):
      a.scores(2 * j + i)
      a.softmax(p=p)
      a.rescale()
      a.weigh(2 * j + i, p=p)
  o[...] = a.result()


def zero_first(q, k, v, span, o, *, stages=2):
  """Rotated without a prologue: the first P is zero, and so is what it weighs."""
  a = Attention(q, k, v)
  a.p[...] = 0
  for j in tt.pipelined(span[0], span[1], num_stages=stages):
    a.scores(j)
    a.rescale()
    a.weigh(tt.maximum(j - 1, span[0]))
    a.softmax()
  a.rescale()
  a.weigh(span[1] - 1)
  o[...] = a.result()


def nested(q, k, v, span, o, *, stages=2):
  """All keys twice, which leaves the mean as it is."""
  a = Attention(q, k, v)
  for _ in tt.range(2):
    for j in tt.pipelined(span[0], span[1], num_stages=stages):
      a.scores(j)
      a.softmax()
      a.rescale()
      a.weigh(j)
  o[...] = a.result()


def chunks(q, k, v, span, o, *, stages=2):
  """Keys in two halves along the head dimension, each a ring of its own."""
  a = Attention(q, k, v)
  half = a.n // 2
  parts = [(tt.alloc_shared((q.shape[0], half), q.dtype), tt.alloc_shared((a.n, half), q.dtype)) for _ in range(2)]
  for i, (q_s, _) in enumerate(parts):
    tt.copy(q.at[:, tt.block(i, half)], q_s)
  for j in tt.pipelined(span[0], span[1], num_stages=stages):
    for i, (q_s, k_s) in enumerate(parts):
      tt.copy(k.at[tt.block(j, a.n), tt.block(i, half)], k_s)
      tt.gemm(q_s, k_s.T, a.logits, accumulate=i > 0)
    a.softmax()
    a.rescale()
    a.weigh(j)
  o[...] = a.result()


def read_after(q, k, v, span, o, *, stages=2):
  """One more block after the loop, through the same rings."""
  a = Attention(q, k, v)
  for j in tt.pipelined(span[0], span[1] - 1, num_stages=stages):
    a.scores(j)
    a.softmax()
    a.rescale()
    a.weigh(j)
  a.scores(span[1] - 1)
  a.softmax()
  a.rescale()
  a.weigh(span[1] - 1)
  o[...] = a.result()


@dataclasses.dataclass(frozen=True)
class Shape:
  """A loop, and the depths of its waits in program order."""
  kernel: Callable[..., None]
  waits: tuple[int, ...]
  least: int = 1            # blocks
  masked: bool = False
  static: dict[str, Any] = dataclasses.field(default_factory=dict)


SHAPES = {
    "fa2": Shape(fa2, (0, 0)),
    "fa2-mask": Shape(fa2_masked, (0, 0), masked=True),
    "fa2-one-slot": Shape(fa2, (0, 0), static={"stages": 1}),
    "fa3": Shape(fa3, (0, 1, 0, 0)),
    "fa3-mask": Shape(fa3, (0, 1, 0, 0), masked=True, static={"masked": True}),
    "fa3-one-slot": Shape(fa3, (0, 1, 0, 0), static={"stages": 1}),
    "siblings": Shape(siblings, (0, 0, 0, 0), masked=True),
    "by-two": Shape(by_two, (0, 1, 0, 0), least=2),
    "by-two-one-slot": Shape(by_two, (0, 1, 0, 0), least=2, static={"stages": 1}),
    "zero-first": Shape(zero_first, (0, 1, 0, 0)),
    "nested": Shape(nested, (0, 0)),
    "chunks": Shape(chunks, (0, 0)),
    "read-after": Shape(read_after, (0, 0, 0, 0)),
}


@functools.cache
def lowered(name: str, rows: int = N, n: int = N) -> Lowered:
  shape = SHAPES[name]
  types = [struct(m, n, dtype=BF16) for m in (rows, 8 * n, 8 * n)] + [struct(3, dtype=I32)]
  return lower(shape.kernel, types, struct(rows, n), static=shape.static, warpgroups=rows // N)


def waits(text: str) -> list[int]:
  return [int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+);", text)]


def reference(q, k, v, start, stop):
  q, k, v = (x.astype(np.float64) for x in (q, k[start:stop], v[start:stop]))
  logits = q @ k.T
  p = np.exp2(logits - logits.max(1, keepdims=True))
  return p @ v / p.sum(1, keepdims=True)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("rows", "n"), [(64, 64), (128, 128)])
def test_a_shape_waits_as_deep_as_it_can_and_ptxas_keeps_it_asynchronous(name, rows, n):
  assert waits(lowered(name, rows, n).as_text("ptx")) == list(SHAPES[name].waits)
  cubin = assemble(lowered(name, rows, n))
  assert not [w for w in cubin.warnings if "C75" in w]


@pytest.mark.parametrize("name", SHAPES)
def test_the_machine_code_of_a_shape_waits_where_the_ptx_does(name):
  try:
    text = sass(assemble(lowered(name, 128, 128)))
  except AssembleError as e:
    pytest.skip(str(e).splitlines()[0])
  found = [int(n, 16) for n in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", text)]
  assert sorted(found) == sorted(SHAPES[name].waits)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_shape_gives_the_attention_of_the_blocks_that_it_walks(name, blocks):
  shape = SHAPES[name]
  blocks = max(2, blocks // 2 * 2) if shape.least == 2 else blocks
  rng = np.random.default_rng(blocks)
  q, k = ((rng.standard_normal((n, N)) * 0.3).astype(BF16) for n in (N, 8 * N))
  v = (rng.random((8 * N, N)) + 0.5).astype(BF16)                   # nothing cancels
  first = 2
  stop = (first + blocks) * N - (17 if shape.masked else 0)
  want = reference(q, k, v, first * N, stop)
  for seed in range(2):
    (got,) = lowered(name).simulate(q, k, v, np.asarray([first, first + blocks, stop], np.int32), seed=seed)
    assert_close(np.asarray(got).astype(BF16), want, "gemm")


def test_each_ring_is_released_when_its_own_reader_is_complete():
  """The keys when the logits are there, the values before, which were in flight over the back edge."""
  program = lowered("fa2").lowering.program.graph
  (loop,) = [e for e in walk(program.body) if e.primitive.name == "for_loop" and any(
      i.primitive.name == "gemm_async" for i in e.blocks[0].eqns)]
  order = [e.primitive.name for e in loop.blocks[0].eqns if e.primitive.name in (
      "barrier_wait", "gemm_async", "wgmma_wait", "barrier_arrive") or (e.primitive.name == "cond" and any(
          i.primitive.name == "barrier_arrive" for i in e.blocks[0].eqns))]
  assert order == ["barrier_wait", "gemm_async", "wgmma_wait", "cond", "barrier_arrive", "barrier_wait", "gemm_async"]


def product(a, b, span, c, *, by_two, stages):
  """c = a[:, blocks] @ b[blocks]."""
  a_s, b_s = tt.alloc_shared((N, N), a.dtype), tt.alloc_shared((N, N), b.dtype)
  acc = tt.alloc_fragment((N, N), F32)
  acc[...] = 0
  for k in tt.pipelined(span[0], span[1], num_stages=stages):
    for i in range(1 + by_two):
      at = tt.block((1 + by_two) * k + i, N)
      tt.copy(a.at[:, at], a_s)
      tt.copy(b.at[at, :], b_s)
      tt.gemm(a_s, b_s, acc)
  c[...] = acc[...]


@pytest.mark.parametrize("trips", [0, 1, 3])
@pytest.mark.parametrize(("by_two", "stages", "depths"), [
  (False, 3, [1, 0]), (True, 4, [2, 0]), (True, 3, [1, 0]), (True, 1, [0, 0]), (False, 1, [0])])
def test_of_a_product_the_groups_of_an_iteration_are_always_in_flight(trips, by_two, stages, depths):
  """Two pushes an iteration need four slots for that; with one slot each gemm waits for itself."""
  rng = np.random.default_rng(trips)
  a, b = rng.standard_normal((N, 8 * N)).astype(BF16), rng.standard_normal((8 * N, N)).astype(BF16)
  types = [struct(*a.shape, dtype=BF16), struct(*b.shape, dtype=BF16), struct(2, dtype=I32)]
  low = lower(product, types, struct(N, N), static={"by_two": by_two, "stages": stages})
  assert waits(low.as_text("ptx")) == depths
  assert not [w for w in assemble(low).warnings if "C75" in w]
  start, stop = ((1 + by_two) * k * N for k in (1, 1 + trips))
  for seed in range(2):
    (got,) = low.simulate(a, b, np.asarray([1, 1 + trips], np.int32), seed=seed)
    assert_close(got, a[:, start:stop].astype(np.float64) @ b[start:stop].astype(np.float64), "gemm")


# ---- lost overlaps


def lines(kernel: Any, *texts: str) -> list[str]:
  """Where the lines of this file's functions with these texts are, as notes say it."""
  source = pathlib.Path(__file__).read_text().splitlines()
  first = inspect.getsourcelines(kernel)[1] - 1
  return [f"{pathlib.Path(__file__).name}:{next(i for i in range(first, len(source)) if t in source[i]) + 1}"
          for t in texts]


def lost(low: Lowered) -> list[str]:
  return [line.strip().removeprefix("# ") for line in low.as_text("schedule").splitlines() if "lost overlap" in line]


def test_of_program_order_the_report_says_what_is_waited_for_without_need():
  gemm, read, p, later = lines(Attention, "tt.gemm(self.q_s", "logits = self.logits", "p[...] = e", "tt.gemm(self.p")
  assert lost(lowered("fa2")) == [f"{read}  lost overlap: the wait for the gemm at {gemm} also waits for the one at "
                                  f"{later}, which {p} is the first to need"]
  assert lost(lowered("fa2"))[0] in lowered("fa2").report()


@pytest.mark.parametrize("name", ["fa3", "fa3-mask", "zero-first"])
def test_the_rotated_order_loses_no_overlap(name):
  assert lost(lowered(name)) == []


def latent(q, c, o, *, stages):
  """Keys that are the values, too: one ring."""
  q_s, c_s = tt.alloc_shared((N, N), q.dtype), tt.alloc_shared((N, N), q.dtype)
  logits, acc = tt.alloc_fragment((N, N), F32), tt.alloc_fragment((N, N), F32)
  acc[...] = 0
  tt.copy(q, q_s)
  for j in tt.pipelined(c.shape[0] // N, num_stages=stages):
    tt.copy(c.at[tt.block(j, N), :], c_s)
    tt.gemm(q_s, c_s.T, logits, accumulate=False)
    tt.gemm(tt.maximum(logits[...], 0).astype(q.dtype), c_s, acc)
  o[...] = acc[...]


@pytest.mark.parametrize(("stages", "round_trip"), [(1, False), (2, False), (3, True)])
def test_a_slot_is_held_over_the_back_edge_where_the_producer_has_another_one(stages, round_trip):
  rng = np.random.default_rng(stages)
  q, c = ((rng.random((n, N)) - 0.2).astype(BF16) for n in (N, 5 * N))
  low = lower(latent, [struct(*x.shape, dtype=BF16) for x in (q, c)], struct(N, N), static={"stages": stages})
  loop, gemm = lines(latent, "tt.pipelined", "tt.gemm(tt.maximum")
  held = [x for x in lost(low) if "at the end of each iteration" in x]
  assert held == ([] if round_trip else [
      f"{loop}  lost overlap: the gemm at {gemm} is waited for at the end of each iteration: its slot is needed for "
      "what is copied next (a larger num_stages)"])
  assert not [w for w in assemble(low).warnings if "C75" in w]
  wide = [x.astype(np.float64) for x in (q, c)]
  want = np.maximum(wide[0] @ wide[1].T, 0) @ wide[1]
  for seed in range(2):
    (got,) = low.simulate(q, c, seed=seed)
    assert_close(np.asarray(got).astype(BF16), want, "gemm")


def test_a_gemm_in_a_branch_is_waited_for_in_it():
  def kernel(a, b, flag, c):
    a_s, b_s = tt.alloc_shared((N, N), a.dtype), tt.alloc_shared((N, N), b.dtype)
    acc = tt.alloc_fragment((N, N), F32)
    acc[...] = 0
    tt.copy(a, a_s)
    for k in tt.pipelined(b.shape[0] // N, num_stages=2):
      tt.copy(b.at[tt.block(k, N), :], b_s)
      with tt.when(flag[k] > 0):
        tt.gemm(a_s, b_s, acc)
    c[...] = acc[...]

  low = lower(kernel, [struct(N, N, dtype=BF16), struct(4 * N, N, dtype=BF16), struct(4, dtype=I32)], struct(N, N))
  branch, gemm = lines(kernel, "with tt.when", "tt.gemm")
  assert lost(low) == [f"{branch}  lost overlap: the gemm at {gemm} is waited for at the end of its branch"]
  assert not [w for w in assemble(low).warnings if "C75" in w]


@pytest.mark.parametrize(("warpgroups", "stays"), [(2, True), (4, False)])
def test_a_gemm_whose_operand_takes_the_registers_of_the_next_one_is_waited_for(warpgroups, stays):
  """With four consumers a thread has 112: C7512 otherwise."""
  rows = 64 * warpgroups

  def kernel(q, k, v, o):
    q_s, k_s, v_s = (tt.alloc_shared((n, 64), BF16) for n in (rows, 96, 96))
    s, acc = tt.alloc_fragment((rows, 96), F32), tt.alloc_fragment((rows, 64), F32)
    acc[...] = 0
    tt.copy(q, q_s)
    for j in tt.pipelined(4, num_stages=2):
      tt.copy(k.at[tt.block(j, 96), :], k_s)
      tt.copy(v.at[tt.block(j, 96), :], v_s)
      tt.gemm(q_s, k_s.T, s, accumulate=False)
      tt.gemm(tt.maximum(s[...], 0).astype(BF16), v_s, acc)
    o[...] = acc[...]

  q, k = struct(rows, 64, dtype=BF16), struct(384, 64, dtype=BF16)
  lowered = lower(kernel, [q, k, k], struct(rows, 64), warpgroups=warpgroups)
  assert lowered.compile().memory_analysis()["spill_stores"] == 0
  assert ("takes registers that the next one needs" in str(lowered.report())) == (not stays)
