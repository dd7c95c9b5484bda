"""RMSNorm, with silu or a gate, layer norm and softmax against jit(jnp), torch.compile and a copy of the same bytes.

  python -m benchmarks.norms                                    # the shapes below, bf16
  python -m benchmarks.norms --ops rms_norm --shapes 4096x777 --dtypes bf16 f32 --json norms.json

GB/s counts what must be read and written once. The copy moves as many bytes, from one array to another, in the same
rounds; torch.compile takes part where torch is installed, replayed from a CUDA graph, and is compared with our kernel
in a CUDA graph. A small shape takes the host longer than the GPU: there "jnp" compares what the GPU takes.
"""
from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiletrace as tt
from benchmarks import harness
from benchmarks.gpu_time import gpu_seconds
from benchmarks.launch_graph import kernel_graph
from benchmarks.torch_graph import TorchGraph
from tiletrace import kernels
from tiletrace.kernels.layer_norm import layer_norm_call
from tiletrace.kernels.rms_norm import rms_norm_call
from tiletrace.kernels.softmax import softmax_call

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
TOLERANCE = {"bf16": 2e-2, "f16": 4e-3, "f32": 2e-5}
WIDE = ((16384, 8192), (65536, 4096), (8192, 16384), (32768, 1024))
NARROW = tuple((-(-(64 << 20) // (2 * n)), n) for n in (96, 160, 192, 256, 320, 384, 512, 640, 1000))
SMALL = ((16384, 320),)
COLUMNS = ("op", "shape", "dtype", "GB/s", "of copy", "floor", "jnp", "torch", "us", "GPU us", "spread", "error",
           "status")


@dataclasses.dataclass(frozen=True)
class Op:
  """What is measured.

  Attributes:
    ours, reference: functions of the inputs; the reference is what a JAX user writes.
    exact: of float64 numpy arrays.
    inputs: "x" and "gate" are [m, n], "gamma" and "beta" [n].
    floor: times the rate of the copy, on WIDE and NARROW shapes.
    peer: times the speed of every peer, on WIDE shapes; on SMALL ones, of jit(jnp).
    torch: a function of torch.nn.functional and the inputs.
    call: of the inputs: the call behind `ours`, and its operands.
  """
  ours: Callable[..., jax.Array]
  reference: Callable[..., jax.Array]
  exact: Callable[..., np.ndarray]
  inputs: tuple[str, ...]
  floor: tuple[float, float]
  peer: float
  torch: Callable[..., Any]
  call: Callable[..., tuple[tt.TileCall, tuple]]


def _scaled(d: np.ndarray, eps: float) -> np.ndarray:
  return d / np.sqrt((d * d).mean(-1, keepdims=True) + eps)


def _softmax(x: np.ndarray) -> np.ndarray:
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def _silu(x, gamma):
  return kernels.rms_norm(x, gamma, silu=True)


def _silu_reference(x, gamma):
  return kernels.rms_norm_reference(x, gamma, silu=True)


def _gated(x, gamma, gate):
  return kernels.rms_norm(x, gamma, gate=gate)


def _gated_reference(x, gamma, gate):
  return kernels.rms_norm_reference(x, gamma, gate=gate)


OPS = {
  "rms_norm": Op(
      kernels.rms_norm, kernels.rms_norm_reference, lambda x, gamma: _scaled(x, 1e-6) * gamma, ("x", "gamma"),
      (0.95, 0.88), 0.0, lambda F, x, gamma: F.rms_norm(x, x.shape[-1:], gamma, 1e-6),
      lambda x, gamma: (rms_norm_call(x.shape, x.dtype), (x, gamma, None, None))),
  "rms_norm_silu": Op(
      _silu, _silu_reference, lambda x, gamma: (y := _scaled(x, 1e-6) * gamma) / (1 + np.exp(-y)), ("x", "gamma"),
      (0.90, 0.88), 1.0,
      lambda F, x, gamma: F.silu(F.rms_norm(x.float(), x.shape[-1:], gamma.float(), 1e-6)).to(x.dtype),
      lambda x, gamma: (rms_norm_call(x.shape, x.dtype, silu=True), (x, gamma, None, None))),
  "rms_norm_gate": Op(
      _gated, _gated_reference, lambda x, gamma, gate: _scaled(x, 1e-6) * gamma * gate / (1 + np.exp(-gate)),
      ("x", "gamma", "gate"), (0.90, 0.88), 1.0,
      lambda F, x, gamma, gate: (F.rms_norm(x.float(), x.shape[-1:], gamma.float(), 1e-6)
                                 * F.silu(gate.float())).to(x.dtype),
      lambda x, gamma, gate: (rms_norm_call(x.shape, x.dtype, gate=True), (x, gamma, None, gate))),
  "softmax": Op(
      kernels.softmax, kernels.softmax_reference, _softmax, ("x",), (0.90, 0.88), 1.0, lambda F, x: F.softmax(x, -1),
      lambda x: (softmax_call(x.shape, x.dtype), (x, None))),
  "layer_norm": Op(
      kernels.layer_norm, kernels.layer_norm_reference,
      lambda x, gamma, beta: _scaled(x - x.mean(-1, keepdims=True), 1e-5) * gamma + beta, ("x", "gamma", "beta"),
      (0.90, 0.88), 0.0, lambda F, x, gamma, beta: F.layer_norm(x, x.shape[-1:], gamma, beta, 1e-5),
      lambda x, gamma, beta: (layer_norm_call(x.shape, x.dtype), (x, gamma, beta))),
}


def make_inputs(op: Op, m: int, n: int, dtype: Any, seed: int) -> tuple[jax.Array, ...]:
  """The op's inputs, then the array that the copy reads: half of the bytes that the op moves."""
  keys = jax.random.split(jax.random.key(seed), len(op.inputs))
  arrays = tuple(jax.random.normal(k, (m, n) if name in ("x", "gate") else (n,), dtype)
                 for k, name in zip(keys, op.inputs, strict=True))
  return *arrays, jnp.full(moved(op, m, n, dtype) // 4, seed + 1, jnp.uint16)


def moved(op: Op, m: int, n: int, dtype: Any) -> int:
  """Bytes read and written."""
  return np.dtype(dtype).itemsize * n * (m * (1 + sum(i in ("x", "gate") for i in op.inputs)) + len(op.inputs))


def check(op: Op, inputs: tuple[jax.Array, ...]) -> dict[str, Any]:
  """Every element against f32 on the GPU, a sample of rows against float64."""
  inputs = inputs[:-1]
  jnp.full_like(inputs[0], jnp.nan).block_until_ready().delete()       # likely where the result will be
  got = jax.jit(op.ours)(*inputs)
  rows = harness.sample_rows(inputs[0].shape[0])
  exact = op.exact(*(np.asarray(x[rows] if x.ndim == 2 else x).astype(np.float64) for x in inputs))
  wide = jax.jit(op.reference)(*(x.astype(jnp.float32) for x in inputs))
  return {"error": harness.relative_error(np.asarray(got[rows]), exact), "error_f32": harness.relative_error(got, wide)}


def torch_peer(op: Op, sets: Sequence[tuple[jax.Array, ...]]) -> TorchGraph:
  """torch.compile of an op over the same memory."""
  torch, functional = (importlib.import_module(name) for name in ("torch", "torch.nn.functional"))
  compiled = torch.compile(functools.partial(op.torch, functional), mode="max-autotune-no-cudagraphs", dynamic=False)
  return TorchGraph(compiled, [[torch.from_dlpack(x) for x in inputs[:-1]] for inputs in sets])


def graph_peer(op: Op, sets: Sequence[tuple[jax.Array, ...]]) -> harness.Peer:
  """Our kernel as torch's is measured: each set of inputs once in a CUDA graph."""
  call, operands = op.call(*sets[0][:-1])
  image = call.lower(*operands).compile().image
  return kernel_graph(image, [inputs[:-1] for inputs in sets], sets[0][0], repeats=1)[0]


def peers_of(op: Op, sets: Sequence[tuple[jax.Array, ...]], torch: bool) -> dict[str, harness.Peer]:
  peers: dict[str, harness.Peer] = {
    "tiletrace": harness.over_sets(lambda *inputs: op.ours(*inputs[:-1])),
    "copy": harness.over_sets(lambda *inputs: jnp.copy(inputs[-1])),
    "jnp": harness.over_sets(lambda *inputs: op.reference(*inputs[:-1])),
  }
  if torch:
    peers["graph"] = graph_peer(op, sets)
    harness.try_peer(peers, "torch", lambda: torch_peer(op, sets))
  return peers


def measure(name: str, m: int, n: int, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
  op = OPS[name]
  row: dict[str, Any] = {"op": name, "shape": f"{m}x{n}", "m": m, "n": n, "dtype": dtype}
  make = functools.partial(make_inputs, op, m, n, DTYPES[dtype])
  row |= check(op, make(0))
  if not args.check_only:
    sets = harness.rotating(make)
    peers = peers_of(op, sets, args.torch)
    found, seconds = harness.compare(peers, sets, args)
    found["of copy"] = found.pop("copy")
    if "torch" in found:
      pairs = zip(found["samples"]["torch"], found["samples"]["graph"], strict=True)
      found["torch"] = statistics.median(t / g for t, g in pairs)
    if (m, n) in SMALL:
      ours, reference = ((lambda *inputs, f=f: f(*inputs[:-1])) for f in (op.ours, op.reference))
      found["GPU us"], other = (1e6 * gpu_seconds(f, sets) for f in (ours, reference))
      found["jnp"] = other / found["GPU us"]
    nbytes = moved(op, m, n, DTYPES[dtype])
    row |= found | {"bytes": nbytes, "us": 1e6 * seconds["tiletrace"], "GB/s": 1e-9 * nbytes / seconds["tiletrace"],
                    "copy GB/s": 1e-9 * nbytes / seconds["copy"]}
  row["status"] = status(op, row)
  return row


def status(op: Op, row: dict[str, Any]) -> str:
  """Also puts the floor into the row."""
  if not all(row[e] < TOLERANCE[row["dtype"]] for e in ("error", "error_f32")):      # NaN too
    return "WRONG"
  shape = row["m"], row["n"]
  floor = op.floor[0] if shape in WIDE else op.floor[1] if shape in NARROW else None
  if floor is not None:
    row["floor"] = floor
  peers = [row[p] for p in ("jnp", "torch") if p in row] if shape in WIDE else []
  small = row.get("jnp", math.inf) if shape in SMALL and row["op"] == "rms_norm_silu" else math.inf
  slow = row.get("of copy", math.inf) < (floor or 0) or any(p < op.peer for p in peers) or small < 1.5
  return "SLOW" if slow else "ok"


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.norms", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--shapes", nargs="+", metavar="MxN",
                      help="default: " + " ".join(f"{m}x{n}" for m, n in (*WIDE, *NARROW, *SMALL)))
  parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
  parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
  harness.add_measuring(parser, seconds=0.2, warmup=0.5, torch=True, graphs=True)
  return parser.parse_args()


def main() -> int:
  args = arguments()
  environment = harness.start(graphs=args.graphs)
  cases = [({"op": op, "shape": f"{m}x{n}", "dtype": dtype}, functools.partial(measure, op, m, n, dtype, args))
           for dtype in args.dtypes for op in args.ops
           for m, n in harness.shapes_of(args.shapes, (*WIDE, *NARROW, *SMALL))]
  return harness.run_cases(cases, COLUMNS, environment, args.json)


if __name__ == "__main__":
  raise SystemExit(main())
