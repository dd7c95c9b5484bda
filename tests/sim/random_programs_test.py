"""Random small tile programs give the same in the simulator, from their PTX, and as jax ops on the CPU.

Values are small integers, also where the dtype is a float: sums and products are exact in any order, so the two must
agree bit for bit, except after an approximate function. Seeds of the simulator's schedule are random too.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st

import tiletrace as tt
from tests.tolerances import assert_close
from tiletrace.sim.launch import run

CHECKS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "i32": jnp.int32}
EXTENT = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 96, 100, 128, 131]))
SEED = st.integers(0, 1 << 16)


def agree(call: tt.TileCall, inputs: tuple[np.ndarray, ...], seed: int, kind: str = "exact") -> None:
  """Both backends, and no faults under this seed."""
  want = jax.tree.leaves(jax.jit(call)(*inputs))
  got = run(call.lower(*inputs).lowering, inputs, seed=seed)
  assert not got.faults, "\n".join(map(str, got.faults))
  for x, y in zip(got.outputs, want, strict=True):
    assert_close(x, np.asarray(y), kind)


def small(seed: int, *shape: int, dtype: Any, most: int = 4) -> np.ndarray:
  return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(dtype)


def struct(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


# --- expressions: nested tuples of an op and its operands

LEAVES = st.sampled_from(["x", "y", "row", "column", "one"])
EXACT = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "max": tt.maximum,
         "min": tt.minimum, "where": lambda a, b: tt.where(a > b, a, b - a)}
TREES = st.recursive(LEAVES, lambda t: st.tuples(st.sampled_from(sorted(EXACT)), t, t), max_leaves=4)
FINAL = {"": lambda v: v, "exp": lambda v: tt.exp(v * 0.0625), "tanh": tt.tanh, "square": lambda v: v * v,
         "abs": abs, "neg": lambda v: -v}


def value(tree: Any, leaves: dict[str, Any]) -> Any:
  return leaves[tree] if isinstance(tree, str) else EXACT[tree[0]](value(tree[1], leaves), value(tree[2], leaves))


@dataclasses.dataclass(frozen=True)
class Elementwise:
  """z = final(tree(x, y, row and column indices)), tile by tile, perhaps through shared memory."""
  shape: tuple[int, int]
  block: tuple[int, int]
  dtypes: tuple[str, str]
  tree: Any
  final: str
  shared: bool
  options: dict[str, Any]

  def kernel(self, x, y, z):
    (i, bm), (j, bn) = ((tt.program_id(d), self.block[d]) for d in range(2))
    at = tt.block(i, bm), tt.block(j, bn)
    wide = jnp.int32 if self.dtypes == ("i32", "i32") else jnp.float32
    v = x[at]
    if self.shared:
      s = tt.alloc_shared(self.block, x.dtype)
      s[...] = v
      v = s[...]
    leaves = {"x": v.astype(wide), "y": y[at].astype(wide), "one": tt.full(self.block, 1, wide),
              "row": ((i * bm + tt.arange(bm)) % 5)[:, None].astype(wide),
              "column": ((j * bn + tt.arange(bn)) % 3)[None, :].astype(wide)}
    z[at] = FINAL[self.final](tt.broadcast_to(value(self.tree, leaves), self.block)).astype(z.dtype)


PERSISTENT = st.sampled_from([False, True, "dynamic"])
OPTIONS = st.fixed_dictionaries({"warpgroups": st.sampled_from([1, 2]), "persistent": PERSISTENT})
ELEMENTWISE = st.builds(
    Elementwise, st.tuples(EXTENT, EXTENT),
    st.tuples(st.sampled_from([1, 4, 8, 13, 16]), st.sampled_from([8, 24, 32, 64])),
    st.sampled_from([("f32", "f32"), ("bf16", "f32"), ("f16", "bf16"), ("bf16", "bf16"), ("i32", "i32")]), TREES,
    st.sampled_from(["", "abs", "neg", "square", "exp", "tanh"]), st.booleans(), OPTIONS)


@settings(CHECKS, max_examples=36)
@given(ELEMENTWISE, SEED)
def test_elementwise(p: Elementwise, seed: int):
  source, target = (DTYPES[d] for d in p.dtypes)
  if p.final in ("exp", "tanh") and target == jnp.int32:
    p = dataclasses.replace(p, final="")
  call = tt.tile_call(p.kernel, struct(target, *p.shape),
                      grid=tuple(tt.cdiv(n, b) for n, b in zip(p.shape, p.block)), **p.options)
  inputs = small(seed, *p.shape, dtype=source), small(seed + 1, *p.shape, dtype=source)
  agree(call, inputs, seed, "elementwise" if p.final in ("exp", "tanh") else "exact")


# --- reductions

def reduce_kernel(x, y, *, rows, op, axis, through_shared):
  v = x[tt.block(tt.program_id(0), rows), :]
  if through_shared:
    s = tt.alloc_shared(v.shape, x.dtype)
    s[...] = v
    v = s[...]
  v = v.astype(jnp.float32) if op == "mean" else v
  if axis == 1:
    y[tt.block(tt.program_id(0), rows)] = getattr(tt, op)(v, axis=1).astype(y.dtype)
  else:
    y[tt.program_id(0), :] = getattr(tt, op)(v, axis=0).astype(y.dtype)


@settings(CHECKS, max_examples=30)
@given(EXTENT, st.one_of(EXTENT, st.sampled_from([229, 500])), st.sampled_from([1, 2, 5, 8, 16]),
       st.sampled_from(["sum", "max", "min"]), st.sampled_from([0, 1]), st.sampled_from(["f32", "i32"]), st.booleans(),
       OPTIONS, SEED)
def test_reductions(m, n, rows, op, axis, dtype, through_shared, options, seed):
  programs = tt.cdiv(m, rows)
  if axis == 0:
    m = programs * rows               # what lies past the edge is 0, which a maximum would see
  out = struct(DTYPES[dtype], m) if axis == 1 else struct(DTYPES[dtype], programs, n)
  kernel = functools.partial(reduce_kernel, rows=rows, op=op, axis=axis, through_shared=through_shared)
  agree(tt.tile_call(kernel, out, grid=programs, **options), (small(seed, m, n, dtype=DTYPES[dtype], most=9),), seed)


# --- rings without a gemm: copies into slots that threads read

def ring_kernel(x, y, *, block, num_stages, transposed):
  i = tt.program_id(0)
  s = tt.alloc_shared(block, x.dtype)
  acc = tt.alloc_fragment(block[::-1] if transposed else block, jnp.float32)
  acc[...] = 1
  for k in tt.pipelined(tt.cdiv(x.shape[1], block[1]), num_stages=num_stages):
    tt.copy(x.at[tt.block(i, block[0]), tt.block(k, block[1])], s)
    acc[...] = tt.maximum(acc[...] * 0.5, 0) + (s.T if transposed else s)[...].astype(jnp.float32)
  y[i, :, :] = acc[...]


@settings(CHECKS, max_examples=30)
@given(st.sampled_from([(8, 64), (16, 128), (64, 64), (16, 24), (5, 40)]), st.integers(1, 40), st.integers(1, 420),
       st.integers(1, 4), st.booleans(), st.sampled_from(["f32", "bf16"]), st.sampled_from([1, 2]), SEED)
def test_rings(block, m, n, num_stages, transposed, dtype, warpgroups, seed):
  """Halves of small integers stay exact for some ten iterations: the order of additions shows."""
  programs = tt.cdiv(m, block[0])
  kernel = functools.partial(ring_kernel, block=block, num_stages=num_stages, transposed=transposed)
  call = tt.tile_call(kernel, struct(jnp.float32, programs, *(block[::-1] if transposed else block)), grid=programs,
                      warpgroups=warpgroups)
  agree(call, (small(seed, m, n, dtype=DTYPES[dtype]),), seed, "elementwise")


# --- gemms

@dataclasses.dataclass(frozen=True)
class Gemm:
  """C = final(A B), in any form and at any extents."""
  shape: tuple[int, int, int]
  block: tuple[int, int, int]
  form: str
  dtypes: tuple[str, str]
  num_stages: int
  final: str
  scaled: bool
  options: dict[str, Any]

  def kernel(self, a, b, c):
    i, j = tt.program_id(0), tt.program_id(1)
    (bm, bn, bk), (ta, tb) = self.block, (f == "t" for f in self.form)
    a_s = tt.alloc_shared((bk, bm) if ta else (bm, bk), a.dtype)
    b_s = tt.alloc_shared((bn, bk) if tb else (bk, bn), b.dtype)
    acc = tt.alloc_fragment((bm, bn), jnp.float32)
    acc[...] = 0
    for k in tt.pipelined(tt.cdiv(self.shape[2], bk), num_stages=self.num_stages):
      rows, inner, cols = tt.block(i, bm), tt.block(k, bk), tt.block(j, bn)
      tt.copy(a.at[inner, rows] if ta else a.at[rows, inner], a_s)
      tt.copy(b.at[cols, inner] if tb else b.at[inner, cols], b_s)
      left = a_s.T if ta else a_s
      tt.gemm(left[...] * 2 if self.scaled else left, b_s.T if tb else b_s, acc)
    c[tt.block(i, bm), tt.block(j, bn)] = FINAL[self.final](acc[...]).astype(c.dtype)


GEMMS = st.builds(
    Gemm, st.tuples(st.sampled_from([1, 64, 100, 129, 200]), st.sampled_from([3, 8, 72, 128, 130]),
                    st.sampled_from([8, 31, 64, 136, 200, 330])),
    st.tuples(st.just(128), st.sampled_from([8, 24, 64, 128]), st.sampled_from([16, 32, 64])),
    st.sampled_from(["nn", "nt", "tn", "tt"]), st.sampled_from([("bf16", "bf16"), ("bf16", "f32"), ("f16", "f16")]),
    st.integers(1, 4), st.sampled_from(["", "abs", "neg"]), st.booleans(),
    st.fixed_dictionaries({"warpgroups": st.sampled_from([1, 2]), "persistent": PERSISTENT,
                           "cluster": st.sampled_from([None, (2, 1), (1, 2), (2, 2)])}))


@settings(CHECKS, max_examples=36)
@given(GEMMS, SEED)
def test_gemms(p: Gemm, seed: int):
  (m, n, k), (source, target) = p.shape, (DTYPES[d] for d in p.dtypes)
  p = dataclasses.replace(p, scaled=p.scaled and p.form[0] == "n")
  a, b = small(seed, m, k, dtype=source, most=2), small(seed + 1, k, n, dtype=source, most=2)
  inputs = (a.T.copy() if p.form[0] == "t" else a), (b.T.copy() if p.form[1] == "t" else b)
  grid = tt.cdiv(m, p.block[0]), tt.cdiv(n, p.block[1])
  options = dict(p.options)
  if options["persistent"] == "dynamic" or any(n % c for n, c in zip(grid, options["cluster"] or (1, 1))):
    options["cluster"] = None
  agree(tt.tile_call(p.kernel, struct(target, m, n), grid=grid, **options), inputs, seed)


# --- two products in a loop, of two rings

def chain_kernel(q, k, v, o, *, bn, num_stages, policy):
  """O = relu(Q K^T) V: the first product becomes the second one's operand in registers."""
  i = tt.program_id(0)
  q_s = tt.alloc_shared((128, 64), q.dtype)
  k_s, v_s = (tt.alloc_shared((bn, 64), x.dtype) for x in (k, v))
  s = tt.alloc_fragment((128, bn), jnp.float32)
  acc = tt.alloc_fragment((128, 64), jnp.float32)
  acc[...] = 0
  tt.copy(q.at[tt.block(i, 128), :], q_s)
  for j in tt.pipelined(tt.cdiv(k.shape[0], bn), num_stages=num_stages):
    tt.copy(k.at[tt.block(j, bn), :], k_s)
    tt.copy(v.at[tt.block(j, bn), :], v_s)
    tt.gemm(q_s, k_s.T, s, policy=policy, accumulate=False)
    tt.gemm(tt.maximum(s[...], 0).astype(v.dtype), v_s, acc, policy=policy)
  o[tt.block(i, 128), :] = acc[...].astype(o.dtype)


@settings(CHECKS, max_examples=12)
@given(st.sampled_from([1, 100, 200]), st.integers(1, 400), st.sampled_from([16, 64, 96]), st.integers(1, 3),
       st.sampled_from([1, 2]), st.sampled_from(["FULL_ROW", "FULL_COL"]), SEED)
def test_chains(m, n, bn, num_stages, warpgroups, policy, seed):
  """Scores are at most 256, which bf16 holds."""
  kernel = functools.partial(chain_kernel, bn=bn, num_stages=num_stages, policy=getattr(tt, policy))
  call = tt.tile_call(kernel, struct(jnp.float32, m, 64), grid=tt.cdiv(m, 128), warpgroups=warpgroups)
  agree(call, tuple(small(seed + i, rows, 64, dtype=jnp.bfloat16, most=2) for i, rows in enumerate((m, n, n))), seed)
