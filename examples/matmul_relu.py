"""C = relu(A @ B), any shape: one kernel, on a GPU and on a CPU.

  python examples/matmul_relu.py [M N K]
"""
from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt


def matmul_relu_kernel(a, b, c, *, bm, bn, bk, num_stages):
  i, j = tt.program_id(0), tt.program_id(1)
  a_s = tt.alloc_shared((bm, bk), a.dtype)
  b_s = tt.alloc_shared((bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], bk), num_stages=num_stages):
    tt.copy(a.at[tt.block(i, bm), tt.block(k, bk)], a_s)     # past the edge: zeros
    tt.copy(b.at[tt.block(k, bk), tt.block(j, bn)], b_s)
    tt.gemm(a_s, b_s, acc)
  c[tt.block(i, bm), tt.block(j, bn)] = tt.maximum(acc[...], 0).astype(c.dtype)   # past the edge: dropped


def matmul_relu(a, b, *, bm=128, bn=256, bk=64, num_stages=4):
  m, n = a.shape[0], b.shape[1]
  return tt.tile_call(
      functools.partial(matmul_relu_kernel, bm=bm, bn=bn, bk=bk, num_stages=num_stages),
      out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
      grid=(tt.cdiv(m, bm), tt.cdiv(n, bn)), warpgroups=2, raster=16, persistent=True)(a, b)


def main(m: int = 1000, n: int = 776, k: int = 336) -> int:
  if jax.default_backend() == "gpu":
    print(f"running on {jax.devices()[0].device_kind}: the kernel as compiled PTX")
  else:
    print(f"no GPU that jax can use: running on the {jax.default_backend().upper()}, the kernel as jax ops")
  key_a, key_b = jax.random.split(jax.random.key(0))
  a = jax.random.normal(key_a, (m, k), jnp.bfloat16)
  b = jax.random.normal(key_b, (k, n), jnp.bfloat16)

  c = jax.jit(matmul_relu)(a, b)                              # inside jit it is an operation like any other
  doubled = jax.jit(lambda a, b: matmul_relu(a, b) * 2)(a, b)

  exact = np.maximum(np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64), 0)
  plain = jnp.maximum(jnp.dot(a, b, preferred_element_type=jnp.float32), 0)
  error = np.linalg.norm(np.asarray(c).astype(np.float64) - exact) / np.linalg.norm(exact)
  to_plain = float(jnp.linalg.norm(c - plain) / jnp.linalg.norm(plain))
  ok = error < 1e-2 and to_plain < 1e-2 and bool((doubled == c * 2).all())
  print(f"relu(A @ B), {m} x {n} x {k}, {a.dtype}: relative error {error:.2e} to float64, {to_plain:.2e} to jnp in f32")
  print("right" if ok else "WRONG")
  return 0 if ok else 1


def extent(word: str) -> int:
  if not (word.isdecimal() and int(word)):
    raise argparse.ArgumentTypeError(f"{word!r} is no whole number above 0")
  return int(word)


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description="C = relu(A @ B): A is M x K, B is K x N, of random numbers.")
  for name, default in (("m", 1000), ("n", 776), ("k", 336)):
    parser.add_argument(name, type=extent, nargs="?", default=default, metavar=name.upper(), help=f"default: {default}")
  return parser.parse_args()


if __name__ == "__main__":
  raise SystemExit(main(**vars(arguments())))
