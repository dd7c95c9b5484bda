"""Random sequences of statements on shared buffers, fragments and global memory, with loops and branches.

Threads see each other's stores in ever new orders, so a synchronisation that the compiler leaves out is a race in the
simulator; and the result equals that of the jax ops, which know no threads. Integers throughout: exact.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from hypothesis import given, settings, strategies as st

import tiletrace as tt
from tests.sim.random_programs_test import CHECKS, SEED, agree, small, struct

N = 16                      # tiles are square, so that any may be transposed
Statement = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Memory:
  """What the statements work on: an input, an output, two shared buffers, a fragment; and the indices in scope."""
  x: Any
  y: Any
  s: Any
  t: Any
  f: Any
  i: Any
  k: Any

  def shared(self, name: str, transposed: bool) -> Any:
    ref = self.s if name == "s" else self.t
    return ref.T if transposed else ref


def from_shared(m: Memory, name: str, transposed: bool) -> None:
  m.f[...] = m.shared(name, transposed)[...] + m.f[...] % 7


def to_shared(m: Memory, name: str, transposed: bool) -> None:
  if transposed:
    m.shared(name, False)[...] = m.f[...].T
  else:
    m.shared(name, False)[...] = m.f[...]


def copy_shared(m: Memory, name: str, transposed: bool) -> None:
  other = m.shared("t" if name == "s" else "s", False)
  if transposed:
    other[...] = m.shared(name, True)[...]
  else:
    tt.copy(m.shared(name, False), other)


def halves(m: Memory, name: str, transposed: bool) -> None:
  ref = m.shared(name, transposed)
  ref[:N // 2, :] = ref[N // 2:, :] + 1


def from_global(m: Memory, name: str, transposed: bool) -> None:
  tile = m.x.at[tt.ds(m.k * 5 - 3, N), :]
  if transposed:
    m.f[...] = tile[...]
  else:
    tt.copy(tile, m.shared(name, False))


def through_global(m: Memory, name: str, transposed: bool) -> None:
  mine = m.y.at[m.i, :, :]
  mine[...] = m.f[...]
  m.f[...] = mine.T[...] if transposed else mine[...] + 1


def reduce(m: Memory, name: str, transposed: bool) -> None:
  if transposed:
    m.f[...] = (m.f[...] + tt.sum(m.f[...], axis=1)[:, None]) % 31
  else:
    m.f[...] = (m.f[...] - tt.max(m.f[...], axis=0)[None, :]) % 31


def arithmetic(m: Memory, name: str, transposed: bool) -> None:
  m.f[...] = (m.f[...] * 3 + m.k + tt.arange(N)[:, None]) % 31


STATEMENTS = (from_shared, to_shared, copy_shared, halves, from_global, through_global, reduce, arithmetic)


def execute(m: Memory, statements: list[Statement]) -> None:
  for what, *arguments in statements:
    if what == "loop":
      count, body = arguments
      for k in tt.range(count if count < 3 else m.k % 3):
        execute(dataclasses.replace(m, k=k), body)
    elif what == "when":
      parity, body = arguments
      with tt.when((m.i + m.k) % 2 == parity):
        execute(m, body)
    else:
      STATEMENTS[what](m, *arguments)


ONE = st.tuples(st.integers(0, len(STATEMENTS) - 1), st.sampled_from(["s", "t"]), st.booleans())
BODY = st.recursive(
    st.lists(ONE, min_size=1, max_size=4),
    lambda body: st.lists(st.one_of(ONE, st.tuples(st.just("loop"), st.integers(0, 3), body),
                                    st.tuples(st.just("when"), st.integers(0, 1), body)), min_size=1, max_size=4),
    max_leaves=4)


@settings(CHECKS, max_examples=40)
@given(BODY, st.sampled_from([1, 2]), SEED)
def test_statements(statements, warpgroups, seed):
  def kernel(x, y):
    i = tt.program_id(0)
    s, t = (tt.alloc_shared((N, N), jnp.int32) for _ in range(2))
    f = tt.alloc_fragment((N, N), jnp.int32)
    f[...] = x[tt.block(i, N), :]
    s[...] = f[...]
    t[...] = f[...] * 2
    execute(Memory(x, y, s, t, f, i, i), statements)
    y[i, :, :] = f[...] + s.T[...] + t[...]

  programs = 3
  call = tt.tile_call(kernel, struct(jnp.int32, programs, N, N), grid=programs, warpgroups=warpgroups)
  agree(call, (small(seed, programs * N - 5, N, dtype=jnp.int32),), seed)
