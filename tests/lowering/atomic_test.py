"""Atomic operations: numbers in the simulator and as jax ops, instructions, results that several threads need."""
from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import Case
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F16, F32, I32, assemble, count, lower, struct
from tests.tracing import Out, array, trace
from tiletrace.core import dtypes
from tiletrace.core.errors import TileTypeError
from tiletrace.core.ops.atomic import OPS

U32 = np.uint32
rng = np.random.default_rng(3)
ATOMICS = {op: getattr(tt, f"atomic_{op}") for op in OPS if op != "cas"}
NUMPY = {"add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
         "xor": np.bitwise_xor, "exchange": lambda old, v: v}
DTYPES = {"add": (I32, U32, F32, F16, BF16), **dict.fromkeys(("max", "min", "exchange"), (I32, U32, F32)),
          **dict.fromkeys(("and", "or", "xor"), (I32, U32))}
PAIRS = [(op, d) for op, ds in DTYPES.items() for d in ds]


def both(call, inputs):
  """(lowered, outputs in the simulator, outputs as jax ops)."""
  lowered = call.lower(*inputs)
  assemble(lowered)
  return (lowered, simulated.run(lowered, Case(call, inputs, (), "exact")),
          [np.asarray(x) for x in jax.tree.leaves(jax.jit(call)(*inputs))])


def some(dtype, *shape):
  if np.dtype(dtype).kind in "iu":
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
  return rng.integers(-8, 9, shape).astype(dtype)                # sums that are exact in any order


def update_kernel(a, x, idx, o, *, atomic, returns):
  """Every program changes all of o, rows by index, and one of its elements."""
  i = tt.program_id(0)
  r = tt.block(i, 4)
  atomic(o.at[...], x[...])
  atomic(o.at[tt.load(idx.at[r], fill_value=-1), :], x[r, :])
  atomic(o.at[3, 5], x[i, 0])


@pytest.mark.parametrize(("op", "dtype"), [p for p in PAIRS if p[0] != "exchange"], ids=str)
def test_every_operation_with_every_dtype_is_done_once_an_element(op, dtype):
  a, x = some(dtype, 10, 24), some(dtype, 10, 24)
  idx = np.array([0, 3, -1, 10, 3, 3, 9, 0, 2**31 - 1, 7], I32)
  call = tt.tile_call(functools.partial(update_kernel, atomic=ATOMICS[op], returns=False),
                      struct(10, 24, dtype=dtype), grid=3, input_output_aliases={0: 0})
  lowered, sim, xla = both(call, (a, x, idx))
  f = NUMPY[op]
  want = a.astype(F32) if np.dtype(dtype).kind not in "iu" else a.copy()
  with np.errstate(over="ignore"):
    for i in range(3):
      want = f(want, x.astype(want.dtype))
      for j in range(4 * i, min(4 * i + 4, 10)):
        if 0 <= idx[j] < 10:
          want[idx[j]] = f(want[idx[j]], x[j].astype(want.dtype))
      want[3, 5] = f(want[3, 5], x[i, 0].astype(want.dtype))
  for got in (sim[0], xla[0]):
    np.testing.assert_array_equal(got, want.astype(dtype))
  assert count(lowered, "red") > 0 and count(lowered, "atom") == 0


def test_neighbouring_floats_are_added_together():
  def kernel(x, o):
    tt.atomic_add(o.at[...], x[...])

  def reds(dtype, columns):
    return lower(kernel, [struct(16, columns, dtype=dtype)], struct(16, columns, dtype=dtype))

  assert count(reds(F32, 64), "red.relaxed.gpu.global.add.v4.f32") == 2
  assert count(reds(F32, 34), "red.relaxed.gpu.global.add.v2.f32") > 0
  assert count(reds(BF16, 64), "red.relaxed.gpu.global.add.noftz.bf16x2") == 4
  assert count(reds(F16, 33), "red.relaxed.gpu.global.add.noftz.f16 ") > 0
  assert count(reds(I32, 64), "red.relaxed.gpu.global.add.s32") == 8


@pytest.mark.parametrize(("op", "dtype"), PAIRS, ids=str)
def test_old_values_are_those_before(op, dtype):
  """Distinct elements, in one program: no order to choose."""
  a, x = some(dtype, 8, 40), some(dtype, 8, 40)
  idx = np.array([5, 8, 1, -4, 0, 7], I32)

  def kernel(a, x, idx, o, old, rows):
    old[...] = ATOMICS[op](o.at[...], x[...])
    rows[...] = ATOMICS[op](o.at[idx[...], :], x[0:6, :])

  call = tt.tile_call(kernel, tuple(struct(*s, dtype=dtype) for s in ((8, 40), (8, 40), (6, 40))), grid=1,
                      input_output_aliases={0: 0})
  _, sim, xla = both(call, (a, x, idx))
  f, wide = NUMPY[op], F32 if np.dtype(dtype).kind not in "iu" else dtype
  with np.errstate(over="ignore"):
    now = f(a.astype(wide), x.astype(wide)).astype(dtype)
    inside = (idx >= 0) & (idx < 8)
    rows = np.where(inside[:, None], now[idx.clip(0, 7)], np.zeros((), dtype))
    end = now.copy()
    end[idx[inside]] = f(now[idx[inside]].astype(wide), x[:6][inside].astype(wide)).astype(dtype)
  for got in (sim, xla):
    for g, w in zip(got, (end, a, rows), strict=True):
      np.testing.assert_array_equal(g, w)


def test_every_program_gets_a_number_of_its_own():
  def kernel(c, count_, order):
    ticket = tt.atomic_add(count_.at[0], 1)
    order[ticket, :] = tt.program_id(0) + tt.zeros((8,), I32)

  call = tt.tile_call(kernel, (struct(1, dtype=I32), struct(7, 8, dtype=I32)), grid=7, warpgroups=2,
                      input_output_aliases={0: 0})
  lowered, sim, xla = both(call, (np.zeros(1, I32),))
  assert sim[0][0] == xla[0][0] == 7
  assert sorted(sim[1][:, 0].tolist()) == list(range(7)) and (sim[1] == sim[1][:, :1]).all()
  assert count(lowered, "atom.relaxed.gpu.global.add.s32") == 1
  assert "its result, which several threads need, goes through shared memory" in lowered.as_text("schedule")


def test_few_elements_are_changed_once_although_many_threads_hold_them():
  def kernel(c, o, old):
    old[...] = tt.atomic_add(o.at[...], tt.arange(3) + 1)

  call = tt.tile_call(kernel, (struct(3, dtype=I32),) * 2, grid=1, warpgroups=2, input_output_aliases={0: 0})
  _, sim, xla = both(call, (np.array([5, 6, 7], I32),))
  for got in (sim, xla):
    assert [x.tolist() for x in got] == [[6, 8, 10], [5, 6, 7]]


def test_a_histogram_counts_every_element():
  def kernel(zero, x, h):
    r = tt.block(tt.program_id(0), 256)
    tt.atomic_add(h.at[tt.load(x.at[r], fill_value=-1)], 1)

  x = rng.integers(-2, 18, 1000).astype(I32)
  call = tt.tile_call(kernel, struct(16, dtype=I32), grid=4, input_output_aliases={0: 0})
  _, sim, xla = both(call, (np.zeros(16, I32), x))
  want = np.bincount(x[(x >= 0) & (x < 16)], minlength=16)
  np.testing.assert_array_equal(sim[0], want)
  np.testing.assert_array_equal(xla[0], want)


def test_extrema_of_floats_are_right_for_every_pair_of_signs():
  v = np.array([0.5, -0.5, 3, -3, np.inf, -np.inf, 1e-40, -1e-40, 2, -2], F32)
  a, x = (np.ascontiguousarray(m.ravel()) for m in np.meshgrid(v, v))

  def kernel(a, b, x, high, low, old):
    tt.atomic_max(high.at[...], x[...])
    old[...] = tt.atomic_min(low.at[...], x[...])

  call = tt.tile_call(kernel, (struct(100),) * 3, grid=1, input_output_aliases={0: 0, 1: 1})
  _, sim, _ = both(call, (a, a, x))
  for got, want in zip(sim, (np.maximum(a, x), np.minimum(a, x), a), strict=True):
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [I32, U32, F32])
def test_cas_stores_where_the_bits_are_equal(dtype):
  def kernel(a, x, y, o, old):
    old[...] = tt.atomic_cas(o.at[...], x[...], y[...])

  a, y = some(dtype, 64), some(dtype, 64)
  x = np.where(rng.random(64) < 0.5, a, some(dtype, 64))
  if dtype is F32:
    a[:2], x[:2] = [0.0, np.nan], [-0.0, np.nan]
  call = tt.tile_call(kernel, (struct(64, dtype=dtype),) * 2, grid=1, input_output_aliases={0: 0})
  _, sim, xla = both(call, (a, x, y))
  want = np.where(a.view(U32) == x.view(U32), y, a)
  for got in (sim, xla):
    np.testing.assert_array_equal(got[0], want)
    np.testing.assert_array_equal(got[1], a)


def test_masks_and_edges_leave_elements_alone():
  def kernel(a, o, old):
    r = tt.ds(5, 16)
    keep = tt.arange(16) % 3 == 0
    old[...] = tt.atomic_add(o.at[r], 10, mask=keep)

  a = np.arange(12, dtype=I32)
  call = tt.tile_call(kernel, (struct(12, dtype=I32), struct(16, dtype=I32)), grid=1, input_output_aliases={0: 0})
  _, sim, xla = both(call, (a,))
  want = a.copy()
  want[[5, 8, 11]] += 10
  for got in (sim, xla):
    np.testing.assert_array_equal(got[0], want)
    assert got[1].tolist() == [5, 0, 0, 8, 0, 0, 11] + [0] * 9


def test_sums_in_a_loop_need_no_syncs_but_what_reads_them_does():
  def kernel(zero, x, o, y):
    for k in tt.range(4):
      tt.atomic_add(o.at[x[tt.block(k, 128)]], 1)
      tt.atomic_add(o.at[3], k)

  def reading(zero, x, o, y):
    kernel(zero, x, o, y)
    y[...] = o[...]

  structs = [struct(64, dtype=I32), struct(512, dtype=I32)]
  for f, syncs in ((kernel, 0), (reading, 1)):
    def both_outputs(zero, x, o, y, f=f):
      y[...] = 0
      f(zero, x, o, y)

    lowered = lower(both_outputs, structs, (struct(64, dtype=I32),) * 2, input_output_aliases={0: 0})
    assert (count(lowered, "bar.sync") > 0) == bool(syncs)


def test_order_and_scope_are_in_the_instruction():
  def kernel(a, o, old):
    tt.atomic_add(o.at[...], 1, sem="release", scope="sys")
    tt.atomic_add(o.at[...], 1, sem="acquire", scope="cta")
    old[...] = tt.atomic_max(o.at[...], 1, sem="acq_rel", scope="cluster")

  lowered = lower(kernel, [struct(128, dtype=I32)], (struct(128, dtype=I32),) * 2, input_output_aliases={0: 0})
  assert [count(lowered, i) for i in ("red.release.sys.global.add.s32", "atom.acquire.cta.global.add.s32",
                                      "atom.acq_rel.cluster.global.max.s32")] == [1, 1, 1]
  assemble(lowered)


def test_a_sum_over_a_loop_needs_no_zeroing_between_programs():
  """Split-k: programs add what they have of one tile."""
  def kernel(zero, a, b, c, *, bk):
    a_s, b_s = tt.alloc_shared((64, bk), a.dtype), tt.alloc_shared((bk, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), F32)
    acc[...] = 0
    for k in tt.pipelined(2, num_stages=2):
      block = tt.block(tt.program_id(0) * 2 + k, bk)
      tt.copy(a.at[:, block], a_s)
      tt.copy(b.at[block, :], b_s)
      tt.gemm(a_s, b_s, acc)
    tt.atomic_add(c.at[...], acc[...])

  a, b = rng.integers(-3, 4, (64, 192)).astype(BF16), rng.integers(-3, 4, (192, 64)).astype(BF16)
  call = tt.tile_call(functools.partial(kernel, bk=32), struct(64, 64), grid=3, input_output_aliases={0: 0})
  lowered, sim, xla = both(call, (np.zeros((64, 64), F32), a, b))
  want = a.astype(F32) @ b.astype(F32)
  np.testing.assert_array_equal(sim[0], want)
  np.testing.assert_array_equal(xla[0], want)
  assert count(lowered, "red.relaxed.gpu.global.add.v2.f32") > 0


@pytest.mark.parametrize(("f", "message"), [
  (lambda x, y: tt.atomic_add(x.at[...], 1.0), "atomic_add to 'x', which is an input"),
  (lambda x, y: tt.atomic_and(y.at[...], 1.0), "atomic_and of f32: the hardware has it for i32, u32"),
  (lambda x, y: tt.atomic_add(tt.alloc_shared((8,), F32), 1.0), "only global memory has atomics here"),
  (lambda x, y: tt.atomic_add(y[...], 1.0), r"atomic_add: ref is f32\[8\], not a reference"),
  (lambda x, y: tt.atomic_add(y.at[...], tt.arange(8)), "atomic_add of i32 into y"),
  (lambda x, y: tt.atomic_add(y.at[...], tt.zeros((7,))), r"atomic_add: value of shape \[7\] does not fit \[8\]"),
  (lambda x, y: tt.atomic_add(y.at[...], 1.0, sem="seq_cst"), "atomic_add: sem is 'seq_cst'"),
  (lambda x, y: tt.atomic_exchange(y.at[...], 1.0, scope="world"), "atomic_exchange: scope is 'world'"),
  (lambda x, y: tt.atomic_add(y.at[...], 1.0, mask=x[...]), "mask is f32"),
])
def test_what_has_no_atomic_is_refused_at_its_line(f, message):
  def kernel(x, y):
    f(x, y)

  with pytest.raises(TileTypeError, match=message) as e:
    trace(kernel, grid=(1,), x=array(dtypes.f32, 8), y=Out(array(dtypes.f32, 8)))
  assert "atomic_test.py" in str(e.value) and "^" in str(e.value)
