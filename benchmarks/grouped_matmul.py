"""Grouped products, of as many rows as tokens go to each expert, against jax.lax.ragged_dot, torch._grouped_mm, and one
dense product by jnp.dot of all rows with one matrix.

  python -m benchmarks.grouped_matmul                                  # every distribution, the shapes below
  python -m benchmarks.grouped_matmul --shapes 4096x7168x2048x64 --spreads zipf --json grouped.json

Rows of a group: "even" gives every group the same, "random" draws them, "zipf" gives the g-th most in proportion to
1 / g, "one" gives all rows to one group.
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
from tiletrace.kernels.grouped_matmul import (
  choose_tiling,
  grouped_matmul_call,
  grouped_matmul_reference,
  pays_to_plan,
  plan,
)
from tiletrace.kernels.matmul import Tiling

SHAPES = ((8192, 4096, 4096, 8), (65536, 4096, 4096, 64), (32768, 7168, 2048, 64), (8192, 7168, 2048, 64),
          (1024, 7168, 2048, 64), (16384, 2048, 4096, 128))   # M N K G
SPREADS = ("even", "random", "zipf", "one")
TOLERANCE = 2e-2
COLUMNS = ("shape", "rows", "tiletrace TFLOP/s", "dense TFLOP/s", "ragged_dot TFLOP/s", "torch TFLOP/s", "dense",
           "ragged_dot", "torch", "spread", "error", "status")

Inputs = tuple[jax.Array, ...]


def sizes_of(m: int, groups: int, spread: str, seed: int) -> np.ndarray:
  """i32 [groups] that sum to m, in random order."""
  rng = np.random.default_rng(seed)
  weights = {"even": np.ones(groups), "random": rng.random(groups), "zipf": 1 / np.arange(1, groups + 1),
             "one": np.arange(groups) == 0}[spread]
  ends = np.round(np.cumsum(rng.permutation(weights / weights.sum())) * m).astype(np.int32)
  return np.diff(ends, prepend=0).astype(np.int32)


def inputs(m: int, n: int, k: int, groups: int, spread: str, seed: int) -> Inputs:
  keys = jax.random.split(jax.random.key(seed))
  x, w = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, ((m, k), (groups, k, n))))
  return x, w, jnp.asarray(sizes_of(m, groups, spread, seed))


def torch_peer(sets: Sequence[Inputs]) -> TorchGraph:
  torch = importlib.import_module("torch")
  tensors = [tuple(map(torch.from_dlpack, (x, w, jnp.cumsum(sizes).astype(jnp.int32)))) for x, w, sizes in sets]
  graph = TorchGraph(lambda x, w, ends: torch._grouped_mm(x, w, offs=ends), tensors)
  graph(sets).block_until_ready()
  for inputs, y in zip(sets, graph.outputs, strict=True):
    rows = harness.sample_rows(len(y), 16)
    error = harness.relative_error(y[rows.tolist()].float().cpu().numpy(), exact_rows(*inputs, rows))
    if not error < TOLERANCE:
      raise RuntimeError(f"torch's result is off by {error:.2g}")
  return graph


def exact_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, rows: np.ndarray) -> np.ndarray:
  """float64 [rows, n]."""
  owner = np.searchsorted(np.cumsum(sizes), rows, side="right")
  return np.stack([np.asarray(x[r]).astype(np.float64) @ np.asarray(w[g]).astype(np.float64)
                   for r, g in zip(rows.tolist(), owner.tolist())])


def dense_peer(sets: Sequence[Inputs]) -> harness.Peer:
  pairs = [(x, jnp.copy(w[0])) for x, w, *_ in sets]
  product = harness.over_sets(jnp.dot)
  return lambda sets: product(pairs)


def check(call: Any, operands: Inputs) -> dict[str, Any]:
  """Every element against ragged_dot in f32, a sample of rows against float64, and jit against the bare launch."""
  compiled = call.lower(*operands).compile()
  got = harness.poisoned(compiled.image, operands, [call.out_shape])[0]
  x, w, sizes, *_ = operands
  want = jax.jit(functools.partial(grouped_matmul_reference, out_dtype=jnp.float32))(x, w, sizes)
  rows = harness.sample_rows(x.shape[0], 16)
  return {"error": harness.relative_error(got[rows], exact_rows(x, w, sizes, rows)),
          "error_f32": harness.relative_error(got, want),
          "jit_equals_launch": bool(np.array_equal(np.asarray(jax.jit(call)(*operands)), got)),
          "variants": [f"{c.op}:{c.variant}" for c in compiled.lowered.choices], **compiled.memory_analysis()}


def status(row: dict[str, Any]) -> str:
  if not (row["error"] < TOLERANCE and row["error_f32"] < TOLERANCE):     # NaN too: an element that was never written
    return "WRONG"
  return "ok" if row["jit_equals_launch"] and row.get("stable", True) else "UNSTABLE"


def measure(m: int, n: int, k: int, groups: int, spread: str, args: argparse.Namespace) -> dict[str, Any]:
  row: dict[str, Any] = {"shape": f"{m}x{n}x{k}x{groups}", "m": m, "n": n, "k": k, "groups": groups, "rows": spread}
  bm, bn = args.tile or (0, 0)
  tiling = Tiling(bm, bn, args.warpgroups, args.stages, 1.0) if args.tile else choose_tiling(m, n, groups)
  planned = args.planned and pays_to_plan(m, n, k, groups, tiling)
  call = grouped_matmul_call(m, (groups, k, n), jnp.bfloat16, tiling=tiling, planned=planned,
                             persistent=args.persistent)

  def operands(x: jax.Array, w: jax.Array, sizes: jax.Array) -> Inputs:
    return (x, w, sizes, plan(sizes, m, tiling.bm)) if planned else (x, w, sizes)

  make = functools.partial(inputs, m, n, k, groups, spread)
  row |= check(call, operands(*make(0)))
  if not args.check_only:
    sets = harness.rotating(make)
    peers: dict[str, harness.Peer] = {"tiletrace": harness.over_sets(lambda *x: call(*operands(*x))),
                                      "dense": dense_peer(sets)}
    if args.ragged_dot:
      peers["ragged_dot"] = harness.over_sets(grouped_matmul_reference)
    if args.torch:
      harness.try_peer(peers, "torch", lambda: torch_peer(sets))
    row |= harness.compare(peers, sets, args, flops=2 * m * n * k, stable=True)[0]
  row["status"] = status(row)
  return row


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.grouped_matmul", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shapes", nargs="+", metavar="MxNxKxG",
                      help="default: " + " ".join("x".join(map(str, s)) for s in SHAPES))
  parser.add_argument("--spreads", nargs="+", choices=SPREADS, default=list(SPREADS))
  add_tile(parser)
  parser.add_argument("--no-plan", dest="planned", action="store_false", help="each program finds its own group")
  parser.add_argument("--no-ragged-dot", dest="ragged_dot", action="store_false", help="it is slow")
  parser.add_argument("--persistent", nargs="?", const=True, default=None, choices=["dynamic"],
                      help="one CTA for each SM loops over the tiles, or takes them when it is free")
  harness.add_measuring(parser, torch=True, graphs=True)
  return parser.parse_args()


def main() -> int:
  args = arguments()
  environment = harness.start(graphs=args.graphs)
  cases = [({"shape": "x".join(map(str, shape)), "rows": spread}, functools.partial(measure, *shape, spread, args))
           for spread in args.spreads for shape in harness.shapes_of(args.shapes, SHAPES)]
  return harness.run_cases(cases, COLUMNS, environment, args.json)


if __name__ == "__main__":
  raise SystemExit(main())
