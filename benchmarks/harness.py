"""Measures peers fairly on one GPU.

Method. Every peer is a jitted function of several sets of inputs that calls what is measured once for each set, so that
host dispatch is amortised, all peers pay the same, and no operand is still in the L2 cache when its turn comes again.
The sets are run back to back, first until the clock is at its sustained value, then in rounds: in each round every peer
runs for a fixed time, in an order that alternates. Reported are medians over the rounds, and the median of the ratios
within a round, which are free of the drift between rounds. A cold launch reads up to 15 % faster than a sustained one:
the two are never compared.

Results are checked before they are timed: a kernel writes into memory that was filled with NaN, through the launcher
that does not need JAX, and `relative_error` compares every element.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace
from tiletrace.ffi import launch
from tiletrace.ffi.image import KernelImage
from tiletrace.lowering import cache

L2_BYTES = 60 << 20       # H200
EXIT_NO_GPU = 2

Inputs = tuple[jax.Array, ...]
Peer = Callable[[Sequence[Inputs]], Any]


def start(*, graphs: bool = False) -> dict[str, Any]:
  """Prepares the process and says what it runs on. Call it before any other use of jax.

  Args:
    graphs: let XLA put the calls of a program into a CUDA graph.

  Returns:
    GPU, driver and versions, for the JSON.

  Raises:
    SystemExit: status 2, there is no GPU that jax can use.
  """
  if not graphs:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
  platform_name = jax.default_backend()
  if platform_name != "gpu":
    print(f"this benchmark needs an NVIDIA GPU; jax {jax.__version__} runs on the {platform_name} here")
    raise SystemExit(EXIT_NO_GPU)
  return {
      "gpu": jax.devices()[0].device_kind, "driver": _nvidia_smi("driver_version"), "jax": jax.__version__,
      "python": platform.python_version(), "assembler": cache.assembler_version(),
      "tiletrace": tiletrace.__name__ + " " + cache.package_digest()[:12], "graphs": graphs,
      "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}


def _nvidia_smi(*fields: str) -> str | None:
  if shutil.which("nvidia-smi") is None:
    return None
  done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"],
                        capture_output=True, text=True, check=False)
  return done.stdout.strip() if done.returncode == 0 else None


def rotating(make: Callable[[int], Inputs], *, at_least: int = 3, at_most: int = 16) -> list[Inputs]:
  """Sets of inputs, `make(0)`, `make(1)`, ..., that together are twice the L2 cache or more."""
  first = make(0)
  nbytes = sum(x.nbytes for x in first)
  sets = [first, *(make(i) for i in range(1, min(at_most, max(at_least, math.ceil(2 * L2_BYTES / nbytes)))))]
  jax.block_until_ready(sets)
  return sets


def interleave(peers: dict[str, Peer], sets: Sequence[Inputs], *, rounds: int = 5, seconds: float = 0.3,
               warmup: float = 1.0) -> dict[str, list[float]]:
  """Seconds of one call, by peer, one number for each round.

  Args:
    peers: name -> jitted function of `sets` that makes one call for each set.
    rounds: how often each peer is measured.
    seconds: how long one measurement lasts, at least.
    warmup: seconds of all peers together before the first round, so that the clock is at its sustained value.
  """
  names = list(peers)
  per_program = {}
  for name in names:                # compiles; then learns how many programs fill the time
    jax.block_until_ready(peers[name](sets))
    per_program[name] = _repeat(peers[name], sets, 5) / 5
  repeats = {name: max(3, math.ceil(seconds / per_program[name])) for name in names}
  end = time.perf_counter() + warmup
  while time.perf_counter() < end:
    for name in names:
      _repeat(peers[name], sets, max(3, repeats[name] // 4))
  samples: dict[str, list[float]] = {name: [] for name in names}
  for i in range(rounds):
    first = i // 2 % len(names)
    turn = names[first:] + names[:first]
    for name in turn if i % 2 == 0 else reversed(turn):
      samples[name].append(_repeat(peers[name], sets, repeats[name]) / repeats[name] / len(sets))
  return samples


def _repeat(peer: Peer, sets: Sequence[Inputs], repeats: int) -> float:
  out = None
  begin = time.perf_counter()
  for _ in range(repeats):
    out = peer(sets)
  jax.block_until_ready(out)
  return time.perf_counter() - begin


def over_sets(fn: Callable[..., Any]) -> Peer:
  """A peer: one program that calls `fn` once for each set of inputs."""
  return jax.jit(lambda sets: [fn(*inputs) for inputs in sets])


def summary(samples: dict[str, list[float]], ours: str) -> dict[str, Any]:
  """By peer: the median, the spread (largest over smallest round), and how much faster `ours` was within the rounds."""
  return {name: {"seconds": statistics.median(times), "spread": max(times) / min(times),
                 "speedup_of_ours": statistics.median(t / o for t, o in zip(times, samples[ours], strict=True))}
          for name, times in samples.items()}


def compare(peers: dict[str, Peer], sets: Sequence[Inputs], args: argparse.Namespace, *, flops: float | None = None,
            stable: bool = False) -> tuple[dict[str, Any], dict[str, float]]:
  """Measures "tiletrace" and its peers as the options of `add_measuring` say.

  Args:
    flops: of one call.
    stable: also whether the results of "tiletrace" are the same before and after.

  Returns:
    columns of a row (each peer's name: how much faster "tiletrace" is), and the seconds of each.
  """
  before = peers["tiletrace"](sets) if stable else None
  samples = interleave(peers, sets, rounds=args.rounds, seconds=args.seconds, warmup=args.warmup)
  found = summary(samples, "tiletrace")
  row: dict[str, Any] = {"samples": samples, "sets": len(sets), "clocks": clocks(),
                         "spread": max(x["spread"] for x in found.values())}
  if stable:
    after = peers["tiletrace"](sets)
    row["stable"] = all(bool(jnp.array_equal(x, y)) for x, y in zip(before, after, strict=True))
  row |= {name: x["speedup_of_ours"] for name, x in found.items() if name != "tiletrace"}
  seconds = {name: x["seconds"] for name, x in found.items()}
  if flops is not None:
    row |= {f"{name} TFLOP/s": 1e-12 * flops / t for name, t in seconds.items()}
  return row, seconds


def try_peer(peers: dict[str, Peer], name: str, make: Callable[[], Peer]) -> None:
  """Adds a peer that may not be able to take part: its failure is printed, and no failure of ours."""
  try:
    peers[name] = make()
  except Exception:
    traceback.print_exc()


def poisoned(image: KernelImage, inputs: Inputs, out_shapes: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
  """What the kernel wrote into outputs that were filled with NaN (all bits set), launched without JAX."""
  jax.block_until_ready(inputs)
  outs = [launch.empty(tuple(s.shape), s.dtype) for s in out_shapes]
  launch.Launcher(image)(*(x.unsafe_buffer_pointer() for x in inputs), *(o.pointer for o in outs))
  return [o.download() for o in outs]


def relative_error(got: Any, want: Any) -> float:
  """The largest |got - want| / max(|want|, rms(want)); NaN if any element of `got` is NaN. On the device of `want`."""
  want = jnp.asarray(want) if isinstance(want, jax.Array) else np.asarray(want)
  xp = jnp if isinstance(want, jax.Array) else np
  got = xp.asarray(got).astype(want.dtype)
  floor = xp.sqrt(xp.mean(want * want))
  return float(xp.max(xp.abs(got - want) / xp.maximum(xp.abs(want), xp.maximum(floor, 1e-30))))


def sample_rows(rows: int, count: int = 64) -> np.ndarray:
  """Indices of some rows, the first and the last among them."""
  chosen = np.random.default_rng(0).choice(rows, min(count, rows), replace=False)
  return np.unique([0, rows - 1, *chosen])


def clocks() -> str | None:
  """SM clock and power now, as nvidia-smi gives them."""
  return _nvidia_smi("clocks.sm", "power.draw", "temperature.gpu")


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
  """The rows as a Markdown table; a row without a column has a blank there."""
  cells = [[*columns], *([cell(row.get(c, "")) for c in columns] for row in rows)]
  widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
  lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
  lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
  return "\n".join(lines)


def cell(value: Any) -> str:
  """A value as the tables show it."""
  if isinstance(value, float):
    return f"{value:.2e}" if value and abs(value) < 0.01 else f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
  return str(value)


def shapes_of(words: Sequence[str] | None, default: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
  """The shapes that a command line names as 4096x8192; without any, the default ones."""
  return [tuple(map(int, word.lower().split("x"))) for word in words] if words else list(default)


def add_measuring(parser: argparse.ArgumentParser, *, seconds: float = 0.3, warmup: float = 1.0, torch: bool = False,
                  graphs: bool = False) -> None:
  """The options that benchmarks share; `torch`: it is a peer where it is installed, `graphs`: `start` takes that."""
  if torch:
    parser.add_argument("--no-torch", dest="torch", action="store_false",
                        default=importlib.util.find_spec("torch") is not None)
  if graphs:
    parser.add_argument("--graphs", action="store_true", help="let XLA put a program's calls into a CUDA graph")
  parser.add_argument("--check-only", action="store_true")
  parser.add_argument("--rounds", type=int, default=6)
  parser.add_argument("--seconds", type=float, default=seconds, help="of one measurement")
  parser.add_argument("--warmup", type=float, default=warmup, help="seconds before the first round of a case")
  parser.add_argument("--json", metavar="PATH", help="write every round there")


def run_cases(cases: Sequence[tuple[dict[str, Any], Callable[[], dict[str, Any]]]], columns: Sequence[str],
              environment: dict[str, Any], path: str | None) -> int:
  """Measures case by case, printing and writing each row when it is there; the exit status.

  Args:
    cases: what a case is called, as columns, and the function that measures it; its row has a "status".
  """
  print(", ".join(f"{k} {v}" for k, v in environment.items()), flush=True)
  rows: list[dict[str, Any]] = []
  for labels, measure in cases:
    try:
      row = measure()
    except Exception:             # one case that fails must not cost the others their machine time
      traceback.print_exc()
      row = {**labels, "status": "FAILED"}
    rows.append(row)
    print(" ".join(f"{c}={cell(row[c])}" for c in columns if c in row), flush=True)
    write_json(path, environment, rows)
  print("\n" + table(rows, columns))
  return 0 if all(row["status"] == "ok" for row in rows) else 1


def write_json(path: str | None, environment: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
  """Writes everything that was measured, every round, to `path`; nothing where it is None."""
  if path is not None:
    pathlib.Path(path).write_text(json.dumps({"environment": environment, "results": list(results)}, indent=2) + "\n")
