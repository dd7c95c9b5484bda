"""The eight steps of docs/tutorials/gemm.md against jnp.dot: A[m, k] @ B[k, n], bf16, both row-major.

  python -m benchmarks.tutorial_gemm                 # all steps; the table of the page
  python -m benchmarks.tutorial_gemm --steps 5 8 --shapes 8192x8192x8192 --json tutorial.json
"""
from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp

import tiletrace as tt
from benchmarks import harness
from benchmarks.matmul import check, inputs, reference, status

SHAPES = ((4096, 4096, 4096),)                              # M N K
COLUMNS = ("step", "shape", "tiletrace TFLOP/s", "jnp TFLOP/s", "speedup", "spread", "error", "registers", "status")


def outer_kernel(a, b, c, *, bm, bn):
  rows, cols = tt.block(tt.program_id(0), bm), tt.block(tt.program_id(1), bn)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.range(a.shape[1]):
    column = a[rows, tt.ds(k, 1)].astype(jnp.float32)       # [bm, 1]
    row = b[tt.ds(k, 1), cols].astype(jnp.float32)          # [1, bn]
    acc[...] += column * row
  c[rows, cols] = acc[...].astype(c.dtype)


def shared_kernel(a, b, c, *, bm, bn, bk):
  rows, cols = tt.block(tt.program_id(0), bm), tt.block(tt.program_id(1), bn)
  a_s = tt.alloc_shared((bm, bk), a.dtype)
  b_s = tt.alloc_shared((bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.range(tt.cdiv(a.shape[1], bk)):
    tt.copy(a.at[rows, tt.block(k, bk)], a_s)
    tt.copy(b.at[tt.block(k, bk), cols], b_s)
    for j in tt.range(bk):
      column = a_s[:, tt.ds(j, 1)].astype(jnp.float32)      # [bm, 1]
      row = b_s[tt.ds(j, 1), :].astype(jnp.float32)         # [1, bn]
      acc[...] += column * row
  c[rows, cols] = acc[...].astype(c.dtype)


def tensor_core_kernel(a, b, c, *, bm, bn, bk):
  rows, cols = tt.block(tt.program_id(0), bm), tt.block(tt.program_id(1), bn)
  a_s = tt.alloc_shared((bm, bk), a.dtype)
  b_s = tt.alloc_shared((bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.range(tt.cdiv(a.shape[1], bk)):
    tt.copy(a.at[rows, tt.block(k, bk)], a_s)
    tt.copy(b.at[tt.block(k, bk), cols], b_s)
    tt.gemm(a_s, b_s, acc)
  c[rows, cols] = acc[...].astype(c.dtype)


def pipelined_kernel(a, b, c, *, bm, bn, bk, num_stages):
  rows, cols = tt.block(tt.program_id(0), bm), tt.block(tt.program_id(1), bn)
  a_s = tt.alloc_shared((bm, bk), a.dtype)
  b_s = tt.alloc_shared((bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  for k in tt.pipelined(tt.cdiv(a.shape[1], bk), num_stages=num_stages):
    tt.copy(a.at[rows, tt.block(k, bk)], a_s)
    tt.copy(b.at[tt.block(k, bk), cols], b_s)
    tt.gemm(a_s, b_s, acc)
  c[rows, cols] = acc[...].astype(c.dtype)


# Of each step: the kernel, its constants, and the rest of the call.
STEPS = {
    1: (outer_kernel, dict(bm=64, bn=64), {}),
    2: (shared_kernel, dict(bm=64, bn=64, bk=32), {}),
    3: (tensor_core_kernel, dict(bm=64, bn=64, bk=64), {}),
    4: (tensor_core_kernel, dict(bm=128, bn=128, bk=64), {}),
    5: (pipelined_kernel, dict(bm=128, bn=128, bk=64, num_stages=4), {}),
    6: (pipelined_kernel, dict(bm=128, bn=256, bk=64, num_stages=4), dict(warpgroups=2)),
    7: (pipelined_kernel, dict(bm=128, bn=256, bk=64, num_stages=4), dict(warpgroups=2, raster=16)),
    8: (pipelined_kernel, dict(bm=128, bn=256, bk=64, num_stages=4), dict(warpgroups=2, raster=16, persistent=True)),
}


def matmul(step: int, m: int, n: int) -> tt.TileCall:
  kernel, constants, launch = STEPS[step]
  return tt.tile_call(functools.partial(kernel, **constants), jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
                      grid=(tt.cdiv(m, constants["bm"]), tt.cdiv(n, constants["bn"])), name=f"matmul_{step}", **launch)


def measure(step: int, m: int, n: int, k: int, args: Any) -> dict[str, Any]:
  row: dict[str, Any] = {"step": step, "shape": f"{m}x{n}x{k}"}
  call, make = matmul(step, m, n), functools.partial(inputs, m, n, k, jnp.bfloat16, "nn")
  row |= check(call, *make(0), form="nn", relu=False)
  if not args.check_only:
    sets = harness.rotating(make)
    dot = functools.partial(reference, form="nn", relu=False, out_dtype=jnp.bfloat16)
    peers = {"tiletrace": harness.over_sets(call), "jnp": harness.over_sets(dot)}
    found, _ = harness.compare(peers, sets, args, flops=2 * m * n * k)
    found["speedup"] = found.pop("jnp")
    row |= found
  row["status"] = status(row)
  return row


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.tutorial_gemm", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", nargs="+", type=int, choices=STEPS, default=list(STEPS))
  parser.add_argument("--shapes", nargs="+", metavar="MxNxK",
                      help="default: " + " ".join("x".join(map(str, s)) for s in SHAPES))
  harness.add_measuring(parser)
  return parser.parse_args()


def main() -> int:
  args = arguments()
  environment = harness.start()
  cases = [({"step": step, "shape": "x".join(map(str, shape))}, functools.partial(measure, step, *shape, args))
           for shape in harness.shapes_of(args.shapes, SHAPES) for step in args.steps]
  return harness.run_cases(cases, COLUMNS, environment, args.json)


if __name__ == "__main__":
  raise SystemExit(main())
