"""flash_attention against jax.nn.dot_product_attention (cuDNN) and torch's flash attention.

  python -m benchmarks.attention                           # bf16, the cases below, full and causal
  python -m benchmarks.attention --cases 2x2048x8x128 --masks causal --json attention.json

A case is batch x length x heads x head dimension, or batch x length x heads/kv_heads x head dimension. TFLOP/s counts
4 b n t s h, half of it where the mask is causal. "packed" puts the examples of the batch one after another.
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
from benchmarks.torch_graph import TorchGraph
from tiletrace.kernels import attention_reference, flash_attention, flash_attention_packed

CASES = ("4x4096x16x128", "1x16384x16x128", "4x4096x32x64", "4x4096x16/4x128")
MASKS = ("full", "causal")
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
FLOORS = {("4x4096x16x128", "full"): 1.05, ("4x4096x16x128", "causal"): 1.12, ("1x16384x16x128", "full"): 1.09,
          ("1x16384x16x128", "causal"): 1.15, ("4x4096x32x64", "full"): 1.02, ("4x4096x32x64", "causal"): 1.05}
TOLERANCE = 2e-2
COLUMNS = ("case", "mask", "layout", "tiletrace TFLOP/s", "cuDNN TFLOP/s", "cuDNN", "torch", "floor", "spread", "error",
           "status")


def shape_of(case: str) -> tuple[int, int, int, int, int]:
  """(batch, length, heads, heads of keys, head dimension)."""
  b, t, heads, h = case.split("x")
  n, _, kv = heads.partition("/")
  return int(b), int(t), int(n), int(kv or n), int(h)


def inputs(case: str, dtype: Any, seed: int) -> tuple[jax.Array, ...]:
  b, t, n, kv, h = shape_of(case)
  keys = jax.random.split(jax.random.key(seed), 3)
  return tuple(jax.random.normal(key, (b, t, heads, h), dtype) for key, heads in zip(keys, (n, kv, kv), strict=True))


def ours(q, k, v, *, causal, packed):
  if not packed:
    return flash_attention(q, k, v, is_causal=causal)
  b, t = q.shape[:2]
  starts = jnp.arange(b + 1, dtype=jnp.int32) * t
  flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
  return flash_attention_packed(*flat, starts, starts, max_query_length=t, is_causal=causal).reshape(q.shape)


def cudnn(q, k, v, *, causal):
  return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def torch_peer(sets: Sequence[tuple[jax.Array, ...]], causal: bool) -> TorchGraph:
  """torch's flash attention over the same memory."""
  torch, attention = importlib.import_module("torch"), importlib.import_module("torch.nn.attention")
  functional = importlib.import_module("torch.nn.functional")

  def flash(q, k, v):
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
      return functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal,
                                                     enable_gqa=q.shape[2] != k.shape[2])

  return TorchGraph(flash, [[torch.from_dlpack(x) for x in xs] for xs in sets])


def check(xs: tuple[jax.Array, ...], causal: bool, packed: bool) -> float:
  """Of the first example's first heads, all rows of the first and the last 512, against f32."""
  q, k, v = xs
  heads, group = (np.array([0, q.shape[2] - 1]), q.shape[2] // k.shape[2])
  jnp.full_like(q, jnp.nan).block_until_ready().delete()               # likely where the result will be
  got = jax.jit(functools.partial(ours, causal=causal, packed=packed))(*xs)
  error = 0.0
  for rows in (slice(0, 512), slice(max(0, q.shape[1] - 512), q.shape[1])):
    some = q[:1, rows][:, :, heads], *(x[:1][:, :, heads // group] for x in (k, v))
    want = jax.jit(functools.partial(attention_reference, is_causal=causal, query_offset=rows.start))(
        *(x.astype(jnp.float32) for x in some))
    error = max(error, harness.relative_error(got[:1, rows][:, :, heads], want))
  return error


def measure(case: str, mask: str, packed: bool, args: argparse.Namespace) -> dict[str, Any]:
  b, t, n, _, h = shape_of(case)
  causal = mask == "causal"
  row: dict[str, Any] = {"case": case, "mask": mask, "layout": "packed" if packed else "dense"}
  make = functools.partial(inputs, case, DTYPES[args.dtype])
  row["error"] = check(make(0), causal, packed)
  if not args.check_only:
    sets = harness.rotating(make, at_most=4)
    peers = {"tiletrace": harness.over_sets(functools.partial(ours, causal=causal, packed=packed)),
             "cuDNN": harness.over_sets(functools.partial(cudnn, causal=causal))}
    if args.torch:
      harness.try_peer(peers, "torch", lambda: torch_peer(sets, causal))
    row |= harness.compare(peers, sets, args, flops=4 * b * n * t * t * h / (2 if causal else 1))[0]
    floor = None if packed else FLOORS.get((case, mask))
    if floor is not None:
      row["floor"] = floor
  slow = row.get("cuDNN", 1.0) < row.get("floor", 0.0)
  row["status"] = "WRONG" if not row["error"] < TOLERANCE else "SLOW" if slow else "ok"        # NaN too
  return row


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--cases", nargs="+", default=CASES, metavar="BxTxNxH", help="default: " + " ".join(CASES))
  parser.add_argument("--masks", nargs="+", choices=MASKS, default=MASKS)
  parser.add_argument("--dtype", choices=DTYPES, default="bf16")
  parser.add_argument("--packed", action="store_true", help="also as sequences that lie one after another")
  harness.add_measuring(parser, torch=True)
  return parser.parse_args()


def main() -> int:
  args = arguments()
  environment = harness.start()
  cases = [({"case": case, "mask": mask, "layout": "packed" if packed else "dense"},
            functools.partial(measure, case, mask, packed, args))
           for case in args.cases for mask in args.masks for packed in ((False, True) if args.packed else (False,))]
  return harness.run_cases(cases, COLUMNS, environment, args.json)


if __name__ == "__main__":
  raise SystemExit(main())
