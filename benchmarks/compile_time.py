"""How long the GEMM takes from Python to machine code. Needs ptxas, no GPU. Imports are not counted.

  cold      an empty cache: trace, every pass, ptxas
  tracing   of that, the trace alone
  repeated  the same tile_call once more in the same process
  retraced  an equal kernel (another function) in the same process: traced anew, its code found in memory
  disk      the same kernel in a new process that finds it in the cache directory

  python -m benchmarks.compile_time [--json compile_time.json]
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from typing import Any

import jax
import jax.numpy as jnp

import tiletrace as tt
from benchmarks import harness, matmul
from tiletrace.lowering import cache

TARGET = "sm_90a"
FLOORS_MS = {"cold": 500.0, "tracing": 15.0, "repeated": 3.0, "disk": 40.0}     # on two cores


def once() -> dict[str, float]:
  """Milliseconds of the trace and of the whole, for the kernel as it is in this process."""
  a = b = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
  begin = time.perf_counter()
  traced = matmul.matmul(4096, 4096, 4096, jnp.bfloat16, form="nn", relu=True).trace(a, b)
  after = time.perf_counter()
  traced.program.image(TARGET)
  return {"tracing": 1e3 * (after - begin), "whole": 1e3 * (time.perf_counter() - begin)}


def forget_function() -> None:
  """Makes the kernel another function with equal code: traces are kept by function, machine code by what it does."""
  old = matmul.matmul_kernel
  new = types.FunctionType(old.__code__, old.__globals__, old.__name__, old.__defaults__, old.__closure__)
  new.__kwdefaults__ = old.__kwdefaults__
  matmul.matmul_kernel = new


def child() -> None:
  """In a process of its own: the first time, then again, then as another function."""
  first, repeated = once(), once()
  forget_function()
  print(json.dumps({"first": first, "repeated": repeated, "retraced": once()}))


def process(cache_dir: str) -> dict[str, dict[str, float]]:
  done = subprocess.run([sys.executable, "-m", "benchmarks.compile_time", "--child"], check=True, text=True,
                        stdout=subprocess.PIPE, env={**os.environ, "TT_CACHE_DIR": cache_dir, "TT_CACHE": "1"})
  return json.loads(done.stdout)


def measure(repeats: int) -> dict[str, list[float]]:
  samples: dict[str, list[float]] = {name: [] for name in ("cold", "tracing", "repeated", "retraced", "disk")}
  for _ in range(repeats):
    with tempfile.TemporaryDirectory(prefix="tiletrace-") as directory:
      cold, warm = process(directory), process(directory)
    samples["cold"].append(cold["first"]["whole"])
    samples["tracing"].append(cold["first"]["tracing"])
    samples["repeated"].append(cold["repeated"]["whole"])
    samples["retraced"].append(cold["retraced"]["whole"])
    samples["disk"].append(warm["first"]["whole"])
  return samples


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--repeats", type=int, default=5, help="processes with an empty cache, and as many after them")
  parser.add_argument("--json", metavar="PATH", help="write every sample there")
  parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    child()
    return 0
  try:
    assembler = cache.assembler_version()
  except tt.AssembleError as e:
    print(e)
    return 2
  samples = measure(args.repeats)
  rows: list[dict[str, Any]] = [
      {"what": name, "median ms": statistics.median(ms), "min ms": min(ms), "max ms": max(ms),
       "at most ms": FLOORS_MS.get(name, "")} for name, ms in samples.items()]
  print(f"ptxas {assembler}, {os.cpu_count()} cores\n" + harness.table(rows, list(rows[0])))
  harness.write_json(args.json, {"assembler": assembler, "cores": os.cpu_count()}, [{"samples_ms": samples}])
  return 0 if all(statistics.median(samples[name]) <= limit for name, limit in FLOORS_MS.items()) else 1


if __name__ == "__main__":
  raise SystemExit(main())
