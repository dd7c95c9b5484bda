"""tt.debug_print, tt.debug_check, and tt.assume with debugging on: what is said, as jax ops and by PTX run on the CPU;
and that nothing is left of them where debugging is off."""
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.kernels import BF16, F32, I32, assemble, count, struct
from tests.tracing import Out, array, trace
from tiletrace.core import dtypes
from tiletrace.core.config import read
from tiletrace.core.errors import DebugCheckError, LoweringError, TileTypeError
from tiletrace.ffi import library
from tiletrace.lowering import debug
from tiletrace.lowering.layouts.catalog import wgmma_accumulator
from tiletrace.lowering.layouts.fragment import blocked

rng = np.random.default_rng(9)
ON = tt.CompileOptions(debug=True)


def call_of(kernel: Any, out: Any, *, grid: Any = 1, options: Any = ON, **call: Any) -> tt.TileCall:
  return tt.tile_call(kernel, out, grid=grid, options=options, **call)


def said(call: tt.TileCall, capsys: pytest.CaptureFixture[str], *args: Any) -> list[str]:
  """What a call prints, without the lines' places, in the order of the text: programs have none."""
  capsys.readouterr()
  jax.block_until_ready(call(*args))
  jax.effects_barrier()
  lines = capsys.readouterr().out.split("debug_test.py:")[1:]
  return sorted(line.partition(", ")[2].rstrip("\n") for line in lines)


def speak(x, n, y):
  i = tt.program_id(0)
  v = x[i, :]
  tt.debug_print("row {} sums to {:.2f}, {}", i, tt.sum(v), i == 1)
  for k in tt.range(n[i]):
    tt.debug_print("{1} of {0}", n[i], k)
  with tt.when(i > 1):
    tt.debug_print("nothing else")
  y[i, :] = v


@pytest.mark.parametrize("backend", ["xla", "sim"])
def test_every_program_says_what_it_comes_to(backend, capsys):
  x, n = rng.standard_normal((3, 40)).astype(F32), np.asarray([2, 0, 1], I32)
  want = [f"program ({i},): row {i} sums to {x[i].sum():.2f}, {i == 1}" for i in range(3)]
  want += ["program (0,): 0 of 2", "program (0,): 1 of 2", "program (2,): 0 of 1", "program (2,): nothing else"]
  assert said(call_of(speak, struct(3, 40), grid=3, backend=backend), capsys, x, n) == sorted(want)


def values_kernel(x, y):
  v = x[...]
  tt.debug_print("{}", v)
  tt.debug_print("{} {}", v[0, 0], v[:2, 1:])
  y[...] = v


@pytest.mark.parametrize("backend", ["xla", "sim"])
@pytest.mark.parametrize("dtype", [F32, BF16, np.float16, I32, np.uint32, np.bool_], ids=lambda d: np.dtype(d).name)
def test_tiles_of_any_dtype_are_printed_as_arrays(dtype, backend, capsys):
  x = rng.integers(0, 2, (3, 5)).astype(dtype) if dtype is np.bool_ else (rng.standard_normal((3, 5)) * 9).astype(dtype)
  if dtype is np.uint32:
    x = rng.integers(0, 2**32, (3, 5), dtype=np.uint32)
  want = sorted([f"program (0,): {x}", f"program (0,): {x[0, 0]} {x[:2, 1:]}"])
  assert said(call_of(values_kernel, jax.ShapeDtypeStruct(x.shape, dtype), backend=backend), capsys, x) == want


LAYOUTS = {"accumulator": (wgmma_accumulator(64, 32), 1), "two warpgroups": (wgmma_accumulator(128, 16), 2),
           "three warpgroups, registers last": (blocked((96, 6), 32, 12, order=(0, 1)), 3)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tiles_are_right_in_any_layout(name, capsys):
  layout, warpgroups = LAYOUTS[name]

  def kernel(x, y):
    v = tt.alloc_fragment(x.shape, x.dtype, layout=layout)
    v[...] = x[...]
    tt.debug_print("{}", v[...])
    y[...] = v[...]

  x = rng.integers(-99, 99, layout.valid).astype(I32)
  with np.printoptions(threshold=10**6):
    call = call_of(kernel, struct(*x.shape, dtype=I32), warpgroups=warpgroups, backend="sim")
    assert said(call, capsys, x) == [f"program (0,): {x}"]


@pytest.mark.parametrize("persistent", [False, True])
def test_accumulators_are_printed_amid_a_producer_and_consumers_without_serialising_wgmma(persistent, capsys):
  def kernel(a, b, c):
    a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
    acc = tt.alloc_fragment((64, 64), F32)
    acc[...] = 0
    for k in tt.pipelined(3, num_stages=2):
      tt.copy(a.at[tt.block(tt.program_id(0), 64), tt.block(k, 64)], a_s)
      tt.copy(b.at[tt.block(k, 64), :], b_s)
      tt.gemm(a_s, b_s, acc)
      tt.debug_print("block {}", k)
    tt.debug_print("{}", tt.sum(acc[...], axis=1)[:4])
    c[tt.block(tt.program_id(0), 64), :] = acc[...]

  a, b = rng.integers(-3, 4, (192, 192)).astype(BF16), rng.integers(-3, 4, (192, 64)).astype(BF16)
  call = call_of(kernel, struct(192, 64), grid=3, persistent=persistent)
  lowered = call.lower(a, b)
  assert assemble(lowered).image
  assert "from the producer warpgroup" in lowered.report()
  capsys.readouterr()
  lowered.simulate(a, b)
  out = capsys.readouterr().out
  want = a.astype(F32) @ b.astype(F32)
  for i in range(3):
    assert f"program ({i},): {want[64 * i:64 * i + 4].sum(axis=1)}" in out
    assert out.count(f"program ({i},): block") == 3


def test_nothing_is_left_where_debugging_is_off(capsys):
  def kernel(x, y, *, loud):
    v = x[...]
    if loud:
      tt.debug_print("{}", tt.cumsum(v))
      tt.debug_check(v > 0, "positive")
    y[...] = v

  quiet, loud = (call_of(functools.partial(kernel, loud=loud), struct(256), options=None).lower(struct(256))
                 for loud in (False, True))
  assert quiet.as_text("schedule") == loud.as_text("schedule") and quiet.as_text() == loud.as_text()
  x = -np.ones(256, F32)
  for backend in ("xla", "sim"):
    call = call_of(functools.partial(kernel, loud=True), struct(256), options=None, backend=backend)
    assert said(call, capsys, x) == []


def checked(x, y, *, promise):
  i = tt.program_id(0)
  if promise:
    tt.assume(x[i] < 5)
  else:
    tt.debug_check(x[i] < 5, "x is too large")
  y[i] = x[i]


@pytest.mark.parametrize("promise", [False, True])
def test_a_check_that_fails_is_an_error_with_its_line_and_every_program(promise):
  says = "tt.assume: the condition is false" if promise else "x is too large"
  like = struct(6, dtype=I32)
  lowered = call_of(functools.partial(checked, promise=promise), like, grid=6).lower(like)
  np.testing.assert_array_equal(lowered.simulate(np.arange(6, dtype=I32) - 1)[0], np.arange(6) - 1)

  with pytest.raises(DebugCheckError) as info:
    lowered.simulate(np.arange(6, dtype=I32) + 1)
  text = str(info.value)
  assert f"program (4,): {says}" in text and f"program (5,): {says}" in text and "program (3,)" not in text
  assert ("tt.assume(x[i] < 5)" if promise else "tt.debug_check(x[i] < 5") in text and "^^^" in text


@pytest.mark.parametrize("backend", ["xla", "sim"])
@pytest.mark.parametrize("promise", [False, True])
def test_a_check_that_fails_ends_the_call(promise, backend):
  call = call_of(functools.partial(checked, promise=promise), struct(6, dtype=I32), grid=6, backend=backend)
  np.testing.assert_array_equal(call(np.zeros(6, I32)), np.zeros(6))
  with pytest.raises(Exception, match=r"DebugCheckError.*program \(5,\)"):
    jax.block_until_ready(call(np.asarray([0, 1, 2, 3, 4, 5], I32)))
    jax.effects_barrier()


def test_checks_of_tiles_hold_for_every_element():
  def kernel(x, y):
    tt.debug_check(x[...] > 0, "not positive")
    y[...] = x[...]

  lowered = call_of(kernel, struct(300)).lower(struct(300))
  x = np.ones(300, F32)
  lowered.simulate(x)
  x[277] = 0
  with pytest.raises(DebugCheckError, match="not positive"):
    lowered.simulate(x)


def test_what_does_not_fit_into_the_ring_is_counted(capsys):
  def kernel(x, y):
    for k in tt.range(20):
      tt.debug_print("{} {}", k, x[...])
    y[...] = x[...]

  x = np.zeros(4000, F32)
  call_of(kernel, struct(4000)).lower(x).simulate(x)
  out = capsys.readouterr().out
  fitting = (debug.RING_WORDS - 1) // 4003
  assert out.count("program (0,)") == fitting
  assert f"{(20 - fitting) * 4003} words more of debug output had no place" in out


def test_roles_of_the_author_print_scalars_from_one_thread_and_tiles_from_all(capsys):
  def kernel(x, y, *, elect):
    s = tt.alloc_shared((128,), F32)
    with tt.warpgroup(0):
      s[...] = x[...]
      tt.sync()
      tt.debug_print("all {}", s[:3])
      with tt.elect():
        tt.debug_print("one {}", x[1])
        if elect:
          tt.debug_print("{}", s[...])
    with tt.warpgroup(1):
      y[...] = x[...]

  x = rng.integers(-9, 9, 128).astype(F32)
  out = struct(128)
  lowered = call_of(functools.partial(kernel, elect=False), out, warpgroups=2).lower(x)
  lowered.simulate(x)
  printed = capsys.readouterr().out
  assert f"all {x[:3]}" in printed and f"one {x[1]}" in printed
  assert assemble(lowered).image
  with pytest.raises(LoweringError, match=r"debug_print of f32\[128\] takes all threads of a warpgroup") as info:
    call_of(functools.partial(kernel, elect=True), out, warpgroups=2).lower(x)
  assert 'tt.debug_print("{}", s[...])' in str(info.value)


def test_under_vmap_the_example_is_the_first_id(capsys):
  def kernel(x, y):
    tt.debug_print("{}", x[tt.program_id(0)])
    y[tt.program_id(0)] = x[tt.program_id(0)]

  x = np.arange(4, dtype=I32).reshape(2, 2)
  for backend in ("xla", "sim"):
    call = jax.vmap(call_of(kernel, struct(2, dtype=I32), grid=2, backend=backend))
    assert said(call, capsys, x) == [f"program ({i}, {j}): {x[i, j]}" for i in range(2) for j in range(2)]


def test_the_switch_turns_it_on(monkeypatch, capsys):
  assert (read({}).debug, read({"TT_DEBUG": "1"}).debug) == (False, True)
  monkeypatch.setenv("TT_DEBUG", "1")
  x = np.arange(6, dtype=F32).reshape(2, 3)
  assert said(call_of(values_kernel, struct(2, 3), options=None, backend="sim"), capsys, x)


def test_on_cuda_the_ring_is_one_more_operand_in_place_and_goes_to_the_host(monkeypatch):
  reported = []
  monkeypatch.setattr(jax.debug, "callback", lambda fn, ring: reported.append((fn, ring.shape)))
  monkeypatch.setattr(library, "register", lambda: None)
  x, n = struct(3, 40), struct(3, dtype=I32)
  lowered = jax.jit(call_of(speak, struct(3, 40), grid=3)).trace(x, n).lower(lowering_platforms=("cuda",))

  (line,) = [l for l in lowered.as_text().splitlines() if f"custom_call @{library.TARGET}" in l]
  assert "output_tuple_indices = [1], operand_index = 2" in line
  assert [shape for _, shape in reported] == [(debug.RING_WORDS,)]
  ring = np.zeros(debug.RING_WORDS, I32)
  ring[:3] = 2, 2, 7                                              # the third line of the kernel, program 7
  with pytest.MonkeyPatch.context() as patch:
    lines = []
    patch.setattr("builtins.print", lines.append)
    reported[0][0](ring)
  assert lines[0].endswith("program (7,): nothing else")


@pytest.mark.parametrize(("make", "says"), [
  (lambda x: tt.debug_print(x[0, 0]), "tt.debug_print: the format is Tile"),
  (lambda x: tt.debug_print("{} {}", x[0, 0]), "does not fit"),
  (lambda x: tt.debug_print("{:.2f}", x[...]), r"does not fit \(f32\[64,128\]\)|4096 elements"),
  (lambda x: tt.debug_print("{:.2f}", x[0, :8]), r"does not fit \(f32\[8\]\)"),
  (lambda x: tt.debug_print("{}", x[...]), r"value 0 is f32\[64,128\]: 4096 elements of 32 bits can be printed"),
  (lambda x: tt.debug_print("{}", x), "value 0: x is a reference"),
  (lambda x: tt.debug_check(x[0, 0], "m"), "tt.debug_check takes a bool, got f32"),
  (lambda x: tt.debug_check(1, "m"), "tt.debug_check takes a bool, got 1"),
  (lambda x: tt.debug_check(True, x), "the message is"),
])
def test_other_arguments_are_refused_at_their_line(make, says):
  def kernel(x, y):
    make(x)

  with pytest.raises(TileTypeError, match=says) as info:
    trace(kernel, x=array(dtypes.f32, 64, 128), y=Out(array(dtypes.f32, 8)))
  assert "tt.debug_" in str(info.value) and "debug_test.py" in str(info.value)


def test_scalars_are_written_by_one_thread_without_a_sync():
  def kernel(x, y):
    tt.debug_print("{}", x[0])
    y[...] = x[...]

  lowered = call_of(kernel, struct(128)).lower(struct(128))
  assert (count(lowered, "bar.sync"), count(lowered, r"atom\.relaxed\.gpu\.global\.add\.u32")) == (0, 1)


def test_python_numbers_are_printed_too(capsys):
  def kernel(x, y):
    tt.debug_print("{} {} {}", 3, 2.5, jnp.float32.dtype.itemsize)
    y[...] = x[...]

  x = np.zeros(8, F32)
  for backend in ("xla", "sim"):
    assert said(call_of(kernel, struct(8), backend=backend), capsys, x) == ["program (0,): 3 2.5 4"]


@pytest.mark.gpu
def test_a_gpu_says_the_same(capsys):
  x, n = rng.standard_normal((3, 40)).astype(F32), np.asarray([2, 0, 1], I32)
  sim, gpu = (said(call_of(speak, struct(3, 40), grid=3, backend=b), capsys, x, n) for b in ("sim", None))
  assert gpu == sim and len(gpu) == 7
  v = rng.standard_normal((3, 5)).astype(BF16)
  sim, gpu = (said(call_of(values_kernel, struct(3, 5, dtype=BF16), backend=b), capsys, v) for b in ("sim", None))
  assert gpu == sim and len(gpu) == 2
  with pytest.raises(Exception, match="x is too large"):
    call = call_of(functools.partial(checked, promise=False), struct(6, dtype=I32), grid=6)
    jax.block_until_ready(call(np.asarray([0, 1, 2, 3, 4, 5], I32)))
    jax.effects_barrier()
