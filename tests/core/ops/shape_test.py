from __future__ import annotations

import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.xla.kernels import run_compiled as run
from tests.tracing import Out, f32, i32, trace, trace_values
from tiletrace.core import dtypes
from tiletrace.core.errors import TileIndexError, TileTypeError

rng = np.random.default_rng(5)

INDICES = [np.s_[0], np.s_[-1], np.s_[:, None], np.s_[None, :, 2], np.s_[..., 1:5], np.s_[1:3, ::2],
           np.s_[2:, None, -3], np.s_[None], np.s_[...], np.s_[1, 2], np.s_[..., None], np.s_[3:3], np.s_[-3:-1, -7:]]


def run_on(kernel, x, shape, dtype=dtypes.f32):
  """The output of a kernel that stores into y[shape]."""
  graph = trace(kernel, grid=(1,), x=f32(*x.shape) if x.dtype == np.float32 else i32(*x.shape),
                y=Out(tt_array(dtype, shape)))
  return np.asarray(run(graph, x)[0])


def tt_array(dtype, shape):
  return f32(*shape) if dtype == dtypes.f32 else i32(*shape)


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_value_indexing_is_numpys(index):
  x = rng.standard_normal((4, 8)).astype(np.float32)
  want = x[index]
  out = trace_values(lambda v: v[index], (dtypes.f32, (4, 8)))
  assert out.shape == want.shape
  if want.size:
    def kernel(x, y):
      y[...] = x[...][index]
    np.testing.assert_array_equal(run_on(kernel, x, want.shape), want)


@pytest.mark.parametrize("index", [4, -5, np.s_[:, 8], np.s_[0:5], np.s_[:, -9:]], ids=str)
def test_an_index_out_of_range_is_refused_not_clamped(index):
  with pytest.raises(TileIndexError, match="out of range for size"):
    trace_values(lambda v: v[index], (dtypes.f32, (4, 8)))


@pytest.mark.parametrize(("index", "message"), [
  (np.s_[0, 0, 0], "has 2 dimensions, got 3 indices"), (np.s_[..., ...], "one `...` only"),
  (True, "unsupported index True"), (1.5, "unsupported index 1.5"), (np.s_[::-1], "the slice step -1 is not positive")])
def test_other_indices_are_refused(index, message):
  with pytest.raises(TileIndexError, match=message):
    trace_values(lambda v: v[index], (dtypes.f32, (4, 8)))


def test_an_abstract_index_of_a_value_is_refused():
  with pytest.raises(TileIndexError, match="cannot be indexed by an abstract value"):
    trace_values(lambda v: v[tt.program_id(0)], (dtypes.f32, (4, 8)))


@pytest.mark.parametrize("args", [(7,), (3, 11), (2, 20, 3), (0,), (5, -3, -2)], ids=str)
def test_arange_is_numpys(args):
  want = np.arange(*args, dtype=np.int32)
  out = trace_values(lambda: tt.arange(*args))
  assert (out.shape, out.dtype) == (want.shape, dtypes.i32)
  if want.size:
    def kernel(x, y):
      y[...] = tt.arange(*args)
    np.testing.assert_array_equal(run_on(kernel, np.ones(1, np.int32), want.shape, dtypes.i32), want)


def test_reshape_transpose_and_concatenate_are_numpys():
  x = rng.standard_normal((4, 6)).astype(np.float32)

  def kernel(x, y):
    v = x[...]
    parts = [tt.transpose(v).reshape(-1, 8), v.T.reshape((3, 8)), tt.expand_dims(v, 0)[0].reshape(3, 8)]
    y[...] = tt.concatenate(parts)

  want = np.concatenate([x.T.reshape(-1, 8), x.T.reshape(3, 8), x.reshape(3, 8)])
  np.testing.assert_array_equal(run_on(kernel, x, want.shape), want)


def test_full_and_broadcast_to_have_the_dtype_of_jnp():
  assert trace_values(lambda: tt.full((2, 3), 1.5)).dtype == dtypes.f32
  assert trace_values(lambda: tt.full(4, True)).dtype == dtypes.bool_
  assert trace_values(lambda: tt.zeros((2,), "bfloat16")).dtype == dtypes.bf16
  assert trace_values(lambda: tt.ones((2,))).dtype == dtypes.f32
  assert trace_values(lambda x: tt.full((2, 2), tt.sum(x)), (dtypes.f32, (4,))).shape == (2, 2)
  assert trace_values(lambda x: tt.broadcast_to(x, (3, 4)), (dtypes.f32, (1, 4))).shape == (3, 4)


@pytest.mark.parametrize(("fn", "message"), [
  (lambda x: x.reshape(5, 5), r"reshape: f32\[4,8\] has 32 elements, \[5, 5\] has 25"),
  (lambda x: tt.transpose(x, (0, 0)), "no permutation"),
  (lambda x: tt.concatenate([x, x[0]]), "differ outside axis 0"),
  (lambda x: tt.broadcast_to(x, (4, 9)), "do not broadcast"),
  (lambda x: tt.broadcast_to(x[0], (4, 8)), "ranks differ"),
  (lambda x: tt.zeros((tt.program_id(0),)), "must be of Python ints"),
  (lambda x: tt.reshape(3.0, (1,)), "is the number 3.0, not a tile"),
  (lambda x: tt.arange(tt.program_id(0)), "the bounds must be Python ints")])
def test_shapes_that_do_not_fit_are_refused(fn, message):
  with pytest.raises(TileTypeError, match=message):
    trace_values(fn, (dtypes.f32, (4, 8)))
