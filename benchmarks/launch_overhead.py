"""What a call costs the host: a jitted call with one kernel against an XLA fusion; and ten kernels in a CUDA graph.

  one call   10,000 jitted calls, back to back, one kernel each, against XLA's own kernel for the same arguments. The
             arrays are small, so the host is the slower side: the time of a call is the host's.
  ten calls  ten kernels with jnp between them, in one jit: right for changing inputs, and whether XLA put them into a
             command buffer (a CUDA graph), which its dump of the program says.

  python -m benchmarks.launch_overhead [--json launch_overhead.json]
"""
from __future__ import annotations

import argparse
import functools
import math
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from benchmarks import harness

BLOCK = 512
EXTRA_US = 2.0          # at most this much above the fusion
KERNELS = 10
PROGRAM = "ten_kernels"
COLUMNS = ("arguments", "tiletrace us", "jnp us", "extra us", "at most us", "status")


def scaled_sum_kernel(*refs, scale):
  *inputs, out = refs
  r = tt.block(tt.program_id(0), BLOCK)
  total = inputs[0][r]
  for x in inputs[1:]:
    total = total + x[r]
  out[r] = total * scale


def scaled_sum(*xs: jax.Array, scale: float = 2.0) -> jax.Array:
  return tt.tile_call(functools.partial(scaled_sum_kernel, scale=scale), name="scaled_sum",
                      out_shape=jax.ShapeDtypeStruct(xs[0].shape, xs[0].dtype), grid=tt.cdiv(xs[0].size, BLOCK))(*xs)


def reference(*xs: jax.Array, scale: float = 2.0) -> jax.Array:
  return sum(xs[1:], xs[0]) * scale


def one_call(arguments: int, calls: int, rounds: int) -> dict[str, Any]:
  """Microseconds of a call, the median over rounds that alternate."""
  keys = jax.random.split(jax.random.key(arguments), arguments)
  xs = [jax.random.normal(k, (4096,)) for k in keys]
  peers = {"tiletrace": jax.jit(scaled_sum), "jnp": jax.jit(reference)}
  results = {name: np.asarray(f(*xs)) for name, f in peers.items()}
  right = bool(np.allclose(results["tiletrace"], results["jnp"], rtol=1e-6, atol=1e-6))
  samples: dict[str, list[float]] = {name: [] for name in peers}
  for i in range(rounds + 1):                          # the first round warms up
    for name in list(peers)[::1 if i % 2 else -1]:
      seconds = _many(peers[name], xs, calls)
      if i:
        samples[name].append(1e6 * seconds / calls)
  medians = {name: float(np.median(times)) for name, times in samples.items()}
  extra = float(np.median(np.subtract(samples["tiletrace"], samples["jnp"])))
  status = "WRONG" if not right else "ok" if extra <= EXTRA_US else "SLOW"
  return {"arguments": arguments, "samples_us": samples, "extra us": extra, "at most us": EXTRA_US, "status": status,
          **{f"{name} us": us for name, us in medians.items()}}


def _many(f: Callable[..., jax.Array], xs: list[jax.Array], calls: int) -> float:
  out = None
  begin = time.perf_counter()
  for _ in range(calls):
    out = f(*xs)
  jax.block_until_ready(out)
  return time.perf_counter() - begin


def ten_kernels(x: jax.Array, y: jax.Array) -> list[jax.Array]:
  """Each kernel takes what the one before gave, through an XLA fusion."""
  outs = []
  for i in range(KERNELS):
    x = scaled_sum(x, y, scale=1 / (i + 2))
    outs.append(x)
    x = jnp.sin(x) + y
  return outs


def ten_kernels_reference(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
  outs = []
  for i in range(KERNELS):
    x = (x + y) / (i + 2)
    outs.append(x)
    x = np.sin(x) + y
  return outs


def ten_calls(dump: pathlib.Path, inputs: int = 20) -> dict[str, Any]:
  f = jax.jit(ten_kernels)
  rng = np.random.default_rng(0)
  worst = 0.0
  kept = []                                            # so that buffers move from call to call
  for _ in range(inputs):
    x, y = rng.standard_normal((2, 10_000)).astype(np.float32)
    got = f(jnp.asarray(x), jnp.asarray(y))
    kept.append(got[-1])
    for g, w in zip(got, ten_kernels_reference(x.astype(np.float64), y.astype(np.float64)), strict=True):
      worst = max(worst, harness.relative_error(np.asarray(g), w))
  x, y = (jnp.asarray(v) for v in rng.standard_normal((2, 10_000)).astype(np.float32))
  seconds = _many(f, [x, y], 1000) / 1000
  captured = commands(dump)
  right = worst < 1e-4 and not math.isnan(worst)
  return {"what": f"{KERNELS} kernels in one jit", "error": worst, "us": 1e6 * seconds, "captured": captured,
          "status": "WRONG" if not right else "ok" if captured >= KERNELS else "NOT CAPTURED"}


def commands(dump: pathlib.Path) -> int:
  """How many custom calls stand below a command buffer in XLA's dump of the program's thunks."""
  captured = 0
  for path in dump.glob(f"*{PROGRAM}*thunk_sequence*"):
    depth = None
    for line in path.read_text().splitlines():
      indent = len(line) - len(line.lstrip())
      kind = re.search(r"\bk(CommandBuffer|CustomCall)\b", line)
      if depth is not None and line.strip() and indent <= depth:
        depth = None
      if kind and kind[1] == "CommandBuffer":
        depth = indent
      elif kind and depth is not None:
        captured += 1
  return captured


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.launch_overhead", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--calls", type=int, default=10_000, help="of one measurement")
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--json", metavar="PATH", help="write every round there")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory(prefix="tiletrace-") as folder:
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + f" --xla_dump_to={folder} --xla_dump_hlo_as_text "
                               f"--xla_dump_hlo_module_re=.*{PROGRAM}.*")
    environment = harness.start(graphs=True)
    print(", ".join(f"{k} {v}" for k, v in environment.items()), flush=True)
    rows = [one_call(n, args.calls, args.rounds) for n in (1, 2, 8)]
    print(harness.table(rows, COLUMNS), flush=True)
    ten = ten_calls(pathlib.Path(folder))
    print(f"{ten['what']}: {ten['us']:.1f} us, {ten['captured']} custom calls in command buffers, error "
          f"{ten['error']:.1e}: {ten['status']}")
    if ten["status"] == "NOT CAPTURED":
      for path in sorted(pathlib.Path(folder).glob("*thunk_sequence*")):
        print(f"{path.name}:\n{path.read_text()[:4000]}")
  harness.write_json(args.json, environment, [*rows, ten])
  return 0 if all(row["status"] == "ok" for row in [*rows, ten]) else 1


if __name__ == "__main__":
  raise SystemExit(main())
