from __future__ import annotations

import numpy as np
import pytest

import tiletrace as tt
from tests.tracing import f32, trace, trace_values
from tiletrace.core import dtypes
from tiletrace.core.tile import MeshIndex

F = (dtypes.f32, (4, 8))


def test_attributes_are_jnps():
  x = trace_values(lambda v: v, F)
  assert (x.shape, x.dtype, x.ndim, x.size) == ((4, 8), np.float32, 2, 32)
  assert repr(x) == "Tile<f32[4,8]>"
  assert trace_values(lambda v: v.T, F).shape == (8, 4)
  assert trace_values(lambda v: v.astype("bfloat16"), F).dtype == dtypes.bf16
  assert trace_values(lambda v: (v > 0).any(1) | (v < 0).all(1), F).type == trace_values(lambda v: v[:, 0] > 0, F).type
  assert trace_values(lambda v: v.max(1, keepdims=True) + v.min() + v.mean(0)[None], F).shape == (4, 8)


def test_a_cast_to_its_own_dtype_is_the_tile_itself():
  assert trace_values(lambda v: (v.astype("float32") is v, +v is v), F) == (True, True)


@pytest.mark.parametrize(("use", "hint"), [
  (bool, "tt.where(p, x, y)"), (lambda v: v[0] and v[1], "& | ~"), (lambda v: 0 < v < 1, "chained comparisons"),
  (lambda v: v in [1, 2], "tt.any(x == y)"), (lambda v: 1 in v, "tt.any(x == y)"), (int, "x.astype(jnp.int32)"),
  (float, "tt.exp rather than math.exp"), (lambda v: [10, 20][v], "tt.range for a loop"), (iter, "tt.parallel"),
  (lambda v: max(v, v), "tt.maximum/tt.minimum"), (round, "tt.round(x)"), (lambda v: tuple(v), "tt.parallel")])
def test_protocols_that_need_a_value_are_refused_with_the_remedy(use, hint):
  with pytest.raises(tt.TileTypeError, match="is not known while tracing") as e:
    trace_values(use, F)
  assert hint in e.value.hint


def test_tiles_are_not_hashable():
  with pytest.raises(TypeError, match="unhashable"):
    trace_values(hash, F)


def test_hasattr_of_an_unknown_attribute_is_false():
  assert trace_values(lambda v: hasattr(v, "aval") or hasattr(v, "no_such_thing"), F) is False


def test_len_is_no_type_error_because_list_swallows_those():
  with pytest.raises(tt.ForeignFunctionError, match=r"len\(\) of a traced f32\[4,8\]"):
    trace_values(len, F)


def test_mesh_indices_remember_axis_extent_and_offset():
  seen = []

  def kernel(x):
    for i, j in tt.parallel(16, 4):
      seen.extend([i, j, 3 + i, j - 1, tt.program_id(0) + j, i + i, i * 2])

  trace(kernel, x=f32(4))
  i, j, shifted, back, dynamic, both, scaled = seen[:7]
  assert [(k.axis, k.extent, k.offset, k.shape) for k in (i, j)] == [(0, 16, 0, (16, 1)), (1, 4, 0, (1, 4))]
  assert (shifted.offset, back.offset) == (3, -1)
  assert dynamic.offset.type.shape == () and dynamic.shape == (1, 4)
  assert not isinstance(both, MeshIndex) and not isinstance(scaled, MeshIndex)


def test_one_extent_binds_an_index_of_rank_1():
  seen = []

  def kernel(x):
    for i in tt.parallel(16):
      seen.append(i)

  trace(kernel, x=f32(4))
  assert seen[0].shape == (16,)


def test_all_leaves_pythons_own_names_out():
  names = set(tt.__all__)
  assert not names & {"range", "sum", "max", "min", "any", "all", "abs", "round", "pow"}
  assert all(hasattr(tt, name) for name in names)
  assert len(tt.__all__) == len(names)
  assert all(hasattr(tt, name) for name in ("range", "sum", "max", "min", "any", "all", "abs", "pow"))
