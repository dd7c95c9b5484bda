"""Where the time of a kernel goes, and where its elements lie: a timeline for Perfetto, and a page of its layouts.

  python examples/timeline.py [FOLDER]

Without a GPU the simulator runs the kernel, and times are its steps.
"""
from __future__ import annotations

import collections
import pathlib
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt

BM, BN, BK = 64, 64, 64


def matmul_kernel(a, b, c):
  i, j = tt.program_id(0), tt.program_id(1)
  a_s, b_s = tt.alloc_shared((BM, BK), a.dtype), tt.alloc_shared((BK, BN), b.dtype)
  acc = tt.alloc_fragment((BM, BN), jnp.float32)
  acc[...] = 0
  with tt.profile("main loop"):
    for k in tt.pipelined(tt.cdiv(a.shape[1], BK), num_stages=3):
      with tt.profile("block"):
        tt.copy(a.at[tt.block(i, BM), tt.block(k, BK)], a_s)
        tt.copy(b.at[tt.block(k, BK), tt.block(j, BN)], b_s)
        tt.gemm(a_s, b_s, acc)
  with tt.profile("store"):
    c[tt.block(i, BM), tt.block(j, BN)] = acc[...].astype(c.dtype)


def main() -> int:
  folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
  gpu = jax.default_backend() == "gpu"
  n = 1024 if gpu else 192
  a, b = (jnp.asarray(x, jnp.bfloat16) for x in np.random.default_rng(0).standard_normal((2, n, n)))
  matmul = tt.tile_call(matmul_kernel, jax.ShapeDtypeStruct((n, n), jnp.bfloat16), grid=(n // BM, n // BN),
                        options=tt.CompileOptions(profile=True), backend=None if gpu else "sim")

  with tt.timeline(folder / "trace.json") as timeline:
    jax.block_until_ready(matmul(a, b))
  cycles: dict[tuple[int, str], list[int]] = collections.defaultdict(list)
  for e in timeline.events:
    cycles[e.warpgroup, e.name].append(e.cycles)
  print(f"{n} x {n} x {n} on {'the GPU' if gpu else 'the simulator'}, {len(timeline.events)} spans:")
  for (warpgroup, name), found in sorted(cycles.items()):
    print(f"  warpgroup {warpgroup}, {name}: {len(found)} times, median {statistics.median(found):.0f} "
          f"{'cycles' if gpu else 'steps'}")
  print(f"{folder / 'trace.json'} is for https://ui.perfetto.dev")
  print(f"{tt.plot_layout(matmul.lower(a, b), folder / 'layouts.html')}: click an element")
  return 0


if __name__ == "__main__":
  raise SystemExit(main())
