"""Products of 8-bit floats with scales, against jit(jnp) and torch._scaled_mm (cuBLAS, CUTLASS).

  python -m benchmarks.scaled_matmul                               # e4m3, every scaling, the shapes below
  python -m benchmarks.scaled_matmul --scalings block --dtypes e4m3 --shapes 4096x7168x2048 --json scaled.json

"tensor+fast" and "row+fast" sum all of k in the tensor core (about 14 bits of the sums), the others add every 128
products in f32; torch is asked for the same. jnp multiplies the 8-bit arrays as they are and scales afterwards; with
scales of blocks it multiplies bf16. Every element is compared with sums in f32, and some rows and columns with float64;
sums in the tensor core may be off by what `tolerance` says, the others by its first term.
"""
from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.matmul import add_tile
from benchmarks.torch_graph import TorchGraph
from tiletrace.kernels.matmul import Tiling
from tiletrace.kernels.scaled_matmul import BLOCK, scaled_matmul_call, scaled_matmul_reference

SHAPES = ((8192, 8192, 8192), (4096, 4096, 4096), (4096, 7168, 2048), (64, 7168, 2048), (8192, 8192, 1024))   # M N K
SCALINGS = ("tensor+fast", "row+fast", "tensor", "row", "block")
DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
TOLERANCE = 2e-2
CUT, DEPTH = 2.0**-13, 32         # what an instruction cuts off a sum, relative to it, and its products
SAMPLE = 256                      # columns that are compared with float64
COLUMNS = ("shape", "dtype", "scaling", "tiletrace TFLOP/s", "jnp TFLOP/s", "torch TFLOP/s", "jnp", "torch", "spread",
           "error", "status")

Inputs = tuple[jax.Array, ...]


def inputs(m: int, n: int, k: int, dtype: Any, scaling: str, seed: int) -> Inputs:
  """(x, w, x_scale, w_scale) as the kernel takes them: x_scale of blocks is [k / 128, m]."""
  keys = jax.random.split(jax.random.key(seed), 4)
  x, w = ((jax.random.normal(key, shape) * 64).astype(dtype) for key, shape in zip(keys, ((m, k), (n, k))))
  blocks = -(-k // BLOCK)
  shapes = {"tensor": ((), ()), "row": ((m,), (n,)), "block": ((blocks, m), (-(-n // BLOCK), blocks))}[scaling]
  return x, w, *(jnp.exp(jax.random.normal(key, shape) / 4) / 64 for key, shape in zip(keys[2:], shapes))


def reference(x, w, x_scale, w_scale, *, scaling, out_dtype):
  """What a JAX user writes."""
  if scaling == "block":
    wide = [v.astype(jnp.bfloat16) for v in (x, w)]
    x_wide = wide[0] * jnp.repeat(x_scale.T, BLOCK, 1)[:, :x.shape[1]].astype(jnp.bfloat16)
    by_w = jnp.repeat(jnp.repeat(w_scale, BLOCK, 0)[:w.shape[0]], BLOCK, 1)[:, :w.shape[1]].astype(jnp.bfloat16)
    return jnp.dot(x_wide, (wide[1] * by_w).T, preferred_element_type=out_dtype)
  y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
  scale = x_scale * w_scale if scaling == "tensor" else x_scale[:, None] * w_scale
  return (y * scale).astype(out_dtype)


def torch_peer(sets: Sequence[Inputs], scaling: str, fast: bool) -> TorchGraph:
  torch = importlib.import_module("torch")
  types = {jnp.dtype(jnp.float8_e4m3fn): torch.float8_e4m3fn, jnp.dtype(jnp.float8_e5m2): torch.float8_e5m2}

  def tensor(x: jax.Array) -> Any:
    if x.dtype == jnp.float32:
      return torch.from_dlpack(x)
    return torch.from_dlpack(jax.lax.bitcast_convert_type(x, jnp.uint8)).view(types[x.dtype])

  def arguments(x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> tuple[Any, ...]:
    a, b = tensor(x), tensor(w).t()
    if scaling == "tensor":
      return a, b, tensor(x_scale.reshape(1)), tensor(w_scale.reshape(1))
    if scaling == "row":
      return a, b, tensor(x_scale[:, None]), tensor(w_scale[None])
    return a, b, tensor(x_scale).t(), tensor(w_scale).t()

  product = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=fast)
  tensors = [arguments(*s) for s in sets]
  return TorchGraph(lambda a, b, x_scale, w_scale: product(a, b, scale_a=x_scale, scale_b=w_scale), tensors)


def check(call: Any, operands: Inputs, scaling: str) -> dict[str, Any]:
  """Every element against f32 on the GPU, some rows and columns against float64, and jit against the bare launch."""
  compiled = call.lower(*operands).compile()
  got = harness.poisoned(compiled.image, operands, [call.out_shape])[0]
  x, w, x_scale, w_scale = operands
  if scaling == "block":
    x_scale = x_scale.T
  want = jax.jit(functools.partial(scaled_matmul_reference, out_dtype=jnp.float32))(x, w, x_scale, w_scale)
  rows, cols = harness.sample_rows(x.shape[0]), harness.sample_rows(w.shape[0], SAMPLE)
  by_x, by_w = (np.asarray(s).astype(np.float64) for s in (x_scale, w_scale))
  if scaling == "row":
    by_x, by_w = by_x[rows, None], by_w[cols, None]
  elif scaling == "block":
    by_x, by_w = (np.repeat(s, BLOCK, 1)[:, :x.shape[1]] for s in (by_x[rows], by_w[cols // BLOCK]))
  left, right = (np.asarray(v[at]).astype(np.float64) * s for v, at, s in ((x, rows, by_x), (w, cols, by_w)))
  return {"error": harness.relative_error(got[np.ix_(rows, cols)], left @ right.T),
          "error_f32": harness.relative_error(got, want),
          "jit_equals_launch": bool(jnp.array_equal(jax.jit(call)(*operands), jnp.asarray(got))),
          "variants": [f"{c.op}:{c.variant}" for c in compiled.lowered.choices], **compiled.memory_analysis()}


def tolerance(k: int, fast: bool) -> float:
  """Of an error relative to an element, or to the root of the mean square of all where that is larger.

  A sum that stays in the tensor core is cut to 14 bits by each instruction, so by at most 2**-13 of what it is then: of
  k / 32 instructions, whose sums are about as large as the last one or smaller, by k / 32 * 2**-13 in all.
  """
  return TOLERANCE + (k / DEPTH * CUT if fast else 0.0)


def status(row: dict[str, Any]) -> str:
  bound = tolerance(row["k"], row["scaling"].endswith("+fast"))
  if not (row["error"] < bound and row["error_f32"] < bound):     # NaN too: an element that was never written
    return "WRONG"
  return "ok" if row["jit_equals_launch"] and row.get("stable", True) else "UNSTABLE"


def measure(m: int, n: int, k: int, dtype: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
  scaling, _, fast = name.partition("+")
  row: dict[str, Any] = {"shape": f"{m}x{n}x{k}", "m": m, "n": n, "k": k, "dtype": dtype, "scaling": name}
  tiling = None
  if args.tile is not None:
    tiling = Tiling(args.tile[0], args.tile[1], args.warpgroups, args.stages, 1.0, bk=BLOCK)
  call = scaled_matmul_call((m, n), jnp.bfloat16, k=k, scaling=scaling,  # type: ignore[arg-type]
                            fast=bool(fast), tiling=tiling)
  make = jax.jit(functools.partial(inputs, m, n, k, DTYPES[dtype], scaling))
  row |= check(call, make(0), scaling)
  if not args.check_only:
    sets = harness.rotating(make)
    jnp_peer = functools.partial(reference, scaling=scaling, out_dtype=jnp.bfloat16)
    peers: dict[str, harness.Peer] = {"tiletrace": harness.over_sets(call), "jnp": harness.over_sets(jnp_peer)}
    if args.torch:
      harness.try_peer(peers, "torch", lambda: torch_peer(sets, scaling, bool(fast)))
    row |= harness.compare(peers, sets, args, flops=2 * m * n * k, stable=True)[0]
  row["status"] = status(row)
  return row


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.scaled_matmul", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shapes", nargs="+", metavar="MxNxK",
                      help="default: " + " ".join("x".join(map(str, s)) for s in SHAPES))
  parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["e4m3"])
  parser.add_argument("--scalings", nargs="+", choices=SCALINGS, default=list(SCALINGS))
  add_tile(parser, stages=5)
  harness.add_measuring(parser, torch=True, graphs=True)
  return parser.parse_args()


def main() -> int:
  args = arguments()
  environment = harness.start(graphs=args.graphs)
  cases = [({"shape": "x".join(map(str, shape)), "dtype": dtype, "scaling": scaling},
            functools.partial(measure, *shape, dtype, scaling, args))
           for dtype in args.dtypes for scaling in args.scalings for shape in harness.shapes_of(args.shapes, SHAPES)]
  return harness.run_cases(cases, COLUMNS, environment, args.json)


if __name__ == "__main__":
  raise SystemExit(main())
