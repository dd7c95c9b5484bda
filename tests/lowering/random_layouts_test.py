"""Random statements on fragments in random layouts: the PTX, in the simulator, gives what the jax operations give."""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tiletrace as tt
from tests.gpu.corpus import Case
from tests.lowering import simulated
from tests.lowering.kernels import BF16, F32, I32, struct
from tiletrace.lowering.layouts.normal import FIELD
from tiletrace.lowering.layouts.relation import Layout, build


def random_layout(r: random.Random, shape: tuple[int, ...]) -> Layout:
  """Any bit of the index in any bit of register, lane or warp; sometimes copies in lanes or warps."""
  bits = [1 << FIELD * d + b for d, n in enumerate(shape) for b in range(n.bit_length() - 1)]
  r.shuffle(bits)
  lanes, warps, regs = bits[:5], bits[5:7], bits[7:]
  for place in (lanes, warps):
    if r.random() < 0.3:
      regs.append(place[0])
      place[0] = 0
  r.shuffle(regs)
  return build(shape, {"reg": regs, "lane": lanes, "warp": warps})


def through_shared(v: tt.Tile, *, transposed: bool) -> tt.Tile:
  s = tt.alloc_shared(v.shape, v.dtype)
  s[...] = v
  return (s.T[...] * 2).T if transposed else s[...] + 1


def through_fragment(v: tt.Tile, b: tt.Ref) -> tt.Tile:
  b[...] = v
  return b[...]


def accumulated(v: tt.Tile, b: tt.Ref) -> tt.Tile:
  b[...] = v
  for i in tt.range(3):
    b[...] = b[...] + i.astype(b.dtype)
  return b[...]


# A statement: (the value so far, the input, the second fragment, an axis) -> the value
STATEMENTS: tuple[Callable[[tt.Tile, Any, tt.Ref, int], tt.Tile], ...] = (
    lambda v, x, b, axis: v + x[...],
    lambda v, x, b, axis: through_fragment(v, b),
    lambda v, x, b, axis: v - tt.max(v, axis=axis, keepdims=True),
    lambda v, x, b, axis: (tt.cumsum(v.astype(F32), axis) % 7).astype(v.dtype),
    lambda v, x, b, axis: through_fragment(v + 1, b) - v,
    lambda v, x, b, axis: tt.where(v > tt.min(v, axis=axis, keepdims=True), v, 0),
    lambda v, x, b, axis: through_shared(v, transposed=False),
    lambda v, x, b, axis: through_shared(v, transposed=True),
    lambda v, x, b, axis: tt.reshape(tt.reshape(v, (-1,)), v.shape),
    lambda v, x, b, axis: v + v[3:4, :] + v[:, 5:6],
    lambda v, x, b, axis: accumulated(v, b),
)


@pytest.mark.parametrize("seed", range(60))
def test_values_do_not_depend_on_where_they_lie(seed):
  r = random.Random(seed)
  shape, dtype = r.choice([(16, 32), (32, 32), (64, 16), (8, 128)]), r.choice([F32, I32, BF16, np.int8, np.uint16])
  layouts, axis = [random_layout(r, shape) for _ in range(2)], r.randrange(2)
  statements = [r.randrange(len(STATEMENTS)) for _ in range(4)]

  def kernel(x, y, z):
    a, b = (tt.alloc_fragment(shape, dtype, layout=layout) for layout in layouts)
    a[...] = x[...]
    v = a[...]
    for s in statements:
      v = STATEMENTS[s](v, x, b, axis)
    y[...] = v
    z[...] = tt.sum(v.astype(F32), axis=axis)

  x = np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)      # so that every sum is exact
  call = tt.tile_call(kernel, (struct(*shape, dtype=dtype), struct(shape[1 - axis])), grid=1)
  for got, want in zip(simulated.run(call.lower(x), Case(call, (x,), (), "exact")), call(x), strict=True):
    np.testing.assert_array_equal(got.astype(np.float64), np.asarray(want).astype(np.float64), str(statements))
