"""Conversions stand where they cost least: the cut against brute force, and a chain between two gemms."""
from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiletrace as tt
from tiletrace.core.graph import Eqn, Var, walk
from tiletrace.core.ops.relayout import relayout_p
from tiletrace.core.types import TileType
from tiletrace.lowering.infer.constraints import Relates
from tiletrace.lowering.infer.cut import improve
from tiletrace.lowering.layouts.fragment import blocked

SHAPE = (64, 64)
LAYOUTS = (blocked(SHAPE, 32, 4), blocked(SHAPE, 32, 4, order=(0, 1)))


def _problem(seed: int):
  """A random graph of eight values between two anchors: (values, links, edge costs, node costs)."""
  rng = random.Random(seed)
  values = [Var(TileType(SHAPE, np.dtype(np.float32)), f"v{i}") for i in range(8)]
  pairs = [(i, j) for i, j in itertools.combinations(range(8), 2) if j == i + 1 or rng.random() < 0.25]
  links = [Relates(values[i], values[j], None, lambda x: x, lambda x: x) for i, j in pairs]  # type: ignore[arg-type]
  edge = {id(link): rng.randint(1, 50) for link in links}
  node = {(v.hint, k): rng.randint(0, 20) for v in values for k in range(2)}
  return values, links, edge, node


def _price(labels, values, links, edge, node):
  crossing = sum(edge[id(link)] for link in links if labels[link.operand] != labels[link.out])
  return crossing + sum(node[v.hint, labels[v]] for v in values)


@pytest.mark.parametrize("seed", range(20))
def test_the_border_between_two_anchors_is_a_minimum_cut(seed):
  values, links, edge, node = _problem(seed)
  start = {v: int(i >= 4) for i, v in enumerate(values)}
  spreads = [dict.fromkeys(values, layout) for layout in LAYOUTS]

  found = improve(start, spreads, links, lambda link, have, want: edge[id(link)],
                  lambda v, layout: node[v.hint, LAYOUTS.index(layout)], {values[0], values[-1]})

  ends = {values[0]: 0, values[-1]: 1}
  best = min(_price({**dict(zip(values[1:-1], bits)), **ends}, values, links, edge, node)
             for bits in itertools.product((0, 1), repeat=6))
  assert found[values[0]] == 0 and found[values[-1]] == 1
  assert _price(found, values, links, edge, node) == best


def test_a_value_that_only_one_anchor_reaches_keeps_its_layout():
  values, links, *_ = _problem(3)
  spreads = [dict.fromkeys(values, LAYOUTS[0]), dict.fromkeys(values[4:], LAYOUTS[1])]

  found = improve({v: int(i >= 6) for i, v in enumerate(values)}, spreads, links, lambda *_: 1, lambda *_: 0,
                  {values[0], values[-1]})

  assert all(found[v] == 0 for v in values[:4])


def _chain_kernel(a, b, d, y):
  a_s, b_s, d_s = (tt.alloc_shared((128, 128), a.dtype) for _ in range(3))
  for s, ref in ((a_s, a), (b_s, b), (d_s, d)):
    tt.copy(ref, s)
  acc = tt.alloc_fragment((128, 128), jnp.float32)
  out = tt.alloc_fragment((128, 128), jnp.float32)
  tt.gemm(a_s, b_s, acc, accumulate=False, policy=tt.FULL_ROW)
  p = (tt.exp2(acc[...] * 2) + 1).astype(a.dtype)
  tt.gemm(p, d_s, out, accumulate=False, policy=tt.FULL_ROW)
  y[...] = out[...]


def _relayouts(graph) -> list[Eqn]:
  return [e for e in walk(graph.body) if e.primitive is relayout_p]


def test_a_product_goes_from_accumulator_to_operand_without_a_conversion():
  x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
  out = jax.ShapeDtypeStruct((128, 128), jnp.float32)
  lowered = tt.tile_call(_chain_kernel, out, grid=1, warpgroups=2).lower(x, x, x)

  assert not _relayouts(lowered.lowering.laid_out.graph)


def _transposed_kernel(a, b, row, y):
  """The accumulator of a gemm meets a fragment whose layout is fixed by the author."""
  a_s, b_s = tt.alloc_shared((64, 64), a.dtype), tt.alloc_shared((64, 64), b.dtype)
  tt.copy(a, a_s)
  tt.copy(b, b_s)
  acc = tt.alloc_fragment((64, 64), jnp.float32)
  mine = tt.alloc_fragment((64, 64), jnp.bfloat16, layout=blocked((64, 64), 16, 4))
  tt.gemm(a_s, b_s, acc, accumulate=False)
  mine[...] = (acc[...] * 2 + 1).astype(jnp.bfloat16)
  y[...] = mine[...]


def test_the_conversion_stands_behind_the_cast_where_the_value_has_half_the_bytes():
  x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
  lowered = tt.tile_call(_transposed_kernel, x, grid=1).lower(x, x, x)

  (relayout,) = _relayouts(lowered.lowering.laid_out.graph)
  assert relayout.outvars[0].type.dtype == jnp.bfloat16
  assert "relayout of bf16[64,64]" in lowered.report()
