"""C = A @ B at shapes that no tile divides, against jnp.dot: rows aligned to 16 bytes, to 4, to 2.

  python -m benchmarks.matmul_tails
  python -m benchmarks.matmul_tails --shapes 4095x4093x4091 --forms nn nt tn tt --json tails.json

The kernel is the one of benchmarks/matmul.py. What the alignment of a row allows decides who copies: TMA (16 bytes), or
the threads of the producer warpgroup, by cp.async (4) or element by element (2).
"""
from __future__ import annotations

import argparse
import functools
from typing import Any

from benchmarks import harness, matmul

# M, N, K -> floor: times the speed of jnp.dot
FLOORS: dict[tuple[int, ...], float | None] = {
  (4104, 4104, 4104): 0.95, (4095, 4093, 4091): 0.5, (4095, 4094, 4090): None, (4096, 4096, 4091): None,
  (8191, 8191, 8191): None, (1000, 777, 333): None, (2049, 1023, 4095): None, (777, 1000, 64): None,
}
COLUMNS = ("shape", "form", "filled by", "tiletrace TFLOP/s", "jnp TFLOP/s", "speedup", "floor", "spread", "error",
           "status")


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.matmul_tails", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shapes", nargs="+", metavar="MxNxK",
                      help="default: " + " ".join("x".join(map(str, s)) for s in FLOORS))
  parser.add_argument("--forms", nargs="+", choices=["nn", "nt", "tn", "tt"], default=["nn"])
  parser.add_argument("--dtype", choices=matmul.DTYPES, default="bf16")
  harness.add_measuring(parser)
  matmul.add_tiling(parser)
  return parser.parse_args()


def measure(shape: tuple[int, ...], form: str, args: argparse.Namespace) -> dict[str, Any]:
  m, n, k = shape
  row = matmul.measure(m, n, k, args.dtype, form, False, True, args)
  copies = [v.removeprefix("copy:") for v in row["variants"] if v.startswith("copy:")]
  row["filled by"] = "+".join(dict.fromkeys(copies))
  floor = FLOORS.get(shape)
  if floor is not None:
    row["floor"] = floor
    if row["status"] == "ok" and row.get("speedup", floor) < floor:
      row["status"] = "SLOW"
  return row


def main() -> int:
  args = arguments()
  environment = harness.start()
  cases = [({"shape": "x".join(map(str, shape)), "form": form}, functools.partial(measure, shape, form, args))
           for form in args.forms for shape in harness.shapes_of(args.shapes, list(FLOORS))]
  return harness.run_cases(cases, COLUMNS, environment, args.json)


if __name__ == "__main__":
  raise SystemExit(main())
