"""tt.prefetch: which bytes, by how many instructions, before which wait, and what it is not for."""
from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import tiletrace as tt
from tests.lowering.kernels import BF16, struct
from tiletrace.core.errors import TileTypeError
from tiletrace.core.graph import walk
from tiletrace.core.ops.prefetch import prefetch_p
from tiletrace.lowering.ptx import isa
from tiletrace.sim.access import global_addresses
from tiletrace.sim.tables import EFFECTS

OVERLAP = tt.CompileOptions(overlap_launch=True)


def rows_kernel(w, y, *, rows, columns, grid):
  i, j = tt.program_id(0), tt.program_id(1)
  tt.prefetch(w.at[tt.block(i, rows), tt.block(j, columns)])
  y[tt.block(i * grid + j, 1)] = tt.full((1,), 1, jnp.float32)


def sums_kernel(w, y, *, late):
  """`late`: the prefetch stands behind a load."""
  i = tt.program_id(0)
  first = w[i * 16, 0] if late else 0
  tt.prefetch(w.at[tt.block(i, 16), :])
  s = tt.alloc_shared((16, 64), w.dtype)
  tt.copy(w.at[tt.block(i, 16), :], s)
  y[tt.block(i, 16)] = tt.sum(s[...].astype(jnp.float32), axis=1) + first


def call_of(shape, dtype, rows, columns):
  grid = tuple(map(tt.cdiv, shape, (rows, columns)))
  kernel = functools.partial(rows_kernel, rows=rows, columns=columns, grid=grid[1])
  return tt.tile_call(kernel, struct(grid[0] * grid[1]), grid=grid, options=OVERLAP, name="rows")


def fetched(lowered, w, monkeypatch):
  """(how often each byte of w is asked for in the simulator, the instructions' sizes)"""
  times, sizes = np.zeros(w.nbytes, int), []
  known = EFFECTS[isa.BULK_PREFETCH]

  def recording(m, op):
    names, checked = [s.name for s in op.inst.form.slots], known(m, op)
    at = names.index("size")
    size, find = m.registers.source(op.inst.operands[at], op.inst.form.slots[at]), global_addresses(m, op, "src")

    def act(s, threads, at):
      checked(s, threads, at)
      for t in threads.tolist():
        one = slice(t, t + 1)
        start, n = int(find(np.array([t]), one)[0]) - m.memory.arrays[0].address, int(size[one][0])
        times[start:start + n] += 1
        sizes.append(n)
    return act

  monkeypatch.setitem(EFFECTS, isa.BULK_PREFETCH, recording)
  lowered.simulate(w)
  return times, sizes


@pytest.mark.parametrize(("shape", "dtype", "rows", "columns", "nbytes"), [
  ((64, 32), BF16, 16, 32, 16 * 64),            # whole rows are side by side
  ((64, 64), BF16, 16, 32, 64),                 # pieces of rows
  ((40, 64), np.float32, 16, 64, 256),          # the last rows lie outside: row by row, as far as there are some
  ((7, 8), BF16, 4, 8, 16),
  ((512, 16), np.int8, 512, 16, 8192),
  ((1 << 11, 1 << 10), np.int8, 1 << 11, 1 << 10, 1 << 10),      # all of it is more than an instruction takes
], ids=str)
def test_each_byte_of_the_array_is_asked_for_once(shape, dtype, rows, columns, nbytes, monkeypatch):
  w = np.ones(shape, dtype)
  lowered = call_of(shape, dtype, rows, columns).lower(w)
  assert [c.variant for c in lowered.choices if c.op == "prefetch"] == ["bulk"]
  times, sizes = fetched(lowered, w, monkeypatch)
  assert (times == 1).all() and set(sizes) == {nbytes}


@pytest.mark.parametrize(("shape", "dtype", "rows", "columns", "reason"), [
  ((64, 40), BF16, 16, 16, "have 2 bytes, not a multiple of 16"),            # the last columns lie outside
  ((64, 36), BF16, 16, 12, "have 24 bytes, not a multiple of 16"),
  ((64, 36), BF16, 16, 24, "have 2 bytes"),
  ((2, 1 << 20), np.int8, 1, 1 << 20, "1048576 bytes lie side by side, an instruction fetches 1048560 at most"),
  ((48, 12), BF16, 3, 12, "have 72 bytes"),
], ids=str)
def test_a_view_without_runs_of_16_bytes_is_left_out_and_the_report_says_why(shape, dtype, rows, columns, reason):
  lowered = call_of(shape, dtype, rows, columns).lower(np.ones(shape, dtype))
  (choice,) = [c for c in lowered.choices if c.op == "prefetch"]
  assert choice.variant == "none" and reason in str(choice)
  assert "cp.async.bulk.prefetch" not in lowered.as_text("ptx")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_runs_of_a_view_are_its_bytes(data):
  """Of any view with static places: runs from their first elements on cover the view, and nothing else."""
  shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=4)))
  index = tuple(slice(lo, data.draw(st.integers(lo + 1, n))) for n, lo in (
      (n, data.draw(st.integers(0, n - 1))) for n in shape))

  def kernel(x, y):
    tt.prefetch(x.at[index])
    y[...] = 0

  lowered = tt.tile_call(kernel, struct(1), grid=1).lower(struct(*shape))
  (eqn,) = [e for e in walk(lowered.lowering.program.graph.body) if e.primitive is prefetch_p]
  (choice,) = [c for c in lowered.choices if c.op == "prefetch"]
  places = np.arange(np.prod(shape)).reshape(shape)
  wanted = set(places[index].reshape(-1).tolist())
  if choice.variant == "bulk":
    starts = places[tuple(slice(d.start, d.start + d.size) for d in eqn.refs[0].view.dims)].reshape(-1)
    covered = [s + k for s in starts.tolist() for k in range(eqn.params["nbytes"] // 4)]
    assert len(covered) == len(wanted) and set(covered) == wanted and not (starts * 4 % 16).any()
  else:
    assert "16" in str(choice)


def elected_kernel(w, y):
  with tt.warpgroup(0):
    with tt.elect():
      tt.prefetch(w.at[:, 0:16])
    y[...] = tt.full((4,), 1, jnp.float32)


def test_one_elected_thread_asks_for_all_of_it(monkeypatch):
  w = np.ones((40, 32), np.float32)
  times, sizes = fetched(tt.tile_call(elected_kernel, struct(4), grid=1).lower(w), w, monkeypatch)
  assert (times.reshape(40, 32, 4) == (np.arange(32) < 16)[:, None]).all() and sizes == [64] * 40


@pytest.mark.parametrize("rows", [slice(0, 0), slice(None)])
def test_of_nothing_there_is_nothing_to_bring(rows):
  def kernel(w, y):
    tt.prefetch(w.at[rows, :])
    y[...] = 0

  w = np.ones((4 if rows.stop == 0 else 0, 64), np.float32)
  lowered = tt.tile_call(kernel, struct(1), grid=1).lower(w)
  (choice,) = [c for c in lowered.choices if c.op == "prefetch"]
  assert choice.variant == "none" and "there is nothing in it" in str(choice)
  assert lowered.simulate(w)[0] == 0


def lines_of(call, *inputs):
  text = call.lower(*inputs).as_text("ptx")
  return [line for line in text.splitlines() if "prefetch.L2" in line or "griddep" in line]


def sums(late=False, **options):
  return tt.tile_call(functools.partial(sums_kernel, late=late), struct(128), grid=8, name="sums", **options)


def test_with_overlapping_launches_it_comes_before_the_wait_for_the_kernel_before():
  w = struct(128, 64, dtype=BF16)
  assert ["prefetch" in line for line in lines_of(sums(options=OVERLAP), w)] == [False, True, False]
  assert ["prefetch" in line for line in lines_of(sums(), w)] == [True]


@pytest.mark.parametrize("options", [{"late": True}, {"persistent": True}], ids=str)
def test_what_comes_behind_a_load_or_belongs_to_one_of_many_programs_stays_behind_the_wait(options):
  w = struct(128, 64, dtype=BF16)
  assert ["prefetch" in line for line in lines_of(sums(**options, options=OVERLAP), w)] == [False, False, True]


@pytest.mark.parametrize("options", [{}, {"late": True}, {"persistent": True}, {"warpgroups": 2}], ids=str)
def test_results_are_the_same(options):
  w = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
  want = w.astype(np.float64).sum(1) + (np.repeat(w[::16, 0], 16) if options.get("late") else 0)
  call = sums(**options, options=OVERLAP)
  np.testing.assert_allclose(call.lower(w).simulate(w)[0], want, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(jax.jit(call)(w), want, rtol=1e-4, atol=1e-5)


def test_before_sm_90_there_is_none():
  lowered = sums().lower(struct(128, 64, dtype=BF16), target="sm_80")
  assert ["it needs sm_90" in str(c) for c in lowered.choices if c.op == "prefetch"] == [True]
  assert not re.search(r"prefetch\.L2", lowered.as_text("ptx"))


@pytest.mark.parametrize("what", ["shared", "tile", "number"])
def test_what_is_not_in_global_memory_is_refused(what):
  def kernel(x, y):
    tt.prefetch({"shared": tt.alloc_shared((4, 4), x.dtype), "tile": x[...], "number": 3}[what])
    y[...] = x[...]

  with pytest.raises(TileTypeError, match=r"prefetch: src is .*\n(.*\n)*.*a reference in global memory"):
    tt.tile_call(kernel, struct(4, 4), grid=1).trace(struct(4, 4))
