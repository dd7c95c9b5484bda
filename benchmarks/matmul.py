"""C = A @ B and relu(A @ B) against jnp.dot.

  python -m benchmarks.matmul                        # bf16, A @ B, the shapes below
  python -m benchmarks.matmul --dtypes bf16 f16 --forms nn nt tn tt --relu both --tails --json matmul.json
"""
from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from benchmarks import harness
from tiletrace.kernels.matmul import Tiling, choose_tiling

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 8192, 4096), (2048, 2048, 2048), (16384, 4096, 1024))   # M N K
TAILS = ((1000, 776, 336), (13, 8, 24))
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
TOLERANCE = 1e-2
COLUMNS = ("shape", "dtype", "form", "relu", "tiletrace TFLOP/s", "jnp TFLOP/s", "speedup", "dynamic", "spread",
           "error", "status")


def matmul_kernel(a, b, c, *, form, relu, bm, bn, bk, num_stages):
  """form: is A, is B stored transposed? "nn" is A[M, K] @ B[K, N]."""
  i, j = tt.program_id(0), tt.program_id(1)
  a_t, b_t = form[0] == "t", form[1] == "t"
  a_s = tt.alloc_shared((bk, bm) if a_t else (bm, bk), a.dtype)
  b_s = tt.alloc_shared((bn, bk) if b_t else (bk, bn), b.dtype)
  acc = tt.alloc_fragment((bm, bn), jnp.float32)
  acc[...] = 0
  rows, cols = tt.block(i, bm), tt.block(j, bn)
  for k in tt.pipelined(tt.cdiv(a.shape[0 if a_t else 1], bk), num_stages=num_stages):
    inner = tt.block(k, bk)
    tt.copy(a.at[inner, rows] if a_t else a.at[rows, inner], a_s)
    tt.copy(b.at[cols, inner] if b_t else b.at[inner, cols], b_s)
    tt.gemm(a_s.T if a_t else a_s, b_s.T if b_t else b_s, acc)
  out = tt.maximum(acc[...], 0) if relu else acc[...]
  c[rows, cols] = out.astype(c.dtype)


def matmul(m, n, k, dtype, *, form, relu, tiling: Tiling | None = None, dynamic: bool = False) -> tt.TileCall:
  """`tiling`: by default what kernels.matmul would take. `dynamic`: compiled once for all m."""
  t = tiling or choose_tiling(m, n, k, form=form)
  sizes = (f"{k}, m" if form[0] == "t" else f"m, {k}", f"{n}, {k}" if form[1] == "t" else f"{k}, {n}", f"m, {n}")
  return tt.tile_call(
      functools.partial(matmul_kernel, form=form, relu=relu, bm=t.bm, bn=t.bn, bk=t.bk, num_stages=t.num_stages),
      out_shape=jax.ShapeDtypeStruct((m, n), dtype), name="matmul", dynamic_shapes=sizes if dynamic else None,
      **t.launch(m, n))


def reference(a, b, *, form, relu, out_dtype):
  """What a JAX user writes."""
  y = jnp.dot(a.T if form[0] == "t" else a, b.T if form[1] == "t" else b, preferred_element_type=out_dtype)
  return jnp.maximum(y, 0) if relu else y


def inputs(m, n, k, dtype, form, seed) -> tuple[jax.Array, jax.Array]:
  key_a, key_b = jax.random.split(jax.random.key(seed))
  return (jax.random.normal(key_a, (k, m) if form[0] == "t" else (m, k), dtype),
          jax.random.normal(key_b, (n, k) if form[1] == "t" else (k, n), dtype))


def check(call: tt.TileCall, a: jax.Array, b: jax.Array, *, form: str, relu: bool) -> dict[str, Any]:
  """Every element against f32 on the GPU, a sample of rows against float64, and jit against the bare launch."""
  shape = call.out_shape
  compiled = call.lower(a, b).compile()
  got = harness.poisoned(compiled.image, (a, b), [shape])[0]
  want = jax.jit(functools.partial(reference, form=form, relu=relu, out_dtype=jnp.float32))(a, b)
  rows = harness.sample_rows(shape.shape[0])
  exact = (np.asarray(a).T if form[0] == "t" else np.asarray(a))[rows].astype(np.float64)
  exact = exact @ (np.asarray(b).T if form[1] == "t" else np.asarray(b)).astype(np.float64)
  exact = np.maximum(exact, 0) if relu else exact
  return {"error": harness.relative_error(got[rows], exact), "error_f32": harness.relative_error(got, want),
          "jit_equals_launch": bool(np.array_equal(np.asarray(jax.jit(call)(a, b)), got)),
          "variants": [f"{c.op}:{c.variant}" for c in compiled.lowered.choices], **compiled.memory_analysis()}


def status(row: dict[str, Any]) -> str:
  if not (row["error"] < TOLERANCE and row["error_f32"] < TOLERANCE):     # NaN too: an element that was never written
    return "WRONG"
  if not row["jit_equals_launch"] or not row.get("stable", True):
    return "UNSTABLE"
  return "ok"


def measure(m: int, n: int, k: int, dtype: str, form: str, relu: bool, timed: bool, args: Any) -> dict[str, Any]:
  row: dict[str, Any] = {"shape": f"{m}x{n}x{k}", "m": m, "n": n, "k": k, "dtype": dtype, "form": form, "relu": relu}
  tiling = None
  if args.tile is not None:
    bm, bn = args.tile
    tiling = Tiling(bm, bn, args.warpgroups, args.stages, 1.0, cluster=args.cluster)
  call = matmul(m, n, k, DTYPES[dtype], form=form, relu=relu, tiling=tiling)
  row["grid"], row["cluster"] = call.options.grid, call.options.cluster
  make = functools.partial(inputs, m, n, k, DTYPES[dtype], form)
  row |= check(call, *make(0), form=form, relu=relu)
  if timed and not args.check_only:
    sets = harness.rotating(make)
    peers = {"tiletrace": harness.over_sets(call),
             "jnp": harness.over_sets(functools.partial(reference, form=form, relu=relu, out_dtype=DTYPES[dtype]))}
    if args.dynamic:
      peers["dynamic"] = harness.over_sets(
          matmul(m, n, k, DTYPES[dtype], form=form, relu=relu, tiling=tiling, dynamic=True))
    found, _ = harness.compare(peers, sets, args, flops=2 * m * n * k, stable=True)
    found["speedup"] = found.pop("jnp")
    row |= found
  row["status"] = status(row)
  return row


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.matmul", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shapes", nargs="+", metavar="MxNxK",
                      help="default: " + " ".join("x".join(map(str, s)) for s in SHAPES))
  parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
  parser.add_argument("--forms", nargs="+", choices=["nn", "nt", "tn", "tt"], default=["nn"],
                      help="which operands are stored transposed, A's letter first")
  parser.add_argument("--relu", choices=["no", "yes", "both"], default="no")
  parser.add_argument("--tails", action="store_true", help="check shapes with tails too (they are not timed)")
  parser.add_argument("--dynamic", action="store_true",
                      help="another peer: the kernel that is compiled once for all M; how much faster is this M's?")
  harness.add_measuring(parser, graphs=True)
  add_tiling(parser)
  return parser.parse_args()


def add_tiling(parser: argparse.ArgumentParser) -> None:
  add_tile(parser)
  parser.add_argument("--cluster", type=lambda s: tuple(map(int, s.split("x"))), metavar="CMxCN", help="of a --tile")


def add_tile(parser: argparse.ArgumentParser, *, stages: int = 4) -> None:
  parser.add_argument("--tile", nargs=2, type=int, metavar=("BM", "BN"), help="default: what the kernel takes")
  for name, default in (("stages", stages), ("warpgroups", 2)):
    parser.add_argument(f"--{name}", type=int, default=default, help="of a --tile")


def main() -> int:
  args = arguments()
  environment = harness.start(graphs=args.graphs)
  shapes = harness.shapes_of(args.shapes, SHAPES)
  relus = {"no": (False,), "yes": (True,), "both": (False, True)}[args.relu]
  cases = [({"shape": "x".join(map(str, shape)), "dtype": dtype, "form": form, "relu": relu},
            functools.partial(measure, *shape, dtype, form, relu, shape in shapes, args))
           for dtype in args.dtypes for form in args.forms for relu in relus
           for shape in (*shapes, *(TAILS if args.tails else ()))]
  return harness.run_cases(cases, COLUMNS, environment, args.json)


if __name__ == "__main__":
  raise SystemExit(main())
