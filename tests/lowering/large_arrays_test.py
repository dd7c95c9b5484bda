"""Arrays of more than 2**31 elements: where the PTX of a program says that its bytes are, without allocating any."""
from __future__ import annotations

import math

import jax
import numpy as np
import pytest

import tiletrace as tt
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F32, assemble, lower, struct, variants
from tests.transforms.kernels import like
from tiletrace.core.errors import TileTypeError
from tiletrace.stages import Lowered, Traced


def rows_and_columns(x, y):
  at = tt.block(tt.program_id(0), 16), tt.block(tt.program_id(1), 128)
  y[at] = x[at]


def rows_far_apart(x, y):
  at = tt.block(tt.program_id(0), 64), tt.block(tt.program_id(1), 8)
  y[at] = x[at]


def every_third_row(x, y):
  i = tt.program_id(0)
  y[tt.ds(i * 12, 4, 3), tt.block(tt.program_id(1), 128)] = x[tt.ds(i * 12, 4, 3), tt.block(tt.program_id(1), 128)]


def transposed(x, y):
  i, j = tt.block(tt.program_id(0), 32), tt.block(tt.program_id(1), 32)
  y[i, j] = x.T[i, j]


def constant_places(x, y):
  y[65536:65540, 39999] = x[65536:65540, 39999]


def index(shape, *dims) -> set[int]:
  """Byte offsets of f32 elements."""
  flat = np.ravel_multi_index(np.meshgrid(*dims, indexing="ij"), shape).reshape(-1).astype(np.int64)
  return set((flat[:, None] * 4 + np.arange(4)).reshape(-1).tolist())


WIDE, TALL, SQUARE = (70_001, 40_000), (64, 40_000_000), (50_000, 50_000)
# kernel, shape, grid, the program, its indices of x, and of y
CASES = [
    (rows_and_columns, WIDE, (4376, 313), (4375, 312), (range(70_000, 70_001), range(39_936, 40_000)), None),
    (rows_and_columns, WIDE, (4376, 313), (4000, 7), (range(64_000, 64_016), range(896, 1024)), None),
    (rows_far_apart, TALL, (1, 5_000_000), (0, 4_999_999), (range(64), range(39_999_992, 40_000_000)), None),
    (every_third_row, WIDE, (5834, 313), (5833, 1), (range(69_996, 70_001, 3), range(128, 256)), None),
    (transposed, SQUARE, (1563, 1563), (1562, 1561), (range(49_952, 49_984), range(49_984, 50_000)),
     (range(49_984, 50_000), range(49_952, 49_984))),
    (constant_places, WIDE, (1, 1), (0, 0), (range(65_536, 65_540), [39_999]), None),
]


@pytest.mark.parametrize(("kernel", "shape", "grid", "program", "reads", "writes"), CASES,
                         ids=[f"{c[0].__name__}-{c[3]}" for c in CASES])
def test_a_program_s_addresses_are_64_bits_wide(kernel, shape, grid, program, reads, writes):
  assert math.prod(shape) > 2**31
  lowered = lower(kernel, [struct(*shape)], struct(*shape), grid=grid)
  (x_reads, x_writes), (y_reads, y_writes) = simulated.global_accesses(lowered, program[0] * grid[1] + program[1])
  assert max(x_reads) > 2**32
  assert x_reads == index(shape, *reads) and y_writes == index(shape, *(writes or reads))
  assert not x_writes and not y_reads
  assert assemble(lowered).image


def test_a_batch_that_is_larger_than_its_examples_reach_is_addressed_too():
  kernel = tt.tile_call(rows_and_columns, struct(4096, 1024), grid=(256, 8))
  lowered: Lowered = Traced(kernel.trace(struct(4096, 1024)).program.batch(1000, (True,))).lower()
  (reads, _), (_, writes) = simulated.global_accesses(lowered, 1000 * 256 * 8 - 1)
  want = index((1000, 4096, 1024), [999], range(4080, 4096), range(896, 1024))
  assert reads == writes == want and max(want) == 1000 * 2**24 - 1


def test_tma_takes_them_and_their_shapes_come_out():
  def kernel(x, y):
    s = tt.alloc_shared((64, 64), BF16)
    for k in tt.pipelined(4, num_stages=2):
      tt.copy(x.at[tt.block(tt.program_id(0), 64), tt.block(k, 64)], s)
      y[tt.block(tt.program_id(0), 64), tt.block(k, 64)] = s[...]

  x = struct(2**20, 4096, dtype=BF16)
  lowered = lower(kernel, [x], x, grid=2**14)
  assert variants(lowered, "copy") == ["tma"]
  (tensor_map,) = lowered.compile().image.tensor_maps
  assert (tensor_map.dims, tensor_map.strides) == ((4096, 2**20), (8192,))
  call = tt.tile_call(kernel, x, grid=2**14)
  assert jax.eval_shape(call, x) == like(x)


@pytest.mark.parametrize("shape", [(2**31,), (3, 2**31), (3_000_000_000,)], ids=str)
def test_a_dimension_that_an_i32_cannot_index_is_refused(shape):
  def kernel(x, y):
    y[...] = x[0, :1] if len(shape) == 2 else x[:1]

  call = tt.tile_call(kernel, struct(1), grid=1)
  for run in (call.trace, lambda x: jax.eval_shape(call, x)):
    with pytest.raises(TileTypeError, match=rf"dimension {len(shape) - 1} of x has {shape[-1]} elements") as e:
      run(struct(*shape, dtype=F32))
    assert "def kernel(x, y)" in str(e.value) and e.value.hint == "fold it into two dimensions: x.reshape(-1, 4096)"
