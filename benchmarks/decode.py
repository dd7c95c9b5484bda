"""flash_decode against jax.nn.dot_product_attention (cuDNN), by bytes a second.

  python -m benchmarks.decode                               # bf16, one token, the cases below
  python -m benchmarks.decode --cases 32x16384x64/8x128 --tokens 2 --paged --json decode.json

A case is batch x keys x heads/kv_heads x head dimension. GB/s counts keys and values once, and what goes in and out.
Where the parts of a cache begin is computed once for all calls of a program, as a model does for its layers.
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
from benchmarks.attention import DTYPES, TOLERANCE, shape_of
from tiletrace.kernels import flash_decode, flash_decode_reference

CASES = ("1x65536x32/8x128", "16x8192x32/8x128", "64x8192x64/8x128", "128x2048x32/8x128", "32x4096x32/32x128")
PAGE = 128
COLUMNS = ("case", "cache", "GB/s", "us", "cuDNN", "spread", "error", "status")


def inputs(case: str, tokens: int, dtype: Any, paged: bool, seed: int) -> tuple[Any, ...]:
  """query, key, value, lengths, block_table or None."""
  b, s, n, kv, h = shape_of(case)
  keys = jax.random.split(jax.random.key(seed), 3)
  shape = (b * -(-s // PAGE), PAGE, kv, h) if paged else (b, s, kv, h)
  table = np.random.default_rng(seed).permutation(shape[0]).reshape(b, -1).astype(np.int32)
  return (*(jax.random.normal(key, x, dtype) for key, x in zip(keys, ((b, tokens, n, h), shape, shape), strict=True)),
          jnp.full(b, s, jnp.int32), jnp.asarray(table) if paged else None)


def decode(q, k, v, lengths, table):
  return flash_decode(q, k, v, lengths, block_table=table)


def cudnn(q, k, v, lengths, table):
  return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")


def with_first_lengths(sets: Sequence[Any]) -> list[jax.Array]:
  return [decode(q, k, v, sets[0][3], table) for q, k, v, _, table in sets]


def check(xs: Any) -> float:
  """Of the first and the last sequence, against f32."""
  q, k, v, lengths, table = xs
  jnp.full_like(q, jnp.nan).block_until_ready().delete()               # likely where the result will be
  got = jax.jit(decode)(*xs)
  error = 0.0
  for e in {0, q.shape[0] - 1}:
    some = (k, v, table[e:e + 1]) if table is not None else (k[e:e + 1], v[e:e + 1], None)
    want = jax.jit(flash_decode_reference)(q[e:e + 1].astype(jnp.float32), *some[:2], lengths[e:e + 1],
                                           block_table=some[2])
    error = max(error, harness.relative_error(got[e:e + 1], want))
  return error


def ready(peer: harness.Peer, sets: Sequence[Any]) -> harness.Peer:
  """The peer, once it has run."""
  jax.block_until_ready(peer(sets))
  return peer


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
  b, s, n, kv, h = shape_of(case)
  row: dict[str, Any] = {"case": case, "cache": "pages" if args.paged else "whole"}
  make: Any = functools.partial(inputs, case, args.tokens, DTYPES[args.dtype], args.paged)
  first = make(0)
  row["error"] = check(first)
  if not args.check_only:
    sets = [first, *(make(seed) for seed in (1, 2))]         # the caches are larger than L2
    peers: dict[str, harness.Peer] = {"tiletrace": jax.jit(with_first_lengths)}
    if not args.paged:
      harness.try_peer(peers, "cuDNN", lambda: ready(harness.over_sets(cudnn), sets))
    found, times = harness.compare(peers, sets, args)
    seconds = times["tiletrace"]
    row |= found | {"us": 1e6 * seconds, "GB/s": 4e-9 * b * h * (s * kv + args.tokens * n) / seconds}
  row["status"] = "ok" if row["error"] < TOLERANCE else "WRONG"        # NaN too
  return row


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--cases", nargs="+", default=CASES, metavar="BxSxN/KxH", help="default: " + " ".join(CASES))
  parser.add_argument("--tokens", type=int, default=1, help="queries of a sequence")
  parser.add_argument("--dtype", choices=DTYPES, default="bf16")
  parser.add_argument("--paged", action="store_true", help=f"caches in shuffled pages of {PAGE} keys")
  harness.add_measuring(parser)
  return parser.parse_args()


def main() -> int:
  args = arguments()
  environment = harness.start()
  cases = [({"case": case}, functools.partial(measure, case, args)) for case in args.cases]
  return harness.run_cases(cases, COLUMNS, environment, args.json)


if __name__ == "__main__":
  raise SystemExit(main())
