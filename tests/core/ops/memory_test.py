from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.xla.kernels import run_compiled as run
from tests.tracing import Out, bf16, f32, i32, trace
from tiletrace.core.effects import read, write
from tiletrace.core.graph import Literal
from tiletrace.core.rules import effects

rng = np.random.default_rng(9)
X = rng.standard_normal((8, 16)).astype(np.float32)


def ran(kernel, *arrays, **outs):
  names = {f"x{k}": (f32 if a.dtype == np.float32 else i32)(*a.shape) for k, a in enumerate(arrays)}
  graph = trace(kernel, grid=(1,), **names, **{k: Out(v) for k, v in outs.items()})
  return [np.asarray(y) for y in run(graph, *arrays)]


def eqns(kernel, **arrays):
  return trace(kernel, **arrays).body.eqns


def refused(kernel, message, error=tt.TileTypeError):
  with pytest.raises(error, match=message) as e:
    trace(kernel, x=f32(8, 16), y=Out(f32(8, 16)))
  return e.value


def test_masks_broadcast_and_fill():
  def kernel(x, y):
    y[...] = tt.load(x, fill_value=-1, mask=x[:, 0:1] > 0)
    tt.store(y, 5, mask=tt.arange(16)[None, :] == 3)

  want = np.where(X[:, :1] > 0, X, -1)
  want[:, 3] = 5
  np.testing.assert_array_equal(ran(kernel, X, y=f32(8, 16))[0], want)


def test_copies_fill_and_drop_at_edges():
  def kernel(x, y):
    s = tt.alloc_shared((4, 16), x.dtype)
    tt.copy(x.at[tt.ds(6, 4), :], s, fill_value=7)
    tt.copy(s.T, y.at[:, tt.ds(6, 4)])
    tt.copy(s, y.at[:, 0:4].T)

  got = ran(kernel, X, y=f32(16, 8))[0]
  np.testing.assert_array_equal(got[:, 6:], X[6:].T)
  np.testing.assert_array_equal(got[:, :4], np.pad(X[6:], ((0, 2), (0, 0)), constant_values=7).T)


def test_store_repeats_dimensions_of_size_1_and_converts_numbers_of_the_same_kind():
  def kernel(x, y, n):
    y[...] = x[0, None, :]
    y[3, :] = 2
    n[...] = True

  got, count = ran(kernel, X, y=f32(8, 16), n=i32(3))
  want = np.tile(X[0], (8, 1))
  want[3] = 2
  np.testing.assert_array_equal(got, want)
  np.testing.assert_array_equal(count, [1, 1, 1])


def test_the_operand_convention_is_root_dynamic_parts_values():
  def kernel(x, y):
    i = tt.program_id(0)
    y[i, :] = tt.load(x.at[i, :], mask=i > 0)

  *_, load, store = eqns(kernel, x=f32(8, 16), y=Out(f32(8, 16)))
  assert [a.type.shape for a in load.invars] == [(8, 16), (), ()]
  assert load.refs[0].dyn == (load.invars[1],)
  assert load.values == (load.invars[2],)
  assert store.values == (load.outvars[0],)
  assert store.refs[0].shape == (16,)


def test_effects_name_the_reference_operands():
  def kernel(x, y):
    s = tt.alloc_shared((8,), x.dtype)
    tt.copy(x, s)
    y[...] = x[...]

  _, copy, load, store = eqns(kernel, x=f32(8), y=Out(f32(8)))
  assert (effects(copy), effects(load), effects(store)) == ((read(0), write(1)), (read(0),), (write(0),))


def test_allocations_remember_the_name_that_they_are_assigned_to():
  def kernel(x):
    buffer = tt.alloc_shared((2, 3), x.dtype, layout=tt.swizzle(128))
    scalar = tt.alloc_fragment((), jnp.int32)
    assert buffer.ndim + scalar.ndim == 2

  first, second = eqns(kernel, x=bf16(8))
  assert (first.outvars[0].hint, second.outvars[0].hint) == ("buffer", "scalar")
  assert first.params["layout"] == tt.swizzle(128)
  assert str(first.outvars[0].type) == "Ref<shared>{bf16[2,3]}"


@pytest.mark.parametrize(("kernel", "message"), [
  (lambda x, y: tt.load(x[...]), r"load: ref is a value f32\[8,16\], not a reference"),
  (lambda x, y: tt.load(3), "load: ref is int, not a reference"),
  (lambda x, y: tt.load(x, mask=x), "load: mask: x is a reference, not a value"),
  (lambda x, y: tt.load(x, mask=x[...]), r"load: mask is f32\[8,16\], not a bool"),
  (lambda x, y: tt.load(x, mask=x[0] > 0), r"load: mask of shape \[16\] does not fit \[8, 16\]"),
  (lambda x, y: tt.load(x, fill_value=x[0, 0]), r"load: fill_value must be a Python number, got f32\[\]"),
  (lambda x, y: tt.store(y, None), "store: value: NoneType is not a tile"),
  (lambda x, y: tt.store(y, x[0:4, :]), r"store: value of shape \[4, 16\] does not fit \[8, 16\]"),
  (lambda x, y: tt.copy(x, y[...]), r"copy: dst is a value f32\[8,16\], not a reference"),
  (lambda x, y: tt.copy(x, y.at[0:4]), "copy: shapes differ"),
  (lambda x, y: tt.copy(x.at[tt.ds(0, tt.program_id(0))], y), "copy: src needs a static shape"),
  (lambda x, y: tt.copy(x, y, disable_tma=True), "copy has no keyword 'disable_tma'"),
  (lambda x, y: tt.alloc_shared((4,), "complex64"), "alloc_shared: dtype: tiles have no dtype complex64"),
  (lambda x, y: tt.alloc_fragment((4, 0), x.dtype), r"alloc_fragment: shape \(4, 0\) has no elements"),
  (lambda x, y: tt.alloc_shared((4,), x.dtype, layout="128B"), "alloc_shared: layout is '128B'"),
  (lambda x, y: tt.swizzle(96), "swizzle: nbytes is 96"),
  (lambda x, y: tt.wait_group(-1), "wait_group: n is -1"),
  (lambda x, y: tt.commit_group(kind="tma"), "commit_group: kind is 'tma'"),
  (lambda x, y: tt.copy_async(x, y, barrier=0), "copy_async: barrier is int"),
  (lambda x, y: tt.copy_async(x, y, dispatch="vector"), "copy_async: dispatch is 'vector'")])
def test_memory_arguments_are_checked(kernel, message):
  refused(kernel, message)


@pytest.mark.parametrize(("dtype", "value", "message"), [
  (jnp.int32, 1.5, "store of the float 1.5 into s"), (jnp.uint8, 256, "store: value: 256 does not fit in u8"),
  (jnp.bool_, 1, "store of the number 1 into s"), (jnp.bfloat16, np.float32(1), "store of f32 into s")])
def test_numbers_are_stored_only_where_their_kind_fits(dtype, value, message):
  def kernel(x, y):
    s = tt.alloc_shared((4,), dtype)
    s[...] = value

  refused(kernel, message)


def test_a_float_fill_of_an_integer_array_is_refused():
  with pytest.raises(tt.TileTypeError, match="load: fill_value: the float -inf is no i32"):
    trace(lambda n: tt.load(n, fill_value=-jnp.inf), n=i32(8))


def test_fill_values_have_the_references_kind():
  def kernel(x, n):
    tt.load(x, fill_value=1)
    tt.load(n, fill_value=True)

  first, second = eqns(kernel, x=f32(4), n=i32(4))
  assert (repr(first.params["fill_value"]), repr(second.params["fill_value"])) == ("1.0", "1")


def test_literals_of_stores_have_the_references_dtype():
  store, = eqns(lambda y: tt.store(y, 3), y=Out(bf16(4)))
  assert store.values[0] == Literal(3.0, bf16().dtype)
