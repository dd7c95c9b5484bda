"""Causal linear attention with a decay for each head, against chunks in jax.numpy and a copy of the same bytes.

  python -m benchmarks.linear_attention                            # the shapes below, bf16
  python -m benchmarks.linear_attention --shapes 2x4096x16x128x128 --json linear.json

GB/s counts q, k, v and y once. FLOPs are those of the chunks (64 tokens): each costs 2 · 64 · 64 · (dk + dv) for its
own tokens and 4 · 64 · dk · dv for the state. "jnp" is the same sum in chunks of 64, 128 and 256 tokens, by jit of
einsums and a scan over the chunks: the fastest of them. The copy moves as many bytes, from one array to another.
"""
from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from tiletrace.kernels import linear_attention

SHAPES = ((4, 4096, 16, 128, 128), (16, 4096, 16, 64, 64), (1, 32768, 16, 128, 128),                    # B S H DK DV
          (8, 2048, 32, 128, 256))
CHUNK = 64
CHUNKS = (64, 128, 256)
TOLERANCE = 2e-2
COLUMNS = ("shape", "us", "TFLOP/s", "GB/s", "of copy", "jnp", "spread", "error", "status")

Inputs = tuple[jax.Array, ...]


def inputs(b: int, s: int, h: int, dk: int, dv: int, seed: int) -> Inputs:
  """(q, k, v, decay), and the array that the copy reads: half of the bytes that the kernel moves."""
  keys = jax.random.split(jax.random.key(seed), 3)
  q, k, v = (jax.random.normal(key, (b, s, h, d), jnp.bfloat16) for key, d in zip(keys, (dk, dk, dv), strict=True))
  return q, k, v, 1 - 2.0 ** (-5 - jnp.arange(h, dtype=jnp.float32)), jnp.full(b * s * h * (dk + dv), seed, jnp.uint16)


def chunked(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, *, chunk: int,
            precision: str | None = None) -> jax.Array:
  """What a JAX user writes: products within chunks, and a scan that hands the state from one to the next."""
  b, s, h, dk = q.shape
  split = (x.reshape(b, s // chunk, chunk, h, -1).transpose(1, 0, 3, 2, 4) for x in (q, k, v))
  at = jnp.arange(chunk)
  ahead = at[:, None] - at[None, :]
  rate = jnp.log2(decay)[:, None, None]
  within = jnp.where(ahead >= 0, jnp.exp2(jnp.maximum(ahead, 0) * rate), 0)
  before, after = jnp.exp2((at + 1)[:, None] * rate), jnp.exp2((chunk - 1 - at)[:, None] * rate)

  def step(state: jax.Array, qkv: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    q, k, v = qkv
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    scores = (product("bhik,bhjk->bhij", q, k) * within).astype(q.dtype)
    out = product("bhij,bhjv->bhiv", scores, v) + before * product("bhik,bhkv->bhiv", q, state.astype(q.dtype))
    state = state * jnp.exp2(chunk * rate) + product("bhjk,bhjv->bhkv", (k * after).astype(k.dtype), v)
    return state, out.astype(q.dtype)

  out = jax.lax.scan(step, jnp.zeros((b, h, dk, v.shape[-1]), jnp.float32), tuple(split))[1]
  return out.transpose(1, 0, 3, 2, 4).reshape(v.shape)


def ours(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
  return linear_attention(q, k, v, decay=decay)


def recurrence(q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray) -> np.ndarray:
  """One example and head in float64."""
  state = np.zeros((k.shape[1], v.shape[1]))
  out = np.zeros(v.shape)
  for t in range(len(q)):
    state = decay * state + np.outer(k[t], v[t])
    out[t] = q[t] @ state
  return out


def check(operands: Inputs) -> dict[str, Any]:
  """Every element against chunks in f32 on the GPU, one head against its recurrence in float64."""
  q, k, v, decay = operands[:4]
  jnp.full_like(v, jnp.nan).block_until_ready().delete()               # likely where the result will be
  got = jax.jit(ours)(q, k, v, decay)
  exactly = functools.partial(chunked, chunk=CHUNK, precision="highest")
  wide = jax.jit(exactly)(*(x.astype(jnp.float32) for x in (q, k, v)), decay)
  head = tuple(np.asarray(x[-1, :, -1]).astype(np.float64) for x in (q, k, v))
  exact = recurrence(*head, float(decay[-1]))
  return {"error": harness.relative_error(np.asarray(got[-1, :, -1]), exact),
          "error_f32": harness.relative_error(got, wide)}


def measure(b: int, s: int, h: int, dk: int, dv: int, args: argparse.Namespace) -> dict[str, Any]:
  row: dict[str, Any] = {"shape": f"{b}x{s}x{h}x{dk}x{dv}"}
  make = jax.jit(functools.partial(inputs, b, s, h, dk, dv))
  row |= check(make(0))
  if not args.check_only:
    sets = harness.rotating(make)
    peers: dict[str, harness.Peer] = {"tiletrace": harness.over_sets(lambda *x: ours(*x[:4])),
                                      "copy": harness.over_sets(lambda *x: jnp.copy(x[-1]))}
    for chunk in (c for c in CHUNKS if s % c == 0):
      peers[f"jnp {chunk}"] = harness.over_sets(lambda *x, c=chunk: chunked(*x[:4], chunk=c))
    found, seconds = harness.compare(peers, sets, args)
    row |= found | {"jnp": min(x for name, x in found.items() if name.startswith("jnp")), "of copy": found.pop("copy")}
    taken, moved = seconds["tiletrace"], 4 * b * s * h * (dk + dv)
    flops = b * h * (s / CHUNK) * (2 * CHUNK * CHUNK * (dk + dv) + 4 * CHUNK * dk * dv)
    row |= {"us": 1e6 * taken, "GB/s": 1e-9 * moved / taken, "TFLOP/s": 1e-12 * flops / taken}
  row["status"] = "ok" if row["error"] < TOLERANCE and row["error_f32"] < TOLERANCE else "WRONG"      # NaN too
  return row


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.linear_attention", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shapes", nargs="+", metavar="BxSxHxDKxDV",
                      help="default: " + " ".join("x".join(map(str, s)) for s in SHAPES))
  harness.add_measuring(parser)
  return parser.parse_args()


def main() -> int:
  args = arguments()
  environment = harness.start()
  cases = [({"shape": "x".join(map(str, shape))}, functools.partial(measure, *shape, args))
           for shape in harness.shapes_of(args.shapes, SHAPES)]
  return harness.run_cases(cases, COLUMNS, environment, args.json)


if __name__ == "__main__":
  raise SystemExit(main())
