"""Views and indices of references: what they select (against numpy), and what is refused."""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering.xla.kernels import run_compiled as run
from tests.tracing import Out, f32, i32, trace
from tiletrace.core.errors import ResourceError, TileAttributeError, TileIndexError, TileTypeError
from tiletrace.core.types import Dyn, View, ViewDim, whole_view

rng = np.random.default_rng(8)
X = rng.standard_normal((6, 10)).astype(np.float32)


def selected(index, shape):
  """What `x[index()]` loads, stored in an array of `shape`."""
  def kernel(x, y):
    y[...] = x[index()]

  return np.asarray(run(trace(kernel, grid=(1,), x=f32(*X.shape), y=Out(f32(*shape))), X)[0])


def view_in(make, *shape, **arrays):
  """The Ref that `make(x)` returns, and the view in the IR, of an f32 reference."""
  out = []

  def kernel(x, *rest):
    out.append(make(x, *rest))

  trace(kernel, x=f32(*shape), **arrays)
  return out[0]


@pytest.mark.parametrize("index", [np.s_[2], np.s_[-1, 3], np.s_[:, 4], np.s_[1:4], np.s_[::2, 1:9:3], np.s_[..., -2],
                                   np.s_[None, 1], np.s_[:, None, 3:5], np.s_[..., None], np.s_[2, None, None, 1:3],
                                   np.s_[...]], ids=str)
def test_static_indices_select_what_numpys_do(index):
  want = X[index]
  np.testing.assert_array_equal(selected(lambda: index, want.shape), want)


def test_ds_and_block_cut_tiles_that_hang_over_the_edge():
  want = np.zeros((4, 3), np.float32)
  want[:2] = X[4:6, 1::4]
  got = selected(lambda: (tt.block(tt.program_id(0) + 1, 4), tt.ds(1, 3, stride=4)), (4, 3))
  np.testing.assert_array_equal(got, want)


def test_an_abstract_integer_removes_its_dimension():
  np.testing.assert_array_equal(selected(lambda: (tt.program_id(0) + 2, slice(None)), (10,)), X[2])


def test_a_view_ends_where_it_says():
  """Rows 1 to 3 are the group; a block of 4 from its row 2 on has one row of them."""
  def kernel(x, bounds, y):
    group = x.at[tt.ds(bounds[0], bounds[1]), :]
    y[...] = group[tt.ds(2, 4), :]

  graph = trace(kernel, grid=(1,), x=f32(6, 10), bounds=i32(2), y=Out(f32(4, 10)))
  got = np.asarray(run(graph, X, np.array([1, 3], np.int32))[0])
  want = np.zeros((4, 10), np.float32)
  want[0] = X[3]
  np.testing.assert_array_equal(got, want)


def test_views_of_views_compose_with_strides_and_transposes():
  def kernel(x, y):
    y[...] = x.at[1:, ::3].T.at[1:3].at[:, tt.ds(1, 3)][...]

  got = np.asarray(run(trace(kernel, grid=(1,), x=f32(6, 10), y=Out(f32(2, 3))), X)[0])
  np.testing.assert_array_equal(got, X[1:, ::3].T[1:3][:, 1:4])


def test_an_index_of_a_strided_view_removes_its_dimension():
  def kernel(x, y):
    y[...] = x.at[1::2].at[1][...] + x.at[1::2].at[tt.program_id(0) + 2][...]

  got = np.asarray(run(trace(kernel, grid=(1,), x=f32(6, 10), y=Out(f32(10))), X)[0])
  np.testing.assert_array_equal(got, X[3] + X[5])


def test_the_view_names_root_coordinates():
  ref = view_in(lambda x: x.at[2:8].at[tt.block(tt.program_id(0), 3), 4].T, 16, 10)
  rows = ViewDim(Dyn(0), 3, edges=((2, 8),))
  assert ref.view == View((rows, ViewDim(4, 1, squeezed=True)), (0,))
  assert ref.shape == (3,)
  assert ref.operands[0] is ref


def test_an_edge_that_cannot_cut_anything_off_is_not_kept():
  assert view_in(lambda x: x.at[2:8].at[1:3], 16, 10).view.dims[0] == ViewDim(3, 2)
  assert view_in(lambda x: x.at[tt.block(tt.program_id(0), 4)], 16, 10).view.dims[0].edges == ()
  assert view_in(lambda x: x.at[:, :].at[...], 16, 10).view == whole_view((16, 10))


def test_a_dynamic_size_is_a_scalar_in_the_shape():
  ref = view_in(lambda x, n: x.at[tt.ds(0, n[0])], 16, 10, n=i32(1))
  assert ref.shape[0].type.dtype == np.int32 and ref.shape[1] == 10
  with pytest.raises(TileTypeError, match=r"load needs a static shape, x: Ref<global>\{f32\[\?,10\]\}"):
    view_in(lambda x, n: x.at[tt.ds(0, n[0])][...], 16, 10, n=i32(1))


def test_sizes_are_those_of_the_view():
  ref = view_in(lambda x: x.at[tt.block(0, 4), 3], 16, 10)
  assert (ref.shape, ref.ndim, ref.size, ref.nbytes, ref.dtype) == ((4,), 1, 4, 16, np.float32)
  assert str(ref.space) == "global"


def test_rank_0_references_are_mutable_scalars():
  def kernel(s, y):
    total = tt.alloc_fragment((), jnp.float32)
    total[...] = s[...] * 2
    total[...] += 1
    y[0] = total[...]

  assert np.asarray(run(trace(kernel, grid=(1,), s=f32(), y=Out(f32(1))), np.float32(3))[0]) == [7.0]


@pytest.mark.parametrize(("index", "message"), [
  (lambda: 6, "index 0 of x: 6 is out of range for size 6"),
  (lambda: (0, -11), "index 1 of x: -11 is out of range for size 10"),
  (lambda: np.s_[0, 0, 0], "has 2 dimensions, got 3 indices"),
  (lambda: np.s_[..., 0, ...], "one `...` only"),
  (lambda: np.s_[0:7], "the slice bound 7 is out of range for size 6"),
  (lambda: np.s_[::-1], "the slice step -1 is not positive"),
  (lambda: True, "index 0 of x must be an integer, got True"),
  (lambda: 1.5, "index 0 of x must be an integer, got 1.5"),
  (lambda: slice(tt.program_id(0), None), "a slice with an abstract bound has no static size"),
  (lambda: tt.program_id(0) * 1.0, r"index 0 of x must be an integer scalar, got f32\[\]"),
  (lambda: tt.arange(4) * 1.0, r"index of x is a tile f32\[4\], not of integers"),
  (lambda: tt.ds(0, -1), "size is -1, it must not be negative"),
  (lambda: tt.ds(0, 2, stride=0), "stride is 0"),
  (lambda: tt.block(0, 0), "size is 0, it must be a positive Python int"),
  (lambda: tt.block(0.5, 2), "block: i must be an integer, got 0.5"),
  (lambda: "a", "index 0 of x must be an integer, got 'a'")])
def test_indices_that_select_nothing_are_refused(index, message):
  with pytest.raises(TileIndexError, match=message):
    view_in(lambda x: x[index()], 6, 10)


def test_new_axes_belong_to_values():
  with pytest.raises(TileIndexError, match=r"a view cannot add an axis"):
    view_in(lambda x: x.at[:, None], 6, 10)
  with pytest.raises(TileIndexError, match=r"a new axis \(None\) in a store"):
    view_in(lambda x: x.__setitem__((None, 0), 1), 6, 10)


@pytest.mark.parametrize("alloc", [tt.alloc_shared, tt.alloc_fragment])
@pytest.mark.parametrize(("index", "message"), [
  (np.s_[4], "out of range for size 4"), (np.s_[:5], "out of range for size 4"), (np.s_[-5], "out of range for size 4"),
  (tt.ds(1, 4), "only global references have an edge"), (tt.ds(-1, 4), "only global references have an edge")])
def test_shared_and_fragment_references_have_no_edge_to_hang_over(alloc, index, message):
  with pytest.raises(TileIndexError, match=message):
    view_in(lambda x: alloc((4, 8), jnp.float32).at[index], 6, 10)


def test_a_dynamic_size_needs_a_global_reference():
  with pytest.raises(TileIndexError, match="a size that is not a Python int needs a global reference"):
    view_in(lambda x: tt.alloc_shared((4,), jnp.float32).at[tt.ds(0, tt.program_id(0))], 6, 10)


def test_abstract_indices_of_shared_memory_are_allowed():
  ref = view_in(lambda x: tt.alloc_shared((3, 4, 8), jnp.float32).at[tt.program_id(0) % 3], 6, 10)
  assert ref.shape == (4, 8) and ref.view.dims[0].edges == ()


def test_whole_arrays_do_not_fit_in_registers():
  with pytest.raises(ResourceError, match=r"f32\[8192,8192\] of x \(262144 KiB\) does not fit") as e:
    view_in(lambda x: x[...], 8192, 8192)
  assert e.value.hint == "kernel arguments are whole arrays: take a block, x[tt.block(i, 128), ...]"


# --- tt.parallel

def parallel(kernel, shape, *, grid=(1,), x=X):
  return np.asarray(run(trace(kernel, grid=grid, x=f32(*x.shape), y=Out(f32(*shape))), x)[0])


def test_mesh_indices_are_blocks():
  def kernel(x, y):
    for i, j in tt.parallel(6, 10):
      y[i, j] = x[i, j] * 2

  np.testing.assert_array_equal(parallel(kernel, (6, 10)), X * 2)
  names = [e.primitive.name for e in trace(kernel, x=f32(6, 10), y=Out(f32(6, 10))).body.eqns]
  assert [n for n in names if n != "iota"] == ["load", "mul", "store"]


def test_mesh_indices_shift_by_scalars():
  def kernel(x, y):
    i0 = tt.program_id(0) * 3
    for i, j in tt.parallel(3, 4):
      y[i0 + i, j] = x[i + i0, 3 + j - 1]

  np.testing.assert_array_equal(parallel(kernel, (6, 4), grid=(2,)), X[:, 2:6])


def test_mesh_indices_permute():
  def kernel(x, y):
    for i, j in tt.parallel(10, 6):
      y[i, j] = x[j, i]

  np.testing.assert_array_equal(parallel(kernel, (10, 6)), X.T)


def test_mesh_indices_broadcast_and_reduce_rank():
  def kernel(x, y):
    for i, j in tt.parallel(6, 10):
      y[i, j] = x[i, j] + x[2, j] * x[i, 3]

  want = X + X[2][None, :] * X[:, 3][:, None]
  np.testing.assert_allclose(parallel(kernel, (6, 10)), want, rtol=1e-6)


def test_stores_through_permuted_and_partial_mesh_indices():
  def kernel(x, y):
    for i, j in tt.parallel(10, 6):
      y[j, i] = x[j, i]
    for i, j in tt.parallel(6, 10):
      y[2, j] = tt.max(x[i, j], axis=0, keepdims=True)
    for i in tt.parallel(6):
      y[i, 0] = x[i, 1] + i

  want = X.copy()
  want[2] = X.max(0)
  want[:, 0] = X[:, 1] + np.arange(6)
  np.testing.assert_allclose(parallel(kernel, (6, 10)), want, rtol=1e-6)


@pytest.mark.parametrize("index", [
  lambda i, j: (i * 2, j), lambda i, j: (i // 2, j), lambda i, j: (5 - i, j), lambda i, j: (i, i),
  lambda i, j: (i + j, j)])
def test_other_index_tiles_are_gathers(index):
  def kernel(x, y):
    for i, j in tt.parallel(6, 10):
      y[i, j] = x[index(i, j)] + i * 0 + j * 0

  x = np.random.default_rng(0).normal(size=(6, 10)).astype(np.float32)
  i, j = np.ogrid[:6, :10]
  a, b = np.broadcast_arrays(*index(i, j))
  inside = (a >= 0) & (a < 6) & (b >= 0) & (b < 10)
  want = np.broadcast_to(np.where(inside, x[a.clip(0, 5), b.clip(0, 9)], 0), (6, 10))
  got = run(trace(kernel, grid=(1,), x=f32(6, 10), y=Out(f32(6, 10))), x)[0]
  np.testing.assert_array_equal(got, want)


def test_mesh_indices_do_not_mix_with_slices():
  def kernel(x, y):
    for i in tt.parallel(6):
      y[i, :] = x[i, :]

  with pytest.raises(TileIndexError, match=r"mixes indices of tt\.parallel with"):
    parallel(kernel, (6, 10))


def test_several_values_for_one_element_are_refused():
  def kernel(x, y):
    for i, j in tt.parallel(6, 10):
      y[i, 0] = x[i, j]

  with pytest.raises(TileTypeError, match="several values would go to one element"):
    parallel(kernel, (6, 10))


# --- a reference is not a value

@pytest.mark.parametrize(("use", "message", "hint"), [
  (lambda x: x + 1, "arithmetic on the reference x", "did you mean x[...]?"),
  (lambda x: 2.0 * x, "arithmetic on the reference x", "did you mean x[...]?"),
  (lambda x: -x, "arithmetic on the reference x", "did you mean x[...]?"),
  (lambda x: x == 1, "arithmetic on the reference x", "did you mean x[...]?"),
  (lambda x: np.float32(1) + x, "arithmetic on the reference x", "did you mean x[...]?"),
  (lambda x: tt.exp(x), "exp: x: x is a reference, not a value", "did you mean x[...]?"),
  (lambda x: tt.where(True, x, 0), "where: x: x is a reference, not a value", "did you mean x[...]?"),
  (lambda x: list(x), "iteration of the reference x", "loop over an index: for i in tt.range(n): x[i]"),
  (lambda x: 1 in x, "membership of the reference x", "did you mean tt.any(x[...] == x)?"),
  (lambda x: int(x), "the integer value of the reference x", "did you mean x[...]?"),
  (lambda x: bool(x), "the truth value of the reference x", "did you mean x[...]? An optional argument is tested with "
                                                            "`is None`")])
def test_a_reference_used_as_a_value_is_refused(use, message, hint):
  with pytest.raises(TileTypeError, match=message) as e:
    view_in(use, 6, 10)
  assert e.value.hint == hint


def test_missing_attributes_say_what_to_load():
  with pytest.raises(TileAttributeError, match="a reference has no attribute 'astype'") as e:
    view_in(lambda x: x.astype(jnp.float32), 6, 10)
  assert e.value.hint == "load it first: x[...].astype"
  assert view_in(lambda x: hasattr(x, "aval"), 6, 10) is False


@pytest.mark.parametrize("index", [lambda: tt.block(2**30, 4), lambda: tt.ds(-2**31 - 1, 4), lambda: tt.ds(0, 2**31)])
def test_an_index_beyond_32_bits_is_refused(index):
  with pytest.raises(TileIndexError, match="an index is an i32"):
    view_in(lambda x: x.at[index()], 16, 10)
