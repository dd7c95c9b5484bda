"""Says what this installation can do, and what to do about what it cannot.

  python -m tiletrace.doctor

prints one line for each finding: `ok`, `--` (missing, not needed here) or `!!` (broken), with the remedy below it. The
exit status is 1 if something is broken, else 0: kernels run on the CPU and, where jax has a GPU for them, there.
"""
from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import tiletrace as tt
from tiletrace.core import config
from tiletrace.core.errors import TileTraceError
from tiletrace.ffi import library
from tiletrace.lowering import assemble, cache
from tiletrace.lowering.target import SM_90A, Target, target_of

_PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc")
_M, _N, _K = 100, 72, 40     # tails in every dimension; rows of 16 bytes, as TMA wants them


@dataclasses.dataclass(frozen=True)
class Finding:
  """One line of the report.

  Attributes:
    mark: "ok", "--" (missing, and not needed here), "!!" (broken).
    remedy: what to do, or None.
  """
  mark: Literal["ok", "--", "!!"]
  subject: str
  text: str
  remedy: str | None = None

  def __str__(self) -> str:
    lines = self.text.splitlines() or [""]
    body = "\n".join([f"{self.mark} {self.subject:<10} {lines[0]}", *(f"{'':14}{line}" for line in lines[1:])])
    return body + (f"\n{'':14}-> {self.remedy}" if self.remedy else "")


def _matmul_kernel(a, b, c):
  """One tile through TMA, shared memory, wgmma and back."""
  a_s = tt.alloc_shared((128, 64), a.dtype)
  b_s = tt.alloc_shared((64, 128), b.dtype)
  acc = tt.alloc_fragment((128, 128), jnp.float32)
  acc[...] = 0
  tt.copy(a.at[tt.block(0, 128), tt.block(0, 64)], a_s)
  tt.copy(b.at[tt.block(0, 64), tt.block(0, 128)], b_s)
  tt.gemm(a_s, b_s, acc)
  c[tt.block(0, 128), tt.block(0, 128)] = acc[...].astype(c.dtype)


def _self_test() -> tt.TileCall:
  return tt.tile_call(_matmul_kernel, jax.ShapeDtypeStruct((_M, _N), jnp.float32), grid=1, name="tiletrace_self_test")


def _operands() -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(0)
  return tuple(rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((_M, _K), (_K, _N)))  # type: ignore


def check_versions() -> Iterator[Finding]:
  where = pathlib.Path(__file__).parent
  yield Finding("ok", "tiletrace", f"source {cache.package_digest()[:12]} in {where}")
  yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
  found = []
  for package in _PACKAGES:
    try:
      found.append(f"{package} {importlib.metadata.version(package)}")
    except importlib.metadata.PackageNotFoundError:
      continue
  yield Finding("ok", "packages", ", ".join(found))
  given = [f"{s.name}={os.environ[s.name]}" for s in config.SWITCHES if os.environ.get(s.name)]
  if given:
    yield Finding("ok", "switches", " ".join(given))


def gpus() -> list[Any]:
  """The NVIDIA GPUs that jax can use."""
  return [d for d in jax.devices() if d.platform == "gpu" and hasattr(d, "compute_capability")]


def _target(gpu: Any) -> Target | None:
  """What kernels are compiled for on a GPU."""
  major, minor = str(gpu.compute_capability).split(".")
  return target_of(10 * int(major) + int(minor))


def check_devices() -> Iterator[Finding]:
  try:
    devices = jax.devices()
  except RuntimeError as e:        # what jax raises where a backend does not start
    yield Finding("!!", "devices", f"jax cannot start: {e}", "JAX_PLATFORMS=cpu starts it without the GPU; for the GPU "
                  "install jax[cuda13] and a driver that knows CUDA 13")
    return
  yield Finding("ok", "devices", ", ".join(f"{d.platform}:{d.id} {d.device_kind}" for d in devices))
  for device in gpus():
    target = _target(device)
    kind = f"{device.device_kind} has compute capability {device.compute_capability}"
    if target is None:
      yield Finding("!!", "devices", kind, 'kernels run from 8.0 on; tile_call(..., backend="xla") runs anywhere')
    elif target is not SM_90A:
      yield Finding("ok", "devices", f"{kind}: kernels are compiled for {target.name}, without TMA and wgmma")
  if not gpus():
    yield Finding("--", "devices", "no NVIDIA GPU that jax can use: kernels run on the CPU, as jax ops",
                  "with a GPU: pip install 'tiletrace[cuda13]'")


def check_ptxas(needed: bool) -> Iterator[Finding]:
  try:
    yield Finding("ok", "ptxas", f"{assemble.ptxas_version()}, {assemble.find_ptxas()}")
    lowered = _self_test().lower(*_operands())
    cubin = assemble.assemble(lowered.as_text("ptx"), SM_90A.name)
    yield Finding("ok", "compile", f"{cubin.entry} for {SM_90A.name}: {cubin.registers} registers, ptxas took "
                                   f"{cubin.seconds:.2f} s")
  except TileTraceError as e:
    asked = config.read().ptxas is not None
    yield Finding("!!" if needed or asked else "--", "ptxas", e.message, e.hint or "correct TT_PTXAS, or unset it")


def check_launcher(needed: bool) -> Iterator[Finding]:
  try:
    library.load()
    yield Finding("ok", "launcher", f"{library.PATH}, attributes of version {library.SCHEMA}")
  except TileTraceError as e:
    yield Finding("!!" if needed else "--", "launcher", e.message, e.hint)


def check_cache() -> Iterator[Finding]:
  switches = config.read()
  if not switches.cache:
    yield Finding("--", "cache", "TT_CACHE=0: compiled kernels are kept in memory only")
    return
  try:
    os.makedirs(switches.cache_dir, exist_ok=True)
    with tempfile.TemporaryFile(dir=switches.cache_dir):
      files = [p for p in pathlib.Path(switches.cache_dir).rglob("*") if p.is_file()]
    yield Finding("ok", "cache", f"{len(files)} entries, {sum(p.stat().st_size for p in files) / 2**20:.1f} MiB in "
                                 f"{switches.cache_dir}")
  except OSError as e:
    yield Finding("!!", "cache", f"{switches.cache_dir} cannot be written: {e}",
                  "set TT_CACHE_DIR to a directory that can be written, or TT_CACHE=0")


def check_run(device: Any) -> Iterator[Finding]:
  a, b = _operands()
  want = a.astype(np.float64) @ b.astype(np.float64)
  try:
    with jax.default_device(device):
      got = np.asarray(jax.jit(_self_test())(a, b), np.float64)
  except (TileTraceError, jax.errors.JaxRuntimeError) as e:
    yield Finding("!!", "run", f"on {device}: {e}", "TT_DUMP=all@DIR writes every stage of the compilation into DIR")
    return
  error = np.abs(got - want).max()
  right = bool(error < 1e-3)         # f32 sums of 40 products: NaN is not below it either
  yield Finding("ok" if right else "!!", "run", f"on {device}: {_M} x {_N} x {_K} matmul is "
                f"{'right' if right else 'WRONG'}, greatest error {error:.1e}",
                None if right else "please report this, with the output of this program")


def examine() -> Iterator[Finding]:
  """Every finding, in the order of the report."""
  yield from check_versions()
  try:
    config.read()
  except TileTraceError as e:
    yield Finding("!!", "switches", e.message, e.hint)
    return
  started = list(check_devices())
  yield from started
  if started[0].mark == "!!":
    return
  able = [d for d in gpus() if _target(d) is not None]
  checks: list[Callable[[], Iterator[Finding]]] = [
      lambda: check_ptxas(bool(able)), lambda: check_launcher(bool(able)), check_cache]
  for check in checks:
    yield from check()
  for device in (*_cpus(), *able):
    yield from check_run(device)


def _cpus() -> list[Any]:
  """The first CPU; none where JAX_PLATFORMS leaves them out."""
  try:
    return jax.devices("cpu")[:1]
  except RuntimeError:
    return []


def main() -> int:
  """Prints the findings; 1 if something is broken."""
  broken = 0
  for finding in examine():
    print(finding, flush=True)
    broken += finding.mark == "!!"
  print(f"{broken} broken" if broken else "all is well")
  return 1 if broken else 0


if __name__ == "__main__":
  sys.exit(main())
