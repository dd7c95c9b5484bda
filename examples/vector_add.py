"""z = x + y: the smallest kernel, with a length that no block divides.

  python examples/vector_add.py
"""
from __future__ import annotations

import functools

import jax

import tiletrace as tt


def add_kernel(x, y, z, *, block):
  i = tt.block(tt.program_id(0), block)       # elements i * block to (i + 1) * block
  z[i] = x[i] + y[i]                          # the last block hangs over: it loads zeros and its stores are dropped


def add(x, y, *, block=1024):
  n = x.shape[0]
  return tt.tile_call(functools.partial(add_kernel, block=block), jax.ShapeDtypeStruct((n,), x.dtype),
                      grid=(tt.cdiv(n, block),))(x, y)


def main() -> int:
  x = jax.random.normal(jax.random.key(0), (100_003,))
  y = jax.random.normal(jax.random.key(1), x.shape)
  equal = bool((add(x, y) == x + y).all())
  print(jax.make_jaxpr(add)(x, y))
  print(f"{x.size} sums on the {jax.default_backend().upper()}: {'equal to' if equal else 'NOT EQUAL TO'} x + y")
  return 0 if equal else 1


if __name__ == "__main__":
  raise SystemExit(main())
