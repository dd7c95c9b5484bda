"""What a user of Pallas, TileLang or jax.numpy types first: the error's message, line (marked `#!`), caret and hint."""
from __future__ import annotations

import linecache
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.tracing import Out, f32, trace

MISTAKES = []
SCALE = jnp.float32(2)
LOOP_OVER = "for r in {}:  " if sys.version_info < (3, 13) else "{}"      # where CPython says that iteration begins
TABLE = np.arange(8)


def mistake(error, message, caret, hint=None):
  """The kernel (x: an input, y: an output, both f32[64,64]) is refused with this message, at its line `#!`."""
  def add(kernel):
    MISTAKES.append(pytest.param(kernel, error, message, caret, hint, id=kernel.__name__))
    return kernel
  return add


@pytest.mark.parametrize(("kernel", "error", "message", "caret", "hint"), MISTAKES)
def test_mistake(kernel, error, message, caret, hint):
  with pytest.raises(error) as e:
    trace(kernel, x=f32(64, 64), y=Out(f32(64, 64)))
  loc = e.value.loc
  line = linecache.getline(loc.filename, loc.line)
  assert line.rstrip().endswith("#!"), f"reported at {loc}: {line}"
  assert line[loc.span.column:loc.span.end_column] == caret
  assert message in e.value.message
  if hint is not None:
    assert hint in e.value.hint
  text = str(e.value)
  assert f"[{e.value.code}]" in text and "^" * len(caret) in text


# --- references and copies

@mistake(tt.TileTypeError, "copy: shapes differ, src x: Ref<global>{f32[]}, dst s: Ref<shared>{f32[32,64]}",
         "tt.copy(x.at[tt.program_id(0) * 32, 0], s)", "tt.block(i, size)")
def tilelang_start_index(x, y):
  s = tt.alloc_shared((32, 64), x.dtype)
  tt.copy(x.at[tt.program_id(0) * 32, 0], s)  #!


@mistake(tt.TileTypeError, "copy: src is a value f32[32,64], not a reference", "tt.copy(x[tt.block(0, 32), :], s)",
         "write a.at[...] for a view")
def copy_of_a_value(x, y):
  s = tt.alloc_shared((32, 64), x.dtype)
  tt.copy(x[tt.block(0, 32), :], s)  #!


@mistake(tt.TileTypeError,
         "copy does not convert, src is x: Ref<global>{f32[64,64]}, dst is s: Ref<shared>{bf16[64,64]}",
         "tt.copy(x, s)", "s[...] = x[...].astype(s.dtype)")
def converting_copy(x, y):
  s = tt.alloc_shared((64, 64), jnp.bfloat16)
  tt.copy(x, s)  #!


@mistake(tt.TileTypeError, "copy has no keyword 'coalesced_width'", "tt.copy(x, y, coalesced_width=8)",
         "follows from the layouts")
def tilelang_copy_keyword(x, y):
  tt.copy(x, y, coalesced_width=8)  #!


@mistake(tt.TileTypeError, "alloc_shared has no keyword 'scope'",
         'tt.alloc_shared((32, 64), x.dtype, scope="shared.dyn")',
         "alloc_shared or alloc_fragment")
def tilelang_alloc_keyword(x, y):
  tt.alloc_shared((32, 64), x.dtype, scope="shared.dyn")  #!


@mistake(tt.TileTypeError, "load has no keyword 'other'", "tt.load(x, mask=x[...] > 0, other=1.0)", "fill_value=")
def pallas_load_keyword(x, y):
  y[...] = tt.load(x, mask=x[...] > 0, other=1.0)  #!


@mistake(tt.TileTypeError, "copy: dispatch is 'TMA'", 'tt.copy(x, y, dispatch="TMA")', "'tma'")
def unknown_dispatch(x, y):
  tt.copy(x, y, dispatch="TMA")  #!


@mistake(tt.TileTypeError, "store to 'x', which is an input", "x[...]", "input_output_aliases={input: output}")
def store_to_an_input(x, y):
  x[...] = y[...]  #!


@mistake(tt.TileTypeError, "copy to 'x', which is an input", "tt.copy(y, x)", "input_output_aliases={input: output}")
def copy_to_an_input(x, y):
  tt.copy(y, x)  #!


@mistake(tt.TileTypeError, "arithmetic on the reference x: Ref<global>{f32[64,64]}", "x + 1", "did you mean x[...]?")
def forgotten_load(x, y):
  y[...] = x + 1  #!


@mistake(tt.TileTypeError, "arithmetic on the reference acc: Ref<fragment>{f32[32,64]}", "acc += x[tt.block(0, 32), :]",
         "did you mean acc[...]?")
def accumulate_on_a_reference(x, y):
  acc = tt.alloc_fragment((32, 64), jnp.float32)
  acc += x[tt.block(0, 32), :]  #!


@mistake(tt.TileTypeError, "iteration of the reference x", LOOP_OVER.format("x"), "for i in tt.range(n): x[i]")
def row_by_row(x, y):
  for r in x:  #!
    y[0, :] = r


@mistake(tt.TileTypeError, "store: the stored x: Ref<global>{f32[64,64]} is a reference, not a value", "y[...]",
         "load it: x[...], or tt.copy(src, dst)")
def store_of_a_reference(x, y):
  y[...] = x  #!


@mistake(tt.TileTypeError, "store of bf16 into y: Ref<global>{f32[32,64]}", "y[tt.block(0, 32), :]",
         "value.astype(y.dtype)")
def store_of_another_dtype(x, y):
  y[tt.block(0, 32), :] = x[tt.block(0, 32), :].astype(jnp.bfloat16)  #!


@mistake(tt.TileTypeError, "store: value of shape [64] does not fit [32, 64]", "y[tt.block(0, 32), :]",
         "v[:, None] or v[None, :]")
def store_of_another_rank(x, y):
  y[tt.block(0, 32), :] = x[0, :]  #!


@mistake(tt.TileIndexError, "a slice with an abstract bound has no static size", "x[n:n + 32, :]", "tt.ds(start, size)")
def slice_with_abstract_bounds(x, y):
  n = tt.program_id(0) * 32
  y[0:32, :] = x[n:n + 32, :]  #!


@mistake(tt.TileTypeError, "ref.at[...] is a view and cannot be assigned", "y.at[tt.block(0, 32)]", "ref[...] = v")
def assignment_to_at(x, y):
  y.at[tt.block(0, 32)] = x[tt.block(0, 32), :]  #!


@mistake(tt.TileTypeError, "a tile value is immutable and has no .at", "x[...].at", "ref[...] = v")
def jnp_at_set(x, y):
  y[...] = x[...].at[0].set(1.0)  #!


@mistake(tt.TileTypeError, "a tile value is immutable", "v[0]", "tt.alloc_fragment(shape, dtype)")
def assignment_to_a_value(x, y):
  v = x[...]
  v[0] = 1.0  #!


@mistake(tt.TileTypeError, "alloc_shared: shape (i32[], 64) must be of Python ints",
         "tt.alloc_shared((n, 64), x.dtype)")
def dynamic_allocation(x, y):
  n = tt.program_id(0)
  tt.alloc_shared((n, 64), x.dtype)  #!


# --- gemm

@mistake(tt.TileTypeError, "gemm contracts K=32 of a [64, 32] with K=64 of b [64, 32]", "tt.gemm(s, t, a)", "t.T")
def gemm_without_a_transpose(x, y):
  s, t = tt.alloc_shared((64, 32), jnp.bfloat16), tt.alloc_shared((64, 32), jnp.bfloat16)
  a = tt.alloc_fragment((64, 64), jnp.float32)
  tt.gemm(s, t, a)  #!


@mistake(tt.TileTypeError, "gemm has no keyword 'transpose_B'", "tt.gemm(s, s, a, transpose_B=True)",
         "pass the view b.T")
def gemm_transpose_keyword(x, y):
  s, a = tt.alloc_shared((64, 32), jnp.bfloat16), tt.alloc_fragment((64, 64), jnp.float32)
  tt.gemm(s, s, a, transpose_B=True)  #!


@mistake(tt.TileTypeError, "gemm has no keyword 'clear_accum'", "tt.gemm(s, s.T, a, clear_accum=True)",
         "accumulate=False")
def gemm_clear_keyword(x, y):
  s, a = tt.alloc_shared((64, 32), jnp.bfloat16), tt.alloc_fragment((64, 64), jnp.float32)
  tt.gemm(s, s.T, a, clear_accum=True)  #!


@mistake(tt.TileTypeError, "gemm: a and b are f32, and tensor cores multiply 11 bits of each (tf32)",
         "tt.gemm(s, s.T, a)", "astype(jnp.bfloat16)")
def gemm_of_f32(x, y):
  s, a = tt.alloc_shared((64, 32), jnp.float32), tt.alloc_fragment((64, 64), jnp.float32)
  tt.gemm(s, s.T, a)  #!


@mistake(tt.TileTypeError, "gemm: a is x: Ref<global>{f32[64,64]}, it must be in shared or fragment memory",
         "tt.gemm(x, s.T, a)", "tt.copy(x.at[...], x_s)")
def gemm_of_global_memory(x, y):
  s, a = tt.alloc_shared((64, 64), jnp.bfloat16), tt.alloc_fragment((64, 64), jnp.float32)
  tt.gemm(x, s.T, a)  #!


@mistake(tt.TileTypeError, "`@` on tile values has no accumulator", "x[...] @ x[...]", "tt.gemm(a, b, acc)")
def matmul_operator(x, y):
  y[...] = x[...] @ x[...]  #!


# --- values

@mistake(tt.TileTypeError, "subtract: ranks differ, [32, 64] and [32]", "v - m", "x[:, None] for a value of each row")
def row_statistic_without_an_axis(x, y):
  v = x[tt.block(0, 32), :]
  m = tt.max(v, axis=1)
  y[tt.block(0, 32), :] = v - m  #!


@mistake(tt.TileTypeError, "add: shapes [64, 64] and [32, 64] do not broadcast", "x[...] + x[0:32, :]", "x[:, None]")
def shapes_that_do_not_broadcast(x, y):
  y[...] = x[...] + x[0:32, :]  #!


@mistake(tt.TileTypeError, "sum over no axis of f32[64,64]", "tt.sum(x[...], axis=())", "axis=None reduces all")
def reduction_over_no_axis(x, y):
  y[...] = tt.sum(x[...], axis=())  #!


@mistake(tt.TileIndexError, "max: axis 2 of f32[64,64]", "tt.max(x[...], axis=2)")
def reduction_over_an_axis_that_is_not_there(x, y):
  y[...] = tt.max(x[...], axis=2)  #!


@mistake(tt.TileTypeError, "max of f32[64,0]: there is none of no elements", "tt.max(x[...][:, 8:8], axis=1)",
         "give the reduced axes an extent of at least one")
def maximum_of_no_elements(x, y):
  y[:, 0] = tt.max(x[...][:, 8:8], axis=1)  #!


@mistake(tt.TileTypeError, "argmin of f32[64,0]: there is none of no elements", "tt.argmin(x[...][:, 8:8], axis=1)",
         "give the reduced axes an extent of at least one")
def index_of_the_minimum_of_no_elements(x, y):
  y[:, 0] = tt.argmin(x[...][:, 8:8], axis=1)  #!


@mistake(tt.TileTypeError, "the truth value of a traced bool[] is not known while tracing", "tt.program_id(0) == 0",
         "with tt.when(p):")
def if_on_a_scalar(x, y):
  if tt.program_id(0) == 0:  #!
    y[...] = x[...]


@mistake(tt.TileTypeError, "the truth value of a traced bool[64,64]", "a < b", "tt.where(p, x, y)")
def if_in_parallel(x, y):
  for a, b in tt.parallel(64, 64):
    if a < b:  #!
      y[a, b] = x[a, b]


@mistake(tt.TileTypeError, "the integer value of a traced i32[]", "range(tt.program_id(0))", "tt.range for a loop")
def python_range(x, y):
  for _ in range(tt.program_id(0)):  #!
    y[...] = x[...]


@mistake(tt.TileTypeError, "the float value of a traced f32[]", "math.exp(x[0, 0])", "tt.exp rather than math.exp")
def math_function(x, y):
  y[...] = math.exp(x[0, 0])  #!


@mistake(tt.TileTypeError, "the sequence of elements of a traced f32[64,64]", LOOP_OVER.format("v"), "tt.parallel")
def iteration_over_a_value(x, y):
  v = x[...]
  for r in v:  #!
    y[0, :] = r


@mistake(tt.ForeignFunctionError, "len() of a traced f32[64,64]", "len(x[...])", "x.shape[0]")
def length_of_a_value(x, y):
  y[...] = float(len(x[...]))  #!


@mistake(tt.TileIndexError, "a tile value cannot be indexed by an abstract value", "v[tt.program_id(0)]",
         "index the reference")
def abstract_index_of_a_value(x, y):
  v = x[...]
  y[0, :] = v[tt.program_id(0)]  #!


@mistake(tt.TileAttributeError, "a tile value has no attribute 'exp'", "x[...].exp", "tt.exp(x)")
def method_that_is_a_function(x, y):
  y[...] = x[...].exp()  #!


@mistake(tt.ResourceError, "load: a tile f32[4096,4096] of x (65536 KiB) does not fit in the 256 KiB of registers",
         "x[tt.ds(0, 4096), tt.ds(0, 4096)]", "x[tt.block(i, 128), ...]")
def whole_arrays(x, y):
  y[...] = x[tt.ds(0, 4096), tt.ds(0, 4096)][:64, :64]  #!


@mistake(tt.TileIndexError, "program_id(2) of a grid with 2 axes", "tt.program_id(2)")
def axis_out_of_range(x, y):
  tt.program_id(2)  #!


# --- functions and arrays from outside

@mistake(tt.ForeignFunctionError, "a jax function was applied to a tile f32[64,64]", "jnp.exp(x[...])",
         "tt.call_jax(fn, x)")
def jnp_function(x, y):
  y[...] = jnp.exp(x[...])  #!


@mistake(tt.ForeignFunctionError, "a jax function was applied to the reference x", "jnp.exp(x)", "tt.f(x[...])")
def jnp_function_of_a_reference(x, y):
  y[...] = jnp.exp(x)  #!


@mistake(tt.ForeignFunctionError, "a jax function was applied to a tile", "jnp.where(x[...] > 0, x[...], 0)",
         "tt.call_jax(fn, x)")
def jnp_where(x, y):
  y[...] = jnp.where(x[...] > 0, x[...], 0)  #!


@mistake(tt.ForeignFunctionError, "a numpy function was applied to a tile", "np.asarray(x[...])", "tt.call_jax(fn, x)")
def numpy_array_of_a_tile(x, y):
  y[...] = np.asarray(x[...])  #!


@mistake(tt.TileTypeError, "multiply: y: 'SCALE' is a JAX array (float32[]) from outside the kernel", "x[...] * SCALE",
         "pass it to the kernel as an argument")
def closure_over_an_array(x, y):
  y[...] = x[...] * SCALE  #!


@mistake(tt.TileTypeError, "store: value: 'SCALE' is a JAX array (float32[]) from outside the kernel", "y[...]",
         "math.log2, not jnp.log2")
def store_of_an_array(x, y):
  y[...] = SCALE  #!


@mistake(tt.TileTypeError, "index 0 of x: 'row' is a JAX array (int32[]) from outside the kernel", "x[row, :]",
         "pass it to the kernel as an argument")
def index_by_an_array(x, y):
  row = jnp.int32(3)
  y[0, :] = x[row, :]  #!


@mistake(tt.TileTypeError, "add: y is a numpy array of shape [8]", "x[0, :8] + TABLE", "pass it to the kernel")
def numpy_table(x, y):
  y[0, :8] = x[0, :8] + TABLE  #!


def test_a_closure_over_a_tracer_of_the_enclosing_jit_is_named():
  @jax.jit
  def outer(s):
    def kernel(x, y):
      y[...] = x[...] * s
    trace(kernel, x=f32(64, 64), y=Out(f32(64, 64)))
    return s

  with pytest.raises(tt.TileTypeError, match=r"multiply: y: 's' is a JAX tracer \(float32\[\]\) from outside") as e:
    outer(2.0)
  assert "tt.fori_loop and tt.cond, not jax.lax" in e.value.hint


def test_the_index_of_a_jax_loop_is_refused():
  def kernel(x, y):
    def body(j, carry):
      y[j, :] = x[j, :]
      return carry
    jax.lax.fori_loop(0, 4, body, 0)

  with pytest.raises(tt.TileTypeError, match=r"index 0 of x: 'j' is a JAX tracer \(int32\[\]\)"):
    trace(kernel, x=f32(64, 64), y=Out(f32(64, 64)))


@pytest.mark.filterwarnings("ignore:Exception ignored in PyObject_HasAttr")      # from jaxlib on CPython 3.13
@pytest.mark.parametrize("fn", [jax.nn.relu, jax.jit(lambda v: v * 2), np.exp, jax.lax.exp],
                         ids=["relu", "jitted", "np.exp", "lax.exp"])
def test_functions_that_raise_their_own_error_carry_a_note(fn):
  def kernel(x, y):
    y[...] = fn(x[...])

  with pytest.raises(Exception) as e:
    trace(kernel, x=f32(64, 64), y=Out(f32(64, 64)))
  if not isinstance(e.value, tt.ForeignFunctionError):
    assert "while tracing kernel kernel" in e.value.__notes__
    assert any("tt.call_jax(fn, *tiles)" in note for note in e.value.__notes__), str(e.value)
