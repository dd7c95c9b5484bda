"""mla_decode in units of the same run's bf16 jnp.dot of 8192 x 8192 x 8192.

  python -m benchmarks.mla                                  # bf16, one token, 128 and 16 heads, the cases below
  python -m benchmarks.mla --cases 128x4096 --heads 64 --tokens 2 --paged --json mla.json

A case is batch x keys of each sequence. TFLOP/s counts 2 batch heads tokens keys (576 + 512), GB/s the cache once and
what goes in and out. Times include the kernel that joins parts; where the parts begin is computed once for all calls of
a program, as a model does for its layers.
"""
from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from tiletrace.kernels import mla_decode, mla_decode_reference
from tiletrace.kernels.mla_decode import MlaTiling, mla_decode_tiled

CASES = ((64, 8192), (128, 1024), (128, 2048), (128, 4096), (128, 8192))          # batch, keys
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
SCALE, PAGE, GEMM = 192**-0.5, 64, 8192
TOLERANCE = 2e-2
COLUMNS = ("case", "heads", "cache", "TFLOP/s", "gemm TFLOP/s", "of gemm", "GB/s", "us", "spread", "error", "status")

Inputs = tuple[jax.Array | None, ...]


def inputs(b: int, keys: int, heads: int, tokens: int, dtype: Any, paged: bool, ragged: bool, seed: int) -> Inputs:
  """query, cache, lengths, block_table or None."""
  rng = np.random.default_rng(seed)
  key_q, key_c = jax.random.split(jax.random.key(seed))
  shape = (b * -(-keys // PAGE), PAGE, 576) if paged else (b, keys, 576)
  table = rng.permutation(shape[0]).reshape(b, -1).astype(np.int32) if paged else None
  lengths = rng.integers(keys // 2, keys, b, endpoint=True) if ragged else np.full(b, keys)
  return (jax.random.normal(key_q, (b, tokens, heads, 576), dtype), jax.random.normal(key_c, shape, dtype),
          jnp.asarray(lengths, jnp.int32), None if table is None else jnp.asarray(table))


def decode(query: jax.Array, cache: jax.Array, lengths: jax.Array, table: jax.Array | None, *,
           tiling: MlaTiling | None) -> jax.Array:
  if tiling is not None:
    return mla_decode_tiled(query, cache, lengths, table, tiling, scale=SCALE)
  return mla_decode(query, cache, lengths, scale=SCALE, block_table=table)


def check(xs: Any, tiling: MlaTiling | None) -> float:
  """Of the first and the last sequence, against f32."""
  query, cache, lengths, table = xs
  jnp.full((*query.shape[:3], 512), jnp.nan, query.dtype).block_until_ready().delete()       # likely where it will be
  got = jax.jit(functools.partial(decode, tiling=tiling))(*xs)
  error = 0.0
  for e in {0, query.shape[0] - 1}:
    some = (cache, table[e:e + 1]) if table is not None else (cache[e:e + 1], None)
    want = jax.jit(functools.partial(mla_decode_reference, scale=SCALE))(
        query[e:e + 1].astype(jnp.float32), some[0], lengths[e:e + 1], block_table=some[1])
    error = max(error, harness.relative_error(got[e:e + 1], want))
  return error


def with_first_lengths(sets: Sequence[Any], *, tiling: MlaTiling | None) -> list[jax.Array]:
  return [decode(q, cache, sets[0][2], table, tiling=tiling) for q, cache, _, table in sets]


def gemm_peer(count: int) -> harness.Peer:
  """The yardstick: a product for each set."""
  keys = jax.random.split(jax.random.key(0), 2 * count)
  matrices = [jax.random.normal(key, (GEMM, GEMM), jnp.bfloat16) for key in keys]
  dots = jax.jit(lambda xs: [jnp.dot(a, b) for a, b in zip(xs[::2], xs[1::2], strict=True)])
  return lambda sets: dots(matrices)


def measure(b: int, keys: int, heads: int, args: argparse.Namespace) -> dict[str, Any]:
  row: dict[str, Any] = {"case": f"{b}x{keys}", "heads": heads, "cache": "pages" if args.paged else "whole"}
  make: Any = functools.partial(inputs, b, keys, heads, args.tokens, DTYPES[args.dtype], args.paged, args.ragged)
  first = make(0)
  tiling = MlaTiling(*args.tile) if args.tile else None
  row["error"] = check(first, tiling)
  if not args.check_only:
    sets = [first, *(make(seed) for seed in (1, 2))]         # the caches are larger than L2
    peers = {"tiletrace": jax.jit(functools.partial(with_first_lengths, tiling=tiling)), "gemm": gemm_peer(len(sets))}
    found, times = harness.compare(peers, sets, args)
    seconds, used = times["tiletrace"], int(jnp.sum(first[2]))
    flops, gemm = 2e-12 * heads * args.tokens * used * (576 + 512), 2e-12 * GEMM**3
    found["of gemm"] = found.pop("gemm") * flops / gemm
    row |= found | {"us": 1e6 * seconds, "TFLOP/s": flops / seconds, "gemm TFLOP/s": gemm / times["gemm"],
                    "GB/s": 2e-9 * (576 * used + b * args.tokens * heads * (576 + 512)) / seconds}
  row["status"] = "ok" if row["error"] < TOLERANCE else "WRONG"        # NaN too
  return row


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.mla", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--cases", nargs="+", metavar="BxKEYS", help="default: " + " ".join(f"{b}x{s}" for b, s in CASES))
  parser.add_argument("--heads", nargs="+", type=int, default=[128, 16])
  parser.add_argument("--tokens", type=int, default=1, help="queries of a sequence")
  parser.add_argument("--dtype", choices=DTYPES, default="bf16")
  parser.add_argument("--paged", action="store_true", help=f"caches in shuffled pages of {PAGE} keys")
  parser.add_argument("--ragged", action="store_true", help="sequences of between half and all of the keys")
  parser.add_argument("--tile", nargs=3, type=int, metavar=("BN", "CHUNKS", "STAGES"),
                      help="default: what the kernel takes")
  harness.add_measuring(parser)
  return parser.parse_args()


def main() -> int:
  args = arguments()
  environment = harness.start()
  cases = [({"case": f"{b}x{keys}", "heads": heads}, functools.partial(measure, b, keys, heads, args))
           for heads in args.heads for b, keys in harness.shapes_of(args.cases, CASES)]
  return harness.run_cases(cases, COLUMNS, environment, args.json)


if __name__ == "__main__":
  raise SystemExit(main())
