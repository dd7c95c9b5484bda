"""tt.step: steps of an iteration that run one iteration apart, against running one after the other."""
from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, I32, assemble, lower, struct
from tests.tolerances import assert_close
from tiletrace.core.errors import ControlFlowError

N = 64


class Attention:
  """The parts of an attention over blocks of N keys; base 2, unscaled logits."""

  def __init__(self, q, k, v):
    self.k, self.v = k, v
    self.q_s, self.k_s, self.v_s = (tt.alloc_shared((N, N), q.dtype) for _ in range(3))
    self.logits, self.acc = (tt.alloc_fragment((N, N), F32) for _ in range(2))
    self.p = tt.alloc_fragment((N, N), q.dtype)
    self.top, self.total, self.alpha = (tt.alloc_fragment((N,), F32) for _ in range(3))
    self.acc[...], self.top[...], self.total[...], self.alpha[...] = 0, -1e30, 0, 1
    tt.copy(q, self.q_s)

  def scores(self, rows):
    tt.copy(self.k.at[rows, :], self.k_s)
    tt.gemm(self.q_s, self.k_s.T, self.logits, accumulate=False)

  def softmax(self):
    logits = self.logits[...]
    new = tt.maximum(self.top[...], tt.max(logits, axis=1))
    self.alpha[...] = tt.exp2(self.top[...] - new)
    e = tt.exp2(logits - new[:, None])
    self.total[...] = self.total[...] * self.alpha[...] + tt.sum(e, axis=1)
    self.top[...] = new
    self.p[...] = e.astype(self.p.dtype)

  def weigh(self, rows):
    self.acc[...] *= self.alpha[:, None]
    tt.copy(self.v.at[rows, :], self.v_s)
    tt.gemm(self.p, self.v_s, self.acc)

  def result(self):
    return self.acc[...] / tt.where(self.total[...] == 0, 1, self.total[...])[:, None]


def stepped(q, k, v, span, o):
  a = Attention(q, k, v)
  for j in tt.pipelined(span[0], span[1], num_stages=2):
    rows = tt.block(j, N)
    with tt.step(0):
      a.scores(rows)
      a.softmax()
    with tt.step(1):
      a.weigh(rows)
  o[...] = a.result()


def early_copies(q, k, v, span, o):
  """Step 0 copies the values, too, which only step 1 uses."""
  a = Attention(q, k, v)
  for j in tt.pipelined(span[0], span[1], num_stages=2):
    with tt.step(0):
      rows = tt.ds(j * N, N)
      tt.copy(a.v.at[rows, :], a.v_s)
      a.scores(rows)
      a.softmax()
    with tt.step(1):
      a.acc[...] *= a.alpha[:, None]
      tt.gemm(a.p, a.v_s, a.acc)
  o[...] = a.result()


def rotated(q, k, v, span, o):
  """As an author writes it."""
  a = Attention(q, k, v)
  with tt.when(span[0] < span[1]):
    a.scores(tt.block(span[0], N))
    a.softmax()
    for j in tt.pipelined(span[0] + 1, span[1], num_stages=2):
      a.scores(tt.block(j, N))
      a.weigh(tt.block(j - 1, N))
      a.softmax()
    a.weigh(tt.block(span[1] - 1, N))
  o[...] = a.result()


TYPES = [struct(n, N, dtype=BF16) for n in (N, 8 * N, 8 * N)] + [struct(2, dtype=I32)]


def operands(blocks):
  rng = np.random.default_rng(blocks)
  q, k = ((rng.standard_normal((n, N)) * 0.3).astype(BF16) for n in (N, 8 * N))
  v = (rng.random((8 * N, N)) + 0.5).astype(BF16)                   # nothing cancels
  return q, k, v, np.asarray([2, 2 + blocks], np.int32)


def reference(q, k, v, span):
  q, k, v = (x.astype(np.float64) for x in (q, k[span[0] * N:span[1] * N], v[span[0] * N:span[1] * N]))
  if not len(k):
    return np.zeros((N, N))
  logits = q @ k.T
  p = np.exp2(logits - logits.max(1, keepdims=True))
  return p @ v / p.sum(1, keepdims=True)


@pytest.mark.parametrize("kernel", [stepped, early_copies])
@pytest.mark.parametrize("blocks", [0, 1, 2, 5])
def test_the_result_is_that_of_one_step_after_the_other(kernel, blocks):
  inputs = operands(blocks)
  want = reference(*inputs)
  call = tt.tile_call(kernel, struct(N, N), grid=1)
  assert_close(np.asarray(jax.jit(call)(*inputs)).astype(BF16), want, "gemm")
  low = call.lower(*inputs)
  for seed in range(2):
    (got,) = low.simulate(*inputs, seed=seed)
    assert_close(np.asarray(got).astype(BF16), want, "gemm")


def waits(low):
  return re.findall(r"wgmma\.(?:wait_group\.sync\.aligned \d+|commit)", low.as_text("ptx"))


@pytest.mark.parametrize("kernel", [stepped, early_copies])
def test_steps_wait_as_the_loop_that_an_author_rotates(kernel):
  low, by_hand = (lower(f, TYPES, struct(N, N)) for f in (kernel, rotated))
  assert waits(low) == waits(by_hand)
  assert [w[-1] for w in waits(low) if "wait" in w] == ["0", "1", "0", "0"]
  assert not [w for w in assemble(low).warnings if "C75" in w]
  assert "lost overlap" not in low.as_text("schedule")


def test_a_loop_that_certainly_runs_has_no_branch_around_it():
  def kernel(q, k, v, span, o):
    a = Attention(q, k, v)
    for j in tt.pipelined(8, num_stages=2):
      with tt.step(0):
        a.scores(tt.block(j, N))
        a.softmax()
      with tt.step(1):
        a.weigh(tt.block(j, N))
    o[...] = a.result()

  low = lower(kernel, TYPES, struct(N, N))
  assert "cond" not in low.as_text("trace") and "step" not in low.as_text("trace").replace("num_stages", "")
  q, k, v, _ = operands(6)
  (got,) = low.simulate(q, k, v, np.zeros(2, np.int32))
  assert_close(np.asarray(got).astype(BF16), reference(q, k, v, (0, 8)), "gemm")


# ---- refusals


def refused(body, *lines):
  def kernel(q, k, v, span, o):
    a = Attention(q, k, v)
    body(a, span)
    o[...] = a.result()

  with pytest.raises(ControlFlowError) as e:
    lower(kernel, TYPES, struct(N, N))
  return str(e.value)


def test_step_0_may_not_begin_with_what_step_1_still_reads():
  def body(a, span):
    for j in tt.pipelined(span[0], span[1], num_stages=2):
      with tt.step(0):
        a.scores(tt.block(j, N))
      with tt.step(1):
        a.softmax()
        a.weigh(tt.block(j, N))

  said = refused(body)
  assert "step 0 cannot start before step 1 of the iteration before" in said
  assert "tt.gemm(self.q_s, self.k_s.T, self.logits, accumulate=False)" in said and "step 1 uses it at" in said


@pytest.mark.parametrize("indices", [(0,), (1,), (1, 0), (0, 0), (0, 1, 1)])
def test_the_steps_are_0_and_1_once_each(indices):
  def body(a, span):
    for j in tt.pipelined(span[0], span[1], num_stages=2):
      for i in indices:
        with tt.step(i):
          a.scores(tt.block(j, N))

  assert f"the steps of this loop are {', '.join(map(str, indices))}" in refused(body)


@pytest.mark.parametrize("index", [2, -1, True, "0"])
def test_there_is_no_other_step(index):
  def body(a, span):
    for _ in tt.pipelined(span[0], span[1], num_stages=2):
      with tt.step(index):
        a.softmax()

  assert "the steps are 0 and 1" in refused(body)


def test_a_step_stands_directly_in_a_pipelined_loop():
  def in_branch(a, span):
    for j in tt.pipelined(span[0], span[1], num_stages=2):
      with tt.when(j > 0), tt.step(0):
        a.scores(tt.block(j, N))

  def in_range(a, span):
    for j in tt.range(span[0], span[1]):
      with tt.step(0):
        a.scores(tt.block(j, N))

  def alone(a, span):
    with tt.step(0):
      a.softmax()

  assert "tt.step stands in `with tt.when`" in refused(in_branch)
  assert "tt.step stands in tt.range" in refused(in_range)
  assert "tt.step stands in no loop" in refused(alone)


def test_what_belongs_to_no_step_is_computed_from_the_index_alone():
  def body(a, span):
    for j in tt.pipelined(span[0], span[1], num_stages=2):
      with tt.step(0):
        a.scores(tt.block(j, N))
        a.softmax()
      a.total[...] += 1
      with tt.step(1):
        a.weigh(tt.block(j, N))

  said = refused(body)
  assert "stands beside the steps of the loop" in said and "a.total[...] += 1" in said


def test_a_value_does_not_pass_from_one_step_to_the_other():
  def kernel(q, k, v, span, o):
    a = Attention(q, k, v)
    for j in tt.pipelined(span[0], span[1], num_stages=2):
      with tt.step(0):
        a.scores(tt.block(j, N))
        x = a.logits[...] * 2
      with tt.step(1):
        a.acc[...] += x
    o[...] = a.result()

  with pytest.raises(tt.TileTraceError) as e:
    lower(kernel, TYPES, struct(N, N))
  assert "a.acc[...] += x" in str(e.value)
