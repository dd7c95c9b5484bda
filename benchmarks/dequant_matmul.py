"""Products with packed weights, against bf16 products of the same run, and where there are few rows against a copy.

  python -m benchmarks.dequant_matmul                              # int4, the shapes below
  python -m benchmarks.dequant_matmul --formats int4 int8 fp4 --shapes 4096x4096x4096 --json dequant.json

Of more than 16 rows "bf16" is tiletrace.kernels.matmul and "torch" torch.matmul (cuBLAS), both of dequantised bf16
weights. Of up to 16 rows "copy" reads and writes the packed weights' bytes: "GB/s" are of the packed weights and
scales, "copy GB/s" of what the copy reads and writes, and "of copy" is their quotient. All of them are launched from
CUDA graphs without JAX (launch_graph.py), so that this is what the GPU takes: a call in a jitted program costs the host
more than most of these kernels take.
"""
from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, launch_graph
from benchmarks.torch_graph import TorchGraph
from tiletrace.ffi import launch
from tiletrace.kernels.dequant_matmul import DequantTiling, dequant_matmul_call, dequant_matmul_reference
from tiletrace.kernels.matmul import matmul_call
from tiletrace.kernels.packed_weights import FORMATS, dequantize_weights, quantize_weights

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (256, 4096, 4096), (64, 4096, 4096),                   # M N K
          (1, 4096, 4096), (8, 4096, 4096), (16, 4096, 4096), (1, 14336, 4096), (16, 14336, 4096), (16, 4096, 14336),
          (1, 28672, 8192), (16, 28672, 8192))
FEW = 16
TOLERANCE = 2e-2
COLUMNS = ("shape", "format", "tiletrace TFLOP/s", "bf16 TFLOP/s", "torch TFLOP/s", "bf16", "torch", "us", "GB/s",
           "copy GB/s", "of copy", "spread", "error", "status")

Inputs = tuple[jax.Array, ...]


def inputs(m: int, n: int, k: int, form: str, group: int, seed: int) -> Inputs:
  """(x, packed, scales), and where there are many rows the weights in bf16."""
  keys = jax.random.split(jax.random.key(seed), 2)
  x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
  packed, scales = quantize_weights(jax.random.normal(keys[1], (k, n)), format=form,  # type: ignore[arg-type]
                                    group=group, dtype=jnp.bfloat16)
  if m <= FEW:
    return x, packed, scales
  dense = functools.partial(dequantize_weights, k=k, group=group, format=form, dtype=jnp.bfloat16)  # type: ignore
  return x, packed, scales, jax.jit(dense)(packed, scales)


def check(call: Any, operands: Inputs, form: str, group: int) -> dict[str, Any]:
  """Every element against f32 on the GPU, a sample of rows against float64, and jit against the bare launch."""
  x, packed, scales = operands[:3]
  compiled = call.lower(x, packed, scales).compile()
  got = harness.poisoned(compiled.image, (x, packed, scales), [call.out_shape])[0]
  reference = functools.partial(dequant_matmul_reference, group=group, format=form,  # type: ignore[arg-type]
                                out_dtype=jnp.float32)
  rows = harness.sample_rows(x.shape[0])
  w = dequantize_weights(packed, scales, k=x.shape[1], group=group, format=form,  # type: ignore[arg-type]
                         dtype=jnp.bfloat16)
  exact = np.asarray(x)[rows].astype(np.float64) @ np.asarray(w).astype(np.float64)
  return {"error": harness.relative_error(got[rows], exact),
          "error_f32": harness.relative_error(got, jax.jit(reference)(x, packed, scales)),
          "jit_equals_launch": bool(np.array_equal(np.asarray(jax.jit(call)(x, packed, scales)), got)),
          "variants": [f"{c.op}:{c.variant}" for c in compiled.lowered.choices], **compiled.memory_analysis()}


def status(row: dict[str, Any]) -> str:
  if not (row["error"] < TOLERANCE and row["error_f32"] < TOLERANCE):     # NaN too: an element that was never written
    return "WRONG"
  return "ok" if row["jit_equals_launch"] and row.get("stable", True) else "UNSTABLE"


def peers_of(call: Any, sets: list[Inputs], m: int, n: int, k: int) -> tuple[dict[str, harness.Peer], Any]:
  """All that is measured, and where the results of "tiletrace" are."""
  def kernel(call: Any, inputs: list[tuple]) -> tuple[harness.Peer, Any]:
    arrays = [tuple(x for x in each if x is not None) for each in inputs]
    return launch_graph.kernel_graph(call.lower(*inputs[0]).compile().image, arrays, call.out_shape)

  peers: dict[str, harness.Peer] = {}
  peers["tiletrace"], results = kernel(call, [each[:3] for each in sets])
  if m <= FEW:
    peers["copy"] = launch_graph.copy_graph([packed for _, packed, _ in sets])
    return peers, results
  peers["bf16"], _ = kernel(matmul_call((m, n), jnp.bfloat16, k=k), [(x, w, None) for x, _, _, w in sets])
  if importlib.util.find_spec("torch") is not None:
    harness.try_peer(peers, "torch", lambda: torch_peer(launch_graph.repeated(sets)))
  return peers, results


def torch_peer(sets: list[Inputs]) -> TorchGraph:
  torch = importlib.import_module("torch")
  return TorchGraph(torch.matmul, [(torch.from_dlpack(x), torch.from_dlpack(w)) for x, _, _, w in sets])


def run(peer: harness.Peer, results: list[launch.Buffer]) -> list[np.ndarray]:
  jax.block_until_ready(peer(()))
  return [r.download() for r in results]


def measure(m: int, n: int, k: int, form: str, args: argparse.Namespace) -> dict[str, Any]:
  row: dict[str, Any] = {"shape": f"{m}x{n}x{k}", "m": m, "n": n, "k": k, "format": form, "group": args.group}
  tiling = DequantTiling(*args.tiling) if args.tiling is not None else None
  call = dequant_matmul_call((m, n), jnp.bfloat16, k=k, group=args.group, format=form,  # type: ignore[arg-type]
                             tiling=tiling)
  make = functools.partial(inputs, m, n, k, form, args.group)
  row |= check(call, make(0), form, args.group)
  if not args.check_only:
    sets = harness.rotating(make)
    peers, results = peers_of(call, sets, m, n, k)
    before = run(peers["tiletrace"], results)
    found, seconds = harness.compare(peers, launch_graph.repeated(sets), args, flops=2 * m * n * k if m > FEW else None)
    after = run(peers["tiletrace"], results)
    row |= found | {"us": 1e6 * seconds["tiletrace"], "stable": all(map(np.array_equal, before, after))}
    if m <= FEW:
      _, packed, scales = sets[0]
      rates = {"GB/s": 1e-9 * (packed.nbytes + scales.nbytes) / seconds["tiletrace"],
               "copy GB/s": 2e-9 * packed.nbytes / seconds["copy"]}
      row |= rates | {"of copy": rates["GB/s"] / rates["copy GB/s"]}
  row["status"] = status(row)
  return row


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.dequant_matmul", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shapes", nargs="+", metavar="MxNxK",
                      help="default: " + " ".join("x".join(map(str, s)) for s in SHAPES))
  parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int4"])
  parser.add_argument("--group", type=int, default=128, help="rows of w that share a scale")
  parser.add_argument("--tiling", nargs="+", type=int, metavar="N",
                      help="bm bn warpgroups num_stages [blocks [CTAs of an SM]]; default: what the kernel takes")
  harness.add_measuring(parser)
  return parser.parse_args()


def main() -> int:
  args = arguments()
  environment = harness.start()
  cases = [({"shape": "x".join(map(str, shape)), "format": form}, functools.partial(measure, *shape, form, args))
           for form in args.formats for shape in harness.shapes_of(args.shapes, SHAPES)]
  return harness.run_cases(cases, COLUMNS, environment, args.json)


if __name__ == "__main__":
  raise SystemExit(main())
